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
    from rich.progress import Progress

_DELAY_S: Final = 0.5
"""Shorter operations show no spinner."""


class Bar:
    """Two progress bars: stored messages and settled messages."""

    def __init__(self, total: int | None) -> None:
        self._total = total  # None if it is unknown (stdin)
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        """Show the bars, if stderr is a terminal."""
        if sys.stderr.isatty():
            self._progress = _progress()
            self._stored = self._progress.add_task("stored", total=self._total)
            self._confirmed = self._progress.add_task("confirmed", total=self._total)
            with suppress(OSError):  # the terminal may be gone, which ends no command
                self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop updating; the last state stays on the terminal."""
        if self._progress is not None:
            with suppress(OSError):
                self._progress.stop()
            self._progress = None

    def show(self, *, stored: int, settled: int) -> None:
        """Update the bars with the total counts."""
        if self._progress is not None:
            self._progress.update(self._stored, completed=stored)
            self._progress.update(self._confirmed, completed=settled)

    def say(self, text: str) -> None:
        """Print a note on stderr, above the bars."""
        if self._progress is None:
            print_note(text)
        else:
            with suppress(OSError):
                line = one_line(without_passwords(text))
                self._progress.console.print(line, markup=False, highlight=False)


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
    """Show a spinner with a name and a count, for changes of unknown number.

    If an error or a signal ends the changes early, a note says how many of each kind were made.
    """
    done: dict[str, int] = {}
    try:
        with _spinning() as draw:

            def show(what: str, count: int) -> None:
                done[what] = count
                draw(what, count)

            yield show
    except (KeyboardInterrupt, OutboxError):
        if counts := ", ".join(f"{count} {what}" for what, count in done.items() if count):
            print_note(f"done before this error: {counts}")
        raise


@contextmanager
def _spinning() -> Iterator[Callable[[str, int], None]]:
    if not sys.stderr.isatty():
        yield lambda _what, _count: None
        return
    from rich.console import Console  # noqa: PLC0415 - 50 ms that only a terminal needs

    with Console(stderr=True).status("working") as status:
        yield lambda what, count: status.update(f"{what}: {count}")


@contextmanager
def counting(total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar for changes of known number.

    If an error or a signal ends the changes early, a note says how many were made.
    """
    done = 0
    try:
        with drawing(total) as draw:

            def show(count: int) -> None:
                nonlocal done
                done = count
                draw(count)

            yield show
    except (KeyboardInterrupt, OutboxError):
        if done:  # the error alone would sound as if there were none
            print_note(f"at least {done} of {total} were done before this error")
        raise


@contextmanager
def drawing(total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar for work of known length, which changes nothing."""
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
