"""Where words go: results to stdout, everything else to stderr, an error in one line.

Knows: the two streams, JSON, and how numbers are written for people. Must never know: what the
words are about.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Final

import click

from reliablepub.cli.exits import Exit, Failure
from reliablepub.printable import one_line, printable

_AGE_MAX_S: Final = 1e11
"""Three thousand years; a damaged row can hold anything, infinity too."""


_FORMULAS: Final = ("=", "+", "-", "@")


class Form(StrEnum):
    """How a list is printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def new_file(path: Path) -> IO[bytes]:
    """Create a file that this user alone can read, from its first byte on; for message bodies.

    Raises:
        Failure: it exists.
        OSError: it cannot be created.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o600)

    try:
        return open(path, "xb", opener=opener)
    except FileExistsError:
        raise Failure(f"{path} exists; name a new file", Exit.BAD_INPUT) from None


def print_result(text: str) -> None:
    """A line of the command's result, for people."""
    click.echo(printable(text))


def print_text(text: str) -> None:
    """Several lines as they are, but for what a terminal would act on."""
    for line in text.split("\n"):
        click.echo("\t".join(map(printable, line.removesuffix("\r").split("\t"))))


def print_data(line: str) -> None:
    """A line for programs, exactly as it is; whoever made it has escaped what is not printable."""
    assert line.isprintable()
    click.echo(line)


def print_json(value: object) -> None:
    """The command's result for machines: one JSON value in one line."""
    click.echo(json.dumps(value))


def print_note(text: str) -> None:
    """A line for whoever watches."""
    click.echo(one_line(text), err=True)


def print_error(text: str) -> None:
    """Why the command does not end well."""
    click.echo(f"Error: {one_line(text)}", err=True)


def print_table(values: Mapping[str, object]) -> None:
    """Names and values, one a line."""
    width = max(map(len, values))
    for name, value in values.items():
        click.echo(printable(f"{name:<{width}}  {value}"))


def print_rows(
    rows: Sequence[Mapping[str, Any]],
    form: Form,
    columns: Mapping[str, Callable[[Mapping[str, Any]], object]],
    *,
    nothing: str,
) -> None:
    """A list of things: for machines with all their values, for people in a few columns.

    Args:
        rows: what was found; the same names in all.
        form: how to print it.
        columns: title of each column of the table, and how it is made from a row. The last one is
            cut at the width of the terminal.
        nothing: said to people when there is none.
    """
    if form is Form.JSON:
        print_json(rows)
    elif form is Form.CSV:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        if rows:
            writer.writerow(rows[0])
            writer.writerows(map(_cell, row.values()) for row in rows)
    elif not rows:
        print_result(nothing)
    else:
        _print_grid(list(columns), [[make(row) for make in columns.values()] for row in rows])


def _cell(value: object) -> object:
    """A value for CSV: a text that a spreadsheet would run as a formula begins with a quote."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(_FORMULAS) else text


def _print_grid(titles: Iterable[str], cells: list[list[object]]) -> None:
    from tabulate import tabulate  # noqa: PLC0415 - only tables need it

    texts = [["" if cell is None else one_line(str(cell)) for cell in row] for row in cells]
    grid = tabulate(texts, titles, tablefmt="plain", disable_numparse=True)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in grid.splitlines():
        is_cut = width is not None and len(line) > width
        print_result(line[: width - 1] + "…" if is_cut and width else line.rstrip())


def count_of(number: int, noun: str) -> str:
    """``1 message``, ``2 messages``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def age(seconds: float) -> str:
    """A duration in the two largest units that matter."""
    if not abs(seconds) < _AGE_MAX_S:
        return "ages"
    whole = int(seconds)
    days, hours, minutes = whole // 86_400, whole // 3_600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def ago(at: float | None, now: float | None = None) -> str:
    """How long ago a time was, or how far off it is; nothing where there is none."""
    if at is None:
        return ""
    seconds = (time.time() if now is None else now) - at
    return f"{age(seconds)} ago" if seconds >= 0 else f"in {age(-seconds)}"


def size_of(count: float) -> str:
    """Bytes, in the largest unit that leaves something before the point."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:  # noqa: PLR2004
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def paused_words(row: Mapping[str, Any], at: float, now: float) -> str:
    """A destination that is paused: which, what it said, since when, how many wait, and until when.

    Args:
        row: as the relay shows it.
        at: when it did.
        now: wall clock, seconds.
    """
    key = row["routing_key"]
    where = f"{row['exchange'] or '(default)'} / {'every routing key' if key is None else key}"
    since = age(max(0.0, now - row["since"]))
    wait = f"{count_of(row['waiting'], 'message')} wait{'s' if row['waiting'] == 1 else ''}"
    probe_in_s = at + row["probe_in_s"] - now
    probe = f"probed in {age(probe_in_s)}" if probe_in_s >= 1 else "probed now"
    return one_line(f"{where}: {row['reason']}; since {since}; {wait}; {probe}")
