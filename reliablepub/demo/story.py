"""The course of the demo: the publisher is killed, the broker crashes, and every record arrives.

Knows: the order of events, and what to print about them. Must never know: how a process is run, or
how a message is published; it starts commands and reads public numbers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from secrets import token_hex
from typing import Final

import click

from reliablepub import Outbox, OutboxStatus, ReliablePubError
from reliablepub.demo.consumer import Consumer, Topology
from reliablepub.demo.ledger import Happenings, Ledger, read_happenings, spaced
from reliablepub.demo.processes import Command
from reliablepub.demo.records import write_flights

FAULTS_ARE_FOR: Final = 20_000
"""Number of records for which ``faults.toml`` is written."""
_SEED: Final = "2013"
_LOOK_S: Final = 0.005
_HISTORY_S: Final = 0.1
_PROGRESS_S: Final = 1.0
_QUIET_S: Final = 0.5
"""Seconds without a delivery after which the demo ends, if all records have arrived."""
_MISSING_S: Final = 5.0
"""Seconds without a delivery after which the queues are asked for what is missing."""

_GOOD_CODES: Final = (0, 1, 3)
"""Accepted exit codes of a publisher: all confirmed, some parked, some open."""

Say = Callable[[str], None]


def tell(folder: Path, *, records: int, url: str | None, say: Say) -> Ledger:
    """Run the demo in a folder, with the broker at a URL, or with the bundled one if it is None."""
    flights, outbox = folder / "flights.ndjson", folder / "outbox.db"
    written = write_flights(flights, records)
    carriers = written.carriers
    say(f"[bold]{spaced(records)} flights[/] of {len(carriers)} carriers, one JSON object a line")
    with ExitStack() as stage:
        is_theirs = url is not None
        if url is None:
            url = _start_broker(stage, folder, records, say)
            topology = Topology("flights", carriers)
        else:
            topology = Topology(f"reliablepub-demo-{token_hex(4)}", carriers)
            say(f"your broker, with queues and an exchange named {topology.exchange}")
            say("without crashes and faults of the broker")
        topology.declare(url)
        if is_theirs:
            stage.callback(_clean_up, topology, url, say)
        consumer = Consumer(url, topology, written.checksums, say)
        consumer.start()
        stage.callback(consumer.end)
        act = _Act(flights, Outbox(outbox), consumer, records, say)
        arguments = _arguments(flights, outbox, topology.exchange)
        with Command(*arguments, url=url, log=folder / "publish.log") as publisher:
            killed = act.kill_at_a_third(publisher)
        if act.is_unfinished():
            with Command(*arguments, url=url, log=folder / "publish.log") as publisher:
                on = f"process {publisher.pid} continues where the first one stopped"
                say(f"[green]same command again[/]: {on}")
                act.watch(publisher)
        if act.outbox.status().open:
            say("messages are still open: `reliablepub relay --drain` finishes them")
            drain = ("relay", "--drain", "--outbox", str(outbox))
            with Command(*drain, url=url, log=folder / "relay.log") as relay:
                act.watch(relay)
        act.wait_for_consumer()
    return Ledger.of(
        records, act.outbox.status(), consumer.count, read_happenings(outbox), killed=killed
    )


def _clean_up(topology: Topology, url: str, say: Say) -> None:
    """Delete the queues on the user's broker; the ledger counts even if the broker is gone."""
    try:
        topology.delete(url)
    except click.UsageError as error:
        say(f"[red]the queues and exchange {topology.exchange} stay[/]: {error.message}")


def _start_broker(stage: ExitStack, folder: Path, records: int, say: Say) -> str:
    script = folder / "faults.toml"
    script.write_text(scaled_faults(records), encoding="utf-8")
    arguments = ("broker", "--port", "0", "--seed", _SEED, "--faults", str(script))
    broker = stage.enter_context(Command(*arguments, log=folder / "broker.log", is_read=True))
    url = broker.first_line()
    say(f"the bundled broker is process {broker.pid}; it will nack, return, block, drop and crash")
    return url


def scaled_faults(records: int) -> str:
    """The fault script, with its publish counts scaled to the number of records."""
    text = files("reliablepub.demo").joinpath("faults.toml").read_text(encoding="utf-8")

    def scaled(found: re.Match[str]) -> str:
        return f"nth = {max(1, int(found[1]) * records // FAULTS_ARE_FOR)}"

    return re.sub(r"^nth = (\d+)$", scaled, text, flags=re.MULTILINE)


def _arguments(flights: Path, outbox: Path, exchange: str) -> tuple[str, ...]:
    return (
        *("publish", str(flights), "--exchange", exchange),
        *("--routing-key", "flight.{carrier}.{dest}"),
        *("--outbox", str(outbox)),
    )


@dataclass(frozen=True, slots=True)
class _Act:
    """The steps of the demo while a publisher runs."""

    flights: Path
    outbox: Outbox
    consumer: Consumer
    records: int  # their number
    say: Say

    def kill_at_a_third(self, publisher: Command) -> int:
        """Kill the publisher when a third is stored; return 1, or 0 if it had finished before."""
        self.say(f"`reliablepub publish {self.flights.name}` is process {publisher.pid}")
        while publisher.is_running:
            status = self._status()
            if status is not None and status.stored * 3 >= self.records:
                publisher.kill()
                status = self.outbox.status()
                self.say(
                    f"[red]publisher killed[/] (SIGKILL) at {spaced(status.stored)} stored, "
                    f"{spaced(status.confirmed)} confirmed; {spaced(status.open)} are open"
                )
                return 1
            time.sleep(_LOOK_S)
        publisher.check(*_GOOD_CODES)
        self.say("the publisher had finished before it could be killed")
        return 0

    def is_unfinished(self) -> bool:
        """Whether records are left to publish. If not, the same command would start over."""
        status = self.outbox.status()
        return status.stored < self.records or status.open > 0

    def watch(self, publisher: Command) -> None:
        """Narrate until a publisher has ended with an accepted exit code."""
        say_at = time.monotonic()
        losses = self._happenings().connections_lost
        while publisher.is_running:
            if self._happenings().connections_lost > losses:
                losses += 1
                self.say("[yellow]connection lost[/]: messages in flight are sent again, same ids")
            if time.monotonic() >= say_at:
                say_at += _PROGRESS_S
                self._say_progress()
            time.sleep(_HISTORY_S)
        publisher.check(*_GOOD_CODES)
        self._say_progress()

    def wait_for_consumer(self) -> None:
        """Wait until every record has arrived, or the queues are empty."""
        while True:
            is_complete = len(self.consumer.count.ids) >= self.records
            if self.consumer.quiet_s > (_QUIET_S if is_complete else _MISSING_S):
                # No clock says that a record is lost: a consumer may be slow, or may have failed.
                if not is_complete:
                    self.say("the consumer has got nothing for a while: the queues are emptied")
                    self.consumer.fetch_rest()
                return
            time.sleep(_LOOK_S)

    def _status(self) -> OutboxStatus | None:
        try:
            return self.outbox.status()
        except ReliablePubError:
            return None  # the outbox is created with the first message

    def _happenings(self) -> Happenings:
        return read_happenings(self.outbox.path)

    def _say_progress(self) -> None:
        status = self._status()
        if status is not None:
            what = self._happenings()
            self.say(
                f"stored {spaced(status.stored)}, confirmed {spaced(status.confirmed)}, "
                f"consumed {spaced(len(self.consumer.count.ids))}; "
                f"nacked {what.nacked}, returned {what.returned}, uncertain {what.uncertain}"
            )
