"""Ordering keys: whatever becomes of a message, those behind it in its key come after it, or not.

Tried at both brokers and from both sides, threads and asyncio. What ends a connection, a broker or
the publisher is in `test_survival`, where one message in ten has a key.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from tenacity import stop_after_attempt, stop_never, wait_fixed

from reliablepub import Breaker, Expired, Message, Outbox, Publisher, Retries, RetryPolicy
from reliablepub.testing import FakeBroker
from reliablepub.testing.faults import (
    Crash,
    DropConfirm,
    DropConnection,
    DuplicateConfirm,
    Nack,
    ShuffleConfirms,
)
from tests.amqp_probe import AmqpProbe, unique
from tests.conformance.conftest import FrontDoor
from tests.conformance.rig import Rig
from tests.conformance.test_survival import WINDOW, uncertain
from tests.policies import ONCE
from tests.stores import Where
from tests.waiting import until

BOTH_DOORS = pytest.mark.parametrize("front_door", ["threads", "asyncio"], indirect=True)
SOON = Retries(stop_never, wait_fixed(0.05))


def of_key(
    key: str, numbers: Iterable[int], routing_key: str, exchange: str = "", **options: Any
) -> list[Message]:
    return [Message(b"%d" % n, exchange, routing_key, ordering_key=key, **options) for n in numbers]


def first_copies(broker: AmqpProbe, queue: str, expected: int) -> list[int]:
    return list(dict.fromkeys(int(body) for body, _ in broker.drain(queue, expected)))


def attempts(outbox: Where, outcome: str) -> int:
    """How many have ended so."""
    return sum(row["outcome"] == outcome for row in Outbox(outbox).rows("history"))


# -------------------------------------------------------------------- tried again


@BOTH_DOORS
def test_a_key_waits_for_what_is_refused_and_then_returned(
    broker: AmqpProbe, outbox: Where, front_door: FrontDoor
) -> None:
    exchange, queue = unique("exchange"), broker.declare_queue()
    breaker = Breaker(pause=wait_fixed(0.05))
    retry = RetryPolicy(returned=SOON, refused=SOON, breaker=breaker)
    with front_door(broker.url, outbox=outbox, retry=retry) as publisher:
        waiting = publisher.publish_many(of_key("waits", range(6), "k", exchange))
        for key in range(1, 4):  # whose channels are closed because of the first
            publisher.publish_many(of_key(f"key {key}", range(key * 10, key * 10 + 10), queue))
        until(lambda: attempts(outbox, "refused") > 2)
        broker.declare_exchange(exchange)
        until(lambda: attempts(outbox, "returned") > 2)
        assert waiting.open == 6
        broker.bind(queue, exchange, "k")
        assert waiting.wait(60).confirmed == 6
        assert publisher.flush(60).open == 0
    arrived = first_copies(broker, queue, 36)
    assert sorted(arrived) == [*range(6), *range(10, 40)]
    for tens in range(4):
        of_one = [n for n in arrived if n // 10 == tens]
        assert of_one == sorted(of_one)


@BOTH_DOORS
def test_messages_of_a_key_arrive_in_their_order_though_a_full_queue_refuses_some(
    broker: AmqpProbe, open_publisher: Callable[..., Publisher]
) -> None:
    queue = broker.declare_queue(arguments={"x-max-length": 2, "x-overflow": "reject-publish"})
    patient = RetryPolicy(nacked=Retries(stop_after_attempt(1_000), lambda _: 0.02))
    publisher = open_publisher(broker.url, retry=patient)
    receipt = publisher.publish_many(
        Message(b"%d" % n, routing_key=queue, ordering_key="k") for n in range(12)
    )
    arrived: list[int] = []
    while len(set(arrived)) < 12:
        arrived += [int(body) for body, _ in broker.drain(queue, 1)]
    receipt.wait(60)
    assert list(dict.fromkeys(arrived)) == list(range(12))


def test_keys_do_not_wait_for_each_other(
    broker: AmqpProbe, open_publisher: Callable[..., Publisher]
) -> None:
    full = broker.declare_queue(arguments={"x-max-length": 0, "x-overflow": "reject-publish"})
    queue = broker.declare_queue()
    publisher = open_publisher(
        broker.url, retry=RetryPolicy(nacked=Retries(stop_after_attempt(1_000), wait_fixed(9)))
    )
    stuck = publisher.publish(b"stuck", routing_key=full, ordering_key="stuck")
    behind = publisher.publish(b"behind", routing_key=queue, ordering_key="stuck")
    messages = [
        Message(b"%d" % n, routing_key=queue, ordering_key=f"key {n % 3}") for n in range(30)
    ]
    assert publisher.publish_many(messages).wait(60).confirmed == 30
    arrived = [int(body) for body, _ in broker.drain(queue, 30)]
    for key in range(3):
        assert [n for n in arrived if n % 3 == key] == list(range(key, 30, 3))
    assert [receipt.is_settled for receipt in (stuck, behind)] == [False, False]


@BOTH_DOORS
def test_a_confirm_that_is_overdue_changes_no_order(
    rig: Rig, outbox: Where, front_door: FrontDoor
) -> None:
    queue = rig.probe.declare_queue()
    with front_door(rig.url, outbox=outbox, confirm_timeout_s=1.0) as publisher:
        publisher.publish(b"0", routing_key=queue).result(30)
        rig.freeze()
        receipts = [
            publisher.publish_many(of_key(f"key {key}", range(key * 10, key * 10 + 10), queue))
            for key in range(1, 4)
        ]
        until(lambda: uncertain(outbox) >= 3)
        rig.thaw()
        for receipt in receipts:
            assert receipt.wait(60).confirmed == 10
    arrived = first_copies(rig.probe, queue, 31)
    for tens in range(1, 4):
        assert [n for n in arrived if n // 10 == tens] == list(range(tens * 10, tens * 10 + 10))


def test_no_fault_of_the_broker_changes_the_order_of_a_key(
    fake: FakeBroker, outbox: Where, front_door: FrontDoor
) -> None:
    fake.declare_queue("q", durable=True)
    fake.inject(
        *(Nack(share=0.05), DropConnection(share=0.01), DropConfirm(share=0.01)),
        *(ShuffleConfirms(), DuplicateConfirm(share=0.05), Crash(nth=150, down_for_s=0.1)),
    )
    patient = RetryPolicy(nacked=Retries(stop_after_attempt(1_000), lambda _: 0.01))
    options = {"retry": patient, "confirm_timeout_s": 0.3, "window_max": WINDOW}
    with front_door(fake.url, outbox=outbox, **options) as publisher:
        receipt = publisher.publish_many(
            Message(b"%d" % n, routing_key="q", ordering_key=f"key {n % 20}") for n in range(300)
        ).wait(60)
    assert receipt.confirmed == 300
    arrived = list(dict.fromkeys(int(message.body) for message in fake.messages("q")))
    for key in range(20):
        assert [n for n in arrived if n % 20 == key] == list(range(key, 300, 20))


# -------------------------------------------------------------------- given up


@BOTH_DOORS
def test_what_expires_lets_its_key_go_on_in_order(
    broker: AmqpProbe, outbox: Where, front_door: FrontDoor
) -> None:
    full = broker.declare_queue(arguments={"x-max-length": 0, "x-overflow": "reject-publish"})
    queue = broker.declare_queue()
    retry = RetryPolicy(nacked=Retries(stop_never, wait_fixed(9)))
    with front_door(broker.url, outbox=outbox, retry=retry) as publisher:
        [head] = of_key("k", [0], full, message_id="head", expires_in_s=0.4)
        [brief] = of_key("k", [1], queue, message_id="brief", expires_in_s=0.05)
        receipt = publisher.publish_many([head, brief, *of_key("k", range(2, 8), queue)]).wait(60)
    assert (receipt.confirmed, receipt.failed) == (6, 2)
    expired = {error.message_id: error for error in receipt.failures if isinstance(error, Expired)}
    assert expired.keys() == {"head", "brief"}
    assert not expired["brief"].may_have_arrived, "its turn had not come"
    assert first_copies(broker, queue, 6) == list(range(2, 8))


@BOTH_DOORS
def test_what_is_parked_holds_its_key_until_a_person_decides(
    broker: AmqpProbe, outbox: Where, front_door: FrontDoor
) -> None:
    exchange, queue = unique("exchange"), broker.declare_queue()
    retry = RetryPolicy(returned=ONCE, refused=ONCE)
    with front_door(broker.url, outbox=outbox, retry=retry) as publisher:
        for key, tens, lost in (("resumed", 1, (exchange, "k")), ("skipped", 2, ("", exchange))):
            behind = of_key(key, range(tens * 10 + 1, tens * 10 + 6), queue)
            publisher.publish_many([*of_key(key, [tens * 10], lost[1], lost[0]), *behind])
        publisher.publish_many(of_key("free", range(30, 36), queue)).wait(60)
        assert publisher.flush(60).is_flushed, "a flush does not wait for an operator"
        people = Outbox(outbox)
        held = {key.ordering_key: (key.outcome, key.held_back) for key in people.held_keys()}
        assert held == {"resumed": ("refused", 5), "skipped": ("returned", 5)}
        broker.declare_exchange(exchange)
        broker.bind(queue, exchange, "k")
        assert people.resume_key("resumed") == people.skip_key("skipped") == 1
        until(lambda: people.status().open == 0)
    arrived = first_copies(broker, queue, 17)
    assert [n for n in arrived if n < 20] == list(range(10, 16))
    assert [n for n in arrived if 20 <= n < 30] == list(range(21, 26))
    [parked] = people.parked()
    assert (parked.routing_key, parked.outcome) == (exchange, "returned")
