"""What more cores give us; and how near we come to the broker's own speed if it has a core.

In the first part the broker is a `Sink`, which takes next to no processor time, and all that runs
is kept to one core, to two, and so on. In the second, RabbitMQ has one core and the client another.
"""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from reliablepub import Outbox
from tests.amqp_probe import AmqpProbe
from tests.rabbitmq import RabbitMQNode
from tests.speed import alone, gopher
from tests.speed.alone import Figure, Job, relay
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

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1_800)]

CORES = sorted(os.sched_getaffinity(0))
LASTS_S = 5.0
COUNT = 40_000
ROUNDS = 5
QUEUES = [f"queue{number}" for number in range(8)]


@contextmanager
def kept_to(cores: Sequence[int]) -> Iterator[None]:
    """For the block, threads and processes that this thread starts run on these cores only."""
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, CORES)


def at_once(jobs: Sequence[Job]) -> tuple[float, float]:
    """Messages a second of all of them, and their processor time a message."""
    with ThreadPoolExecutor(len(jobs)) as threads:
        figures: list[Figure] = [one for some in threads.map(alone.run, jobs) for one in some]
    per_second = sum(figure.per_second for figure in figures)
    return per_second, sum(one.cpu_us * one.per_second for one in figures) / per_second


# ------------------------------------------------------------------ more cores, a free broker


def publishers(url: str, count: int, folder: Path | None) -> tuple[float, float]:
    """Processes that publish, each with an outbox of its own, or in memory."""
    outboxes = [str(folder / f"{time.monotonic_ns()}.db") if folder else None for _ in range(count)]
    return at_once([Job("publish", url, one, QUEUES, [10**9], LASTS_S) for one in outboxes])


def enqueuers(url: str, count: int, folder: Path) -> tuple[float, float, float]:
    """Processes that enqueue in one outbox while a relay publishes; last, what was confirmed."""
    outbox = folder / f"{time.monotonic_ns()}.db"
    Outbox(outbox).create()
    with relay(url, str(outbox)):
        since = time.perf_counter()
        job = Job("enqueue", url, str(outbox), QUEUES, [], LASTS_S)
        per_second, cpu_us = at_once([job] * count)
        confirmed = Outbox(outbox).status().confirmed
        return per_second, cpu_us, confirmed / (time.perf_counter() - since)


def test_each_core_counts(tmp_path: Path) -> None:
    if reason := gopher.missing():
        pytest.skip(reason)
    rows, rates = [], {}
    for cores in range(1, len(CORES) + 1):
        with kept_to(CORES[:cores]), gopher.sink(tmp_path) as broker:
            for count in (1, cores, 2 * cores)[cores == 1 :]:
                for where, folder in (("in memory", None), ("on disk", tmp_path)):
                    used_s = broker.processor_s()
                    rate, cpu_us = publishers(broker.url, count, folder)
                    rates[where, cores, count] = rate
                    sink_share = (broker.processor_s() - used_s) / LASTS_S
                    figures = spaced(rate), f"{cpu_us:.0f} µs", f"{sink_share:.2f}"
                    rows.append((f"{cores}", f"{count}", where, *figures))
    head = ("cores", "publishers", "", "messages a second", "processor time a message")
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
                stored, cpu_us, confirmed = enqueuers(broker.url, count, tmp_path)
                figures = spaced(stored), f"{cpu_us:.0f} µs", spaced(confirmed)
                rows.append((f"{cores}", f"{count}", *figures))
    head = ("cores", "enqueuers", "enqueued a second", "processor time of each")
    print_table((*head, "confirmed a second meanwhile"), rows)


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
    head = ("", "confirmed a second", "of the ceiling", "with ids")
    print_table(
        (*head, "client's processor time a message"),
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
