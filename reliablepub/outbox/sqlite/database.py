"""The outbox in a SQLite file, as processes other than its relay use it: `SqliteDatabase`.

Knows: which of this package's modules does what, and a connection of its own to write with. Must
never know: what a statement of an operator means.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from reliablepub.errors import OutboxDiskFull, OutboxError, OutboxMoved, OutboxUnsure
from reliablepub.outbox.database import (
    NO_VALUES,
    Cursor,
    LostCommits,
    Relaying,
    Session,
    Space,
    Standby,
    Values,
)
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import Entry, OpenLimits
from reliablepub.outbox.patience import Patience
from reliablepub.outbox.rows import MISTYPED, Unreadable
from reliablepub.outbox.sqlite.checkpoints import LongLog, checkpointing
from reliablepub.outbox.sqlite.connections import Writer, absolute, looking, reading
from reliablepub.outbox.sqlite.enqueue import Enqueuing
from reliablepub.outbox.sqlite.failures import os_error, page_damage
from reliablepub.outbox.sqlite.forks import GATE
from reliablepub.outbox.sqlite.location import folder_exposure
from reliablepub.outbox.sqlite.lock import RelayLock
from reliablepub.outbox.sqlite.space import (
    LOW_BYTES,
    MARGIN_BYTES,
    Ballast,
    cut_off,
    free_pages,
    give_space_back,
    has_space_to_give,
    make_room,
    pages,
)
from reliablepub.outbox.sqlite.sql import QUERIES, named_rows
from reliablepub.outbox.sqlite.status_file import relaying
from reliablepub.outbox.sqlite.store import SqliteStore, settle_left_in_flight
from reliablepub.outbox.sqlite.transactions import CallLock, noting_trouble, transaction_at_path
from reliablepub.outbox.sqlite.upgrade import upgrade

T = TypeVar("T")

_CUTTING_S: Final = 0.005
"""Seconds for which one step of `shrink` holds the write lock."""


class SqliteSession:
    """One transaction of a connection; `Session` documents the contract of each method."""

    glob: Final = "{column} GLOB :{column}"

    def __init__(self, connection: sqlite3.Connection, path: Path, ballast: Ballast) -> None:
        self._connection = connection
        self._path = path
        self._ballast = ballast

    def pattern(self, glob: str) -> str:
        """Return the pattern as it is."""
        return glob

    def run(self, name: str, values: Values = NO_VALUES) -> Cursor:
        """Run the statement of this name; a list becomes JSON."""
        if "chosen" in values:
            values = {**values, "chosen": json.dumps(values["chosen"])}
        return self._connection.execute(QUERIES[name], values)

    def run_each(self, name: str, rows: Sequence[Values]) -> None:
        """Run the statement of this name for each of these values."""
        self._connection.executemany(QUERIES[name], rows)

    def rows(self, name: str, values: Values = NO_VALUES) -> Iterator[dict[str, Any]]:
        """Run the query of this name, and yield its rows as dictionaries."""
        return self.select(QUERIES[name], values)

    def select(self, query: str, values: Values) -> Iterator[dict[str, Any]]:
        """Run a query that was put together, and yield its rows as dictionaries."""
        return named_rows(self._connection, query, values)

    def relays(self) -> list[Relaying]:
        """Return who holds the relay lock, and the contents of the status file."""
        return [relaying(self._path)]

    def shard(self, _id: int) -> int:
        """Return 0: a file is one shard."""
        return 0

    def settle_left_in_flight(self, now: float, _ids: Sequence[int]) -> None:
        """Record messages that an ended relay left in flight as uncertain."""
        settle_left_in_flight(self._connection, now)

    def is_own(self, _id: int) -> bool:
        """Return False: the ledger counts a message in the transaction that stores it."""
        return False

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Make changes to one row that are undone together, if the row cannot be changed."""
        self._connection.execute("SAVEPOINT reliablepub_attempt")
        try:
            yield
        except BaseException as error:
            with noting_trouble(error):
                if self._connection.in_transaction:  # SQLite may have ended it on a full disk
                    self._connection.execute("ROLLBACK TO reliablepub_attempt")
                    self._connection.execute("RELEASE reliablepub_attempt")
            # A flipped bit can change the type of a value, and the tables are STRICT.
            if isinstance(error, sqlite3.IntegrityError):
                raise Unreadable(f"{MISTYPED} (SQLite: {error})") from error
            raise
        self._connection.execute("RELEASE reliablepub_attempt")

    def check_room(self, size: int) -> None:
        """Check that the disk has room for messages of this size, and for the reserve."""
        self._ballast.check(self._connection, size)

    def space(self) -> Space:
        """Measure the file and its log."""
        log = _bytes(self._path.with_name(self._path.name + "-wal"))
        return Space(
            bytes_on_disk=_bytes(self._path) + log,
            log_bytes=log,
            bytes_unused=free_pages(self._connection) * self._page_bytes(),
            is_disk_full=self._ballast.spare_bytes(self._connection) < MARGIN_BYTES,
        )

    def damage(self) -> list[str]:
        """Return SQLite's complaints about the pages; indexes are not compared with tables."""
        return page_damage(self._connection)

    def cut(self) -> int:
        """Remove free pages from the file for a few milliseconds; return how many bytes."""
        before = pages(self._connection)
        cut_off(self._connection, _CUTTING_S)
        return (before - pages(self._connection)) * self._page_bytes()

    def rewrite(self) -> int:
        """Rewrite the file without its free pages, if they are many; return how many bytes.

        Not inside a transaction.
        """
        before = pages(self._connection)
        if has_space_to_give(self._connection):
            give_space_back(self._connection)
        return (before - pages(self._connection)) * self._page_bytes()

    def _page_bytes(self) -> int:
        (size,) = self._connection.execute("PRAGMA page_size").fetchone()
        return int(size)


class SqliteDatabase:
    """The outbox in a SQLite file; `Database` documents the contract of each method."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.file: Final = absolute(path)
        self.name: Final = os.fspath(path)
        self._ballast = Ballast(self.file)
        self._enqueuing = Enqueuing(self.file, self._ballast)
        self._writer = Writer(self.file, is_relay=False)  # opens the file when it is first used
        self._call_lock = CallLock()
        self._long_log = LongLog(self.file)

    def exists(self) -> bool:
        """Whether the file exists and holds an outbox."""
        try:
            self.file.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise os_error(self.file, error) from error
        with looking(self.file) as (_, has_outbox):
            return has_outbox

    def create(self, connection: sqlite3.Connection | None) -> None:
        """Add the outbox to the file, if it is not there."""
        if connection is not None:
            self._enqueuing.within(connection, lambda _: None)
        else:
            self._write(lambda _: None)

    def upgrade(self) -> list[str]:
        """Give the outbox the tables of this version, while no relay runs."""
        return upgrade(self.file)

    def open_store(
        self, *, keep_confirmed_s: float, keys: OutboxKeys | None, patience: Patience | None = None
    ) -> SqliteStore:
        """Take the relay lock, and open the file."""
        return SqliteStore(
            self.file, keep_confirmed_s=keep_confirmed_s, keys=keys, patience=patience
        )

    def standbys(self) -> list[Standby]:
        """Return none: all processes of a file run on this host."""
        return []

    def stand_by(self) -> None:
        """Do nothing: `standbys` lists none."""

    def enqueue(
        self,
        new: Sequence[Entry],
        *,
        keys: OutboxKeys | None,
        limits: OpenLimits,
        connection: sqlite3.Connection | None = None,
    ) -> None:
        """Store entries, on the application's connection or on a connection of this object."""
        insert = partial(self._enqueuing.insert, new=new, keys=keys, limits=limits)
        self._enqueue(insert, connection)

    def enqueue_once(
        self,
        entry: Entry,
        key: str,
        *,
        keys: OutboxKeys | None,
        limits: OpenLimits,
        connection: sqlite3.Connection | None = None,
    ) -> str:
        """Store an entry unless its key is known; return the ``message_id`` that has the key."""
        once = partial(self._enqueuing.insert_once, entry=entry, key=key, keys=keys, limits=limits)
        return self._enqueue(once, connection)

    def _enqueue(
        self, insert: Callable[[sqlite3.Cursor], T], connection: sqlite3.Connection | None
    ) -> T:
        if connection is not None:
            return self._enqueuing.within(connection, insert)
        return self._write(lambda own: insert(own.cursor()))

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Open the file read-only, in one transaction."""
        with reading(self.file) as connection:
            yield self._session(connection)

    def write(self, work: Callable[[Session], T]) -> T:
        """Run ``work`` in one transaction on this object's own connection.

        If it does not fit on a full disk, and no relay runs, it is run again with the ballast.
        """

        def run(own: sqlite3.Connection) -> T:
            return work(self._session(own))

        try:
            return self._write(run, around=self._sparing_a_full_disk)
        except OutboxDiskFull:
            relay_lock = RelayLock.borrow(self.file)
            if relay_lock is None:
                raise
        try:
            return self._write(run, around=self._with_ballast)
        finally:
            relay_lock.release()

    def within(self, connection: sqlite3.Connection, work: Callable[[Session], T]) -> T:
        """Run ``work`` through the application's connection, under the write lock."""
        return self._enqueuing.within(
            connection,
            lambda cursor: work(self._session(cursor.connection)),
            adds_outbox=False,
        )

    def check_texts(self, values: Values) -> None:
        """Accept any text."""

    def exposure(self) -> str:
        """Say which other users can write to the directory."""
        return folder_exposure(self.file.parent) if self.file.parent.is_dir() else ""

    def lost_commits(self) -> list[LostCommits]:
        """Return nothing: a file does not fail over."""
        return []

    def passed_over(self) -> list[int]:
        """Return nothing: the relay itself looks for such messages."""
        return []

    def shrink(self) -> Iterator[Callable[[Session], int]]:
        """Yield steps until no page is free, or the file cannot be shortened."""
        with GATE.use(), self._call_lock.lock, self._writer as connection:
            rewritten = self._session(connection).rewrite()
        if rewritten:  # as a step of its own, so that its bytes are counted
            yield lambda _session: rewritten
        cut = 1

        def step(session: Session) -> int:
            nonlocal cut
            assert isinstance(session, SqliteSession)
            cut = session.cut()
            return cut

        while cut > 0:
            yield step

    def close(self) -> None:
        """Close the file if it is open."""
        with GATE.use(), self._call_lock.lock:
            self._writer.close()

    def _session(self, connection: sqlite3.Connection) -> SqliteSession:
        return SqliteSession(connection, self.file, self._ballast)

    @contextmanager
    def _sparing_a_full_disk(self, connection: sqlite3.Connection) -> Iterator[None]:
        """On a full disk, overwrite no deleted row, and checkpoint if no relay runs."""
        is_full = self._ballast.spare_bytes(connection) < LOW_BYTES
        connection.execute(f"PRAGMA secure_delete = {'FAST' if is_full else 'ON'}")
        relay_lock = RelayLock.borrow(self.file) if is_full else None
        if relay_lock is None:
            with self._long_log.behind_commit(connection):
                yield
            return
        try:
            with checkpointing(connection):
                yield
        finally:
            relay_lock.release()

    @contextmanager
    def _with_ballast(self, connection: sqlite3.Connection) -> Iterator[None]:
        """Release the ballast for a commit, and checkpoint behind it.

        Only for the holder of the relay lock.
        """
        try:
            make_room(connection, self.file, self._ballast, release=True)
            with checkpointing(connection):
                yield
        finally:
            with suppress(sqlite3.Error):
                self._ballast.restore_within(self._ballast.spare_bytes(connection))

    def _write(
        self,
        work: Callable[[sqlite3.Connection], T],
        around: Callable[[sqlite3.Connection], AbstractContextManager[None]] | None = None,
    ) -> T:
        """Run a transaction on this object's own connection, one thread at a time."""
        around = around or self._long_log.behind_commit

        def commit() -> T:
            try:
                with self._writer:
                    connection = self._writer.renewed()
                    with around(connection), transaction_at_path(connection, self.file):
                        return work(connection)
            except OutboxMoved:
                self._writer.leave()
                raise
            except OutboxError as error:
                if not error.retryable and not isinstance(error, OutboxUnsure):
                    self._writer.close()  # the next use may find another file at the path
                raise

        with GATE.use():  # gate first: then no fork happens while a thread has its turn
            return self._call_lock.run(self.file, commit)


def _bytes(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
