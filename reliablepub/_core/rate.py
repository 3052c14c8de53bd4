"""`Rate`: how many messages per second are written, so that a backlog does not arrive all at once.

Knows: a number per second, and how many at once. Must never know: messages, clocks.

A token bucket: a token for each message, which comes back with time. It holds at most ``burst`` of
them, so that so many messages are written at once after a rest.
"""

from __future__ import annotations

from math import floor, inf
from typing import Final

_GATHER_S: Final = 0.05
"""At high rates, messages are written so often: each write has a commit before it."""
_ROUNDING: Final = 1e-6


class Rate:
    """Limits how many messages are written."""

    def __init__(self, per_s: float, burst: float) -> None:
        self.per_s: Final = per_s
        self._burst = burst  # most messages at once; at least 1
        self._least = max(1.0, min(burst, per_s * _GATHER_S))
        self._tokens = burst
        self._at = -inf

    def room(self, now: float) -> int:
        """How many messages may be written now."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self.per_s)
        self._at = now
        tokens = self._tokens + _ROUNDING
        return floor(tokens) if tokens >= self._least else 0

    def spend(self, count: int) -> None:
        """So many messages are written; a negative number of them is not, after all."""
        self._tokens -= count

    @property
    def next_at(self) -> float | None:
        """When more messages may be written, in the time of `room`; None if at once."""
        if self._tokens + _ROUNDING >= self._least:
            return None
        return self._at + (self._least - self._tokens) / self.per_s
