"""Timers: actions that run at a later time.

PURE: this module knows the order of the times. It must never know a clock, or what an action does.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


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
