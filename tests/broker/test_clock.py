"""Time that a test sets ahead: what expires, ends and closes, without waiting."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from pamqp import commands

from reliablepub.testing import FakeBroker, NodeOptions, faults
from tests.facts.raw_client import RawClient

DAY_S = 86_400.0


def deaths(broker: FakeBroker, queue: str) -> list[dict[str, Any]]:
    """The header of the one message in a queue that says where it died, the last place first."""
    (message,) = broker.messages(queue)
    found: Any = message.properties.headers
    return list(found["x-death"])


@pytest.fixture
def fake_broker_options() -> NodeOptions:
    return NodeOptions(heartbeat_s=60)


@pytest.fixture
def client(fake_broker: FakeBroker) -> Iterator[RawClient]:
    fake_broker.declare_queue("q")
    with RawClient(fake_broker.url) as client:
        yield client.opened()


def test_messages_expire_one_queue_after_the_other(fake_broker: FakeBroker) -> None:
    """A ladder of retries: each queue counts from the moment at which the message came to it."""
    for number, ttl_s in enumerate((10, 20, 40)):
        target = f"q{number + 1}"
        arguments = {"x-message-ttl": ttl_s * 1000, "x-dead-letter-exchange": ""}
        arguments["x-dead-letter-routing-key"] = target
        fake_broker.declare_queue(f"q{number}", arguments=arguments)
    fake_broker.declare_queue("q3")
    fake_broker.publish(b"a", "q0")

    def place() -> list[str]:
        return [queue.name for queue in fake_broker.queues() if queue.ready]

    seen = []
    for seconds in (9.0, 2.0, 18.0, 3.0, 37.0, 5.0):
        fake_broker.advance(seconds)
        seen += place()
    assert seen == ["q0", "q1", "q1", "q2", "q2", "q3"]


def test_all_the_way_at_once(fake_broker: FakeBroker) -> None:
    arguments = {"x-message-ttl": 60_000, "x-dead-letter-exchange": ""}
    fake_broker.declare_queue("a", arguments=arguments | {"x-dead-letter-routing-key": "b"})
    fake_broker.declare_queue("b", arguments=arguments | {"x-dead-letter-routing-key": "c"})
    fake_broker.declare_queue("c")
    fake_broker.publish(b"1", "a")
    fake_broker.advance(DAY_S)
    last, first = deaths(fake_broker, "c")
    assert (last["queue"], first["queue"]) == ("b", "a")
    assert last["time"].timestamp() == pytest.approx(time.time() + DAY_S, abs=120)


def test_a_queue_that_is_not_used(fake_broker: FakeBroker) -> None:
    fake_broker.declare_queue("used", arguments={"x-expires": 60_000})
    with RawClient(fake_broker.url) as client:
        client.opened().declare("unused", arguments={"x-expires": 60_000})
        fake_broker.advance(59.0)
        assert "unused" in {queue.name for queue in fake_broker.queues()}
        fake_broker.advance(2.0)
        assert "unused" not in {queue.name for queue in fake_broker.queues()}


def test_a_clients_heartbeats_are_not_late(fake_broker: FakeBroker, client: RawClient) -> None:
    fake_broker.advance(DAY_S)
    fake_broker.publish(b"a", "q")
    assert client.send(commands.Basic.Get(queue="q")).told(3)[0] == "basic.getok 1 False  q 0"


def test_a_client_that_was_silent(fake_broker: FakeBroker) -> None:
    fake_broker.declare_queue("q")
    with RawClient(fake_broker.url) as client:
        client.opened(heartbeat_s=60)
        fake_broker.advance(119.0, clients_are_silent=True)
        fake_broker.wait_for(lambda: fake_broker.connections == 1, timeout_s=60)
        fake_broker.advance(2.0, clients_are_silent=True)
        fake_broker.wait_for(lambda: fake_broker.connections == 0, timeout_s=60)


def test_a_late_confirm(fake_broker: FakeBroker, client: RawClient) -> None:
    fake_broker.inject(faults.DelayConfirm(for_s=DAY_S))
    assert client.publish("q", b"late").publish("q", b"next").told() == ["basic.ack 2"]
    fake_broker.advance(DAY_S)
    assert client.told() == ["basic.ack 1"]


def test_an_alarm_and_a_crash_end(fake_broker: FakeBroker) -> None:
    fake_broker.declare_queue("q")
    with RawClient(fake_broker.url) as client:
        fake_broker.inject(faults.Block(for_s=DAY_S))
        client.opened().publish("q", b"a")
        fake_broker.wait_for(lambda: not fake_broker.faults, timeout_s=60)
        fake_broker.advance(DAY_S)
        assert client.told_until("basic.ack")[-1] == "basic.ack 1"
        fake_broker.inject(faults.Crash(down_for_s=DAY_S))
        client.publish("q", b"b")
        fake_broker.wait_for(lambda: not fake_broker.is_up, timeout_s=60)
        fake_broker.advance(DAY_S)
        fake_broker.wait_for(lambda: fake_broker.is_up, timeout_s=60)


def test_a_freeze_ends_and_then_all_that_became_due_happens(fake_broker: FakeBroker) -> None:
    fake_broker.declare_queue("q", arguments={"x-message-ttl": 1000})
    fake_broker.publish(b"a", "q")
    with RawClient(fake_broker.url) as client:
        client.opened()
        fake_broker.inject(faults.Freeze(for_s=DAY_S))
        client.publish("q", b"b")
        fake_broker.wait_for(lambda: not fake_broker.faults, timeout_s=60)
        fake_broker.advance(DAY_S)
        assert client.told() == ["basic.ack 1"]


def test_a_delivery_that_is_not_acked_in_time_by_option() -> None:
    options = NodeOptions(consumer_timeout_s=None)
    with FakeBroker(options=options) as broker, RawClient(broker.url) as client:
        broker.declare_queue("q")
        client.opened()
        broker.publish(b"a", "q")
        client.send(commands.Basic.Get(queue="q"))
        client.told(3)
        broker.advance(DAY_S)
        assert client.send(commands.Basic.Ack(1)).told_now() == []


def test_each_delivery_has_its_own_time(fake_broker: FakeBroker, client: RawClient) -> None:
    for body in (b"a", b"b"):
        fake_broker.publish(body, "q")
        client.send(commands.Basic.Get(queue="q"))
        client.told(3)
        fake_broker.advance(1_000.0)
        if body == b"a":
            client.send(commands.Basic.Ack(1))
            client.told_now()
    fake_broker.advance(799.0)
    assert client.told_now() == []
    fake_broker.advance(2.0)
    assert client.told()[0].startswith("channel.close 406")


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e12])
def test_the_clock_goes_ahead_only(seconds: float, fake_broker: FakeBroker) -> None:
    with pytest.raises(ValueError, match="ahead"):
        fake_broker.advance(seconds)


def test_it_ends_before_the_year_9999(fake_broker: FakeBroker) -> None:
    """Dead letters have a date."""
    arguments = {"x-message-ttl": 1000, "x-dead-letter-exchange": ""}
    arguments["x-dead-letter-routing-key"] = "dead"
    fake_broker.declare_queue("dead")
    fake_broker.declare_queue("q", arguments=arguments)
    last = datetime(9998, 12, 31, tzinfo=UTC).timestamp()
    fake_broker.advance(last - time.time())
    fake_broker.publish(b"a", "q")
    fake_broker.advance(2.0)
    [death] = deaths(fake_broker, "dead")
    assert death["time"].year == 9998
    with pytest.raises(ValueError, match="ahead"):
        fake_broker.advance(DAY_S)


def test_a_reset_sets_it_right_again(fake_broker: FakeBroker) -> None:
    fake_broker.advance(DAY_S)
    fake_broker.reset()
    arguments = {"x-message-ttl": 1000, "x-dead-letter-exchange": ""}
    arguments["x-dead-letter-routing-key"] = "dead"
    fake_broker.declare_queue("dead")
    fake_broker.declare_queue("q", arguments=arguments)
    fake_broker.publish(b"a", "q")
    fake_broker.advance(2.0)
    [death] = deaths(fake_broker, "dead")
    assert death["time"].timestamp() == pytest.approx(time.time(), abs=120)
