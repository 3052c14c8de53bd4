"""The life of a connection: handshake, heartbeats, hard errors, hostile bytes."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import commands
from pamqp.base import Frame

from reliablepub.testing.connection import OUTPUT_MAX_BYTES, Ending
from reliablepub.testing.node import Node
from tests.broker.sans_io import CAPABILITIES, Client, encode_publish, node_with_queue

HEADER = b"AMQP\x00\x00\x09\x01"


def start_ok(mechanism: str, response: str) -> Frame:
    return commands.Connection.StartOk({"capabilities": {**CAPABILITIES}}, mechanism, response)


def raw_frame(kind: int, channel: int, payload: bytes, end: bytes = b"\xce") -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + end


def closed(client: Client) -> tuple[int | None, str | None, int | None, int | None]:
    close = client.only(commands.Connection.Close)
    return close.reply_code, close.reply_text, close.class_id, close.method_id


# -------------------------------------------------------------------------------- handshake


def test_a_handshake_that_stalls_is_ended(node: Node) -> None:
    client = Client(node)
    assert client.write(HEADER).connection.deadline == node.now + 10
    assert client.wait(9.9).connection.ending is None
    assert client.wait(0.2).connection.ending is Ending.FIN


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
    assert client.wait(5.0).names() == ["Heartbeat"]
    assert client.write(b"\x08\x00\x00\x00\x00\x00\x00\xce").wait(15.0).connection.ending is None
    assert client.wait(5.1).connection.ending is Ending.FIN


def test_a_blocked_client_is_not_missed(node: Node) -> None:
    client = Client(node).open(heartbeat=10)
    node.block("low on memory")
    client.publish()
    for _ in range(10):
        client.wait(5.0)
    assert client.connection.ending is None
    node.unblock()
    assert client.wait(0.01).confirms() == ["ack 1"]


def test_a_client_that_does_not_read_is_not_missed(node: Node) -> None:
    client = Client(node).open(heartbeat=10)
    client.connection.unsent_bytes = OUTPUT_MAX_BYTES + 1
    for _ in range(10):
        client.wait(5.0)
    assert client.connection.ending is None
    client.connection.unsent_bytes = 0
    client.connection.handle_drained()
    assert client.wait(19.9).connection.ending is None
    assert client.wait(0.2).connection.ending is Ending.FIN


def test_close_without_close_ok_ends_after_a_while(node: Node, client: Client) -> None:
    client.publish(immediate=True)
    assert closed(client) == (540, "NOT_IMPLEMENTED - immediate=true", 60, 40)
    assert client.publish().send(commands.Queue.Declare(queue="late")).names() == []
    assert "late" not in node.vhost.queues
    assert client.wait(5.1).connection.ending is Ending.FIN


def test_frames_are_small_before_tune(node: Node) -> None:
    client = Client(node)
    client.write(HEADER)
    assert client.write(struct.pack(">BHI", 1, 0, 4097)).names() == ["Connection.Start"]
    assert client.connection.ending is Ending.FLUSH


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
    assert client.wait(0.01).confirms() == ["ack 1"]


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
