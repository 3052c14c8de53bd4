"""What RabbitMQ refuses by closing the channel: reply code, text, class and method of each."""

import struct
from typing import Any

import pytest
from pamqp import commands, frame
from pamqp.base import Frame
from pamqp.header import ContentHeader

from reliablepub.message import EXPIRATION_MS_MAX
from tests.amqp_probe import unique
from tests.facts.conftest import Connect
from tests.facts.raw_client import Properties, RawClient
from tests.facts.site import MAX_MESSAGE_SIZE, Site

PUBLISH = "(60, 40)"


def test_a_publish_to_a_missing_exchange(client: RawClient) -> None:
    text = "NOT_FOUND - no exchange 'nowhere' in vhost '/'"
    assert client.publish("key", exchange="nowhere").told() == [
        f"channel.close 404 {text} {PUBLISH}"
    ]


def test_a_publish_to_an_internal_exchange(client: RawClient) -> None:
    exchange = client.declare_exchange(unique("internal"), internal=True)
    text = f"ACCESS_REFUSED - cannot publish to internal exchange '{exchange}' in vhost '/'"
    assert client.publish("key", exchange=exchange).told() == [
        f"channel.close 403 {text} {PUBLISH}"
    ]


def test_who_may_not_write(site: Site, connect: Connect, queue: str) -> None:
    user = site.add_reader()  # before the connection, whose login may take 10 s
    client = connect()
    client.user = client.password = user
    client.opened()
    access = "access" if site.version < (4, 0) else "write access"
    text = f"{access} to exchange 'amq.default' in vhost '/' refused for user 'reader'"
    assert client.publish(queue).told() == [f"channel.close 403 ACCESS_REFUSED - {text} {PUBLISH}"]


def test_a_body_above_the_limit(client: RawClient, queue: str) -> None:
    assert client.publish(queue, bytes(MAX_MESSAGE_SIZE)).told() == ["basic.ack 1"]
    client.publish(queue, bytes(MAX_MESSAGE_SIZE + 1))
    size = f"{MAX_MESSAGE_SIZE + 1} is larger than configured max size {MAX_MESSAGE_SIZE}"
    text = f"PRECONDITION_FAILED - message size {size}"
    assert client.told() == [f"channel.close 406 {text} {PUBLISH}"]
    client.send(commands.Channel.CloseOk())
    client.open_channel()
    assert client.publish(queue).told() == ["basic.ack 1"]


PROPERTIES: list[tuple[dict[str, Any], str]] = [
    ({"user_id": "bob"}, "user_id property set to 'bob' but authenticated user was 'guest'"),
    ({"expiration": "soon"}, "invalid expiration 'soon': no_integer"),
    ({"expiration": "1.5"}, "invalid expiration '1.5': {leftover_string,\".5\"}"),
    ({"expiration": "7 "}, "invalid expiration '7 ': {leftover_string,\" \"}"),
    ({"expiration": "-1"}, "invalid expiration '-1': {value_negative,-1}"),
    (
        {"expiration": str(EXPIRATION_MS_MAX + 1)},
        "invalid expiration '315360000001': {value_too_large,315360000001}",
    ),
    ({"headers": {"CC": "a"}}, 'invalid message: {unacceptable_type_in_header,"CC",longstr}'),
    ({"reply_to": "amq.rabbitmq.reply-to"}, "fast reply consumer does not exist"),
]


@pytest.mark.parametrize(("properties", "text"), PROPERTIES)
def test_properties(client: RawClient, queue: str, properties: dict[str, Any], text: str) -> None:
    client.publish(queue, properties=Properties(**properties))
    assert client.told() == [f"channel.close 406 PRECONDITION_FAILED - {text} {PUBLISH}"]


TAKEN: list[dict[str, Any]] = [
    {"user_id": "guest"},
    {"expiration": "0"},
    {"expiration": "+5"},
    {"expiration": str(EXPIRATION_MS_MAX)},
    {"delivery_mode": 1},
    {"priority": 255},
    {"headers": {"CC": []}},
    {"headers": {"CC": [1, "a"]}},
    {"reply_to": "anybody"},
]


@pytest.mark.parametrize("properties", TAKEN)
def test_properties_that_are_taken(
    client: RawClient, queue: str, properties: dict[str, Any]
) -> None:
    assert client.publish(queue, properties=Properties(**properties)).told() == ["basic.ack 1"]


@pytest.mark.parametrize(
    ("exchange", "properties"),
    [("é" * 120, {}), ("a" + "é" * 120, {}), ("", {"user_id": "ß" * 127})],
)
def test_a_long_reply_text_is_cut_after_252_bytes_also_inside_a_character(
    site: Site, client: RawClient, queue: str, exchange: str, properties: dict[str, Any]
) -> None:
    """Since 4.0 it is cut after as many characters, which do not fit: the connection is closed."""
    to = exchange.encode()  # which pamqp does not take
    method = struct.pack(">IHB", 0x003C0028, 0, len(to)) + to + bytes((len(queue),))
    client.write_frame(1, 1, method + queue.encode() + b"\x01")
    client.write(frame.marshal(ContentHeader(0, 0, Properties(**properties)), 1))
    if site.version >= (4, 0):
        assert client.told() == ["connection.close 541 INTERNAL_ERROR (0, 0)"]
        return
    heard = client.hear_bytes()
    said = heard[14 : 14 + heard[13]]
    if properties:
        whole = f"PRECONDITION_FAILED - user_id property set to '{properties['user_id']}' but"
    else:
        whole = f"NOT_FOUND - no exchange '{exchange}' in vhost"
    assert said == whole.encode()[:252] + b"..."
    assert len(said) == 255


def test_a_refusal_throws_away_every_confirm_behind_it_and_no_message_before_it(
    client: RawClient, queue: str
) -> None:
    for number in range(700):
        client.publish(queue, b"%d" % number, exchange="nowhere" if number == 300 else "")
    lines = client.told_until("channel.close")
    assert all(line.startswith("basic.ack") for line in lines[:-1])
    client.open_channel(2)
    assert client.drained(queue, 2) == [b"%d" % number for number in range(300)]


def test_the_other_channels_go_on(connect: Connect, queue: str) -> None:
    client = connect().opened(channels=2)
    client.publish("key", exchange="nowhere", channel=2)
    assert client.told()[0].startswith("2: channel.close 404")
    assert client.publish(queue).told() == ["basic.ack 1"]


def test_after_close_ok_the_channel_can_be_opened_again(client: RawClient, queue: str) -> None:
    client.publish("key", exchange="nowhere").hear_only(commands.Channel.Close)
    client.publish(queue)  # ignored: we have not answered yet
    client.send(commands.Channel.CloseOk())
    client.open_channel()
    assert client.drained(queue) == []


def test_both_sides_close_a_channel_at_once(client: RawClient, queue: str) -> None:
    client.publish("key", exchange="nowhere")
    client.send(commands.Channel.Close(200, "", 0, 0))
    lines = client.told(2)
    assert lines[0].startswith("channel.close 404")
    assert lines[1] == "channel.closeok"
    client.send(commands.Channel.CloseOk())
    client.open_channel()
    assert client.publish(queue).told() == ["basic.ack 1"]


def test_a_text_is_cut_to_what_a_short_string_holds(client: RawClient) -> None:
    name = "x" * 250
    client.send(commands.Queue.Purge(queue=name))
    text = f"NOT_FOUND - no queue '{name}' in vhost '/'"
    assert client.hear_only(commands.Channel.Close).reply_text == text[:252] + "..."


@pytest.mark.parametrize("mode", [0, 3])
def test_a_delivery_mode_that_does_not_exist(
    site: Site, client: RawClient, queue: str, mode: int
) -> None:
    client.send(commands.Basic.Publish(routing_key=queue))
    client.write_frame(2, 1, struct.pack(">HHQHB", 60, 0, 0, 1 << 12, mode))
    refusal = f"PRECONDITION_FAILED - invalid message: {{delivery_mode_unknown,{mode}}}"
    expected = "basic.ack 1"
    if site.version < (4, 0):
        expected = f"channel.close 406 {refusal} {PUBLISH}"
    assert client.told() == [expected]


METHODS: list[tuple[Frame, int, str]] = [
    (commands.Queue.Declare(queue="nowhere", passive=True), 404, "no queue 'nowhere' in vhost '/'"),
    (
        commands.Queue.Declare(queue="amq.mine"),
        403,
        "queue name 'amq.mine' contains reserved prefix 'amq.*'",
    ),
    (
        commands.Queue.Bind(queue="nowhere", exchange="amq.direct"),
        404,
        "no queue 'nowhere' in vhost '/'",
    ),
    (commands.Queue.Purge(queue="nowhere"), 404, "no queue 'nowhere' in vhost '/'"),
    *(
        (method, 404, "no previously declared queue")
        for method in (
            commands.Queue.Delete(),
            commands.Queue.Purge(),
            commands.Queue.Bind(exchange="amq.direct"),
            commands.Queue.Unbind(exchange="amq.direct"),
            commands.Basic.Get(),
            commands.Basic.Consume(),
        )
    ),
    (commands.Queue.Declare(passive=True), 404, "no queue '' in vhost '/'"),
    (commands.Basic.Consume(queue="nowhere"), 404, "no queue 'nowhere' in vhost '/'"),
    (commands.Basic.Get(queue="nowhere"), 404, "no queue 'nowhere' in vhost '/'"),
    (commands.Basic.Ack(7), 406, "unknown delivery tag 7"),
    (commands.Basic.Nack(7), 406, "unknown delivery tag 7"),
    (commands.Basic.Nack(7, multiple=True), 406, "unknown delivery tag 7"),
    (commands.Basic.Reject(7), 406, "unknown delivery tag 7"),
    (
        commands.Exchange.Declare(exchange="nowhere", passive=True),
        404,
        "no exchange 'nowhere' in vhost '/'",
    ),
    (
        commands.Exchange.Declare(exchange="amq.mine"),
        403,
        "exchange name 'amq.mine' contains reserved prefix 'amq.*'",
    ),
    (
        commands.Exchange.Declare(exchange=""),
        403,
        "operation not permitted on the default exchange",
    ),
    (
        commands.Exchange.Declare(exchange="amq.direct", exchange_type="fanout", durable=True),
        406,
        (
            "inequivalent arg 'type' for exchange 'amq.direct' in vhost '/': "
            "received 'fanout' but current is 'direct'"
        ),
    ),
    (
        commands.Exchange.Declare(exchange="amq.direct"),
        406,
        (
            "inequivalent arg 'durable' for exchange 'amq.direct' in vhost '/': "
            "received 'false' but current is 'true'"
        ),
    ),
    (
        commands.Exchange.Delete(exchange="amq.direct"),
        403,
        "deletion of system exchange 'amq.direct' in vhost '/' not allowed",
    ),
    (commands.Exchange.Delete(exchange=""), 403, "operation not permitted on the default exchange"),
    (
        commands.Exchange.Bind(destination="nowhere", source="amq.direct"),
        404,
        "no exchange 'nowhere' in vhost '/'",
    ),
    (
        commands.Exchange.Bind(destination="amq.direct", source=""),
        403,
        "operation not permitted on the default exchange",
    ),
    (  # both ends are missing: the source is named
        commands.Queue.Bind(queue="nowhere", exchange="nowhere else"),
        404,
        "no exchange 'nowhere else' in vhost '/'",
    ),
    (
        commands.Exchange.Bind(destination="nowhere", source="nowhere else"),
        404,
        "no exchange 'nowhere else' in vhost '/'",
    ),
    (
        commands.Exchange.Bind(
            destination="amq.direct", source="amq.headers", arguments={"x-match": "some"}
        ),
        406,
        'Invalid x-match field value <<"some">>; expected all, any, all-with-x, or any-with-x',
    ),
    (commands.Tx.Commit(), 406, "channel is not transactional"),
    (commands.Tx.Rollback(), 406, "channel is not transactional"),
]
NAMES = {
    403: "ACCESS_REFUSED",
    404: "NOT_FOUND",
    405: "RESOURCE_LOCKED",
    406: "PRECONDITION_FAILED",
}


@pytest.mark.parametrize(
    ("method", "code", "text"), METHODS, ids=lambda one: getattr(one, "name", None)
)
def test_methods(client: RawClient, method: Frame, code: int, text: str) -> None:
    ids = f"({method.index >> 16}, {method.index & 0xFFFF})"
    assert client.send(method).told() == [f"channel.close {code} {NAMES[code]} - {text} {ids}"]


FORGIVEN: list[tuple[Frame, str]] = [
    (commands.Queue.Delete(queue="nowhere"), "queue.deleteok 0"),
    (commands.Queue.Unbind(queue="nowhere", exchange="amq.direct"), "queue.unbindok"),
    (commands.Queue.Unbind(queue="nowhere", exchange="nowhere else"), "queue.unbindok"),
    (commands.Exchange.Delete(exchange="nowhere"), "exchange.deleteok"),
    (commands.Exchange.Unbind(destination="nowhere", source="nowhere else"), "exchange.unbindok"),
    (commands.Basic.Cancel("nobody"), "basic.cancelok nobody"),
    (commands.Basic.Recover(requeue=True), "basic.recoverok"),
    (commands.Channel.Flow(active=True), "channel.flowok True"),
    (commands.Exchange.Declare(exchange="amq.direct", passive=True), "exchange.declareok"),
]


@pytest.mark.parametrize(("method", "line"), FORGIVEN, ids=lambda one: getattr(one, "name", None))
def test_methods_that_are_forgiven(client: RawClient, method: Frame, line: str) -> None:
    assert client.send(method).told() == [line]


def test_an_exclusive_queue_is_locked(connect: Connect, client: RawClient) -> None:
    name = client.declare(unique("exclusive"), durable=False, exclusive=True)
    other = connect().opened()
    other.send(commands.Queue.Declare(queue=name, exclusive=True))
    text = (
        f"RESOURCE_LOCKED - cannot obtain exclusive access to locked queue '{name}' in vhost '/'. "
        "It could be originally declared on another connection or the exclusive property "
        "value does not match that of the original declaration."
    )
    assert other.told() == [f"channel.close 405 {text[:255]} (50, 10)"]
