"""How long the broker takes to confirm, over the last half a minute to a minute.

Knows: durations, and times it is told. Must never know: the clock, or what was confirmed. Pure.

Durations are counted in classes, eight to a doubling, so a percentile is at most 9 % too high, and
any number of confirms takes the same little memory. Confirms come in runs: what is settled in one
turn and was written in one batch took the same time, and costs one comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Final

SPAN_S: Final = 30.0
"""How long a generation is counted; the last two are told."""
_PER_DOUBLING: Final = 8
_SHORTEST_S: Final = 1e-5
_CLASSES: Final = 240
"""Up to three hours."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """What half, 95 % and 99 % of the confirms have kept to.

    Attributes:
        confirms: how many are counted.
        p50_s: seconds.
        p95_s: seconds.
        p99_s: seconds.
        max_s: seconds; no confirm took longer.
    """

    confirms: int
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float


class Latencies:
    """Counts durations."""

    def __init__(self) -> None:
        self._run_s = -1.0
        self._run = 0
        self._now = [0] * _CLASSES
        self._before = [0] * _CLASSES
        self._begun_at: float | None = None

    def took(self, seconds: float, messages: int) -> None:
        """So many messages were confirmed so long after they were written."""
        if seconds != self._run_s:
            self._count_run()
            self._run_s = seconds
        self._run += messages

    def told(self, now: float) -> Percentiles | None:
        """The percentiles; None if nothing was confirmed of late.

        Args:
            now: monotonic seconds.
        """
        self._count_run()
        if self._begun_at is None:
            self._begun_at = now
        spans = (now - self._begun_at) // SPAN_S
        if spans >= 1:
            self._before = self._now if spans < 2 else [0] * _CLASSES  # noqa: PLR2004 - both are over
            self._now = [0] * _CLASSES
            self._begun_at += spans * SPAN_S
        counts = [new + old for new, old in zip(self._now, self._before, strict=True)]
        total = sum(counts)
        if not total:
            return None
        p50, p95, p99, most = (
            _limit_s(_class_of(counts, share * total)) for share in (0.5, 0.95, 0.99, 1.0)
        )
        return Percentiles(total, p50, p95, p99, most)

    def _count_run(self) -> None:
        if self._run:
            doublings = log2(max(self._run_s, _SHORTEST_S) / _SHORTEST_S)
            self._now[min(int(doublings * _PER_DOUBLING), _CLASSES - 1)] += self._run
            self._run, self._run_s = 0, -1.0


def _class_of(counts: list[int], rank: float) -> int:
    """The class in which the message of this rank is."""
    below = 0
    for number, count in enumerate(counts):
        below += count
        if count and below >= rank:
            return number
    raise AssertionError("no rank is higher than the count")


def _limit_s(number: int) -> float:
    """No duration of a class is longer."""
    return float(_SHORTEST_S * 2.0 ** ((number + 1) / _PER_DOUBLING))
