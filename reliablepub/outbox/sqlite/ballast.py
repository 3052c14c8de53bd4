"""Reserved disk space, so that verdicts and one checkpoint still succeed on a full disk.

Knows: one file beside the outbox, and how much of the disk is free. Must never know: messages.

On a full disk SQLite cannot even delete: a delete, too, writes to the log first. The relay then
gives this space back, and only the relay may use it: for verdicts, and for the checkpoint after
which the log is space again. The file is emptied and not removed. Everybody who stores new messages
first asks `Ballast.check` whether the disk has room for them *beside* the ballast and beside what
the log still owes to the database, so the space that is given back, or that a person frees, is left
to the relay until the ballast is whole.
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
from reliablepub.outbox.sqlite.location import open_side_file
from reliablepub.outbox.sqlite.quota import may_take

BALLAST_BYTES: Final = 5 * 1024 * 1024
"""More than one checkpoint, with room for the verdicts of a few turns."""
LENT_BYTES: Final = 128 * 1024
"""What one look may take: the index of the log (``-shm``) of an outbox that nobody has open."""
MARGIN_BYTES: Final = 256 * 1024
"""What a transaction may write beyond the bytes of its messages, with both its copies."""
PLENTY_BYTES: Final = 64 * 1024 * 1024
"""With so much to spare, the disk is looked at again only after `PLENTY_S`."""
PLENTY_S: Final = 0.1
_KEPT_BLOCKS: Final = 4_096
"""Most blocks that ext4 counts as free and gives to nobody."""
_BLOCK_BYTES: Final = 512
"""Unit of ``st_blocks``, on every file system."""


class Ballast:
    """``<outbox>.ballast``. Nothing is written before `restore`.

    Args:
        outbox: path of the outbox.
        size: bytes that it holds when it is whole.
    """

    def __init__(self, outbox: Path, *, size: int = BALLAST_BYTES) -> None:
        self._outbox = outbox
        self._path = os.fspath(outbox) + ".ballast"
        self._size = size
        self._plenty_until = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether the space is kept, but for what looks have borrowed of it."""
        try:
            found = os.lstat(self._path)
        except OSError:
            return False
        kept = min(found.st_size, found.st_blocks * _BLOCK_BYTES)
        return stat.S_ISREG(found.st_mode) and kept >= self._least

    @property
    def _least(self) -> int:
        return self._size - self._size // 8

    def release(self) -> bool:
        """Give the space back to the disk; False when there is none to give. For the relay."""
        return self._cut(0) > 0

    def lend(self) -> bool:
        """Give back a little, for a look at the outbox; False when there is no more to lend."""
        with suppress(OSError):
            size = os.lstat(self._path).st_size
            if self.is_whole and size - LENT_BYTES >= self._least:
                return self._cut(size - LENT_BYTES) > 0
        return False

    def restore(self) -> bool:
        """Keep the space, as far as it is not kept; whether it is. For the relay, or at birth.

        Where the file cannot be made for another reason than a full disk, there is no ballast, and
        only `check` protects what is stored.
        """
        return self._is_complete() or self._keep(self._size)

    def restore_within(self, spare: float) -> None:
        """Keep the space again, if so much is to spare; or most of it, if a little is lacking."""
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
                os.ftruncate(fd, before)  # part of the rest would be of no use
            return False
        finally:
            os.close(fd)
        return True

    def spare_bytes(self, connection: sqlite3.Connection | sqlite3.Cursor) -> float:
        """Bytes free beyond what the ballast lacks and what the log owes; negative when short.

        Raises:
            sqlite3.Error: the database cannot be read.
        """
        lacking = 0 if self.is_whole else self._size
        folder = self._outbox.parent
        spare = free_bytes(folder) - owed_bytes(connection, self._outbox) - lacking
        if lacking and spare >= 0 and not may_take(folder, lacking):
            return -lacking  # by a quota
        return spare

    def check(self, connection: sqlite3.Connection | sqlite3.Cursor, size: int) -> None:
        """Refuse to store new messages for which there is no room; under the write lock.

        Args:
            connection: to the database that is to grow.
            size: bytes of the messages.

        Raises:
            OutboxDiskFull: nothing may be stored now.
        """
        is_whole, now = self.is_whole, time.monotonic()
        if is_whole and now < self._plenty_until:
            return
        spare = self.spare_bytes(connection)
        if is_whole and spare > PLENTY_BYTES:
            self._plenty_until = now + PLENTY_S
        needed = 2 * size + MARGIN_BYTES  # once in the log, and once in the database
        if spare >= needed:
            return
        raise OutboxDiskFull(
            f"outbox {self._outbox} takes no new message, because the disk is full: nothing of "
            "this was stored, and what was accepted before stays and is still published; free "
            f"some space, at least {needed - spare:.0f} bytes, and try again"
        )

    def _is_complete(self) -> bool:
        try:
            return os.lstat(self._path).st_size >= self._size
        except OSError:
            return False

    def _cut(self, size: int) -> int:
        """Shorten the file; by how many bytes."""
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
    """Bytes that this user may still write in a folder; infinite if the disk does not tell."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return float("inf")  # the folder is gone: the commit says so
    if not disk.f_blocks:
        return float("inf")
    free = disk.f_bavail
    if os.geteuid() == 0:  # root may use what is reserved for it, but not what ext4 keeps
        free = max(free, disk.f_bfree - _KEPT_BLOCKS)
    return float(free * disk.f_frsize)
