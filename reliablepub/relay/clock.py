"""Two clocks: one that only goes forward, for waits; one that people read, for what is recorded.

Knows: nothing else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass


def _suspended_s() -> float:
    if sys.platform != "linux":
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()


@dataclass(frozen=True, slots=True)
class Clock:
    """Where the relay gets its time from; tests and simulations give their own.

    Attributes:
        monotonic: seconds, for deadlines and waits.
        wall: seconds since 1970, for times in the outbox.
        suspended: seconds for which the host has slept, and ``monotonic`` stood still; only its
            changes mean anything.
    """

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    suspended: Callable[[], float] = _suspended_s
