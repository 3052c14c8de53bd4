"""Rows straight from the pages of a SQLite file, whatever else of it is damaged.

Knows: SQLite's file format (https://sqlite.org/fileformat2.html): pages, cells, records, the log.
Must never know: what a row means.

SQLite finds a leaf from the root of its tree; one damaged page in between hides thousands of rows
that are intact. Here every page that looks like a leaf of a table is read by itself. Pages on the
list of free ones are left out: they may hold rows that were deleted. All numbers are big-endian,
which is what `int.from_bytes` expects.

The file may be damaged or made up, so no number in it is believed: every loop and every allocation
is bounded by the size of the file itself. In a whole file each byte belongs to one row, so of a
page no more than a few times its size is decoded, and a few rows at most go on to it.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Final

from reliablepub.outbox.database import PAGE_BYTES

Value = int | float | str | bytes | None

_MAGIC: Final = b"SQLite format 3\0"
_LIKELY_PAGE_BYTES: Final = (PAGE_BYTES, 4_096)
"""What outboxes have, and what they had once."""
_WAL_MAGIC: Final = 0x377F0682
_TABLE_LEAF: Final = 0x0D
_HEADER: Final = 100
_WAL_HEADER: Final = 32
_FRAME_HEADER: Final = 24
_COLUMNS_MAX: Final = 32_767
"""Of a table, by SQLite's own limit."""
_USABLE_MIN: Final = 480
_SHARED_MAX: Final = 4
"""How many rows may share a byte: the row it belongs to, and copies that damage brings up."""
_INTEGERS: Final = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}


class _Malformed(Exception):
    """These bytes are not what they would have to be."""


class Pages:
    """The pages of a database as its last commit left them: the file, and the log over it.

    No process may read a file so while it has it open with SQLite: closing it here would drop the
    locks there.

    Args:
        path: of the database; its log is beside it, if there is one.
        page_bytes: instead of what the header says.
    """

    def __init__(self, path: Path, page_bytes: int = 0) -> None:
        self._file = path.open("rb")
        header = self._file.read(_HEADER).ljust(_HEADER, b"\0")
        self._size = page_bytes or _size_in(header) or _likely_size(path)
        reserved = header[20] if header.startswith(_MAGIC) else 0
        self._usable = self._size - (reserved if self._size - reserved >= _USABLE_MIN else 0)
        self._bytes = os.fstat(self._file.fileno()).st_size
        self._in_file = self._count = self._bytes // self._size
        self._changed: dict[int, int] = {}  # page -> where it begins in the log
        self._followed: Counter[int] = Counter()
        self._decoded_bytes = 0
        self._log: BinaryIO | None = None
        log = path.with_name(path.name + "-wal")
        if log.exists():
            self._log = log.open("rb")
            self._bytes += os.fstat(self._log.fileno()).st_size
            self._lay_over(self._log)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
        if self._log is not None:
            self._log.close()

    def rows(self) -> Iterator[tuple[int, list[Value]]]:
        """Rowid and values of each row that can be decoded, from whichever table."""
        free = self._free()
        self._followed.clear()
        beyond = sorted(n for n in self._changed if self._in_file < n <= self._count)
        for number in chain(range(1, min(self._in_file, self._count) + 1), beyond):
            start = _HEADER if number == 1 else 0
            if number in free or (page := self._page(number))[start] != _TABLE_LEAF:
                continue
            (count,) = struct.unpack_from(">H", page, start + 3)
            most = self._decoded_bytes + _SHARED_MAX * self._size
            for index in range(min(count, (self._size - start - 8) // 2)):
                (at,) = struct.unpack_from(">H", page, start + 8 + 2 * index)
                with suppress(_Malformed, IndexError, struct.error, UnicodeDecodeError):
                    yield self._cell(page, at)
                if self._decoded_bytes > most:
                    break

    def _page(self, number: int) -> bytes:
        """A page; of zeros, where the file has none."""
        if number in self._changed:
            assert self._log is not None
            self._log.seek(self._changed[number])
            return self._log.read(self._size).ljust(self._size, b"\0")
        if not 0 < number <= self._in_file:
            return bytes(self._size)
        self._file.seek((number - 1) * self._size)
        return self._file.read(self._size).ljust(self._size, b"\0")

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
        """Pages on the list of free ones; what is none is not followed: it would hide pages."""
        free: set[int] = set()
        page = self._page(1)
        trunk = int.from_bytes(page[32:36]) if page.startswith(_MAGIC) else 0
        while self._is_page(trunk) and trunk not in free:
            page = self._page(trunk)
            following, count = struct.unpack_from(">II", page)
            if following > self._count or count > self._usable // 4 - 2:
                break
            free.add(trunk)
            free.update(struct.unpack_from(f">{count}I", page, 8))
            trunk = following
        return free

    def _lay_over(self, log: BinaryIO) -> None:
        """Put the log's pages over the file's, up to its last whole commit."""
        head = log.read(_WAL_HEADER)
        if len(head) < _WAL_HEADER:
            return
        magic, _, size, _, *salts = struct.unpack_from(">IIIIII", head)
        if magic & ~1 != _WAL_MAGIC or size != self._size:
            return
        words = ">" if magic & 1 else "<"
        sums = _checksum(words, head[: _WAL_HEADER - 8], (0, 0))
        changed: dict[int, int] = {}
        at = _WAL_HEADER
        while len(frame := log.read(_FRAME_HEADER + size)) == _FRAME_HEADER + size:
            number, commit, *rest = struct.unpack_from(">IIIIII", frame)
            if rest[:2] != salts:
                return
            sums = _checksum(words, frame[:8], sums)
            sums = _checksum(words, frame[_FRAME_HEADER:], sums)
            if tuple(rest[2:]) != sums:
                return
            changed[number] = at + _FRAME_HEADER
            at += _FRAME_HEADER + size
            if commit:
                self._changed.update(changed)
                self._count = commit
                changed = {}


def _size_in(header: bytes) -> int:
    """Bytes of a page, as the header says; 0 if it cannot be that."""
    size = int.from_bytes(header[16:18]) if header.startswith(_MAGIC) else 0
    size = 65_536 if size == 1 else size
    is_possible = size >= 512 and not size & (size - 1)  # noqa: PLR2004 - the smallest of the format
    return size if is_possible else 0


def _likely_size(path: Path) -> int:
    """The size at which most rows are found."""

    def count(size: int) -> int:
        with closing(Pages(path, size)) as pages:
            return sum(1 for _ in pages.rows())

    return max(_LIKELY_PAGE_BYTES, key=count)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(8):
        byte = data[at + index]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:  # noqa: PLR2004 - the highest bit says that more follows
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
        return (data.decode() if kind & 1 else data), at + (kind - 12) // 2
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
