"""A clock that can be stopped.

Knows: the time it is told. Must never know: what the time is, or why it is stopped.

A blocked broker withholds confirms for as long as its alarm lasts. So whoever waits for one looks
at a clock that stands still meanwhile: nothing times out in an alarm, and afterwards every deadline
has as much time left as before.
"""

from __future__ import annotations


class StoppableClock:
    """Reads like the clock that ``now`` is from, less the time it was stopped."""

    __slots__ = ("_paused_s", "_stopped_at")

    def __init__(self) -> None:
        self._stopped_at: float | None = None
        self._paused_s = 0.0

    def stop(self, now: float) -> None:
        """Stand still; to be stopped again changes nothing."""
        if self._stopped_at is None:
            self._stopped_at = now

    def start(self, now: float) -> None:
        """Go on, if it was stopped."""
        if self._stopped_at is not None:
            self._paused_s += now - self._stopped_at
            self._stopped_at = None

    def reading(self, now: float) -> float:
        """What this clock shows."""
        return (now if self._stopped_at is None else self._stopped_at) - self._paused_s

    def due_at(self, reading: float) -> float:
        """When this clock will show the reading, should it not be stopped before."""
        return reading + self._paused_s
