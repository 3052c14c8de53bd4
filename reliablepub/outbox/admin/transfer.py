"""Messages as lines of JSON and back, byte for byte: to keep, or to move to another outbox.

Knows: every column that a message has while it is open or parked. Must never know: where the lines
go, or come from.

A line has all that the row has, and its checksum. Bringing a line in checks it, and stores the
message under a new number; the checksum is over what was accepted, so it stays the same. Bringing
the same lines in again does nothing, for two reasons: how many of a source are done with is counted
in the transactions that store them; and a message that is there already is left out, known by its
message id, its time and its checksum.
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
from reliablepub.outbox.sqlite.ballast import Ballast
from reliablepub.outbox.sqlite.database import open_writer, reading
from reliablepub.outbox.sqlite.failures import reported
from reliablepub.outbox.sqlite.location import WritingConnection
from reliablepub.outbox.sqlite.rows import MessageRow, Unreadable, entry_of, misfits
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
    """A line that is no exported message; the text says why."""


@dataclass(slots=True)
class Brought:
    """What came of bringing lines in.

    Attributes:
        stored: messages that are in the outbox now and were not before.
        known: messages that were there already.
    """

    stored: int = 0
    known: int = 0


def export_lines(
    path: Path, ids: Iterable[int], encrypted: list[int] | None = None
) -> Iterator[str]:
    """One line of JSON for each of these messages that is there, in one consistent look.

    People can read it; where a character is not seen as itself, the line is ASCII instead.

    Args:
        path: the outbox.
        ids: of rows.
        encrypted: gets the ids of messages that are encrypted. They are left out: each is bound to
            its row in this outbox, and no import could take it.

    Raises:
        NotAnOutbox: there is no outbox.
    """
    with reading(path) as connection:
        # What is on the wire, or was when its relay ended, may have arrived: that goes along.
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
    """Store messages, a few hundred in each transaction; the outbox is made if it is missing.

    Args:
        path: the outbox.
        lines: as `export_lines` gives them; blank ones are skipped.
        source: names these very lines. Those that an earlier run has stored are not stored again.

    Yields:
        what has come of it so far, after each transaction.

    Raises:
        BadLine: names the line; what was stored before stays.
        OutboxError: the file cannot be written; likewise.
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
    """The columns of a line.

    Raises:
        BadLine: it is not what `export_lines` writes, or was changed since.
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
    """Columns that `export_lines` does not write so."""
    must = _TEXTS if row["state"] in OPEN_STATES else (*_TEXTS, *_OF_GIVEN_UP)
    yield from (name for name in _TEXTS if type(row[name]) is not str)
    yield from (name for name in must if row[name] is None)
    if type(row["ordering_key"]) not in (str, type(None)):
        yield "ordering_key"
    yield from misfits(row)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _raw(row: dict[str, Any]) -> MessageRow:
    """The row as `entry_of` reads it."""
    texts: dict[str, Any] = {
        name: None if (text := row[name]) is None else text.encode()
        for name in (*_TEXTS, "ordering_key")
    }
    others = {name: row[name] for name in MessageRow._fields if name not in texts and name != "id"}
    return MessageRow(id=0, **texts, **others)
