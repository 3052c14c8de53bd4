"""A user, or a connection, that may have one channel: the quarantine shares it with the others."""

from collections import Counter
from collections.abc import Sequence

import pytest
from tenacity import wait_fixed

from reliablepub import Binding, Breaker, Exchange, Message, Queue, RetryPolicy, Topology
from reliablepub.hooks import LinkChanged
from reliablepub.testing import FakeBroker, NodeOptions
from tests.amqp_probe import AmqpProbe, unique
from tests.conformance.conftest import FrontDoor, is_guest
from tests.conformance.rig import Rig
from tests.policies import AT_ONCE
from tests.stores import Where
from tests.waiting import until

CONNECTS_MAX = 6


class Ends:
    """Hears why connections end.

    Once by the first second channel. RabbitMQ counts a channel for a moment longer than there is
    one, longer on a busy machine: that may end further ones, and nothing else may. A lent
    connection may not be open yet.
    """

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def on_disconnected(self, events: Sequence[LinkChanged]) -> None:
        self.reasons += [event.reason for event in events]

    def check(self) -> None:
        known = ("number of channels opened", "connection is not open")
        others = [why for why in self.reasons if not any(one in why for one in known)]
        assert others == []


def bad_among(queue: str, good: int) -> list[Message]:
    """Two messages that cost a channel each, among good ones."""
    messages = [Message(b"x", routing_key=queue, message_id=f"good-{n}") for n in range(good)]
    for place in (good // 3, good // 2):
        id_ = f"bad-{place}"
        messages.insert(place, Message(b"x", routing_key=queue, message_id=id_, user_id="nobody"))
    return messages


def assert_all_good_arrived(probe: AmqpProbe, queue: str, count: int) -> None:
    arrived = Counter(properties.message_id for _, properties in probe.drain(queue, count))
    assert set(arrived) == {f"good-{n}" for n in range(count)}


def test_a_message_that_is_refused_among_good_ones(
    rig: Rig, outbox: Where, front_door: FrontDoor
) -> None:
    queue = rig.probe.declare_queue()
    url = rig.url_of_other_user(channel_max=1)
    ends = Ends()
    with front_door(url, outbox=outbox, retry=AT_ONCE, hooks=[ends]) as publisher:
        receipt = publisher.publish_many(bad_among(queue, 200)).wait(60)
        assert (receipt.confirmed, receipt.failed) == (200, 2)
        assert {error.reply_code for error in receipt.failures} == {406}
        ends.check()
        assert publisher.status.connects <= CONNECTS_MAX
        publisher.publish(b"x", routing_key=queue, message_id="good-200").result(30)
    assert_all_good_arrived(rig.probe, queue, 201)


def test_a_missing_exchange_among_good_ones(rig: Rig, outbox: Where, front_door: FrontDoor) -> None:
    """The quarantine, and then probes, by turns with fresh messages."""
    queue, exchange = rig.probe.declare_queue(), unique("late")
    retry = RetryPolicy(breaker=Breaker(pause=wait_fixed(0.1)))
    url = rig.url_of_other_user(channel_max=1)
    ends = Ends()
    with front_door(
        url, outbox=outbox, retry=retry, hooks=[ends], close_timeout_s=0.2
    ) as publisher:
        waiting = publisher.publish_many(
            Message(b"x", exchange=exchange, routing_key="k", message_id=f"late-{n}")
            for n in range(100)
        )
        good = publisher.publish_many(
            Message(b"x", routing_key=queue, message_id=f"good-{n}") for n in range(200)
        )
        assert good.wait(60).confirmed == 200
        until(lambda: bool(publisher.status.paused))
        assert waiting.confirmed == 0
        more = publisher.publish_many(
            Message(b"x", routing_key=queue, message_id=f"good-{n}") for n in range(200, 400)
        )
        assert more.wait(60).confirmed == 200
        rig.probe.declare_exchange(exchange, kind="fanout")
        rig.probe.bind(queue, exchange)
        assert waiting.wait(60).confirmed == 100
        ends.check()
        assert publisher.status.connects <= CONNECTS_MAX
        assert publisher.status.counters.parked == 0
    arrived = {properties.message_id for _, properties in rig.probe.drain(queue, 500)}
    assert arrived == {f"good-{n}" for n in range(400)} | {f"late-{n}" for n in range(100)}


def test_a_connection_that_has_a_number_for_one_channel(
    outbox: Where, front_door: FrontDoor
) -> None:
    """channel_max 1, as the broker proposes it; nothing is lost for finding that out."""
    with FakeBroker(options=NodeOptions(channel_max=1)) as broker:
        broker.declare_queue("q")
        with front_door(broker.url, outbox=outbox, retry=AT_ONCE) as publisher:
            receipt = publisher.publish_many(bad_among("q", 100)).wait(60)
            assert (receipt.confirmed, receipt.failed) == (100, 2)
            assert publisher.status.connects == 1
        ids = {stored.properties.message_id for stored in broker.messages("q")}
        assert ids == {f"good-{n}" for n in range(100)}


def topology(exchange: str, queue: str, *, declare: bool) -> Topology:
    return Topology(
        [Exchange(exchange, "fanout")], [Queue(queue)], [Binding(exchange, queue)], declare=declare
    )


@pytest.mark.parametrize("declare", [True, False])
def test_a_topology_has_the_channel_first(
    rig: Rig, outbox: Where, front_door: FrontDoor, *, declare: bool
) -> None:
    if is_guest(front_door):
        pytest.skip("the topology of a lent connection is the application's")
    queue, exchange = rig.probe.declare_queue(), rig.probe.declare_exchange(kind="fanout")
    wanted = topology(exchange, queue, declare=declare)
    url = rig.url_of_other_user(channel_max=1)
    ends = Ends()
    with front_door(url, outbox=outbox, topology=wanted, hooks=[ends]) as publisher:
        publisher.publish(b"x", routing_key=queue).result(60)
        ends.check()
        assert publisher.status.connects <= CONNECTS_MAX
    assert len(rig.probe.drain(queue, 1)) == 1


@pytest.mark.parametrize("declare", [True, False])
def test_a_topology_has_the_only_number_first(
    outbox: Where, front_door: FrontDoor, *, declare: bool
) -> None:
    if is_guest(front_door):
        pytest.skip("the topology of a lent connection is the application's")
    with FakeBroker(options=NodeOptions(channel_max=1)) as broker:
        broker.declare_queue("q")
        broker.declare_exchange("e", "fanout")
        wanted = topology("e", "q", declare=declare)
        with front_door(broker.url, outbox=outbox, topology=wanted) as publisher:
            publisher.publish(b"x", routing_key="q").result(60)
            assert publisher.status.connects == 1
        assert len(broker.messages("q")) == 1
