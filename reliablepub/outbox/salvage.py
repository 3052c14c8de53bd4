"""Every intact row of a damaged outbox, copied into a new one.

Knows: what a row of an outbox looks like, and its checksum. Must never know: where on the pages it
lies (`pages` does).

A row is intact when it can be decoded and its checksum is right. That is so much that nothing else
is mistaken for one, so it does not matter which table its page belonged to. Where the damage hides
which pages are free, a message may be found that was confirmed already: it is published once more.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reliablepub.errors import OutboxError
from reliablepub.outbox.bookkeeping import misfits
from reliablepub.outbox.database import check_file, looking, open_writer
from reliablepub.outbox.failures import os_error
from reliablepub.outbox.lease import Lease
from reliablepub.outbox.pages import Pages, Value
from reliablepub.outbox.rows import Unreadable, check
from reliablepub.outbox.side_files import check_side_files
from reliablepub.outbox.sql import QUERIES
from reliablepub.outbox.transactions import transaction
from reliablepub.outbox.writing import NO_CHANGE

_BATCH: Final = 1_000
_BATCH_BYTES: Final = 16 * 1024 * 1024
_STATE: Final = 7
"""Which column of a parked row says so."""
_TEXTS: Final = ("message_id", "exchange", "routing_key", "properties", "ordering_key")
_TIMES: Final = ("stored_at", "due_at", "parked_at", "expires_at", "refused_at")

_INSTEAD: Final[dict[str, Value]] = {
    **dict.fromkeys(("nacked", "returned", "refused", "uncertain", "reply_code"), 0),
    "outcome": "refused",
    "reply_text": "",
    "is_skipped": 0,
}
"""For bookkeeping that cannot be right; the message beside it is intact."""

Row = dict[str, Value]


@dataclass(frozen=True, slots=True)
class BrokenRow:
    """A row that is not what was stored; it was not copied.

    Attributes:
        id: its number.
        message_id: what is left of its ``message_id``.
        reason: what is wrong with it.
    """

    id: int
    message_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What was found in a damaged outbox.

    Attributes:
        open: messages that were open, and are so in the new outbox.
        parked: likewise, parked or expired.
        broken: rows that were recognized and are damaged.
        has_sources: whether the positions of named sources could be read and copied, too.
    """

    open: int
    parked: int
    broken: tuple[BrokenRow, ...]
    has_sources: bool


def salvage(damaged: Path, new: Path) -> Salvaged:
    """Copy every intact row; the damaged file stays as it is.

    Raises:
        OutboxInUse: a relay still uses it.
        OutboxError: the damaged file cannot be read, or the new one exists or cannot be written.
    """
    if not check_file(damaged):
        raise OutboxError(f"there is no file {damaged} to salvage")
    check_side_files(damaged)
    if check_file(new):
        raise OutboxError(f"{new} exists already; name a new file, so that nothing is mixed")
    lease = Lease(damaged)
    try:
        with closing(Pages(damaged)) as pages, closing(open_writer(new, is_relay=False)) as target:
            return _copy(damaged, pages, target, new)
    except OSError as error:
        raise os_error(damaged, error) from error
    finally:
        lease.release()


def _copy(damaged: Path, pages: Pages, target: sqlite3.Connection, new: Path) -> Salvaged:
    counts = {"salvage_open": 0, "salvage_parked": 0}
    broken: dict[int, BrokenRow] = {}
    intact: set[int] = set()
    batch: list[tuple[str, Row]] = []
    batch_bytes = 0
    for query, row in _recognized(pages, _Shapes(target)):
        id_ = int(str(row["id"]))
        try:
            _check(row)
        except Unreadable as error:
            broken[id_] = BrokenRow(id_, str(row["message_id"]), str(error))
            continue
        if id_ in intact:
            continue
        intact.add(id_)
        batch.append((query, _with_bookkeeping(row)))
        batch_bytes += len(row["body"]) if isinstance(row["body"], bytes) else 0
        if len(batch) == _BATCH or batch_bytes > _BATCH_BYTES:
            _write(target, new, batch, counts)
            batch, batch_bytes = [], 0
    _write(target, new, batch, counts)
    return Salvaged(
        open=counts["salvage_open"],
        parked=counts["salvage_parked"],
        broken=tuple(broken[id_] for id_ in sorted(broken.keys() - intact)),
        has_sources=_copy_sources(damaged, target, new),
    )


class _Shapes:
    """The columns of both tables, as they lie in a record; rows of an older version have fewer."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.open = connection.execute(QUERIES["open_columns"]).fetchall()
        self.parked = connection.execute(QUERIES["parked_columns"]).fetchall()


def _recognized(pages: Pages, shapes: _Shapes) -> Iterator[tuple[str, Row]]:
    """Rows that look like messages, and how each is put into the new outbox."""
    for rowid, values in pages.rows():
        is_parked = len(values) > _STATE and values[_STATE] in ("parked", "expired")
        columns = shapes.parked if is_parked else shapes.open
        if len(values) > len(columns):
            continue
        row: Row = {name: _default(default) for name, default in columns}
        row |= dict(zip(row, values, strict=False)) | {"id": rowid}
        if not _looks_right(row):
            continue
        if "id" in misfits(row):
            continue
        for name in _TIMES:  # whole numbers are stored as such
            if isinstance(row.get(name), int):
                row[name] = float(str(row[name]))
        yield ("salvage_parked" if is_parked else "salvage_open"), row


def _default(text: str | None) -> Value:
    return int(text) if text is not None and text.isdigit() else None


def _looks_right(row: Row) -> bool:
    texts = [row[name] for name in _TEXTS[:4]]
    return (
        all(isinstance(text, str) for text in texts)
        and isinstance(row["ordering_key"], str | None)
        and isinstance(row["checksum"], int)
        and isinstance(row["body"], bytes)
        and isinstance(row["size"], int)
    )


def _with_bookkeeping(row: Row) -> Row:
    """The row with what stands beside its message made good, where it is nothing we write."""
    for name in list(misfits(row)):
        row[name] = _INSTEAD.get(name)
        if name == "size":
            texts = (str(row[text] or "") for text in _TEXTS)
            body = row["body"]
            assert isinstance(body, bytes)
            row[name] = len(body) + sum(len(text.encode()) for text in texts)
        elif name in ("stored_at", "parked_at"):
            row[name] = time.time()
    return row


def _check(row: Row) -> None:
    message_id, exchange, routing_key, properties = (str(row[n]).encode() for n in _TEXTS[:4])
    key = row["ordering_key"]
    body, checksum = row["body"], row["checksum"]
    assert isinstance(body, bytes)
    assert isinstance(checksum, int)
    texts = (message_id, exchange, routing_key, properties)
    check((*texts, None if key is None else str(key).encode()), body, checksum)


def _write(
    target: sqlite3.Connection, new: Path, batch: list[tuple[str, Row]], counts: dict[str, int]
) -> None:
    change = dict(NO_CHANGE)
    with transaction(target, new):
        for query, row in batch:
            if target.execute(QUERIES[query], row).rowcount:
                counts[query] += 1
                change["stored"] += 1
                if query == "salvage_open":
                    change["open_bytes"] += int(str(row["size"]))
                else:
                    change[str(row["state"])] += 1
        target.execute(QUERIES["change_ledger"], change).fetchall()


def _copy_sources(damaged: Path, target: sqlite3.Connection, new: Path) -> bool:
    """Positions are a few rows that SQLite itself must be able to find; a wrong one loses input."""
    found: list[tuple[str, int]] | None = None
    with suppress(OutboxError), looking(damaged) as (connection, _):
        found = connection.execute(QUERIES["sources"]).fetchall()
    if found:
        with transaction(target, new):
            target.executemany(QUERIES["advance_source"], found)
    return found is not None
