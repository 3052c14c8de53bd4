"""What SQLite's errors mean for the outbox, in words a person can act on.

Knows: SQLite's result codes. Must never know: which statement failed, or what the caller was about to do.
"""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path
from typing import ClassVar, Final

from reliablepub.errors import NotAnOutbox, OutboxDiskFull, OutboxError

_BUSY, _LOCKED, _READONLY, _IOERR, _CORRUPT, _FULL, _CANTOPEN, _NOTADB = 5, 6, 8, 10, 11, 13, 14, 26
_PRIMARY_CODE: Final = 0xFF


class OutboxLocked(OutboxError):
    """Another process keeps the file locked for longer than we wait; the same call may succeed later."""

    retryable: ClassVar[bool] = True




def is_io_error(error: BaseException) -> bool:
    """Whether the operating system failed a read, a write or a sync: what is on disk is not known."""
    return isinstance(error, sqlite3.Error) and _code(error) == _IOERR


def outbox_error(path: Path, error: sqlite3.Error) -> OutboxError:
    """The error to raise for one of SQLite's."""
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    said = f"(SQLite: {error}, {name})"
    match _code(error):
        case 13:
            return OutboxDiskFull(
                f"the disk is full under outbox {path}: nothing of this was stored, what was accepted "
                f"before stays; free some space and try again {said}"
            )
        case 5 | 6:
            return OutboxLocked(
                f"outbox {path} is locked by another process for longer than we wait; nothing of this "
                f"was stored; try again {said}"
            )
        case 26:
            return NotAnOutbox(f"{path} is not a SQLite database; choose another path {said}")
        case 11:
            return OutboxError(
                f"outbox {path} is damaged; stop its publishers, copy the file with its -wal and "
                f"recover it with 'sqlite3 {path.name} .recover' {said}"
            )
        case 8:
            return OutboxError(f"outbox {path} cannot be written; look at its owner and mode {said}")
        case 14:
            return OutboxError(
                f"outbox {path} cannot be opened; look at the modes of it and its folder {said}"
            )
        case 10:
            return OutboxError(
                f"outbox {path}: the operating system could not read or write it; look at the disk "
                f"and the system's log {said}"
            )
    return OutboxError(f"outbox {path}: {error} {said}")


def os_error(path: Path, error: OSError) -> OutboxError:
    """The error to raise when the file or its folder cannot be used."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return OutboxDiskFull(f"the disk is full under outbox {path} ({error.strerror})")
    return OutboxError(f"outbox {path} cannot be used: {error.strerror}")


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & _PRIMARY_CODE
