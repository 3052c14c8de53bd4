"""A destination that keeps refusing is paused, and the others go on: at both brokers."""

import time

import pytest
from tenacity import stop_after_attempt, stop_never, wait_fixed, wait_none

from reliablepub import Breaker, Message, Retries, RetryPolicy, StillOpen
from tests.amqp_probe import AmqpProbe
from tests.conformance.conftest import FrontDoor
from tests.stores import Where
from tests.waiting import until

PATIENT = Retries(stop_never, wait_none())


def policy(pause_s: float) -> RetryPolicy:
    breaker = Breaker(refusals_max=3, pause=wait_fixed(pause_s))
    return RetryPolicy(PATIENT, PATIENT, PATIENT, breaker=breaker)


def test_a_full_queue_is_paused_and_goes_on_when_there_is_room(
    broker: AmqpProbe, outbox: Where, front_door: FrontDoor
) -> None:
    full = broker.declare_queue(arguments={"x-max-length": 3, "x-overflow": "reject-publish"})
    other = broker.declare_queue()
    publisher = front_door(broker.url, outbox=outbox, retry=policy(0.1), window_max=10)
    waiting = publisher.publish_many(
        Message(b"%d" % n, routing_key=full, message_id=f"full-{n}") for n in range(12)
    )
    until(lambda: bool(publisher.status.paused))
    [paused] = publisher.status.paused
    assert (paused.exchange, paused.routing_key) == ("", full)
    flowing = publisher.publish_many(Message(b"x", routing_key=other) for _ in range(200))
    assert flowing.wait(60).confirmed == 200
    assert waiting.confirmed <= 3
    arrived = set()
    while waiting.open:
        arrived |= {properties.message_id for _, properties in broker.drain(full)}
        time.sleep(0.02)
    arrived |= {properties.message_id for _, properties in broker.drain(full)}
    assert waiting.confirmed == 12
    assert arrived == {f"full-{n}" for n in range(12)}
    until(lambda: not publisher.status.paused)
    publisher.close()


def test_while_no_queue_is_bound_only_probes_are_sent_and_spend_their_budget(
    broker: AmqpProbe, outbox: Where, front_door: FrontDoor
) -> None:
    exchange, queue = broker.declare_exchange(), broker.declare_queue()
    few = Retries(stop_after_attempt(4), wait_none())
    breaker = Breaker(refusals_max=3, pause=wait_fixed(0.2))
    retry = RetryPolicy(returned=few, breaker=breaker)
    publisher = front_door(broker.url, outbox=outbox, retry=retry, window_max=3)
    since = time.monotonic()
    receipt = publisher.publish_many(
        Message(b"x", exchange=exchange, routing_key="k", message_id=str(n)) for n in range(50)
    )
    with pytest.raises(StillOpen):
        receipt.wait(0.4)  # without a breaker, all of them would be parked by now
    # A slow machine takes its time for this line; a message fails with its fourth probe.
    assert receipt.failed <= 3 + (time.monotonic() - since) / 0.8
    broker.bind(queue, exchange, "k")
    receipt.wait(60)
    assert receipt.confirmed == 50 - receipt.failed > 0
    assert len(broker.drain(queue, receipt.confirmed)) == receipt.confirmed
    publisher.close()
