"""SIGINT, SIGTERM and SIGHUP as a question that can be asked, and as something to wait for.

Knows: signals and file descriptors. Must never know: what is stopped.

A handler that raises could do so anywhere, also between "stored" and "counted". So the first signal
only sets a flag, and ends every wait. Who is impatient sends a second one, which interrupts.
"""

from __future__ import annotations

import os
import select
import signal
from types import FrameType, TracebackType
from typing import Any, Final, Self

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Set by the first SIGINT or SIGTERM within the ``with`` block. For the main thread.

    Args:
        reopens: whether SIGHUP asks to reopen, instead of ending the process.

    Attributes:
        is_set: whether the signal to stop has come.
        is_reopen_due: whether SIGHUP has come; to be set back by whoever reopens.
    """

    def __init__(self, *, reopens: bool = False) -> None:
        self.is_set = False
        self.is_reopen_due = False
        self._reopens = reopens
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Take over the signals."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        if self._reopens:
            self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._on_hangup)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def wait(self, timeout_s: float) -> bool:
        """Sleep, but not longer than until the signal; whether it has come."""
        if not self.is_set and select.select([self._reader], [], [], timeout_s)[0]:
            os.read(self._reader, 1)  # another signal than ours ends the wait too
        return self.is_set

    def wait_readable(self, fd: int, timeout_s: float | None = None) -> bool:
        """Wait until there is something to read; False: a signal, or the time is up."""
        while not self.is_set:
            ready, _, _ = select.select([fd, self._reader], [], [], timeout_s)
            if not ready:
                return False
            if fd in ready:
                return not self.is_set
            os.read(self._reader, 1)
        return False

    def _on_hangup(self, _number: int, _frame: FrameType | None) -> None:
        self.is_reopen_due = True

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
