"""Export of messages as lines of JSON, byte for byte, and their import into an outbox.

Knows: every column of an open or parked message. Must never know: where the lines go or come from.

The lines are for archives, and for moving messages to another outbox. A line holds all columns of
the message, with its checksum. An import checks the line, and stores the message under a new row
number. The checksum covers the message as accepted, so it stays valid.

Importing the same lines again stores nothing, not even at the same time. Each transaction records
how many lines of the source have been imported, and skips those that another process has imported
since. A message that is already in the outbox is left out: it is recognized by its message id, its
time of storage and its checksum. The first two do not suffice: messages of one batch share the
time, and the caller may have given them one id. So a message that was rerouted or encrypted since
its export is stored again.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, NoReturn

from reliablepub.errors import InvalidMessage, OutboxError, OutboxSealed
from reliablepub.outbox.admin.selection import OPEN_STATES, STATES
from reliablepub.outbox.database import NO_CHANGE, Database, Session, lost_ledger
from reliablepub.outbox.encryption import is_sealed
from reliablepub.outbox.rows import (
    MISTYPED,
    MessageRow,
    Unreadable,
    entry_of,
    is_time,
    misfits,
)

CHUNK: Final = 500
"""Messages of one transaction."""
_PIECE_CHARS: Final = 8 * 1024 * 1024
"""Length of the lines that one transaction reads or stores; one line more may come."""
_TEXTS: Final = ("message_id", "exchange", "routing_key", "properties")
_OF_GIVEN_UP: Final = ("parked_at", "outcome", "reply_code", "reply_text")
_COLUMNS: Final = (
    *("state", *_TEXTS, *_OF_GIVEN_UP, "ordering_key"),
    *("stored_at", "due_at", "expires_at", "refused_at"),
    *("nacked", "returned", "refused", "uncertain", "size", "checksum"),
)

_FLAT: Final = re.compile(
    r"""\s*+\{(?:[^"{}\[\]]++|"[^"\\]*+(?:\\.[^"\\]*+)*+"){0,500}+\}\s*+""", re.DOTALL
)
"""An object of texts and numbers. Values in values take 25 times their length in memory, and a line
may be as long as the largest body."""
_SHORT_CHARS: Final = 1024 * 1024
"""A line up to this length is decoded, whatever it is: the error tells more."""


class BadLine(ValueError):
    """A line that is not an exported message; the text says why."""


@dataclass(slots=True)
class Brought:
    """Counts of an import."""

    stored: int = 0
    known: int = 0  # already in the outbox, or imported by an earlier run


def export_lines(
    database: Database,
    ids: Iterable[int],
    encrypted: list[int] | None = None,  # gets the ids of encrypted messages, which are left out
    gone: list[int] | None = None,  # gets the ids of messages that have left the outbox
) -> Iterator[str]:
    """Yield one line of JSON for each of these messages."""
    encrypted, gone = ([] if found is None else found for found in (encrypted, gone))
    left = deque(ids)
    while left:
        piece = _Piece()
        with database.reading() as session:
            # A message that is in flight, or was when its relay ended, may have reached the broker.
            # The line counts that as an uncertain attempt.
            sent = {id_ for (id_,) in session.run("in_flight_ids")}
            while left and piece.has_room and piece.damaged is None:
                id_ = left.popleft()
                row = next(session.rows("export", {"id": id_}), None)
                if row is None:
                    gone.append(id_)
                elif not piece.add(id_, row, was_sent=id_ in sent):
                    encrypted.append(id_)  # bound to its row here: no import could take it
        # Outside of the transaction: the caller may wait for a pipe, and SQLite's log would grow
        yield from piece.lines
        if piece.damaged is not None:
            raise OutboxError(
                f"message {piece.damaged} of outbox {database.name} cannot be exported: "
                f"{MISTYPED}; discard it, or export the others"
            )


class _Piece:
    """The lines that are read in one transaction."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.damaged: int | None = None  # id of a message that cannot be written as a line
        self._size = 0

    @property
    def has_room(self) -> bool:
        """Whether another line may be read in the same transaction."""
        return len(self.lines) < CHUNK and self._size < _PIECE_CHARS

    def add(self, id_: int, row: dict[str, Any], *, was_sent: bool) -> bool:
        """Add the line of a row; return False if the row is encrypted."""
        try:
            if is_sealed(row["properties"]):
                return False
            line = _line(row, was_sent=was_sent)
        except (TypeError, ValueError, AttributeError):
            self.damaged = id_
        else:
            self.lines.append(line)
            self._size += len(line)
        return True


def _line(row: dict[str, Any], *, was_sent: bool) -> str:
    row["uncertain"] += was_sent
    row["body_base64"] = b64encode(row.pop("body")).decode()
    line = json.dumps(row, ensure_ascii=False, allow_nan=False)
    return line if line.isprintable() else json.dumps(row)


def import_lines(
    database: Database, lines: Iterable[str], source: str
) -> Generator[Brought, None, None]:
    """Store messages, up to 500 or 8 MiB of lines a transaction; yield the counts after each.

    A missing file is created. `source` names exactly these lines: those that an earlier run with
    it has imported are skipped. When `BadLine` is raised, the lines before it are stored.
    """
    total = Brought()
    chunk: list[dict[str, Any]] = []
    chars = 0  # of the lines of the chunk
    known: set[bytes] = set()
    done = 0
    if database.exists():
        with database.reading() as session:
            # A damaged row is no message that was exported.
            known = {_digest(*row) for row in session.run("known") if is_time(row[1])}
            done = _position(session, source)
    with closing(database):
        try:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                if total.known < done:
                    total.known += 1
                    continue
                row = _parsed(line, number)
                try:
                    database.check_texts(row)
                except InvalidMessage as error:
                    raise BadLine(f"line {number}: {error}") from None
                chunk.append(row)
                chars += len(line)
                if len(chunk) == CHUNK or chars >= _PIECE_CHARS:
                    _store(database, chunk, known, source, total)
                    chunk, chars = [], 0
                    yield total
        except BadLine:
            if chunk:
                _store(database, chunk, known, source, total)
            raise
        _store(database, chunk, known, source, total)
        yield total


def _position(session: Session, source: str) -> int:
    (position,) = session.run("position", {"name": source}).fetchone() or (0,)
    return int(position)


def _digest(message_id: str, stored_at: float, checksum: int) -> bytes:
    """Return 16 bytes that identify a message: an outbox may hold millions of messages."""
    identity = f"{message_id} {float(stored_at)!r} {checksum}"
    return blake2b(identity.encode(), digest_size=16).digest()


def _store(
    database: Database, rows: list[dict[str, Any]], known: set[bytes], source: str, total: Brought
) -> None:
    """Store the messages of the next lines of a source, and add them to the totals."""
    begin = total.stored + total.known

    def work(session: Session) -> set[bytes]:
        changes: dict[int, dict[str, int]] = {}  # one for each shard
        # Another process that imports the same lines may be ahead.
        left = rows[max(0, _position(session, source) - begin) :]
        fresh: dict[bytes, dict[str, Any]] = {}
        for row in left:
            digest = _digest(row["message_id"], row["stored_at"], row["checksum"])
            if digest not in known:
                fresh.setdefault(digest, row)
        session.check_room(sum(row["size"] for row in fresh.values()))
        for row in fresh.values():
            is_open = row["state"] in OPEN_STATES
            found = session.run("next_id").fetchone()
            if found is None:
                raise lost_ledger(database)
            (row["id"],) = found
            (shard,) = session.run("import_open", row).fetchone()
            change = changes.setdefault(shard, dict(NO_CHANGE))
            if not is_open:
                session.run("import_given_up", row)
                session.run("delete_open", {"chosen": [row["id"]]}).fetchone()
                change[row["state"]] += 1
            change["stored"] += 1
            change["open_bytes"] += row["size"] if is_open else 0
        for shard, change in changes.items():
            session.run("change_ledger", change | {"shard": shard})
        session.run("advance_source", {"name": source, "count": len(left)})
        return set(fresh)

    stored = database.write(work)
    known |= stored
    total.stored += len(stored)
    total.known += len(rows) - len(stored)


def _parsed(line: str, number: int) -> dict[str, Any]:
    """Return the columns of a line."""
    if len(line) > _SHORT_CHARS and not _FLAT.fullmatch(line):
        raise BadLine(f"line {number} is not what `export` writes (not one flat JSON object)")
    try:
        values = json.loads(line, parse_constant=_no_constant)
        row = {name: values[name] for name in _COLUMNS}
        row["is_skipped"] = values.get("is_skipped", 0)  # lines had no such column once
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
    raise ValueError(f"{name} is not a JSON number")


def _raw(row: dict[str, Any]) -> MessageRow:
    """Return the row in the form that `entry_of` reads."""
    texts: dict[str, Any] = {
        name: None if (text := row[name]) is None else text.encode()
        for name in (*_TEXTS, "ordering_key")
    }
    others = {name: row[name] for name in MessageRow._fields if name not in texts and name != "id"}
    return MessageRow(id=0, **texts, **others)
