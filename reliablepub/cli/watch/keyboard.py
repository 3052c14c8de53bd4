"""Reads single keys from a terminal, without waiting for the end of a line.

Knows: terminal modes, and that a signal ends the wait. Must never know: what a key does.
"""

from __future__ import annotations

import os
import termios
import tty
from typing import Final, Self

from reliablepub.cli.signals import Stop

_BYTES: Final = 32


class Keyboard:
    """Reads keys within the ``with`` block; restores the terminal's mode at its end.

    Args:
        fd: file descriptor of the terminal.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> Self:
        """Switch off echo and line buffering; Ctrl-C still sends SIGINT."""
        self._before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd, termios.TCSANOW)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the terminal's mode."""
        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def pressed(self, stop: Stop, timeout_s: float) -> str | None:
        """Wait for a key, at most ``timeout_s`` seconds or until a signal.

        Returns:
            what was typed; empty if the terminal is gone, None if nothing was typed in time.
        """
        if not stop.wait_readable(self._fd, timeout_s):
            return None
        return os.read(self._fd, _BYTES).decode(errors="replace")
