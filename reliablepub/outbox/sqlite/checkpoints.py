"""Checkpoints: when the write-ahead log is moved into the database, and by which process.

Knows: the log's size, and SQLite's automatic checkpoint. Must never know: what is written.

SQLite before 3.51.3 can corrupt a database when a checkpoint begins on a log that is already
checkpointed, and another connection commits at the same moment. The commit resets the log, and the
checkpoint, which uses the old length, records frames as moved that are not
(https://sqlite.org/wal.html#walresetbug). Two rules together exclude that:

- Only the holder of the relay lock checkpoints. A process that only enqueues borrows the lock.
- A checkpoint follows a commit of its own connection, or is made while the database is shorter or
  longer than its header says. In both cases the log holds frames that are not moved yet, because no
  other process moves any. Until they are moved, no commit can reset the log, and the checkpoint
  ends when it has moved them.

The last connection to close also checkpoints, under an exclusive lock on the database.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from reliablepub.errors import OutboxError
from reliablepub.outbox.sqlite.failures import reported
from reliablepub.outbox.sqlite.location import look
from reliablepub.outbox.sqlite.lock import RelayLock
from reliablepub.outbox.sqlite.sql import QUERIES
from reliablepub.outbox.sqlite.transactions import transaction, waiting_at_most

CHECKPOINT_BYTES: Final = 4 * 1024 * 1024
"""Size of the log at which the relay checkpoints. Larger values were not measurably faster, and
the ballast (`BALLAST_BYTES` in `space`) must be larger than one checkpoint."""
LOG_BYTES_KEPT: Final = 8 * 1024 * 1024
"""Size to which a longer log is truncated when it is reset."""
LOG_BYTES_LONG: Final = 9 * 1024 * 1024
"""Size of the log at which others than a committing relay checkpoint: a process that enqueues while
no relay runs, or a relay that has nothing to commit while others enqueue. Slightly more than is
kept: extending the log makes a commit up to twice as slow as overwriting it, because the file
system has to record the new length as well."""
_RESTART_S: Final = 0.25
"""The least seconds between two tries to restart the log: an open reader can prevent it for long.
"""


def begin(connection: sqlite3.Connection, *, is_relay: bool) -> None:
    """Turn on automatic checkpoints for the relay, and off for any other connection."""
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    _set_pages(connection, CHECKPOINT_BYTES // page_bytes if is_relay else 0)


@contextmanager
def checkpointing(connection: sqlite3.Connection) -> Iterator[None]:
    """Checkpoint after each commit in the block. If a checkpoint fails, the log stays as it is.

    Only for the holder of the relay lock.
    """
    (before,) = connection.execute("PRAGMA wal_autocheckpoint").fetchone()
    _set_pages(connection, 1)
    try:
        yield
    finally:
        _set_pages(connection, before)


def write_a_page(connection: sqlite3.Connection) -> None:
    """Have the commit of this transaction write, and so checkpoint, although no value changes."""
    for by in (1, -1):  # SQLite writes no page if a statement sets the value that it has
        connection.execute(QUERIES["count_up"], {"by": by})


class LongLog:
    """A log that processes which do not checkpoint have made long.

    They enqueue while no relay runs, or beside one that commits nothing, because it cannot reach
    the broker for instance.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next_try_at = 0.0

    @contextmanager
    def behind_commit(self, connection: sqlite3.Connection) -> Iterator[None]:
        """Checkpoint after each commit in the block, if the log is long and no relay runs.

        For processes that only enqueue.
        """
        path = self._path
        log_bytes = _log_bytes(path)
        with reported(path):
            # The log must not owe the database more than a full disk can provide (see `space`).
            is_long = log_bytes >= LOG_BYTES_LONG or (
                log_bytes >= CHECKPOINT_BYTES and owed_bytes(connection, path) >= CHECKPOINT_BYTES
            )
        is_very_long = log_bytes >= 2 * LOG_BYTES_LONG
        may_try = is_long and not (is_very_long and time.monotonic() < self._next_try_at)
        relay_lock = RelayLock.borrow(path) if may_try else None
        if relay_lock is None:
            yield
            return
        try:
            # The first lets others write meanwhile. It is enough, unless they do so all the time.
            if not is_very_long:
                with checkpointing(connection):
                    yield
            else:
                yield
                # The commit of the block may have written nothing. If this commit fails, that of
                # the block still stands; nobody waits for the lock.
                with suppress(OutboxError, sqlite3.Error), waiting_at_most(connection, 0):
                    if not _restart(connection, path, lambda: None):
                        self._next_try_at = time.monotonic() + _RESTART_S
        finally:
            relay_lock.release()

    def restart(self, connection: sqlite3.Connection, check: Callable[[], object]) -> None:
        """Move a long log into the database, so that the next writer begins it anew.

        Only for the holder of the relay lock, which ``check`` makes sure of under the write lock.
        """
        now = time.monotonic()
        if now < self._next_try_at or _log_bytes(self._path) < LOG_BYTES_LONG:
            return
        self._next_try_at = now + _RESTART_S
        with suppress(OutboxError, sqlite3.OperationalError):
            _restart(connection, self._path, check)


def _restart(connection: sqlite3.Connection, path: Path, check: Callable[[], object]) -> bool:
    """Commit, and checkpoint under the write lock; return whether the whole log was moved."""
    is_moved = False
    # An automatic checkpoint lets others write meanwhile. Where they write all the time, it never
    # reaches the end of the log, and the log is never begun anew. It must not run before the one
    # below, which would then begin on a log that is already checkpointed.
    (pages,) = connection.execute("PRAGMA wal_autocheckpoint").fetchone()
    _set_pages(connection, 0)
    try:
        with transaction(connection, path):
            check()
            write_a_page(connection)  # so the log holds frames that are not moved yet
        # What was committed stays so if this fails, as beside a reader of an older state. No
        # process can write while SQLite waits.
        with suppress(sqlite3.OperationalError), waiting_at_most(connection, 0):
            is_moved = _checkpoint(connection, "FULL")
    finally:
        _set_pages(connection, pages)
    return is_moved


def owed_bytes(connection: sqlite3.Connection | sqlite3.Cursor, path: Path) -> int:
    """Return the bytes by which a checkpoint makes the database file grow."""
    return max(0, _bytes_to_come(connection, path))


def _bytes_to_come(connection: sqlite3.Connection | sqlite3.Cursor, path: Path) -> int:
    """Return the bytes that the file will have more than now; below 0 if it will be shorter."""
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    try:
        return int(pages * page_bytes) - path.stat().st_size
    except OSError:  # it is gone, or cannot be seen: the commit reports that
        return 0


def move_what_is_owed(connection: sqlite3.Connection, path: Path) -> int:
    """Checkpoint without a commit, also to shorten the file; return the bytes still owed.

    Only for the holder of the relay lock. A commit would make the log longer.
    """
    if _bytes_to_come(connection, path):
        with suppress(sqlite3.OperationalError):  # the disk is full: as much is owed as before
            _checkpoint(connection, "PASSIVE")
    return owed_bytes(connection, path)  # also of a log that a reader needs


def _checkpoint(connection: sqlite3.Connection, mode: str) -> bool:
    """Move the log into the database; return whether nothing was in the way."""
    (is_busy, *_) = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    return not is_busy


def _log_bytes(path: Path) -> int:
    _, size = look(os.fsencode(path) + b"-wal")
    return size


def _set_pages(connection: sqlite3.Connection, pages: int) -> None:
    """Checkpoint after each commit that leaves at least ``pages`` in the log; 0 for never."""
    connection.execute(f"PRAGMA wal_autocheckpoint = {pages:d}")
