"""SIGINT, SIGTERM, SIGHUP and SIGTSTP as flags that can be polled and waited for.

Knows: signals and file descriptors. Must never know: what is stopped.

A handler that raises an exception could raise it anywhere, even between storing a message and
counting it. So the first signal only sets a flag and ends every wait. A second signal raises
KeyboardInterrupt, and so does the first during a call that changes nothing (`Stop.interrupting`).
"""

from __future__ import annotations

import math
import os
import select
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, Self, TypeVar

T = TypeVar("T")

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_POLL_MS_MAX: Final = 2**31 - 1
"""The longest timeout of `poll`: 24.8 days."""


class Stop:
    """A flag that the first SIGINT or SIGTERM within the ``with`` block sets. Main thread only."""

    def __init__(self, *, reopens: bool = False, has_screen: bool = False) -> None:
        self.is_set: bool = False
        self.is_reopen_due: bool = False  # SIGHUP has arrived; the caller resets it
        # SIGTSTP has arrived: the caller leaves the screen, and calls `pause`
        self.is_pause_due: bool = False
        self._reopens = reopens  # SIGHUP requests a reopen, instead of ending the process
        # The caller must leave the screen first: SIGHUP sets the flag too, SIGTSTP requests a pause
        self._has_screen = has_screen
        self._interrupts = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Install the signal handlers."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        if self._reopens:
            self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._on_hangup)
        if self._has_screen:
            self._unless_ignored(signal.SIGHUP, self._on_signal)
            self._unless_ignored(signal.SIGTSTP, self._on_pause)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the former handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def interrupting(self, call: Callable[[], T]) -> T | None:
        """Call, and return the result; None if a signal came, which ends the call in any wait."""
        self._interrupts = True
        try:
            return None if self.is_set else call()
        except KeyboardInterrupt:
            if not self.is_set:
                raise
            return None
        finally:
            self._interrupts = False

    def pause(self) -> None:
        """Stop the process as SIGTSTP does without a handler; return when it goes on."""
        self.is_pause_due = False
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a signal arrives or the timeout passes; returns `is_set`."""
        if not self.is_set and readable([self._reader], timeout_s):
            os.read(self._reader, 1)  # any signal with a Python handler ends the wait, SIGHUP too
        return self.is_set

    def wait_readable(self, fd: int, timeout_s: float | None = None) -> bool:
        """Wait until a descriptor is readable; False after a signal to stop or the timeout."""
        while not (self.is_set or self.is_pause_due):
            ready = readable([fd, self._reader], timeout_s)
            if not ready:
                return False
            if fd in ready:
                return not self.is_set
            os.read(self._reader, 1)
        return False

    def _unless_ignored(self, number: signal.Signals, handler: Callable[..., None]) -> None:
        """Install a handler, unless the caller has the signal ignored, as nohup(1) does."""
        before = signal.getsignal(number)
        if before is not signal.SIG_IGN:
            self._before[number] = signal.signal(number, handler)

    def _on_pause(self, _number: int, _frame: FrameType | None) -> None:
        self.is_pause_due = True

    def _on_hangup(self, _number: int, _frame: FrameType | None) -> None:
        self.is_reopen_due = True

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        was_set, self.is_set = self.is_set, True
        if was_set or self._interrupts:
            raise KeyboardInterrupt


def readable(fds: Sequence[int], timeout_s: float | None) -> set[int]:
    """Wait until a descriptor is readable or at its end, and return those that are.

    By `poll`, since `select` takes no descriptor above 1023. A timeout of more than 24 days ends
    after 24.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    wait_ms = None if timeout_s is None else math.ceil(min(timeout_s * 1_000, _POLL_MS_MAX))
    return {fd for fd, _ in poll.poll(wait_ms)}
