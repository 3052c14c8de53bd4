"""Decides when to stop waiting for a broker that does not answer.

Knows: two limits, and the time that the caller passes. Must never know: the clock, or the broker.
Pure.
"""

from __future__ import annotations

from typing import Final

from reliablepub.relay.status import Status

CONNECT_S: Final = 10.0
"""Longest wait for a first connection; a shorter ``--timeout`` applies to it too."""


class Patience:
    """A timeout that restarts whenever a message is settled.

    Args:
        timeout_s: seconds without a settled message after which the wait is over.
        now: monotonic seconds; the wait for the first connection begins here.
    """

    def __init__(self, timeout_s: float, now: float) -> None:
        self._timeout_s = timeout_s
        self._settled = 0
        self._since = now

    def renew(self, now: float) -> None:
        """Restart the timeout: the wait begins now."""
        self._since = now

    def is_over(self, status: Status, now: float) -> bool:
        """Whether the timeout has passed."""
        counters = status.counters
        settled = counters.stored - counters.open
        if settled != self._settled:
            self._settled = settled
            self._since = now
        is_unreached = status.connects == 0
        limit_s = min(self._timeout_s, CONNECT_S) if is_unreached else self._timeout_s
        return now - self._since >= limit_s
