"""A progress bar where somebody looks, and nothing where nobody does.

Knows: rich, which is imported only for a terminal. Must never know: what is counted.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from reliablepub.cli.output import one_line, print_note

if TYPE_CHECKING:
    from rich.progress import Progress


class Bar:
    """Confirmed messages of all, on stderr.

    Args:
        total: how many there will be; None if nobody knows.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        """Show it, if stderr is a terminal."""
        if sys.stderr.isatty():
            self._progress = _progress()
            self._stored = self._progress.add_task("stored", total=self._total)
            self._confirmed = self._progress.add_task("confirmed", total=self._total)
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave its last state."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def show(self, *, stored: int, settled: int) -> None:
        """Move it."""
        if self._progress is not None:
            self._progress.update(self._stored, completed=stored)
            self._progress.update(self._confirmed, completed=settled)

    def say(self, text: str) -> None:
        """Print a line on stderr, above the bar."""
        if self._progress is None:
            print_note(text)
        else:
            self._progress.console.print(one_line(text), markup=False, highlight=False)


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
