"""Tasks cancelled anywhere: nothing wedges, nothing is lost, no task gets another's outcome.

Every publish has a `message_id` of its own, which the test keeps, so that afterwards each one can
be accounted for: what was not stored did not arrive, what was confirmed did, and the unroutable
ones were never called confirmed.
"""

import asyncio
import random
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tenacity import stop_after_attempt, wait_none

from reliablepub import AsyncPublisher, Confirmed, Message, Outbox, Retries, RetryPolicy, Unroutable
from reliablepub.testing import FakeBroker, faults
from tests.amqp_probe import AmqpProbe
from tests.async_publisher.conftest import OpenPublisher, Run

TWICE = RetryPolicy(returned=Retries(stop_after_attempt(2), wait_none()))
NOWHERE = "nobody-is-bound-here"


class Steps:
    """Runs a coroutine by hand, and cancels it at its n-th await: no luck is needed."""

    def __init__(self, cancel_at: int) -> None:
        self._cancel_at = cancel_at
        self.taken = 0

    async def run(self, coroutine: Any) -> Any:
        task = asyncio.ensure_future(_Stepped(self, coroutine))
        return await asyncio.gather(task, return_exceptions=True)


class _Stepped:
    """Awaits what a coroutine awaits, and throws into it when its step has come."""

    def __init__(self, steps: Steps, coroutine: Any) -> None:
        self._steps = steps
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, None, Any]:
        result = None
        while True:
            try:
                waited_for = self._coroutine.send(result)
            except StopIteration as stop:
                return stop.value
            self._steps.taken += 1
            if self._steps.taken == self._steps._cancel_at:
                if waited_for is not None:
                    waited_for._asyncio_future_blocking = False
                    waited_for.cancel()
                return self._coroutine.throw(asyncio.CancelledError())
            result = yield waited_for


async def every_verb(
    publisher: AsyncPublisher, queue: str, ids: Iterator[str], streams: list[list[str]]
) -> None:
    receipt = await publisher.publish(b"x", routing_key=queue, message_id=next(ids))
    await receipt
    await receipt.result(60)
    stream = [Message(b"x", routing_key=queue, message_id=next(ids)) for _ in range(1_200)]
    streams.append([str(message.message_id) for message in stream])
    batch = await publisher.publish_many(stream)
    await batch.wait(60)
    await batch
    await publisher.flush(60)


def test_every_await_of_every_verb_can_be_the_one_that_is_cancelled(
    run: Run[None], broker: FakeBroker, path: Path, open_publisher: OpenPublisher
) -> None:
    made: list[str] = []
    streams: list[list[str]] = []

    def ids() -> Iterator[str]:
        while True:
            made.append(str(len(made)))
            yield made[-1]

    async def main() -> None:
        async with open_publisher(broker.url, outbox=path) as publisher:
            cancel_at, was_cancelled = 0, True
            while was_cancelled:
                cancel_at += 1
                steps = Steps(cancel_at)
                await steps.run(every_verb(publisher, "q", ids(), streams))
                was_cancelled = steps.taken >= cancel_at
                receipt = await publisher.publish(b"after", routing_key="q")
                await receipt.result(60)  # not wedged
            assert cancel_at > 4
            assert (await publisher.flush(60)).open == 0

    run(main())
    arrived = [m.properties.message_id for m in broker.messages("q") if m.body != b"after"]
    assert len(arrived) == len(set(arrived))
    assert set(arrived) <= set(made)
    counters = Outbox(path).status()
    assert counters.stored == counters.confirmed
    for stream in streams:
        ids_of_it = {*stream}
        found = [id_ for id_ in arrived if id_ in ids_of_it]
        assert found == stream[: len(found)], "stored up to some chunk, without a hole"
    assert {stream[-1] for stream in streams} & {*arrived}, "none was stored whole"


@pytest.mark.parametrize(
    "count", [1_500, pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(3_600)])]
)
def test_cancelled_at_random_nothing_is_lost_wedged_or_mixed_up(
    run: Run[None], probe: AmqpProbe, path: Path, open_publisher: OpenPublisher, count: int
) -> None:
    queue = probe.declare_queue()
    chance = random.Random(count)
    verdicts: dict[str, Confirmed | Unroutable] = {}
    stored: set[str] = set()
    cancelled = 0

    async def publish(publisher: AsyncPublisher, message_id: str) -> None:
        key = NOWHERE if message_id.endswith("-bad") else queue
        receipt = await publisher.publish(b"x", routing_key=key, message_id=message_id)
        stored.add(message_id)
        try:
            verdicts[message_id] = await receipt
        except Unroutable as error:
            verdicts[message_id] = error

    async def main() -> None:
        nonlocal cancelled
        number = 0
        async with open_publisher(probe.url, outbox=path, retry=TWICE) as publisher:
            while cancelled < count:
                tasks = []
                for _ in range(chance.randint(1, 60)):
                    number += 1
                    kind = "bad" if chance.random() < 0.3 else "good"
                    tasks.append(asyncio.create_task(publish(publisher, f"{number}-{kind}")))
                for _ in range(chance.randint(0, 3)):
                    await asyncio.sleep(chance.choice([0, 0, 0.0005, 0.002, 0.01]))
                for task in chance.sample(tasks, len(tasks) * 2 // 3):
                    cancelled += task.cancel()
                done, pending = await asyncio.wait(tasks, timeout=60)
                assert pending == set()  # not wedged
                for task in done:
                    assert task.cancelled() or task.exception() is None
            assert (await publisher.flush(60)).open == 0

    run(main())
    parked = [m.message_id for m in Outbox(path).parked(limit=1_000_000)]
    confirmed = Outbox(path).status().confirmed
    arrived = [p.message_id for _, p in probe.drain(queue, confirmed, timeout_s=600)]
    for message_id, verdict in verdicts.items():
        assert verdict.message_id == message_id
        assert isinstance(verdict, Unroutable) == message_id.endswith("-bad")
    assert len(arrived) == len(set(arrived))  # nothing broke, so nothing is sent twice
    assert len(parked) == len(set(parked))
    assert stored <= {*arrived, *parked}
    assert all(str(message_id).endswith("-good") for message_id in arrived)
    assert all(message_id.endswith("-bad") for message_id in parked)
    assert len(arrived) + len(parked) == Outbox(path).status().stored


def test_cancelled_while_connections_break_nothing_is_lost(
    run: Run[None], broker: FakeBroker, path: Path, open_publisher: OpenPublisher
) -> None:
    chance = random.Random(1)
    stored: set[str] = set()
    confirmed: set[str] = set()

    async def publish(publisher: AsyncPublisher, message_id: str) -> None:
        receipt = await publisher.publish(b"x", routing_key="q", message_id=message_id)
        stored.add(message_id)
        confirmed.add((await receipt).message_id)

    async def main() -> None:
        broker.inject(
            faults.DropConnection(share=0.01),
            faults.Nack(share=0.05),
            faults.DuplicateConfirm(share=0.1),
        )
        eager = RetryPolicy(nacked=Retries(stop_after_attempt(100), wait_none()))
        async with open_publisher(
            broker.url, outbox=path, retry=eager, confirm_timeout_s=1
        ) as publisher:
            for turn in range(20):
                tasks = [asyncio.create_task(publish(publisher, f"{turn}-{n}")) for n in range(30)]
                await asyncio.sleep(chance.choice([0, 0.001, 0.01]))
                for task in tasks[::2]:
                    task.cancel()
                await asyncio.wait(tasks, timeout=60)
            assert (await publisher.flush(60)).open == 0

    run(main())
    arrived = {message.properties.message_id for message in broker.messages("q")}
    assert confirmed <= stored <= arrived
    status = Outbox(path).status()
    assert (status.stored, status.parked) == (status.confirmed, 0)
    assert len(arrived) == status.stored
