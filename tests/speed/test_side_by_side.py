"""Us and our peers on one RabbitMQ in one run: confirmed messages per second, and what each costs.

``make bench`` prints the tables of docs/performance.md. Broker and client share the machine's
processors, so look at the ratios: rounds are interleaved, and of each way the median is taken. The
CPU time per message takes the client is what a busy machine disturbs least.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.amqp_probe import AmqpProbe
from tests.speed import gopher
from tests.speed.measuring import Goal, Results, check, in_rounds, print_table, spaced
from tests.speed.ways import (
    AIO_PIKA,
    ASYNC_DURABLE,
    ASYNC_MEMORY,
    CEILING,
    CEILING_WITH_IDS,
    DURABLE,
    GO,
    GO_NARROW,
    GO_NEWEST,
    GO_NEWEST_WITH_IDS,
    GO_WITH_IDS,
    MEMORY,
    SELECT,
    UNCONFIRMED,
    Ways,
)

pytestmark = [pytest.mark.bench, pytest.mark.rabbit, pytest.mark.timeout(1_800)]

COUNT = 40_000
ROUNDS = 5
QUEUES = 8


def test_confirmed_messages_a_second_and_what_they_cost(
    rabbitmq: AmqpProbe, tmp_path: Path
) -> None:
    queues = [rabbitmq.declare_queue() for _ in range(QUEUES)]
    ways = Ways(rabbitmq.url, queues, tmp_path).every()
    results = in_rounds(ways, COUNT, ROUNDS, lambda: rabbitmq.purge(*queues))
    print_table(
        (
            gopher.versions(),
            "confirmed per second",
            "of the ceiling",
            "client's CPU time per message",
        ),
        [
            (
                name,
                spaced(results[name].per_second),
                f"{results.ratio(name, CEILING):.2f}",
                f"{results[name].cpu_us:.0f} µs",
            )
            for name in results
        ],
    )
    print(f"medians of {ROUNDS} rounds of {COUNT:,} messages of 1 KiB, persistent, {QUEUES} queues")
    print(f"of the median way, the slowest and the fastest round differ by {results.spread():.0%}")
    check(list(goals(results)))


def goals(results: Results) -> Iterator[Goal]:
    """What is to be reached, and what holds on a busy machine as well."""
    for one, two, wanted, held in (
        (DURABLE, CEILING, 0.9, 0.2),
        (MEMORY, CEILING, 0.97, 0.3),
        (DURABLE, CEILING_WITH_IDS, 0.9, None),
        (MEMORY, CEILING_WITH_IDS, 0.97, None),
        (DURABLE, GO, 1.0, None),
        (DURABLE, GO_WITH_IDS, 1.0, None),
        (DURABLE, GO_NARROW, 1.0, None),
        (DURABLE, GO_NEWEST, 1.0, None),
        (DURABLE, SELECT, 1.5, None),
        (DURABLE, UNCONFIRMED, 1.0, None),
        (ASYNC_DURABLE, DURABLE, 0.8, 0.6),
        (ASYNC_DURABLE, AIO_PIKA, 5.0, 1.5),
        (ASYNC_MEMORY, AIO_PIKA, 5.0, 2.0),
    ):
        if two in results:
            yield Goal(f"{one} / {two}", results.ratio(one, two), wanted, held)
    for name, wanted, held in ((DURABLE, 1.15, 3.0), (MEMORY, 0.65, 1.5)):
        for go in (GO, GO_WITH_IDS, GO_NARROW, GO_NEWEST, GO_NEWEST_WITH_IDS):
            if go in results:
                got = results.cpu_ratio(name, go)
                yield Goal(f"CPU time of {name} / {go}", got, wanted, held, is_most=True)
    for name, others in ((DURABLE, AIO_PIKA), (MEMORY, SELECT)):
        got, most = results[name].cpu_us, results[others].cpu_us
        yield Goal(f"{name}, µs of CPU time per message", got, most, most, is_most=True)
