"""Reserved disk space, released so that outcomes and one checkpoint can be written on a full disk.

Knows: one file beside the outbox, the free space of the disk. Must never know: messages.

On a full disk SQLite cannot even delete, because a delete first writes to the log. The relay then
truncates the file, and uses the space for outcomes and for a checkpoint, after which the log reuses
its own space. Before a new message is stored, `Ballast.check` requires room for it in addition to
the ballast and to the pages that the log must still copy to the database. So released space, or
space that an operator frees, is left to the relay until the ballast is complete again.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from reliablepub.errors import OutboxDiskFull, OutboxError
from reliablepub.outbox.sqlite.checkpoints import owed_bytes
from reliablepub.outbox.sqlite.failures import may_take
from reliablepub.outbox.sqlite.location import open_side_file

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


class Ballast:
    """The file ``<outbox>.ballast``. The constructor does not create it; `restore` does.

    Args:
        outbox: path of the outbox.
        size: bytes of the whole ballast.
    """

    def __init__(self, outbox: Path, *, size: int = BALLAST_BYTES) -> None:
        self._outbox = outbox
        self._path = os.fspath(outbox) + ".ballast"
        self._size = size
        self._least = size - size // 8
        self._plenty_lacking, self._plenty_until = 0, 0.0

    @property
    def is_whole(self) -> bool:
        """Whether at least 7/8 of the space is reserved; read-only opens may have released a part.

        A byte is reserved if the file system has allocated it.
        """
        return self._lacking() <= self._size - self._least

    def release(self) -> bool:
        """Release all space by truncating the file; return False if there was none.

        Only the relay calls this.
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

        The relay calls this, and the process that creates the outbox. If the file cannot be
        created, there is no ballast, and only `check` keeps space free.
        """
        return self._is_complete() or self._keep(self._size)

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
        """Return free bytes minus what the ballast lacks and the log owes; negative if short.

        Raises:
            sqlite3.Error: the database cannot be read.
        """
        # Lent bytes are lacking too: they are for readers, not for new messages.
        lacking = self._lacking()
        folder = self._outbox.parent
        spare = free_bytes(folder) - owed_bytes(connection, self._outbox) - lacking
        if lacking and spare >= 0 and not may_take(folder, lacking):
            return -lacking  # the disk has room, the user's quota does not
        return spare

    def check(self, connection: sqlite3.Connection | sqlite3.Cursor, size: int) -> None:
        """Check that the disk has room for new messages. The caller holds the write lock.

        Args:
            connection: connection to the database.
            size: bytes of the messages.

        Raises:
            OutboxDiskFull: there is no room.
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
            f"at least {needed - spare:.0f} bytes, and try again"
        )

    def _lacking(self) -> int:
        """Return how many bytes are not reserved."""
        try:
            found = os.lstat(self._path)
        except OSError:
            return self._size
        if not stat.S_ISREG(found.st_mode):
            return self._size
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
    """Return the bytes that this user may still write in a folder; infinite if unknown."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return float("inf")  # the folder is gone: the commit reports that
    if not disk.f_blocks:
        return float("inf")
    free = disk.f_bavail
    if os.geteuid() == 0:  # root may use blocks that are reserved for it, but not ext4's own
        free = max(free, disk.f_bfree - _KEPT_BLOCKS)
    return float(free * disk.f_frsize)
