"""Arguments of declarations, bindings and consumers: which are wrong, and which is named first."""

from decimal import Decimal
from typing import Any

import pytest
from pamqp import commands
from pamqp.base import Frame

from tests.amqp_probe import unique
from tests.facts.conftest import Connect
from tests.facts.raw_client import Properties, RawClient

pytestmark = pytest.mark.usefixtures("of_3_10")


def answer(client: RawClient, method: Frame) -> str:
    client.send(method)
    (line,) = client.told()
    return line


def declare(name: str, arguments: dict[str, Any], **flags: bool) -> Frame:
    return commands.Queue.Declare(queue=name, arguments=arguments, **({"durable": True} | flags))


NONE: dict[str, str] = {
    "x-message-ttl": '"expected integer, got void"',
    "x-expires": '"expected integer, got void"',
    "x-max-length": '"expected integer, got void"',
    "x-max-priority": '"expected integer, got void"',
    "x-queue-version": '"expected integer, got void"',
    "x-dead-letter-routing-key": "{unacceptable_type,void}",
    "x-overflow": "{unacceptable_type,void}",
    "x-queue-mode": "{unacceptable_type,void}",
    "x-queue-type": "{unacceptable_type,void}",
    "x-single-active-consumer": "{unacceptable_type,void}",
}


@pytest.mark.parametrize("name", NONE)
def test_an_argument_without_a_value(client: RawClient, name: str) -> None:
    text = f"invalid arg '{name}' for queue 'none' in vhost '/': {NONE[name]}"
    line = answer(client, declare("none", {name: None}))
    assert line == f"channel.close 406 PRECONDITION_FAILED - {text} (50, 10)"


def test_an_argument_without_a_value_in_a_second_declaration(client: RawClient, queue: str) -> None:
    reason = "received the value 'undefined' of type 'void' but current is none"
    text = f"inequivalent arg 'x-queue-type' for queue '{queue}' in vhost '/': {reason}"
    line = answer(client, declare(queue, {"x-queue-type": None}))
    assert line == f"channel.close 406 PRECONDITION_FAILED - {text} (50, 10)"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Decimal("1.5"), "'{1,15}' of type 'decimal'"),
        ([Decimal("1.5")], "'[{decimal,{1,15}}]' of type 'array'"),
        (bytearray(b"ab"), "'ab' of type 'binary'"),
    ],
)
def test_how_a_value_is_shown(client: RawClient, queue: str, value: object, shown: str) -> None:
    reason = f"received the value {shown} but current is none"
    text = f"inequivalent arg 'x-expires' for queue '{queue}' in vhost '/': {reason}"
    line = answer(client, declare(queue, {"x-expires": value}))
    assert line == f"channel.close 406 PRECONDITION_FAILED - {text} (50, 10)"


def test_a_timestamp_is_no_number_however_late(client: RawClient, queue: str) -> None:
    method = commands.Basic.Consume(queue=queue, consumer_tag="me")
    arguments = b"\x0ax-priorityT\xff" + bytes(7)
    payload = method.index.to_bytes(4, "big") + method.marshal()[:-4]
    client.write_frame(1, 1, payload + len(arguments).to_bytes(4, "big") + arguments)
    reason = '"expected integer, got timestamp"'
    text = f"invalid arg 'x-priority' for queue '{queue}' in vhost '/': {reason}"
    assert client.told() == [f"channel.close 406 PRECONDITION_FAILED - {text} (60, 20)"]


@pytest.mark.parametrize(("value", "kind"), [(None, "void"), (5, "byte"), (True, "bool")])
def test_an_exchange_that_is_named_by_no_string(
    client: RawClient, value: object, kind: str
) -> None:
    text = f"invalid type '{kind}' for arg 'x-dead-letter-exchange' in queue 'none' in vhost '/'"
    line = answer(client, declare("none", {"x-dead-letter-exchange": value}))
    assert line == f"channel.close 406 PRECONDITION_FAILED - {text} (50, 10)"
    client.send(commands.Channel.CloseOk())
    client.open_channel()
    arguments: Any = {"alternate-exchange": value}
    text = f"invalid type '{kind}' for arg 'alternate-exchange' in exchange 'none' in vhost '/'"
    line = answer(client, commands.Exchange.Declare(exchange="none", arguments=arguments))
    assert line == f"channel.close 406 PRECONDITION_FAILED - {text} (40, 10)"


ORDERS: list[tuple[dict[str, Any], str]] = [
    ({"x-max-age": "1D", "x-delivery-limit": 5}, "x-delivery-limit"),  # the first as it came
    ({"x-max-age": "1D", "x-max-length": -1}, "x-max-length"),  # values before foreign ones
    ({"x-max-length": -1, "x-expires": 0}, "x-expires"),
    ({"x-queue-type": "quorum", "x-queue-mode": "lazy", "x-max-priority": 5}, "x-max-priority"),
    (
        {"x-queue-type": "quorum", "x-overflow": "no", "x-dead-letter-strategy": "no"},
        "x-dead-letter-strategy",
    ),
]


@pytest.mark.parametrize(("arguments", "named"), ORDERS)
def test_of_several_wrong_ones_one_is_named(
    client: RawClient, arguments: dict[str, Any], named: str
) -> None:
    assert f"invalid arg '{named}'" in answer(client, declare("none", arguments))


FOREIGN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"x-max-age": "1D"}),
    ({}, {"x-delivery-limit": 5}),
    ({"x-queue-type": "quorum"}, {"x-queue-type": "quorum", "x-max-priority": 5}),
]


@pytest.mark.parametrize(("first", "second"), FOREIGN)
def test_a_second_declaration_does_not_compare_those_of_other_types(
    client: RawClient, first: dict[str, Any], second: dict[str, Any]
) -> None:
    name = client.declare(unique("queue"), arguments=first)
    assert answer(client, declare(name, second)) == f"queue.declareok {name} 0 0"


def test_the_order_of_comparison_is_that_of_the_queue_type(client: RawClient) -> None:
    quorum = {"x-queue-type": "quorum"}
    name = client.declare(unique("queue"), arguments=quorum)
    more = quorum | {"x-message-ttl": 5, "x-dead-letter-exchange": "a"}
    assert "inequivalent arg 'x-dead-letter-exchange'" in answer(client, declare(name, more))


@pytest.mark.parametrize(("value", "shown"), [(5.0, "5.0"), (["a"], '[{longstr,<<"a">>}]')])
def test_another_value_in_a_second_declaration(
    client: RawClient, value: object, shown: str
) -> None:
    name = client.declare(unique("queue"), arguments={"x-max-length": 5})
    line = answer(client, declare(name, {"x-max-length": value}))
    assert f"received '{shown}' but current is '5'" in line


@pytest.mark.parametrize("kind", ["quorum", "stream"])
def test_a_type_that_needs_a_name(client: RawClient, kind: str) -> None:
    line = answer(client, declare("", {"x-queue-type": kind}))
    text = f"Cannot declare a server-named queue for type rabbit_{kind}_queue"
    assert line == f"channel.close 406 PRECONDITION_FAILED - {text} (50, 10)"


def test_a_type_that_does_not_exist_without_a_name(client: RawClient) -> None:
    line = answer(client, declare("", {"x-queue-type": "other"}))
    assert line == "connection.close 541 INTERNAL_ERROR (0, 0)"


def test_a_generated_name_is_not_declared_again(client: RawClient) -> None:
    name = client.declare("")
    text = f"ACCESS_REFUSED - queue name '{name}' contains reserved prefix 'amq.*'"
    assert answer(client, declare(name, {})) == f"channel.close 403 {text} (50, 10)"
    client.send(commands.Channel.CloseOk())
    client.open_channel()
    assert answer(client, declare(name, {}, passive=True)) == f"queue.declareok {name} 0 0"


@pytest.mark.parametrize("name", ["amq.direct", ""])
def test_the_type_of_an_exchange_is_looked_at_first(client: RawClient, name: str) -> None:
    line = answer(client, commands.Exchange.Declare(exchange=name, exchange_type="no-such-type"))
    text = "503 COMMAND_INVALID - unknown exchange type 'no-such-type'"
    assert line == f"connection.close {text} (40, 10)"


MATCHES: list[tuple[object, str]] = [
    (1, "byte (value 1)"),
    (None, "void (value undefined)"),
    (True, "bool (value true)"),
    (["all"], 'array (value [{longstr,<<"all">>}])'),
    ({"a": 1}, 'table (value [{<<"a">>,byte,1}])'),
]


@pytest.mark.parametrize(("mode", "shown"), MATCHES)
def test_an_x_match_that_is_no_string(
    client: RawClient, queue: str, mode: object, shown: str
) -> None:
    arguments: Any = {"x-match": mode}
    method = commands.Queue.Bind(queue=queue, exchange="amq.headers", arguments=arguments)
    text = f"Invalid x-match field type {shown}; expected longstr"
    assert answer(client, method) == f"channel.close 406 PRECONDITION_FAILED - {text} (50, 20)"


def test_an_x_match_is_looked_at_before_the_owner(connect: Connect, client: RawClient) -> None:
    name = connect().opened().declare(unique("queue"), durable=False, exclusive=True)
    arguments: Any = {"x-match": "some"}
    method = commands.Queue.Bind(queue=name, exchange="amq.headers", arguments=arguments)
    assert answer(client, method).startswith("channel.close 406")


def test_an_unbind_of_nothing_does_not_ask_for_the_owner(
    connect: Connect, client: RawClient
) -> None:
    name = connect().opened().declare(unique("queue"), durable=False, exclusive=True)
    method = commands.Queue.Unbind(queue=name, exchange="amq.direct", routing_key="k")
    assert answer(client, method) == "queue.unbindok"


VALUES: list[Any] = [["x", 1], {"x": 1}, 1.5]


@pytest.mark.parametrize("value", VALUES)
def test_a_headers_binding_with_any_value(client: RawClient, queue: str, value: Any) -> None:
    exchange = client.declare_exchange(unique("headers"), "headers")
    method = commands.Queue.Bind(queue=queue, exchange=exchange, arguments={"a": value})
    client.call(method, commands.Queue.BindOk)
    client.publish("", exchange=exchange, properties=Properties(headers={"a": value}))
    assert client.told() == ["basic.ack 1"]


def test_bindings_that_differ_in_a_type_are_two(client: RawClient, queue: str) -> None:
    exchange = client.declare_exchange(unique("headers"), "headers")
    values: tuple[Any, ...] = (1, True)
    for value in values:
        method = commands.Queue.Bind(queue=queue, exchange=exchange, arguments={"a": value})
        client.call(method, commands.Queue.BindOk)
    for number, value in enumerate(values, 1):
        client.publish("", exchange=exchange, properties=Properties(headers={"a": value}))
        assert client.told() == [f"basic.ack {number}"]


CONSUMERS: list[tuple[str, dict[str, Any], str]] = [
    ("classic", {"x-stream-offset": "first"}, "x-stream-offset"),
    ("classic", {"x-cancel-on-ha-failover": "yes"}, ""),
    ("quorum", {"x-cancel-on-ha-failover": True}, "x-cancel-on-ha-failover"),
    ("stream", {"x-priority": 1}, "x-priority"),
]


@pytest.mark.parametrize(("kind", "arguments", "foreign"), CONSUMERS)
def test_arguments_that_a_consumer_cannot_have(
    client: RawClient, kind: str, arguments: dict[str, Any], foreign: str
) -> None:
    name = client.declare(unique("queue"), arguments={"x-queue-type": kind})
    line = answer(client, commands.Basic.Consume(queue=name, arguments=arguments))
    if foreign:
        text = f"'{foreign}' for queue '{name}' in vhost '/' of queue type rabbit_{kind}_queue"
    else:
        wrong = "{unacceptable_type,longstr}"
        text = f"'x-cancel-on-ha-failover' for queue '{name}' in vhost '/': {wrong}"
    assert line == f"channel.close 406 PRECONDITION_FAILED - invalid arg {text} (60, 20)"


def test_no_last_queue_comes_before_a_tag_that_is_taken(connect: Connect, queue: str) -> None:
    client = connect().opened()
    method = commands.Basic.Consume(queue=queue, consumer_tag="me")
    client.call(method, commands.Basic.ConsumeOk)
    line = answer(client, commands.Basic.Consume(queue="", consumer_tag="me"))
    assert line == "channel.close 404 NOT_FOUND - no previously declared queue (60, 20)"


def test_get_from_a_quorum_queue_with_a_single_consumer(client: RawClient) -> None:
    arguments = {"x-queue-type": "quorum", "x-single-active-consumer": True}
    name = client.declare(unique("queue"), arguments=arguments)
    text = (
        f"cannot obtain access to locked queue '{name}' in vhost '/'. basic.get operations are not "
        "supported by quorum queues with single active consumer"
    )
    line = answer(client, commands.Basic.Get(queue=name))
    assert line == f"channel.close 405 RESOURCE_LOCKED - {text} (60, 70)"
