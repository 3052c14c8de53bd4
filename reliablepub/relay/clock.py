"""The relay's clocks: a monotonic one for waits, and the wall clock for recorded times.

Knows: the standard library's clocks, and nothing else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

READING_S: Final = 0.05
"""Two clocks are compared only if they are read within this time."""
STEP_S: Final = 0.5
"""The wall clock counts as set when it has moved this far against the monotonic clock."""


def _suspended_s() -> float:
    if sys.platform != "linux":  # CLOCK_BOOTTIME is Linux's
        return 0.0
    while True:
        before = time.monotonic()
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        after = time.monotonic()
        if after - before < READING_S:  # otherwise this thread was stopped between two readings
            return since_boot - after


@dataclass(slots=True)
class Clock:
    """The clocks that the relay reads. Tests and simulations supply their own."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    # Seconds of suspension, during which `monotonic` stands still; its zero is arbitrary
    suspended: Callable[[], float] = _suspended_s


class ClockWatch:
    """Detects that the wall clock was set."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen_at = clock.monotonic() + clock.suspended()
        self._ahead = clock.wall() - self._seen_at

    def look(self, now: float, wall: float) -> tuple[float, float]:
        """By how much the wall clock was set since the last call, and when that call was."""
        now += self._clock.suspended()  # a suspended host has not set its clock
        by = wall - now - self._ahead
        # The time of the last call by the clock that is now set
        since, self._seen_at = wall - (now - self._seen_at), now
        if abs(by) < STEP_S:
            return 0.0, since
        self._ahead += by
        return by, since
