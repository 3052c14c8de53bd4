"""What happens to accepted messages when brokers, connections and publishers die: nothing is lost.

Every message may arrive more than once, but only under its own ``message_id``, and only those that
were in flight when something broke. One in ten has an ordering key, and whatever happens, the first
copies of those arrive in their order.
"""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter

import pytest

from reliablepub import Link, Message, Outbox, Publisher, PublisherClosed, StillOpen
from reliablepub.testing import FakeBroker
from reliablepub.testing.faults import (
    Crash,
    DropConfirm,
    DropConnection,
    DuplicateConfirm,
    Fault,
    HoldConfirms,
    Nack,
    Return,
    ShuffleConfirms,
    StrayAck,
)
from tests.amqp_probe import AmqpProbe
from tests.conformance.conftest import FrontDoor, is_guest
from tests.conformance.rig import Rig
from tests.stores import Where
from tests.waiting import until

WINDOW = 200


def assert_all_arrived(probe: AmqpProbe, queue: str, expected: int, *, duplicates_max: int) -> None:
    """Every number from 0 arrived, each always under one id, and not too many of them twice."""
    arrived = probe.drain(queue, expected)
    ids = {(body, properties.message_id) for body, properties in arrived}
    assert {int(body) for body, _ in ids} == set(range(expected))
    assert len(ids) == expected
    assert len(arrived) - expected <= duplicates_max
    first_copies: dict[str, list[int]] = {}
    for number in dict.fromkeys(int(body) for body, _ in arrived):
        if (key := key_of(number)) is not None:
            first_copies.setdefault(key, []).append(number)
    assert first_copies == {key: sorted(numbers) for key, numbers in first_copies.items()}


def uncertain(outbox: Where) -> int:
    """How many attempts ended uncertain."""
    return sum(row["outcome"] == "uncertain" for row in Outbox(outbox).rows("history"))


def key_of(number: int) -> str | None:
    """One in ten has one, and each key has several in a few hundred; the scripts below do alike."""
    return None if number % 10 else f"key {number // 10 % 20}"


def numbered(count: int, queue: str, first: int = 0) -> list[Message]:
    return [
        Message(b"%d" % n, routing_key=queue, ordering_key=key_of(n))
        for n in range(first, first + count)
    ]


def test_messages_accepted_while_the_broker_is_away_are_published_when_it_comes(
    rig: Rig, outbox: Where, front_door: FrontDoor
) -> None:
    queue = rig.probe.declare_queue()
    rig.kill()
    with front_door(rig.url, outbox=outbox) as publisher:
        receipt = publisher.publish_many(numbered(3_000, queue))
        assert receipt.stored == 3_000
        with pytest.raises(StillOpen):
            receipt.wait(0.3)
        # Only the application knows why its own connection cannot be opened
        why = "is not open" if is_guest(front_door) else "refused"
        until(lambda: why in publisher.status.reason.lower())
        rig.start()
        receipt.wait(40)
        assert publisher.flush(60).open == 0
    assert_all_arrived(rig.probe, queue, 3_000, duplicates_max=0)


def test_a_connection_lost_in_flight_loses_nothing(
    rig: Rig, outbox: Where, front_door: FrontDoor
) -> None:
    queue = rig.probe.declare_queue()
    count = 0
    with front_door(rig.url, outbox=outbox, window_max=WINDOW) as publisher:
        publisher.publish_many(numbered(10, queue)).wait(60)
        count, deadline = 10, time.monotonic() + 60
        cutting = threading.Thread(target=rig.drop_connections)
        cutting.start()
        while publisher.status.connects < 2:
            publisher.publish_many(numbered(100, queue, first=count))
            count += 100
            assert time.monotonic() < deadline, "the connection was never cut"
            until(lambda: publisher.status.open < 5 * WINDOW)
        cutting.join()
        assert publisher.flush(30).open == 0
    assert_all_arrived(rig.probe, queue, count, duplicates_max=2 * WINDOW)


def test_a_broker_killed_in_flight_loses_nothing_that_it_confirmed(
    rig: Rig, outbox: Where, front_door: FrontDoor
) -> None:
    queue = rig.probe.declare_queue()
    with front_door(rig.url, outbox=outbox, window_max=WINDOW) as publisher:
        receipt = publisher.publish_many(numbered(4_000, queue))
        until(lambda: receipt.confirmed > 500)
        rig.kill()
        assert publisher.publish_many(numbered(500, queue, first=4_000)).stored == 500
        rig.start()
        receipt.wait(60)
        assert publisher.flush(30).open == 0
    assert_all_arrived(rig.probe, queue, 4_500, duplicates_max=WINDOW)


def test_a_blocked_broker_stops_sending_but_not_accepting(
    rig: Rig, outbox: Where, front_door: FrontDoor
) -> None:
    queue = rig.probe.declare_queue()
    with front_door(rig.url, outbox=outbox, confirm_timeout_s=0.5) as publisher:
        publisher.publish(b"0", routing_key=queue).result(60)
        rig.block()
        first = publisher.publish(b"1", routing_key=queue)
        until(lambda: publisher.status.link is Link.BLOCKED)
        before = uncertain(outbox)  # a busy machine may take longer to block than a confirm may
        receipt = publisher.publish_many(numbered(1_000, queue, first=2))
        assert receipt.stored == 1_000
        with pytest.raises(StillOpen):
            receipt.wait(1.0)  # longer than a confirm may take: the deadline stands still
        assert publisher.status.connects == 1
        assert uncertain(outbox) == before
        rig.unblock()
        receipt.wait(60)
        first.result(60)
    assert_all_arrived(rig.probe, queue, 1_002, duplicates_max=uncertain(outbox))


def test_what_is_open_at_close_is_published_by_the_next_publisher(
    rig: Rig, outbox: Where, front_door: FrontDoor
) -> None:
    queue = rig.probe.declare_queue()
    rig.kill()
    publisher = front_door(rig.url, outbox=outbox)
    receipt = publisher.publish_many(numbered(100, queue))
    assert publisher.close(timeout_s=0).open == 100
    with pytest.raises(PublisherClosed):
        receipt.wait(60)
    rig.start()
    with front_door(rig.url, outbox=outbox) as publisher:
        assert publisher.flush(60).open == 0
    assert_all_arrived(rig.probe, queue, 100, duplicates_max=0)


PUBLISHES_UNTIL_KILLED = """
    import itertools, sys
    from reliablepub import Message, Publisher

    url, outbox, queue = sys.argv[1:]
    with Publisher(url, outbox=outbox, window_max=200) as publisher:
        for n in itertools.count(step=50):
            publisher.publish_many(
                Message(
                    b"%d" % i,
                    routing_key=queue,
                    ordering_key=None if i % 10 else f"key {i // 10 % 20}",
                )
                for i in range(n, n + 50)
            )
            print(n + 50, flush=True)
"""

AWAITS_UNTIL_KILLED = """
    import asyncio, itertools, sys
    from reliablepub import AsyncPublisher, Message

    async def main(url, outbox, queue):
        async with AsyncPublisher(url, outbox=outbox, window_max=200) as publisher:
            for n in itertools.count(step=50):
                await publisher.publish_many(
                    Message(
                        b"%d" % i,
                        routing_key=queue,
                        ordering_key=None if i % 10 else f"key {i // 10 % 20}",
                    )
                    for i in range(n, n + 50)
                )
                print(n + 50, flush=True)

    asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("after", [50, 1_000, 3_000])
def test_a_publisher_killed_at_any_time_loses_nothing_it_accepted(
    rig: Rig, outbox: Where, front_door: FrontDoor, after: int
) -> None:
    if is_guest(front_door):
        pytest.skip("what is killed is a process, and how it was connected dies with it")
    queue = rig.probe.declare_queue()
    is_sync = front_door is Publisher
    script = textwrap.dedent(PUBLISHES_UNTIL_KILLED if is_sync else AWAITS_UNTIL_KILLED)
    command = [sys.executable, "-c", script, rig.url, str(outbox), queue]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        accepted = next(n for n in map(int, child.stdout) if n >= after)
        os.kill(child.pid, signal.SIGKILL)
        accepted = max([accepted, *map(int, child.stdout.read().split())])
    stored = Outbox(outbox).status().stored
    assert stored >= accepted
    with front_door(rig.url, outbox=outbox) as publisher:
        assert publisher.flush(60).open == 0
    # What was in flight, and as many confirms that were not on disk.
    assert_all_arrived(rig.probe, queue, stored, duplicates_max=2 * WINDOW)


def test_what_a_confirm_never_comes_for_is_sent_again_on_a_new_channel(
    fake: FakeBroker, outbox: Where, front_door: FrontDoor
) -> None:
    fake.declare_queue("q")
    fake.inject(HoldConfirms(times=10))
    with front_door(fake.url, outbox=outbox, confirm_timeout_s=1.5) as publisher:
        receipt = publisher.publish_many(numbered(10, "q"))
        until(lambda: publisher.status.in_flight == 10)
        receipt.wait(60)
        assert publisher.status.connects == 1
    assert Counter(message.body for message in fake.messages("q")) == {
        b"%d" % n: 2 for n in range(10)
    }
    told = Counter(row["outcome"] for row in Outbox(outbox).rows("history"))
    assert told == {"confirmed": 10, "uncertain": 10}


@pytest.mark.parametrize(
    "faults",
    [
        [ShuffleConfirms()],
        [DuplicateConfirm(share=0.2)],
        [StrayAck(tag=1, keep=True)],
        [StrayAck(beyond=5, nth=300)],
        [StrayAck(tag=0, multiple=True, nth=300)],
        [DropConfirm(nth=100)],
        [Nack(share=0.1), Return(share=0.1), ShuffleConfirms()],
        [DropConnection(nth=200, accepted=True), DropConnection(nth=700)],
        [Crash(nth=400, down_for_s=0.2), Crash(nth=1_300, accepted=True, down_for_s=0.1)],
        [
            Nack(share=0.05),
            Return(share=0.05),
            DropConnection(share=0.002),
            DuplicateConfirm(share=0.1),
        ],
    ],
    ids=lambda faults: "+".join(type(fault).kind for fault in faults),
)
def test_no_fault_of_the_broker_loses_a_message_or_confirms_one_falsely(
    fake: FakeBroker, outbox: Where, front_door: FrontDoor, faults: list[Fault]
) -> None:
    fake.declare_queue("q", durable=True)
    fake.inject(*faults)
    messages = [Message(b"x", routing_key="q", message_id=str(n)) for n in range(2_000)]
    with front_door(fake.url, outbox=outbox, window_max=WINDOW, confirm_timeout_s=1.0) as publisher:
        receipt = publisher.publish_many(messages).wait(60)
        counters = publisher.flush(60).counters
    arrived = {message.properties.message_id for message in fake.messages("q")}
    parked = {message.message_id for message in Outbox(outbox).parked(limit=2_000)}
    assert receipt.confirmed + receipt.failed == 2_000
    assert (counters.stored, counters.open) == (2_000, 0)
    assert (counters.confirmed, counters.parked) == (receipt.confirmed, len(parked))
    assert {message.message_id for message in messages} - parked <= arrived
