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

_LISTED_MAX: Final = 100
_TRIED_BYTES: Final = 8 * 1024 * 1024
"""Bytes that are allocated to check a quota: few transactions write more."""
_BROKEN_SCHEMA: Final = b"malformed database schema"

_DECIDED: Final = frozenset(
    {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CONSTRAINT}
)
"""A commit that fails with one of these is rolled back."""


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
    return _code(error) == sqlite3.SQLITE_CORRUPT


def page_damage(connection: sqlite3.Connection, *, is_quick: bool = True) -> list[str]:
    """Return errors that SQLite reports about the pages of the file, at most 100."""
    # The quick check does not compare indexes with their tables.
    look = "quick_check" if is_quick else "integrity_check"
    try:
        lines = [line for (line,) in connection.execute(f"PRAGMA {look}({_LISTED_MAX:d})")]
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        return [str(error)]  # the damage made SQLite give up
    return [] if lines == ["ok"] else lines


def lacks_index(error: sqlite3.Error) -> bool:
    """Whether the disk is too full for the index of the log (``-shm``), which readers also need."""
    return _extended_code(error) == sqlite3.SQLITE_IOERR_SHMSIZE


def is_unfinished(error: sqlite3.Error) -> bool:
    """Whether a connection that may write must first roll back another process's transaction.

    This happens only before the database has a write-ahead log: during the creation of the outbox,
    or in an application's file.
    """
    return _extended_code(error) == sqlite3.SQLITE_READONLY_ROLLBACK


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
    is_write = _extended_code(error) == sqlite3.SQLITE_IOERR_WRITE
    return is_write and not may_take(path.parent, _TRIED_BYTES)


def _is_too_long(path: Path, error: sqlite3.Error) -> bool:
    """Whether a write failed because this process may not make files so long (``EFBIG``)."""
    if _extended_code(error) != sqlite3.SQLITE_IOERR_WRITE:
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
_FULL: Final = (
    OutboxDiskFull,
    (
        "cannot grow, because the disk is full: nothing was stored, and messages accepted "
        "before are safe; free some space and try again"
    ),
)
_MEANING: Final[dict[int, tuple[type[OutboxError], str]]] = {
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_BUSY_SNAPSHOT: (
        OutboxError,
        (
            "has changed since this connection began to read, so nothing was stored: close its "
            "cursors, or roll back and begin with BEGIN IMMEDIATE; then try again"
        ),
    ),
    sqlite3.SQLITE_LOCKED: _LOCKED,
    sqlite3.SQLITE_PROTOCOL: _LOCKED,  # other processes competed for the lock for seconds
    sqlite3.SQLITE_READONLY_DBMOVED: (
        OutboxMoved,
        (
            "was deleted, moved or replaced while this connection had it open, so nothing was "
            "stored; close the connection, and open the file that is there now"
        ),
    ),
    sqlite3.SQLITE_READONLY_ROLLBACK: (
        OutboxError,
        "holds an interrupted transaction; the next message or relay rolls it back first",
    ),
    sqlite3.SQLITE_READONLY: (
        OutboxError,
        "cannot be written; check its owner and mode, and those of its directory",
    ),
    sqlite3.SQLITE_IOERR_SHMSIZE: _FULL,
    sqlite3.SQLITE_IOERR_SHMMAP: (
        OutboxError,
        (
            "is on a file system without shared memory, which its log needs (a FUSE mount with "
            "direct_io has none): nothing was stored; use a disk of this machine or PostgreSQL"
        ),
    ),
    sqlite3.SQLITE_IOERR: (
        OutboxDiskFailed,
        (
            "cannot be read or written by the operating system: nothing was stored; check the disk "
            "and the system log"
        ),
    ),
    sqlite3.SQLITE_CORRUPT: (
        OutboxError,
        (
            "is damaged, or the disk cannot read it (see the system log); stop every process that "
            "uses it, and copy the intact messages into a new outbox with `reliablepub outbox "
            "salvage`; but if a backup was put in its place, move the former file's -wal away "
            "instead"
        ),
    ),
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_CANTOPEN: (
        OutboxError,
        (
            "cannot be opened; check its mode and that of its directory, and whether the file "
            "system is mounted read-only"
        ),
    ),
    sqlite3.SQLITE_NOTADB: (NotAnOutbox, "is not a SQLite database; choose another path"),
}

_TOO_LONG: Final = (
    OutboxDiskFull,
    (
        "cannot grow, because this process may not make longer files (ulimit -f, LimitFSIZE=): "
        "nothing was stored, and messages accepted before are safe; raise that limit"
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
    of_any_kind = _MEANING.get(_code(error), (OutboxError, "could not be used"))
    kind, meaning = _MEANING.get(_extended_code(error), of_any_kind)
    if _is_over_quota(path, error):
        kind, meaning = _FULL
    elif _is_too_long(path, error):
        kind, meaning = _TOO_LONG
    elif _code(error) == sqlite3.SQLITE_CANTOPEN and _lacks_descriptors():
        kind, meaning = _SHORTAGE
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
        kind, meaning = _MEANING[sqlite3.SQLITE_CORRUPT]
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


def _extended_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0)


def _code(error: sqlite3.Error) -> int:
    """Return the kind of an error, which its extended code specifies."""
    return _extended_code(error) & 0xFF
