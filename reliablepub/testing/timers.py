"""Things to do later.

PURE: this module knows an order in time. It must never know a clock, nor what is to be done.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Timers:
    """Actions with their times; equal times in the order they were set."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def deadline(self) -> float | None:
        """When `fire` has something to do."""
        return self._heap[0][0] if self._heap else None

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do something then."""
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, action))

    def fire(self, now: float) -> None:
        """Do what is due."""
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()

    def clear(self) -> None:
        """Do nothing of it."""
        self._heap.clear()
