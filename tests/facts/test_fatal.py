"""What ends the whole connection: hard errors, frames that are none, silence."""

import struct
import time

import pytest
from pamqp import commands, frame, header
from pamqp.base import Frame

from tests.facts.conftest import Connect
from tests.facts.raw_client import END, PERSISTENT, PROTOCOL_HEADER, Properties, RawClient
from tests.facts.site import Site

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8


def test_immediate(client: RawClient, queue: str) -> None:
    client.publish(queue, immediate=True)
    assert client.last_words() == "connection.close 540 NOT_IMPLEMENTED - immediate=true (60, 40)"


UNKNOWN = "503 COMMAND_INVALID - unimplemented method"
OUT_OF_TURN = "504 CHANNEL_ERROR - unexpected method in connection state running"
METHODS: list[tuple[Frame, int, str]] = [
    (commands.Basic.Qos(prefetch_size=1), 1, "540 NOT_IMPLEMENTED - prefetch_size!=0 (1)"),
    (commands.Basic.Recover(requeue=False), 1, "540 NOT_IMPLEMENTED - requeue=false"),
    (commands.Channel.Flow(active=False), 1, "540 NOT_IMPLEMENTED - active=false"),
    (commands.Channel.Open(), 1, "504 CHANNEL_ERROR - second 'channel.open' seen"),
    (commands.Basic.GetEmpty(), 1, UNKNOWN),
    (commands.Queue.DeclareOk("q", 0, 0), 1, UNKNOWN),
    (commands.Connection.Close(200, "", 0, 0), 1, UNKNOWN),
    (commands.Connection.Open("/"), 0, OUT_OF_TURN),
    (commands.Channel.Open(), 0, OUT_OF_TURN),
]


@pytest.mark.parametrize(
    ("method", "channel", "text"), METHODS, ids=lambda one: getattr(one, "name", None)
)
def test_methods(client: RawClient, method: Frame, channel: int, text: str) -> None:
    client.send(method, channel)
    ids = f"({method.index >> 16}, {method.index & 0xFFFF})"
    assert client.last_words() == f"connection.close {text} {ids}"


def test_a_channel_that_is_not_open(client: RawClient, queue: str) -> None:
    client.publish(queue, channel=7)
    assert client.told_to_the_end() == [
        "connection.close 504 CHANNEL_ERROR - expected 'channel.open' (60, 40)",
        END,
    ]


def test_a_publish_behind_our_close_ok(client: RawClient, queue: str) -> None:
    client.publish("key", exchange="nowhere").hear_only(commands.Channel.Close)
    client.send(commands.Channel.CloseOk())
    client.publish(queue)
    assert client.told_to_the_end() == [
        "connection.close 504 CHANNEL_ERROR - expected 'channel.open' (60, 40)",
        END,
    ]


def test_more_channels_than_agreed_whatever_their_numbers(connect: Connect) -> None:
    client = connect().opened(channel_max=2)
    client.open_channel(2000)
    client.send(commands.Channel.Open(), 5)
    text = "number of channels opened (2) has reached the negotiated channel_max (2)"
    assert client.last_words() == f"connection.close 530 NOT_ALLOWED - {text} (0, 0)"


@pytest.mark.parametrize("kind", [METHOD, HEADER, BODY])
def test_a_frame_larger_than_agreed(connect: Connect, kind: int) -> None:
    client = connect().opened(frame_max=8192)
    client.write_frame(kind, 1, bytes(8193))
    text = f"FRAME_ERROR - type {kind}, all octets = <<>>: {{frame_too_large,8193,8184}}"
    assert client.told() == [f"connection.close 501 {text} (0, 0)"]


def test_a_header_that_does_not_fit_a_frame(client: RawClient, queue: str) -> None:
    client.publish(queue, properties=Properties(headers={"h": "a" * 131_000}))
    assert client.told() == ["basic.ack 1"]
    client.publish(queue, properties=Properties(headers={"h": "a" * 140_000}))
    (line,) = client.told()
    assert line.startswith("connection.close 501 FRAME_ERROR - type 2, all octets = <<>>: {frame_t")


def test_a_frame_with_a_wrong_end(client: RawClient) -> None:
    client.write_frame(METHOD, 1, b"\0\x3c\0\x28", end=b"\0")
    text = "FRAME_ERROR - type 1, all octets = <<0,60,0,40>>: {invalid_frame_end_marker,0}"
    assert client.told() == [f"connection.close 501 {text} (0, 0)"]


X_16 = "x" * 16
ZEROS = ",".join("0" * 14)
FRAMES = [
    (9, 1, b"abc", '501 FRAME_ERROR - type 9, all octets = <<"abc">>: unknown_frame'),
    (9, 1, b"x" * 17, f'501 FRAME_ERROR - type 9, first 16 octets = <<"{X_16}">>: unknown_frame'),
    (HEARTBEAT, 1, b"", "505 UNEXPECTED_FRAME - type 8, all octets = <<>>"),
    (HEARTBEAT, 0, b"a", '501 FRAME_ERROR - type 8, all octets = <<"a">>: unknown_frame'),
    (HEARTBEAT, 0, b"\0\1", "501 FRAME_ERROR - type 8, all octets = <<0,1>>: unknown_frame"),
    (HEADER, 0, b"abc", '501 FRAME_ERROR - type 2, all octets = <<"abc">>: unknown_frame'),
    (METHOD, 1, b"ab", '501 FRAME_ERROR - type 1, all octets = <<"ab">>: unknown_frame'),
    (METHOD, 0, b"ab", '501 FRAME_ERROR - type 1, all octets = <<"ab">>: unknown_frame'),
    (HEADER, 1, b"abc", '501 FRAME_ERROR - type 2, all octets = <<"abc">>: unknown_frame'),
    (HEADER, 0, bytes(14), f"505 UNEXPECTED_FRAME - type 2, all octets = <<{ZEROS}>>"),
    (BODY, 0, b"abc", '505 UNEXPECTED_FRAME - type 3, all octets = <<"abc">>'),
]


@pytest.mark.parametrize(("kind", "channel", "payload", "text"), FRAMES)
def test_frames_that_are_none(
    client: RawClient, kind: int, channel: int, payload: bytes, text: str
) -> None:
    client.write_frame(kind, channel, payload)
    assert client.last_words() == f"connection.close {text} (0, 0)"


@pytest.mark.parametrize("ids", [(60, 999), (61, 1)])
@pytest.mark.parametrize("channel", [0, 1])
def test_a_method_that_does_not_exist(
    client: RawClient, channel: int, ids: tuple[int, int]
) -> None:
    assert client.write_frame(METHOD, channel, struct.pack(">HH", *ids)).told_to_the_end() == [END]


@pytest.mark.parametrize(
    ("ids", "arguments", "shown"),
    [((60, 40), b"\x09abc", "9,97,98,99"), ((50, 10), b"\x01\xff", "1,255")],
    ids=["a name", "a name that is not UTF-8"],
)
def test_arguments_that_are_cut_off(
    client: RawClient, ids: tuple[int, int], arguments: bytes, shown: str
) -> None:
    client.write_frame(METHOD, 1, struct.pack(">HHH", *ids, 0) + arguments)
    text = f"FRAME_ERROR - cannot decode <<0,0,{shown}>>"
    assert client.last_words() == f"connection.close 501 {text} {ids}"


@pytest.mark.parametrize("entry", [b"az", b"aI\x00", b"af\x7f\xc0\x00\x00", b"aS\x00\x00\x00\x09"])
def test_arguments_that_are_no_table(client: RawClient, entry: bytes) -> None:
    """The bytes of the table are there, but they are none: no word."""
    method = commands.Queue.Declare(queue="q")
    payload = method.index.to_bytes(4, "big") + method.marshal()[:-4]
    client.write_frame(METHOD, 1, payload + struct.pack(">IB", len(entry) + 1, 1) + entry)
    assert client.told() == [END]


NO_HEADER = "expected content header for class 60, got "
NO_BODY = "expected content body, got non content body frame instead"
QOS = frame.marshal(commands.Basic.Qos(), 1)
OF_QUEUES = struct.pack(">BHIHHQH", HEADER, 1, 14, 50, 0, 1, 0) + b"\xce"
NOT_DUE = {
    "a method": (QOS, f"{NO_HEADER}non content header frame instead"),
    "no body": (frame.marshal(header.ContentHeader(0, 5, PERSISTENT), 1) + QOS, NO_BODY),
    "another class": (OF_QUEUES, f"{NO_HEADER}one for class 50 instead"),
}


@pytest.mark.parametrize("what", NOT_DUE)
def test_what_does_not_belong_to_a_publish(client: RawClient, queue: str, what: str) -> None:
    sent, text = NOT_DUE[what]
    client.send(commands.Basic.Publish(routing_key=queue)).write(sent)
    assert client.last_words() == f"connection.close 505 UNEXPECTED_FRAME - {text} (60, 40)"


@pytest.mark.parametrize(
    ("kind", "payload"), [(BODY, b"x"), (HEADER, struct.pack(">HHQH", 60, 0, 1, 0))]
)
def test_content_where_a_method_is_due(client: RawClient, kind: int, payload: bytes) -> None:
    client.write_frame(kind, 1, payload)
    text = "expected method frame, got non method frame instead"
    assert client.last_words() == f"connection.close 505 UNEXPECTED_FRAME - {text} (0, 0)"


@pytest.mark.parametrize("flags", [1, 2])
def test_property_flags_that_basic_does_not_have(client: RawClient, queue: str, flags: int) -> None:
    client.send(commands.Basic.Publish(routing_key=queue))
    client.write_frame(HEADER, 1, struct.pack(">HHQH", 60, 0, 0, flags))
    assert client.told() == ["basic.ack 1"]


@pytest.mark.parametrize(("flags", "data"), [(0x8000, b"\x09abc"), (0, b"left over")])
def test_properties_that_are_not_what_their_flags_say(
    client: RawClient, queue: str, flags: int, data: bytes
) -> None:
    client.send(commands.Basic.Publish(routing_key=queue))
    client.write_frame(HEADER, 1, struct.pack(">HHQH", 60, 0, 0, flags) + data)
    assert client.last_words() == "connection.close 541 INTERNAL_ERROR (0, 0)"


def test_a_body_longer_than_declared_stalls_its_channel_without_a_word(
    site: Site, connect: Connect, queue: str
) -> None:
    client = connect().opened(channels=2)
    client.send(commands.Basic.Publish(routing_key=queue))
    client.write(frame.marshal(header.ContentHeader(0, 3, PERSISTENT), 1))
    client.write(client.encode_body(b"four"))
    client.publish(queue, channel=2)
    if site.version < (4, 3):
        assert client.told() == ["2: basic.ack 1"]
        assert client.drained(queue, 2) == [b"x"]
    else:
        text = "FRAME_ERROR - content body frame exceeds remaining content size"
        assert client.told() == [f"connection.close 501 {text} (60, 40)"]


@pytest.mark.parametrize("said", [b"AMQP\x00\x01\x00\x00", b"HTTP/1.1"])
def test_another_protocol(site: Site, connect: Connect, said: bytes) -> None:
    client = connect()
    client.write(said)
    expected = PROTOCOL_HEADER if site.version < (4, 0) else b"AMQP\x03\x01\x00\x00"
    assert client.hear_rest() == expected


def test_the_protocol_header_of_0_9(connect: Connect) -> None:
    client = connect()
    client.write(b"AMQP\x01\x01\x00\x09").hear_only(commands.Connection.Start)


def test_a_silent_peer_is_given_up(connect: Connect) -> None:
    client = connect().opened(heartbeat_s=1)
    lines = client.told_to_the_end()
    assert set(lines[:-1]) == {"heartbeat"}
    assert lines[-1] == END


def test_anything_said_counts_as_a_heartbeat(connect: Connect, queue: str) -> None:
    client = connect().opened(heartbeat_s=2)
    for _ in range(6):
        time.sleep(0.8)
        client.publish(queue)
    assert [line for line in client.told_now() if line != "heartbeat"][-1].startswith("basic.ack")
