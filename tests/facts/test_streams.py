"""Streams, as publishers and consumers of AMQP 0-9-1 see them."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pamqp import commands

from tests.amqp_probe import unique
from tests.facts.conftest import Connect
from tests.facts.raw_client import TRANSIENT, Properties, RawClient
from tests.facts.site import Site

STREAM = {"x-queue-type": "stream"}


@pytest.fixture(autouse=True)
def _of_version_3(site: Site) -> None:
    if site.version >= (4,):
        pytest.skip("facts of RabbitMQ 3")


def stream_of(client: RawClient, *bodies: bytes) -> str:
    """A stream with these messages, each of them a chunk of its own."""
    name = client.declare(unique("stream"), arguments=STREAM)
    client.open_channel(9)
    for number, body in enumerate(bodies, 1):
        client.publish(name, body, properties=TRANSIENT, channel=9)
        assert client.told() == [f"9: basic.ack {number}"]
    client.call(commands.Channel.Close(200, "", 0, 0), commands.Channel.CloseOk, 9)
    return name


def consume(client: RawClient, queue: str, prefetch: int = 10, **arguments: Any) -> None:
    client.call(commands.Basic.Qos(prefetch_count=prefetch), commands.Basic.QosOk)
    table = {name.replace("_", "-"): value for name, value in arguments.items()}
    client.send(commands.Basic.Consume(queue=queue, consumer_tag="me", arguments=table))


def begun(client: RawClient, queue: str, prefetch: int = 10, **arguments: Any) -> None:
    consume(client, queue, prefetch, **arguments)
    assert client.told() == ["basic.consumeok me"]


def bodies(client: RawClient, count: int) -> list[str]:
    return [line.removeprefix("body ") for line in client.told(3 * count)[2::3]]


# ---------------------------------------------------------------------- declarations


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"durable": False}, "non-durable"),
        ({"exclusive": True}, "exclusive-owner"),
        ({"auto_delete": True}, "auto-delete"),
        ({"exclusive": True, "durable": False}, "exclusive-owner"),
    ],
)
def test_a_stream_is_durable_and_not_exclusive(
    client: RawClient, flags: dict[str, bool], named: str
) -> None:
    method = commands.Queue.Declare(
        queue="wrong", arguments=dict(STREAM), **({"durable": True} | flags)
    )
    text = f"PRECONDITION_FAILED - invalid property '{named}' for queue 'wrong' in vhost '/'"
    assert client.send(method).told() == [f"channel.close 406 {text} (50, 10)"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-max-priority", 5),
        ("x-queue-mode", "lazy"),
        ("x-overflow", "drop-head"),
        ("x-message-ttl", 1000),
        ("x-expires", 1000),
        ("x-single-active-consumer", True),
        ("x-delivery-limit", 2),
        ("x-dead-letter-strategy", "at-least-once"),
        ("x-dead-letter-exchange", "a"),
        ("x-max-length", 3),
        ("x-queue-version", 2),
        ("x-queue-master-locator", "x"),
        ("x-max-in-memory-length", 4),
        ("x-max-in-memory-bytes", 4),
        ("x-quorum-initial-group-size", 1),
    ],
)
def test_an_argument_of_other_queues(client: RawClient, name: str, value: Any) -> None:
    arguments = STREAM | {name: value}
    client.send(commands.Queue.Declare(queue="wrong", durable=True, arguments=arguments))
    where = "queue 'wrong' in vhost '/' of queue type rabbit_stream_queue"
    text = f"PRECONDITION_FAILED - invalid arg '{name}' for {where}"
    assert client.told() == [f"channel.close 406 {text} (50, 10)"]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("x-max-age", "0s", "invalid_max_age"),
        ("x-max-age", "1H", "invalid_max_age"),
        ("x-max-age", "10 s", "invalid_max_age"),
        ("x-max-age", "1.5h", "invalid_max_age"),
        ("x-queue-leader-locator", "bad", "invalid_queue_locator_arg"),
        ("x-initial-cluster-size", 0, "{value_zero,0}"),
        ("x-stream-max-segment-size-bytes", -5, "{value_negative,-5}"),
    ],
)
def test_a_wrong_value(client: RawClient, name: str, value: Any, reason: str) -> None:
    arguments = STREAM | {name: value}
    client.send(commands.Queue.Declare(queue="wrong", durable=True, arguments=arguments))
    where = "queue 'wrong' in vhost '/'"
    text = f"PRECONDITION_FAILED - invalid arg '{name}' for {where}: {reason}"
    assert client.told() == [f"channel.close 406 {text} (50, 10)"]


@pytest.mark.parametrize("age", ["h", "", "-1h", "zz"])
def test_an_age_without_a_number(client: RawClient, age: str) -> None:
    arguments: Any = STREAM | {"x-max-age": age}
    client.send(commands.Queue.Declare(queue="wrong", durable=True, arguments=arguments))
    assert client.told() == ["connection.close 541 INTERNAL_ERROR (0, 0)"]


@pytest.mark.parametrize(
    ("name", "one", "another"),
    [
        ("x-max-age", "1h", "2h"),
        ("x-max-length-bytes", 5, 6),
        ("x-initial-cluster-size", 1, 2),
        ("x-stream-max-segment-size-bytes", 1000, 2000),
    ],
)
def test_an_argument_that_differs(client: RawClient, name: str, one: Any, another: Any) -> None:
    queue = client.declare(unique("stream"), arguments=STREAM | {name: one})
    arguments = STREAM | {name: another}
    client.send(commands.Queue.Declare(queue=queue, durable=True, arguments=arguments))
    where = f"queue '{queue}' in vhost '/'"
    reason = f"received '{another}' but current is '{one}'"
    text = f"PRECONDITION_FAILED - inequivalent arg '{name}' for {where}: {reason}"
    assert client.told() == [f"channel.close 406 {text} (50, 10)"]


# ---------------------------------------------------------------------- messages


def test_messages_stay_and_are_numbered(client: RawClient) -> None:
    stream = stream_of(client, b"a", b"b")
    begun(client, stream, x_stream_offset="first")
    assert client.told(6) == [
        f"basic.deliver me 1 False  {stream}",
        "header 1",
        "body b'a'",
        f"basic.deliver me 2 False  {stream}",
        "header 1",
        "body b'b'",
    ]
    client.send(commands.Basic.Ack(2, multiple=True))
    client.call(commands.Basic.Cancel("me"), commands.Basic.CancelOk)
    begun(client, stream, x_stream_offset="first")
    assert bodies(client, 2) == ["b'a'", "b'b'"]


def test_the_headers_that_it_keeps(client: RawClient) -> None:
    stream = client.declare(unique("stream"), arguments=STREAM)
    client.open_channel(9)
    headers: Any = {"zz": 1, "list": [1, "a"], "aa": "x", "table": {"x": 1}, "bool": True}
    client.publish(stream, b"1", properties=Properties(headers=headers, priority=3), channel=9)
    assert client.told() == ["9: basic.ack 1"]
    begun(client, stream, x_stream_offset="first")
    client.hear()
    (_, heard) = client.hear()
    assert heard.properties.headers == {"aa": "x", "bool": True, "x-stream-offset": 0, "zz": 1}
    assert list(heard.properties.headers) == ["aa", "bool", "x-stream-offset", "zz"]
    assert heard.properties.priority == 3


@pytest.mark.parametrize(
    ("offset", "found"),
    [
        ("first", "abc"),
        ("last", "c"),
        (1, "bc"),
        (0, "abc"),
        (-1, "abc"),
        ("1h", "abc"),
        ("1Y", "abc"),
        (datetime.now(UTC) - timedelta(hours=1), "abc"),
    ],
)
def test_where_a_consumer_begins(client: RawClient, offset: Any, found: str) -> None:
    stream = stream_of(client, b"a", b"b", b"c")
    begun(client, stream, x_stream_offset=offset)
    assert bodies(client, len(found)) == [f"b'{letter}'" for letter in found]


@pytest.mark.parametrize("arguments", [{}, {"x_stream_offset": "next"}, {"x_stream_offset": 100}])
def test_beyond_the_end(client: RawClient, arguments: dict[str, Any]) -> None:
    stream = stream_of(client, b"a")
    begun(client, stream, **arguments)
    assert client.told_now() == []


def test_what_comes_next(connect: Connect, client: RawClient) -> None:
    stream = stream_of(client, b"a")
    begun(client, stream)
    assert connect().opened().publish(stream, b"b").told() == ["basic.ack 1"]
    assert bodies(client, 1) == ["b'b'"]


def test_acknowledgements_are_credit(client: RawClient) -> None:
    stream = stream_of(client, b"a", b"b", b"c")
    begun(client, stream, prefetch=1, x_stream_offset="first")
    assert bodies(client, 1) == ["b'a'"]
    assert client.told_now() == []
    client.send(commands.Basic.Ack(1))
    assert bodies(client, 1) == ["b'b'"]


def test_two_consumers_both_get_all(connect: Connect, client: RawClient) -> None:
    stream = stream_of(client, b"a", b"b")
    other = connect().opened()
    for one in (client, other):
        begun(one, stream, x_stream_offset="first")
        assert bodies(one, 2) == ["b'a'", "b'b'"]


def test_a_declaration_does_not_count_consumers(client: RawClient) -> None:
    stream = stream_of(client)
    begun(client, stream)
    client.send(commands.Queue.Declare(queue=stream, passive=True))
    assert client.told() == [f"queue.declareok {stream} 0 0"]


def test_an_exclusive_consumer_is_not_alone(connect: Connect, client: RawClient) -> None:
    stream = stream_of(client, b"a")
    begun(client, stream)
    other = connect().opened()
    other.call(commands.Basic.Qos(prefetch_count=1), commands.Basic.QosOk)
    other.send(commands.Basic.Consume(queue=stream, consumer_tag="me", exclusive=True))
    assert other.told() == ["basic.consumeok me"]


# ---------------------------------------------------------------------- what it refuses


def test_a_consumer_without_a_prefetch(client: RawClient) -> None:
    stream = stream_of(client)
    client.call(commands.Basic.Qos(prefetch_count=5, global_=True), commands.Basic.QosOk)
    client.send(commands.Basic.Consume(queue=stream, consumer_tag="me", no_ack=True))
    where = f"'queue '{stream}' in vhost '/''"
    text = f"PRECONDITION_FAILED - consumer prefetch count is not set for {where}"
    assert client.told() == [f"channel.close 406 {text} (60, 20)"]


@pytest.mark.parametrize("offset", ["1x", "0s"])
def test_an_age_in_another_unit(client: RawClient, offset: str) -> None:
    stream = stream_of(client)
    consume(client, stream, x_stream_offset=offset)
    reason = f'{{invalid_stream_offset_arg,{{longstr,<<"{offset}">>}}}}'
    where = f"queue '{stream}' in vhost '/'"
    text = f"PRECONDITION_FAILED - invalid arg 'x-stream-offset' for {where}: {reason}"
    assert client.told() == [f"channel.close 406 {text} (60, 20)"]


@pytest.mark.parametrize("offset", ["bad", "h", "first ", True, 1.5, None])
def test_an_offset_that_it_does_not_understand(client: RawClient, offset: Any) -> None:
    stream = stream_of(client)
    consume(client, stream, x_stream_offset=offset)
    assert client.told() == ["connection.close 541 INTERNAL_ERROR (0, 0)"]


@pytest.mark.parametrize(
    ("method", "text", "ids"),
    [
        (commands.Basic.Get(), "basic.get", "(60, 70)"),
        (commands.Queue.Purge(), "queue.purge", "(50, 30)"),
    ],
)
def test_what_takes_messages_away(client: RawClient, method: Any, text: str, ids: str) -> None:
    stream = stream_of(client, b"a")
    method.queue = stream
    client.send(method)
    where = f"stream queues queue '{stream}' in vhost '/'"
    assert client.told() == [
        f"connection.close 540 NOT_IMPLEMENTED - {text} not supported by {where} {ids}"
    ]


def test_automatic_acknowledgement(client: RawClient) -> None:
    stream = stream_of(client)
    client.call(commands.Basic.Qos(prefetch_count=1), commands.Basic.QosOk)
    client.send(commands.Basic.Consume(queue=stream, consumer_tag="me", no_ack=True))
    what = "automatic acknowledgement not supported by stream queues"
    text = f"NOT_IMPLEMENTED - {what} queue '{stream}' in vhost '/'"
    assert client.told() == [f"connection.close 540 {text} (60, 20)"]


@pytest.mark.parametrize(
    ("method", "ids"),
    [(commands.Basic.Nack(1), "(60, 120)"), (commands.Basic.Reject(1, requeue=False), "(60, 90)")],
)
def test_a_refused_message(client: RawClient, method: Any, ids: str) -> None:
    stream = stream_of(client, b"a")
    begun(client, stream, x_stream_offset="first")
    bodies(client, 1)
    what = "basic.nack and basic.reject not supported by stream queues"
    text = f"NOT_IMPLEMENTED - {what} queue '{stream}' in vhost '/'"
    assert client.send(method).told() == [f"connection.close 540 {text} {ids}"]


def test_recovering(client: RawClient) -> None:
    stream = stream_of(client, b"a")
    begun(client, stream, x_stream_offset="first")
    bodies(client, 1)
    client.send(commands.Basic.Recover(requeue=True))
    assert client.told() == ["connection.close 541 INTERNAL_ERROR (0, 0)"]


@pytest.mark.parametrize("flags", [{}, {"if_unused": True}, {"if_empty": True}])
def test_it_is_deleted_whatever_it_has(
    connect: Connect, client: RawClient, flags: dict[str, bool]
) -> None:
    stream = stream_of(client, b"a")
    begun(client, stream)
    other = connect().opened()
    assert other.send(commands.Queue.Delete(queue=stream, **flags)).told() == ["queue.deleteok 0"]
    assert client.told() == ["basic.cancel me True"]
