"""When the write-ahead log is moved into the database, and by whom.

Knows: the log's size, and SQLite's automatic checkpoint. Must never know: what is written.

SQLite before 3.51.3 can corrupt a database when a checkpoint begins on a log that is moved already,
and another connection commits at that very moment: the commit begins the log afresh, and the
checkpoint, which still has the old length in mind, notes frames as moved that are not (see
https://sqlite.org/wal.html#walresetbug). Ours cannot be that checkpoint, for two reasons together:

- Only the holder of the relay lock checkpoints; who only enqueues has to borrow it for that moment.
- It has SQLite make a checkpoint right behind a commit of its own, or asks for one while the
  database is shorter than its header says. In both cases the log holds frames that nobody has
  moved, since nobody else moves any. As long as that is so, no commit can begin it afresh; and when
  the checkpoint has moved them, it is over.

The last connection to close checkpoints too, but under an exclusive lock on the database.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from reliablepub.outbox.sqlite.failures import reported
from reliablepub.outbox.sqlite.lock import RelayLock

CHECKPOINT_BYTES: Final = 4 * 1024 * 1024
"""Larger ones were not measurably faster, and `ballast` must outweigh one checkpoint."""
LOG_BYTES_KEPT: Final = 8 * 1024 * 1024
"""What a log that has grown larger is cut back to when it begins afresh."""
LOG_BYTES_LONG: Final = 16 * 1024 * 1024
"""Where no relay shortens the log, whoever enqueues does from here on."""


def begin(connection: sqlite3.Connection, *, is_relay: bool) -> None:
    """Leave the log to the relay: it checkpoints behind each commit that leaves much there."""
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    _set_pages(connection, CHECKPOINT_BYTES // page_bytes if is_relay else 0)


@contextmanager
def behind_next_commit(connection: sqlite3.Connection) -> Iterator[None]:
    """Checkpoint behind the commits in here. If that fails, the log stays as it is.

    Only for who has the relay lock.
    """
    (before,) = connection.execute("PRAGMA wal_autocheckpoint").fetchone()
    _set_pages(connection, 1)
    try:
        yield
    finally:
        _set_pages(connection, before)


@contextmanager
def behind_commit_if_long(connection: sqlite3.Connection, path: Path) -> Iterator[None]:
    """The same for who only enqueues: if the log is long, and no relay is there to shorten it.

    Nor may the log owe the database more than a full disk could give it (see `ballast`).
    """
    log_bytes = _log_bytes(path)
    with reported(path):
        is_long = log_bytes >= LOG_BYTES_LONG or (
            log_bytes >= CHECKPOINT_BYTES and owed_bytes(connection, path) >= CHECKPOINT_BYTES
        )
    relay_lock = RelayLock.borrow(path) if is_long else None
    if relay_lock is None:
        yield
        return
    try:
        with behind_next_commit(connection):
            yield
    finally:
        relay_lock.release()


def owed_bytes(connection: sqlite3.Connection | sqlite3.Cursor, path: Path) -> int:
    """Bytes by which the database grows when the log is moved into it.

    Raises:
        sqlite3.Error: it cannot be read.
    """
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    try:
        return max(0, int(pages * page_bytes) - path.stat().st_size)
    except FileNotFoundError:
        return 0


def move_what_is_owed(connection: sqlite3.Connection, path: Path) -> int:
    """Checkpoint without a commit, which would make the log longer; only with the relay lock.

    Returns:
        what is still owed, because a reader needs the log, or the disk is too full.

    Raises:
        sqlite3.Error: the database cannot be read.
    """
    if owed_bytes(connection, path):
        with suppress(sqlite3.OperationalError):  # the disk is full: then as much is owed as before
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    return owed_bytes(connection, path)


def _set_pages(connection: sqlite3.Connection, pages: int) -> None:
    """Checkpoint behind each commit that leaves so many pages in the log; 0 for never."""
    connection.execute(f"PRAGMA wal_autocheckpoint = {pages:d}")


def _log_bytes(path: Path) -> int:
    try:
        return path.with_name(path.name + "-wal").stat().st_size
    except FileNotFoundError:
        return 0
