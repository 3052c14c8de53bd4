"""Copies every intact row of a damaged outbox into a new one.

Knows: SQLite's file format (https://sqlite.org/fileformat2.html), the columns of an outbox row, its
checksum. Must never know: how to read messages from the damaged file through SQLite.

SQLite reaches a leaf page from the root of its tree, so one damaged page in between hides thousands
of intact rows. This module reads each page that looks like a leaf of a table on its own. All
numbers in the file are big-endian, the default of `int.from_bytes`. The file may be damaged or
forged, so no number in it is trusted: the size of the file bounds every loop and every allocation.

A row is intact if it can be decoded and its checksum is right. Only messages pass that test, so the
table of a page does not matter. If damage hides which pages are free, a confirmed message may be
found. It is then published again.

Parts of the file that the disk cannot read (``EIO``) are left out, and reported.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import struct
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

from reliablepub.errors import NotAnOutbox, OutboxDiskFailed, OutboxError, OutboxInUse
from reliablepub.outbox.database import NO_CHANGE
from reliablepub.outbox.rows import ID_MAX, Unreadable, check, is_time, misfits
from reliablepub.outbox.sqlite.connections import absolute, check_file, looking, open_writer
from reliablepub.outbox.sqlite.failures import os_error
from reliablepub.outbox.sqlite.location import OF_SQLITE, OURS, check_side_files
from reliablepub.outbox.sqlite.lock import RelayLock, holder_pid
from reliablepub.outbox.sqlite.space import PAGE_BYTES
from reliablepub.outbox.sqlite.sql import QUERIES, named_rows
from reliablepub.outbox.sqlite.transactions import transaction

Value = int | float | str | bytes | None

_MAGIC: Final = b"SQLite format 3\0"
_LIKELY_PAGE_BYTES: Final = (PAGE_BYTES, 4_096)
"""Page sizes to try if the header is damaged: those of new outboxes, and of older ones."""
_WAL_MAGIC: Final = 0x377F0682
_TABLE_LEAF: Final = 0x0D
_HEADER: Final = 100
_WAL_HEADER: Final = 32
_FRAME_HEADER: Final = 24
_COLUMNS_MAX: Final = 32_767
"""SQLite's own limit on the columns of a table."""
_USABLE_MIN: Final = 480
_SHARED_MAX: Final = 4
"""How many rows may contain one byte: the row that owns it, and old copies that damage exposes."""
_BYTES_KEPT: Final = "surrogateescape"
_INTEGERS: Final = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}


class _Malformed(Exception):
    """The bytes are not a valid row in SQLite's format."""


class Pages:
    """The pages of a database as of its last commit: the file, overlaid with its write-ahead log.

    A process must not use this class on a database that it has open with SQLite: closing the file
    here would drop the locks that SQLite holds on it.
    """

    def __init__(self, path: Path, page_bytes: int = 0) -> None:
        self._file: BinaryIO = path.open("rb")
        self._unread: dict[str, None] = {}  # in the order of its finding
        header = self._read(self._file, 0, _HEADER, "page 1").ljust(_HEADER, b"\0")
        self._size = page_bytes or _size_in(header) or _likely_size(path)
        reserved = header[20] if header.startswith(_MAGIC) else 0
        self._usable = self._size - (reserved if self._size - reserved >= _USABLE_MIN else 0)
        self._bytes = os.fstat(self._file.fileno()).st_size
        self._in_file = self._count = self._bytes // self._size
        self._changed: dict[int, int] = {}  # page number -> its offset in the log
        self._followed: Counter[int] = Counter()
        self._decoded_bytes = 0
        self._log: BinaryIO | None = None
        log = path.with_name(path.name + "-wal")
        if log.exists():
            self._log = log.open("rb")
            self._bytes += os.fstat(self._log.fileno()).st_size
            self._lay_over(self._log)

    @property
    def total_bytes(self) -> int:
        """Size of the file and the log."""
        return self._bytes

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Parts of the file and the log that the disk has failed to read so far."""
        return tuple(self._unread)

    def close(self) -> None:
        """Close the file and the log."""
        self._file.close()
        if self._log is not None:
            self._log.close()

    def rows(self) -> Iterator[tuple[int, list[Value]]]:
        """Yield rowid and values of each row that can be decoded, of all tables."""
        free = self._free()  # left out, because these pages may hold deleted rows
        self._followed.clear()
        beyond = sorted(n for n in self._changed if self._in_file < n <= self._count)
        for number in chain(range(1, min(self._in_file, self._count) + 1), beyond):
            start = _HEADER if number == 1 else 0
            if number in free or (page := self._page(number))[start] != _TABLE_LEAF:
                continue
            (count,) = struct.unpack_from(">H", page, start + 3)
            # In an intact file, each byte belongs to one row. In a forged page, many cells can
            # point to the same bytes, so decoding stops at a few times the size of the page.
            most = self._decoded_bytes + _SHARED_MAX * self._size
            for index in range(min(count, (self._size - start - 8) // 2)):
                (at,) = struct.unpack_from(">H", page, start + 8 + 2 * index)
                with suppress(_Malformed, IndexError, struct.error):
                    yield self._cell(page, at)
                if self._decoded_bytes > most:
                    break

    def _page(self, number: int) -> bytes:
        """Return a page, with zeros for what the file does not have or the disk cannot read."""
        file, at = self._file, (number - 1) * self._size
        if number in self._changed:
            assert self._log is not None
            file, at = self._log, self._changed[number]
        elif not 0 < number <= self._in_file:
            return bytes(self._size)
        data = self._read(file, at, self._size, f"page {number}")
        return data.ljust(self._size, b"\0")

    def _read(self, file: BinaryIO, at: int, count: int, part: str) -> bytes:
        """Return bytes of a file, up to its end or to the first that the disk cannot read."""
        data = b""
        try:
            while more := os.pread(file.fileno(), count - len(data), at + len(data)):
                data += more
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self._unread[part] = None
        return data

    def _is_page(self, number: int) -> bool:
        return 0 < number <= self._count and (number <= self._in_file or number in self._changed)

    def _cell(self, page: bytes, at: int) -> tuple[int, list[Value]]:
        length, at = _varint(page, at)
        rowid, at = _varint(page, at)
        if not 0 < length <= self._bytes:
            raise _Malformed
        local = length
        if length > self._usable - 35:
            least = (self._usable - 12) * 32 // 255 - 23
            local = least + (length - least) % (self._usable - 4)
            local = local if local <= self._usable - 35 else least
        self._decoded_bytes += local
        parts = [page[at : at + local]]
        left = length - local
        following = page[at + local : at + local + 4]
        while left > 0:
            number = int.from_bytes(following)
            if self._followed[number] >= _SHARED_MAX or not self._is_page(number):
                raise _Malformed
            self._followed[number] += 1
            overflow = self._page(number)
            parts.append(overflow[4 : 4 + min(left, self._usable - 4)])
            left -= len(parts[-1])
            following = overflow[:4]
        payload = b"".join(parts)
        if len(payload) != length:
            raise _Malformed
        return rowid, _record(payload)

    def _free(self) -> set[int]:
        """Return the numbers of the pages on the list of free pages."""
        free: set[int] = set()
        page = self._page(1)
        trunk = int.from_bytes(page[32:36]) if page.startswith(_MAGIC) else 0
        while self._is_page(trunk) and trunk not in free:
            page = self._page(trunk)
            following, count = struct.unpack_from(">II", page)
            if following > self._count or count > self._usable // 4 - 2:
                break  # not a page of the list: trusting it would hide pages with rows
            free.add(trunk)
            free.update(struct.unpack_from(f">{count}I", page, 8))
            trunk = following
        return free

    def _lay_over(self, log: BinaryIO) -> None:
        """Replace pages of the file by those of the log, up to its last complete commit."""
        head = self._read(log, 0, _WAL_HEADER, "the log")
        if len(head) < _WAL_HEADER:
            return
        magic, _, size, _, *salts = struct.unpack_from(">IIIIII", head)
        if magic & ~1 != _WAL_MAGIC or size != self._size:
            return
        words = ">" if magic & 1 else "<"
        sums = _checksum(words, head[: _WAL_HEADER - 8], (0, 0))
        changed: dict[int, int] = {}
        at = _WAL_HEADER
        length = _FRAME_HEADER + size
        while len(frame := self._read(log, at, length, f"the log from byte {at}")) == length:
            number, commit, *rest = struct.unpack_from(">IIIIII", frame)
            if rest[:2] != salts:
                return
            sums = _checksum(words, frame[:8], sums)
            sums = _checksum(words, frame[_FRAME_HEADER:], sums)
            if tuple(rest[2:]) != sums:
                return
            changed[number] = at + _FRAME_HEADER
            at += length
            if commit:
                self._changed.update(changed)
                self._count = commit
                changed = {}


def _size_in(header: bytes) -> int:
    """Return the page size in the header, in bytes; 0 if it is impossible."""
    size = int.from_bytes(header[16:18]) if header.startswith(_MAGIC) else 0
    size = 65_536 if size == 1 else size
    is_possible = size >= 512 and not size & (size - 1)  # noqa: PLR2004 - the smallest of the format
    return size if is_possible else 0


def _likely_size(path: Path) -> int:
    """Return the page size at which the most rows can be decoded."""

    def count(size: int) -> int:
        with closing(Pages(path, size)) as pages:
            return sum(1 for _ in pages.rows())

    return max(_LIKELY_PAGE_BYTES, key=count)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(8):
        byte = data[at + index]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:  # noqa: PLR2004 - the highest bit says that another byte follows
            return value, at + index + 1
    value = value << 8 | data[at + 8]
    return (value - (1 << 64) if value >> 63 else value), at + 9


def _record(payload: bytes) -> list[Value]:
    end, at = _varint(payload, 0)
    types = []
    while at < end:
        kind, at = _varint(payload, at)
        types.append(kind)
        if len(types) > _COLUMNS_MAX:
            raise _Malformed
    values: list[Value] = []
    for kind in types:
        value, at = _value(kind, payload, at)
        values.append(value)
    if at != len(payload):
        raise _Malformed
    return values


def _value(kind: int, payload: bytes, at: int) -> tuple[Value, int]:
    if kind in _INTEGERS:
        length = _INTEGERS[kind]
        return int.from_bytes(payload[at : at + length], signed=True), at + length
    if kind == 7:  # noqa: PLR2004 - a float
        return struct.unpack_from(">d", payload, at)[0], at + 8
    if kind in (8, 9):
        return kind - 8, at
    if kind >= 12:  # noqa: PLR2004 - bytes, or text when odd
        data = payload[at : at + (kind - 12) // 2]
        # A text that is no longer UTF-8 is kept, so that its row is listed as damaged.
        text = data.decode(errors=_BYTES_KEPT) if kind & 1 else data
        return text, at + (kind - 12) // 2
    if kind:
        raise _Malformed
    return None, at


def _checksum(words: str, data: bytes, sums: tuple[int, int]) -> tuple[int, int]:
    first, second = sums
    numbers = struct.unpack(f"{words}{len(data) // 4}I", data)
    for one, other in zip(numbers[::2], numbers[1::2], strict=True):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return first, second


_BATCH: Final = 1_000
_BATCH_BYTES: Final = 16 * 1024 * 1024
_STATE: Final = 7
"""Index of the column with the state in a row of a parked or expired message."""
_TEXTS: Final = ("message_id", "exchange", "routing_key", "properties", "ordering_key")
_TIMES: Final = ("stored_at", "due_at", "parked_at", "expires_at", "refused_at")

_ROW_BYTES_MIN: Final = 4
"""Bytes of a row in SQLite's format, without texts: two lengths, its number, and a pointer."""
_STEPS_OF_SCHEMA: Final = 100_000
"""Steps of SQLite's virtual machine that need no row. A row takes fewer steps than it has bytes."""
_Row = TypeVar("_Row", dict[str, Any], tuple[Any, ...])

_INSTEAD: Final[dict[str, Value]] = {
    **dict.fromkeys(("nacked", "returned", "refused", "uncertain", "reply_code"), 0),
    "outcome": "refused",
    "reply_text": "",
    "is_skipped": 0,
}
"""Replacements for impossible bookkeeping values of an intact message."""

Row = dict[str, Value]


@dataclass(frozen=True, slots=True)
class BrokenRow:
    """A damaged row, which was not copied.

    Attributes:
        id: number of the row.
        message_id: ``message_id`` as found; it may be damaged too.
        reason: what is wrong with the row.
    """

    id: int
    message_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Salvaged:
    """Result of `salvage`.

    Attributes:
        open: number of open messages copied; they are open in the new outbox.
        parked: number of parked and expired messages copied; they keep their state.
        broken: rows that were recognized as messages and are damaged.
        has_sources: whether the positions of named sources, and the deduplication keys, could also
            be read and copied.
        unreadable: parts of the damaged file and its log that cannot be read from disk. Rows in
            these parts are missing.
    """

    open: int
    parked: int
    broken: tuple[BrokenRow, ...]
    has_sources: bool
    unreadable: tuple[str, ...]


def salvage(at: str | os.PathLike[str], new: Path) -> Salvaged:
    """Copy every intact row of a damaged outbox into a new one. The damaged file is not changed."""
    damaged = absolute(at)
    if not check_file(damaged):
        raise OutboxError(f"there is no file {damaged} to salvage")
    check_side_files(damaged)
    if check_file(new):
        raise OutboxError(f"{new} exists already; name a file that does not exist")
    relay_lock = _lock(damaged)
    try:
        with closing(Pages(damaged)) as pages, closing(open_writer(new, is_relay=False)) as target:
            found = _copy(damaged, pages, target, new)
    except OSError as error:
        raise os_error(damaged, error) from error
    finally:
        if relay_lock is not None:
            relay_lock.release()
    if not (found.open or found.parked or found.broken or found.has_sources):
        for suffix in ("", *OF_SQLITE, *OURS):
            Path(f"{new}{suffix}").unlink(missing_ok=True)
        if found.unreadable:
            parts = ", ".join(found.unreadable[:3])
            raise OutboxDiskFailed(
                f"nothing of {damaged} was copied: the disk cannot read {len(found.unreadable)} of "
                f"its parts ({parts}), and the others have no message"
            )
        raise NotAnOutbox(
            f"{damaged} has no message of an outbox, and SQLite finds no outbox in it: nothing was "
            "copied; name the file of the outbox"
        )
    return found


def _lock(damaged: Path) -> RelayLock | None:
    """Keep relays off; None if the file system is mounted read-only, where no relay can start."""
    try:
        return RelayLock(damaged)
    except OutboxError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno != errno.EROFS:
            raise
    pid = holder_pid(damaged)  # a relay may use it through another mount, which can be written
    if pid is not None:
        raise OutboxInUse(f"outbox {damaged} is relayed by process {pid}; stop it")
    return None


def _copy(damaged: Path, pages: Pages, target: sqlite3.Connection, new: Path) -> Salvaged:
    counts = {"salvage_open": 0, "salvage_parked": 0}
    broken: dict[int, BrokenRow] = {}
    misnumbered: list[BrokenRow] = []
    intact: dict[int, Value] = {}
    batch: list[tuple[str, Row]] = []
    batch_bytes = 0
    for query, row in _recognized(pages, target):
        id_ = int(str(row["id"]))
        try:
            _check(row)
        except Unreadable as error:
            broken[id_] = _broken(id_, row, str(error))
            continue
        if id_ in intact or "id" in misfits(row):
            if intact.get(id_) != row["checksum"]:  # else it is an older copy of the row
                misnumbered.append(_broken(id_, row, "the number of the row is damaged"))
            continue
        intact[id_] = row["checksum"]
        batch.append((query, _with_bookkeeping(row)))
        batch_bytes += len(row["body"]) if isinstance(row["body"], bytes) else 0
        if len(batch) == _BATCH or batch_bytes > _BATCH_BYTES:
            _write(target, new, batch, counts)
            batch, batch_bytes = [], 0
    _write(target, new, batch, counts)
    return Salvaged(
        open=counts["salvage_open"],
        parked=counts["salvage_parked"],
        broken=(*(broken[id_] for id_ in sorted(broken.keys() - intact.keys())), *misnumbered),
        has_sources=_copy_sources(damaged, target, new, room := _Room(pages.total_bytes))
        and _copy_keys(damaged, target, new, intact.keys(), room),
        unreadable=pages.unreadable,
    )


def _broken(id_: int, row: Row, reason: str) -> BrokenRow:
    return BrokenRow(id_, _bytes_of(row["message_id"]).decode(errors="replace"), reason)


def _recognized(pages: Pages, target: sqlite3.Connection) -> Iterator[tuple[str, Row]]:
    """Yield each row that looks like a message, with the query that inserts it."""
    columns_of_open = target.execute(QUERIES["open_columns"]).fetchall()
    columns_of_parked = target.execute(QUERIES["parked_columns"]).fetchall()
    for rowid, values in pages.rows():
        is_parked = len(values) > _STATE and values[_STATE] in ("parked", "expired")
        columns = columns_of_parked if is_parked else columns_of_open
        if len(values) > len(columns):
            continue
        # A row that was stored before a column was added has fewer values.
        row: Row = {name: _default(default) for name, default in columns}
        row |= dict(zip(row, values, strict=False)) | {"id": rowid}
        if not _looks_right(row):
            continue
        for name in _TIMES:  # SQLite stores a whole REAL as an integer
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
    """Replace bookkeeping values that this library never writes; return the row."""
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
    message_id, exchange, routing_key, properties = (_bytes_of(row[n]) for n in _TEXTS[:4])
    key = None if row["ordering_key"] is None else _bytes_of(row["ordering_key"])
    body, checksum = row["body"], row["checksum"]
    assert isinstance(body, bytes)
    assert isinstance(checksum, int)
    texts = (message_id, exchange, routing_key, properties)
    check((*texts, key), body, checksum)
    try:
        b"\0".join((*texts, key or b"")).decode()
    except UnicodeDecodeError as error:  # a row that plain SQL has stored has no checksum
        raise Unreadable(f"a text is not UTF-8: {error.reason}") from None


def _bytes_of(text: Value) -> bytes:
    """The bytes of a text as they are in the file."""
    return str(text).encode(errors=_BYTES_KEPT)


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
        target.execute(QUERIES["change_ledger"], change)
        target.execute(QUERIES["raise_last_id"], {"id_max": ID_MAX})


class _Room:
    """Bounds what SQLite reads of a forged file, whose tables may be views without an end."""

    def __init__(self, most: int) -> None:
        self.steps_max: Final = most + _STEPS_OF_SCHEMA
        self._left = most  # bytes of the file and its log: the rows of all tables have no more

    def take(self, rows: Iterable[_Row]) -> Iterator[_Row]:
        """Yield rows; raise `_Malformed` at the first that the file has no room for."""
        for row in rows:
            values = row.values() if isinstance(row, dict) else row
            texts = (value for value in values if isinstance(value, str | bytes))
            self._left -= _ROW_BYTES_MIN + sum(map(len, texts))
            if self._left < 0:
                raise _Malformed
            yield row


def _copy_sources(damaged: Path, target: sqlite3.Connection, new: Path, room: _Room) -> bool:
    """Copy the positions of named sources if SQLite can read them; return whether it could."""
    # A wrong position loses input, and these rows have no checksum. So they are not decoded page
    # by page.
    found: list[dict[str, Any]] | None = None
    with (
        suppress(OutboxError, sqlite3.Error, _Malformed),
        looking(damaged, steps_max=room.steps_max) as (connection, _),
    ):
        found = list(room.take(named_rows(connection, QUERIES["sources"], {})))
    if found is None or not all(map(_is_position, found)):
        return False
    if found:
        with transaction(target, new):
            target.executemany(QUERIES["advance_source"], found)
    return True


def _is_position(row: dict[str, Any]) -> bool:
    count = row["count"]
    return isinstance(row["name"], str) and type(count) is int and 0 <= count <= ID_MAX


def _copy_keys(
    damaged: Path, target: sqlite3.Connection, new: Path, copied: Container[int], room: _Room
) -> bool:
    """Copy deduplication keys as far as SQLite can read them; return whether it could read all."""
    page: list[tuple[Any, ...]] | None = [("",)]
    while page:
        after, page = page[-1][0], None
        with (
            suppress(OutboxError, sqlite3.Error, _Malformed),
            looking(damaged, steps_max=room.steps_max) as (connection, _),
        ):
            page = list(room.take(connection.execute(QUERIES["keys"], (after, _BATCH))))
        keys = [  # without the id of a message that was not copied: another message will get it
            (key, id_ if id_ in copied else 0, message_id, kept_until)
            for key, id_, message_id, kept_until in page or ()
            if isinstance(key, str) and isinstance(message_id, str) and is_time(kept_until)
        ]
        with transaction(target, new):
            target.executemany(QUERIES["remember_key"], keys)
        if page and not (isinstance(page[-1][0], str) and page[-1][0] > after):
            return False  # not in order: the next page could be this one again
    return page is not None
