"""Disk space: the ballast, what is freed on a full disk, and a file that shrinks after an outage.

Knows: free space, one file beside the outbox, free pages, the order in which things are freed. Must
never know: open or parked messages, the relay.

On a full disk SQLite cannot even delete, because a delete first writes to the log. So the relay
reserves space, the *ballast*, in the file ``<outbox>.ballast``. On a full disk it truncates that
file, and uses the space for outcomes and for a checkpoint, after which the log reuses its own
space. Before a new message is stored, `Ballast.check` requires room for it in addition to the
ballast and to the pages that the log must still copy to the database. So released space, or space
that an operator frees, is left to the relay until the ballast is complete again.

The log itself, grown once to its size, would be a reserve too. But the last close deletes it, so a
relay that starts on a full disk would have none, and btrfs and ZFS do not overwrite in place. One
file serves all.

While the disk is full:

- New messages are refused (`Ballast.check`).
- Confirmed rows are deleted, the oldest first, and no new ones are kept.
- A commit that does not fit gets the space of the ballast.
- Free pages are removed from the file, a few at a time.
- Each commit is followed by a checkpoint, so that the log is reset and does not grow.
- ``secure_delete`` is FAST: overwriting deleted rows would write as many bytes to the log as it
  frees. Bodies of confirmed messages may stay in free pages until these are reused.
- Outcomes are recorded in `pieces` that fit into the ballast, however many messages a turn settles.
- Space that an operator frees is first used for a checkpoint: nothing is written while less space
  is free than the log needs to copy its pages to the database.

After an outage, when few pages are in use, all free pages are removed from the file at once. SQLite
can also remove single pages, but searches its list of free pages each time: with a million pages,
removing one takes 3 ms.
"""

from __future__ import annotations

import math
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from reliablepub.errors import OutboxDiskFull, OutboxError
from reliablepub.outbox.entry import Changes
from reliablepub.outbox.sqlite.checkpoints import (
    checkpointing,
    move_what_is_owed,
    owed_bytes,
    write_a_page,
)
from reliablepub.outbox.sqlite.failures import may_take, reported
from reliablepub.outbox.sqlite.location import open_side_file
from reliablepub.outbox.sqlite.retention import prune_confirmed
from reliablepub.outbox.sqlite.sql import QUERIES
from reliablepub.outbox.sqlite.transactions import transaction

T = TypeVar("T")

BALLAST_BYTES: Final = 5 * 1024 * 1024
"""One checkpoint (4 MiB) and the outcomes of a few turns."""
LENT_BYTES: Final = 128 * 1024
"""Released for one read-only open: SQLite creates the index of the log (``-shm``) if no other
process has the outbox open."""
MARGIN_BYTES: Final = 256 * 1024
"""Bytes that a transaction may write besides its messages, in the log and the database together."""
PLENTY_BYTES: Final = 64 * 1024 * 1024
"""With more spare bytes, free space is not measured again for `PLENTY_S`, unless the ballast has
changed: a relay that releases it has found the disk full."""
PLENTY_S: Final = 0.1
_KEPT_BLOCKS: Final = 4_096
"""Maximum number of blocks that ext4 reserves for itself, and reports as free."""
_BLOCK_BYTES: Final = 512
"""Unit of ``st_blocks`` on every file system."""
LOW_BYTES: Final = 1024 * 1024
"""With fewer spare bytes, the disk counts as full; `Ballast.check` requires less."""
LOOK_S: Final = 1.0
"""Interval of checks while the disk has space."""
SHORT_LOOK_S: Final = 0.25
"""Interval of checks while the disk is full."""
PRUNED: Final = 250
"""`prune_confirmed` deletes twice as many in one transaction."""
CUT_PAGES: Final = 64
"""Pages that one transaction removes from a file on a full disk: 0.5 MiB of log."""
CUT_S: Final = 0.02
PIECE_BYTES: Final = 1024 * 1024
"""Bytes of the messages that one transaction settles on a full disk. Parking writes a message to
the log and, if no page is free, to the end of the database."""
DISK_FULL: Final = "disk full: no new message is stored until space is freed"
PAGE_BYTES: Final = 8_192
"""Page size of a new file. A commit of many messages writes fewer bytes than with pages of 4 KiB,
in half as many writes. A commit of one message writes twice as many, and takes hardly longer."""
FREE_PAGES_MIN: Final = 32 * 1024 * 1024 // PAGE_BYTES
"""Minimum number of free pages for a rewrite of the file; fewer are kept for the next burst."""
LEFT_PAGES_MAX: Final = 8 * 1024 * 1024 // PAGE_BYTES
"""Maximum number of used pages for a rewrite of the file: copying them takes 0.1 s."""
REWRITE_RETRY_S: Final = 60.0
"""Seconds after a rewrite that failed: on a disk that is almost full, each one fills it."""


class Ballast:
    """The file ``<outbox>.ballast``. The constructor does not create it; `restore` does."""

    def __init__(self, outbox: Path, *, size: int = BALLAST_BYTES) -> None:
        self._outbox = outbox
        self._path = os.fspath(outbox) + ".ballast"
        self._size = size
        self._least = size - size // 8
        self._was_filled = False
        self._plenty_lacking, self._plenty_until = 0, 0.0

    @property
    def is_whole(self) -> bool:
        """Whether at least 7/8 of the space is reserved; read-only opens may have released some."""
        return self._lacking() <= self._size - self._least

    def release(self) -> bool:
        """Release all space by truncating the file; return False if there was none.

        Called by the holder of the relay lock, and by a relay that has found no space to start.
        """
        return self._cut(0) > 0

    def lend(self) -> bool:
        """Release `LENT_BYTES` for a read-only open; return False if no more may be released."""
        with suppress(OSError):
            size = os.lstat(self._path).st_size
            if self.is_whole and size - LENT_BYTES >= self._least:
                return self._cut(size - LENT_BYTES) > 0
        return False

    def restore(self) -> bool:
        """Reserve the whole space; return whether it is reserved.

        Called by the holder of the relay lock, and by the process that creates the outbox. If the
        file cannot be created, there is no ballast, and only `check` keeps space free.
        """
        # A sparse copy has the length and lacks the space. On ZFS all files of zeros do: once is
        # enough.
        if self._is_complete() and (self._was_filled or not self._lacking()):
            return True
        self._was_filled = self._keep(self._size)
        return self._was_filled

    def restore_within(self, spare: float) -> None:
        """Reserve the space if ``spare`` bytes allow it; 7/8 of it if they almost do."""
        if spare >= 0:
            self.restore()
        elif not self.is_whole and spare >= self._least - self._size:
            self._keep(self._least)

    def _keep(self, size: int) -> bool:
        try:
            fd = open_side_file(self._outbox, ".ballast", os.O_WRONLY | os.O_CREAT)
        except (OutboxError, OSError):
            return False
        try:
            before = os.fstat(fd).st_size
            os.posix_fallocate(fd, 0, size)
        except OSError:
            with suppress(OSError):
                os.ftruncate(fd, before)  # free what was allocated before the disk was full
            return False
        finally:
            os.close(fd)
        return True

    def spare_bytes(self, connection: sqlite3.Connection | sqlite3.Cursor) -> float:
        """Return free bytes minus what the ballast lacks and the log owes; negative if short."""
        # Lent bytes are lacking too: they are for readers, not for new messages.
        lacking = self._lacking()
        folder = self._outbox.parent
        spare = free_bytes(folder) - owed_bytes(connection, self._outbox) - lacking
        if lacking and spare >= 0 and not may_take(folder, lacking):
            return -lacking  # the disk has room, the user's quota does not
        return spare

    def check(self, connection: sqlite3.Connection | sqlite3.Cursor, size: int) -> None:
        """Raise `OutboxDiskFull` if the disk has no room for new messages of ``size`` bytes.

        The caller holds the write lock.
        """
        lacking, now = self._lacking(), time.monotonic()
        if lacking == self._plenty_lacking and now < self._plenty_until:
            return
        spare = self.spare_bytes(connection)
        if spare > PLENTY_BYTES:
            self._plenty_lacking, self._plenty_until = lacking, now + PLENTY_S
        needed = 2 * size + MARGIN_BYTES  # once in the log, and once in the database
        if spare >= needed:
            return
        raise OutboxDiskFull(
            f"outbox {self._outbox} accepts no new messages, because the disk is full: nothing was "
            "stored, and messages accepted before are safe and still published; free some space, "
            f"at least {needed - spare:.0f} bytes more than are free now, and try again"
        )

    def _lacking(self) -> int:
        """Return how many bytes are not reserved."""
        try:
            found = os.lstat(self._path)
        except OSError:
            return self._size
        if not stat.S_ISREG(found.st_mode):
            return self._size
        # A byte is reserved if the file system has allocated it.
        return max(0, self._size - min(found.st_size, found.st_blocks * _BLOCK_BYTES))

    def _is_complete(self) -> bool:
        try:
            return os.lstat(self._path).st_size >= self._size
        except OSError:
            return False

    def _cut(self, size: int) -> int:
        """Truncate the file to a size; return by how many bytes it has become shorter."""
        try:
            fd = open_side_file(self._outbox, ".ballast", os.O_WRONLY)
        except (OutboxError, OSError):
            return 0
        try:
            before = os.fstat(fd).st_size
            if before <= size:
                return 0
            os.ftruncate(fd, size)
        except OSError:
            return 0
        finally:
            os.close(fd)
        return before - size


def free_bytes(folder: Path) -> float:
    """Return the bytes that this user may still write in a directory; infinite if unknown."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return float("inf")  # the directory is gone: the commit reports that
    if not disk.f_blocks:
        return float("inf")
    free = disk.f_bavail
    if os.geteuid() == 0:  # root may use blocks that are reserved for it, but not ext4's own
        free = max(free, disk.f_bfree - _KEPT_BLOCKS)
    return float(free * disk.f_frsize)


def pieces(changes: Changes) -> Iterator[Changes]:
    """Divide the outcomes of a turn into pieces of about `PIECE_BYTES`, to be committed before it.

    So each piece fits into the ballast, unless it is one large message. The turn is committed after
    its pieces: an outcome that is recorded twice counts once. A turn that settles less than
    `PIECE_BYTES` has no pieces.
    """
    for confirmed in _by_bytes(changes.confirmed, lambda entry: entry.message.size):
        yield Changes(confirmed=confirmed)
    for parked in _by_bytes(changes.parked, lambda attempt: attempt.entry.message.size):
        yield Changes(parked=parked)
    for discarded in _by_bytes(changes.discarded, lambda attempt: attempt.entry.message.size):
        yield Changes(discarded=discarded)


def _by_bytes(settled: list[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    piece, size = list[T](), 0
    for one in settled:
        piece.append(one)
        size += size_of(one)
        if size >= PIECE_BYTES:
            yield piece
            piece, size = [], 0


def make_room(
    connection: sqlite3.Connection, path: Path, ballast: Ballast, *, release: bool = False
) -> None:
    """Checkpoint the log on a full disk, before a transaction that stores no new messages.

    Only for the holder of the relay lock. If the transaction did not fit, ``release`` gives it the
    ballast.
    """
    with reported(path):
        connection.execute("PRAGMA secure_delete = FAST")
    if release:
        with transaction(connection, path):  # no `Ballast.check` runs under its lock
            ballast.release()
    with reported(path):
        owed = move_what_is_owed(connection, path)
    lacking = owed + MARGIN_BYTES - free_bytes(path.parent)
    if owed and lacking > 0:
        raise OutboxDiskFull(
            f"outbox {path} cannot record confirms, because the disk is full: free some "
            f"space, at least {lacking:.0f} bytes; messages accepted before are safe"
        )


class Shortage:
    """Detects that the disk of an outbox is full, and frees space."""

    def __init__(self, path: Path, ballast: Ballast) -> None:
        self._path = path
        self._ballast = ballast
        self._next_look_at = 0.0
        self._moved = -1  # `data_version` when the log was last moved
        self.is_on: bool = False  # whether the disk counts as full

    def look(self, connection: sqlite3.Connection) -> str:
        """Check the disk at intervals, and free space; return why messages are refused, if so."""
        now = time.monotonic()
        if now >= self._next_look_at:
            self._look(connection)
            self._next_look_at = now + (SHORT_LOOK_S if self.is_on else LOOK_S)
        return DISK_FULL if self.is_on else ""

    def _look(self, connection: sqlite3.Connection) -> None:
        spare = self._ballast.spare_bytes(connection)
        if spare < LOW_BYTES:
            self.is_on = True
            with suppress(OutboxError):  # retried at the next look
                self._give(connection)
            spare = self._ballast.spare_bytes(connection)
        self._ballast.restore_within(spare)
        if spare >= LOW_BYTES and self.is_on:
            self.is_on = False
            connection.execute("PRAGMA secure_delete = ON")

    def _give(self, connection: sqlite3.Connection) -> None:
        """Delete confirmed rows that are kept, and remove free pages from the file."""
        has_kept = (
            connection.execute(QUERIES["has_confirmed"], {"before": math.inf}).fetchone()
            is not None
        )
        (vacuum,) = connection.execute("PRAGMA auto_vacuum").fetchone()
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        # After others have written, the log is moved too: an operator who deletes needs room in it.
        is_moved = version == self._moved
        if is_moved and not has_kept and not (vacuum and free_pages(connection)):
            return
        try:
            self._shrink(connection, release=False)
        except OutboxDiskFull:
            if is_moved and not vacuum:
                return
            # Removing free pages gives back the space of the ballast, and more.
            self._shrink(connection, release=True)
        self._moved = version

    def _shrink(self, connection: sqlite3.Connection, *, release: bool) -> None:
        make_room(connection, self._path, self._ballast, release=release)
        with checkpointing(connection), transaction(connection, self._path):
            prune_confirmed(connection, math.inf, PRUNED)
            cut_off(connection, CUT_S, CUT_PAGES)
            write_a_page(connection)


def cut_off(connection: sqlite3.Connection, seconds: float, pages_max: float = math.inf) -> None:
    """Remove free pages from the file for so long. The more are free, the longer each one takes."""
    until = time.monotonic() + seconds
    for _ in range(int(min(pages_max, free_pages(connection)))):
        connection.execute("PRAGMA incremental_vacuum(1)")
        if time.monotonic() > until:
            break


def has_space_to_give(connection: sqlite3.Connection) -> bool:
    """Whether much of the file is free, little is in use, and no table is the application's."""
    free = free_pages(connection)
    if free < FREE_PAGES_MIN or pages(connection) - free > LEFT_PAGES_MAX:
        return False
    return connection.execute(QUERIES["tables_of_others"]).fetchone() is None


def give_space_back(connection: sqlite3.Connection) -> bool:
    """Rewrite the file without its free pages, outside a transaction; return False if it failed."""
    try:
        connection.execute("VACUUM")
    except (sqlite3.Error, MemoryError):
        # The disk is full, another process writes, or a page is damaged. The file is not changed,
        # and the commit before it stays good.
        return False
    return True


def pages(connection: sqlite3.Connection) -> int:
    """Return the number of pages of the file."""
    (count,) = connection.execute("PRAGMA page_count").fetchone()
    return int(count)


def free_pages(connection: sqlite3.Connection) -> int:
    """Return the number of pages that hold nothing."""
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    return int(free)
