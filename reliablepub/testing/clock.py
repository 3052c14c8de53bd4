"""The broker's time: a clock that a test can set ahead, and timers.

Knows: the time, the order of the timers. Must never know: what an action does.
"""

from __future__ import annotations

import heapq
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_WALL_END = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
"""Limit of the clock: a dead letter carries a datetime, and these end with the year 9999."""


class Clock:
    """Monotonic time and wall-clock time; `advance` moves both ahead."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def monotonic(self) -> float:
        """Return the seconds since an arbitrary moment."""
        return time.monotonic() + self._ahead_s

    def wall(self) -> float:
        """Return the seconds since 1970-01-01 UTC."""
        return time.time() + self._ahead_s

    def advance(self, seconds: float) -> None:
        """Set the clock ahead.

        Raises:
            ValueError: `seconds` is negative, not a number, or leads beyond the year 9998.
        """
        if not 0 <= seconds <= _WALL_END - self.wall():  # NaN is neither
            raise ValueError("the clock can only be set ahead, up to the year 9999")
        self._ahead_s += seconds


class Timers:
    """Actions by time; actions of equal time run in the order in which they were added."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def deadline(self) -> float | None:
        """The time of the next action; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Add an action."""
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, action))

    def fire(self, now: float) -> None:
        """Run the actions that are due."""
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()

    def clear(self) -> None:
        """Remove all actions."""
        self._heap.clear()
