"""Atomic transactions, and what is known when the disk fails during a commit.

Knows: who may make a transaction, how it begins and ends, and which errors leave its outcome
unknown. Must never know: what is written in it.

A disk that fails during a commit leaves some or all frames of the transaction in the write-ahead
log. The kernel reports a failed write once and then treats the pages as clean. So the frames may
be in the page cache and not on the disk, and neither reading them back nor another sync proves
that they are stored: `OutboxUnsure`.

SQLite enters frames into the index of the log (``-shm``) in the last step of a commit. The failed
frames are not in the index, so no reader sees them, and the next commit of any connection writes
over them from their first byte. This depends on the index: a connection that finds a log without
one rebuilds it from the log, and accepts complete frames as a committed transaction. So the
connection is kept open after such a failure, and is not closed for a fork, until a commit succeeds.

A signal handler may fork within a call, and return in the child as well. The connection, its
transaction and locks are the parent's: the child begins none, and ends it neither way, since a
commit would overwrite what others have committed meanwhile, and a rollback changes the index, which
all share.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

from reliablepub.errors import OutboxDiskFailed, OutboxError, OutboxForked, OutboxUnsure
from reliablepub.outbox.sqlite.failures import commit_unsure, is_decided, outbox_error
from reliablepub.outbox.sqlite.forks import GATE, forked
from reliablepub.outbox.sqlite.location import WritingConnection

T = TypeVar("T")

_POLL_MIN_S: Final = 0.000_2
_POLL_MAX_S: Final = 0.001
_POLLS_PER_WAIT: Final = 20
"""Between two tries a writer sleeps for this part of the time it has waited, within the limits. A
try takes 4 µs. The upper limit is low so that a writer which has waited long still gets its turn
beside newer ones."""


@contextmanager
def noting_trouble(error: BaseException) -> Iterator[None]:
    """Clean up after an error, which what goes wrong in the block does not replace."""
    try:
        yield
    except sqlite3.Error as trouble:  # a signal handler may have closed the connection
        error.add_note(f"the outbox could not clean up: {trouble}")


def must_have_changed(cursor: sqlite3.Cursor, count: int = 1) -> None:
    """Check that a statement has changed as many rows as it was given."""
    if cursor.rowcount != count:
        raise OutboxError(
            "nothing was stored, because a trigger that another program has put on a table of the "
            "outbox keeps rows out (RAISE(IGNORE)); drop that trigger: SELECT name FROM "
            "sqlite_schema WHERE type = 'trigger' AND tbl_name LIKE 'reliablepub_%'"
        )


class CallLock:
    """Lets one call at a time use a connection, in each process.

    Two calls would share one transaction, and a rollback of one would undo the message of the
    other.
    """

    def __init__(self) -> None:
        self._locks: dict[int, threading.RLock] = {}
        self._taken_by = 0

    @property
    def lock(self) -> threading.RLock:
        """That of this process: a thread of the parent may have held the parent's at a fork."""
        pid = os.getpid()
        # Two threads in their first calls get the same one: `setdefault` is atomic.
        return self._locks.get(pid) or self._locks.setdefault(pid, threading.RLock())

    def run(self, path: Path, call: Callable[[], T]) -> T:
        """Run a call as soon as no other thread runs one."""
        with self.lock:
            if self._taken_by == (pid := os.getpid()):
                raise OutboxError(
                    f"outbox {path} was called by a signal handler that has interrupted a call on "
                    "it in the same thread; nothing was stored: call it when the handler has "
                    "returned"
                )
            self._taken_by = pid
            try:
                return call()
            finally:
                self._taken_by = 0


@contextmanager
def waiting_at_most(connection: sqlite3.Connection, seconds: float) -> Iterator[None]:
    """Wait for a lock at most so long in the block."""
    (timeout_ms,) = connection.execute("PRAGMA busy_timeout").fetchone()
    connection.execute(f"PRAGMA busy_timeout = {seconds * 1_000:.0f}")
    try:
        yield
    finally:
        connection.execute(f"PRAGMA busy_timeout = {timeout_ms:d}")


def begin_immediate(connection: sqlite3.Connection, path: Path) -> None:
    """Begin a transaction with the write lock. Wait for it as long as the connection's timeout."""
    forks = _forks_before(connection)
    (timeout_ms,) = connection.execute("PRAGMA busy_timeout").fetchone()
    begun = time.monotonic()
    patience = connection.patience if isinstance(connection, WritingConnection) else None
    try:
        # SQLite's own wait sleeps 1, 2, 5, 10, and up to 100 ms between its tries, while another
        # process needs the lock for one commit: it misses many moments in which the lock is free.
        connection.execute("PRAGMA busy_timeout = 0")
        while True:
            if GATE.forks != forks:  # nothing is called from here on, so no signal handler runs
                raise _forked_within(path)
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                waited_s = time.monotonic() - begun
                left_s = timeout_ms / 1_000 - waited_s
                if patience is not None:
                    left_s = min(left_s, patience.left_s)
                _wait_for_lock(error, waited_s, left_s)
            else:
                return
    finally:
        if patience is not None:
            patience.lock_wait_s += time.monotonic() - begun
        with suppress(sqlite3.Error):  # a signal handler has closed the connection
            connection.execute(f"PRAGMA busy_timeout = {timeout_ms:d}")


def _wait_for_lock(error: sqlite3.OperationalError, waited_s: float, left_s: float) -> None:
    """Sleep if a writer holds the lock; raise the error if not, or if no time is left."""
    code = error.sqlite_errorcode
    # A wait does not help a connection that reads an older state.
    is_held = code & 0xFF == sqlite3.SQLITE_BUSY and code != sqlite3.SQLITE_BUSY_SNAPSHOT
    if not is_held or left_s <= 0:
        raise error
    wait_s = min(max(waited_s / _POLLS_PER_WAIT, _POLL_MIN_S), _POLL_MAX_S)
    time.sleep(min(wait_s, left_s))


def _forks_before(connection: sqlite3.Connection) -> int:
    """Return `Gate.forks` when the connection was opened; of an application's, what it is now."""
    return connection.forks if isinstance(connection, WritingConnection) else GATE.forks


def _forked_within(path: Path) -> OutboxForked:
    return forked(path, "was in use by this call when a signal handler forked")


@contextmanager
def transaction(connection: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Run the block in one transaction: committed at its end, rolled back on any exception.

    When it raises, nothing was changed, except perhaps with `OutboxUnsure`.
    """
    committing = False
    forks = _forks_before(connection)
    own = connection if isinstance(connection, WritingConnection) else None
    try:
        # The write lock is taken now: a transaction that begins by reading cannot wait for it
        # later (SQLITE_BUSY_SNAPSHOT).
        begin_immediate(connection, path)
        yield
        committing = True
        if GATE.forks != forks:  # nothing is called from here on, so no signal handler runs
            raise _forked_within(path)  # noqa: TRY301 - a function would be called
        connection.execute("COMMIT")
        if own is not None:
            own.is_unsure = False
    except BaseException as error:
        if GATE.forks == forks:
            roll_back(connection)
        if not isinstance(error, sqlite3.Error):
            raise
        if committing and not is_decided(path, error):
            if own is not None:
                own.is_unsure = True
            raise commit_unsure(path, error) from error
        raise outbox_error(path, error) from error


@contextmanager
def transaction_at_path(connection: WritingConnection, path: Path) -> Iterator[None]:
    """Run the block in a transaction of the file that the next process opens under this path.

    When it raises, nothing was changed, except perhaps with `OutboxUnsure` or `OutboxMoved`.
    """
    connection.place.check_before_commit()
    with transaction(connection, path):
        yield
    try:
        connection.place.check()
    except OutboxDiskFailed as error:
        raise committed_unseen(error) from error


def committed_unseen(error: OutboxError) -> OutboxUnsure:
    """The error for a commit that may not have been made in the file at the path."""
    return OutboxUnsure(f"{error}; the message may be stored")


def roll_back(connection: sqlite3.Connection) -> None:
    """Roll back the transaction if it is still open: SQLite ends it itself after some errors."""
    try:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    except sqlite3.Error:
        pass  # the error that caused the rollback says more
