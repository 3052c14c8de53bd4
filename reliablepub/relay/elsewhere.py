"""When to look for what other processes have written to the store.

Knows: when the relay looked last, and the store's bell. Must never know: what was written.

The store must be polled, every `POLL_S`. If it has a bell, an idle relay polls less and less often,
and soon after a ring. If that comes one fsync before the commit is visible, the relay looks after
`QUICK_S`, and then after twice as long each time that it finds nothing. Without a bell, the pauses
of a store on a network grow with the time for which nothing has come, up to its `Store.rest_s`.

A bell rings once, and is armed before a look. It is not armed for `POLL_S` after a look that found
nothing but writes to other tables, or while the broker takes no messages. So an application that
writes to its own tables all the time, or enqueues during an outage, costs the relay no more than
polling does.
"""

from __future__ import annotations

from math import inf
from typing import Final

from reliablepub.outbox.entry import Bell

POLL_S: Final = 0.05
"""Interval at which the relay asks the store whether other processes have written to it."""
REST_S: Final = 0.5
"""The most seconds between two looks of an idle relay whose bell is armed.

Each look counts as a turn, and health checks judge the relay by the age of its last turn
(`reliablepub.observe.health`)."""
RESTING: Final = 0.01
"""Part of the time for which nothing has come that may pass before the next look."""
QUICK_S: Final = 0.001
"""Seconds from a ring to the first look."""
SOON_S: Final = 0.005
"""Seconds from a commit of the relay's own to the first look, at which the bell is armed."""


class Elsewhere:
    """Decides when the relay looks for what other processes have written."""

    def __init__(self, bell: Bell | None, now: float, rest_s: float = POLL_S) -> None:
        self._bell = bell  # None also if the transport cannot wait for it
        self._rest_s = rest_s  # most between two looks of an idle relay without an armed bell
        self._found_at = now
        self._pause_s = POLL_S
        self._deaf_until = -inf
        self.look_at: float = now  # unless the bell rings before (monotonic)

    def is_due(self, now: float) -> bool:
        """Whether to look now. Must be called whenever `Transport.listen` has returned."""
        bell = self._bell
        if bell is not None and bell.is_armed and bell.has_rung() and now >= self._deaf_until:
            self._within(QUICK_S, now)
        if now < self.look_at:
            return False
        if bell is not None and not bell.is_armed and now >= self._deaf_until:
            bell.arm()  # before the look, so that a write during or after it rings
        return True

    def committed(self, now: float) -> None:
        """Note a commit of the relay. The store forgets a ring with it, so look soon."""
        if self._bell is not None and self._bell.rings_early:
            self._within(SOON_S, now)

    def found_nothing(self, now: float) -> None:
        """Note a look that found no change."""
        if self._bell is not None and self._bell.is_armed:
            most = REST_S
        else:
            most = min(self._rest_s, max(POLL_S, RESTING * (now - self._found_at)))
        self._pause_s = min(2 * self._pause_s, most)
        self.look_at = now + self._pause_s

    def found(self, now: float, *, is_urgent: bool) -> None:
        """Note a look that found a change; one is urgent if the broker takes its messages now."""
        self._found_at = now
        if self._bell is not None and self._bell.rings_early and is_urgent:
            self._pause_s = QUICK_S
        else:
            self._pause_s = POLL_S
            self._deaf_until = now + POLL_S
        self.look_at = now + self._pause_s

    def _within(self, seconds: float, now: float) -> None:
        self._pause_s = min(self._pause_s, seconds)
        self.look_at = min(self.look_at, now + seconds)
