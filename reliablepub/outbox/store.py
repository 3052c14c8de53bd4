"""The durable store: one turn of the relay is one SQLite transaction.

Knows: when a transaction begins, what is read, and who owns the outbox. Must never know: AMQP, or
why an entry is settled as it is.

Taking is only a read; a row leaves ``messages`` in the transaction of its verdict. Other processes
may add rows at any time; ids are given out under the write lock.
"""

from __future__ import annotations

import math
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from reliablepub.errors import (
    OutboxDiskFull,
    OutboxError,
    OutboxInUse,
    OutboxLocked,
    OutboxMoved,
    PublisherForked,
)
from reliablepub.outbox.ballast import Ballast
from reliablepub.outbox.bookkeeping import ID_MAX, TIME_MAX
from reliablepub.outbox.checkpoints import behind_next_commit
from reliablepub.outbox.database import absolute, check_database
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import (
    Counters,
    DamagedRow,
    Entry,
    HeldExchange,
    Intervened,
    Snapshot,
    Touched,
    Turn,
)
from reliablepub.outbox.failures import reported
from reliablepub.outbox.lease import Lease
from reliablepub.outbox.picture import remove_picture, write_picture
from reliablepub.outbox.place import WritingConnection
from reliablepub.outbox.reading import Page
from reliablepub.outbox.rescue import rescued
from reliablepub.outbox.retention import give_space_back, has_space_to_give, prune_confirmed
from reliablepub.outbox.shortage import Shortage, pieces
from reliablepub.outbox.sql import QUERIES
from reliablepub.outbox.transactions import surely, transaction
from reliablepub.outbox.writer import Writer
from reliablepub.outbox.writing import judge_left_in_flight, park_damaged, write_turn

ATTEMPTS_RETENTION_S: Final = 7 * 86_400.0
"""The history of a message that was confirmed in the end is kept this long."""
NEVER_READ: Final = (
    "its number or one of its times is none that this library writes; the file was damaged or "
    "edited"
)


class SqliteStore:
    """The outbox file, opened by its one relay (see `Store` for the contract of each method).

    Args:
        path: the file; created when it is missing.
        keep_confirmed_s: how long confirmed messages are kept, for people to look at; 0 for not.
        keys: encrypt new messages, and decrypt those that are.
        clock: wall clock, seconds since 1970.

    Raises:
        OutboxInUse: another process relays it.
        NotAnOutbox: the file is no SQLite database, or its outbox is of a newer version.
        OutboxError: it cannot be opened or written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep_confirmed_s: float = 0.0,
        keys: OutboxKeys | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = absolute(path)
        self._keep_confirmed_s = keep_confirmed_s
        self._has_kept = True  # perhaps an earlier run has
        self._keys = keys
        self._clock = clock
        self._pid = os.getpid()
        self._has_moved = False
        self._damaged: list[DamagedRow] = []
        check_database(self.path)  # no lease, and so no lock file, beside what is no outbox
        self._ballast = Ballast(self.path)
        self._shortage = Shortage(self.path, self._ballast)
        try:
            self._open()
        except OutboxDiskFull:
            # Even to begin takes space: for the lock file, the index of the log, the run.
            if not self._ballast.release():
                raise
            self._open()

    def _open(self) -> None:
        self._lease = Lease(self.path)
        self._writer = Writer(self.path, is_relay=True)
        try:
            with self._writer.use() as connection, reported(self.path):
                self._run, self._seen = self._begin_run(connection)
                self._version = _version(connection)
                self._shortage.look(connection)
        except BaseException:
            self._writer.close()
            self._lease.release()
            raise

    @property
    def run(self) -> int:
        """Number of this relay's run on this outbox: each one is higher than all before it."""
        return self._run

    def snapshot(self) -> Snapshot:
        """Read the ledger and the highest id, as they are now (other processes may add)."""
        with self._reading() as connection:
            connection.execute("BEGIN")
            try:
                (last_id,) = connection.execute(QUERIES["last_id"]).fetchone()
                row = connection.execute(QUERIES["ledger"]).fetchone()
            finally:
                connection.execute("ROLLBACK")
            return Snapshot(last_id, Counters(*row))

    def commit(self, turn: Turn) -> Snapshot:
        """Make one turn durable, wholly or not at all; new entries have their ids afterwards.

        Raises:
            Intervened: a person has changed messages; nothing of the turn was stored.
            OutboxDiskFull: nothing of the turn was stored; the same turn may be tried again.
            OutboxDiskFailed: likewise.
            OutboxUnsure: the disk failed, twice: the turn may come to light later, if this process
                ends before another commit succeeds. It may be tried again.
            OutboxInUse: another relay has taken this outbox over; this one must stop.
            OutboxMoved: the path leads to other files; what the relay held is copied.
            OutboxError: the store cannot go on.
        """
        if turn.is_empty:
            return self.snapshot()
        self._check_usable()
        with self._rescuing(), self._writer.use() as connection:
            if not self._shortage.is_on:
                try:
                    return self._commit(connection, turn)
                except OutboxDiskFull:
                    if turn.new:
                        raise
                    self._shortage.is_on = True
            with behind_next_commit(connection):  # the log, once moved, is space again
                return self._commit_in_shortage(connection, turn)

    def relieve(self) -> str:
        """Have something give way if the disk is full; why nothing new is stored, or nothing."""
        with self._reading() as connection:
            return self._shortage.look(connection)

    def read_ready(
        self, first_id: int, last_id: int, *, limit: int, bytes_max: int
    ) -> tuple[list[Entry], int]:
        """Entries with ``first_id <= id <= last_id`` that wait for nothing, lowest ids first."""
        page = Page(limit, bytes_max, self._keys)
        with self._reading() as connection:
            looked_at = page.read_ready(connection, first_id, last_id)
        return self._readable(page), looked_at

    def read_due(
        self, now: float, *, limit: int, bytes_max: int, loaded: Container[int]
    ) -> tuple[list[Entry], float | None]:
        """Entries whose ``due_at`` has come and whose id is not in ``loaded``, earliest first.

        Entries in ``loaded`` do not count as waiting: their owner knows when they are due.

        Raises:
            Intervened: a person has changed messages: one of these may be in memory already, under
                an address that it no longer has.
        """
        page = Page(limit, bytes_max, self._keys)
        with self._reading() as connection:
            next_at = page.read_timed(connection, "waiting", now, loaded, in_turn=True)
            if self._owner(connection)[2] != self._seen:
                raise Intervened
        return self._readable(page), next_at

    def read_expired(
        self, now: float, *, limit: int, bytes_max: int, loaded: Container[int]
    ) -> tuple[list[Entry], float | None]:
        """Entries whose ``expires_at`` has come and whose id is not in ``loaded``, likewise."""
        page = Page(limit, bytes_max, self._keys)
        with self._reading() as connection:
            next_at = page.read_timed(connection, "expiring", now, loaded, in_turn=False)
            if self._owner(connection)[2] != self._seen:
                raise Intervened
        return self._readable(page), next_at

    def read_first(
        self, keys: Sequence[str], now: float, *, bytes_max: int
    ) -> tuple[list[Entry], int]:
        """The first open entry of each key, if it waits for nothing and its key is not held."""
        page = Page(len(keys), bytes_max, self._keys)
        looked_at = 0
        with self._reading() as connection:
            for key in keys:
                if not page.read_first(connection, key, now):
                    break
                looked_at += 1
        return self._readable(page), looked_at

    def _readable(self, page: Page) -> list[Entry]:
        """What was read; what must not be read again like this is put where it belongs."""
        if page.damaged or page.out_of_turn:
            damaged: list[DamagedRow] = []
            with (
                suppress(OutboxDiskFull, OutboxLocked),  # then it stays where it is, unsent
                self._writer.use() as connection,
                transaction(connection, self.path),
            ):
                self._check_owner(connection)
                if page.damaged:
                    damaged = park_damaged(connection, page.damaged, self._clock())
                ids = ((id_,) for id_ in page.out_of_turn)
                connection.executemany(QUERIES["wait_for_turn"], ids)
            self._damaged += damaged
        return page.entries

    def lowest_awaited(self, first_id: int, at: float) -> int | None:
        """Lowest open id from ``first_id`` on that was to be sent by ``at``, or None."""
        with self._reading() as connection:
            limits = {"first_id": first_id, "at": at}
            row = connection.execute(QUERIES["lowest_awaited"], limits).fetchone()
            return None if row is None else int(row[0])

    def held_exchanges(self, limit: int) -> list[HeldExchange]:
        """Exchanges of entries that are `HELD`, as many as that."""
        found: list[HeldExchange] = []
        with self._reading() as connection:
            for name, count, first in connection.execute(QUERIES["held_exchanges"], (limit,)):
                (since,) = connection.execute(QUERIES["refused_at"], (first,)).fetchone()
                with suppress(UnicodeDecodeError):
                    name = name.decode()  # noqa: PLW2901 - what it was read for
                found.append(HeldExchange(name if isinstance(name, str) else None, count, since))
        return found

    def changed_elsewhere(self) -> bool:
        """Whether another process has written to the store since the last call.

        Raises:
            OutboxMoved: the path of the outbox leads to other files than those that are open.
        """
        self._check_usable()
        with self._rescuing():
            self._writer.renew()
        with self._reading() as connection:
            before, self._version = self._version, _version(connection)
            return before != self._version

    def show(self, picture: Mapping[str, object]) -> None:
        """Let those who look at the outbox see how its relay is doing. Nothing depends on it."""
        write_picture(self.path, picture)

    def damaged(self) -> list[DamagedRow]:
        """Rows that were parked since the last call, because they are not what was stored."""
        rows, self._damaged = self._damaged, []
        return rows

    def touched(self) -> list[Touched]:
        """What people did to single messages since the last call, or since the store was opened."""
        with self._reading() as connection:
            rows = connection.execute(QUERIES["touched"], (self._seen,)).fetchall()
        if rows:
            self._seen = rows[-1][0]
        return [Touched(*row[1:]) for row in rows]

    def position(self, source: str) -> int:
        """How many entries of a named source have ever been stored, in the same transactions."""
        with self._reading() as connection:
            row = connection.execute(QUERIES["position"], (source,)).fetchone()
            return int(row[0]) if row else 0

    def close(self, last: Mapping[str, object] | None = None) -> None:
        """Give everything back; committed entries stay.

        Args:
            last: what those who look at the outbox are left to see, instead of nothing.
        """
        if os.getpid() != self._pid:
            return  # the parent's: closing it here could remove the parent's log
        if not self._lease.is_held:
            return
        try:
            if not self._has_moved:
                # The end only informs: where it is missing, the next run says so.
                with suppress(OutboxError, sqlite3.Error), self._writer.use() as connection:
                    connection.execute(QUERIES["end_run"], (self._clock(), self._run))
            self._writer.close()
            remove_picture(self.path, last)
        finally:
            self._lease.release()

    def _begin_run(self, connection: WritingConnection) -> tuple[int, int]:
        """Become the owner; write down what the last owner left in flight, for people to see.

        Returns:
            number of the run, and of the newest intervention before it.
        """
        now = self._clock()
        # The log may be all that a process has left that was killed while its disk failed: moved
        # into the database, and synced there, it is worth what it says.
        with behind_next_commit(connection), transaction(connection, self.path):
            limits = {"id_max": ID_MAX, "time_max": TIME_MAX}
            never_read = [row[0] for row in connection.execute(QUERIES["never_read"], limits)]
            if never_read:
                reasons = dict.fromkeys(never_read, NEVER_READ)
                self._damaged += park_damaged(connection, reasons, now)
            judge_left_in_flight(connection, now)
            for kind in ("forget_old_attempts", "forget_old_interventions"):
                connection.execute(QUERIES[kind], (now - ATTEMPTS_RETENTION_S,))
            for kind in ("rebase_retries", "due_since_stored"):
                connection.execute(QUERIES[kind], {"now": now})
            names = (os.getpid(), socket.gethostname(), now)
            connection.execute(QUERIES["begin_run"], names)
            run, _, seen = self._owner(connection)
        return run, seen

    def _commit_in_shortage(self, connection: WritingConnection, turn: Turn) -> Snapshot:
        """Even deleting writes to the log: what only settles may use the space kept for it."""
        try:
            return self._commit_pieces(connection, turn)
        except OutboxDiskFull:
            if turn.new or not self._ballast.is_whole:
                raise
        self._shortage.settle(connection, release=True)
        return self._commit_pieces(connection, turn)

    def _commit_pieces(self, connection: WritingConnection, turn: Turn) -> Snapshot:
        self._shortage.settle(connection)
        for piece in pieces(turn):
            self._commit(connection, piece)
        return self._commit(connection, turn)

    def _commit(self, connection: WritingConnection, turn: Turn) -> Snapshot:
        last: tuple[int, str | None, float] | None = None

        def write() -> tuple[Snapshot, bool]:
            nonlocal last
            if self._check_owner(connection) != self._seen:
                raise Intervened
            _forget_ids(turn)
            if turn.new:
                self._ballast.check(connection, sum(entry.message.size for entry in turn.new))
            now = self._clock()
            keep_s = 0.0 if self._shortage.is_on else self._keep_confirmed_s
            snapshot = write_turn(connection, turn, now, keep_confirmed=keep_s > 0, keys=self._keys)
            if self._has_kept:
                before = now - keep_s if keep_s > 0 else math.inf
                pruned = prune_confirmed(connection, before, len(turn.confirmed))
                self._has_kept = self._keep_confirmed_s > 0 or pruned > 0
            if turn.new:
                entry = turn.new[-1]
                last = entry.id, entry.message.message_id, entry.stored_at
            return snapshot, not self._shortage.is_on and has_space_to_give(connection)

        def is_there() -> bool:
            """A turn without new entries may be written twice: its verdicts count once."""
            if last is None:
                return False
            return connection.execute(QUERIES["is_stored"], last).fetchone() is not None

        try:
            snapshot, is_roomy = surely(connection, self.path, write, is_there)
        except BaseException:
            _forget_ids(turn)
            raise
        if is_roomy:
            with reported(self.path):
                give_space_back(connection)
        return snapshot

    def _check_owner(self, connection: WritingConnection) -> int:
        """The lease says so already, unless somebody removed its file: then the newest run owns.

        Returns:
            number of the newest intervention.
        """
        run, pid, newest = self._owner(connection)
        if run != self._run:
            raise OutboxInUse(
                f"outbox {self.path} was taken over by process {pid}; this relay stops"
            )
        return newest

    def _owner(self, connection: WritingConnection) -> tuple[int, int, int]:
        """The newest run, its process, and the newest intervention."""
        run, pid, newest = connection.execute(QUERIES["owner"]).fetchone()
        return run, pid, newest

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise PublisherForked(
                f"outbox {self.path} was opened before the fork; open it in the child"
            )
        if not self._lease.is_held:
            raise OutboxError(f"outbox {self.path} is closed")

    @contextmanager
    def _rescuing(self) -> Iterator[None]:
        """When the files have moved, copy what is in them before this process lets go of them."""
        try:
            yield
        except OutboxMoved as error:
            self._has_moved = True
            connection = self._writer.connection
            if connection is None:  # closed for a fork, and moved before it was opened again
                raise
            told = rescued(connection, self.path, self._run, error)
            self._writer.leave()
            raise told from error

    @contextmanager
    def _reading(self) -> Iterator[WritingConnection]:
        self._check_usable()
        with self._writer.use() as connection, reported(self.path):
            yield connection


def _version(connection: WritingConnection) -> tuple[WritingConnection, int]:
    """Changes when another connection has written; means nothing to a new connection."""
    (version,) = connection.execute("PRAGMA data_version").fetchone()
    return connection, version


def _forget_ids(turn: Turn) -> None:
    """What is not stored has no id."""
    for entry in turn.new:
        entry.id = 0
