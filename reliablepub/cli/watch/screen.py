"""The full-screen view of `reliablepub watch`, for terminals of any size.

Knows: a `Page`, and rich. Must never know: what a fact means, when to refresh, or keys.

The first two sections stand side by side from 80 columns on, and one above the other below that. A
terminal with few lines cuts off the end of the page, and the last line is the hint. No reason is
cut at the terminal's width.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from reliablepub.cli.facts import Fact, Level, Page
from reliablepub.printable import printable

WIDE: Final = 80
BARS: Final = "▁▂▃▄▅▆▇█"
ASCII_BARS: Final = "_.-~=+*#"
"""For a terminal whose encoding is not UTF-8."""
_BESIDE_BARS: Final = 36
"""Columns of a panel with bars that hold other text."""
_RELAY_SHARE: Final = 8
"""The relay and the advice above the panels have at most an eighth of the lines each, or one."""
_STYLES: Final = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red", None: ""}


def draw(page: Page, *, width: int, height: int, hint: str, bars: str = BARS) -> RenderableType:
    """The whole screen."""
    most = max(1, height // _RELAY_SHARE)
    parts: list[RenderableType] = [_line(page.outbox.words, "bold")]
    parts += _fitting(page.relay.words, width, most, _STYLES[page.relay.level])
    parts += _fitting(page.advice.words, width, most, f"bold {_STYLES[page.advice.level]}")
    first, second, *rest = page.sections.items()
    if width >= WIDE:
        beside = Table.grid(expand=True)
        beside.add_column(ratio=2)
        beside.add_column(ratio=3)
        beside.add_row(_panel(*first, width, bars), _panel(*second, width // 2, bars))
        parts.append(beside)
    else:
        parts += [_panel(*first, width, bars), _panel(*second, width, bars)]
    parts += [_panel(title, facts, width, bars) for title, facts in rest if facts]
    screen = Layout()
    screen.split_column(Layout(Group(*parts)), Layout(_line(hint, "dim"), size=1))
    return screen


def _panel(title: str, facts: Sequence[Fact], width: int, bars: str) -> Panel:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column()
    for fact in facts:
        rows.add_row(Text(printable(fact.name), "dim"), _words(fact, width, bars))
    return Panel(rows, title=title, title_align="left", border_style="dim", expand=True)


def _words(fact: Fact, width: int, bars: str) -> Text:
    if not fact.trend:
        return Text(printable(fact.words), _STYLES[fact.level])
    return _line(f"{fact.words:>12}  {trend_of(fact.trend, width - _BESIDE_BARS, bars)}")


def trend_of(trend: Sequence[float], width: int, bars: str = BARS) -> str:
    """Bars of the newest values that fit into the width, scaled to the highest of them."""
    values = list(trend)[-width:] if width > 0 else []
    most = max(values, default=0.0)
    if not most:
        return ""
    return "".join(bars[round(value / most * (len(bars) - 1))] for value in values)


def _fitting(text: str, width: int, most: int, style: str) -> list[Text]:
    """The text as at most so many lines; the last of them shows that more follow."""
    lines = textwrap.wrap(
        printable(text), max(width, 4), subsequent_indent="  ", break_on_hyphens=False
    )
    if len(lines) > most:
        lines[most - 1 :] = [f"{lines[most - 1]}…"]
    return [_line(line, style) for line in lines]


def _line(text: str, style: str = "") -> Text:
    """The text as one line, cut at the terminal's width."""
    return Text(printable(text), style, no_wrap=True, overflow="ellipsis")
