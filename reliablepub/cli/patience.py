"""How long to wait for a broker that does not answer.

Knows: two limits and the time it is told. Must never know: the clock, or what is waited for. Pure.
"""

from __future__ import annotations

from typing import Final

from reliablepub.relay.status import Status

CONNECT_S: Final = 10.0
"""How long a broker that was never reached is waited for, where ``--timeout`` is longer."""


class Patience:
    """Runs out when nothing was settled for a while; progress renews it.

    Args:
        timeout_s: the while.
        now: monotonic seconds; the wait for the first connection counts from here.
    """

    def __init__(self, timeout_s: float, now: float) -> None:
        self._timeout_s = timeout_s
        self._settled = 0
        self._since = now

    def renew(self, now: float) -> None:
        """Begin to wait; what was before was not waiting."""
        self._since = now

    def is_over(self, status: Status, now: float) -> bool:
        """Whether to give up waiting."""
        counters = status.counters
        settled = counters.stored - counters.open
        if settled != self._settled:
            self._settled = settled
            self._since = now
        is_unreached = status.connects == 0
        limit_s = min(self._timeout_s, CONNECT_S) if is_unreached else self._timeout_s
        return now - self._since >= limit_s
