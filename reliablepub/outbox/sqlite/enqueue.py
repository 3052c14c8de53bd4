"""Stores messages, also within a transaction of the application.

Knows: the caller's deduplication keys, limits, the row and the ledger. Must never know: the relay,
or more of the caller's connection than SQLite tells.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar

from reliablepub.errors import ConfigurationError, OutboxDiskFailed, OutboxMoved
from reliablepub.outbox.database import KEYS_KEPT_S, forget_keys, unfit_connection
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import Entry, OpenLimits, id_of, size_of
from reliablepub.outbox.rows import divided, plain_row_of, row_of
from reliablepub.outbox.sqlite.connections import (
    VERSION,
    add_outbox,
    check_file,
    check_version,
    lacks_outbox,
    ledger_of,
)
from reliablepub.outbox.sqlite.failures import outbox_error, raise_reported
from reliablepub.outbox.sqlite.forks import GATE
from reliablepub.outbox.sqlite.location import OF_SQLITE, Place, check_side_files
from reliablepub.outbox.sqlite.space import Ballast
from reliablepub.outbox.sqlite.sql import QUERIES, of_rows
from reliablepub.outbox.sqlite.transactions import (
    CallLock,
    begin_immediate,
    committed_unseen,
    must_have_changed,
    noting_trouble,
    transaction,
)

LOGGER: Final = logging.getLogger("reliablepub.outbox")
_ENDED: Final = "SQLite has rolled back your whole transaction: start it again"
_SYNCHRONOUS_FULL: Final = 2
KEYS_LOOKED_AT: Final = 4
"""Overdue keys that are forgotten whenever a key is stored, so that this takes no longer."""
_UNSAFE_JOURNALS: Final = ("off", "memory")
T = TypeVar("T")


class _Mark:
    """Exists as long as the connection that it is put on is open."""

    def __init__(self) -> None:
        # By process, path of the outbox, and the name by which the connection knows the file.
        self.places: dict[tuple[int, Path, str], Place] = {}
        self.call_lock = CallLock()  # lets one call at a time use the connection

    def __call__(self) -> None:
        """Do nothing: a connection owns functions, and these alone can be referred to weakly."""


_MARKS: Final = weakref.WeakValueDictionary[int, _Mark]()
"""Marks by the ``id`` of their connection."""
_MARKING: Final = CallLock()


def _mark_of(connection: sqlite3.Connection) -> _Mark:
    with _MARKING.lock:  # two threads in their first calls get the same mark
        mark = _MARKS.get(id(connection))
        if mark is None:
            mark = _MARKS[id(connection)] = _Mark()
            sqlite3.Connection.create_function(connection, "reliablepub_mark", 0, mark)
    return mark


@dataclass(slots=True)
class Enqueuing:
    """Stores messages in one outbox."""

    path: Path
    ballast: Ballast
    _has_warned: bool = field(default=False, init=False)
    """Whether the pragmas of a caller's connection were looked at."""

    def within(
        self,
        connection: sqlite3.Connection,
        work: Callable[[sqlite3.Cursor], T],  # called under the write lock
        *,
        adds_outbox: bool = True,  # if the database holds none
    ) -> T:
        """Run ``work`` through the caller's connection, in its open transaction if there is one.

        When this raises, but for `OutboxUnsure` and `OutboxMoved`, nothing was changed. A
        transaction that the caller had open is still open, unless SQLite has ended it. No other one
        is left open.
        """
        if not isinstance(connection, sqlite3.Connection):
            needed = f"outbox {self.path} needs a sqlite3.Connection to its file"
            raise unfit_connection(connection, needed)
        use = GATE.begin_use()
        try:
            mark = _mark_of(connection)

            def call() -> T:
                with _borrowed(connection, uses_views=not adds_outbox) as cursor:
                    return self._within(cursor, mark, work, adds_outbox=adds_outbox)

            return mark.call_lock.run(self.path, call)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise_reported(self.path, error)
            raise
        finally:
            GATE.end_use(use)

    def _within(
        self,
        cursor: sqlite3.Cursor,
        mark: _Mark,
        work: Callable[[sqlite3.Cursor], T],
        *,
        adds_outbox: bool,
    ) -> T:
        connection = cursor.connection
        _, _, name = cursor.execute("PRAGMA database_list").fetchone()
        key = os.getpid(), self.path, name
        if key not in mark.places:
            self._check_same_file(cursor, name)
        if not adds_outbox:  # storing a message names the database in each statement
            _check_names(cursor)
        is_theirs = connection.in_transaction
        if not is_theirs and _is_autocommit(connection):
            with transaction(connection, self.path):
                self._have_tables(cursor, _version(cursor), adds=adds_outbox)
                done = work(cursor)
                # Here, the connection can be told by its lock.
                self._check_place(cursor, mark, key)
            self._check_committed(cursor, mark, key)
            return done
        try:
            if not is_theirs:
                # Python's sqlite3 begins a transaction before an INSERT, for the caller to commit.
                begin_immediate(connection, self.path)
            version = _version(cursor)
            cursor.execute("SAVEPOINT reliablepub_enqueue")
            try:
                self._have_tables(cursor, version, adds=adds_outbox)
                done = work(cursor)
                self._check_place(cursor, mark, key)
            except BaseException as error:
                with noting_trouble(error):
                    if connection.in_transaction:  # SQLite may have ended it on a full disk
                        cursor.execute("ROLLBACK TO reliablepub_enqueue")
                        cursor.execute("RELEASE reliablepub_enqueue")
                raise
        except BaseException as error:
            has_ended = False
            with noting_trouble(error):
                has_ended = not connection.in_transaction
                # Its lock would block all writers until the caller ends it.
                if not (is_theirs or has_ended):
                    cursor.execute("ROLLBACK")
            if is_theirs and has_ended and isinstance(error, sqlite3.Error):
                told = outbox_error(self.path, error)
                raise type(told)(f"{told}; {_ENDED}") from error
            raise
        cursor.execute("RELEASE reliablepub_enqueue")
        return done

    def insert(
        self,
        cursor: sqlite3.Cursor,
        new: Sequence[Entry],
        keys: OutboxKeys | None,
        limits: OpenLimits,
    ) -> None:
        """Store and count messages. The caller holds the write lock."""
        last_id, counters = ledger_of(cursor.execute(QUERIES["snapshot"]).fetchone(), self.path)
        if not limits.are_none:
            limits.check(counters, new, self.path)
        size = sum(map(size_of, new))
        self.ballast.check(cursor, size)
        count = {"count": len(new), "size": size}
        must_have_changed(cursor.execute(QUERIES["count_stored"], count))
        insert(cursor, new, last_id, keys)

    def insert_once(
        self,
        cursor: sqlite3.Cursor,
        entry: Entry,
        key: str,
        keys: OutboxKeys | None,
        limits: OpenLimits,
    ) -> str:
        """Store a message, unless its key is known; return the id of the one that has the key."""
        now, message_id = entry.stored_at, entry.message.message_id
        assert message_id is not None
        (first,) = cursor.execute(QUERIES["key"], {"key": key, "now": now}).fetchone() or (None,)
        if first is not None:
            return str(first)
        self.insert(cursor, [entry], keys, limits)
        forget_keys(lambda name, values: cursor.execute(QUERIES[name], values), now, KEYS_LOOKED_AT)
        row = key, entry.id, message_id, now + KEYS_KEPT_S
        must_have_changed(cursor.execute(QUERIES["remember_key"], row))
        return message_id

    def _have_tables(self, cursor: sqlite3.Cursor, version: int | None, *, adds: bool) -> None:
        """Check the version of the outbox. If the database has none, add it, or refuse that."""
        if version is None and not adds:
            raise lacks_outbox(self.path)
        if version is None:
            add_outbox(cursor, self.path)
        else:
            check_version(version, self.path)

    def _check_same_file(self, cursor: sqlite3.Cursor, name: str) -> None:
        """Check that the caller's connection is to the file at the path, and that it is safe."""
        try:
            is_same = bool(name) and check_file(self.path) and self.path.samefile(name)
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise ConfigurationError(
                f"connection is to {name or 'no file'}, and the outbox is {self.path}; they must "
                "be the same database, or the message would not be part of your transaction"
            )
        check_side_files(self.path, OF_SQLITE)
        if not self._has_warned:
            _warn_of_unsynced(cursor, self.path)
            self._has_warned = True

    def _check_place(self, cursor: sqlite3.Cursor, mark: _Mark, key: tuple[int, Path, str]) -> None:
        """Check that the caller's connection has the files open that are at the path."""
        place = mark.places.get(key)
        if place is None:
            place = _place(cursor, self.path)
            # A backup that was copied into the file shows only to those who had it open before.
            for other in _places(key):
                if other.file == place.file:
                    other.check_content()
            mark.places[key] = place
            return
        try:
            place.check()
        except OutboxMoved as moved:
            if place.is_overwritten:
                raise
            try:
                now = _place(cursor, self.path)
            except OutboxMoved:  # whose words are only true before the commit
                raise moved from None
            # A switch of the journal mode adds or removes the log.
            if place.is_left_open(now):
                raise
            self._check_same_file(cursor, key[-1])
            mark.places[key] = now

    def _check_committed(
        self, cursor: sqlite3.Cursor, mark: _Mark, key: tuple[int, Path, str]
    ) -> None:
        """Check the same after a commit."""
        try:
            self._check_place(cursor, mark, key)
        except OutboxDiskFailed as error:
            raise committed_unseen(error) from error


ROWS_AT_ONCE: Final = 50
"""Rows stored by one statement, at half the cost of one statement a row."""
_INSERT_MANY: Final = of_rows("insert_plain_message", ROWS_AT_ONCE)


def insert(
    connection: sqlite3.Connection | sqlite3.Cursor,
    new: Sequence[Entry],
    last_id: int,
    keys: OutboxKeys | None,
) -> None:
    """Store entries under the ids after ``last_id``."""
    assert not any(map(id_of, new)), "an entry is stored already"
    for id_, entry in enumerate(new, last_id + 1):
        entry.id = id_  # before the row is made: encryption covers the id
    plain, others = divided(new)
    rows = [plain_row_of(entry, keys) for entry in plain]
    whole = len(rows) - len(rows) % ROWS_AT_ONCE
    for first in range(0, whole, ROWS_AT_ONCE):
        values = chain.from_iterable(rows[first : first + ROWS_AT_ONCE])
        must_have_changed(connection.execute(_INSERT_MANY, tuple(values)), ROWS_AT_ONCE)
    if last := rows[whole:]:
        must_have_changed(connection.executemany(QUERIES["insert_plain_message"], last), len(last))
    if others:
        more = [row_of(one, keys) for one in others]
        must_have_changed(connection.executemany(QUERIES["insert_message"], more), len(more))


@contextmanager
def _borrowed(connection: sqlite3.Connection, *, uses_views: bool) -> Iterator[sqlite3.Cursor]:
    """Make a cursor, with those settings of the caller's connection aside that would disturb it."""
    factories = connection.text_factory, connection.row_factory
    connection.text_factory, connection.row_factory = str, None
    cursor = connection.cursor()
    cursor.row_factory = None  # a subclass may have set one
    is_trusting = True
    try:
        if uses_views:  # they contain JSON functions, which SQLite refuses in views if this is OFF
            (is_trusting,) = cursor.execute("PRAGMA trusted_schema").fetchone()
            cursor.execute("PRAGMA trusted_schema = ON")
        yield cursor
    finally:
        connection.text_factory, connection.row_factory = factories
        with suppress(sqlite3.Error):  # a signal handler has closed the connection
            if uses_views:
                cursor.execute(f"PRAGMA trusted_schema = {is_trusting:d}")
            cursor.close()


def _places(key: tuple[int, Path, str]) -> list[Place]:
    """Return what the open connections of a process have open of an outbox."""
    # `valuerefs` makes its list in one step: other threads add marks.
    marks = [reference() for reference in _MARKS.valuerefs()]
    return [mark.places[key] for mark in marks if mark is not None and key in mark.places]


def _place(cursor: sqlite3.Cursor, path: Path) -> Place:
    """Record the files at the path, and check that this connection has them open."""
    if not cursor.connection.in_transaction:
        # A connection learns only when it reads that another process has switched to a log.
        cursor.execute("SELECT 1 FROM main.sqlite_schema").fetchone()
    # A database without a log is accepted: migrations (Alembic, Django, SQLAlchemy's `create_all`)
    # add the outbox in their own transaction, which cannot switch the journal mode.
    # The connection is asked, not the file: another process may switch to a log just now.
    (journal,) = cursor.execute("PRAGMA main.journal_mode").fetchone()
    (locking,) = cursor.execute("PRAGMA main.locking_mode").fetchone()
    # With locking_mode EXCLUSIVE, SQLite takes no locks on the index of the log.
    is_writing = cursor.connection.in_transaction and locking == "normal"
    return Place(path, is_logged=journal == "wal", is_writing=is_writing)


def _check_names(cursor: sqlite3.Cursor) -> None:
    """Refuse temporary tables that stand before those of the outbox."""
    found = cursor.execute(QUERIES["stand_in"]).fetchone()
    if found is not None:
        raise ConfigurationError(
            f"connection has a temporary table or view {found[0]}, which stands before that of the "
            "outbox; drop it, or use another connection"
        )


def _warn_of_unsynced(cursor: sqlite3.Cursor, path: Path) -> None:
    """Warn if commits of the caller's connection do not survive a power cut, or a kill."""
    (synchronous,) = cursor.execute("PRAGMA synchronous").fetchone()
    if synchronous < _SYNCHRONOUS_FULL:
        LOGGER.warning(
            "the application's connection to outbox %s has PRAGMA synchronous = %s: a power cut "
            "can undo its last commits, and with them messages; set it to FULL",
            path,
            ("OFF", "NORMAL")[synchronous],
            extra={"event": "unsafe_pragma"},
        )
    if sys.platform == "darwin" and cursor.execute("PRAGMA fullfsync").fetchone() == (0,):
        LOGGER.warning(
            "the application's connection to outbox %s has PRAGMA fullfsync = OFF, and on macOS a "
            "power cut can then undo its last commits, and with them messages; set it to ON",
            path,
            extra={"event": "unsafe_pragma"},
        )
    (journal,) = cursor.execute("PRAGMA journal_mode").fetchone()
    if journal in _UNSAFE_JOURNALS:
        LOGGER.warning(
            "the application's connection to outbox %s has PRAGMA journal_mode = %s: a process "
            "that is killed during a commit damages the file, and messages can be lost; set it to "
            "WAL",
            path,
            journal.upper(),
            extra={"event": "unsafe_pragma"},
        )


def _version(cursor: sqlite3.Cursor) -> int | None:
    """Take the write lock by a write, and return the version of the outbox; None without one."""
    # A transaction that begins by reading cannot wait for another writer (SQLITE_BUSY_SNAPSHOT),
    # and the caller's transaction may have neither read nor written yet.
    try:
        if cursor.execute(QUERIES["lock"], (VERSION,)).rowcount == 1:
            return VERSION
        (version,) = cursor.execute(QUERIES["schema_version"]).fetchone()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:  # SQLITE_ERROR: there is no outbox yet
            raise
        return None
    return int(version)


def _is_autocommit(connection: Any) -> bool:  # noqa: ANN401 - `autocommit` is new in Python 3.12
    return connection.isolation_level is None or getattr(connection, "autocommit", False) is True
