"""Read-only queries: status, parked messages, tags in flight, one message, whole views.

Knows: the statements that read. Must never know: how messages are changed, how results are shown.

Each query runs in its own read transaction, so its result is consistent. A view is read in pieces,
each in a short transaction: a message that is parked during the read may appear twice or not at
all. Damaged rows are shown as far as they can be read.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from reliablepub.errors import ConfigurationError, OutboxError, OutboxSealed
from reliablepub.outbox.admin.selection import with_doubt
from reliablepub.outbox.database import Database, Relaying, lost_ledger
from reliablepub.outbox.encryption import OutboxKeys, is_sealed
from reliablepub.outbox.entry import Counters
from reliablepub.outbox.rows import MISTYPED, MessageRow, Unreadable, content_of, entry_of


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """Status of an outbox at one moment.

    Attributes:
        stored: messages ever accepted.
        open: stored messages that are not settled yet.
        in_flight: open messages that the running relay has sent and the broker has not answered,
            as recorded on disk; 0 while no relay runs.
        confirmed: messages that the broker has taken responsibility for.
        parked: messages given up, kept for an operator.
        expired: messages whose deadline passed before a confirm, kept for an operator.
        discarded: messages deleted without a confirm, by an operator or by the retry policy.
        waiting: open messages that have a time at which they are to be sent, or sent again.
        held_keys: ordering keys that a parked message holds.
        oldest_open_at: when the open message with the lowest id was stored (seconds since 1970);
            None if no message is open. Damaged rows do not count.
        relay: id of the process that relays the outbox now, or None. With shards, that of the first
            shard that has a relay.
        bytes_on_disk: size of the database and its write-ahead log.
        log_bytes: size of the write-ahead log. More than about 20 MiB means that a read transaction
            stays open and keeps SQLite from resetting the log.
        is_disk_full: whether the disk is too full for even the smallest new message.
        relays: id of the process that relays each shard now, or None; one item without shards.
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
    relays: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class ParkedMessage:
    """A message that was given up, without its body.

    Attributes:
        id: number of its row, for `Outbox.retry`.
        message_id: AMQP ``message_id``, which consumers would see.
        exchange: exchange that it was stored for.
        routing_key: routing key that it was stored with.
        state: ``parked`` or ``expired``.
        outcome: outcome of its last attempt.
        reply_code: the broker's reply code; 0 if the broker sent none.
        reply_text: the broker's reply text, or this library's.
        attempts: number of attempts that did not end in a confirm.
        stored_at: when it was accepted (seconds since 1970).
        parked_at: when it was given up (seconds since 1970).
        size: bytes that count against limits (`Message.size`).
        may_have_arrived: whether a queue may hold it because of an attempt.
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
    may_have_arrived: bool = False


@dataclass(frozen=True, slots=True)
class HeldKey:
    """A parked message that holds its ordering key: later messages of the key wait.

    Attributes:
        ordering_key: the ordering key.
        id: number of the parked message's row.
        message_id: AMQP ``message_id``, which consumers would see.
        exchange: exchange that it was stored for.
        routing_key: routing key that it was stored with.
        outcome: outcome of its last attempt.
        reply_code: the broker's reply code; 0 if the broker sent none.
        reply_text: the broker's reply text, or this library's.
        parked_at: when it was parked (seconds since 1970).
        held_back: number of messages that wait behind it.
        may_have_arrived: whether a queue may hold it because of an attempt.
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
    may_have_arrived: bool = False


def read_status(database: Database) -> OutboxStatus:
    """Return the status of an outbox."""
    with database.reading() as session:
        relays = session.relays()
        relay = Relaying.first(relays).pid
        counts = session.run("ledger").fetchone()
        if counts is None:
            raise lost_ledger(database)
        if not all(isinstance(count, int) for count in counts):
            raise OutboxError(
                f"the ledger of outbox {database.name} is damaged; copy its messages into a new "
                "outbox with `reliablepub outbox salvage`"
            )
        ledger = Counters(*counts)
        (in_flight,) = session.run("in_flight_count").fetchone() if relay is not None else (0,)
        (waiting,) = session.run("waiting_count").fetchone()
        (held_keys,) = session.run("held_key_count").fetchone()
        (oldest,) = session.run("oldest_open_at").fetchone() or (None,)
        space = session.space()
    return OutboxStatus(
        stored=ledger.stored,
        open=ledger.open,
        in_flight=in_flight,
        confirmed=ledger.confirmed,
        parked=ledger.parked,
        expired=ledger.expired,
        discarded=ledger.discarded,
        waiting=waiting,
        held_keys=held_keys,
        oldest_open_at=oldest if isinstance(oldest, int | float) else None,
        relay=relay,
        bytes_on_disk=space.bytes_on_disk,
        log_bytes=space.log_bytes,
        is_disk_full=space.is_disk_full,
        relays=tuple(one.pid for one in relays),
    )


def read_relays(database: Database) -> list[Relaying]:
    """Return the process that relays each shard of an outbox now, and its status."""
    with database.reading() as session:
        return session.relays()


def read_due(database: Database) -> tuple[int, int, int]:
    """Return the number of shards, of open messages, and of those due in shards without a relay."""
    with database.reading() as session:
        relays = session.relays()
        free = {relay.shard for relay in relays if relay.pid is None}
        found = list(session.select(_DUE, {"now": time.time()}))
        # Due: waits for no time, nor for a message of its ordering key
        due = sum(row["due"] for row in found if row["shard"] in free)
        return len(relays), sum(row["open"] for row in found), due


_DUE: Final = """
SELECT m.shard, count(*) AS open, count(CASE WHEN
    (m.due_at IS NULL OR m.due_at <= :now OR m.due_at = 'infinity')
    AND NOT EXISTS (
        SELECT 1 FROM reliablepub_messages AS e
        WHERE e.ordering_key = m.ordering_key AND e.id < m.id
    ) AND NOT EXISTS (
        SELECT 1 FROM reliablepub_parked AS p
        WHERE p.ordering_key = m.ordering_key AND p.state = 'parked' AND p.is_skipped = 0
        AND p.id < m.id
    )
    THEN 1 END) AS due
FROM reliablepub_messages AS m GROUP BY m.shard
"""
"""Those with an infinite time wait for a paused destination, where a relay sends probes."""


def read_parked(database: Database, *, limit: int) -> list[ParkedMessage]:
    """Return messages that were given up, in the order in which they were."""
    with database.reading() as session:
        rows = session.rows("parked", {"limit": limit})
        return [ParkedMessage(**with_doubt(row)) for row in rows]


def read_held_keys(database: Database, *, limit: int) -> list[HeldKey]:
    """Return parked messages that hold their ordering keys, sorted by key."""
    with database.reading() as session:
        return [HeldKey(**with_doubt(row)) for row in session.rows("held_keys", {"limit": limit})]


def read_in_flight(database: Database, *, limit: int) -> list[dict[str, Any]]:
    """Return the delivery tags that the running relay has sent and the broker has not answered."""
    with database.reading() as session:
        is_relayed = Relaying.first(session.relays()).pid is not None
        return list(session.rows("in_flight", {"id": None, "limit": limit if is_relayed else 0}))


def read_ambiguous(database: Database, *, limit: int) -> list[dict[str, Any]]:
    """Return messages with a `Persistence.POSSIBLY_PERSISTED` attempt, newest attempt first."""
    with database.reading() as session:
        return list(session.rows("ambiguous", {"limit": limit}))


def read_failures(
    database: Database, *, failures: int, reasons: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the newest failures and the most frequent reasons, of the last 1,000 attempts."""
    with database.reading() as session:
        newest = list(session.rows("newest_failures", {"limit": failures}))
        return newest, list(session.rows("top_reasons", {"limit": reasons}))


def read_figures(database: Database, *, is_all: bool) -> dict[str, Counter[int]]:
    """Count messages by classes of age, attempts and size; `is_all` adds those given up."""
    counts: dict[str, Counter[int]] = {"age": Counter(), "attempts": Counter(), "size": Counter()}
    with database.reading() as session:
        values = {"now": time.time(), "is_all": is_all}
        for row in session.rows("figures", values):
            for name, found in counts.items():
                found[row[name]] += row["messages"]
    return counts


def read_position(database: Database, source: str) -> int:
    """Return how many messages of a named source were stored; 0 if there is no outbox."""
    if not database.exists():
        return 0
    with database.reading() as session:
        (position,) = session.run("position", {"name": source}).fetchone() or (0,)
        return int(position)


_TEXTUAL = ("json", "xml", "javascript", "yaml", "csv", "x-www-form-urlencoded")


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything stored of one message."""

    columns: dict[str, Any]  # without properties and body
    properties: dict[str, Any] = field(repr=False)  # those that are set
    headers: dict[str, Any] = field(repr=False)  # other types than JSON has: {"$bytes": "..."}
    body: bytes = field(repr=False)  # the ciphertext if `is_sealed`
    problem: str | None  # how the row differs from what was stored, or why no key decrypts it
    is_sealed: bool = False  # encrypted, and could not be decrypted

    @property
    def text(self) -> str | None:
        """The body as text; None if encoded, not printable UTF-8, or of a type that is no text."""
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


def read_contents(database: Database, id_: int, keys: OutboxKeys | None = None) -> Contents | None:
    """Return everything in the row of a message, or None if there is no such row."""
    with database.reading() as session:
        columns = next(session.rows("one_message", {"id": id_}), None)
        if columns is None:
            return None
        with_doubt(columns)
        kept = "confirmed_message" if columns["state"] == "confirmed" else "any_message"
        raw = MessageRow._make(session.run(kept, {"chosen": [id_]}).fetchone())
    return _contents(columns, raw, keys)


def read_original(database: Database, id_: int, keys: OutboxKeys | None = None) -> Contents | None:
    """Return a message as it was before it was first edited, or None if it was not."""
    with database.reading() as session:
        ((edited,),) = session.run("first_original", {"id": id_}).fetchall()
        if edited is None:
            return None
        raw = MessageRow._make(session.run("original_message", {"chosen": [edited]}).fetchone())
    names = ("message_id", "exchange", "routing_key", "ordering_key")
    columns: dict[str, Any] = dict(zip(names, raw.where(), strict=True))
    columns |= {"id": id_, "state": "original", "properties": raw.properties.decode()}
    return _contents(columns, raw, keys)


def _contents(columns: dict[str, Any], raw: MessageRow, keys: OutboxKeys | None) -> Contents:
    problem = None
    try:
        entry_of(raw, keys)
    except (Unreadable, OutboxSealed) as error:
        problem = str(error)
    except (TypeError, ValueError, AttributeError):
        problem = MISTYPED
    text, body = columns.pop("properties"), raw.body
    if not isinstance(text, str):
        text = repr(text)
    if not isinstance(body, bytes):
        body = str(body).encode()
    if is_sealed(text):
        try:
            text, body = content_of(raw, keys)
        except (Unreadable, OutboxSealed):
            return Contents(columns, {}, {}, body, problem, is_sealed=True)
    properties = _object(text)
    headers = properties.pop("headers", {})
    if not isinstance(headers, dict):
        properties, headers = {"unreadable": text}, {}
    return Contents(columns, properties, headers, body, problem)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {"unreadable": text}
    return found if isinstance(found, dict) else {"unreadable": text}


PIECE_ROWS: Final = 2_000
_NUMBER_MAX: Final = 2**63 - 1
VIEWS: Final = ("open", "parked", "confirmed", "history", "interventions", "audit")


def read_view(
    database: Database, view: str, first: int = 1, last: int | None = None
) -> Iterator[dict[str, object]]:
    """Yield the rows of a view, ordered by the number in its first column."""
    _check_view(view)
    after, upto = first - 1, _NUMBER_MAX if last is None else last
    while True:
        # One long read transaction would keep the relay from resetting its log, and a VACUUM of
        # PostgreSQL from removing what the relay has deleted since.
        with database.reading() as session:
            values = {"after": after, "upto": upto, "limit": PIECE_ROWS}
            # Not `Session.rows`, which needs sqlite-utils: a Spark cluster may not have it.
            cursor = session.run(f"view_{view}", values)
            names = [column[0] for column in cursor.description]
            rows = [dict(zip(names, row, strict=True)) for row in cursor]
        yield from rows
        if len(rows) < PIECE_ROWS:
            return
        after = next(iter(rows[-1].values()))


def read_span(database: Database, view: str) -> tuple[int, int] | None:
    """Return the lowest and the highest number of a view; None if it has no rows or no numbers."""
    _check_view(view)
    if view == "audit":
        return None
    with database.reading() as session:
        first, last = session.run(f"span_{view}").fetchone()
    return None if first is None else (first, last)


def _check_view(view: str) -> None:
    if view not in VIEWS:
        raise ConfigurationError(f"there is no view {view!r}; there are {', '.join(VIEWS)}")
