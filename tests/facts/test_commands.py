"""Frames form whole commands, whatever the state of their channel; then the command is judged."""

import struct

import pytest
from pamqp import commands, frame, header
from pamqp.base import Frame

from tests.amqp_probe import unique
from tests.facts.conftest import Connect
from tests.facts.raw_client import PERSISTENT, RawClient

METHOD, HEADER, BODY = 1, 2, 3
EMPTY = struct.pack(">HHQH", 60, 0, 0, 0)
NO_METHOD = "505 UNEXPECTED_FRAME - expected method frame, got non method frame instead (0, 0)"
NO_HEADER = (
    "505 UNEXPECTED_FRAME - expected content header for class 60, got non content header frame "
    "instead"
)
UNIMPLEMENTED = "503 COMMAND_INVALID - unimplemented method"

pytestmark = pytest.mark.usefixtures("of_3_10")


def told_as_short_string(client: RawClient) -> bytes:
    """The reply text of a close, as it came."""
    heard = client.hear_bytes()
    return heard[14 : 14 + heard[13]]


@pytest.mark.parametrize(("kind", "payload"), [(HEADER, EMPTY), (BODY, b"a")])
def test_content_on_a_channel_that_is_not_open(
    client: RawClient, kind: int, payload: bytes
) -> None:
    assert client.write_frame(kind, 9, payload).told() == [f"connection.close {NO_METHOD}"]


def test_a_publish_on_a_channel_that_is_not_open_is_heard_out(client: RawClient) -> None:
    assert client.send(commands.Basic.Publish(routing_key="a"), 9).told_now() == []
    client.write_frame(HEADER, 9, EMPTY)
    text = "504 CHANNEL_ERROR - expected 'channel.open' (60, 40)"
    assert client.told() == [f"connection.close {text}"]


def test_a_malformed_method_on_a_channel_that_is_not_open(client: RawClient) -> None:
    client.write_frame(METHOD, 9, struct.pack(">HHH", 60, 10, 0))
    text = "501 FRAME_ERROR - cannot decode <<0,0>> (60, 10)"
    assert client.told() == [f"connection.close {text}"]


def test_a_method_on_one_channel_more_than_agreed(connect: Connect) -> None:
    client = connect().opened(channel_max=1)
    client.send(commands.Basic.Qos(), 5)
    text = "number of channels opened (1) has reached the negotiated channel_max (1)"
    assert client.told() == [f"connection.close 530 NOT_ALLOWED - {text} (0, 0)"]


def test_a_close_ok_that_answers_nothing(client: RawClient) -> None:
    client.send(commands.Channel.CloseOk())
    assert client.told() == [f"connection.close {UNIMPLEMENTED} (20, 41)"]


def test_an_open_where_a_close_ok_is_due(client: RawClient) -> None:
    client.publish("key", exchange="nowhere").hear_only(commands.Channel.Close)
    text = "504 CHANNEL_ERROR - second 'channel.open' seen (20, 10)"
    assert client.send(commands.Channel.Open()).told() == [f"connection.close {text}"]


@pytest.mark.parametrize(
    "method", [commands.Channel.Close(200, "", 0, 0), commands.Channel.CloseOk()]
)
def test_a_close_where_content_is_due(client: RawClient, method: Frame) -> None:
    client.send(commands.Basic.Publish(routing_key="a"))
    assert client.send(method).told() == [f"connection.close {NO_HEADER} (60, 40)"]


def test_a_close_ok_inside_a_publish_that_nobody_will_read(client: RawClient) -> None:
    client.publish("key", exchange="nowhere").hear_only(commands.Channel.Close)
    client.send(commands.Basic.Publish(routing_key="a"))
    assert client.send(commands.Channel.CloseOk()).told() == [
        f"connection.close {NO_HEADER} (60, 40)"
    ]


SERVERS: list[tuple[Frame, str]] = [
    (commands.Basic.Deliver("t", 1, False, "", "q"), "(60, 60)"),  # noqa: FBT003
    (commands.Basic.Return(312, "a", "", "q"), "(60, 50)"),
    (commands.Basic.GetOk(1, False, "", "q", 1), "(60, 71)"),  # noqa: FBT003
]


@pytest.mark.parametrize(("method", "ids"), SERVERS, ids=lambda one: getattr(one, "name", None))
def test_content_that_only_a_server_sends(client: RawClient, method: Frame, ids: str) -> None:
    client.send(method)
    client.write_frame(HEADER, 1, EMPTY)
    assert client.told() == [f"connection.close {UNIMPLEMENTED} {ids}"]


def test_a_method_after_content_that_only_a_server_sends(client: RawClient) -> None:
    client.send(SERVERS[2][0])
    assert client.send(commands.Basic.Qos()).told() == [f"connection.close {NO_HEADER} (60, 71)"]


@pytest.mark.parametrize("class_id", [60, 50])
def test_a_content_header_with_a_weight(client: RawClient, class_id: int) -> None:
    client.send(commands.Basic.Publish(routing_key="a"))
    client.write_frame(HEADER, 1, struct.pack(">HHQH", class_id, 1, 0, 0))
    assert client.told() == [f"connection.close {NO_HEADER} (60, 40)"]


def test_a_content_header_without_flags(client: RawClient) -> None:
    client.send(commands.Basic.Publish(routing_key="a"))
    client.write_frame(HEADER, 1, EMPTY[:12])
    assert client.told() == ["connection.close 541 INTERNAL_ERROR (0, 0)"]


TRAILING = [
    (1, struct.pack(">HHIHB", 60, 10, 0, 1, 0), "<<0,0,0,0,0,1,0,120>> (60, 10)"),
    (1, struct.pack(">HHH", 60, 40, 0) + b"\0\1a\1", "<<0,0,0,1,97,1,120>> (60, 40)"),
    (2, struct.pack(">HHB", 20, 10, 0), "<<0,120>> (20, 10)"),
]


@pytest.mark.parametrize(("channel", "payload", "text"), TRAILING)
def test_arguments_with_more_behind_them(
    client: RawClient, channel: int, payload: bytes, text: str
) -> None:
    client.write_frame(METHOD, channel, payload + b"x")
    assert client.told() == [f"connection.close 501 FRAME_ERROR - cannot decode {text}"]


def test_malformed_arguments_of_the_connection(client: RawClient) -> None:
    client.write_frame(METHOD, 0, struct.pack(">HHH", 10, 50, 200))
    assert client.told() == ["connection.close 541 INTERNAL_ERROR (0, 0)"]


def test_both_sides_close_the_connection_at_once(client: RawClient) -> None:
    client.publish("a", immediate=True).hear_only(commands.Connection.Close)
    client.write_frame(METHOD, 0, b"ab")  # whatever else is said is ignored
    client.write_frame(9, 0, b"abc")
    client.send(commands.Channel.Open(), 3)
    assert client.send(commands.Connection.Close(200, "", 0, 0), 0).told() == ["connection.closeok"]
    assert client.send(commands.Connection.CloseOk(), 0).told() == ["the end"]


def test_a_routing_key_need_not_be_utf_8(client: RawClient) -> None:
    client.write_frame(METHOD, 1, struct.pack(">HHH", 60, 40, 0) + b"\0\1\xff\1")
    client.write_frame(HEADER, 1, EMPTY)
    assert client.hear_bytes()[11:-1] == b"\x01\x38\x08NO_ROUTE\x00\x01\xff"


def test_an_exchange_that_is_not_utf_8(client: RawClient) -> None:
    client.write_frame(METHOD, 1, struct.pack(">HHH", 60, 40, 0) + b"\1\xff\1a\0")
    client.write_frame(HEADER, 1, EMPTY)
    assert told_as_short_string(client) == b"NOT_FOUND - no exchange '\xff' in vhost '/'"


def test_properties_need_not_be_utf_8(client: RawClient, queue: str) -> None:
    client.send(commands.Basic.Publish(routing_key=queue))
    properties = b"\x01\xff" + b"\0\0\0\4\1\xfft\1"
    client.write_frame(HEADER, 1, struct.pack(">HHQH", 60, 0, 0, 0xA000) + properties)
    assert client.told() == ["basic.ack 1"]
    client.send(commands.Basic.Get(queue=queue, no_ack=True))
    client.hear_bytes()
    assert client.hear_bytes()[21:-1] == properties


NAMES = {
    "queue.declare": struct.pack(">HHH", 50, 10, 0) + b"\1\xff\2\0\0\0\0",
    "exchange.declare": struct.pack(">HHH", 40, 10, 0) + b"\1\xff\6direct\0\0\0\0\0",
    "basic.cancel": struct.pack(">HH", 60, 30) + b"\1\xff\0",
}


@pytest.mark.parametrize("method", NAMES)
def test_other_names_must_be_utf_8(client: RawClient, method: str) -> None:
    client.write_frame(METHOD, 1, NAMES[method])
    text = "501 FRAME_ERROR - Malformed UTF-8 in shortstr (0, 0)"
    assert client.told() == [f"connection.close {text}"]


INTERNAL = "cannot publish to internal exchange 'amq.rabbitmq.trace' in vhost '/'"


@pytest.mark.parametrize(
    ("exchange", "text"),
    [
        ("nowhere", "404 NOT_FOUND - no exchange 'nowhere' in vhost '/'"),
        ("amq.rabbitmq.trace", f"403 ACCESS_REFUSED - {INTERNAL}"),
    ],
)
def test_the_exchange_is_looked_at_before_the_properties(
    client: RawClient, exchange: str, text: str
) -> None:
    client.send(commands.Basic.Publish(exchange=exchange, routing_key="a"))
    client.write_frame(HEADER, 1, EMPTY[:12] + b"\x20\x00\0\0\0\5a")
    assert client.told() == [f"channel.close {text} (60, 40)"]


def test_a_publish_on_two_channels_in_turns(connect: Connect) -> None:
    client = connect().opened(channels=2)
    queue = client.declare(unique("queue"))
    client.send(commands.Basic.Publish(routing_key=queue))
    client.call(commands.Basic.Qos(), commands.Basic.QosOk, 2)
    client.write(frame.marshal(header.ContentHeader(0, 1, PERSISTENT), 1))
    client.call(commands.Basic.Qos(), commands.Basic.QosOk, 2)
    assert client.write(client.encode_body(b"x")).told() == ["basic.ack 1"]
