"""Checks the files of an outbox: their owners and modes, and whether the path still leads to them.

Knows: names, inodes, links, owners and modes; where SQLite keeps the length of its log. Must never
know: messages, what is in a side file.

SQLite does not notice when its files are deleted, moved or replaced: it goes on committing to files
that no process will open again. So after each commit, before a message is reported as stored, the
database and its ``-wal`` and ``-shm`` at the path are compared with the open files; in a
transaction of the application, before it commits. If they differ, the relay has the only copy of
the open ones, and saves it (`rescued`).

The comparison asks for inodes only. Since Linux 6.13, reading the times of a file makes the next
write to it slower, because that write must leave a new time (multigrain timestamps). On a fast
disk, an ``lstat`` of the log after each commit made every commit take a third longer.

A backup that is copied *into* the open file (``cp backup.db outbox.db``) changes no name and no
inode. SQLite's file change counter in the first page reveals it: a checkpoint only raises the
counter, and in a backup it is lower. It is also compared before a commit, because a checkpoint
within the commit would overwrite it. With a log, SQLite raises the counter only in a commit that
changes the first page, as one does that makes the file longer, and only once after it has read that
page. So a relay that alone writes forgets its pages now and then; and a backup that is as new as
the last checkpoint is not noticed.

A file with two names has two write-ahead logs, one beside each name, and changes made through one
name are not visible through the other. So a file with a hard link, or one that is mounted as a
single file, is refused.

In a directory that other users can write to, another user can create ``outbox.db-wal`` before
SQLite does, and SQLite then writes message bodies into that file. The sticky bit does not prevent
that: it forbids renaming and removing, not creating. So every side file is checked before the
outbox is opened, and again afterwards, when SQLite has its log open and the sticky bit keeps the
file in place. If the process runs as root, SQLite changes the owner of an existing log to that of
the database, and the second check would not recognize a planted file. In that case `claim_log`
creates the log first, and SQLite must have opened that file.
"""

from __future__ import annotations

import fcntl
import grp
import logging
import os
import pwd
import re
import shlex
import sqlite3
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from struct import Struct
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Final

from reliablepub.errors import OutboxDiskFailed, OutboxError, OutboxMoved
from reliablepub.outbox.patience import Patience
from reliablepub.outbox.sqlite import mounts
from reliablepub.outbox.sqlite.forks import GATE, Inode, forked, open_files

if TYPE_CHECKING:
    from ctypes import CDLL

LOGGER: Final = logging.getLogger("reliablepub.outbox")
OF_SQLITE: Final = ("-wal", "-shm", "-journal")
OURS: Final = (".lock", ".relay", ".relay.new", ".ballast")
_OTHERS: Final = 0o077


def check_side_files(outbox: Path, suffixes: tuple[str, ...] = (*OF_SQLITE, *OURS)) -> None:
    """Refuse an outbox if another user has planted a file beside it, or can use one."""
    base = os.fspath(outbox)
    for suffix in suffixes:
        try:
            found = os.lstat(base + suffix)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise OutboxError(f"{base + suffix} cannot be used: {error.strerror}") from error
        _check(outbox, suffix, found)


def takes_over(outbox: Path) -> bool:
    """Whether SQLite would use a log planted by another user as its own: only if run as root."""
    return os.geteuid() == 0 and bool(folder_exposure(outbox.parent))


def claim_log(outbox: Path) -> list[tuple[int, int]]:
    """Create the log and its index if they are missing; return the identity of each file."""
    main = outbox.stat()
    files: list[tuple[int, int]] = []
    if not main.st_size:  # SQLite would remove a log beside an empty database
        return files
    for suffix in ("-wal", "-shm"):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # O_EXCL follows no link
        try:
            fd = os.open(os.fspath(outbox) + suffix, flags, 0o600)
        except FileExistsError:
            pass
        except OSError:
            continue  # nothing can be created here: SQLite will report that
        else:
            try:
                # In a container, the group may be one that cannot be given. SQLite goes on, too.
                with suppress(OSError):
                    os.fchown(fd, main.st_uid, main.st_gid)
                if os.fstat(fd).st_uid != main.st_uid:
                    Path(f"{outbox}{suffix}").unlink()  # only root can have opened it
                    raise OutboxError(
                        f"outbox {outbox} belongs to user {main.st_uid}, and this process, though "
                        "it runs as root, may not give files to that user (CAP_CHOWN); run it as "
                        f"the owner: setpriv --reuid={main.st_uid} reliablepub ..."
                    )
                os.fchmod(fd, stat.S_IMODE(main.st_mode))
            finally:
                os.close(fd)
        check_side_files(outbox, (suffix,))
        with suppress(FileNotFoundError):  # another process has closed the outbox
            found = os.lstat(os.fspath(outbox) + suffix)
            files.append((found.st_dev, found.st_ino))
    return files


def open_side_file(outbox: Path, suffix: str, flags: int) -> int:
    """Open a side file without following a link or waiting for a pipe; created with mode 0600."""
    safely = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(os.fspath(outbox) + suffix, flags | safely, 0o600)
    try:
        _check(outbox, suffix, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_side_file(outbox: Path, suffix: str, bytes_max: int) -> bytes:
    """Read a side file, at most ``bytes_max`` bytes of it."""
    with open(open_side_file(outbox, suffix, os.O_RDONLY), "rb", buffering=0) as file:
        return file.read(bytes_max)


@cache
def warn_of_folder(folder: Path) -> None:
    """Log, once for each directory, that other users can write to it, or that it is in memory."""
    # Its mode is no error, because container volumes often have such a one. A planted file is one.
    if words := folder_exposure(folder):
        LOGGER.warning("%s", words, extra={"event": "exposed"})
    if words := mounts.forgets(folder):
        LOGGER.warning("%s", words, extra={"event": "in_memory"})


def folder_exposure(folder: Path) -> str:
    """Say which other users can write to a directory, and what to do; empty if none can."""
    found = folder.stat()
    if found.st_mode & stat.S_IWOTH:
        who = "every user can"
    elif found.st_uid not in (os.geteuid(), 0):
        who = f"user {found.st_uid}, who owns it, can"
    elif found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid):
        who = f"members of group {found.st_gid} can"
    else:
        return ""
    is_sticky = found.st_mode & stat.S_ISVTX and found.st_uid in (os.geteuid(), 0)
    harm = "block the outbox with files of their own" if is_sticky else "replace the outbox"
    return (
        f"{who} write to directory {folder}, and so {harm}; keep the outbox in a directory that "
        "only its owner can write to (mode 0700)"
    )


def _check(outbox: Path, suffix: str, found: os.stat_result) -> None:
    name = f"{outbox}{suffix}"
    if not stat.S_ISREG(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a regular file"
        raise _refused(outbox, f"{name} is {what}", "remove it")
    if found.st_nlink > 1:
        raise _refused(outbox, f"{name} has a second name (a hard link)", "remove the other one")
    try:
        main = outbox.stat()
        owner, group, mode = main.st_uid, main.st_gid, main.st_mode
    except OSError:
        owner, group, mode = os.geteuid(), os.getegid(), 0o600
    if found.st_uid not in (owner, 0) and not _may_write(found.st_uid, group, mode):
        raise _refused(
            outbox,
            f"{name} belongs to user {found.st_uid}, and the outbox to user {owner}",
            f"chown {owner} {shlex.quote(name)} if it was made by mistake, and remove it if it was "
            "planted",
        )
    if found.st_mode & ~mode & _OTHERS:
        raise _refused(
            outbox,
            f"{name} has mode {stat.S_IMODE(found.st_mode):04o}, which grants access to users "
            f"without access to the outbox (mode {stat.S_IMODE(mode):04o})",
            f"chmod {stat.S_IMODE(mode):o} {shlex.quote(name)}",
        )


def _refused(outbox: Path, what: str, remedy: str) -> OutboxError:
    return OutboxError(
        f"outbox {outbox} was not opened: {what}, so messages could be read or changed through "
        f"it; {remedy}, and keep the outbox in a directory that only its owner can write to"
    )


def _may_write(user: int, group: int, mode: int) -> bool:
    """Whether the mode of an outbox lets a user other than its owner write to it."""
    if mode & stat.S_IWOTH:
        return True
    if not mode & stat.S_IWGRP:
        return False
    try:
        record = pwd.getpwuid(user)
    except KeyError:
        return False
    return group in os.getgrouplist(record.pw_name, record.pw_gid)


def _is_private_group(group: int) -> bool:
    """Whether this user is the only member of a group, as distributions set it up by default."""
    try:
        user, record = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return (
        record.gr_gid == user.pw_gid
        and record.gr_name == user.pw_name
        and set(record.gr_mem) <= {user.pw_name}
    )


_LOG_MAGICS: Final = (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")
_FRAMES_AT: Final = 16
"""Offset of ``mxFrame``, the number of frames in the log, in a ``-shm`` (wal.c, WalIndexHdr)."""
_FRAMES_BYTES: Final = 4
_LOOKS_AT_LOG_MAX: Final = 5
_INDEX_BYTES: Final = 48
"""Length of the header of a ``-shm`` (wal.c, WalIndexHdr), which each commit changes."""
_CHANGES_AT: Final = 24
"""Offset of the file change counter in a database (fileformat2.html), big-endian."""
_CHANGES_BYTES: Final = 4
_READ_VERSION_AT: Final = 19
_OF_LOG: Final = b"\x02"
_ANY_LOCK: Final = re.compile(rb"POSIX")
_WRITE_LOCK: Final = re.compile(rb"POSIX .* WRITE .* 120 ")
"""Byte 120 of a ``-shm`` is that of the writer (walformat.html, WAL_WRITE_LOCK)."""
_RESERVED_LOCK: Final = re.compile(rb"POSIX .* WRITE .* 107374182[45] ")
"""SQLite's RESERVED_BYTE, which the writer of a database without a log locks; with PENDING_BYTE
before it if the database is locked for good (fileformat2.html, os_unix.c)."""


class Place:
    """The files that a connection has open, recorded right after it was opened."""

    def __init__(self, path: Path, *, is_logged: bool = False, is_writing: bool = False) -> None:
        self._path = path
        self._names = (str(path), f"{path}-wal", f"{path}-shm")
        self._inodes = self._now()
        self._files = tuple(zip(map(os.fsencode, self._names), self._inodes, strict=True))
        self._locked_fd = self._index_fd = -1
        self.is_unseen: bool = False  # whether the last `check` could not look at the path
        self._index = b""
        self._changes = 0
        self._take_stock(is_logged=is_logged, is_writing=is_writing)
        if is_logged and self._inodes[1] is None:
            raise self._lost("-wal")

    @property
    def file(self) -> Inode | None:
        """Identity of the database file."""
        return self._inodes[0]

    @property
    def is_overwritten(self) -> bool:
        """Whether other content was copied into the database, beside its old log."""
        return self.file in _OVERWRITTEN

    def check(self) -> None:
        """Compare the files at the path with the open ones, and the content with what was seen."""
        for name, inode in self._files:
            if look(name)[0] != inode and self._look_again(name) != inode:
                raise self._moved()
        self.is_unseen = False
        self.check_content()

    def check_before_commit(self) -> None:
        """Check before anything is written what would make its commit unsure."""
        if self.is_unseen:
            self.check()
        else:
            self.check_content()

    def _look_again(self, name: bytes) -> Inode | None:
        """Tell a file that is gone from one that this process may not look at."""
        try:
            found = os.lstat(name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.is_unseen = True
            raise OutboxDiskFailed(
                f"outbox {self._path} cannot be seen any more ({error.strerror}), so it is unknown "
                "whether it is still the file that is open; let this process look at its directory"
            ) from error
        return found.st_dev, found.st_ino

    def check_content(self) -> None:
        """Compare the database's change counter with the one seen last. Cheaper than `check`."""
        if self.is_overwritten:
            raise _overwritten(self._path)
        if self._inodes[1] is None:
            return  # without a log, SQLite itself asks for the counter before it reads
        seen = self._changes  # before the file is read: threads share this object
        changes = _changes(self._locked_fd)
        if changes is None or changes == seen or not self._is_ours(self._locked_fd):
            return
        if changes < seen:
            _OVERWRITTEN.add(self.file)
            with suppress(OSError):
                os.dup(self._locked_fd)  # it stays open: no other file gets this inode number
            raise _overwritten(self._path)
        self._changes = max(changes, self._changes)

    def note_index(self) -> None:
        """Note the header of the log's index, with which `has_new_index` compares."""
        self._index = _index(self._index_fd)

    def forget_index(self) -> None:
        """Have `has_new_index` be true until the next `note_index`."""
        self._index = b""

    def has_new_index(self) -> bool:
        """Whether any connection may have committed since `note_index`."""
        # SQLite decides by this comparison too whether to discard its page cache, under a lock, and
        # with a check of what it read. Here it is one system call, which is enough for polling.
        return not self._index or _index(self._index_fd) != self._index

    def _is_ours(self, fd: int) -> bool:
        """Whether a descriptor is of the database: the application may have closed SQLite's own."""
        try:
            found = os.fstat(fd)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self.file

    @property
    def is_locked(self) -> bool:
        """Whether SQLite still has its lock on the database; True if the system does not tell."""
        # Closing another descriptor of the file in this process drops it. A copy by `shutil` does.
        return self._locked_fd < 0 or _has_lock(self._locked_fd)

    def is_left_open(self, instead: Place) -> bool:
        """Whether this process still has one of these files open that is not in ``instead``."""
        files, gone = open_files(), set(self._inodes) - set(instead._inodes)
        # The number of a deleted log or index may belong to another file by now, such as the index
        # of another database of this process: only one without a name is the old one.
        return any(
            inode == self.file or _is_deleted(descriptor)
            for inode in gone
            if inode is not None
            for descriptor in files.get(inode, ())
        )

    def _now(self) -> tuple[Inode | None, ...]:
        return tuple(look(os.fsencode(name))[0] for name in self._names)

    def _take_stock(self, *, is_logged: bool, is_writing: bool) -> None:
        files = open_files()
        if not files:
            return
        used = self._inodes
        # An empty log that a connection does not use was left behind by a database of this name.
        if not is_logged and used[1] is not None and not look(os.fsencode(self._names[1]))[1]:
            used = used[0], None, None
        for name, inode in zip(self._names, used, strict=True):
            if inode is not None and inode not in files:
                raise self._not_open(name)
        _, log, index = used
        # Another connection of the process may have the files at the path open, and this one those
        # that were there before.
        if is_writing and index and not any(map(_has_write_lock, files[index])):
            raise self._not_open(self._names[2])
        if is_writing and not index and _is_written_instead(files, self.file or (0, 0)):
            raise self._not_open(self._names[0])
        if index is not None and not (log and _is_whole(files[log], files[index])):
            raise OutboxMoved(
                f"the write-ahead log of outbox {self._path} was deleted while it was in use, so "
                "nothing can be stored; stop every process that has the outbox open, and start "
                "them again"
            )
        own = files.get(self.file or (0, 0), ())
        self._locked_fd = next(filter(_has_lock, own), -1)
        self._index_fd = files[index][0] if index is not None else -1
        self._changes = _changes(self._locked_fd) or 0
        is_suspect = self.file in GATE.open_before and self._locked_fd < 0
        # Once the process that was forked has closed its connection, the index has no name.
        if is_suspect and (index or any(map(_is_logged, own))) and _locks_are_listed():
            raise forked(self._path, "was open when this process was forked")

    def _not_open(self, name: str) -> OutboxMoved:
        return OutboxMoved(
            f"outbox {self._path}: {name} is not the file that the connection has open, so "
            "nothing was stored; close every connection to the old file, and try again"
        )

    def _moved(self) -> OutboxMoved:
        now = self._now()
        file, *_ = now
        if file is None:
            what = "was deleted or moved"
        elif file != self.file:
            what = "was replaced by another file"
        else:
            return self._lost("-wal" if now[1] != self._inodes[1] else "-shm")
        return moved(self._path, what)

    def _lost(self, suffix: str) -> OutboxMoved:
        what = f"lost its {self._path.name}{suffix}, which was deleted, moved or replaced"
        return moved(self._path, what)


def _is_deleted(descriptor: int) -> bool:
    try:
        return os.fstat(descriptor).st_nlink == 0
    except OSError:  # closed by another thread meanwhile
        return False


def moved(path: Path, what: str) -> OutboxMoved:
    """Make the error to raise if the path of an outbox leads to other files than before."""
    return OutboxMoved(
        f"outbox {path} {what} while this process had it open: messages stored now would not be "
        "found by the next process. Find out what moved it, stop every process that uses it, and "
        "start them again"
    )


_OVERWRITTEN: Final[set[Inode | None]] = set()
"""Databases that were overwritten while this process had them open."""


def refuse_overwritten(path: Path, found: os.stat_result) -> None:
    """Refuse a file into which a backup was copied while this process had it open."""
    if (found.st_dev, found.st_ino) in _OVERWRITTEN:
        raise _overwritten(path)


def _overwritten(path: Path) -> OutboxMoved:
    return moved(path, "was overwritten, perhaps by a backup,")


class WritingConnection(sqlite3.Connection):
    """A connection to an outbox, with the files it has open."""

    place: Place  # compared with the path after each commit
    is_unsure = False  # the disk failed during the last commit; see `transactions`

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - those of `Connection`
        # First: what is forked from here on gets the parent's connection
        self.forks: Final = GATE.forks
        # For other writers' lock; without an end, but for a relay
        self.patience: Patience = Patience("")
        super().__init__(*args, **options)

    def __del__(self) -> None:
        """Warn of nothing, unlike the base since Python 3.13: its `Writer` closes or keeps it.

        Their order in a cycle, such as that of a framework's application, is not known.
        """

    @property
    def must_stay(self) -> bool:
        """Whether closing it, or opening another one, could lose or corrupt messages."""
        with suppress(OutboxMoved):  # it may have been overwritten since its last use
            self.place.check_content()
        return self.is_unsure or self.place.is_overwritten


def refuse_second_name(path: Path, found: os.stat_result) -> None:
    """Refuse a file that has a second name: each name would have its own log."""
    if found.st_nlink > 1:
        raise OutboxError(
            f"outbox {path} has {found.st_nlink} names (hard links); SQLite keeps a log beside "
            "each, so messages would be lost. Copy the file, and remove the other names "
            f"(find / -samefile {path})"
        )
    if mounts.is_mount_point(path):
        raise OutboxError(
            f"outbox {path} is mounted as a single file, so its log is not beside the original, "
            "and messages would be lost; mount the directory that holds it instead"
        )


@cache
def libc() -> CDLL | None:
    """The C library, if it has inotify(7), and perhaps statx(2): Python has no calls for them."""
    try:
        from ctypes import (  # noqa: PLC0415 - takes 3 ms; only processes with an outbox pay it
            CDLL,
            c_char_p,
            c_int,
            c_uint,
        )

        library = CDLL(None)
        library.inotify_init1.argtypes = (c_int,)
        library.inotify_add_watch.argtypes = (c_int, c_char_p, c_uint)
        # None for statx(2), which is called for each message: without argtypes, ctypes converts
        # ints and bytes itself, and takes a third less time.
    except (ImportError, OSError, AttributeError, MemoryError):
        # There is no ctypes; the system is not Linux; or memory for callbacks, which some versions
        # of ctypes ask for when they are imported, is forbidden (systemd: MemoryDenyWriteExecute).
        return None
    return library


_AT_FDCWD: Final = -100
_AT_SYMLINK_NOFOLLOW: Final = 0x100
_STATX_INO_AND_SIZE: Final = 0x100 | 0x200
_STATX: Final = Struct("=32xQQ88xII112x")
"""``stx_ino``, ``stx_size``, ``stx_dev_major`` and ``stx_dev_minor`` in a ``struct statx``."""


@cache
def _statx() -> tuple[Callable[..., int], Callable[[], Any]] | None:
    """Call statx(2), and make a buffer for its answer; None if there is no such call."""
    statx = getattr(libc(), "statx", None)
    if statx is None:
        return None
    from ctypes import c_char  # noqa: PLC0415 - loaded by `libc`

    return statx, c_char * _STATX.size


def look(name: bytes) -> tuple[Inode | None, int]:
    """Identity and length of the file or link at a path; None and 0 if there is none."""
    call = _statx()
    if call is not None:
        statx, new_buffer = call
        found = new_buffer()
        if not statx(_AT_FDCWD, name, _AT_SYMLINK_NOFOLLOW, _STATX_INO_AND_SIZE, found):
            inode, length, major, minor = _STATX.unpack(found)
            return (os.makedev(major, minor), inode), length
    try:  # there is no such call or no such file; perhaps the call is forbidden
        told = os.lstat(name)
    except OSError:
        return None, 0
    return (told.st_dev, told.st_ino), told.st_size


def _has_lock(fd: int, lock: re.Pattern[bytes] = _ANY_LOCK) -> bool:
    """Whether this process holds a POSIX lock through this descriptor, by ``fdinfo`` of proc(5)."""
    try:
        info_fd = os.open(f"/proc/self/fdinfo/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # it is closed, and its lock gone
        return False
    except OSError:  # no descriptor is free: the system does not tell
        return True
    try:
        return bool(lock.search(os.read(info_fd, 65_536)))
    finally:
        os.close(info_fd)


def _has_write_lock(index_fd: int) -> bool:
    """Whether a connection of this process writes to the log of this index, if it can be told."""
    # SQLite holds another lock on each index that it has open. Where none is listed, as on some
    # FUSE file systems and in some sandboxes, it cannot be told.
    return _has_lock(index_fd, _WRITE_LOCK) or not _has_lock(index_fd)


def _is_written_instead(files: dict[Inode, list[int]], database: Inode) -> bool:
    """Whether this process writes to other databases without a log on the device, not to this."""
    if any(_has_lock(fd, _RESERVED_LOCK) for fd in files.get(database, ())):
        return False
    # If any lock on the device is listed, that on this one would be, unless SQLite's VFS is one
    # with other locks: such a connection may be refused, too.
    return any(
        _has_lock(fd, _RESERVED_LOCK)
        for (device, _), descriptors in files.items()
        if device == database[0]
        for fd in descriptors
    )


def _changes(fd: int) -> int | None:
    """Read the file change counter of the database, without its log; None if that fails."""
    try:
        return int.from_bytes(os.pread(fd, _CHANGES_BYTES, _CHANGES_AT), "big")
    except OSError:  # the descriptor is -1 or closed, or the disk fails
        return None


def _is_logged(fd: int) -> bool:
    """Whether the header of a database says that it has a write-ahead log (fileformat2.html)."""
    try:
        return os.pread(fd, 1, _READ_VERSION_AT) == _OF_LOG
    except OSError:
        return False


def _index(fd: int) -> bytes:
    """Read the header of the log's index, on SQLite's own descriptor of it."""
    try:
        return os.pread(fd, _INDEX_BYTES, 0)
    except OSError:
        return b""  # the descriptor is -1, or closed


@cache
def _locks_are_listed() -> bool:
    """Whether ``fdinfo`` lists locks: in some sandboxes it exists without them."""
    try:
        with TemporaryFile() as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return _has_lock(file.fileno())
    except OSError:  # there is no directory to write to: it cannot be told
        return False


def _is_whole(log_fds: Sequence[int], index_fds: Sequence[int]) -> bool:
    """Whether the log has a header, if its index says that it holds frames."""
    # If a log is deleted while in use, the next connection creates an empty one. Frames appended to
    # that one are never found, because only the first frame of a log is written with a header.
    # Another process may truncate the log between the two reads, but hardly time after time.
    return any(_has_header(log_fds, index_fds) for _ in range(_LOOKS_AT_LOG_MAX))


def _has_header(log_fds: Sequence[int], index_fds: Sequence[int]) -> bool:
    """Look once. Several connections may have the files open, and other threads close some."""
    # `os.pread` on SQLite's own descriptors: closing others would drop SQLite's locks.
    frames = _read_each(index_fds, _FRAMES_BYTES, _FRAMES_AT)
    if not frames or not any(frames[0]):
        return True
    return any(magic in _LOG_MAGICS for magic in _read_each(log_fds, len(_LOG_MAGICS[0]), 0))


# A list: the end of a generator that is left unfinished would swallow the exit of a signal handler.
def _read_each(fds: Sequence[int], count: int, offset: int) -> list[bytes]:
    found = []
    for fd in fds:
        with suppress(OSError):
            found.append(os.pread(fd, count, offset))
    return found


RESCUED: Final = ".rescued-"
"""Suffix of a rescued copy, between the name of the outbox and the number of the relay's run."""


def rescued(
    connection: sqlite3.Connection, path: Path, run: int, error: OutboxMoved
) -> OutboxMoved:
    """Copy the open database beside the path; return the error to raise, with the copy's name."""
    copy = path.with_name(f"{path.name}{RESCUED}{run}")
    try:
        copy = _created(copy)  # a file that is created again counts its runs from 1
        try:
            # Outside a transaction only. The name as bytes: it need not be UTF-8.
            connection.execute("VACUUM INTO CAST(? AS TEXT)", (os.fsencode(copy),))
        except BaseException:
            copy.unlink()
            raise
    except (OSError, ValueError, sqlite3.Error) as failure:  # the directory may be gone
        return OutboxMoved(f"{error}. Its content could not be copied to {copy} ({failure})")
    return OutboxMoved(
        f"{error}. A copy of its content is {copy}: bring the messages back with `reliablepub "
        "outbox export` and `import`, which skips those that the outbox has; publish an encrypted "
        "copy with `reliablepub relay --drain`"
    )


def _created(first: Path) -> Path:
    """Create an empty file at a new path: the first one, or that with ``.2``, ``.3``, ..."""
    for number in count(1):
        path = first if number == 1 else first.with_name(f"{first.name}.{number}")
        with suppress(FileExistsError):
            # ``VACUUM INTO`` would give it a wider mode.
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            break
    return path
