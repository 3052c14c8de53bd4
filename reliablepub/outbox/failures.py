"""What SQLite's errors mean for the outbox, in words a person can act on.

Knows: SQLite's result codes. Must never know: what the caller was about to do.
"""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path
from typing import Final

from reliablepub.errors import NotAnOutbox, OutboxDiskFull, OutboxError, OutboxLocked

_IOERR: Final = 10
_PRIMARY_CODE: Final = 0xFF


def is_io_error(error: BaseException) -> bool:
    """Whether a read, a write or a sync failed: what is on disk is then not known."""
    return isinstance(error, sqlite3.Error) and _code(error) == _IOERR


_LOCKED = (
    OutboxLocked,
    "is locked by another process for longer than we wait; nothing of this was stored; try again",
)
_MEANING: Final[dict[int, tuple[type[OutboxError], str]]] = {
    5: _LOCKED,  # SQLITE_BUSY
    6: _LOCKED,  # SQLITE_LOCKED
    8: (OutboxError, "cannot be written; look at its owner and mode"),  # SQLITE_READONLY
    _IOERR: (
        OutboxError,
        "cannot be read or written by the operating system; look at the disk and the system's log",
    ),
    11: (  # SQLITE_CORRUPT
        OutboxError,
        (
            "is damaged; stop its publishers, copy it and its -wal file, and recover the copy "
            "with the .recover command of sqlite3"
        ),
    ),
    13: (  # SQLITE_FULL
        OutboxDiskFull,
        (
            "cannot grow, because the disk is full: nothing of this was stored, and what was "
            "accepted before stays; free some space and try again"
        ),
    ),
    14: (
        OutboxError,
        "cannot be opened; look at the modes of it and its folder",
    ),  # SQLITE_CANTOPEN
    26: (NotAnOutbox, "is not a SQLite database; choose another path"),  # SQLITE_NOTADB
}


def outbox_error(path: Path, error: sqlite3.Error) -> OutboxError:
    """The error to raise for one of SQLite's."""
    kind, meaning = _MEANING.get(_code(error), (OutboxError, "could not be used"))
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    return kind(f"outbox {path} {meaning} (SQLite: {error}, {name})")


def os_error(path: Path, error: OSError) -> OutboxError:
    """The error to raise when the file or its folder cannot be used."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return OutboxDiskFull(f"the disk is full under outbox {path} ({error.strerror})")
    return OutboxError(f"outbox {path} cannot be used: {error.strerror}")


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & _PRIMARY_CODE
