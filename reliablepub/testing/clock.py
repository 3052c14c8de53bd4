"""The broker's clock, which a test can set ahead.

This module knows the time. It must never know what happens when.
"""

from __future__ import annotations

import time


class Clock:
    """Monotonic time and wall-clock time; both move ahead by what `advance` adds."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment."""
        return time.monotonic() + self._ahead_s

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC."""
        return time.time() + self._ahead_s

    def advance(self, seconds: float) -> None:
        """Set the clock ahead."""
        self._ahead_s += seconds
