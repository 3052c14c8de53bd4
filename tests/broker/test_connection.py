"""The life of a connection: handshake, heartbeats, hard errors, hostile bytes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import commands, frame, header

from reliablepub.testing.connection import Connection, Ending
from reliablepub.testing.node import Node
from reliablepub.testing.options import NodeOptions
from tests.broker.sans_io import CAPABILITIES, Client, encode_publish, node_with_queue

if TYPE_CHECKING:
    from pamqp.base import Frame

HEADER = b"AMQP\x00\x00\x09\x01"


def start_ok(mechanism: str, response: str) -> Frame:
    return commands.Connection.StartOk({"capabilities": {**CAPABILITIES}}, mechanism, response)


def raw_frame(kind: int, channel: int, payload: bytes, end: bytes = b"\xce") -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + end


def closed(client: Client) -> tuple[int | None, str | None, int | None, int | None]:
    close = client.only(commands.Connection.Close)
    return close.reply_code, close.reply_text, close.class_id, close.method_id


# -------------------------------------------------------------------------------- handshake


def test_the_server_announces_what_it_can(node: Node) -> None:
    client = Client(node)
    client.write(HEADER)
    start = client.only(commands.Connection.Start)
    capabilities = start.server_properties["capabilities"]
    assert isinstance(capabilities, dict)
    assert capabilities["publisher_confirms"] is True
    assert capabilities["connection.blocked"] is True
    assert start.mechanisms == "PLAIN AMQPLAIN"


@pytest.mark.parametrize(
    ("mechanism", "response"),
    [
        ("PLAIN", "\0guest\0guest"),
        ("AMQPLAIN", "\x05LOGINS\0\0\0\x05guest\x08PASSWORDS\0\0\0\x05guest"),
    ],
)
def test_login(node: Node, mechanism: str, response: str) -> None:
    client = Client(node)
    client.write(HEADER)
    client.send(start_ok(mechanism, response), 0)
    tune = client.only(commands.Connection.Tune)
    assert (tune.channel_max, tune.frame_max, tune.heartbeat) == (2047, 131072, 60)
    client.send(commands.Connection.TuneOk(10, 8192, 5), 0)
    client.send(commands.Connection.Open("/"), 0)
    client.only(commands.Connection.OpenOk)
    assert client.connection.is_open
    assert client.connection.user == "guest"
    assert client.connection.frame_max == 8192


@pytest.mark.parametrize("response", ["\0guest\0wrong", "\0nobody\0guest"])
def test_a_wrong_login_is_refused(node: Node, response: str) -> None:
    client = Client(node)
    client.write(HEADER)
    client.send(start_ok("PLAIN", response), 0)
    code, text, *ids = closed(client)
    assert code == 403
    assert text == (
        "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN. "
        "For details see the broker logfile."
    )
    assert ids == [0, 0]


def test_a_wrong_login_without_the_capability_just_ends(node: Node) -> None:
    client = Client(node)
    client.write(HEADER)
    client.send(commands.Connection.StartOk({}, "PLAIN", "\0guest\0wrong"), 0)
    assert client.names() == ["Connection.Start"]
    assert client.connection.ending is Ending.FLUSH


@pytest.mark.parametrize(
    ("mechanism", "response"), [("EXTERNAL", ""), ("PLAIN", "guest"), ("AMQPLAIN", "\x05LOG")]
)
def test_a_login_that_makes_no_sense_is_closed(node: Node, mechanism: str, response: str) -> None:
    client = Client(node)
    client.write(HEADER)
    client.send(start_ok(mechanism, response), 0)
    assert client.names() == ["Connection.Start"]  # RabbitMQ says nothing either
    assert client.connection.ending is Ending.FLUSH


def test_an_unknown_virtual_host(node: Node) -> None:
    client = Client(node)
    client.write(HEADER)
    client.send(start_ok("PLAIN", "\0guest\0guest"), 0)
    client.send(commands.Connection.TuneOk(2047, 131072, 0), 0)
    client.send(commands.Connection.Open("nope"), 0)
    assert closed(client) == (530, "NOT_ALLOWED - vhost nope not found", 10, 40)


@pytest.mark.parametrize(
    ("channel_max", "frame_max"),
    [(2047, 200_000), (2047, 1024), (3000, 131_072), (0, 131_072), (2047, 0)],
)
def test_negotiation_has_limits(node: Node, channel_max: int, frame_max: int) -> None:
    client = Client(node)
    client.write(HEADER)
    client.send(start_ok("PLAIN", "\0guest\0guest"), 0)
    client.send(commands.Connection.TuneOk(channel_max, frame_max, 0), 0)
    assert client.names() == ["Connection.Start", "Connection.Tune"]  # RabbitMQ says nothing either
    assert client.connection.ending is Ending.FLUSH


def test_a_wrong_protocol_gets_the_right_one_and_the_end(node: Node) -> None:
    connection = Connection(node, 1)
    connection.handle_data(b"GET / HTTP/1.1\r\n\r\n")
    assert connection.poll_transmit() == HEADER
    assert connection.ending is Ending.FLUSH


def test_a_handshake_that_stalls_is_ended(node: Node) -> None:
    client = Client(node)
    client.write(HEADER)
    assert client.connection.deadline == node.now + 10
    client.wait(9.9)
    assert client.connection.ending is None
    client.wait(0.2)
    assert client.connection.ending is Ending.FIN


@pytest.mark.parametrize(
    ("method", "channel"),
    [
        (commands.Connection.Open("/"), 0),
        (commands.Connection.Close(200, "", 0, 0), 0),
        (commands.Channel.Open(), 1),
    ],
)
def test_a_stranger_out_of_turn_is_not_told_why(node: Node, method: Frame, channel: int) -> None:
    client = Client(node)
    client.write(HEADER)
    client.send(method, channel)
    assert client.names() == ["Connection.Start"]
    assert client.connection.ending is Ending.FLUSH


@pytest.mark.parametrize(
    ("method", "channel", "expected"),
    [
        (
            commands.Connection.Close(200, "", 0, 0),
            0,
            (504, "CHANNEL_ERROR - unexpected method in connection state opening", 10, 50),
        ),
        (
            commands.Channel.Open(),
            1,
            (505, "UNEXPECTED_FRAME - type 1, all octets = <<0,20,0,10,1,48>>", 0, 0),
        ),
    ],
)
def test_out_of_turn_before_open(
    node: Node, method: Frame, channel: int, expected: tuple[int, str, int, int]
) -> None:
    client = Client(node)
    client.write(HEADER)
    client.send(start_ok("PLAIN", "\0guest\0guest"), 0)
    client.send(commands.Connection.TuneOk(2047, 131072, 0), 0)
    client.send(method, channel)
    assert closed(client) == expected


# -------------------------------------------------------------------------------- running


def test_heartbeats_both_ways(node: Node) -> None:
    client = Client(node).open(heartbeat=10)
    client.wait(5.0)
    assert client.names() == ["Heartbeat"]
    client.write(b"\x08\x00\x00\x00\x00\x00\x00\xce")
    client.wait(15.0)
    assert client.connection.ending is None
    client.wait(5.1)
    assert client.connection.ending is Ending.FIN


def test_a_blocked_client_is_not_missed(node: Node) -> None:
    client = Client(node).open(heartbeat=10)
    node.block("low on memory")
    client.publish()
    for _ in range(10):
        client.wait(5.0)
    assert client.connection.ending is None
    node.unblock()
    client.wait(0.01)
    assert client.confirms() == ["ack 1"]


def test_close_by_the_client(client: Client) -> None:
    client.call(commands.Connection.Close(200, "bye", 0, 0), commands.Connection.CloseOk, 0)
    assert client.connection.ending is Ending.FLUSH


def test_close_without_close_ok_ends_after_a_while(node: Node, client: Client) -> None:
    client.publish(immediate=True)
    assert closed(client) == (540, "NOT_IMPLEMENTED - immediate=true", 60, 40)
    client.publish()
    client.send(commands.Queue.Declare(queue="late"))
    assert client.names() == []
    assert "late" not in node.vhost.queues
    client.wait(5.1)
    assert client.connection.ending is Ending.FIN


def test_channel_max_is_a_count() -> None:
    client = Client(Node(NodeOptions(channel_max=2))).open(channels=0)
    client.send(commands.Channel.Open(), 7)
    client.send(commands.Channel.Open(), 9)
    client.send(commands.Channel.Open(), 1)
    code, text, *_ = closed(client)
    assert code == 530
    assert "number of channels opened (2) has reached the negotiated channel_max (2)" in str(text)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame.marshal(commands.Confirm.Select(), 5), 504),  # no such channel
        (frame.marshal(commands.Channel.Open(), 1), 504),  # open already
        (frame.marshal(header.ContentHeader(0, 1), 1), 505),
        (raw_frame(3, 1, b"body"), 505),
        (encode_publish()[:-9] + frame.marshal(commands.Confirm.Select(), 1), 505),
        (raw_frame(1, 1, b"\x00\x3c\x00\x28" + b"\x00\x00\x01x"), 501),
        (raw_frame(1, 1, b"\x00"), 501),
        (raw_frame(1, 0, b"\x00\x0a\x00\x0a"), 501),
        (raw_frame(1, 1, b"\x00\x3c\x00\x50" + bytes(9), b"\x00"), 501),
        (raw_frame(3, 1, bytes(131_073)), 501),
        (raw_frame(7, 1, b"x"), 501),
        (raw_frame(8, 0, b"x"), 501),
        (raw_frame(2, 0, b"x"), 501),
        (frame.marshal(commands.Channel.Flow(active=False), 1), 540),
        (frame.marshal(commands.Basic.Qos(prefetch_size=1), 1), 540),
        (frame.marshal(commands.Basic.CancelOk("x"), 1), 503),
    ],
)
def test_hard_errors_close_the_connection(client: Client, data: bytes, code: int) -> None:
    client.write(data)
    assert closed(client)[0] == code
    client.send(commands.Connection.CloseOk(), 0)
    assert client.connection.ending is Ending.FLUSH


def test_frames_are_small_before_tune(node: Node) -> None:
    client = Client(node)
    client.write(HEADER)
    client.write(struct.pack(">BHI", 1, 0, 4097))
    assert client.names() == ["Connection.Start"]
    assert client.connection.ending is Ending.FLUSH


@pytest.mark.parametrize("properties", [b"\x10\x00\x02left over", b"\x20\x00\x00\x00"])
def test_malformed_properties_are_an_internal_error(client: Client, properties: bytes) -> None:
    client.send(commands.Basic.Publish(routing_key="q"))
    client.write(raw_frame(2, 1, struct.pack(">HHQ", 60, 0, 0) + properties))
    assert closed(client) == (541, "INTERNAL_ERROR", 0, 0)


@pytest.mark.parametrize(
    ("data", "text", "ids"),
    [
        (raw_frame(7, 1, b"x"), 'type 7, all octets = <<"x">>: unknown_frame', (0, 0)),
        (raw_frame(8, 0, b"\x00\x01"), "type 8, all octets = <<0,1>>: unknown_frame", (0, 0)),
        (
            raw_frame(2, 0, b"x" * 17),
            f'type 2, first 16 octets = <<"{"x" * 16}">>: unknown_frame',
            (0, 0),
        ),
        (
            raw_frame(1, 1, b"\x00\x3c\x00\x28\x00\x00\x01x"),
            "cannot decode <<0,0,1,120>>",
            (60, 40),
        ),
    ],
)
def test_frame_errors_show_what_was_sent(
    client: Client, data: bytes, text: str, ids: tuple[int, int]
) -> None:
    client.write(data)
    assert closed(client) == (501, f"FRAME_ERROR - {text}", *ids)


def test_a_method_of_the_handshake_comes_too_late(client: Client) -> None:
    client.send(commands.Connection.TuneOk(0, 0, 0), 0)
    assert closed(client) == (
        504,
        "CHANNEL_ERROR - unexpected method in connection state running",
        10,
        31,
    )


def test_a_body_that_is_declared_too_large_is_not_awaited() -> None:
    node = node_with_queue(NodeOptions(max_message_size=1000))
    client = Client(node).open()
    declared = frame.marshal(header.ContentHeader(0, 2**63), 1)
    client.write(frame.marshal(commands.Basic.Publish(routing_key="q"), 1) + declared)
    close = client.only(commands.Channel.Close)
    assert close.reply_code == 406
    assert close.reply_text == (
        "PRECONDITION_FAILED - message size 9223372036854775808 "
        "is larger than configured max size 1000"
    )


def nested_table(depth: int) -> bytes:
    table = b""
    for _ in range(depth):
        table = b"\x01a" + b"F" + struct.pack(">I", len(table)) + table
    return struct.pack(">I", len(table)) + table


@pytest.mark.parametrize(("depth", "is_closed"), [(30, False), (100, True), (9000, True)])
def test_tables_nest_only_so_deep(client: Client, depth: int, is_closed: bool) -> None:  # noqa: FBT001
    payload = b"\x00\x32\x00\x0a\x00\x00\x04deep\x00" + nested_table(depth)
    client.write(raw_frame(1, 1, payload))
    assert bool(client.of(commands.Connection.Close)) is is_closed


def test_one_byte_at_a_time(node: Node) -> None:
    client = Client(node).open()
    for byte in encode_publish(content=b"slow"):
        client.write(bytes([byte]))
    client.wait(0.01)
    assert client.confirms() == ["ack 1"]


PIECES = st.one_of(
    st.binary(max_size=64),
    st.builds(
        raw_frame,
        st.sampled_from([1, 2, 3, 8]) | st.integers(0, 255),
        st.integers(0, 3),
        st.binary(max_size=64)
        | st.builds(
            lambda index, rest: struct.pack(">I", index) + rest,
            st.sampled_from(sorted(commands.INDEX_MAPPING)),
            st.binary(max_size=64),
        ),
    ),
    st.just(encode_publish()),
    st.just(encode_publish(exchange="nope")),
)


@settings(max_examples=300, deadline=None)
@given(opened=st.booleans(), pieces=st.lists(PIECES, max_size=8), step=st.integers(1, 200))
def test_any_bytes_end_in_an_answer_or_a_clean_close(
    opened: bool,  # noqa: FBT001
    pieces: list[bytes],
    step: int,
) -> None:
    node = node_with_queue()
    client = Client(node)
    if opened:
        client.open(channels=2)
    else:
        client.write(HEADER)
    data = b"".join(pieces)
    for at in range(0, len(data), step):
        client.write(data[at : at + step])
    client.wait(100.0)  # whatever is half-open or half-said is over by now, or running
    assert client.connection.ending is not None or client.connection.is_open
    client.connection.handle_lost()
    assert not node.connections
    assert all(not queue.consumers for queue in node.vhost.queues.values())
