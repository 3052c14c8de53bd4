"""Brokers that fall silent: noticed in time, and what they say too late confirms nothing.

No test here measures: each waits for what it wants to see, and for no longer than is forgivable.
The soak holds the default heartbeat against RabbitMQ, and prints how long that took. A connection
that the application lends us has a heartbeat of its own.
"""

import inspect
import time
from collections import Counter
from collections.abc import Sequence

import pytest
from tenacity import stop_after_attempt

from reliablepub import BatchReceipt, Link, Nacked, Receipt, Retries, RetryPolicy
from reliablepub.front.options import new_client
from reliablepub.hooks import AttemptEnded
from reliablepub.testing import FakeBroker
from reliablepub.testing.faults import DelayConfirm, Freeze, HoldConfirms, Nack
from tests.amqp_probe import AmqpProbe
from tests.conformance.conftest import FrontDoor
from tests.conformance.test_survival import numbered
from tests.rabbitmq import RabbitMQNode
from tests.stores import Where
from tests.waiting import until


def test_both_deadlines_are_on_by_default() -> None:
    parameters = inspect.signature(new_client).parameters
    assert parameters["confirm_timeout_s"].default == 30
    assert parameters["heartbeat_s"].default == 10


@pytest.mark.parametrize("front_door", ["threads", "asyncio"], indirect=True)
def test_a_frozen_broker_is_noticed_by_its_silence(
    fake: FakeBroker, outbox: Where, front_door: FrontDoor
) -> None:
    fake.declare_queue("q")
    with front_door(fake.url, outbox=outbox, heartbeat_s=1) as publisher:
        publisher.publish_many(numbered(5, "q")).wait(60)
        fake.freeze()
        receipt = publisher.publish_many(numbered(10, "q", first=5))
        until(lambda: publisher.status.in_flight == 10)
        # By its heartbeats: confirms would tell after 30 s.
        until(lambda: publisher.status.link is not Link.CONNECTED, timeout_s=20.0)
        assert publisher.status.in_flight == 0
        assert "no heartbeats (interval 1 s) arrived" in publisher.status.reason
        fake.thaw()
        assert receipt.wait(60).confirmed == 10
        assert publisher.status.connects >= 2  # a busy machine may be silent, too
    arrived = {(message.body, message.properties.message_id) for message in fake.messages("q")}
    assert len(arrived) == 15, "each under one id, whichever connection brought it"
    assert {int(body) for body, _ in arrived} == set(range(15))


class Overdue:
    """A hook that counts attempts whose confirm did not come."""

    count = 0

    def on_uncertain(self, events: Sequence[AttemptEnded]) -> None:
        self.count += len(events)


def test_a_confirm_that_comes_too_late_is_counted_and_confirms_nothing(
    fake: FakeBroker, outbox: Where, front_door: FrontDoor
) -> None:
    fake.declare_queue("q")
    fake.inject(HoldConfirms(times=10), Freeze(nth=10), Nack(nth=11, times=10))
    once = RetryPolicy(nacked=Retries(stop_after_attempt(1), lambda _: 0.0))
    options = {"retry": once, "confirm_timeout_s": 2.0}
    overdue = Overdue()
    with front_door(fake.url, outbox=outbox, hooks=[overdue], **options) as publisher:
        receipt = publisher.publish_many(numbered(10, "q"))
        until(lambda: overdue.count == 10)
        fake.release_confirms()
        fake.thaw()
        assert [type(error) for error in receipt.wait(60).failures] == [Nacked] * 10
        status = publisher.flush(60)
        assert (status.counters.confirmed, status.counters.parked) == (0, 10)
        assert status.stale > 0
        assert status.connects == 1, "the channel was given up, and nothing else"
    ids = Counter(publish.properties.message_id for publish in fake.published)
    assert sorted(ids.values()) == [2] * 10


def test_a_queue_that_confirms_nothing_makes_no_copies_of_what_goes_to_others(
    fake: FakeBroker, front_door: FrontDoor
) -> None:
    """Like a quorum queue without its majority. The others always have messages in flight."""
    fake.declare_queue("well")
    fake.declare_queue("stuck")
    fake.inject(HoldConfirms(routing_key="stuck"))
    fake.inject(DelayConfirm(routing_key="well", for_s=0.3, keep=True))
    overdue = Overdue()
    stuck: list[Receipt] = []
    well: list[BatchReceipt] = []
    with front_door(fake.url, outbox=None, hooks=[overdue], confirm_timeout_s=3) as publisher:
        while overdue.count < 20:  # several times, since a message is late every 0.1 s
            stuck.append(publisher.publish(b"", routing_key="stuck"))
            well.append(publisher.publish_many(numbered(10, "well", first=10 * len(well))))
            time.sleep(0.1)
        assert all(receipt.wait(60).confirmed == 10 for receipt in well)
        fake.clear_faults()
        fake.release_confirms()
        for receipt in stuck:
            receipt.result(60)
        assert publisher.status.connects == 1
    arrived = Counter(message.body for message in fake.messages("well"))
    assert (len(arrived), arrived.total()) == (10 * len(well), 10 * len(well))


@pytest.mark.soak
@pytest.mark.rabbit
@pytest.mark.parametrize("front_door", ["threads", "asyncio"], indirect=True)
def test_a_frozen_rabbitmq_is_noticed_within_twenty_seconds(
    rabbitmq_node: RabbitMQNode, outbox: Where, front_door: FrontDoor
) -> None:
    """Frozen a second after the last heartbeat, which delays its notice the most."""
    probe = AmqpProbe(rabbitmq_node.url)
    queue = probe.declare_queue()
    with front_door(rabbitmq_node.url, outbox=outbox) as publisher:
        publisher.publish_many(numbered(5, queue)).wait(60)
        time.sleep(1.0)
        rabbitmq_node.pause()
        since = time.monotonic()
        receipt = publisher.publish_many(numbered(10, queue, first=5))
        until(lambda: publisher.status.link is not Link.CONNECTED, timeout_s=60.0)
        took_s = time.monotonic() - since
        print(f"\nnoticed after {took_s:.1f} s: {publisher.status.reason}")
        rabbitmq_node.resume()
        assert receipt.wait(30).confirmed == 10
    arrived = probe.drain(queue, 15, timeout_s=20)
    assert len({(body, properties.message_id) for body, properties in arrived}) == 15
    probe.close()
    assert took_s < 21
