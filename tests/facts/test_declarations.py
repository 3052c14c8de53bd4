"""Declaring again, arguments that are wrong, and deleting."""

from typing import Any

import pytest
from pamqp import commands, encode

from tests.amqp_probe import unique
from tests.facts.conftest import Connect
from tests.facts.raw_client import RawClient
from tests.facts.site import Site

DECLARE = "(50, 10)"


def refused(text: str) -> list[str]:
    """406 to a queue.declare."""
    return [f"channel.close 406 PRECONDITION_FAILED - {text} {DECLARE}"]


def declare(client: RawClient, name: str, arguments: dict[str, Any], **flags: bool) -> list[str]:
    """What a queue.declare is answered."""
    flags = {"durable": True} | flags
    client.send(commands.Queue.Declare(queue=name, arguments=arguments, **flags))
    return client.told()


def test_a_second_declaration_counts_what_is_there(client: RawClient, queue: str) -> None:
    client.publish(queue).verdicts(1)
    assert declare(client, queue, {}) == [f"queue.declareok {queue} 1 0"]


def test_a_queue_is_declared_as_something_else(client: RawClient, queue: str) -> None:
    reason = "received 'false' but current is 'true'"
    text = f"inequivalent arg 'durable' for queue '{queue}' in vhost '/': {reason}"
    assert declare(client, queue, {}, durable=False) == refused(text)


def test_an_exclusive_queue_is_never_durable(client: RawClient) -> None:
    name = unique("queue")
    for durable in (False, True, False):
        said = declare(client, name, {}, durable=durable, exclusive=True)
        assert said == [f"queue.declareok {name} 0 0"]


def test_or_as_auto_delete(client: RawClient, queue: str) -> None:
    reason = "received 'true' but current is 'false'"
    text = f"inequivalent arg 'auto_delete' for queue '{queue}' in vhost '/': {reason}"
    assert declare(client, queue, {}, auto_delete=True) == refused(text)


CHANGED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {},
        {"x-max-length": 70000},
        "received the value '70000' of type 'signedint' but current is none",
    ),
    (
        {"x-max-length": 70000},
        {},
        "received none but current is the value '70000' of type 'signedint'",
    ),
    ({"x-max-length": 70000}, {"x-max-length": 80000}, "received '80000' but current is '70000'"),
    ({"x-message-ttl": 70000}, {"x-message-ttl": 80000}, "received '80000' but current is '70000'"),
    (
        {"x-overflow": "drop-head"},
        {"x-overflow": "reject-publish"},
        "received 'reject-publish' but current is 'drop-head'",
    ),
    (
        {"x-dead-letter-exchange": "a"},
        {},
        "received none but current is the value 'a' of type 'longstr'",
    ),
    (
        {"x-expires": 70000},
        {},
        "received none but current is the value '70000' of type 'signedint'",
    ),
    ({"x-max-priority": 5}, {"x-max-priority": 6}, "received '6' but current is '5'"),
    (  # of several, the one that RabbitMQ compares first
        {"x-message-ttl": 70000, "x-dead-letter-exchange": "a"},
        {},
        "received none but current is the value '70000' of type 'signedint'",
    ),
    ({"x-max-length": 7}, {}, "received none but current is the value '7' of type 'byte'"),
    (
        {"x-single-active-consumer": True},
        {},
        "received none but current is the value 'true' of type 'bool'",
    ),
]


@pytest.mark.parametrize(("first", "second", "text"), CHANGED)
def test_or_with_other_arguments(
    client: RawClient, first: dict[str, Any], second: dict[str, Any], text: str
) -> None:
    name = client.declare(unique("queue"), arguments=first)
    argument = next(iter(first | second))
    text = f"inequivalent arg '{argument}' for queue '{name}' in vhost '/': {text}"
    assert declare(client, name, second) == refused(text)


SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"x-queue-type": "classic"}),
    ({"x-queue-type": "classic"}, {}),
    ({"x-max-length": 5}, {"x-max-length": 5}),
    ({}, {"x-unknown": "anything"}),
    ({"x-unknown": 1}, {"x-unknown": 2}),
]


@pytest.mark.parametrize(("first", "second"), SAME)
def test_what_is_the_same(client: RawClient, first: dict[str, Any], second: dict[str, Any]) -> None:
    name = client.declare(unique("queue"), arguments=first)
    assert declare(client, name, second) == [f"queue.declareok {name} 0 0"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"x-message-ttl": -1}, "{value_negative,-1}"),
    ({"x-message-ttl": "soon"}, '"expected integer, got longstr"'),
    ({"x-message-ttl": 315360000001}, "{value_too_large,315360000001}"),
    ({"x-expires": 0}, "{value_zero,0}"),
    ({"x-expires": -1}, "{value_negative,-1}"),
    ({"x-max-length": -1}, "{value_negative,-1}"),
    ({"x-max-length": "many"}, '"expected integer, got longstr"'),
    ({"x-max-length-bytes": -1}, "{value_negative,-1}"),
    ({"x-max-priority": 256}, "{max_value_exceeded,256}"),
    ({"x-max-priority": -1}, "{value_negative,-1}"),
    ({"x-max-priority": "high"}, '"expected integer, got longstr"'),
    ({"x-message-ttl": True}, '"expected integer, got bool"'),
    ({"x-overflow": "spill"}, "invalid_overflow"),
    ({"x-dead-letter-routing-key": "a"}, "routing_key_but_no_dlx_defined"),
    ({"x-single-active-consumer": "yes"}, "{unacceptable_type,longstr}"),
    ({"x-queue-type": "other"}, "\"unsupported queue type 'other'\""),
    ({"x-overflow": 1}, "{unacceptable_type,byte}"),
    ({"x-overflow": 1.5}, "{unacceptable_type,float}"),
]


@pytest.mark.parametrize(("arguments", "reason"), WRONG)
def test_arguments_that_are_wrong(
    client: RawClient, arguments: dict[str, Any], reason: str
) -> None:
    (name,) = arguments
    text = f"invalid arg '{name}' for queue 'wrong' in vhost '/': {reason}"
    assert declare(client, "wrong", arguments) == refused(text)


def test_of_several_wrong_arguments_one_is_named(client: RawClient) -> None:
    arguments = {"x-overflow": "spill", "x-max-length": -1, "x-queue-type": "other"}
    (line,) = declare(client, "wrong", arguments)
    assert "invalid arg 'x-queue-type'" in line


@pytest.mark.parametrize(
    "name", ["x-dead-letter-strategy", "x-delivery-limit", "x-max-age", "x-initial-cluster-size"]
)
def test_arguments_of_other_queue_types(client: RawClient, name: str) -> None:
    place = f"invalid arg '{name}' for queue 'wrong' in vhost '/'"
    assert declare(client, "wrong", {name: 5}) == refused(
        f"{place} of queue type rabbit_classic_queue"
    )


def test_whose_it_is_comes_before_what_it_is(client: RawClient, queue: str) -> None:
    (line,) = declare(client, queue, {"x-expires": 70000}, durable=False, exclusive=True)
    assert line.startswith("channel.close 405 RESOURCE_LOCKED")


def test_names_are_without_ends_of_lines(client: RawClient) -> None:
    name = unique("queue")
    torn = encode.short_string(f"{name[:3]}\r\n{name[3:]}")
    client.write_frame(1, 1, bytes([0, 50, 0, 10, 0, 0]) + torn + b"\x02" + bytes(4))
    assert client.told() == [f"queue.declareok {name} 0 0"]
    exchange = encode.short_string("amq.\ndirect")
    arguments = torn + exchange + encode.short_string("k") + bytes(5)
    client.write_frame(1, 1, bytes([0, 50, 0, 20, 0, 0]) + arguments)
    assert client.told() == ["queue.bindok"]
    client.write_frame(1, 1, bytes([0, 50, 0, 40, 0, 0]) + torn + b"\x00")
    assert client.told() == ["queue.deleteok 0"]


def test_a_queue_mode(site: Site, client: RawClient) -> None:
    name = unique("queue")
    lines = declare(client, name, {"x-queue-mode": "fast"})
    reason = "\"unsupported queue mode 'fast'\""
    if site.version < (4, 3):
        text = f"invalid arg 'x-queue-mode' for queue '{name}' in vhost '/': {reason}"
        assert lines == refused(text)
    else:
        assert lines == [f"queue.declareok {name} 0 0"]


def test_an_exchange_type_that_does_not_exist(site: Site, client: RawClient) -> None:
    client.send(commands.Exchange.Declare(exchange="x", exchange_type="wrong"))
    text = "unknown exchange type 'wrong' (40, 10)"
    if site.version < (4, 0):
        assert client.told() == [f"connection.close 503 COMMAND_INVALID - {text}"]
    else:
        assert client.told() == [f"channel.close 406 PRECONDITION_FAILED - {text}"]


def test_a_queue_that_is_neither_durable_nor_exclusive(client: RawClient) -> None:
    name = unique("queue")
    assert declare(client, name, {}, durable=False) == [f"queue.declareok {name} 0 0"]


def test_an_exchange_is_declared_as_something_else(client: RawClient) -> None:
    name = client.declare_exchange(unique("exchange"), arguments={"alternate-exchange": "a"})
    client.send(commands.Exchange.Declare(exchange=name, durable=True))
    reason = "received none but current is the value 'a' of type 'longstr'"
    text = f"inequivalent arg 'alternate-exchange' for exchange '{name}' in vhost '/': {reason}"
    assert client.told() == [f"channel.close 406 PRECONDITION_FAILED - {text} (40, 10)"]


def test_a_name_by_the_server(client: RawClient) -> None:
    name = client.declare("", durable=False, exclusive=True)
    assert name.startswith("amq.gen-")
    assert client.publish(name).told() == ["basic.ack 1"]
    assert client.drained("") == [b"x"]  # the last one that was declared here


def test_if_empty_and_if_unused(client: RawClient, queue: str) -> None:
    client.publish(queue).verdicts(1)
    client.send(commands.Queue.Delete(queue=queue, if_empty=True))
    text = f"PRECONDITION_FAILED - queue '{queue}' in vhost '/' not empty"
    assert client.told() == [f"channel.close 406 {text} (50, 40)"]
    client.send(commands.Channel.CloseOk())
    client.open_channel()
    client.call(commands.Basic.Consume(queue=queue), commands.Basic.ConsumeOk)
    client.told(3)
    client.send(commands.Queue.Delete(queue=queue, if_unused=True))
    text = f"PRECONDITION_FAILED - queue '{queue}' in vhost '/' in use"
    assert client.told() == [f"channel.close 406 {text} (50, 40)"]


@pytest.mark.usefixtures("of_3_10")
def test_if_empty_comes_before_if_unused(client: RawClient, queue: str) -> None:
    client.call(commands.Basic.Qos(prefetch_count=1), commands.Basic.QosOk)
    client.call(commands.Basic.Consume(queue=queue), commands.Basic.ConsumeOk)
    for _ in range(2):
        client.publish(queue)
    client.told(5)
    client.send(commands.Queue.Delete(queue=queue, if_unused=True, if_empty=True))
    text = f"PRECONDITION_FAILED - queue '{queue}' in vhost '/' not empty"
    assert client.told() == [f"channel.close 406 {text} (50, 40)"]


def test_an_exchange_in_use(client: RawClient, queue: str) -> None:
    exchange = client.declare_exchange(unique("exchange"))
    client.bind(queue, exchange)
    client.send(commands.Exchange.Delete(exchange=exchange, if_unused=True))
    text = f"PRECONDITION_FAILED - exchange '{exchange}' in vhost '/' in use"
    assert client.told() == [f"channel.close 406 {text} (40, 20)"]


def test_purge_and_delete_count(client: RawClient, queue: str) -> None:
    for _ in range(3):
        client.publish(queue)
    client.verdicts(3)
    assert client.send(commands.Queue.Purge(queue=queue)).told() == ["queue.purgeok 3"]
    assert client.publish(queue).told() == ["basic.ack 4"]
    assert client.send(commands.Queue.Delete(queue=queue)).told() == ["queue.deleteok 1"]


def test_an_exclusive_queue_goes_with_its_connection(connect: Connect, client: RawClient) -> None:
    other = connect().opened()
    name = other.declare(unique("exclusive"), durable=False, exclusive=True)
    other.send(commands.Connection.Close(200, "", 0, 0), 0).hear_only(commands.Connection.CloseOk)
    client.send(commands.Queue.Declare(queue=name, passive=True))
    assert client.told()[0].startswith("channel.close 404")


def test_an_auto_delete_exchange_goes_with_its_last_binding(client: RawClient, queue: str) -> None:
    name = client.declare_exchange(unique("exchange"), auto_delete=True)
    client.bind(queue, name)
    method = commands.Queue.Unbind(queue=queue, exchange=name, routing_key="")
    client.call(method, commands.Queue.UnbindOk)
    assert client.publish("key", exchange=name).told()[0].startswith("channel.close 404")


def test_an_unknown_x_match(client: RawClient, queue: str) -> None:
    method = commands.Queue.Bind(queue=queue, exchange="amq.headers", arguments={"x-match": "some"})
    text = 'Invalid x-match field value <<"some">>; expected all, any, all-with-x, or any-with-x'
    assert client.send(method).told() == [
        f"channel.close 406 PRECONDITION_FAILED - {text} (50, 20)"
    ]
