"""Progress bars and spinners on stderr, shown only if stderr is a terminal.

Knows: rich, which is imported only for a terminal. Must never know: what is counted.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Self

from reliablepub.cli.output import print_note
from reliablepub.printable import one_line

if TYPE_CHECKING:
    from rich.progress import Progress

_DELAY_S: Final = 0.5
"""Shorter operations show no spinner."""


class Bar:
    """Two progress bars: stored messages and settled messages.

    Args:
        total: number of messages to come; None if it is unknown (stdin).
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        """Show the bars, if stderr is a terminal."""
        if sys.stderr.isatty():
            self._progress = _progress()
            self._stored = self._progress.add_task("stored", total=self._total)
            self._confirmed = self._progress.add_task("confirmed", total=self._total)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop updating; the last state stays on the terminal."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def show(self, *, stored: int, settled: int) -> None:
        """Update the bars with the total counts."""
        if self._progress is not None:
            self._progress.update(self._stored, completed=stored)
            self._progress.update(self._confirmed, completed=settled)

    def say(self, text: str) -> None:
        """Print a line on stderr, above the bars."""
        if self._progress is None:
            print_note(text)
        else:
            self._progress.console.print(one_line(text), markup=False, highlight=False)


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


@contextmanager
def following() -> Iterator[Callable[[str, int], None]]:
    """Show a spinner with a name and a count, for work of unknown length.

    Yields:
        a function that takes the name of what is being counted, and the count so far.
    """
    if not sys.stderr.isatty():
        yield lambda _what, _count: None
        return
    from rich.console import Console  # noqa: PLC0415 - 50 ms that only a terminal needs

    with Console(stderr=True).status("working") as status:
        yield lambda what, count: status.update(f"{what}: {count}")


@contextmanager
def counting(total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar for work of known length.

    Yields:
        a function that takes the count so far.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with _progress() as progress:
        task = progress.add_task("done", total=total)
        yield lambda done: progress.update(task, completed=done)


def _progress() -> Progress:
    from rich.console import Console  # noqa: PLC0415 - 50 ms that only a terminal needs
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description:>9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
