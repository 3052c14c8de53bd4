"""Waiting until the store has run empty, as far as it can now.

Knows: ids and the time at which somebody began to wait. Must never know: who waits, and how.

What was put off by its sender until later than the beginning of the wait is not waited for:
otherwise a message for tomorrow would keep everybody who flushes, or closes, until tomorrow.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from reliablepub.relay.caller import Flag
from reliablepub.relay.relay import Relay


@dataclass(slots=True, eq=False)
class Flush:
    """Somebody who waits until nothing is open of what is in the store now.

    Attributes:
        done: set when that is so.
        upto: the highest id that counts; where it is left out, that of the first look.
    """

    done: Flag
    upto: int | None = None
    _since: int = field(default=0, init=False)
    _at: float | None = field(default=None, init=False)

    def look(self, relay: Relay) -> bool:
        """Whether it is over; ids that are not awaited are passed over for good."""
        now = relay.wall()
        self._at = now if self._at is None else min(self._at, now)  # it may have been set back
        if self.upto is None:
            self.upto = relay.last_id
        lowest = relay.lowest_awaited(self._since, self._at)
        if lowest is not None and lowest <= self.upto:
            self._since = lowest
            return False
        self.done.set()
        return True
