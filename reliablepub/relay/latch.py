"""An event that happens once, for threads to wait for: every `publish` waits for one.

Knows: a lock. Must never know: what is waited for.

`threading.Event` is written in Python, with a lock for each wait besides its own: to make one, wait
for it and set it takes 9 microseconds, and this 1. And it holds a lock while it looks, which the
other side needs to set it: a signal handler that interrupts a wait there, and waits for the other
side in turn, would wait for ever. Here the one who sets it needs nothing.
"""

from __future__ import annotations

import threading


class Latch:
    """Not set at first; once it is set, it stays so."""

    __slots__ = ("_is_set", "_lock")

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()  # until it is set

    def set(self) -> None:
        """Let whoever waits go on; from one thread only."""
        if not self._is_set:
            self._is_set = True
            self._lock.release()

    def is_set(self) -> bool:
        """Whether it is."""
        return self._is_set

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait, but not longer than so many seconds, if any are given; whether it is set."""
        if not self._is_set and self._lock.acquire(timeout=timeout_s):
            self._lock.release()  # for others who wait
        return self._is_set
