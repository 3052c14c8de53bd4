"""``reliablepub watch``: an outbox and its relay, looked at again and again.

Knows: when to look, and whether a person looks on or a program. Must never know: how the picture is
drawn, SQL, or a broker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, takewhile
from itertools import count as count_up
from pathlib import Path
from typing import Final

import click

from reliablepub.cli.choosing import Duration
from reliablepub.cli.exits import Exit
from reliablepub.cli.lookout import Look, look_closely
from reliablepub.cli.options import inspected_option, json_option
from reliablepub.cli.output import print_json
from reliablepub.cli.signals import Stop

_INTERVAL_S_MIN: Final = 0.1
_QUIT: Final = ("q", "Q", "\x1b", "\x04", "")
"""Keys that end it: q, Escape, Ctrl-D; and a terminal that is gone."""
_HINT: Final = "q quits, any other key looks now"


@click.command()
@inspected_option
@click.option(
    "--interval",
    "interval_s",
    metavar="TIME",
    type=Duration(),
    default="1s",
    show_default=True,
    help="How long to wait between two looks, 0.1s at least.",
)
@click.option(
    "--count",
    type=click.IntRange(min=1),
    help="End after so many looks; without it at q, Ctrl-C or SIGTERM.",
)
@json_option
def watch(outbox_path: Path, interval_s: float, count: int | None, as_json: bool) -> int:  # noqa: FBT001 - click passes flags as arguments
    """Watch an outbox: rates, what is in flight, the connection, why messages fail.

    It only reads, and disturbs no relay; a relay that is at work shows more: its window, its
    connection to the broker, how long confirms take. Without a terminal, or with --json, each look
    is a line with one JSON object.

    \b
    Examples:
      reliablepub watch --outbox outbox.db
      reliablepub watch --outbox outbox.db --json --interval 10s

    \b
    Exit codes:
      0  done, also when it was ended by a key or a signal
      2  bad usage
      4  it cannot be used (any more)
    """  # noqa: D301 - click: keep these lines as they are
    interval_s = max(_INTERVAL_S_MIN, interval_s)
    looks: Iterable[int] = range(count) if count is not None else count_up()
    with Stop() as stop:
        if as_json or not _is_seen():
            looks = takewhile(lambda number: not number or not stop.wait(interval_s), looks)
            for seen in _looks(outbox_path, iter(looks)):
                print_json(seen.values)
            return Exit.CONFIRMED
        _show(outbox_path, interval_s, iter(looks), stop)
    return Exit.CONFIRMED


def _looks(outbox: Path, numbers: Iterator[int]) -> Iterator[Look]:
    before: Look | None = None
    for _ in numbers:
        before = look_closely(outbox, before)
        yield before


def _is_seen() -> bool:
    """Whether a picture can be drawn, and keys can be read."""
    is_smart = os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    return sys.stdin.isatty() and sys.stdout.isatty() and is_smart


def _show(outbox: Path, interval_s: float, numbers: Iterator[int], stop: Stop) -> None:
    from rich.console import Console  # noqa: PLC0415 - 50 ms that only a terminal needs
    from rich.live import Live  # noqa: PLC0415

    from reliablepub.cli.keyboard import Keyboard  # noqa: PLC0415
    from reliablepub.cli.screen import Trail, draw  # noqa: PLC0415

    console, trail = Console(), Trail()
    looks = _looks(outbox, numbers)
    first = next(looks)  # an outbox that cannot be used is an error on the usual screen
    with (
        Keyboard(sys.stdin.fileno()) as keyboard,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        for seen in chain((first,), looks):
            trail.add(seen)
            width, height = console.size
            live.update(draw(seen, trail, width=width, height=height, hint=_HINT), refresh=True)
            key = keyboard.pressed(stop, interval_s)
            if stop.is_set or key in _QUIT:
                return
