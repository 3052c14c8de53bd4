"""Which files an outbox is made of, and whether its path still leads to them.

Knows: names, inodes and links; where SQLite keeps the length of its log. Must never know: messages.

SQLite does not notice when its files are deleted, moved or replaced: commits go on into files that
no process will open again. So after each commit, and before a message is called stored, the path
and its ``-wal`` and ``-shm`` are compared with the files that this process opened: three ``lstat``.

A backup that is copied *into* the open file (``cp backup.db outbox.db``) leaves every name and
inode as it was. It is known by SQLite's own counter of changes, in the first page: a checkpoint
only raises it, and in a backup it is lower. That is looked at before a commit too, since a
checkpoint within the commit would write over it.

A file with two names has two write-ahead logs, one beside each name, and what is written by one
name is not seen by the other. So a file with a hard link, or mounted by itself, is refused.
"""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from reliablepub.errors import OutboxError, OutboxMoved
from reliablepub.outbox.forks import GATE, Inode, forked, open_files

_LOG_MAGICS: Final = (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")
_FRAMES_AT: Final = 16
"""Where ``mxFrame``, the number of frames in the log, is in a ``-shm`` (wal.c, WalIndexHdr)."""
_FRAMES_BYTES: Final = 4
_CHANGES_AT: Final = 24
"""Where the file change counter is in a database (fileformat2.html), big-endian."""
_CHANGES_BYTES: Final = 4


class Place:
    """The files that a connection has open, taken stock of when it was opened.

    Args:
        path: of the database, absolute; this process has it open.

    Attributes:
        is_overwritten: another content was copied into the database, beside its old log.

    Raises:
        OutboxMoved: the path leads elsewhere already, or its log was deleted while in use.
        OutboxForked: SQLite's lock on it is only in SQLite's table, and not the kernel's.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names = (str(path), f"{path}-wal", f"{path}-shm")
        self._inodes = self._now()
        self._locked_fd = -1
        self._changes = 0
        self.is_overwritten = False
        self._take_stock()

    @property
    def file(self) -> Inode | None:
        """The database itself."""
        return self._inodes[0]

    def check(self) -> None:
        """Compare the files at the path with those that were opened.

        Raises:
            OutboxMoved: they are not the same; says what happened.
        """
        for name, inode in zip(self._names, self._inodes, strict=True):
            if _inode(name) != inode:
                raise self._moved()
        self.check_content()

    def check_content(self) -> None:
        """Compare the database with what was last seen of it; for where time matters.

        Raises:
            OutboxMoved: it was overwritten.
        """
        changes = _changes(self._locked_fd)
        if changes < self._changes and self._is_ours(self._locked_fd):
            self.is_overwritten = True
            raise moved(self._path, "was overwritten, by a backup perhaps,")
        self._changes = changes

    def _is_ours(self, fd: int) -> bool:
        """Whether a descriptor is still one of the database: an application may have closed it."""
        try:
            found = os.fstat(fd)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self.file

    @property
    def is_locked(self) -> bool:
        """Whether SQLite's lock on the database is still there.

        Closing any other descriptor of the file in this process drops it, as a copy by ``shutil``
        does. True where the system does not tell.
        """
        return self._locked_fd < 0 or _has_lock(self._locked_fd)

    def is_left_open(self, instead: Place) -> bool:
        """Whether this process still has one of these files open that is not among others."""
        return bool(open_files().keys() & (set(self._inodes) - set(instead._inodes)))

    def _now(self) -> tuple[Inode | None, ...]:
        return tuple(_inode(name) for name in self._names)

    def _take_stock(self) -> None:
        files = open_files()
        if not files:
            return
        for name, inode in zip(self._names, self._inodes, strict=True):
            if inode is not None and inode not in files:
                raise OutboxMoved(
                    f"outbox {self._path}: {name} is not the file that this process has open, so "
                    "nothing was stored; close what has the old one open, and try again"
                )
        _, log, index = self._inodes
        if index is not None and not (log and _is_whole(files[log][0], files[index][0])):
            raise OutboxMoved(
                f"the write-ahead log of outbox {self._path} was deleted while it was in use, so "
                "nothing can be stored; stop every process that has the outbox open, and start "
                "them again"
            )
        self._locked_fd = next(filter(_has_lock, files.get(self.file or (0, 0), ())), -1)
        self._changes = _changes(self._locked_fd)
        is_suspect = index is not None and self.file in GATE.open_before
        if is_suspect and self._locked_fd < 0 and _locks_are_listed():
            raise forked(self._path, "was open when this process was forked")

    def _moved(self) -> OutboxMoved:
        now = self._now()
        file, *_ = now
        if file is None:
            what = "was deleted or moved"
        elif file != self.file:
            what = "was replaced by another file"
        else:
            lost = "-wal" if now[1] != self._inodes[1] else "-shm"
            what = f"lost its {self._path.name}{lost}, which was deleted, moved or replaced"
        return moved(self._path, what)


def moved(path: Path, what: str) -> OutboxMoved:
    """The error to raise when the path of an outbox leads elsewhere than it did."""
    return OutboxMoved(
        f"outbox {path} {what} while this process had it open: what is stored now is not there for "
        "the next process. See what moved it, stop every process that uses it, and start them again"
    )


class WritingConnection(sqlite3.Connection):
    """A connection to an outbox that knows which files it has open.

    Attributes:
        place: those files; compared with the path after each commit.
        is_unsure: the disk failed during the last commit; see `transactions`.
    """

    place: Place
    is_unsure = False

    @property
    def must_stay(self) -> bool:
        """Whether to close it, or to open another one, could make things worse."""
        return self.is_unsure or self.place.is_overwritten


def refuse_second_name(path: Path, found: os.stat_result) -> None:
    """Refuse a file that another name leads to as well: each name would have its own log.

    Raises:
        OutboxError: it has a hard link, or is mounted by itself.
    """
    if found.st_nlink > 1:
        raise OutboxError(
            f"outbox {path} has {found.st_nlink} names (hard links); SQLite keeps a log beside "
            "each, so messages would be lost. Copy the file, and remove the other names "
            f"(find / -samefile {path})"
        )
    if str(path) in _mount_points():
        raise OutboxError(
            f"outbox {path} is mounted as a single file, so its log is not beside the original, "
            "and messages would be lost; mount the folder that holds it instead"
        )


def _inode(name: str) -> Inode | None:
    try:
        found = os.lstat(name)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _has_lock(fd: int) -> bool:
    """Whether this process has locked a file by this descriptor, as SQLite does (proc(5))."""
    try:
        info_fd = os.open(f"/proc/self/fdinfo/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return b"POSIX" in os.read(info_fd, 65_536)
    finally:
        os.close(info_fd)


def _changes(fd: int) -> int:
    """How often the first page was changed, as far as the database and not its log has it."""
    try:
        return int.from_bytes(os.pread(fd, _CHANGES_BYTES, _CHANGES_AT), "big")
    except OSError:
        return 0  # the descriptor is unknown, or closed


@cache
def _locks_are_listed() -> bool:
    """Whether the system lists locks at all: a sandbox may have the list and leave it empty."""
    with TemporaryFile() as file:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return _has_lock(file.fileno())


def _is_whole(log_fd: int, index_fd: int) -> bool:
    """Whether a log that is said to hold frames has a header at all. Reads by SQLite's descriptors.

    A log that was deleted in use is made again, empty, by the next connection. Frames appended to
    it are never found again, since its header is written with the first frame only.
    """
    frames = os.pread(index_fd, _FRAMES_BYTES, _FRAMES_AT)
    return not any(frames) or os.pread(log_fd, len(_LOG_MAGICS[0]), 0) in _LOG_MAGICS


def _mount_points() -> set[str]:
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return set()
    return {_unescaped(line.split(" ", 5)[4]) for line in mounts.splitlines()}


def _unescaped(name: str) -> str:
    """Of proc(5): space, tab, newline and backslash are octal."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), name)
