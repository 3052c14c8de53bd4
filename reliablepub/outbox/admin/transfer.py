"""Exports messages as lines of JSON, byte for byte, and imports them into an outbox.

Knows: every column of an open or parked message. Must never know: where the lines go, or come from.

The lines are for archives, and for moving messages to another outbox. A line holds all columns of
the message, with its checksum. An import checks the line, and stores the message under a new row
number. The checksum covers the message as accepted, so it stays valid.

Importing the same lines again stores nothing, for two reasons. Each transaction also records how
many lines of the source have been imported. A message that is already in the outbox is left out; it
is recognized by its message id, the time it was stored and its checksum.
"""

from __future__ import annotations

import json
import sqlite3
from base64 import b64decode, b64encode
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from reliablepub.errors import OutboxSealed
from reliablepub.outbox.admin.selection import OPEN_STATES, STATES
from reliablepub.outbox.encryption import is_sealed
from reliablepub.outbox.rows import MessageRow, Unreadable, entry_of, misfits
from reliablepub.outbox.sqlite.ballast import Ballast
from reliablepub.outbox.sqlite.database import open_writer, reading
from reliablepub.outbox.sqlite.failures import reported
from reliablepub.outbox.sqlite.location import WritingConnection
from reliablepub.outbox.sqlite.sql import QUERIES
from reliablepub.outbox.sqlite.store import NO_CHANGE, remove
from reliablepub.outbox.sqlite.transactions import commit_with_retry

CHUNK: Final = 500
_TEXTS: Final = ("message_id", "exchange", "routing_key", "properties")
_MAY_BE_NONE: Final = (
    *("ordering_key", "due_at", "expires_at", "refused_at"),
    *("parked_at", "outcome", "reply_code", "reply_text"),
)
_OF_GIVEN_UP: Final = ("parked_at", "outcome", "reply_code", "reply_text")
_COLUMNS: Final = (
    *("state", *_TEXTS, *_MAY_BE_NONE, "stored_at"),
    *("nacked", "returned", "refused", "uncertain", "size", "checksum"),
)


class BadLine(ValueError):
    """A line that is not an exported message; the text says why."""


@dataclass(slots=True)
class Brought:
    """Counts of an import.

    Attributes:
        stored: messages that were added to the outbox.
        known: messages that were already in the outbox, or imported by an earlier run.
    """

    stored: int = 0
    known: int = 0


def export_lines(
    path: Path, ids: Iterable[int], encrypted: list[int] | None = None
) -> Iterator[str]:
    """Yield one line of JSON for each of these messages, in one read transaction.

    Ids without a message are skipped. Text is readable; a line with an unprintable character is
    escaped to ASCII.

    Args:
        path: path of the outbox.
        ids: ids of rows.
        encrypted: list to append the ids of encrypted messages to. Those are left out: each is
            bound to its row in this outbox, so no import could take it.

    Raises:
        NotAnOutbox: there is no outbox at this path.
    """
    with reading(path) as connection:
        # A message that is in flight, or was when its relay ended, may have reached the broker.
        # The line counts that as an uncertain attempt.
        sent = {id_ for (id_,) in connection.execute(QUERIES["in_flight_ids"])}
        connection.row_factory = sqlite3.Row
        for id_ in ids:
            row = connection.execute(QUERIES["export"], {"id": id_}).fetchone()
            if row is not None and is_sealed(row["properties"]):
                if encrypted is not None:
                    encrypted.append(id_)
            elif row is not None:
                values = dict(row)
                values["uncertain"] += id_ in sent
                values["body_base64"] = b64encode(values.pop("body")).decode()
                line = json.dumps(values, ensure_ascii=False)
                yield line if line.isprintable() else json.dumps(values)


def import_lines(path: Path, lines: Iterable[str], source: str) -> Generator[Brought, None, None]:
    """Store messages, up to 500 in each transaction. A missing outbox is created.

    Args:
        path: path of the outbox.
        lines: lines that `export_lines` has written; blank lines are skipped.
        source: name for exactly these lines. Lines that an earlier run with this name has imported
            are not imported again.

    Yields:
        The counts so far, after each transaction.

    Raises:
        BadLine: a line is not an exported message; the text names the line. Transactions already
            committed remain.
        OutboxError: the outbox cannot be written. Transactions already committed remain.
    """
    total = Brought()
    chunk: list[dict[str, Any]] = []
    with closing(open_writer(path, is_relay=False)) as connection:
        with reported(path):
            connection.execute(QUERIES["remember_known"])
            connection.execute(QUERIES["index_known"])
            (done,) = connection.execute(QUERIES["position"], (source,)).fetchone() or (0,)
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if done:
                done -= 1
                total.known += 1
                continue
            chunk.append(_parsed(line, number))
            if len(chunk) == CHUNK:
                _store(connection, path, chunk, source, total)
                chunk = []
                yield total
        _store(connection, path, chunk, source, total)
        yield total


def _store(
    connection: WritingConnection,
    path: Path,
    rows: list[dict[str, Any]],
    source: str,
    total: Brought,
) -> None:
    ballast = Ballast(path)

    def work() -> int:
        change = dict(NO_CHANGE)
        ballast.check(connection, sum(row["size"] for row in rows))
        for row in rows:
            if connection.execute(QUERIES["is_known"], row).fetchone() is not None:
                continue
            is_open = row["state"] in OPEN_STATES
            (row["id"],) = connection.execute(QUERIES["next_id"]).fetchone()
            connection.execute(QUERIES["import_open"], row)
            if not is_open:
                connection.execute(QUERIES["import_given_up"], row)
                remove(connection, [row["id"]])
                change[row["state"]] += 1
            change["stored"] += 1
            change["open_bytes"] += row["size"] if is_open else 0
        connection.execute(QUERIES["change_ledger"], change).fetchone()
        connection.execute(QUERIES["advance_source"], (source, len(rows)))
        return change["stored"]

    stored = commit_with_retry(connection, path, work)
    total.stored += stored
    total.known += len(rows) - stored


def _parsed(line: str, number: int) -> dict[str, Any]:
    """Return the columns of a line.

    Raises:
        BadLine: the line is not what `export_lines` writes, or was changed since.
    """
    try:
        values = json.loads(line, parse_constant=_no_constant)
        row = {name: values[name] for name in _COLUMNS}
        row["body"] = b64decode(values["body_base64"], validate=True)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadLine(f"line {number} is not what `export` writes ({error})") from None
    if not isinstance(row["state"], str) or row["state"] not in STATES:
        raise BadLine(f"line {number}: there is no state {row['state']!r:.40}")
    for name in _misfits(row):
        raise BadLine(f"line {number}: {name} is not what `export` writes")
    try:
        row["size"] = entry_of(_raw(row)).message.size
    except UnicodeEncodeError as error:
        raise BadLine(
            f"line {number}: a text cannot be encoded as UTF-8 ({error.reason})"
        ) from None
    except Unreadable as error:
        raise BadLine(f"line {number}: {error}") from None
    except OutboxSealed as error:
        raise BadLine(
            f"line {number}: message {row['message_id']} is encrypted, and bound to the outbox "
            "it was exported from; a copy of the file keeps it, or `reliablepub outbox salvage`"
        ) from error
    return row


def _misfits(row: dict[str, Any]) -> Iterator[str]:
    """Yield the columns whose values `export_lines` never writes."""
    must = _TEXTS if row["state"] in OPEN_STATES else (*_TEXTS, *_OF_GIVEN_UP)
    yield from (name for name in _TEXTS if type(row[name]) is not str)
    yield from (name for name in must if row[name] is None)
    if type(row["ordering_key"]) not in (str, type(None)):
        yield "ordering_key"
    yield from misfits(row)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _raw(row: dict[str, Any]) -> MessageRow:
    """Return the row in the form that `entry_of` reads."""
    texts: dict[str, Any] = {
        name: None if (text := row[name]) is None else text.encode()
        for name in (*_TEXTS, "ordering_key")
    }
    others = {name: row[name] for name in MessageRow._fields if name not in texts and name != "id"}
    return MessageRow(id=0, **texts, **others)
