"""What more cores give us; and how near we come to the broker's own speed if it has a core.

In the first part the broker is a `Sink`, which takes next to no CPU time, and all that runs
is kept to one core, to two, and so on. In the second, RabbitMQ has one core and the client another.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from reliablepub import Message, Outbox
from tests.amqp_probe import AmqpProbe
from tests.rabbitmq import RabbitMQNode
from tests.speed import alone, gopher
from tests.speed.alone import Figure, Job, relay
from tests.speed.gopher import Sink
from tests.speed.measuring import Goal, check, in_rounds, print_table, spaced
from tests.speed.ways import (
    CEILING,
    CEILING_WITH_IDS,
    DURABLE,
    GO,
    GO_WITH_IDS,
    MEMORY,
    RAM_DISK,
    Ways,
)

pytestmark = [pytest.mark.bench, pytest.mark.timeout(7_200)]

CORES = sorted(os.sched_getaffinity(0))
LASTS_S = 5.0
COUNT = 40_000
ROUNDS = 5
TURNS = 3
QUEUES = [f"queue{number}" for number in range(8)]


@contextmanager
def kept_to(cores: Sequence[int]) -> Iterator[None]:
    """For the block, threads and processes that this thread starts run on these cores only."""
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, CORES)


def at_once(jobs: Sequence[Job]) -> tuple[float, float, float]:
    """Messages per second of all of them, their CPU time, and seconds from first to last."""
    with ThreadPoolExecutor(len(jobs)) as threads:
        figures: list[Figure] = [one for some in threads.map(alone.run, jobs) for one in some]
    took_s = max(one.ended_at for one in figures) - min(one.began_at for one in figures)
    count = sum(one.messages for one in figures)
    cpu_us = sum(one.cpu_us * one.messages for one in figures) / count
    return count / took_s, cpu_us, took_s


def medians(figures: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
    """The median of each figure."""
    return tuple(map(statistics.median, zip(*(figures() for _ in range(TURNS)), strict=True)))


# ------------------------------------------------------------------ more cores, a free broker


def publishers(broker: Sink, count: int, folder: Path | None) -> tuple[float, float, float]:
    """Processes that publish, each with an outbox of its own, or in memory; last, the broker."""
    outboxes = [str(folder / f"{time.monotonic_ns()}.db") if folder else None for _ in range(count)]
    used_s = broker.processor_s()
    jobs = [Job("publish", broker.url, one, QUEUES, [10**9], LASTS_S) for one in outboxes]
    per_second, cpu_us, took_s = at_once(jobs)
    return per_second, cpu_us, (broker.processor_s() - used_s) / took_s


def enqueuers(url: str, count: int, folder: Path) -> tuple[float, float, float]:
    """Processes that enqueue in one outbox while a relay publishes; last, what was confirmed."""
    path = folder / f"{time.monotonic_ns()}.db"
    with Outbox(path) as outbox, ThreadPoolExecutor(1) as thread, relay(url, str(path)):
        outbox.enqueue(Message(b"", routing_key=QUEUES[0]))
        wait_for(lambda: outbox.status().confirmed == 1)
        job = Job("enqueue", url, str(path), QUEUES, [], LASTS_S)
        enqueued = thread.submit(at_once, [job] * count)
        wait_for(lambda: outbox.status().stored > 1)
        since, before = time.perf_counter(), outbox.status().confirmed
        per_second, cpu_us, _ = enqueued.result()
        confirmed = outbox.status().confirmed - before
        return per_second, cpu_us, confirmed / (time.perf_counter() - since)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_each_core_counts(tmp_path: Path) -> None:
    if reason := gopher.missing():
        pytest.skip(reason)
    rows, rates = [], {}
    for cores in range(1, len(CORES) + 1):
        with kept_to(CORES[:cores]), gopher.sink(tmp_path) as broker:
            for count in (1, cores, 2 * cores)[cores == 1 :]:
                for where, folder in (("in memory", None), ("on disk", tmp_path)):
                    rate, cpu_us, share = medians(partial(publishers, broker, count, folder))
                    rates[where, cores, count] = rate
                    figures = spaced(rate), f"{cpu_us:.0f} µs", f"{share:.2f}"
                    rows.append((f"{cores}", f"{count}", where, *figures))
    head = ("cores", "publishers", "", "messages per second", "CPU time per message")
    print_table((*head, "cores that the broker takes"), rows)
    ratios = {
        where: rates[where, len(CORES), len(CORES)] / rates[where, 1, 1]
        for where in ("in memory", "on disk")
    }
    wanted = 0.8 * len(CORES)
    check([Goal(f"all cores / one, {where}", got, wanted, 1.0) for where, got in ratios.items()])


def test_many_enqueue_and_one_relays(tmp_path: Path) -> None:
    if reason := gopher.missing():
        pytest.skip(reason)
    rows = []
    for cores in range(1, len(CORES) + 1):
        with kept_to(CORES[:cores]), gopher.sink(tmp_path) as broker:
            for count in (1, 2, 4):
                ours = partial(enqueuers, broker.url, count, tmp_path)
                stored, cpu_us, confirmed = medians(ours)
                figures = spaced(stored), f"{cpu_us:.0f} µs", spaced(confirmed)
                rows.append((f"{cores}", f"{count}", *figures))
    head = ("cores", "enqueuers", "enqueued a second", "CPU time of each")
    print_table((*head, "confirmed per second meanwhile"), rows)


# ------------------------------------------------------------------ a core for the broker


WAYS = (CEILING, CEILING_WITH_IDS, GO, GO_WITH_IDS, DURABLE, RAM_DISK, MEMORY)


@pytest.mark.rabbit
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_a_broker_with_a_core_of_its_own(tmp_path: Path) -> None:
    """Medians of interleaved rounds, as shares of the ceiling."""
    with ExitStack() as stack:
        with kept_to(CORES[1:2]):
            node = stack.enter_context(RabbitMQNode())
        probe = stack.enter_context(closing(AmqpProbe(node.url)))
        queues = [probe.declare_queue() for _ in QUEUES]
        every = Ways(node.url, queues, tmp_path).every()
        ram = Path(stack.enter_context(TemporaryDirectory(dir="/dev/shm")))
        every[RAM_DISK] = Ways(node.url, queues, ram).every()[DURABLE]
        ways = {name: every[name] for name in WAYS if name in every}
        with kept_to(CORES[:1]):
            results = in_rounds(ways, COUNT, ROUNDS, lambda: probe.purge(*queues))
    head = ("", "confirmed per second", "of the ceiling", "with ids")
    print_table(
        (*head, "client's CPU time per message"),
        [
            (
                name,
                spaced(results[name].per_second),
                f"{results.ratio(name, CEILING):.2f}",
                f"{results.ratio(name, CEILING_WITH_IDS):.2f}",
                f"{results[name].cpu_us:.0f} µs",
            )
            for name in results
        ],
    )
    check(
        [
            Goal(f"{name} / {ceiling}", results.ratio(name, ceiling), wanted, held)
            for name, wanted, held in ((DURABLE, 0.9, 0.2), (MEMORY, 0.97, 0.3))
            for ceiling in (CEILING, CEILING_WITH_IDS)
        ]
    )
