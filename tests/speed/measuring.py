"""How runs are measured, compared and printed, whatever was run.

It knows clocks, medians and Markdown. It must never know a broker, or who publishes.
"""

import gc
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """What one way did in one round."""

    per_second: float
    cpu_us: float


@dataclass(frozen=True)
class Way:
    """A way to publish: publishes so many messages, and returns when that is done."""

    publish: Callable[[int], object]
    share: float = 1.0
    """How many of the messages the others get; slow ways get few, to be done this year."""


class Results:
    """The runs of several ways; the rounds were interleaved, so equal rounds are compared."""

    def __init__(self, runs: Mapping[str, Sequence[Run]]) -> None:
        self._runs = runs

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __contains__(self, name: object) -> bool:
        return name in self._runs

    def __getitem__(self, name: str) -> Run:
        """The medians of a way."""
        runs = self._runs[name]
        return Run(
            statistics.median(run.per_second for run in runs),
            statistics.median(run.cpu_us for run in runs),
        )

    def spread(self) -> float:
        """By what share of its median a way's slowest and fastest round differ: the median way."""
        rates = [[run.per_second for run in runs] for runs in self._runs.values()]
        return statistics.median((max(one) - min(one)) / statistics.median(one) for one in rates)

    def ratio(self, name: str, other: str) -> float:
        """How many times as many messages per second: the median of each round's ratio."""
        pairs = zip(self._runs[name], self._runs[other], strict=True)
        return statistics.median(one.per_second / two.per_second for one, two in pairs)

    def cpu_ratio(self, name: str, other: str) -> float:
        """How many times as much CPU time per message, likewise."""
        pairs = zip(self._runs[name], self._runs[other], strict=True)
        return statistics.median(one.cpu_us / two.cpu_us for one, two in pairs)


@dataclass(frozen=True)
class Goal:
    """What is to be reached, and from where on the bench fails.

    Attributes:
        got: what was measured.
        wanted: what it should be, on a machine with nothing else to do.
        held: what it must be on any machine; None where a busy machine says nothing.
        is_most: whether it should be at most that, not at least.
    """

    what: str
    got: float
    wanted: float
    held: float | None = None
    is_most: bool = False

    def _is_within(self, limit: float) -> bool:
        return self.got <= limit if self.is_most else self.got >= limit

    @property
    def is_reached(self) -> bool:
        return self._is_within(self.wanted)

    @property
    def is_held(self) -> bool:
        return self.held is None or self._is_within(self.held)

    def cells(self) -> tuple[str, str, str, str]:
        sign = "at most" if self.is_most else "at least"
        digits = 0 if self.wanted >= 100 else 1 if self.wanted >= 10 else 2
        wanted = f"{sign} {spaced(self.wanted, digits)}"
        return (
            self.what,
            wanted,
            spaced(self.got, digits),
            "reached" if self.is_reached else "missed",
        )


def in_rounds(
    ways: Mapping[str, Way], count: int, rounds: int, between: Callable[[], object]
) -> Results:
    """Every way once, then every way again: a machine that becomes busy disturbs all of them.

    Each round has an order of its own, so that none always follows the one that leaves most to do.
    """
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    with without_old_garbage():
        for _ in range(rounds):
            for name in random.sample(list(ways), len(ways)):
                way = ways[name]
                runs[name].append(measured(way.publish, round(count * way.share)))
                between()
    return Results(runs)


def measured(publish: Callable[[int], object], count: int) -> Run:
    """One run: wall time, and the CPU time of this process and those it has waited for."""
    gc.collect()
    since, cpu_s = time.perf_counter(), processor_s()
    publish(count)
    took_s = time.perf_counter() - since
    return Run(count / took_s, (processor_s() - cpu_s) / count * 1e6)


def processor_s() -> float:
    """Seconds of CPU time: of this process, and of children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@contextmanager
def without_old_garbage() -> Iterator[None]:
    """Collections leave alone what pytest has imported: going over that takes 60 ms by itself."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def check(goals: Sequence[Goal]) -> None:
    """Print what was reached, and fail where it is less than any machine should give."""
    print_table(("", "wanted", "got", ""), [goal.cells() for goal in goals])
    assert [goal for goal in goals if not goal.is_held] == []


def spaced(number: float, digits: int = 0) -> str:
    """`12 345`, as docs/performance.md writes it."""
    return f"{number:,.{digits}f}".replace(",", " ")


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table for docs/performance.md."""
    print()
    for cells in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
