"""Runs `reliablepub` commands in processes of their own, as a user would.

Knows: how to start, watch, kill and end processes, each by its process id. Must never know: what
happens in the demo.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final, Self

import click

_COMMAND: Final = (sys.executable, "-m", "reliablepub")
_VARIABLES: Final = "RELIABLEPUB_"
_URL_VARIABLE: Final = "RELIABLEPUB_URL"
_START_S: Final = 20.0
_STOP_S: Final = 5.0
_TAIL_LINES: Final = 15


class Command:
    """A process that runs ``reliablepub``; ended at the end of its ``with`` block."""

    def __init__(
        self, *arguments: str, log: Path, url: str | None = None, is_read: bool = False
    ) -> None:
        self._name = arguments[0]
        self._log = log
        # The user's options are for the user's outbox: some of them would break the demo.
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(_VARIABLES)
        }
        if url is not None:
            environment[_URL_VARIABLE] = url  # not an argument, since it holds a password
        with log.open("ab") as output:
            # A session of its own, so that Ctrl-C reaches only the demo, which ends the process.
            self._process = subprocess.Popen(  # noqa: S603 - reliablepub's command line
                [*_COMMAND, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_read else output,  # a pipe for `first_line`
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def first_line(self) -> str:
        """Wait for the first line that the process prints, at most 20 s."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if selector.select(_START_S) else b""
        if not line:
            raise click.ClickException(f"`reliablepub {self._name}` did not start:\n{self._tail()}")
        return line.decode().strip()

    def kill(self) -> None:
        """Kill the process with SIGKILL, which it cannot handle."""
        self._process.kill()
        self._process.wait()

    def check(self, *good: int) -> None:
        """Wait for the process to end, and check that its exit code is a good one."""
        code = self._process.wait()
        if code not in good:
            raise click.ClickException(
                f"`reliablepub {self._name}` ended with code {code}:\n{self._tail()}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process: SIGTERM, and SIGKILL if it has not ended 5 s later."""
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
