"""Which of many equal things are said at once, and which are only counted.

Knows: what things are called, and times it is told. Must never know: the clock, what is said, or
where. Pure.

The first of its kind is said at once. Those that follow within an interval are counted, and summed
up at its end; as long as they go on, there is one sum an interval. After an interval without any
the next one is a first again. Kinds are bounded: what is one too many is counted among the others.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

Kind = TypeVar("Kind", bound=Hashable)

INTERVAL_S: Final = 10.0
KINDS_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class Sum(Generic[Kind]):
    """Things that were not said one by one.

    Attributes:
        kind: what they are called; None for kinds that were one too many.
        count: how many.
        seconds: in which time.
    """

    kind: Kind | None
    count: int
    seconds: float


@dataclass(slots=True)
class _Interval:
    begun_at: float
    count: int = 0


class Digest(Generic[Kind]):
    """Decides, thing by thing.

    Args:
        interval_s: how long equal things are gathered.
        kinds_max: most kinds at a time.
    """

    def __init__(self, interval_s: float = INTERVAL_S, kinds_max: int = KINDS_MAX) -> None:
        self._interval_s = interval_s
        self._kinds_max = kinds_max
        self._intervals: dict[Kind | None, _Interval] = {}

    def is_said(self, kind: Kind, now: float) -> bool:
        """Whether this one is said at once; otherwise it is counted.

        Args:
            kind: what it is called.
            now: monotonic seconds.
        """
        found = self._intervals.get(kind)
        if found is None and len(self._intervals) >= self._kinds_max:
            found = self._intervals.setdefault(None, _Interval(now))
        if found is None:
            self._intervals[kind] = _Interval(now)
            return True
        found.count += 1
        return False

    def due(self, now: float) -> list[Sum[Kind]]:
        """The sums of the intervals that are over."""
        if not self._intervals:
            return []
        return self._summed(now, now - self._interval_s)

    def rest(self, now: float) -> list[Sum[Kind]]:
        """The sums of everything; nothing more will come."""
        return self._summed(now, now)

    def _summed(self, now: float, begun_before: float) -> list[Sum[Kind]]:
        sums = []
        for kind, interval in list(self._intervals.items()):
            if interval.begun_at > begun_before:
                continue
            if interval.count:
                sums.append(Sum(kind, interval.count, now - interval.begun_at))
                self._intervals[kind] = _Interval(now)
            else:
                del self._intervals[kind]
        return sums
