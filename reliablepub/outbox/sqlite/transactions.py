"""One transaction, wholly or not at all, and what to do when the disk fails at its very end.

Knows: how a transaction begins and ends, and which errors leave its fate open. Must never know:
what is written in it.

When the disk fails during a commit, the frames of the transaction may be whole in the write-ahead
log, or in part, and in the page cache they may look written although the disk has refused them: the
kernel reports a failed write once, and takes the pages for clean. So neither reading them back nor
another sync proves anything. What does: writing all of it again. SQLite has not entered the failed
frames into its index of the log (that is the last thing a commit does), so nobody sees them, and
the next commit of any connection begins at their first byte. Every page of it is dirty once more,
and a sync that succeeds is then worth what it always is.

That holds while somebody has the index. A connection that finds the log without one rebuilds it
from the log, and takes complete frames for a transaction. So a connection is kept after such a
failure and not opened afresh, nor closed for a fork: it goes on with the same index. If the second
commit fails too, the fate stays open, and the caller is told so; the first later commit that
succeeds writes over what was left.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from reliablepub.errors import OutboxError, OutboxUnsure
from reliablepub.outbox.sqlite.failures import is_decided, outbox_error
from reliablepub.outbox.sqlite.location import WritingConnection

T = TypeVar("T")


@contextmanager
def transaction(connection: sqlite3.Connection, path: Path) -> Iterator[None]:
    """One transaction, wholly or not at all; takes the write lock at once.

    A transaction that begins by reading cannot wait for the lock later (SQLITE_BUSY_SNAPSHOT).

    Raises:
        OutboxUnsure: the commit itself failed on the disk; see `commit_with_retry`.
        OutboxError: nothing was changed.
    """
    committing = False
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield
        committing = True
        connection.execute("COMMIT")
        if isinstance(connection, WritingConnection):
            connection.is_unsure = False
    except BaseException as error:
        _roll_back(connection)
        if not isinstance(error, sqlite3.Error):
            raise
        if committing and not is_decided(path, error):
            if isinstance(connection, WritingConnection):
                connection.is_unsure = True
            raise OutboxUnsure(
                f"outbox {path}: the disk failed during a commit, so whether it is stored is not "
                f"known; look at the disk and the system's log, then whether it is there ({error})"
            ) from error
        raise outbox_error(path, error) from error


def commit_with_retry(
    connection: WritingConnection,
    path: Path,
    work: Callable[[], T],
    is_there: Callable[[], bool] = lambda: False,
) -> T:
    """A transaction that is written once more when the disk fails during its commit.

    What it returns is in the file that the next process opens under this path.

    Args:
        connection: the one that failed goes on; a new one could believe what is not on the disk.
        path: for the errors.
        work: what to write, from the beginning each time.
        is_there: whether the first try is visible after all, because another process had to
            rebuild the index of the log just then. It is not written a second time then; nor is it
            called stored.

    Raises:
        OutboxUnsure: the second commit failed too, or what failed is visible.
        OutboxMoved: the path does not lead to these files any more, or they were overwritten.
        OutboxError: nothing was changed.
    """
    connection.place.check_content()
    result = _written(connection, path, work, is_there)
    connection.place.check()
    return result


def _written(
    connection: WritingConnection, path: Path, work: Callable[[], T], is_there: Callable[[], bool]
) -> T:
    try:
        with transaction(connection, path):
            return work()
    except OutboxUnsure as error:
        unsure = error
    try:
        with transaction(connection, path):
            if is_there():
                raise unsure
            return work()
    except OutboxError as error:
        raise unsure from (None if error is unsure else error)


def _roll_back(connection: sqlite3.Connection) -> None:
    """End the transaction if it is still open: some errors have ended it already."""
    try:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    except sqlite3.Error:
        pass  # the error that brought us here says more
