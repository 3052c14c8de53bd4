"""What an outbox holds: its status, parked messages, tags in flight, one message, whole views.

Knows: the reading statements, through sqlite-utils. Must never know: how anything is changed or
shown.

Every look is one consistent read transaction of its own, on a connection that cannot write. A view
is read a piece at a time, each in a short transaction: a reader that took an hour over one would
keep the relay from resetting its log for so long. So the rows of one piece belong to one moment,
and a message that is parked meanwhile may be met twice or not at all. Damaged rows are shown as far
as they can be read.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from reliablepub.errors import ConfigurationError, OutboxSealed
from reliablepub.outbox.encryption import OutboxKeys, is_sealed
from reliablepub.outbox.sqlite.ballast import MARGIN_BYTES, Ballast
from reliablepub.outbox.sqlite.database import looking, reading
from reliablepub.outbox.sqlite.lock import holder_pid
from reliablepub.outbox.sqlite.rows import MessageRow, Unreadable, content_of, entry_of
from reliablepub.outbox.sqlite.sql import QUERIES

if TYPE_CHECKING:
    from sqlite_utils import Database


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """An outbox at one moment.

    Attributes:
        stored: messages ever accepted.
        open: of those, not yet settled.
        in_flight: of the open ones, sent by the running relay and not yet answered, as far as the
            disk knows.
        confirmed: messages that the broker has taken responsibility for.
        parked: messages given up, kept for a person.
        expired: messages whose own deadline passed first, kept too.
        discarded: messages thrown away, by a person or by the retry policy.
        waiting: open messages that wait for a time to be sent, or sent again.
        held_keys: ordering keys that a parked message holds.
        oldest_open_at: when the open message with the lowest id was stored (seconds since 1970).
        relay: process that relays it now, or None.
        bytes_on_disk: the database and its write-ahead log.
        log_bytes: of these, the log. More than some 20 MiB: a read transaction that stays open
            keeps it from being used again from its beginning.
        is_disk_full: whether the disk is too full for a new message, however small.
    """

    stored: int
    open: int
    in_flight: int
    confirmed: int
    parked: int
    expired: int
    discarded: int
    waiting: int
    held_keys: int
    oldest_open_at: float | None
    relay: int | None
    bytes_on_disk: int
    log_bytes: int = 0
    is_disk_full: bool = False


@dataclass(frozen=True, slots=True)
class ParkedMessage:
    """A message that was given up, without its body.

    Attributes:
        id: number of its row, for `Outbox.retry`.
        message_id: under which consumers would see it.
        exchange: where it was to go.
        routing_key: with which routing key.
        state: ``parked`` or ``expired``.
        outcome: how its last attempt ended.
        reply_code: the broker's code, 0 where it gave none.
        reply_text: the broker's words, or ours.
        attempts: how many attempts did not end in a confirm.
        stored_at: when it was accepted (seconds since 1970).
        parked_at: when it was given up.
        size: bytes that it counts for.
    """

    id: int
    message_id: str
    exchange: str
    routing_key: str
    state: str
    outcome: str
    reply_code: int
    reply_text: str
    attempts: int
    stored_at: float
    parked_at: float
    size: int


@dataclass(frozen=True, slots=True)
class HeldKey:
    """A parked message that holds its ordering key: what was stored after it waits.

    Attributes:
        ordering_key: the key.
        id: of the parked message's row.
        message_id: under which consumers would see it.
        exchange: where it was to go.
        routing_key: with which routing key.
        outcome: how its last attempt ended.
        reply_code: the broker's code, 0 where it gave none.
        reply_text: the broker's words, or ours.
        parked_at: since when (seconds since 1970).
        held_back: how many messages wait behind it.
    """

    ordering_key: str
    id: int
    message_id: str
    exchange: str
    routing_key: str
    outcome: str
    reply_code: int
    reply_text: str
    parked_at: float
    held_back: int


def read_status(path: Path) -> OutboxStatus:
    """Look at an outbox.

    Raises:
        NotAnOutbox: there is none.
    """
    relay = holder_pid(path)
    with reading(path) as connection:
        database = _tables(connection)
        ledger = _one(database, "ledger")
        settled = sum(ledger[name] for name in ("confirmed", "parked", "expired", "discarded"))
        in_flight = _one(database, "in_flight_count")["count(*)"] if relay is not None else 0
        waiting = _one(database, "waiting_count")["count(*)"]
        held_keys = next(iter(_one(database, "held_key_count").values()))
        oldest = _one(database, "oldest_open_at")
        spare = Ballast(path).spare_bytes(connection)
    log_bytes = _bytes(path.with_name(path.name + "-wal"))
    return OutboxStatus(
        stored=ledger["stored"],
        open=ledger["stored"] - settled,
        in_flight=in_flight,
        confirmed=ledger["confirmed"],
        parked=ledger["parked"],
        expired=ledger["expired"],
        discarded=ledger["discarded"],
        waiting=waiting,
        held_keys=held_keys,
        oldest_open_at=oldest.get("stored_at"),
        relay=relay,
        bytes_on_disk=_bytes(path) + log_bytes,
        log_bytes=log_bytes,
        is_disk_full=spare < MARGIN_BYTES,
    )


def read_parked(path: Path, *, limit: int) -> list[ParkedMessage]:
    """Messages that were given up, oldest first.

    Raises:
        NotAnOutbox: there is no outbox.
    """
    with reading(path) as connection:
        rows = list(_tables(connection).query(QUERIES["parked"], (limit,)))
    return [ParkedMessage(**row) for row in rows]


def read_held_keys(path: Path, *, limit: int) -> list[HeldKey]:
    """Parked messages that hold their ordering keys, by key.

    Raises:
        NotAnOutbox: there is no outbox.
    """
    with reading(path) as connection:
        rows = list(_tables(connection).query(QUERIES["held_keys"], (limit,)))
    return [HeldKey(**row) for row in rows]


def read_in_flight(path: Path, *, limit: int) -> list[dict[str, Any]]:
    """Delivery tags that the running relay has sent and the broker has not answered.

    Raises:
        NotAnOutbox: there is no outbox.
    """
    is_relayed = holder_pid(path) is not None
    with reading(path) as connection:
        values = {"id": None, "limit": limit if is_relayed else 0}
        return list(_tables(connection).query(QUERIES["in_flight"], values))


def read_ambiguous(path: Path, *, limit: int) -> list[dict[str, Any]]:
    """Messages with an attempt after which nobody knew whether a queue had them, newest first.

    Raises:
        NotAnOutbox: there is no outbox.
    """
    with reading(path) as connection:
        return list(_tables(connection).query(QUERIES["ambiguous"], (limit,)))


def read_failures(
    path: Path, *, failures: int, reasons: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The newest attempts that failed, and what was said most often of the last thousand.

    Args:
        path: the outbox.
        failures: most to list.
        reasons: likewise.

    Raises:
        NotAnOutbox: there is no outbox.
    """
    with reading(path) as connection:
        tables = _tables(connection)
        newest = list(tables.query(QUERIES["newest_failures"], (failures,)))
        return newest, list(tables.query(QUERIES["top_reasons"], (reasons,)))


def read_figures(path: Path, *, is_all: bool) -> dict[str, Counter[int]]:
    """How many messages there are by age, attempts and size, in classes (see ``figures``).

    Args:
        path: the outbox.
        is_all: those that were given up, too.

    Raises:
        NotAnOutbox: there is no outbox.
    """
    counts: dict[str, Counter[int]] = {"age": Counter(), "attempts": Counter(), "size": Counter()}
    with reading(path) as connection:
        values = {"now": time.time(), "is_all": is_all}
        for row in _tables(connection).query(QUERIES["figures"], values):
            for name, found in counts.items():
                found[row[name]] += row["messages"]
    return counts


def read_position(path: Path, source: str) -> int:
    """How many messages of a named source are stored, and counted for it.

    Raises:
        NotAnOutbox: the file is something else.
    """
    if not path.exists():
        return 0
    with looking(path) as (connection, has_outbox):
        query = QUERIES["position"]
        row = connection.execute(query, (source,)).fetchone() if has_outbox else None
        (position,) = row or (0,)
        return int(position)


def _tables(connection: sqlite3.Connection) -> Database:
    from sqlite_utils import Database  # noqa: PLC0415 - 50 ms that no producer should wait for

    return Database(connection)


def _one(database: Database, name: str) -> dict[str, Any]:
    return next(iter(database.query(QUERIES[name])), {})


def _bytes(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


_TEXTUAL = ("json", "xml", "javascript", "yaml", "csv", "x-www-form-urlencoded")


@dataclass(frozen=True, slots=True)
class Contents:
    """One message.

    Attributes:
        columns: of its row, without properties and body.
        properties: AMQP properties that are set, as they are stored.
        headers: likewise; what JSON lacks is tagged, as in ``{"$bytes": "..."}``.
        body: the payload; while it is encrypted, as it is stored.
        problem: why the row is not what was stored, or cannot be read here; None if it can.
        is_sealed: whether properties, headers and body are encrypted, and could not be decrypted.
    """

    columns: dict[str, Any]
    properties: dict[str, Any]
    headers: dict[str, Any]
    body: bytes
    problem: str | None
    is_sealed: bool = False

    @property
    def text(self) -> str | None:
        """The body as text, if its content type or its bytes say that it is text; else None."""
        if self.properties.get("content_encoding") not in (None, "", "utf-8", "identity"):
            return None
        kind = str(self.properties.get("content_type", ""))
        is_named = kind.startswith("text/") or any(word in kind for word in _TEXTUAL)
        try:
            text = self.body.decode()
        except UnicodeDecodeError:
            return None
        is_clean = all(char.isprintable() or char in "\n\r\t" for char in text)
        return text if is_clean and (is_named or not kind) else None


def read_contents(path: Path, id_: int, keys: OutboxKeys | None = None) -> Contents | None:
    """Everything in a row, or None if it is not there.

    Args:
        path: of the outbox.
        id_: of the message.
        keys: to decrypt it with, where it is encrypted.

    Raises:
        NotAnOutbox: there is no outbox.
    """
    with reading(path) as connection:
        cursor = connection.execute(QUERIES["one_message"], {"id": id_})
        row = cursor.fetchone()
        if row is None:
            return None
        columns = dict(zip((name for name, *_ in cursor.description), row, strict=True))
        kept = "confirmed_message" if columns["state"] == "confirmed" else "any_message"
        raw = MessageRow._make(connection.execute(QUERIES[kept], {"id": id_}).fetchone())
    problem = None
    try:
        entry_of(raw, keys)
    except (Unreadable, OutboxSealed) as error:
        problem = str(error)
    text, body = columns.pop("properties"), raw.body
    if is_sealed(text):
        try:
            text, body = content_of(raw, keys)
        except (Unreadable, OutboxSealed):
            return Contents(columns, {}, {}, body, problem, is_sealed=True)
    properties = _object(text)
    headers = properties.pop("headers", {})
    return Contents(columns, properties, headers, body, problem)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {"unreadable": text}
    return found if isinstance(found, dict) else {"unreadable": text}


PIECE_ROWS: Final = 2_000
VIEWS: Final = ("open", "parked", "confirmed", "history", "interventions", "audit")


def read_view(path: Path, view: str) -> Iterator[dict[str, object]]:
    """Rows of a view, in the order of the number that comes first in it.

    Raises:
        ConfigurationError: there is no such view.
        NotAnOutbox: there is no outbox.
    """
    if view not in VIEWS:
        raise ConfigurationError(f"there is no view {view!r}; there are {', '.join(VIEWS)}")
    after = 0
    while True:
        with reading(path) as connection:
            found = connection.execute(QUERIES[f"view_{view}"], (after, PIECE_ROWS))
            names = [name for name, *_ in found.description]
            rows = found.fetchall()
        for row in rows:
            yield dict(zip(names, row, strict=True))
        if len(rows) < PIECE_ROWS:
            return
        after, *_ = rows[-1]
