"""``reliablepub watch``: shows an outbox and its relay, refreshed at an interval.

Knows: when to take a snapshot, terminal modes, and what a key does. Must never know: how the screen
is drawn, SQL, or a broker.
"""

from __future__ import annotations

import io
import os
import sys
import termios
import tty
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, takewhile
from itertools import count as count_up
from typing import Final

import click

from reliablepub.cli.commands import command
from reliablepub.cli.options import Duration, inspected_option, json_option
from reliablepub.cli.output import print_json
from reliablepub.cli.signals import Stop
from reliablepub.cli.watch.lookout import Look, look
from reliablepub.cli.watch.page import page_of
from reliablepub.outbox.database import Database
from reliablepub.outbox.entry import TRANSIENT

_INTERVAL_S_MIN: Final = 0.1
_QUIT: Final = ("q", "Q", "\x1b", "\x04", "")
"""Keys that end the command: q, Escape, Ctrl-D. The empty text means the terminal is gone."""
_KEY_BYTES_MAX: Final = 32
_HINT: Final = "q quits, any other key refreshes"


@command(
    exits={
        0: "done, also when a key or a signal ended it",
        3: "interrupted by a second signal",
        4: "the outbox cannot be used, or can no longer be used",
    },
)
@inspected_option
@click.option(
    "--interval",
    "interval_s",
    type=Duration(),
    default="1s",
    show_default=True,
    help="Time between two snapshots, at least 0.1s.",
)
@click.option(
    "--count",
    type=click.IntRange(min=1),
    help="End after this many snapshots; without it, end at q, Ctrl-C or SIGTERM.",
)
@json_option
def watch(database: Database, interval_s: float, count: int | None, as_json: bool) -> None:
    """Watch an outbox: rates, messages in flight, the connection, why messages fail.

    The command only reads, and does not disturb the relay. A running relay adds figures of its own:
    window, connection to the broker, latency of confirms. Without a terminal, or with --json, each
    snapshot is one line with a JSON object.

    \b
    Examples:
      reliablepub watch --outbox outbox.db
      reliablepub watch --outbox outbox.db --json --interval 10s
    """
    interval_s = max(_INTERVAL_S_MIN, interval_s)
    looks: Iterable[int] = range(count) if count is not None else count_up()
    is_seen = not as_json and _is_seen()
    with Stop(has_screen=is_seen) as stop:
        if not is_seen:
            looks = takewhile(lambda number: not number or not stop.wait(interval_s), looks)
            for seen in _looks(database, iter(looks)):
                print_json(seen.values)
            return
        try:
            _show(database, interval_s, iter(looks), stop)
        except OSError:
            if not _is_gone(sys.stdin.fileno()):
                raise


def _looks(database: Database, numbers: Iterator[int]) -> Iterator[Look]:
    before: Look | None = None
    for _ in numbers:
        try:
            before = look(database, before, closely=True)
        except TRANSIENT as error:
            if before is None:
                raise
            yield before.unreachable(str(error))
        else:
            yield before


def _is_seen() -> bool:
    """Whether the screen can be drawn and keys can be read."""
    is_smart = os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    return sys.stdin.isatty() and sys.stdout.isatty() and is_smart


def _is_gone(fd: int) -> bool:
    """Whether the other end of a terminal is closed."""
    try:
        termios.tcgetattr(fd)
    except termios.error:
        return True
    return False


def _show(database: Database, interval_s: float, numbers: Iterator[int], stop: Stop) -> None:
    from rich.console import Console  # noqa: PLC0415 - 50 ms that only a terminal needs
    from rich.live import Live  # noqa: PLC0415

    from reliablepub.cli.watch.screen import ASCII_BARS, BARS, draw  # noqa: PLC0415

    console = Console()
    is_unicode = console.encoding.lower().startswith("utf")
    if not is_unicode and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an escape would make a line longer than it is
    bars = BARS if is_unicode else ASCII_BARS
    looks = _looks(database, numbers)
    first: Look | None = next(looks)  # an outbox that cannot be used fails before the screen
    while first is not None:
        with (
            _single_keys(sys.stdin.fileno()),
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            for seen in chain((first,), looks):
                width, height = console.size
                screen = draw(page_of(seen), width=width, height=height, hint=_HINT, bars=bars)
                live.update(screen, refresh=True)
                key = _pressed(sys.stdin.fileno(), stop, interval_s)
                if stop.is_pause_due:
                    break
                if stop.is_set or key in _QUIT:
                    return
            else:
                return
        stop.pause()  # the shell gets back its own screen first
        first = next(looks, None)


@contextmanager
def _single_keys(fd: int) -> Iterator[None]:
    """Read keys without an echo or a wait for the end of a line; Ctrl-C still sends SIGINT."""
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd, termios.TCSANOW)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _pressed(fd: int, stop: Stop, timeout_s: float) -> str | None:
    """Return what was typed, within ``timeout_s`` seconds and before a signal."""
    if not stop.wait_readable(fd, timeout_s):
        return None  # nothing was typed in time
    try:
        return os.read(fd, _KEY_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""  # the terminal is gone
