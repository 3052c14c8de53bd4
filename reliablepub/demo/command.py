"""The command `reliablepub demo`: a publisher is killed, the broker crashes, every record arrives.

Knows: the order of events, and how to run `reliablepub` commands as a user would, in processes of
their own. Must never know: how a message is published or consumed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from types import FrameType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import click
from rich.console import Console

from reliablepub import Outbox, ReliablePubError
from reliablepub.demo.arrivals import (
    Consumer,
    declare,
    delete,
    ledger_of,
    problems_of,
    read_history,
    spaced,
    table_of,
    write_flights,
)
from reliablepub.transport.address import parse_addresses

_RECORDS_MAX: Final = 1_000_000
_SEED: Final = "2013"
_START_S: Final = 20.0
_STOP_S: Final = 5.0
_LOOK_S: Final = 0.005
_HISTORY_S: Final = 0.1
_PROGRESS_S: Final = 1.0
_TAIL_LINES: Final = 15
_GOOD_CODES: Final = (0, 1, 3)
"""Accepted exit codes of a publisher: all confirmed, some parked, some open."""

Say = Callable[[str], None]


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
@click.option("--keep", is_flag=True, help="Keep the working directory: records, outbox, logs.")
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
    is_good, is_of_use = False, True  # the directory, for finding the cause of a failure
    try:
        ledger = tell(folder, records=records, url=url, say=say)
        problems = problems_of(ledger)
        is_good, is_of_use = not problems, bool(problems)
        if as_json:
            click.echo(json.dumps(ledger | {"problems": problems}))
        console.print(table_of(ledger))
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
            say(f"the working directory is {folder}")
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


# ------------------------------------------------------------------ the course of events


def tell(folder: Path, *, records: int, url: str | None, say: Say) -> dict[str, int]:
    """Run the demo in a directory; with the broker at a URL, or the bundled one if it is None."""
    flights, path = folder / "flights.ndjson", folder / "outbox.db"
    checksums = write_flights(flights, records)
    say(f"[bold]{spaced(records)} flights[/], one JSON object per line")
    with ExitStack() as stage:
        name = f"reliablepub-demo-{token_hex(4)}"
        is_theirs = url is not None
        if url is None:
            url = _start_broker(stage, folder, records, say)
        else:
            say(f"your broker, with a queue and an exchange named {name}")
            say("without crashes and faults of the broker")
        declare(url, name)
        if is_theirs:
            stage.callback(_clean_up, url, name, say)
        consumer = Consumer(url, name, checksums, say)
        consumer.start()
        stage.callback(consumer.stop)
        demo = _Demo(Outbox(path), consumer, records, say)
        publish = (
            *("publish", str(flights), "--outbox", str(path)),
            *("--exchange", name, "--routing-key", "flight.{carrier}.{dest}"),
        )
        with Process(*publish, url=url, log=folder / "publish.log") as publisher:
            killed = demo.kill_at_a_third(publisher)
        # Of a run that had finished, the same command would publish the file again.
        if demo.is_unfinished:
            with Process(*publish, url=url, log=folder / "publish.log") as publisher:
                on = f"process {publisher.pid} continues where the first one stopped"
                say(f"[green]same command again[/]: {on}")
                demo.watch(publisher)
        if demo.outbox.status().open:
            say("messages are still open: `reliablepub relay --drain` finishes them")
            drain = ("relay", "--drain", "--outbox", str(path))
            with Process(*drain, url=url, log=folder / "relay.log") as relay:
                demo.watch(relay)
        consumer.finish()
    return ledger_of(
        records, demo.outbox.status(), consumer.count, read_history(path), killed=killed
    )


@dataclass(frozen=True, slots=True)
class _Demo:
    """What is looked at and told while a publisher runs."""

    outbox: Outbox
    consumer: Consumer
    records: int  # their number
    say: Say

    @property
    def is_unfinished(self) -> bool:
        """Whether records are left to publish."""
        status = self.outbox.status()
        return status.stored < self.records or status.open > 0

    def kill_at_a_third(self, publisher: Process) -> int:
        """Kill the publisher when a third is stored; return 1, or 0 if it had finished before."""
        self.say(f"`reliablepub publish flights.ndjson` is process {publisher.pid}")
        while publisher.is_running:
            if self._stored() * 3 >= self.records:
                publisher.kill()
                status = self.outbox.status()
                self.say(
                    f"[red]publisher killed[/] (SIGKILL) at {spaced(status.stored)} stored, "
                    f"{spaced(status.confirmed)} confirmed; {spaced(status.open)} are open"
                )
                return 1
            time.sleep(_LOOK_S)
        publisher.check()
        self.say("the publisher had finished before it could be killed")
        return 0

    def watch(self, publisher: Process) -> None:
        """Narrate until a publisher has ended with an accepted exit code."""
        say_at = time.monotonic()
        losses = self._history()["connections_lost"]
        while publisher.is_running:
            if self._history()["connections_lost"] > losses:
                losses += 1
                self.say("[yellow]connection lost[/]: messages in flight are sent again, same ids")
            if time.monotonic() >= say_at:
                say_at += _PROGRESS_S
                self._say_progress()
            time.sleep(_HISTORY_S)
        publisher.check()
        self._say_progress()

    def _stored(self) -> int:
        try:
            return self.outbox.status().stored
        except ReliablePubError:
            return 0  # the outbox is created with the first message

    def _history(self) -> dict[str, int]:
        return read_history(self.outbox.path)

    def _say_progress(self) -> None:
        status = self.outbox.status()
        history = self._history()
        self.say(
            f"stored {spaced(status.stored)}, confirmed {spaced(status.confirmed)}, "
            f"consumed {spaced(len(self.consumer.count.ids))}; nacked {history['nacked']}, "
            f"returned {history['returned']}, uncertain {history['uncertain']}"
        )


def _clean_up(url: str, name: str, say: Say) -> None:
    """Delete the queue on the user's broker; the ledger counts even if the broker is gone."""
    try:
        delete(url, name)
    except click.UsageError as error:
        say(f"[red]the queue and exchange {name} stay[/]: {error.message}")


# ------------------------------------------------------------------ the bundled broker


def _start_broker(stage: ExitStack, folder: Path, records: int, say: Say) -> str:
    script = folder / "faults.toml"
    script.write_text(faults(records), encoding="utf-8")
    arguments = ("broker", "--port", "0", "--seed", _SEED, "--faults", str(script))
    broker = stage.enter_context(Process(*arguments, log=folder / "broker.log"))
    url = broker.url()
    say(f"the bundled broker is process {broker.pid}; it will nack, return, block, drop and crash")
    return url


def faults(records: int) -> str:
    """The fault script: shares of all publishes, drawn from a seed, and faults at a publish."""
    return f"""
# A queue that refuses some messages: basic.nack.
[[fault]]
kind = "nack"
share = 0.005

# Routable messages that are returned, as while a binding is being replaced: basic.return.
[[fault]]
kind = "return"
share = 0.002

# A memory alarm: connection.blocked, and the broker accepts no publish until it ends.
[[fault]]
kind = "block"
nth = {records * 20 // 100}
for_s = 0.7

# A connection that is reset in the middle of a batch; its confirms are lost.
[[fault]]
kind = "drop_connection"
nth = {records * 45 // 100}

# The broker dies as by kill -9, loses all unwritten messages, and restarts a second later.
[[fault]]
kind = "crash"
nth = {records * 65 // 100}
down_for_s = 1.0
"""


# ------------------------------------------------------------------ processes


class Process:
    """A process that runs ``reliablepub``; ended at the end of its ``with`` block."""

    def __init__(self, *arguments: str, log: Path, url: str | None = None) -> None:
        self._name = arguments[0]
        self._log = log
        # The user's options are for the user's outbox: some of them would break the demo.
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("RELIABLEPUB_")
        }
        if url is not None:
            environment["RELIABLEPUB_URL"] = url  # not an argument, since it holds a password
        with log.open("ab") as output:
            # A session of its own, so that Ctrl-C reaches only the demo, which ends the process.
            self._process = subprocess.Popen(  # noqa: S603 - reliablepub's command line
                [sys.executable, "-m", "reliablepub", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        self.pid: Final = self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def url(self) -> str:
        """Wait for the URL that a broker prints, at most 20 s."""
        give_up_at = time.monotonic() + _START_S
        while self.is_running and time.monotonic() < give_up_at:
            for line in self._log.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.startswith("amqp://") and line.endswith("\n"):
                    return line.strip()
            time.sleep(_LOOK_S)
        raise self._failed("did not start")

    def check(self) -> None:
        """Wait for the process to end, and check that its exit code is a good one."""
        code = self._process.wait()
        if code not in _GOOD_CODES:
            raise self._failed(f"ended with code {code}")

    def kill(self) -> None:
        """Kill the process with SIGKILL, which it cannot handle."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process: SIGTERM, and SIGKILL if it has not ended 5 s later."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _failed(self, how: str) -> click.ClickException:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(lines[-_TAIL_LINES:])
        return click.ClickException(f"`reliablepub {self._name}` {how}:\n{tail}")
