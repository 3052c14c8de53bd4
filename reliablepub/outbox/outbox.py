"""The outbox for those who only put messages in, or look at it; somebody else relays them.

Knows: how to enqueue, also within a transaction of the application's own. Must never know: the
relay.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from uuid import uuid4

from reliablepub.errors import ConfigurationError, OutboxError
from reliablepub.message import Message
from reliablepub.outbox.database import absolute, open_writer, reading, transaction
from reliablepub.outbox.entry import Entry
from reliablepub.outbox.failures import outbox_error
from reliablepub.outbox.inspection import (
    OutboxStatus,
    ParkedMessage,
    read_parked,
    read_position,
    read_status,
)
from reliablepub.outbox.migrate import migrate
from reliablepub.outbox.rows import row_of
from reliablepub.outbox.sql import QUERIES

_NO_CHANGE: Final = {"stored": 0, "confirmed": 0, "parked": 0, "expired": 0, "open_bytes": 0}
_inherited: list[sqlite3.Connection] = []
"""A parent process's connections: closing one here could remove its log, so none ever is."""


class Outbox:
    """A durable table of messages to publish, in its own file or in the application's database.

    Any number of processes and threads may enqueue; one relay (a `Publisher` with this outbox, or
    ``reliablepub relay``) publishes. Nothing is opened before it is needed.

    Args:
        path: the SQLite file, your application's own or another; the first message creates it, or
            adds the outbox to it.

    Example:
        The message exists if, and only if, the order does::

            with sqlite3.connect("app.db") as db:
                db.execute("INSERT INTO orders VALUES (?)", (order_id,))
                Outbox("app.db").enqueue(Message(b"...", exchange="orders"), connection=db)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Final[Path] = absolute(path)
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._pid = os.getpid()

    def enqueue(self, message: Message, *, connection: sqlite3.Connection | None = None) -> str:
        """Store one message; the relay publishes it.

        Args:
            message: gets a ``message_id`` if it has none.
            connection: yours, to the same database file. The message becomes part of its open
                transaction, or of the one that it opens now and you commit. In autocommit mode the
                message is stored at once. The first message adds the outbox to your database.

        Returns:
            The ``message_id``. Without ``connection``, the message is on disk.

        Raises:
            OutboxDiskFull: the disk is full; it was not stored.
            OutboxUnsure: the disk failed during the commit; look whether it was stored.
            ConfigurationError: the connection is to another file.
            NotAnOutbox: the file is no SQLite database, or its outbox is of a newer version.
            OutboxError: it was not stored.
        """
        if message.message_id is None:
            message = message.with_message_id(str(uuid4()))
        assert message.message_id is not None
        entry = Entry(message, time.time())
        if connection is None:
            with self._writing() as own:
                _insert(own.cursor(), entry)
        else:
            self._enqueue_within(connection, entry)
        return message.message_id

    def status(self) -> OutboxStatus:
        """Look at the outbox, without disturbing anybody.

        Raises:
            NotAnOutbox: there is no outbox at this path.
        """
        return read_status(self.path)

    def parked(self, limit: int = 100) -> list[ParkedMessage]:
        """Messages that were given up and are kept for a person, oldest first.

        Raises:
            NotAnOutbox: there is no outbox at this path.
        """
        return read_parked(self.path, limit=limit)

    def position(self, source: str) -> int:
        """How many messages of a named source are stored (see `Publisher.publish_many`).

        Returns:
            0 also where there is no outbox yet.

        Raises:
            NotAnOutbox: the file is something else.
        """
        return read_position(self.path, source)

    def forget(self, source: str) -> None:
        """Count a named source from 0 again; its messages stay.

        Raises:
            OutboxError: the file cannot be written; it is not forgotten.
        """
        if not self.position(source):
            return
        with self._writing() as connection:
            connection.execute(QUERIES["forget_source"], (source,))

    def retry(self, ids: Iterable[int] | None = None) -> int:
        """Put parked messages back: they are due now, and their refusals are forgotten.

        Args:
            ids: of `ParkedMessage`; None for all. One that is not parked is left alone.

        Returns:
            How many were put back.

        Raises:
            NotAnOutbox: there is no outbox at this path.
            OutboxError: nothing was put back.
        """
        with reading(self.path):
            pass  # there is one: a retry must not add an outbox to a database
        moved = 0
        with self._writing() as connection:
            if ids is None:
                ids = [row[0] for row in connection.execute(QUERIES["parked_ids"])]
            change = dict(_NO_CHANGE)
            for id_ in ids:
                connection.execute(QUERIES["unpark"], (time.time(), id_))
                row = connection.execute(QUERIES["delete_parked"], (id_,)).fetchone()
                if row is not None:
                    state, size = row
                    change[state] -= 1
                    change["open_bytes"] += size
                    moved += 1
            connection.execute(QUERIES["change_ledger"], change).fetchone()
        return moved

    def close(self) -> None:
        """Close the file, if it was opened; the outbox may be used again."""
        with self._lock:
            self._forget_inherited()
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        """Name the file."""
        return f"Outbox({str(self.path)!r})"

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction on our own connection, by one thread at a time."""
        with self._lock:
            self._forget_inherited()
            if self._connection is None:
                self._connection = open_writer(self.path, checkpoints=False)
            try:
                with transaction(self._connection, self.path):
                    yield self._connection
            except OutboxError:
                # Open afresh next time: after a failed sync this connection must not be trusted,
                # and after any other failure it costs nothing.
                self._connection.close()
                self._connection = None
                raise

    def _forget_inherited(self) -> None:
        if os.getpid() != self._pid:
            if self._connection is not None:
                _inherited.append(self._connection)
            self._connection = None
            self._pid = os.getpid()

    def _enqueue_within(self, connection: sqlite3.Connection, entry: Entry) -> None:
        """Insert into the caller's transaction, wholly or not at all."""
        cursor = connection.cursor()
        cursor.row_factory = None  # the caller's rows may be anything
        try:
            self._check_same_file(cursor)
            if not connection.in_transaction and _is_autocommit(connection):
                with transaction(connection, self.path):
                    self._insert_beside_tables(cursor, entry)
                return
            if not connection.in_transaction:
                cursor.execute("BEGIN IMMEDIATE")  # as their own INSERT would; theirs to commit
            cursor.execute("SAVEPOINT reliablepub_enqueue")
            try:
                self._insert_beside_tables(cursor, entry)
            except BaseException:
                if connection.in_transaction:  # a full disk may have ended it
                    cursor.execute("ROLLBACK TO reliablepub_enqueue")
                    cursor.execute("RELEASE reliablepub_enqueue")
                raise
            cursor.execute("RELEASE reliablepub_enqueue")
        except sqlite3.Error as error:
            raise outbox_error(self.path, error) from error
        finally:
            cursor.close()

    def _insert_beside_tables(self, cursor: sqlite3.Cursor, entry: Entry) -> None:
        migrate(cursor, self.path)
        _insert(cursor, entry)

    def _check_same_file(self, cursor: sqlite3.Cursor) -> None:
        _, _, name = cursor.execute("PRAGMA database_list").fetchone()
        if not name or not self.path.exists() or not self.path.samefile(name):
            raise ConfigurationError(
                f"connection is to {name or 'no file'}, and the outbox is {self.path}; they must "
                "be the same database, or the message would not be part of your transaction"
            )


def _insert(cursor: sqlite3.Cursor, entry: Entry) -> None:
    cursor.execute(QUERIES["insert_message"], row_of(entry))
    change = _NO_CHANGE | {"stored": 1, "open_bytes": entry.message.size}
    cursor.execute(QUERIES["change_ledger"], change).fetchall()


def _is_autocommit(connection: Any) -> bool:  # noqa: ANN401 - `autocommit` is new in Python 3.12
    return connection.isolation_level is None or getattr(connection, "autocommit", False) is True
