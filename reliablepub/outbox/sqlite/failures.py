"""Maps errors of SQLite and of the file system to `OutboxError`, with advice for the operator.

Knows: SQLite's result codes, errors of the file system, disk quotas. Must never know: what the
caller was doing.

SQLite reports a write beyond a disk quota (``EDQUOT``) as a disk error, and the free blocks that
``statvfs`` reports ignore quotas. So `may_take` allocates the space in an unnamed file
(``O_TMPFILE``).
"""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from reliablepub.errors import (
    NotAnOutbox,
    OutboxDiskFailed,
    OutboxDiskFull,
    OutboxError,
    OutboxLocked,
    OutboxMoved,
    OutboxUnsure,
)

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a write for lack of space. A limit on file sizes (``EFBIG``) is not one of them: other,
shorter files may still grow."""

_CANTOPEN: Final = 14
_IOERR: Final = 10
_CORRUPT: Final = 11
_FULL: Final = 13
_IOERR_WRITE: Final = 10 | 3 << 8
_IOERR_SHMSIZE: Final = 10 | 19 << 8
_IOERR_SHMMAP: Final = 10 | 21 << 8
_READONLY_ROLLBACK: Final = 8 | 3 << 8
_READONLY_DBMOVED: Final = 8 | 4 << 8
_BUSY_SNAPSHOT: Final = 5 | 2 << 8
_PRIMARY_CODE: Final = 0xFF
_TRIED_BYTES: Final = 8 * 1024 * 1024
"""Bytes that are allocated to check a quota: few transactions write more."""
_BROKEN_SCHEMA: Final = b"malformed database schema"

_DECIDED: Final = frozenset({5, 6, 13, 19})
"""SQLITE_BUSY, LOCKED, FULL, CONSTRAINT: a commit that fails with one of these is rolled back."""


def may_take(folder: Path, size: int) -> bool:
    """Whether this user may write ``size`` more bytes in a directory; True if that is unknown."""
    if not hasattr(os, "O_TMPFILE"):
        return True
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return error.errno not in FULL
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        return error.errno not in FULL
    finally:
        os.close(fd)
    return True


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the database is damaged (SQLITE_CORRUPT)."""
    return _code(error) == _CORRUPT


def lacks_index(error: sqlite3.Error) -> bool:
    """Whether the disk is too full for the index of the log (``-shm``), which readers also need."""
    return getattr(error, "sqlite_errorcode", 0) == _IOERR_SHMSIZE


def is_unfinished(error: sqlite3.Error) -> bool:
    """Whether a connection that may write must first roll back another process's transaction.

    This happens only before the database has a write-ahead log: during the creation of the outbox,
    or in an application's file.
    """
    return getattr(error, "sqlite_errorcode", 0) == _READONLY_ROLLBACK


def is_decided(path: Path, error: sqlite3.Error) -> bool:
    """Whether a commit that failed with this error is known to be rolled back."""
    # After any other error (a failed write or sync), the transaction may be on disk.
    return _code(error) in _DECIDED or _is_over_quota(path, error) or _is_too_long(path, error)


def commit_unsure(path: Path, error: sqlite3.Error) -> OutboxUnsure:
    """The error for a commit that is not decided."""
    return OutboxUnsure(
        f"outbox {path}: the disk failed during a commit, so it is unknown whether the "
        "message is stored; check the disk and the system log, then the outbox "
        f"(SQLite: {error})"
    )


def _is_over_quota(path: Path, error: sqlite3.Error) -> bool:
    """Whether a write failed because a quota is used up, which SQLite reports as a disk error."""
    is_write = getattr(error, "sqlite_errorcode", 0) == _IOERR_WRITE
    return is_write and not may_take(path.parent, _TRIED_BYTES)


def _is_too_long(path: Path, error: sqlite3.Error) -> bool:
    """Whether a write failed because this process may not make files so long (``EFBIG``)."""
    if getattr(error, "sqlite_errorcode", 0) != _IOERR_WRITE:
        return False
    bytes_max, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    longest = 0
    for file in (path, Path(f"{path}-wal")):
        with suppress(OSError):
            longest = max(longest, file.stat().st_size)
    return bytes_max != resource.RLIM_INFINITY and longest + _TRIED_BYTES > bytes_max


_LOCKED: Final = (
    OutboxLocked,
    "stayed locked by another process for too long; nothing was stored; try again",
)
_OLDER: Final = (
    OutboxError,
    (
        "has changed since this connection began to read, so nothing was stored: close its "
        "cursors, or roll back and begin with BEGIN IMMEDIATE; then try again"
    ),
)
_REPLACED: Final = (
    OutboxMoved,
    (
        "was deleted, moved or replaced while this connection had it open, so nothing was stored; "
        "close the connection, and open the file that is there now"
    ),
)
_MEANING: Final[dict[int, tuple[type[OutboxError], str]]] = {
    5: _LOCKED,  # SQLITE_BUSY
    6: _LOCKED,  # SQLITE_LOCKED
    8: (  # SQLITE_READONLY
        OutboxError,
        "cannot be written; check its owner and mode, and those of its directory",
    ),
    _IOERR: (
        OutboxDiskFailed,
        (
            "cannot be read or written by the operating system: nothing was stored; check the disk "
            "and the system log"
        ),
    ),
    _CORRUPT: (
        OutboxError,
        (
            "is damaged, or the disk cannot read it (see the system log); stop every process that "
            "uses it, and copy the intact messages into a new outbox with `reliablepub outbox "
            "salvage`; but if a backup was put in its place, move the former file's -wal away "
            "instead"
        ),
    ),
    _FULL: (
        OutboxDiskFull,
        (
            "cannot grow, because the disk is full: nothing was stored, and messages accepted "
            "before are safe; free some space and try again"
        ),
    ),
    _CANTOPEN: (
        OutboxError,
        (
            "cannot be opened; check its mode and that of its directory, and whether the file "
            "system is mounted read-only"
        ),
    ),
    15: _LOCKED,  # SQLITE_PROTOCOL: other processes competed for the lock for seconds
    26: (NotAnOutbox, "is not a SQLite database; choose another path"),  # SQLITE_NOTADB
}

_TOO_LONG: Final = (
    OutboxDiskFull,
    (
        "cannot grow, because this process may not make longer files (ulimit -f, LimitFSIZE=): "
        "nothing was stored, and messages accepted before are safe; raise that limit"
    ),
)
_NO_SHARED_MEMORY: Final = (
    OutboxError,
    (
        "is on a file system without shared memory, which its log needs (a FUSE mount with "
        "direct_io has none): nothing was stored; use a disk of this machine or PostgreSQL"
    ),
)
_SHORT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
_DESCRIPTORS: Final = 4
"""Files that a connection opens: database, log, index, and a directory."""
_SHORTAGE: Final = (
    OutboxDiskFailed,
    (
        "cannot be opened, because no file descriptor is free: nothing was stored; close files or "
        "connections, or raise the limit (ulimit -n, LimitNOFILE=), and try again"
    ),
)


def _lacks_descriptors() -> bool:
    """Whether this process, or the system, has too many open files for another connection."""
    fds: list[int] = []
    try:
        while len(fds) < _DESCRIPTORS:
            fds.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno in _SHORT_OF_DESCRIPTORS
    finally:
        for fd in fds:
            os.close(fd)
    return False


def outbox_error(path: Path, error: sqlite3.Error) -> OutboxError:
    """Convert an error of SQLite to an `OutboxError`."""
    kind, meaning = _MEANING.get(_code(error), (OutboxError, "could not be used"))
    if lacks_index(error) or _is_over_quota(path, error):
        kind, meaning = _MEANING[_FULL]
    elif _is_too_long(path, error):
        kind, meaning = _TOO_LONG
    if getattr(error, "sqlite_errorcode", 0) == _IOERR_SHMMAP:
        kind, meaning = _NO_SHARED_MEMORY
    if _code(error) == _CANTOPEN and _lacks_descriptors():
        kind, meaning = _SHORTAGE
    if getattr(error, "sqlite_errorcode", 0) == _BUSY_SNAPSHOT:
        kind, meaning = _OLDER
    if getattr(error, "sqlite_errorcode", 0) == _READONLY_DBMOVED:
        kind, meaning = _REPLACED
    if is_unfinished(error):
        meaning = "holds an interrupted transaction; the next message or relay rolls it back first"
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    return kind(f"outbox {path} {meaning} (SQLite: {error}, {name})")


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Raise `OutboxError` for any error of SQLite in the block."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise_reported(path, error)
        raise


def raise_reported(path: Path, error: BaseException) -> None:
    """Raise `OutboxError` if this is an error of SQLite; otherwise return."""
    if isinstance(error, sqlite3.Error):
        raise outbox_error(path, error) from error
    # SQLite quotes a damaged schema in its error, and Python fails to decode the text as UTF-8.
    if isinstance(error, UnicodeDecodeError) and error.object.startswith(_BROKEN_SCHEMA):
        kind, meaning = _MEANING[_CORRUPT]
        raise kind(f"outbox {path} {meaning} (SQLite: {_BROKEN_SCHEMA.decode()})") from error


def os_error(path: Path, error: OSError) -> OutboxError:
    """Convert an error of the file system to an `OutboxError`."""
    if error.errno in {*FULL, errno.EFBIG}:
        return OutboxDiskFull(
            f"the disk is full under outbox {path} ({error.strerror}); free some space and "
            "try again"
        )
    if error.errno in _SHORT_OF_DESCRIPTORS:
        kind, meaning = _SHORTAGE
        return kind(f"outbox {path} {meaning} ({error.strerror})")
    remedy = ""
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        remedy = "; this user needs access to the file, and may need to write to its directory"
    return OutboxError(f"outbox {path} cannot be used: {error.strerror}{remedy}")


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & _PRIMARY_CODE
