"""What one turn changes, statement by statement, within the transaction that somebody else holds.

Knows: the order of the writing statements, and the ledger. Must never know: how a transaction
begins, ends or fails.

The ledger is changed by what the statements really changed, never by what they were meant to, so
that a verdict that comes twice counts once.
"""

from __future__ import annotations

import json
import sqlite3
from itertools import chain
from typing import Final

from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import (
    Attempt,
    Counters,
    DamagedRow,
    Entry,
    Release,
    Sent,
    Snapshot,
    Step,
    Turn,
)
from reliablepub.outbox.rows import (
    attempt_of,
    id_runs,
    is_plain,
    plain_row_of,
    row_of,
    schedule_of,
)
from reliablepub.outbox.sql import QUERIES
from reliablepub.outcome import OutcomeKind

NO_CHANGE: Final = {
    "stored": 0,
    "confirmed": 0,
    "parked": 0,
    "expired": 0,
    "discarded": 0,
    "open_bytes": 0,
}
"""Parameters of ``change_ledger`` that change nothing."""
LEFT_IN_FLIGHT: Final = "the publisher ended before the broker answered"
ROWS_AT_ONCE: Final = 50
"""Rows that one statement stores: it costs half of what a statement for each would."""
_VALUES: Final = ", (" + ", ".join("?" * 9) + ")"
_INSERT_MANY: Final = QUERIES["insert_plain_message"].rstrip(";") + _VALUES * (ROWS_AT_ONCE - 1)

_SCOPES: Final = ("held", "held_of_exchange", "held_of_address")
"""Statements that find what is held: for every destination, an exchange, one routing key of it."""


def write_turn(
    connection: sqlite3.Connection,
    turn: Turn,
    now: float,
    *,
    keep_confirmed: bool,
    keys: OutboxKeys | None,
) -> Snapshot:
    """Write all that a turn changes; its new entries get their ids."""
    if keep_confirmed:
        for first, length in id_runs(sorted(entry.id for entry in turn.confirmed)):
            connection.execute(QUERIES["keep_confirmed"], (now, first, first + length - 1))
    # First, so that new rows go to the pages that this frees: each is written once, and not twice.
    confirmed, confirmed_bytes = remove(connection, [entry.id for entry in turn.confirmed])
    if turn.stepped is not None:  # before what is by the new clock already
        _step(connection, turn.stepped, now)
    last_id, stored_bytes = _insert(connection, turn.new, keys)
    if turn.sources:
        connection.executemany(QUERIES["advance_source"], turn.sources.items())
    parked, expired, parked_bytes = _park(connection, turn.parked)
    discarded, discarded_bytes = remove(connection, [gone.entry.id for gone in turn.discarded])
    if turn.rescheduled:
        connection.executemany(QUERIES["reschedule"], map(schedule_of, turn.rescheduled))
    for release in turn.released:
        _release(connection, release)
    if turn.attempts:
        connection.executemany(QUERIES["insert_attempt"], map(attempt_of, turn.attempts))
    if turn.finished:
        tags = ((sent.epoch, sent.first_tag) for sent in turn.finished)
        connection.executemany(QUERIES["delete_in_flight"], tags)
    if turn.sent:
        _write_in_flight(connection, turn.sent, now)
    change = NO_CHANGE | {
        "stored": len(turn.new),
        "confirmed": confirmed,
        "parked": parked,
        "expired": expired,
        "discarded": discarded,
        "open_bytes": stored_bytes - confirmed_bytes - parked_bytes - discarded_bytes,
    }
    row = connection.execute(QUERIES["change_ledger"], change).fetchone()
    return Snapshot(last_id, Counters(*row))


def _step(connection: sqlite3.Connection, step: Step, now: float) -> None:
    by = {"by": step.by, "since": step.since, "last_id": step.last_id, "now": now}
    for kind in ("step_retries", "step_deadlines", "due_since_stored"):
        connection.execute(QUERIES[kind], by)


def _insert(
    connection: sqlite3.Connection, new: list[Entry], keys: OutboxKeys | None
) -> tuple[int, int]:
    """Store entries, and give them their ids; the highest id then, and their bytes."""
    (last_id,) = connection.execute(QUERIES["last_id"]).fetchone()
    size = 0
    for entry in new:
        assert entry.id == 0, f"{entry.message!r} is stored already"
        last_id += 1
        entry.id = last_id
        size += entry.message.size
    if new:
        _insert_rows(connection, new, keys)
    return last_id, size


def _insert_rows(connection: sqlite3.Connection, new: list[Entry], keys: OutboxKeys | None) -> None:
    rows = [plain_row_of(entry, keys) for entry in new if is_plain(entry)]
    whole = len(rows) - len(rows) % ROWS_AT_ONCE
    for first in range(0, whole, ROWS_AT_ONCE):
        values = chain.from_iterable(rows[first : first + ROWS_AT_ONCE])
        connection.execute(_INSERT_MANY, tuple(values))
    connection.executemany(QUERIES["insert_plain_message"], rows[whole:])
    if len(rows) < len(new):
        others = (row_of(entry, keys) for entry in new if not is_plain(entry))
        connection.executemany(QUERIES["insert_message"], others)


def park_damaged(
    connection: sqlite3.Connection, damaged: dict[int, str], now: float
) -> list[DamagedRow]:
    """Move rows that are not what was stored, by id and reason, to where a person sees them."""
    rows: list[DamagedRow] = []
    for id_, reason in damaged.items():
        row = {"id": id_, "at": now, "outcome": "refused", "reply_text": reason}
        connection.execute(QUERIES["park_as_it_is"], row)
        moved, _ = remove(connection, [id_])
        if moved:
            texts = connection.execute(QUERIES["parked_address"], (id_,)).fetchone()
            message_id, exchange, routing_key = (text.decode(errors="replace") for text in texts)
            rows.append(DamagedRow(id_, message_id, exchange, routing_key, reason))
    connection.execute(QUERIES["change_ledger"], NO_CHANGE | {"parked": len(rows)})
    connection.execute(QUERIES["recount_open_bytes"])
    return rows


def judge_left_in_flight(connection: sqlite3.Connection, now: float) -> None:
    """Write down what a relay left in flight when it ended; only while no relay is at work.

    Its fate is unknown: a queue may have it.
    """
    connection.execute(QUERIES["count_left_in_flight"])
    left = {"at": now, "reply_text": LEFT_IN_FLIGHT}
    connection.execute(QUERIES["remember_left_in_flight"], left)
    connection.execute(QUERIES["clear_in_flight"])


def remove(connection: sqlite3.Connection, ids: list[int]) -> tuple[int, int]:
    """Delete open rows; how many there really were, and their bytes."""
    count = size = 0
    for first, length in id_runs(sorted(ids)):
        run = first, first + length - 1
        size += connection.execute(QUERIES["size_of_run"], run).fetchone()[0]
        count += connection.execute(QUERIES["delete_run"], run).rowcount
    return count, size


def _park(connection: sqlite3.Connection, attempts: list[Attempt]) -> tuple[int, int, int]:
    """Move open rows to the parked ones; how many parked, how many expired, and their bytes."""
    count = {"parked": 0, "expired": 0}
    size = 0
    for attempt in attempts:
        entry, outcome = attempt.entry, attempt.outcome
        state = "expired" if outcome.kind is OutcomeKind.EXPIRED else "parked"
        row = {
            "id": entry.id,
            "at": attempt.at,
            "state": state,
            "outcome": outcome.kind.value,
            "reply_code": outcome.reply_code,
            "reply_text": outcome.reply_text,
            "nacked": entry.nacked,
            "returned": entry.returned,
            "refused": entry.refused,
            "uncertain": entry.uncertain,
        }
        connection.execute(QUERIES["park"], row)
        moved, moved_bytes = remove(connection, [entry.id])
        count[state] += moved
        size += moved_bytes
    return count["parked"], count["expired"], size


def _release(connection: sqlite3.Connection, release: Release) -> None:
    """Make due what was held, as much as is asked for."""
    scope = _SCOPES[(release.exchange is not None) + (release.routing_key is not None)]
    exchange, routing_key, id_ = release.after or (release.exchange, release.routing_key, 0)
    after = {"exchange": exchange or "", "routing_key": routing_key or "", "id": id_}
    rows = connection.execute(QUERIES[scope], after | {"limit": release.limit}).fetchall()
    connection.executemany(QUERIES["release"], ((release.at, row[0]) for row in rows))
    release.count = len(rows)
    if rows:
        id_, exchange, routing_key = rows[-1]
        release.last = exchange, routing_key, id_
    if release.is_counted:
        where = {"exchange": release.exchange, "routing_key": release.routing_key}
        (release.left,) = connection.execute(QUERIES["count_" + scope], where).fetchone()


def _write_in_flight(connection: sqlite3.Connection, ranges: list[Sent], now: float) -> None:
    for sent in ranges:
        ids = json.dumps(id_runs([entry.id for entry in sent.entries]), separators=(",", ":"))
        row = (sent.epoch, sent.first_tag, len(sent.entries), ids, now)
        connection.execute(QUERIES["insert_in_flight"], row)
