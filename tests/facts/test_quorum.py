"""Quorum queues: what they refuse, delivery counts and limits, and their overflow."""

from time import monotonic
from typing import Any

import pytest
from pamqp import commands

from tests.amqp_probe import unique
from tests.facts.conftest import Connect
from tests.facts.raw_client import TRANSIENT, Properties, RawClient
from tests.facts.site import Site

QUORUM = {"x-queue-type": "quorum"}
PATIENCE_S = 60.0


@pytest.fixture
def client(site: Site, connect: Connect) -> RawClient:
    """A connection to a broker of 3.x: later ones have a delivery limit by default."""
    if site.version >= (4,):
        pytest.skip("facts of RabbitMQ 3")
    client = connect().opened()
    client.patience(PATIENCE_S)
    return client


def declare(client: RawClient, arguments: dict[str, Any], **flags: bool) -> str:
    """What a declaration is answered; the queue is called `wrong`."""
    method = commands.Queue.Declare(
        queue="wrong", arguments=QUORUM | arguments, **({"durable": True} | flags)
    )
    client.send(method)
    (line,) = client.told()
    return line


def refused(text: str) -> str:
    return f"channel.close 406 PRECONDITION_FAILED - {text} (50, 10)"


def quorum_queue(client: RawClient, *bodies: bytes, **arguments: Any) -> str:
    """A new quorum queue that has these messages, which are transient."""
    table = QUORUM | {name.replace("_", "-"): value for name, value in arguments.items()}
    name = client.declare(unique("quorum"), arguments=table)
    client.open_channel(9)
    for body in bodies:
        client.publish(name, body, properties=TRANSIENT, channel=9)
    if bodies:
        assert set(client.verdicts(len(bodies), 9).values()) == {"ack"}
    client.call(commands.Channel.Close(200, "", 0, 0), commands.Channel.CloseOk, 9)
    return name


def consume(client: RawClient, queue: str, *, prefetch: int = 1, channel: int = 1) -> None:
    client.call(commands.Basic.Qos(prefetch_count=prefetch), commands.Basic.QosOk, channel)
    method = commands.Basic.Consume(queue=queue, consumer_tag="me")
    client.call(method, commands.Basic.ConsumeOk, channel)


def delivery(client: RawClient) -> tuple[bool, dict[str, Any] | None, bytes]:
    """The next delivery: whether it is redelivered, its headers, its body."""
    _, method = client.hear()
    assert isinstance(method, commands.Basic.Deliver | commands.Basic.GetOk), method
    properties = client.hear()[1].properties
    return bool(method.redelivered), properties.headers, client.hear()[1].value


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"durable": False}, "non-durable"),
        ({"durable": False, "exclusive": True}, "exclusive-owner"),
        ({"exclusive": True, "auto_delete": True}, "auto-delete"),
    ],
)
def test_flags_that_it_cannot_have(client: RawClient, flags: dict[str, bool], name: str) -> None:
    expected = f"invalid property '{name}' for queue 'wrong' in vhost '/'"
    assert declare(client, {}, **flags) == refused(expected)


@pytest.mark.parametrize(
    "argument",
    [
        {"x-max-priority": 500},
        {"x-queue-mode": "lazy"},
        {"x-queue-version": 2},
        {"x-queue-master-locator": "min-masters"},
        {"x-max-age": "1h"},
        {"x-initial-cluster-size": 0},
        {"x-stream-max-segment-size-bytes": 5},
    ],
    ids=lambda argument: next(iter(argument)),
)
def test_arguments_that_it_cannot_have(client: RawClient, argument: dict[str, Any]) -> None:
    where = f"invalid arg '{next(iter(argument))}' for queue 'wrong' in vhost '/'"
    expected = f"{where} of queue type rabbit_quorum_queue"
    assert declare(client, argument) == refused(expected)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("x-dead-letter-strategy", "perhaps", "invalid_dlx_strategy"),
        ("x-dead-letter-strategy", True, "{unacceptable_type,bool}"),
        ("x-queue-leader-locator", "here", "invalid_queue_locator_arg"),
        ("x-quorum-initial-group-size", 0, "{value_zero,0}"),
        ("x-max-length", -1, "{value_negative,-1}"),
    ],
)
def test_values_that_are_wrong(client: RawClient, name: str, value: object, reason: str) -> None:
    expected = f"invalid arg '{name}' for queue 'wrong' in vhost '/': {reason}"
    assert declare(client, {name: value}) == refused(expected)


@pytest.mark.parametrize(
    "arguments",
    [
        {"x-delivery-limit": 3, "x-single-active-consumer": True, "x-message-ttl": 60_000},
        {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"},
        {"x-dead-letter-strategy": "at-most-once", "x-overflow": "reject-publish-dlx"},
        {"x-quorum-initial-group-size": 1, "x-queue-leader-locator": "balanced"},
        {"x-max-in-memory-length": 4, "x-max-in-memory-bytes": 4, "x-expires": 60_000},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_arguments_that_it_has(client: RawClient, arguments: dict[str, Any]) -> None:
    name = client.declare(unique("quorum"), arguments=QUORUM | arguments)
    assert client.told_now() == []
    client.call(commands.Queue.Delete(queue=name), commands.Queue.DeleteOk)


def test_a_classic_queue_is_not_a_quorum_queue(client: RawClient, queue: str) -> None:
    method = commands.Queue.Declare(queue=queue, durable=True, arguments=dict(QUORUM))
    said = "received the value 'quorum' of type 'longstr' but current is none"
    where = f"inequivalent arg 'x-queue-type' for queue '{queue}' in vhost '/'"
    assert client.send(method).told() == [refused(f"{where}: {said}")]


def test_a_delivery_count_of_get(client: RawClient) -> None:
    queue = quorum_queue(client, b"a")
    for count in (0, 1):
        client.send(commands.Basic.Get(queue=queue))
        assert client.hear_only(commands.Basic.GetOk).redelivered == bool(count)
        assert b"\x10x-delivery-countl" + count.to_bytes(8, "big") in client.hear_bytes()
        client.hear()
        if not count:
            client.call(commands.Channel.Close(200, "", 0, 0), commands.Channel.CloseOk)
            client.open_channel()
            wait_for_messages(client, queue, 1)


@pytest.mark.usefixtures("of_3_10")
def test_get_counts_what_expires_behind_its_message(client: RawClient) -> None:
    queue = quorum_queue(client, b"a")
    client.publish(queue, properties=Properties(expiration="0")).verdicts(1)
    client.send(commands.Basic.Get(queue=queue))
    assert client.told(3)[0] == f"basic.getok 1 False  {queue} 1"
    assert client.send(commands.Basic.Get(queue=queue)).told() == ["basic.getempty"]


def wait_for_messages(client: RawClient, queue: str, count: int) -> None:
    """RabbitMQ notices the end of a channel a moment after it has answered."""
    give_up_at = monotonic() + PATIENCE_S
    passive = commands.Queue.Declare(queue=queue, passive=True)
    while client.call(passive, commands.Queue.DeclareOk).message_count != count:
        assert monotonic() < give_up_at


def test_a_delivery_count_of_consumers(client: RawClient) -> None:
    queue = quorum_queue(client, b"a")
    consume(client, queue)
    assert delivery(client) == (False, None, b"a")
    for count in (1, 2):
        client.send(commands.Basic.Nack(count, requeue=True))
        assert delivery(client) == (True, {"x-delivery-count": count}, b"a")


def test_what_a_client_puts_back_goes_to_the_tail(client: RawClient) -> None:
    queue = quorum_queue(client, b"a", b"b")
    consume(client, queue)
    assert delivery(client)[2] == b"a"
    client.send(commands.Basic.Nack(1, requeue=True))
    assert delivery(client)[2] == b"b"
    client.send(commands.Basic.Ack(2))
    assert delivery(client) == (True, {"x-delivery-count": 1}, b"a")


def test_but_to_the_head_where_deliveries_have_a_limit(client: RawClient) -> None:
    queue = quorum_queue(client, b"a", b"b", x_delivery_limit=5)
    consume(client, queue)
    assert delivery(client)[2] == b"a"
    client.send(commands.Basic.Nack(1, requeue=True))
    assert delivery(client) == (True, {"x-delivery-count": 1}, b"a")


@pytest.mark.parametrize("limit", [0, 2])
@pytest.mark.parametrize("strategy", ["at-most-once", "at-least-once"])
def test_dead_letters_at_the_limit(
    client: RawClient, queue: str, limit: int, strategy: str
) -> None:
    source = quorum_queue(
        client,
        b"a",
        x_delivery_limit=limit,
        x_dead_letter_exchange="",
        x_dead_letter_routing_key=queue,
        x_dead_letter_strategy=strategy,
        x_overflow="reject-publish",
    )
    consume(client, source)
    for tag in range(1, limit + 2):
        assert delivery(client)[0] == (tag > 1)
        client.send(commands.Basic.Nack(tag, requeue=True))
    client.open_channel(2)
    client.call(
        commands.Basic.Consume(queue=queue, consumer_tag="dead"), commands.Basic.ConsumeOk, 2
    )
    redelivered, headers, body = delivery(client)
    assert (redelivered, body) == (False, b"a")
    assert headers is not None
    assert headers["x-first-death-reason"] == "delivery_limit"
    assert [death["reason"] for death in headers["x-death"]] == ["delivery_limit"]
    assert "x-delivery-count" not in headers


def test_messages_beyond_the_length_are_dropped(client: RawClient) -> None:
    assert client.drained(quorum_queue(client, b"a", b"b", b"c", x_max_length=2)) == [b"b", b"c"]


def test_rejections_are_nacks(client: RawClient) -> None:
    queue = quorum_queue(client, x_max_length=1, x_overflow="reject-publish")
    verdicts = []
    give_up_at = monotonic() + PATIENCE_S
    while "nack" not in verdicts:  # it tells its publishers a moment after the limit is exceeded
        verdicts.append(published(client, queue))
        assert monotonic() < give_up_at
    assert verdicts[:2] == ["ack", "ack"]  # the first that exceeds the limit is taken
    assert len(client.drained(queue)) == verdicts.count("ack")
    while published(client, queue) == "nack":
        assert monotonic() < give_up_at


def published(client: RawClient, queue: str) -> str:
    client.publish(queue)
    _, heard = client.hear()
    assert isinstance(heard, commands.Basic.Ack | commands.Basic.Nack), heard
    return "ack" if isinstance(heard, commands.Basic.Ack) else "nack"


def test_it_takes_a_rejection_with_dead_letters_for_the_default(
    client: RawClient, queue: str
) -> None:
    source = quorum_queue(
        client,
        *(b"a", b"b", b"c"),
        x_max_length=1,
        x_overflow="reject-publish-dlx",
        x_dead_letter_exchange="",
        x_dead_letter_routing_key=queue,
    )
    assert client.drained(source) == [b"c"]
    wait_for_messages(client, queue, 2)
    assert client.drained(queue) == [b"a", b"b"]


def test_a_prefetch_of_the_whole_channel(client: RawClient) -> None:
    queue = quorum_queue(client)
    client.call(commands.Basic.Qos(prefetch_count=5, global_=True), commands.Basic.QosOk)
    client.send(commands.Basic.Consume(queue=queue))
    text = f"NOT_IMPLEMENTED - queue '{queue}' in vhost '/' does not support global qos"
    assert client.told() == [f"connection.close 540 {text} (60, 20)"]


def test_consumers_are_not_exclusive(client: RawClient) -> None:
    queue = quorum_queue(client)
    for tag in ("me", "you"):
        method = commands.Basic.Consume(queue=queue, consumer_tag=tag, exclusive=True)
        client.call(method, commands.Basic.ConsumeOk)


@pytest.mark.parametrize("flag", ["if_empty", "if_unused"])
def test_it_is_deleted_without_conditions(client: RawClient, flag: str) -> None:
    queue = quorum_queue(client)
    client.send(commands.Queue.Delete(queue=queue, **{flag: True}))
    said = f"queue.delete operations with {flag.replace('_', '-')} flag set"
    text = f"cannot delete queue '{queue}' in vhost '/'. {said} are not supported by quorum queues"
    assert client.told() == [f"connection.close 540 NOT_IMPLEMENTED - {text} (50, 40)"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("x-delivery-limit", 6, "received '6' but current is '5'"),
        (
            "x-dead-letter-strategy",
            "at-most-once",
            "received the value 'at-most-once' of type 'longstr' but current is none",
        ),
    ],
)
def test_a_second_declaration_says_the_same(
    client: RawClient, name: str, value: object, said: str
) -> None:
    queue = quorum_queue(client, x_delivery_limit=5)
    arguments: Any = QUORUM | {"x-delivery-limit": 5} | {name: value}
    client.send(commands.Queue.Declare(queue=queue, durable=True, arguments=arguments))
    where = f"inequivalent arg '{name}' for queue '{queue}' in vhost '/'"
    assert client.told() == [refused(f"{where}: {said}")]


def test_what_lost_its_channel_comes_first(client: RawClient) -> None:
    queue = quorum_queue(client, b"a", b"b", b"c")
    client.open_channel(2)
    consume(client, queue, prefetch=2, channel=2)
    assert [delivery(client)[2] for _ in range(2)] == [b"a", b"b"]
    client.call(commands.Channel.Close(200, "", 0, 0), commands.Channel.CloseOk, 2)
    wait_for_messages(client, queue, 3)
    assert client.drained(queue) == [b"a", b"b", b"c"]
