"""Whose fault a refusal is: what every message gets is an outage; what one message gets is its own.

At both brokers where they can be talked into it; the rest is scripted at the fake one.
"""

import time
from collections import Counter
from functools import partial

import pytest
from tenacity import wait_exponential

from reliablepub import Breaker, Link, Message, Outbox, Refused, RetryPolicy
from reliablepub.relay import connection as relay_connection
from reliablepub.testing import FakeBroker, faults
from tests import waiting
from tests.amqp_probe import AmqpProbe, unique
from tests.conformance.conftest import FrontDoor, is_guest
from tests.stores import Where

POLICY = RetryPolicy(breaker=Breaker(pause=wait_exponential(multiplier=0.1, max=5)))
until = partial(waiting.until, timeout_s=60)


def to_exchanges(broker: FakeBroker, count: int) -> list[str]:
    """Exchanges, each with a queue for whatever comes."""
    names = [f"x{n}" for n in range(count)]
    for name in names:
        broker.declare_exchange(name, type="fanout")
        broker.declare_queue(f"{name}-queue")
        broker.bind(f"{name}-queue", name)
    return names


def arrived(broker: FakeBroker, exchanges: list[str]) -> Counter[str]:
    stored = [one for name in exchanges for one in broker.messages(f"{name}-queue")]
    return Counter(one.properties.message_id or "" for one in stored)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are made again without a wait that grows."""
    monkeypatch.setattr(relay_connection, "_WAITS", lambda _state: 0.05)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("fault", "exchanges"),
    [
        (faults.CloseChannel(code=406, text="PRECONDITION_FAILED - low on disk", keep=True), 1),
        (faults.CloseChannel(code=405, keep=True), 5),
        (faults.CloseChannel(code=506, keep=True), 5),
        (faults.CloseConnection(code=530, keep=True), 1),
    ],
    ids=["406", "405", "506", "530 of the connection"],
)
def test_what_every_message_gets_is_an_outage(
    fake: FakeBroker,
    outbox: Where,
    front_door: FrontDoor,
    fault: faults.CloseChannel | faults.CloseConnection,
    exchanges: int,
) -> None:
    if is_guest(front_door):
        pytest.skip("the application's connection is not ours to make anew")
    names = to_exchanges(fake, exchanges)
    fake.inject(fault)
    with front_door(fake.url, outbox=outbox, retry=POLICY, close_timeout_s=0.2) as publisher:
        receipt = publisher.publish_many(
            Message(b"x", exchange=names[n % exchanges], routing_key="k", message_id=str(n))
            for n in range(300)
        )
        until(lambda: publisher.status.connects > 5)
        until(lambda: publisher.status.link is not Link.CONNECTED)
        until(lambda: str(fault.code) in publisher.status.reason)
        assert (publisher.status.counters.parked, publisher.status.counters.confirmed) == (0, 0)
        fake.clear_faults()
        assert receipt.wait(90).confirmed == 300
        assert publisher.flush(60).counters.parked == 0
    assert arrived(fake, names) == {str(n): 1 for n in range(300)}


def test_one_exchange_that_refuses_every_message_is_paused_and_the_others_flow(
    fake: FakeBroker, outbox: Where, front_door: FrontDoor
) -> None:
    names = to_exchanges(fake, 2)
    fake.inject(faults.CloseChannel(code=406, routing_key="shut", keep=True))
    with front_door(fake.url, outbox=outbox, retry=POLICY, close_timeout_s=0.2) as publisher:
        shut = publisher.publish_many(
            Message(b"x", exchange=names[0], routing_key="shut", message_id=f"a{n}")
            for n in range(50)
        )
        until(lambda: publisher.status.aside > 0 or bool(publisher.status.reason))
        receipt = publisher.publish_many(
            Message(b"x", exchange=names[1], routing_key="k", message_id=f"b{n}") for n in range(99)
        )
        assert receipt.wait(60).confirmed == 99
        until(lambda: bool(publisher.status.paused))
        [paused] = publisher.status.paused
        assert (paused.exchange, paused.routing_key) == (names[0], None)
        assert paused.reason.startswith("refused: 406")
        assert publisher.status.counters.parked == 0
        fake.clear_faults()
        assert shut.wait(60).confirmed == 50
    assert set(arrived(fake, names)) == {f"a{n}" for n in range(50)} | {f"b{n}" for n in range(99)}


def test_a_single_bad_message_among_good_ones_is_parked_at_once(
    fake: FakeBroker, outbox: Where, front_door: FrontDoor
) -> None:
    [name] = to_exchanges(fake, 1)
    fake.inject(
        faults.CloseChannel(code=406, text="PRECONDITION_FAILED", routing_key="bad", keep=True)
    )
    with front_door(fake.url, outbox=outbox, retry=POLICY, close_timeout_s=0.2) as publisher:
        messages = [
            Message(b"x", exchange=name, routing_key="bad" if n == 40 else "k", message_id=str(n))
            for n in range(100)
        ]
        began = time.monotonic()
        receipt = publisher.publish_many(messages).wait(60)
        assert time.monotonic() - began < 10  # a second, on a quiet machine
        assert (receipt.confirmed, receipt.failed) == (99, 1)
        [error] = receipt.failures
        assert (type(error), error.message_id, error.reply_code) == (Refused, "40", 406)


def test_a_user_id_that_is_not_the_logins_is_paused_and_the_others_flow(
    broker: AmqpProbe, outbox: Where, front_door: FrontDoor
) -> None:
    queue = broker.declare_queue()
    with front_door(broker.url, outbox=outbox, retry=POLICY, close_timeout_s=0.2) as publisher:
        began = time.monotonic()
        foreign = publisher.publish_many(
            Message(b"x", routing_key=queue, user_id="u1", message_id=f"a{n}") for n in range(100)
        )
        good = publisher.publish_many(
            Message(b"x", routing_key=queue, message_id=f"b{n}", user_id=[None, "guest"][n % 2])
            for n in range(500)
        )
        assert good.wait(60).confirmed == 500
        assert time.monotonic() - began < 20  # a second, on a quiet machine
        until(lambda: any(one.user_id for one in publisher.status.paused))
        until(lambda: [one.waiting for one in publisher.status.paused] == [100])
        [paused] = publisher.status.paused
        assert (paused.user_id, paused.exchange, paused.routing_key) == ("u1", "", None)
        assert "'u1' but authenticated user was 'guest'" in paused.reason
        assert "the tag impersonator" in paused.reason
        assert (publisher.status.counters.parked, foreign.failed) == (0, 0)
    rows = Outbox(outbox).rows("open")
    assert {row["message_id"] for row in rows} == {f"a{n}" for n in range(100)}


def test_behind_a_fan_out_with_one_full_queue_the_other_has_every_message_and_few_copies(
    broker: AmqpProbe, outbox: Where, front_door: FrontDoor
) -> None:
    exchange = broker.declare_exchange(unique("fan"), kind="fanout")
    healthy = broker.declare_queue()
    full = broker.declare_queue(arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    for queue in (healthy, full):
        broker.bind(queue, exchange)
    with front_door(broker.url, outbox=outbox, retry=POLICY, close_timeout_s=0.2) as publisher:
        receipt = publisher.publish_many(
            Message(b"x", exchange=exchange, routing_key=f"order.{n}", message_id=str(n))
            for n in range(100)
        )
        copies: Counter[str] = Counter()
        end = time.monotonic() + 60
        while len(copies) < 100 and time.monotonic() < end:
            copies.update(properties.message_id or "" for _, properties in broker.drain(healthy))
            time.sleep(0.1)
        assert len(copies) == 100
        assert max(copies.values()) <= 5
        until(lambda: bool(publisher.status.paused))
        paused = publisher.status.paused[0]
        assert (paused.exchange, paused.routing_key) == (exchange, None)
        assert publisher.status.counters.parked == 0
        broker.delete_queue(full)
        assert receipt.wait(60).confirmed == 100
        until(lambda: not publisher.status.paused)
