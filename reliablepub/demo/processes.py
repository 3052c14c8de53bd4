"""The processes of the demo: the project's own command line, each run as a user would run it.

Knows: how to start, watch, kill and end processes, each by its process id. Must never know: what
the story is.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import click

_COMMAND: Final = (sys.executable, "-m", "reliablepub")
_URL_VARIABLE: Final = "RELIABLEPUB_URL"
_START_S: Final = 20.0
_STOP_S: Final = 5.0
_TAIL_LINES: Final = 15


class Command:
    """One run of ``reliablepub``, in a process of its own; ended with its ``with`` block.

    Args:
        arguments: of the command line.
        url: of the broker, where it needs one; by the environment, since it holds a password.
        log: file that its output is appended to.
        is_read: whether the first line of its output is wanted; it does not go to the log.
    """

    def __init__(
        self, *arguments: str, log: Path, url: str | None = None, is_read: bool = False
    ) -> None:
        self._name = arguments[0]
        self._log = log
        with log.open("ab") as output:
            # A session of its own: a Ctrl-C at the terminal reaches the demo, and the demo ends it.
            self._process = subprocess.Popen(  # noqa: S603 - our own command line
                [*_COMMAND, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_read else output,
                stderr=output,
                env=os.environ if url is None else os.environ | {_URL_VARIABLE: url},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def first_line(self) -> str:
        """The first line it prints.

        Raises:
            click.ClickException: it did not print one in time; shows its log.
        """
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if selector.select(_START_S) else b""
        if not line:
            raise click.ClickException(f"`reliablepub {self._name}` did not start:\n{self._tail()}")
        return line.decode().strip()

    def kill(self) -> None:
        """SIGKILL: it gets no chance to do anything."""
        self._process.kill()
        self._process.wait()

    def check(self, *good: int) -> None:
        """Wait for the command's end, and make sure that it ended with one of these codes.

        Raises:
            click.ClickException: it did not; shows the end of its log.
        """
        code = self._process.wait()
        if code not in good:
            raise click.ClickException(
                f"`reliablepub {self._name}` ended with code {code}:\n{self._tail()}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End it, politely first."""
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _tail(self) -> str:
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-_TAIL_LINES:])
