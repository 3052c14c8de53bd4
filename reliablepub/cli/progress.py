"""Progress bars and spinners on stderr, shown only if stderr is a terminal.

Knows: rich, which is imported only for a terminal. Must never know: what is counted.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Self

from reliablepub.cli.output import print_note
from reliablepub.cli.passwords import without_passwords
from reliablepub.errors import OutboxError
from reliablepub.printable import one_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_DELAY_S: Final = 0.5
"""Shorter operations show no spinner."""


class Bar:
    """Progress bars, one for each name that is counted."""

    def __init__(self, total: int | None) -> None:
        self._total = total  # of each bar; None if it is unknown (stdin)
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        """Show the bars, if stderr is a terminal."""
        if sys.stderr.isatty():
            self._progress = _progress()
            with suppress(OSError):  # the terminal may be gone, which ends no command
                self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop updating; the last state stays on the terminal."""
        if self._progress is not None:
            with suppress(OSError):
                self._progress.stop()
            self._progress = None

    def show(self, name: str, count: int) -> None:
        """Update the bar of this name."""
        if self._progress is None:
            return
        with suppress(OSError):
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=self._total)
            self._progress.update(self._tasks[name], completed=count)

    def say(self, text: str) -> None:
        """Print a note on stderr, above the bars."""
        if self._progress is None:
            print_note(text)
        else:
            with suppress(OSError):
                line = one_line(without_passwords(text))
                self._progress.console.print(line, markup=False, highlight=False)


@contextmanager
def changing(total: int | None = None) -> Iterator[Callable[[str, int], None]]:
    """Show how many changes of each name were made.

    If an error or a signal ends the changes early, a note says how many were made: the error alone
    would sound as if there were none.
    """
    done: dict[str, int] = {}
    try:
        with Bar(total) as bar:

            def show(name: str, count: int) -> None:
                done[name] = count
                bar.show(name, count)

            yield show
    except (KeyboardInterrupt, OutboxError):
        if any(done.values()) and total is not None:
            print_note(f"at least {sum(done.values())} of {total} were done before this error")
        elif counts := ", ".join(f"{count} {name}" for name, count in done.items() if count):
            print_note(f"done before this error: {counts}")
        raise


@contextmanager
def patiently(text: str) -> Iterator[None]:
    """Show a spinner with a text while the block runs, if it runs longer than half a second.

    SQLite releases the interpreter lock during a query, so rich's thread can draw meanwhile.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # noqa: PLC0415 - 50 ms that only a terminal needs

    status = Console(stderr=True).status(text)
    timer = threading.Timer(_DELAY_S, status.start)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()


def _progress() -> Progress:
    from rich import progress  # noqa: PLC0415 - 50 ms that only a terminal needs
    from rich.console import Console  # noqa: PLC0415

    return progress.Progress(
        progress.TextColumn("{task.description:>9}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
    )
