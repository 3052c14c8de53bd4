"""Single keys from a terminal, without waiting for the end of a line.

Knows: a terminal's modes, and that a signal may come first. Must never know: what a key does.
"""

from __future__ import annotations

import os
import termios
import tty
from types import TracebackType
from typing import Final, Self

from reliablepub.cli.signals import Stop

_BYTES: Final = 32


class Keyboard:
    """Reads keys; the terminal is as before when it ends.

    Args:
        fd: the terminal.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> Self:
        """No echo, and no waiting for a line; Ctrl-C is still a signal."""
        self._before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd, termios.TCSANOW)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give it back."""
        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def pressed(self, stop: Stop, timeout_s: float) -> str | None:
        """What was typed; empty if nobody can type any more, None if the time is up first."""
        if not stop.wait_readable(self._fd, timeout_s):
            return None
        return os.read(self._fd, _BYTES).decode(errors="replace")
