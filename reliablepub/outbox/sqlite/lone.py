"""Stores a message that comes alone, on its caller's thread; `LoneWriter` of `outbox.entry`.

Knows: the one statement by which it is stored, and what its errors say. Must never know: threads,
the relay.

The whole transaction is one statement (``lone.sql``), and so one call into SQLite, which no signal
handler of Python's interrupts: no lock is held while a handler runs, or when it raises. The
statement succeeds only for the id that is next, so the caller knows the id before, and may announce
it.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Final

from reliablepub.errors import OutboxDiskFailed, OutboxError, OutboxMoved
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import ALONE, Entry, OpenLimits, epoch_name
from reliablepub.outbox.rows import plain_row_of
from reliablepub.outbox.sqlite.connections import Writer, ledger_of
from reliablepub.outbox.sqlite.failures import commit_unsure, is_before_commit, is_busy, is_decided
from reliablepub.outbox.sqlite.forks import GATE
from reliablepub.outbox.sqlite.location import WritingConnection
from reliablepub.outbox.sqlite.space import Ballast
from reliablepub.outbox.sqlite.sql import QUERIES, for_lone_messages
from reliablepub.outbox.sqlite.transactions import committed_unseen

_POLL_S: Final = 0.000_2
"""Between two tries. SQLite's own wait sleeps for a millisecond and more, and holds up a fork."""
_TRIES: Final = 10
"""Tries while another process writes, which takes about half a millisecond."""


class SqliteLoneWriter:
    """A connection by which callers store messages beside the relay."""

    def __init__(self, path: Path, keys: OutboxKeys | None, run: int, relay: Writer) -> None:
        self._path = path
        self._keys = keys
        self._run = run
        self._writer = Writer(path, is_relay=False, beside=relay)
        self._ballast = Ballast(path)
        self._last_id = 0
        self._prepared: WritingConnection | None = None
        self._is_interrupted = False
        # Whether a caller holds SQLite's lock, is about to take it, or has just released it
        self.is_writing = False

    def prepare(self, limits: OpenLimits, *, is_sent: bool) -> None:
        """Set the terms for the messages to come; see `outbox.entry.LoneWriter`."""
        try:
            with self._writer as connection:
                if self._prepared is not connection:
                    for statement in for_lone_messages():
                        connection.execute(statement)
                    connection.execute("PRAGMA busy_timeout = 0")  # see `_POLL_S`
                    self._prepared = connection
                epoch = epoch_name(self._run, ALONE) if is_sent else None
                terms = (self._run, epoch, limits.messages_max, limits.bytes_max)
                connection.execute(QUERIES["set_lone_terms"], terms)
                self._look_at_ledger(connection)
                self._is_interrupted = False
        except OutboxError:
            self._prepared = None
            self._writer.close()  # half prepared, perhaps
            raise

    @property
    def is_prepared(self) -> bool:
        """Whether the connection is the one that was prepared, and the next id is known."""
        # A fork closes the connection.
        is_open = self._prepared is not None and self._writer.connection is self._prepared
        return is_open and not self._is_interrupted

    def next_id(self) -> int:
        """Return the id that the next message gets, unless another one comes first."""
        return self._last_id + 1

    def store(self, entry: Entry) -> bool:
        """Store an entry under the id that it has, if that is next."""
        uses = GATE.uses
        try:
            return self._store(entry)
        except BaseException:  # also what a signal handler raises
            self._is_interrupted = True
            self._writer.forget_uses()
            GATE.forget_uses_since(uses)
            raise

    def _store(self, entry: Entry) -> bool:
        with self._writer as connection:
            if connection is not self._prepared:
                return False  # it was closed for a fork, and opened again
            place = connection.place
            place.check_before_commit()
            self._ballast.check(connection, entry.message.size)
            if not self._is_written(connection, entry):
                return False
            try:
                place.check()
            except (OutboxMoved, OutboxDiskFailed) as error:
                raise committed_unseen(error) from error
            return True

    def _is_written(self, connection: WritingConnection, entry: Entry) -> bool:
        row = plain_row_of(entry, self._keys)
        for _ in range(_TRIES):
            # A signal handler may have forked, and the child lacks the locks; or it has closed the
            # connection, as others' locks were lost. Nothing is called from here on, so none runs.
            if self._writer.connection is not connection:
                return False
            try:
                self.is_writing = True
                connection.execute(QUERIES["insert_lone_message"], row)
            except sqlite3.Error as error:
                if is_busy(error):
                    time.sleep(_POLL_S)
                    continue
                if not (is_before_commit(error) or is_decided(self._path, error)):
                    # The next commit of any connection writes over what this one has written.
                    connection.is_unsure = True
                    raise commit_unsure(self._path, error) from error
                self._look_at_ledger(connection)
                return False
            finally:
                self.is_writing = False
            connection.is_unsure = False
            self._last_id = entry.id
            return True
        return False

    def _look_at_ledger(self, connection: WritingConnection) -> None:
        row = connection.execute(QUERIES["snapshot"]).fetchone()
        self._last_id, _ = ledger_of(row, self._path)

    def close(self) -> None:
        """Close the connection. No caller uses it."""
        self._writer.close()
