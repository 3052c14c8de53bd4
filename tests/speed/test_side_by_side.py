"""Us and our peers on one RabbitMQ in one run: confirmed messages a second, and what each costs.

``make bench`` prints the table of docs/performance.md. Broker and client share the machine's
processors, so look at the ratios: rounds are interleaved, and of each way the median is taken. The
processor time a message takes the client is what a busy machine disturbs least.
"""

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aio_pika
import pytest

from reliablepub import AsyncPublisher, Message, Publisher
from tests.amqp_probe import AmqpProbe
from tests.speed import peers
from tests.speed.peers import BODY, WINDOW

pytestmark = [pytest.mark.bench, pytest.mark.rabbit, pytest.mark.timeout(1_800)]

COUNT = 20_000
ROUNDS = 3
QUEUES = 8
FIXED: dict[str, Any] = {"window_min": WINDOW, "window_max": WINDOW}
"""The window that the others have."""

Way = Callable[[str, Sequence[str], int, Path], None]
"""Publishes so many messages to queues; the path is for an outbox."""


def messages(queues: Sequence[str], count: int) -> Iterator[Message]:
    return (Message(BODY, routing_key=queues[n % len(queues)]) for n in range(count))


def ours(url: str, queues: Sequence[str], count: int, outbox: Path | None) -> None:
    with Publisher(url, outbox=outbox, **FIXED) as publisher:
        publisher.publish(BODY, routing_key=queues[0]).result(30)  # connected from here on
        assert publisher.publish_many(messages(queues, count)).wait(300).confirmed == count


def ours_async(
    url: str, queues: Sequence[str], count: int, outbox: Path | None, *, is_guest: bool = False
) -> None:
    async def publish(publisher: AsyncPublisher) -> None:
        await (await publisher.publish(BODY, routing_key=queues[0])).result(30)
        receipt = await publisher.publish_many(messages(queues, count))
        assert (await receipt.wait(300)).confirmed == count

    async def main() -> None:
        if not is_guest:
            async with AsyncPublisher(url, outbox=outbox, **FIXED) as publisher:
                await publish(publisher)
            return
        async with (
            await aio_pika.connect(url) as connection,
            AsyncPublisher(connection=connection, outbox=outbox, **FIXED) as publisher,
        ):
            await publish(publisher)

    asyncio.run(main())


def theirs(publish: Callable[[str, Sequence[str], int], None]) -> Way:
    return lambda url, queues, count, _outbox: publish(url, queues, count)


CEILING = "raw socket, frames encoded before (ceiling)"
AIO_PIKA = "aio-pika, 1 000 tasks"
DURABLE = "Publisher, on disk"
MEMORY = "Publisher, in memory"
GUEST = "AsyncPublisher(connection=...), on disk"

WAYS: dict[str, Way] = {
    CEILING: theirs(peers.raw_socket),
    "pika SelectConnection, window by hand": theirs(peers.pika_select),
    "pika BlockingConnection, no confirms": theirs(peers.pika_unconfirmed),
    "pika BlockingConnection": theirs(peers.pika_blocking),
    AIO_PIKA: theirs(peers.aio_pika_tasks),
    DURABLE: ours,
    MEMORY: lambda url, queues, count, _: ours(url, queues, count, None),
    "AsyncPublisher, on disk": ours_async,
    "AsyncPublisher, in memory": lambda url, queues, count, _: ours_async(url, queues, count, None),
    GUEST: lambda *arguments: ours_async(*arguments, is_guest=True),
}
SLOW = {"pika BlockingConnection": 20}
"""Ways that are given so many times fewer messages, to be done this year."""


@dataclass(frozen=True)
class Run:
    """What one way did in one round."""

    per_second: float
    cpu_us: float


def measured(way: Way, url: str, queues: Sequence[str], count: int, outbox: Path) -> Run:
    gc.collect()
    since, cpu = time.perf_counter(), time.process_time()
    way(url, queues, count, outbox)
    took_s, cpu_s = time.perf_counter() - since, time.process_time() - cpu
    return Run(count / took_s, cpu_s / count * 1e6)


def median(runs: list[Run]) -> Run:
    return Run(
        statistics.median(run.per_second for run in runs),
        statistics.median(run.cpu_us for run in runs),
    )


def test_confirmed_messages_a_second_and_what_they_cost(
    rabbitmq: AmqpProbe, tmp_path: Path
) -> None:
    queues = [rabbitmq.declare_queue() for _ in range(QUEUES)]
    runs: dict[str, list[Run]] = {name: [] for name in WAYS}
    gc.freeze()
    for turn in range(ROUNDS):
        for index, (name, way) in enumerate(WAYS.items()):
            outbox = tmp_path / f"{turn}-{index}.db"
            count = COUNT // SLOW.get(name, 1)
            runs[name].append(measured(way, rabbitmq.url, queues, count, outbox))
            rabbitmq.purge(*queues)
    gc.unfreeze()
    table = {name: median(measures) for name, measures in runs.items()}
    ceiling = table[CEILING]
    print(f"\n{'':45} confirmed/s  of ceiling  us a message")
    for name, run in table.items():
        share = run.per_second / ceiling.per_second
        print(f"{name:45} {run.per_second:11,.0f}  {share:10.2f}  {run.cpu_us:12.0f}")
    print(f"medians of {ROUNDS} rounds of {COUNT:,} messages of 1 KiB, persistent, {QUEUES} queues")
    assert table[DURABLE].cpu_us * 2 < table[AIO_PIKA].cpu_us
    assert table[MEMORY].cpu_us < table[DURABLE].cpu_us
