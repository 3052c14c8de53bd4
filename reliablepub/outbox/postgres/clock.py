"""The server's clock, by which an outbox in PostgreSQL measures its deadlines.

Knows: readings of it, and the monotonic clock of this host. Must never know: statements.

Hosts share an outbox, and the clock of one may be wrong, and be set right. The server's clock is
one for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class ServerClock:
    """Seconds since 1970 by the server; by this host until the first reading."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._ahead = time.time() - monotonic()

    def __call__(self) -> float:
        """Return the time now."""
        return self._monotonic() + self._ahead

    def read(self, at: float, since: float) -> None:
        """Take a reading, which the server made between a time of the monotonic clock and now.

        A slow answer, which tells less, moves the clock no further than it must.
        """
        self._ahead = min(max(self._ahead, at - self._monotonic()), at - since)
