"""The command `reliablepub demo`.

Knows: options, the terminal and exit codes. Must never know: what happens in the demo.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import click
from rich.console import Console

from reliablepub.demo.story import tell
from reliablepub.transport.address import parse_addresses

_RECORDS_MAX = 1_000_000


@click.command()
@click.option("--url", help="A real broker, instead of the bundled one.")
@click.option(
    "--records",
    type=click.IntRange(100, _RECORDS_MAX),
    default=20_000,
    show_default=True,
    help="Flights to publish; after 5000 they repeat under new numbers.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the ledger as JSON; narrate to stderr."
)
@click.option("--keep", is_flag=True, help="Keep the working folder: records, outbox, logs.")
def demo(url: str | None, records: int, *, as_json: bool, keep: bool) -> None:
    """Publish real records through a crash of the publisher and of the broker, and count them.

    Ends with a ledger; the exit code is 1 if anything is lost.
    """
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:5.1f} s[/]  {text}")

    if url is not None:
        _check(url)
    before = _interrupted_by_signals()
    folder = Path(tempfile.mkdtemp(prefix="reliablepub-demo-"))
    is_good, is_of_use = False, True  # the folder, for finding the cause of a failure
    try:
        ledger = tell(folder, records=records, url=url, say=say)
        problems = list(ledger.problems())
        is_good, is_of_use = not problems, bool(problems)
        if as_json:
            click.echo(json.dumps(ledger.as_dict()))
        console.print(ledger.table())
        for problem in problems:
            console.print(f"[red]wrong:[/] {problem}")
        if is_good:
            say("[green]nothing is lost[/]")
    except (click.UsageError, KeyboardInterrupt):
        is_of_use = False
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if not (is_of_use or keep):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            say(f"the working folder is {folder}")
    sys.exit(0 if is_good else 1)


def _check(url: str) -> None:
    if len(parse_addresses(url)) > 1:  # pika's URLs name one
        raise click.UsageError("--url names several hosts; give one")
    parts = urlsplit(url)
    if parts.username is not None and parts.password is None:  # pika's URLs cannot say that
        raise click.UsageError("--url has a user and no password; write amqp://USER:PASSWORD@...")


def _interrupted_by_signals() -> dict[signal.Signals, Any]:
    """Handle SIGTERM and SIGHUP like Ctrl-C; return the handlers before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupt)
    return before


def _interrupt(number: int, _frame: FrameType | None) -> None:
    """Interrupt the demo, so that all started processes are ended."""
    if number == signal.SIGHUP:  # the shell and the kernel may both send it
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
