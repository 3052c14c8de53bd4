"""Virtual time: what happens next, and when. One thread, and no clock but this one."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Protocol

Action = Callable[[], None]


class Note(Protocol):
    """Writes down that something happens, under a name that is counted, with what else is known."""

    def __call__(self, what: str, detail: object = "") -> None: ...


class Agenda:
    """Actions in the order of their times; what is due at the same time happens as it was put in.

    The two clocks differ, so that nothing can mix them up, and only the wall clock jumps.
    """

    def __init__(self) -> None:
        self.now = 50.0
        self.wall_offset = 1_000_000.0
        self._heap: list[tuple[float, int, Action]] = []
        self._numbers = count()

    @property
    def wall(self) -> float:
        return self.now + self.wall_offset

    def at(self, time: float, action: Action) -> None:
        heapq.heappush(self._heap, (max(time, self.now), next(self._numbers), action))

    def after(self, delay_s: float, action: Action) -> None:
        self.at(self.now + delay_s, action)

    def run_next(self) -> None:
        """Let time pass until the next action, and do it."""
        self.now, _, action = heapq.heappop(self._heap)
        action()
