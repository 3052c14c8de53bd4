"""An alarm of the broker: memory stays as it is, whatever is offered meanwhile.

The short forms trace what Python allocates, against the fake broker; the soak measures the process,
against RabbitMQ, for ten minutes or RELIABLEPUB_ALARM_S seconds.
"""

import gc
import os
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from reliablepub import Link, Message, OutboxFull, Publisher
from reliablepub.testing import FakeBroker
from tests.amqp_probe import AmqpProbe
from tests.rabbitmq import RabbitMQNode
from tests.waiting import until

BODY = bytes(2_048)
MIB = 1024 * 1024
SOAK_S = float(os.environ.get("RELIABLEPUB_ALARM_S", "600"))
SOAK_PER_S = 5_000
DRAIN_S = 3_600


def messages(count: int, queue: str = "q") -> Iterator[Message]:
    """Each with a body of its own, or memory would not tell."""
    return (Message(bytes(len(BODY)), routing_key=queue) for _ in range(count))


def wait_blocked(publisher: Publisher, queue: str = "q") -> None:
    """RabbitMQ tells only those who publish; so one message is on the wire."""
    publisher.publish(b"first", routing_key=queue)
    until(lambda: publisher.status.link is Link.BLOCKED)


@pytest.fixture
def fake() -> Iterator[FakeBroker]:
    with FakeBroker() as broker:
        broker.declare_queue("q")
        yield broker


@contextmanager
def traced() -> Iterator[list[int]]:
    """The bytes that were allocated within, and not freed.

    Traced no longer than that: everything takes several times as long meanwhile. A message that was
    refused leaves memory with the next turn of the relay, which a busy machine delays.
    """

    def left() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    grown: list[int] = []
    tracemalloc.start()
    try:
        yield grown
        with suppress(AssertionError):
            until(lambda: left() < MIB, timeout_s=20)
        grown.append(left())
    finally:
        tracemalloc.stop()


def test_in_an_alarm_messages_go_to_the_disk_and_not_into_memory(
    fake: FakeBroker, tmp_path: Path
) -> None:
    with Publisher(fake.url, outbox=tmp_path / "o.db", window_max=100) as publisher:
        fake.block("low on memory")
        wait_blocked(publisher)
        first = publisher.publish_many(messages(3_000))  # memory is full
        with traced() as grown:
            second = publisher.publish_many(messages(5_000))
        assert second.stored == 5_000
        assert grown[0] < MIB, f"{len(BODY) * 5_000} bytes were offered"
        assert publisher.status.in_flight <= 100
        fake.unblock()
        assert publisher.flush(60).open == 0
        assert (first.confirmed, second.confirmed) == (3_000, 5_000)


def test_in_an_alarm_without_a_disk_the_limit_raises(fake: FakeBroker) -> None:
    with Publisher(fake.url, outbox=None, open_messages_max=500, full_timeout_s=0) as publisher:
        fake.block("low on memory")
        wait_blocked(publisher)
        for _ in range(499):
            publisher.publish(BODY, routing_key="q")
        with traced() as grown:
            for _ in range(5_000):
                with pytest.raises(OutboxFull):
                    publisher.publish(BODY, routing_key="q")
        assert grown[0] < MIB
        fake.unblock()
        assert publisher.flush(60).counters.confirmed == 500


def test_in_an_alarm_without_a_disk_the_limit_makes_callers_wait(fake: FakeBroker) -> None:
    with Publisher(fake.url, outbox=None, open_messages_max=1_000) as publisher:
        fake.block("low on memory")
        wait_blocked(publisher)
        taken = 0

        def offered() -> Iterator[Message]:
            nonlocal taken
            for message in messages(10_000):
                taken += 1
                yield message

        caller = threading.Thread(target=lambda: publisher.publish_many(offered()).wait(60))
        caller.start()
        until(lambda: publisher.status.open >= 501)
        time.sleep(0.2)
        assert taken < 5_000, "and so takes no more from its source"
        assert publisher.status.open <= 1_000
        fake.unblock()
        caller.join()
        assert publisher.flush(60).counters.confirmed == 10_001


@pytest.mark.soak
@pytest.mark.rabbit
def test_ten_minutes_of_alarm_cost_no_memory(rabbitmq_node: RabbitMQNode, tmp_path: Path) -> None:
    """As many are offered as the machine lets one caller store, up to 5 000 a second."""
    probe = AmqpProbe(rabbitmq_node.url)
    # Of millions it keeps few: no consumer takes them, and they would cause an alarm of their own.
    queue = probe.declare_queue(arguments={"x-max-length": 1_000})
    with Publisher(rabbitmq_node.url, outbox=tmp_path / "o.db", close_timeout_s=60) as publisher:
        publisher.publish_many(messages(20_000, queue)).wait(60)
        rabbitmq_node.set_memory_alarm()
        wait_blocked(publisher, queue)
        publisher.publish_many(messages(20_000, queue))  # the window is full from here on
        before = most = resident_bytes()
        offered, begun = 0, time.monotonic()
        while (elapsed_s := time.monotonic() - begun) < SOAK_S:
            if offered < elapsed_s * SOAK_PER_S:
                offered += publisher.publish_many(messages(SOAK_PER_S // 10, queue)).stored
            else:
                time.sleep(0.005)
            most = max(most, resident_bytes())
        print(
            f"\n{offered} stored in {elapsed_s:.0f} s of alarm, {offered / elapsed_s:.0f} a second"
        )
        print(f"grown by {(most - before) / MIB:.1f} MiB at most")
        assert publisher.status.link is Link.BLOCKED
        assert publisher.status.open == offered + 20_001
        assert most - before < 32 * MIB
        rabbitmq_node.clear_memory_alarm()
        begun = time.monotonic()
        counters = publisher.flush(DRAIN_S).counters
        drained_s = time.monotonic() - begun
        assert (counters.open, counters.confirmed) == (0, offered + 40_001), "everything flows"
        print(f"all confirmed in {drained_s:.0f} s: {offered / drained_s:.0f} a second")
        print(f"grown by {(resident_bytes() - before) / MIB:.1f} MiB")
    probe.close()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
