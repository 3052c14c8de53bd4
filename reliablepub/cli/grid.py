"""Lays out a table for a terminal of a given width.

Knows: titles, cells, and how many characters fit on a line. Must never know: what a cell means, or
where the lines are printed.

The last column is the one that the operator reads: a reason or a finding. It is never cut. On a
narrow terminal, lesser columns are left out first, then the last column is wrapped, and then the
cells of the other columns are cut.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_GAP: Final = "  "
_LAST: Final = 28
"""Lesser columns are left out until the last one has this width, or needs no more."""
_LAST_MIN: Final = 16
_CELL_MIN: Final = 2
_INDENT: Final = "    "
_WRAPPING: Final[dict[str, Any]] = {"break_on_hyphens": False, "break_long_words": True}


def lay_out(
    titles: Sequence[str],
    cells: Sequence[Sequence[str]],
    *,
    width: int | None,  # characters of a line; None for no limit
    lesser: Sequence[str] = (),  # titles of columns that may be left out, the first one first
    below: Sequence[str] = (),  # for each row, a text on lines of its own; may be empty
) -> tuple[list[str], list[str]]:
    """Lay out a table: its lines, the first with the titles, and the titles that did not fit."""
    columns = {title: [title, *(row[n] for row in cells)] for n, title in enumerate(titles)}
    left_out: list[str] = []
    widths = _natural(columns)
    if width is not None:
        for title in lesser:
            if sum(widths[:-1]) + len(_GAP) * len(widths[:-1]) + min(widths[-1], _LAST) <= width:
                break
            del columns[title]
            left_out.append(title)
            widths = _natural(columns)
        widths = _narrowed(widths, width)
    lines: list[str] = []
    notes = ["", *(below or [""] * len(cells))]
    for row, note in zip(zip(*columns.values(), strict=True), notes, strict=True):
        lines += _row(row, widths)
        if note:
            lines += _wrapped(note, None if width is None else width - len(_INDENT), _INDENT)
    return lines, left_out


def _natural(columns: Mapping[str, Sequence[str]]) -> list[int]:
    """The widths with which no cell is cut or wrapped."""
    return [max(map(len, column)) for column in columns.values()]


def _narrowed(widths: Sequence[int], width: int) -> list[int]:
    """Widths that fit on a line: the last column's is reduced first, then the widest of the others.

    No column becomes narrower than its minimum; on a terminal of a few characters, lines overflow.
    """
    *others, last = widths
    gaps = len(_GAP) * len(others)
    while sum(others) + gaps + min(last, _LAST_MIN) > width and max(others, default=0) > _CELL_MIN:
        others[others.index(max(others))] -= 1
    return [*others, max(min(last, _LAST_MIN), min(last, width - sum(others) - gaps))]


def _row(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """The lines of a row: the last cell is wrapped, the others are cut."""
    *others, last = (
        f"{cell[: size - 1]}…" if len(cell) > size and n < len(row) - 1 else cell.ljust(size)
        for n, (cell, size) in enumerate(zip(row, widths, strict=True))
    )
    first = "".join(cell + _GAP for cell in others)
    for number, part in enumerate(_wrapped(last.rstrip(), widths[-1])):
        yield f"{' ' * len(first) if number else first}{part}".rstrip()


def _wrapped(text: str, width: int | None, indent: str = "") -> list[str]:
    parts = [text] if width is None else textwrap.wrap(text, max(width, _LAST_MIN), **_WRAPPING)
    return [indent + part for part in parts or [""]]
