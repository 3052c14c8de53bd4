"""A refusal that blames a state of the broker, not a message: its messages wait, others flow.

A revoked permission, an exchange that is missing during a deployment, a full queue, a login that is
refused: at both brokers, under load, with a second destination that must not notice.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from tenacity import stop_after_delay, wait_fixed

from reliablepub import (
    Breaker,
    Message,
    Outbox,
    Publisher,
    Refused,
    Retries,
    RetryPolicy,
    StillOpen,
)
from tests import waiting
from tests.amqp_probe import AmqpProbe, unique
from tests.conformance.conftest import FrontDoor, is_guest
from tests.conformance.rig import Rig
from tests.stores import Where

TROUBLE_S = float(os.environ.get("RELIABLEPUB_TROUBLE_S", "1.5"))
IS_LONG = TROUBLE_S > 10
POLICY = RetryPolicy() if IS_LONG else RetryPolicy(breaker=Breaker(pause=wait_fixed(0.1)))
"""The default, but for shorter pauses where the trouble is short."""
PATIENCE_S = 60 + 4 * TROUBLE_S


until = partial(waiting.until, timeout_s=PATIENCE_S)


class Load:
    """Publishes to two destinations by turns, each message with an id of its own.

    Attributes:
        troubled: receipts of messages to the one that is in trouble.
        well: receipts of messages to the other.
    """

    def __init__(self, publisher: Publisher, troubled: Message, well: Message) -> None:
        self._publisher = publisher
        self._messages = (troubled, well)
        self.troubled: list[object] = []
        self.well: list[object] = []
        self.count = 0

    def run_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.publish(20)
            time.sleep(TROUBLE_S / 150)

    def publish(self, count: int) -> None:
        for message, receipts in zip(self._messages, (self.troubled, self.well), strict=True):
            numbers = range(self.count, self.count + count)
            receipts.append(
                self._publisher.publish_many(
                    Message(
                        b"%d" % number,
                        exchange=message.exchange,
                        routing_key=message.routing_key,
                        message_id=f"{message.message_id}-{number}",
                    )
                    for number in numbers
                )
            )
        self.count += count

    def confirmed(self, receipts: list[object]) -> int:
        return sum(receipt.confirmed for receipt in receipts)  # type: ignore[attr-defined]

    def flowed(self) -> Callable[[], bool]:
        """Whether messages that are published from now on are confirmed at the other one."""
        before = self.count
        return lambda: self.confirmed(self.well) >= before


def assert_all_arrived(probe: AmqpProbe, queue: str, name: str, count: int) -> None:
    arrived = Counter(properties.message_id for _, properties in probe.drain(queue, count))
    assert set(arrived) == {f"{name}-{number}" for number in range(count)}


@pytest.fixture
def well(rig: Rig) -> str:
    """The queue of the destination that is well."""
    return rig.probe.declare_queue()


def message_to(name: str, exchange: str, routing_key: str) -> Message:
    return Message(b"", exchange=exchange, routing_key=routing_key, message_id=name)


@contextmanager
def in_trouble(load: Load, publisher: Publisher, begin: Callable[[], None]) -> Iterator[None]:
    """Under load: trouble begins, the pause is told, and the other destination goes on."""
    load.run_for(0.3)
    begin()
    load.run_for(TROUBLE_S)
    until(lambda: bool(publisher.status.paused))
    has_flowed = load.flowed()
    load.publish(50)
    until(has_flowed)
    until(lambda: load.confirmed(load.well) == load.count)
    until(lambda: bool(publisher.status.paused))  # a late confirm may have ended the first pause
    yield
    load.run_for(0.3)


def assert_all_is_well(load: Load, publisher: Publisher) -> None:
    for receipts in (load.troubled, load.well):
        for receipt in receipts:
            receipt.wait(PATIENCE_S)  # type: ignore[attr-defined]
        assert load.confirmed(receipts) == load.count
    until(lambda: not publisher.status.paused)
    counters = publisher.status.counters
    assert (counters.parked, counters.discarded, counters.expired) == (0, 0, 0)
    print(f"\n{counters.stored} messages, all confirmed")


def what_a_waiter_is_told(load: Load) -> str:
    with pytest.raises(StillOpen) as raised:
        load.troubled[-1].wait(0.05)  # type: ignore[attr-defined]
    return str(raised.value)


def test_a_revoked_permission(rig: Rig, well: str, outbox: Where, front_door: FrontDoor) -> None:
    exchange = rig.probe.declare_exchange(unique("shut"), kind="fanout")
    queue = rig.probe.declare_queue()
    rig.probe.bind(queue, exchange)
    url = rig.url_of_other_user()
    with front_door(url, outbox=outbox, retry=POLICY, close_timeout_s=0.2) as publisher:
        load = Load(publisher, message_to("a", exchange, "k"), message_to("b", "", well))
        with in_trouble(load, publisher, lambda: rig.may_write("^amq.default$")):
            [paused] = publisher.status.paused
            assert (paused.exchange, paused.routing_key) == (exchange, None)
            assert paused.reason.startswith("refused: 403 ACCESS_REFUSED")
            assert f"exchange '{exchange}'" in paused.reason
            assert paused.waiting > 0
            assert abs(paused.since - time.time()) < 60
            why = re.compile(f"'{exchange}' is paused, .*403 ACCESS_REFUSED")
            until(lambda: why.search(what_a_waiter_is_told(load)))  # not while a probe is due
            rig.may_write(".*")
        assert_all_is_well(load, publisher)
    assert_all_arrived(rig.probe, queue, "a", load.count)
    assert_all_arrived(rig.probe, well, "b", load.count)


def test_every_permission_revoked(
    rig: Rig, well: str, outbox: Where, front_door: FrontDoor
) -> None:
    queue = rig.probe.declare_queue()
    url = rig.url_of_other_user()
    with front_door(url, outbox=outbox, retry=POLICY, close_timeout_s=0.2) as publisher:
        load = Load(publisher, message_to("a", "", queue), message_to("b", "", well))
        load.run_for(0.3)
        rig.may_write("^$")
        load.run_for(TROUBLE_S)
        until(lambda: bool(publisher.status.paused))
        rig.may_write(".*")
        load.run_for(0.3)
        assert_all_is_well(load, publisher)
    assert_all_arrived(rig.probe, queue, "a", load.count)
    assert_all_arrived(rig.probe, well, "b", load.count)


def test_an_exchange_that_is_missing_for_a_while(
    rig: Rig, well: str, outbox: Where, front_door: FrontDoor
) -> None:
    exchange = rig.probe.declare_exchange(kind="topic")
    queue = rig.probe.declare_queue()
    rig.probe.bind(queue, exchange, "#")

    def declare_again() -> None:
        rig.probe.declare_exchange(exchange, kind="topic")
        rig.probe.bind(queue, exchange, "#")

    with front_door(rig.url, outbox=outbox, retry=POLICY, close_timeout_s=0.2) as publisher:
        load = Load(publisher, message_to("a", exchange, "k"), message_to("b", "", well))
        with in_trouble(load, publisher, lambda: rig.probe.delete_exchange(exchange)):
            [paused] = publisher.status.paused
            assert (paused.exchange, paused.routing_key) == (exchange, None)
            assert f"404 NOT_FOUND - no exchange '{exchange}'" in paused.reason
            declare_again()
        assert_all_is_well(load, publisher)
    assert_all_arrived(rig.probe, queue, "a", load.count)
    assert_all_arrived(rig.probe, well, "b", load.count)


def test_a_missing_exchange_costs_few_channels_however_many_wait(
    broker: AmqpProbe, outbox: Where, front_door: FrontDoor
) -> None:
    """Each with a routing key of its own: it is the exchange that is paused."""
    exchange, queue = unique("late"), broker.declare_queue()
    hook = Channels()
    with front_door(
        broker.url, outbox=outbox, retry=POLICY, close_timeout_s=0.2, hooks=[hook]
    ) as publisher:
        since = time.monotonic()
        waiting = publisher.publish_many(
            Message(b"x", exchange=exchange, routing_key=f"k-{n}", message_id=f"a-{n}")
            for n in range(2_000)
        )
        until(lambda: bool(publisher.status.paused))
        until(lambda: publisher.status.paused[0].waiting >= 1_999)
        assert hook.refused <= 50 + 10 * (time.monotonic() - since), "and ten probes a second"
        broker.declare_exchange(exchange, kind="fanout")
        broker.bind(queue, exchange)
        assert waiting.wait(60).confirmed == 2_000
    assert_all_arrived(broker, queue, "a", 2_000)


class Channels:
    """Counts refusals by what they cost: a channel each."""

    def __init__(self) -> None:
        self.refused = 0

    def on_refused(self, events: list[object]) -> None:
        self.refused += len(events)


def test_a_full_queue(rig: Rig, well: str, outbox: Where, front_door: FrontDoor) -> None:
    limits = {"x-max-length": 200, "x-overflow": "reject-publish"}
    full = rig.probe.declare_queue(arguments=limits)
    arrived: Counter[str | None] = Counter()
    nacks = Nacks()
    with front_door(
        rig.url, outbox=outbox, retry=POLICY, close_timeout_s=0.2, hooks=[nacks]
    ) as publisher:
        load = Load(publisher, message_to("a", "", full), message_to("b", "", well))
        with in_trouble(load, publisher, lambda: None):
            [paused] = publisher.status.paused
            assert (paused.exchange, paused.routing_key) == ("", full)
            assert paused.reason == "nacked: basic.nack"
            while_full = nacks.count
        while load.confirmed(load.troubled) < load.count:
            arrived.update(properties.message_id for _, properties in rig.probe.drain(full))
            time.sleep(0.02)
        assert_all_is_well(load, publisher)
    assert nacks.count - while_full < 20 * load.count, "it goes on slowly"
    arrived.update(properties.message_id for _, properties in rig.probe.drain(full))
    assert set(arrived) == {f"a-{number}" for number in range(load.count)}
    assert_all_arrived(rig.probe, well, "b", load.count)


class Nacks:
    """Counts them."""

    def __init__(self) -> None:
        self.count = 0

    def on_nacked(self, events: list[object]) -> None:
        self.count += len(events)


def test_a_binding_that_is_missing_for_a_while(
    rig: Rig, well: str, outbox: Where, front_door: FrontDoor
) -> None:
    exchange, queue = rig.probe.declare_exchange(), rig.probe.declare_queue()
    rig.probe.bind(queue, exchange, "k")
    with front_door(rig.url, outbox=outbox, retry=POLICY, close_timeout_s=0.2) as publisher:
        load = Load(publisher, message_to("a", exchange, "k"), message_to("b", "", well))
        with in_trouble(load, publisher, lambda: rig.probe.unbind(queue, exchange, "k")):
            [paused] = publisher.status.paused
            assert (paused.exchange, paused.routing_key) == (exchange, "k")
            assert paused.reason == "returned: 312 NO_ROUTE"
            rig.probe.bind(queue, exchange, "k")
        assert_all_is_well(load, publisher)
    assert_all_arrived(rig.probe, queue, "a", load.count)
    assert_all_arrived(rig.probe, well, "b", load.count)


def test_after_its_time_a_message_is_parked_with_the_brokers_words(
    rig: Rig, well: str, outbox: Where, front_door: FrontDoor
) -> None:
    exchange = unique("never")
    patience = Retries(stop_after_delay(1.0), wait_fixed(0.1))
    policy = RetryPolicy(unavailable=patience, breaker=Breaker(pause=wait_fixed(0.2)))
    with front_door(rig.url, outbox=outbox, retry=policy, close_timeout_s=0.2) as publisher:
        load = Load(publisher, message_to("a", exchange, "k"), message_to("b", "", well))
        load.publish(300)
        until(lambda: bool(publisher.status.paused))
        load.publish(300)
        for receipt in load.troubled:
            receipt.wait(60)  # type: ignore[attr-defined]
        counters = publisher.flush(60).counters
        assert (counters.parked, counters.confirmed) == (600, 600)
        [error, *_] = load.troubled[-1].failures  # type: ignore[attr-defined]
    assert isinstance(error, Refused)
    assert f"404 NOT_FOUND - no exchange '{exchange}' in vhost '/'" in str(error)
    parked = Outbox(outbox).parked(limit=1_000)
    assert {row.reply_code for row in parked} == {404}
    assert all(exchange in row.reply_text for row in parked)
    assert_all_arrived(rig.probe, well, "b", 600)


def test_a_restart_probes_again_and_the_time_of_a_message_goes_on(
    broker: AmqpProbe, outbox: Where, front_door: FrontDoor
) -> None:
    exchange = unique("later")
    queue = broker.declare_queue()
    with front_door(broker.url, outbox=outbox, retry=POLICY, close_timeout_s=0.2) as publisher:
        publisher.publish_many(
            Message(b"x", exchange=exchange, routing_key=f"k-{n % 7}", message_id=f"a-{n}")
            for n in range(500)
        )
        until(lambda: bool(publisher.status.paused))
        until(lambda: publisher.status.paused[0].waiting >= 499)
        [before] = publisher.status.paused
    with front_door(broker.url, outbox=outbox, retry=POLICY, close_timeout_s=0.2) as publisher:
        until(lambda: bool(publisher.status.paused and publisher.status.paused[0].refusals))
        [paused] = publisher.status.paused
        assert (paused.exchange, paused.routing_key) == (exchange, None)
        until(lambda: publisher.status.paused[0].waiting >= 499)  # but for a probe
        assert abs(paused.since - before.since) < 5, "since then, not since the restart"
        broker.declare_exchange(exchange, kind="fanout")
        broker.bind(queue, exchange)
        assert publisher.flush(60).counters.confirmed == 500
    assert_all_arrived(broker, queue, "a", 500)


def test_ordering_keys_stay_in_order(
    broker: AmqpProbe, outbox: Where, front_door: FrontDoor
) -> None:
    exchange, queue = broker.declare_exchange(kind="fanout"), broker.declare_queue()
    broker.bind(queue, exchange)
    with front_door(broker.url, outbox=outbox, retry=POLICY, close_timeout_s=0.2) as publisher:

        def publish(first: int) -> None:
            publisher.publish_many(
                Message(
                    b"%d" % n,
                    exchange=exchange,
                    routing_key="k",
                    ordering_key=str(n % 5),
                    message_id=f"a-{n}",
                )
                for n in range(first, first + 100)
            )

        publish(0)
        broker.delete_exchange(exchange)
        publish(100)
        until(lambda: bool(publisher.status.paused))
        publish(200)
        broker.declare_exchange(exchange, kind="fanout")
        broker.bind(queue, exchange)
        assert publisher.flush(60).counters.confirmed == 300
    numbers = [int(body) for body, _ in broker.drain(queue, 300)]
    for key in range(5):
        of_key = list(dict.fromkeys(number for number in numbers if number % 5 == key))
        assert of_key == sorted(of_key)


def test_a_login_that_is_refused_is_an_outage_with_its_reason(
    rig: Rig, well: str, outbox: Where, front_door: FrontDoor
) -> None:
    url = rig.url_of_other_user()
    with front_door(url, outbox=outbox, retry=POLICY, close_timeout_s=0.2) as publisher:
        publisher.publish(b"x", routing_key=well, message_id="a-0").result(30)
        rig.change_password()
        waiting = publisher.publish_many(
            Message(b"x", routing_key=well, message_id=f"a-{n}") for n in range(1, 50)
        )
        words = "connection is lost" if is_guest(front_door) else "refused the credentials"
        until(lambda: (publisher.status.refusals > 0) is not is_guest(front_door))
        until(lambda: words in publisher.status.reason)
        assert publisher.status.paused == ()
        assert (publisher.status.counters.parked, waiting.failed) == (0, 0)
        rig.change_password_back()
        assert waiting.wait(60).confirmed == 49
    assert_all_arrived(rig.probe, well, "a", 50)
