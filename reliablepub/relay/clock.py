"""The relay's clocks: a monotonic one for waits, and the wall clock for recorded times.

Knows: the standard library's clocks, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

STEP_S: Final = 0.5
"""The wall clock counts as set when it has moved this far against the monotonic clock."""


@dataclass(slots=True)
class Clock:
    """The clocks that the relay reads. Tests and simulations supply their own."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


class ClockWatch:
    """Detects that the wall clock was set, or has gone on while the host was suspended."""

    def __init__(self, clock: Clock) -> None:
        self._ahead = clock.wall() - clock.monotonic()

    def look(self, now: float, wall: float) -> float:
        """By how many seconds the wall clock was set since the last call."""
        by = wall - now - self._ahead
        if abs(by) < STEP_S:
            return 0.0
        self._ahead += by
        return by
