"""A clock that can be stopped.

Knows: the times it is given. Must never read a real clock, or know why it is stopped.

A broker that blocks publishers withholds confirms while its alarm lasts. Confirm deadlines are
measured on this clock, which is stopped during the alarm: no confirm times out in an alarm, and
after it every deadline has as much time left as before.
"""

from __future__ import annotations


class StoppableClock:
    """The caller's clock (``now``), minus the time during which this clock was stopped."""

    __slots__ = ("_paused_s", "_stopped_at")

    def __init__(self) -> None:
        self._stopped_at: float | None = None
        self._paused_s = 0.0

    def stop(self, now: float) -> None:
        """Stop the clock. No effect if it is stopped."""
        if self._stopped_at is None:
            self._stopped_at = now

    def start(self, now: float) -> None:
        """Start the clock again. No effect if it is running."""
        if self._stopped_at is not None:
            self._paused_s += now - self._stopped_at
            self._stopped_at = None

    def reading(self, now: float) -> float:
        """This clock's reading at the caller's ``now``."""
        return (now if self._stopped_at is None else self._stopped_at) - self._paused_s

    def due_at(self, reading: float) -> float:
        """The caller's time at which this clock shows ``reading``, unless it is stopped before."""
        return reading + self._paused_s
