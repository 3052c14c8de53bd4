"""Each outcome, reported for the message it belongs to, by both brokers alike."""

import gc
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from tenacity import stop_after_attempt, stop_never, wait_fixed, wait_none

from reliablepub import (
    Expired,
    GiveUp,
    Message,
    Nacked,
    Publisher,
    Refusal,
    Refused,
    Retries,
    RetryIn,
    RetryPolicy,
    Unroutable,
)
from reliablepub.headers import FieldValue
from tests.amqp_probe import AmqpProbe
from tests.policies import ONCE

IMPATIENT = RetryPolicy(
    nacked=Retries(stop_after_attempt(2), wait_none()),
    returned=Retries(stop_after_attempt(2), wait_none()),
    refused=ONCE,
)


def test_a_message_is_confirmed_and_arrives_as_it_was_published(
    broker: AmqpProbe, open_publisher: Callable[..., Publisher]
) -> None:
    queue = broker.declare_queue()
    publisher = open_publisher(broker.url)
    # pika reads a double as an integer, so a whole one here; tests/transport has the others
    headers: dict[str, FieldValue] = {
        "text": "é",
        "n": -(2**40),
        "whole": 3.0,
        "yes": True,
        "none": None,
        "raw": b"\x00\xff",
        "price": Decimal("9.99"),
        "list": [1, "two", {"three": 3}],
        "at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    }
    receipt = publisher.publish(
        b"\x00body\xff",
        routing_key=queue,
        headers=headers,
        content_type="application/json",
        content_encoding="identity",
        correlation_id="c",
        reply_to="r",
        type="t",
        app_id="a",
        user_id="guest",
        priority=7,
        expiration=60_000,
        message_id="m-1",
        timestamp=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    )
    assert receipt.result(60).message_id == "m-1"
    [(body, properties)] = broker.drain(queue, 1)
    assert body == b"\x00body\xff"
    assert properties.headers is not None
    assert properties.headers.pop("rp-attempt") % 10**11 == 1  # its tag
    assert properties.headers.pop("at").replace(tzinfo=UTC) == headers.pop("at")
    assert properties.headers == headers
    assert (properties.message_id, properties.delivery_mode, properties.priority) == ("m-1", 2, 7)
    assert (properties.content_type, properties.content_encoding) == (
        "application/json",
        "identity",
    )
    assert (properties.correlation_id, properties.reply_to) == ("c", "r")
    assert (properties.type, properties.app_id, properties.user_id) == ("t", "a", "guest")
    assert (properties.expiration, properties.timestamp) == ("60000", 1767323045)


def test_an_unroutable_message_is_never_called_confirmed(
    broker: AmqpProbe, open_publisher: Callable[..., Publisher]
) -> None:
    queue = broker.declare_queue()
    publisher = open_publisher(broker.url, retry=IMPATIENT)
    good = [publisher.publish(b"good", routing_key=queue) for _ in range(5)]
    bad = publisher.publish(b"bad", routing_key="nobody-is-bound-here", message_id="bad-1")
    good += [publisher.publish(b"good", routing_key=queue) for _ in range(5)]
    with pytest.raises(Unroutable, match=r"bad-1.*312 NO_ROUTE.*after 2 attempts") as error:
        bad.result(60)
    assert error.value.reply_code == 312
    for receipt in good:
        receipt.result(60)
    assert len(broker.drain(queue, 10)) == 10


@pytest.mark.parametrize(
    ("bad", "code", "said"),
    [
        ({"exchange": "é" * 120}, 404, "no exchange 'ééé"),
        ({"exchange": "a" + "é" * 120}, 404, "no exchange 'aééé"),
        ({"user_id": "ß" * 127}, 406, "user_id property set to 'ßßß"),
    ],
)
def test_words_of_the_broker_that_are_cut_inside_a_character_stop_nothing(
    broker: AmqpProbe,
    open_publisher: Callable[..., Publisher],
    bad: dict[str, Any],
    code: int,
    said: str,
) -> None:
    """RabbitMQ cuts a reply text at 252 bytes; what is left of it may be no UTF-8."""
    if broker.version >= (4, 0):
        pytest.skip("RabbitMQ 4 ends the connection with 541: see test_poison")
    queue = broker.declare_queue()
    publisher = open_publisher(broker.url, retry=IMPATIENT)
    messages = [Message(b"%d" % n, routing_key=queue) for n in range(20)]
    messages.insert(10, Message(b"bad", routing_key=queue, **bad))
    receipt = publisher.publish_many(messages).wait(60)
    assert (receipt.confirmed, receipt.failed) == (20, 1)
    [error] = receipt.failures
    assert isinstance(error, Refused)
    assert error.reply_code == code
    assert said in error.reply_text
    assert error.reply_text.endswith("...")
    error.reply_text.encode()  # it is text: it can be stored, logged and shown
    assert publisher.flush(60).counters.parked == 1
    assert {body for body, _ in broker.drain(queue, 20)} == {b"%d" % n for n in range(20)}


def test_messages_of_one_id_in_flight_together_keep_their_own_verdicts(
    broker: AmqpProbe, open_publisher: Callable[..., Publisher]
) -> None:
    queue = broker.declare_queue()
    publisher = open_publisher(broker.url, retry=IMPATIENT)
    messages = [
        Message(b"x", routing_key=queue if n % 2 else "nobody-is-bound-here", message_id="same")
        for n in range(100)
    ]
    receipt = publisher.publish_many(messages).wait(60)
    assert (receipt.confirmed, receipt.failed) == (50, 50)
    assert {type(error) for error in receipt.failures} == {Unroutable}
    assert len(broker.drain(queue, 50)) == 50


def test_a_full_queue_nacks_and_the_message_is_given_up_after_its_budget(
    broker: AmqpProbe, open_publisher: Callable[..., Publisher]
) -> None:
    queue = broker.declare_queue(arguments={"x-max-length": 3, "x-overflow": "reject-publish"})
    publisher = open_publisher(broker.url, retry=IMPATIENT)
    receipts = [publisher.publish(b"%d" % n, routing_key=queue) for n in range(3)]
    for receipt in receipts:
        receipt.result(60)
    with pytest.raises(Nacked, match="after 2 attempts"):
        publisher.publish(b"too much", routing_key=queue).result(60)
    assert [body for body, _ in broker.drain(queue, 3)] == [b"0", b"1", b"2"]


def test_a_nacked_message_is_confirmed_once_there_is_room(
    broker: AmqpProbe, open_publisher: Callable[..., Publisher]
) -> None:
    queue = broker.declare_queue(arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    patient = RetryPolicy(nacked=Retries(stop_after_attempt(1_000), lambda _: 0.02))
    publisher = open_publisher(broker.url, retry=patient)
    publisher.publish(b"first", routing_key=queue).result(60)
    second = publisher.publish(b"second", routing_key=queue)
    arrived = broker.drain(queue, 1)  # and the second too, if it is quick
    second.result(60)
    arrived += broker.drain(queue, 2 - len(arrived))
    assert [body for body, _ in arrived] == [b"first", b"second"]


def test_what_is_given_up_may_be_discarded_and_a_callback_may_decide(
    broker: AmqpProbe, open_publisher: Callable[..., Publisher]
) -> None:
    def decide(refusal: Refusal) -> RetryIn | GiveUp | None:
        is_last = refusal.refusals == 2
        return {"keep": GiveUp.PARK, "again": None if is_last else RetryIn(0.01)}.get(
            refusal.routing_key, refusal.verdict
        )

    retries = Retries(stop_after_attempt(1), wait_none(), then=GiveUp.DISCARD)
    publisher = open_publisher(broker.url, retry=RetryPolicy(returned=retries, decide=decide))
    receipts = {key: publisher.publish(b"x", routing_key=key) for key in ("keep", "again", "drop")}
    said = {}
    for key, receipt in receipts.items():
        with pytest.raises(Unroutable) as error:
            receipt.result(60)
        said[key] = (error.value.is_kept, error.value.attempts)
    assert said == {"keep": (True, 1), "again": (False, 2), "drop": (False, 1)}
    counters = publisher.flush(60).counters
    assert (counters.parked, counters.discarded, counters.open) == (1, 2, 0)


@pytest.mark.parametrize(
    ("poison", "text"),
    [
        (Message(b"x", exchange="no-such-exchange", message_id="poison"), "404 NOT_FOUND"),
        (Message(b"x", user_id="somebody-else", message_id="poison"), "406 PRECONDITION_FAILED"),
        (Message(b"x" * 1_048_577, message_id="poison"), "406 PRECONDITION_FAILED"),
    ],
    ids=["exchange", "user_id", "size"],
)
def test_poison_in_the_middle_of_a_window_takes_no_other_message_down(
    broker: AmqpProbe, open_publisher: Callable[..., Publisher], poison: Message, text: str
) -> None:
    queue = broker.declare_queue()
    publisher = open_publisher(broker.url, retry=IMPATIENT)
    good = [Message(b"%d" % n, routing_key=queue, message_id=f"good-{n}") for n in range(600)]
    receipt = publisher.publish_many([*good[:300], poison, *good[300:]]).wait(30)
    assert (receipt.confirmed, receipt.failed) == (600, 1)
    [error] = receipt.failures
    assert isinstance(error, Refused)
    assert error.message_id == "poison"
    assert text in str(error)
    arrived = [properties.message_id for _, properties in broker.drain(queue, 600)]
    assert set(arrived) == {message.message_id for message in good}


def test_fresh_messages_flow_while_suspects_are_sorted_out(
    broker: AmqpProbe, open_publisher: Callable[..., Publisher]
) -> None:
    queue = broker.declare_queue()
    publisher = open_publisher(broker.url, retry=IMPATIENT)
    poison = [Message(b"x", exchange="no-such-exchange") for _ in range(20)]
    good = [Message(b"%d" % n, routing_key=queue) for n in range(980)]
    mixed = [message for n in range(20) for message in (*good[n * 49 : n * 49 + 49], poison[n])]
    receipt = publisher.publish_many(mixed)
    publisher.publish(b"fresh", routing_key=queue).result(60)
    receipt.wait(30)
    assert (receipt.confirmed, receipt.failed) == (980, 20)


def test_many_messages_arrive_once_each_and_in_order_when_nothing_goes_wrong(
    broker: AmqpProbe, open_publisher: Callable[..., Publisher]
) -> None:
    queue = broker.declare_queue()
    publisher = open_publisher(broker.url)
    receipt = publisher.publish_many(Message(b"%d" % n, routing_key=queue) for n in range(2_000))
    assert receipt.wait(30).confirmed == 2_000
    assert [int(body) for body, _ in broker.drain(queue, 2_000)] == list(range(2_000))


@pytest.fixture
def cyclic_garbage() -> Iterator[list[Any]]:
    """What only Python's search for cycles finds, from here on; it is made by `gc.collect`."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_a_message_leaves_memory_with_its_outcome_and_not_when_python_looks_for_cycles(
    broker: AmqpProbe, open_publisher: Callable[..., Publisher], cyclic_garbage: list[Any]
) -> None:
    """That is seldom: until then all bodies of a busy minute would be there."""
    queue = broker.declare_queue()
    publisher = open_publisher(broker.url, retry=IMPATIENT)
    many = (Message(b"many", routing_key=queue) for _ in range(1_000))
    assert publisher.publish_many(many).wait(30).confirmed == 1_000
    publisher.publish(b"one by one", routing_key=queue).result(10)
    with pytest.raises(Unroutable):
        publisher.publish(b"bad", routing_key="nobody-is-bound-here").result(10)
    gc.collect()
    assert [item for item in cyclic_garbage if isinstance(item, Message)] == []


def test_a_message_larger_than_the_window_in_bytes_goes_alone(
    broker: AmqpProbe, open_publisher: Callable[..., Publisher]
) -> None:
    queue = broker.declare_queue()
    publisher = open_publisher(broker.url, window_bytes_max=10_000)
    sizes = [1, 9_000, 50_000, 0, 200_000, 1]
    receipts = [publisher.publish(b"x" * size, routing_key=queue) for size in sizes]
    for receipt in receipts:
        receipt.result(60)
    assert sorted(len(body) for body, _ in broker.drain(queue, 6)) == sorted(sizes)


def test_a_message_that_cannot_be_confirmed_in_time_expires(
    broker: AmqpProbe, open_publisher: Callable[..., Publisher]
) -> None:
    queue = broker.declare_queue(arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    publisher = open_publisher(
        broker.url, retry=RetryPolicy(nacked=Retries(stop_never, wait_fixed(9)))
    )
    publisher.publish(b"first", routing_key=queue).result(60)
    receipt = publisher.publish(b"late", routing_key=queue, message_id="late", expires_in_s=0.2)
    with pytest.raises(Expired, match=r"message late .* \(may have arrived\)") as error:
        receipt.result(60)
    assert (error.value.attempts, error.value.may_have_arrived) == (1, True)
    assert publisher.flush(60).counters.expired == 1
    assert [body for body, _ in broker.drain(queue, 1)] == [b"first"]


def test_a_message_that_was_never_sent_says_so(
    broker: AmqpProbe, open_publisher: Callable[..., Publisher]
) -> None:
    queue = broker.declare_queue()
    publisher = open_publisher(broker.url)
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    delayed: dict[str, Any] = {"not_before": tomorrow, "expires_in_s": 0.05}
    messages = [Message(b"x", routing_key=queue, **options) for options in ({}, *[delayed] * 2)]
    receipt = publisher.publish_many(messages).wait(60)
    assert (receipt.confirmed, receipt.failed) == (1, 2)
    for error in receipt.failures:
        assert isinstance(error, Expired)
        assert error.reply_text == "not sent"
        assert not error.may_have_arrived
    assert len(broker.drain(queue, 1)) == 1


def test_a_delayed_message_is_sent_when_it_is_due_and_no_flush_waits_for_it(
    broker: AmqpProbe, open_publisher: Callable[..., Publisher]
) -> None:
    queue = broker.declare_queue()
    publisher = open_publisher(broker.url, close_timeout_s=60)
    publisher.publish(b"first", routing_key=queue).result(60)  # connecting takes its time
    due = datetime.now(UTC) + timedelta(seconds=0.7)
    soon = publisher.publish(b"soon", routing_key=queue, not_before=due)
    publisher.publish(b"tomorrow", routing_key=queue, not_before=due + timedelta(days=1))
    publisher.publish(b"now", routing_key=queue).result(60)
    status = publisher.flush(60)
    is_early = datetime.now(UTC) < due  # unless the machine is busy
    assert status.is_flushed
    assert status.open == 2 or not is_early
    soon.result(60)
    assert datetime.now(UTC) >= due
    arrived = [body for body, _ in broker.drain(queue, 3)]
    assert (arrived if is_early else sorted(arrived)) == [b"first", b"now", b"soon"]
    assert publisher.close().open == 1
