"""The price of safety: without confirms, with confirms, with confirms and a disk.

One run for classic and one for quorum queues, rounds interleaved; the table of docs/performance.md
tells each as a share of the fastest way there is to send and forget.
"""

from pathlib import Path

import pytest

from tests.amqp_probe import AmqpProbe
from tests.speed.measuring import Goal, Results, check, in_rounds, print_table, spaced
from tests.speed.ways import CEILING, DURABLE, MEMORY, RAW_UNCONFIRMED, Ways

pytestmark = [pytest.mark.bench, pytest.mark.rabbit, pytest.mark.timeout(1_800)]

COUNT = 20_000
ROUNDS = 5
QUEUES = 8
KINDS = ("classic", "quorum")


def test_the_price_of_safety(rabbitmq: AmqpProbe, tmp_path: Path) -> None:
    results = {kind: of_kind(kind, rabbitmq, tmp_path / kind) for kind in KINDS}
    head = [cell for kind in KINDS for cell in (f"{kind} queues, messages per second", "share")]
    names = list(results["classic"])
    rows = [(name, *(c for kind in KINDS for c in cells(name, results[kind]))) for name in names]
    print_table(("", *head), rows)
    print(f"medians of {ROUNDS} rounds of {COUNT:,} messages of 1 KiB, persistent, {QUEUES} queues")
    check(
        [
            Goal(f"{kind}: {name} / {CEILING}", results[kind].ratio(name, CEILING), wanted, held)
            for kind in KINDS
            for name, wanted, held in ((DURABLE, 0.9, 0.2), (MEMORY, 0.97, 0.3))
        ]
    )


def of_kind(kind: str, rabbitmq: AmqpProbe, folder: Path) -> Results:
    folder.mkdir()
    queues = [rabbitmq.declare_queue(arguments={"x-queue-type": kind}) for _ in range(QUEUES)]
    ways = Ways(rabbitmq.url, queues, folder).by_safety()
    return in_rounds(ways, COUNT, ROUNDS, lambda: rabbitmq.purge(*queues))


def cells(name: str, results: Results) -> tuple[str, str]:
    """The rate, and what it is of that which no safety at all would give."""
    return spaced(results[name].per_second), f"{results.ratio(name, RAW_UNCONFIRMED):.2f}"
