"""When to connect again: exponential waits with jitter, from tenacity.

Knows: how often it failed, and the time it is told. Must never know: how to connect.
"""

from __future__ import annotations

from typing import Final

from tenacity import wait_random_exponential

from reliablepub.policy import wait_s

_WAITS: Final = wait_random_exponential(multiplier=0.1, max=15)
_STABLE_S: Final = 10.0


class Reconnect:
    """The wait before the next attempt to connect.

    It grows while connections fail, and also while they open and are lost at once; one that
    confirmed something, or lived for a while, starts it afresh.

    Args:
        now: monotonic seconds; the first attempt is due at once.
    """

    def __init__(self, now: float) -> None:
        self._failures = 0
        self._connected_at: float | None = None
        self.due_at: float | None = now

    def started(self) -> None:
        """An attempt is under way."""
        self.due_at = None

    def connected(self, now: float) -> None:
        """It succeeded."""
        self._connected_at = now

    def proved(self) -> None:
        """The broker confirmed something: the connection is worth having."""
        self._failures = 0

    def closed_by_publish(self, now: float) -> None:
        """It worked, and was closed because of a message: no reason to wait for long."""
        self._connected_at = None
        self.due_at = now + wait_s(_WAITS, 1)

    def lost(self, now: float) -> None:
        """It failed, or what it had made is lost."""
        if self._connected_at is not None and now - self._connected_at > _STABLE_S:
            self._failures = 0
        self._connected_at = None
        self._failures += 1
        self.due_at = now + wait_s(_WAITS, self._failures)
