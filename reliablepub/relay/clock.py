"""Two clocks: one that only goes forward, for waits; one that people read, for what is recorded.

Knows: nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """Where the relay gets its time from; tests and simulations give their own.

    Attributes:
        monotonic: seconds, for deadlines and waits.
        wall: seconds since 1970, for times in the outbox.
    """

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
