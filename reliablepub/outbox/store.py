"""The durable store: one turn of the relay is one SQLite transaction.

Knows: the named statements, and in which order they keep the promise. Must never know: AMQP, or why
an entry is settled as it is.

Taking is only a read; a row leaves ``messages`` in the transaction of its verdict. The ledger is
changed by what the statements really changed, never by what they were meant to, so that a verdict
that comes twice counts once. Other processes may add rows at any time; ids are given out under the
write lock.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from reliablepub.errors import (
    OutboxDiskFull,
    OutboxError,
    OutboxInUse,
    OutboxLocked,
    OutboxUnsure,
    PublisherForked,
)
from reliablepub.outbox.ballast import Ballast
from reliablepub.outbox.database import absolute, check_database, open_writer, transaction
from reliablepub.outbox.entry import Attempt, Counters, Entry, Sent, Snapshot, Turn
from reliablepub.outbox.failures import outbox_error
from reliablepub.outbox.lease import Lease
from reliablepub.outbox.rows import (
    Unreadable,
    attempt_of,
    entry_of,
    id_runs,
    row_of,
    schedule_of,
)
from reliablepub.outbox.sql import QUERIES
from reliablepub.outcome import OutcomeKind

ATTEMPTS_RETENTION_S: Final = 7 * 86_400.0
"""The history of a message that was confirmed in the end is kept this long."""
LEFT_IN_FLIGHT: Final = "the publisher ended before the broker answered"


class SqliteStore:
    """The outbox file, opened by its one relay (see `Store` for the contract of each method).

    Args:
        path: the file; created when it is missing.
        clock: wall clock, seconds since 1970.

    Raises:
        OutboxInUse: another process relays it.
        NotAnOutbox: the file is no SQLite database, or its outbox is of a newer version.
        OutboxError: it cannot be opened or written.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = absolute(path)
        self._clock = clock
        self._pid = os.getpid()
        self._broken: str | None = None
        check_database(self.path)  # no lease, and so no lock file, beside what is no outbox
        self._lease = Lease(self.path)
        try:
            self._connection = open_writer(self.path, checkpoints=True)
        except BaseException:
            self._lease.release()
            raise
        try:
            self._run = self._begin_run()
            self._data_version = self._version_of_data()
            self._ballast = Ballast(self.path)
        except BaseException:
            self._connection.close()
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
            OutboxDiskFull: nothing of the turn was stored; the same turn may be tried again.
            OutboxInUse: another relay has taken this outbox over; this one must stop.
            OutboxError: the store cannot go on.
        """
        if not (
            turn.new
            or turn.confirmed
            or turn.parked
            or turn.rescheduled
            or turn.attempts
            or turn.sent
            or turn.finished
            or turn.sources
        ):
            return self.snapshot()
        self._check_usable()
        try:
            snapshot = self._commit(turn)
        except OutboxDiskFull:
            # Even deleting writes to the log: what only settles may use the space kept for it.
            if turn.new or not self._ballast.release():
                raise
            with suppress(sqlite3.Error):  # the log, moved into the database, is space again
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return self._commit(turn)
        self._ballast.restore()
        return snapshot

    def read_ready(self, first_id: int, last_id: int, *, limit: int, bytes_max: int) -> list[Entry]:
        """Entries with ``first_id <= id <= last_id`` that wait for nothing, lowest ids first."""
        entries: list[Entry] = []
        damaged: dict[int, str] = {}
        size = 0
        with self._reading() as connection:
            cursor = connection.execute(QUERIES["ready"], (first_id, last_id))
            try:
                for row in cursor if limit > 0 else ():
                    try:
                        entry = entry_of(row)
                    except Unreadable as error:
                        damaged[row[0]] = str(error)
                        continue
                    size += entry.message.size
                    if entries and size > bytes_max:
                        break
                    entries.append(entry)
                    if len(entries) == limit:
                        break
            finally:
                cursor.close()  # no read transaction may stay open: the log could not be moved
        self._park_unreadable(damaged)
        return entries

    def read_due(
        self, now: float, *, limit: int, bytes_max: int, loaded: Container[int]
    ) -> tuple[list[Entry], float | None]:
        """Entries whose ``due_at`` has come and whose id is not in ``loaded``, earliest first.

        Entries in ``loaded`` do not count as waiting: their owner knows when they are due.
        """
        due, next_due_at = self._due(now, limit, loaded)
        entries: list[Entry] = []
        damaged: dict[int, str] = {}
        size = 0
        with self._reading() as connection:
            for due_at, id_ in due:
                row = connection.execute(QUERIES["message"], (id_,)).fetchone()
                if row is None:
                    continue  # another process took it away in between
                try:
                    entry = entry_of(row)
                except Unreadable as error:
                    damaged[id_] = str(error)
                    continue
                size += entry.message.size
                if entries and size > bytes_max:
                    next_due_at = due_at
                    break
                entries.append(entry)
        self._park_unreadable(damaged)
        return entries, next_due_at

    def _due(
        self, now: float, limit: int, loaded: Container[int]
    ) -> tuple[list[tuple[float, int]], float | None]:
        """Due times and ids from the index alone, and the first due time that is not among them."""
        due: list[tuple[float, int]] = []
        with self._reading() as connection:
            cursor = connection.execute(QUERIES["waiting"])
            try:
                for id_, due_at in cursor:
                    if id_ in loaded:
                        continue
                    if due_at > now or len(due) >= limit:
                        return due, due_at
                    due.append((due_at, id_))
            finally:
                cursor.close()
        return due, None

    def lowest_open(self) -> int | None:
        """Lowest id that is still open, or None."""
        with self._reading() as connection:
            (lowest,) = connection.execute(QUERIES["lowest_open"]).fetchone()
            return None if lowest is None else int(lowest)

    def changed_elsewhere(self) -> bool:
        """Whether another process has written to the store since the last call."""
        with self._reading():
            before, self._data_version = self._data_version, self._version_of_data()
            return before != self._data_version

    def position(self, source: str) -> int:
        """How many entries of a named source have ever been stored, in the same transactions."""
        with self._reading() as connection:
            row = connection.execute(QUERIES["position"], (source,)).fetchone()
            return int(row[0]) if row else 0

    def close(self) -> None:
        """Give everything back; committed entries stay."""
        if os.getpid() != self._pid:
            return  # the parent's: closing it here could remove the parent's log
        if not self._lease.is_held:
            return
        try:
            with suppress(
                sqlite3.Error
            ):  # only informs: a missing end is seen as one by the next run
                self._connection.execute(QUERIES["end_run"], (self._clock(), self._run))
            self._connection.close()
        finally:
            self._lease.release()

    def _begin_run(self) -> int:
        """Become the owner; write down what the last owner left in flight, for people to see."""
        now = self._clock()
        connection = self._connection
        with transaction(connection, self.path):
            connection.execute(QUERIES["count_left_in_flight"])
            left = {"at": now, "reply_text": LEFT_IN_FLIGHT}
            connection.execute(QUERIES["remember_left_in_flight"], left)
            connection.execute(QUERIES["clear_in_flight"])
            connection.execute(QUERIES["forget_old_attempts"], (now - ATTEMPTS_RETENTION_S,))
            names = (os.getpid(), socket.gethostname(), now)
            (run,) = connection.execute(QUERIES["begin_run"], names).fetchone()
        return int(run)

    def _commit(self, turn: Turn) -> Snapshot:
        try:
            with transaction(self._connection, self.path):
                return self._write(turn)
        except BaseException as error:
            for entry in turn.new:
                entry.id = 0
            if isinstance(error, OutboxUnsure):
                self._broken = str(
                    error
                )  # a failed sync must not be tried again on this connection
            raise

    def _write(self, turn: Turn) -> Snapshot:
        connection = self._connection
        self._check_owner()
        (last_id,) = connection.execute(QUERIES["last_id"]).fetchone()
        stored_bytes = 0
        for entry in turn.new:
            assert entry.id == 0, f"{entry.message!r} is stored already"
            last_id += 1
            entry.id = last_id
            stored_bytes += entry.message.size
        if turn.new:
            connection.executemany(QUERIES["insert_message"], map(row_of, turn.new))
        if turn.sources:
            connection.executemany(QUERIES["advance_source"], turn.sources.items())
        confirmed, confirmed_bytes = self._remove([entry.id for entry in turn.confirmed])
        parked, expired, parked_bytes = self._park(turn.parked)
        if turn.rescheduled:
            connection.executemany(QUERIES["reschedule"], map(schedule_of, turn.rescheduled))
        if turn.attempts:
            connection.executemany(QUERIES["insert_attempt"], map(attempt_of, turn.attempts))
        if turn.finished:
            keys = ((sent.epoch, sent.first_tag) for sent in turn.finished)
            connection.executemany(QUERIES["delete_in_flight"], keys)
        if turn.sent:
            self._write_in_flight(turn.sent)
        change = {
            "stored": len(turn.new),
            "confirmed": confirmed,
            "parked": parked,
            "expired": expired,
            "open_bytes": stored_bytes - confirmed_bytes - parked_bytes,
        }
        row = connection.execute(QUERIES["change_ledger"], change).fetchone()
        return Snapshot(last_id, Counters(*row))

    def _remove(self, ids: list[int]) -> tuple[int, int]:
        """Delete open rows; how many there really were, and their bytes."""
        count = size = 0
        for first, length in id_runs(sorted(ids)):
            rows = self._connection.execute(QUERIES["delete_run"], (first, first + length - 1))
            sizes = [row[0] for row in rows]
            count += len(sizes)
            size += sum(sizes)
        return count, size

    def _park(self, attempts: list[Attempt]) -> tuple[int, int, int]:
        """Move open rows to the parked ones; how many parked, how many expired, and their bytes."""
        count = {"parked": 0, "expired": 0}
        size = 0
        for attempt in attempts:
            entry, outcome = attempt.entry, attempt.outcome
            state = "expired" if outcome.kind is OutcomeKind.EXPIRED else "parked"
            row = {
                "id": entry.id,
                "at": attempt.at,
                "state": state,
                "outcome": outcome.kind.value,
                "reply_code": outcome.reply_code,
                "reply_text": outcome.reply_text,
                "nacked": entry.nacked,
                "returned": entry.returned,
                "refused": entry.refused,
                "uncertain": entry.uncertain,
            }
            self._connection.execute(QUERIES["park"], row)
            moved, moved_bytes = self._remove([entry.id])
            count[state] += moved
            size += moved_bytes
        return count["parked"], count["expired"], size

    def _write_in_flight(self, ranges: list[Sent]) -> None:
        now = self._clock()
        for sent in ranges:
            ids = json.dumps(id_runs([entry.id for entry in sent.entries]), separators=(",", ":"))
            row = (sent.epoch, sent.first_tag, len(sent.entries), ids, now)
            self._connection.execute(QUERIES["insert_in_flight"], row)

    def _park_unreadable(self, damaged: dict[int, str]) -> None:
        """Put rows that are not what was stored where a person sees them, and nobody sends them."""
        if not damaged:
            return
        with suppress(OutboxDiskFull, OutboxLocked):  # then they stay where they are, unsent
            self._park_damaged(damaged)

    def _park_damaged(self, damaged: dict[int, str]) -> None:
        connection = self._connection
        with transaction(connection, self.path):
            self._check_owner()
            parked = 0
            for id_, reason in damaged.items():
                row = {"id": id_, "at": self._clock(), "reply_text": reason}
                connection.execute(QUERIES["park_unreadable"], row)
                moved, _ = self._remove([id_])
                parked += moved
            change = {"stored": 0, "confirmed": 0, "parked": parked, "expired": 0, "open_bytes": 0}
            connection.execute(QUERIES["change_ledger"], change)
            connection.execute(QUERIES["recount_open_bytes"])

    def _check_owner(self) -> None:
        """The lease says so already, unless somebody removed its file: then the newest run owns."""
        run, pid = self._connection.execute(QUERIES["owner"]).fetchone()
        if run != self._run:
            raise OutboxInUse(
                f"outbox {self.path} was taken over by process {pid}; this relay stops"
            )

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise PublisherForked(
                f"outbox {self.path} was opened before the fork; open it in the child"
            )
        if not self._lease.is_held:
            raise OutboxError(f"outbox {self.path} is closed")
        if self._broken:
            raise OutboxError(self._broken)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        self._check_usable()
        try:
            yield self._connection
        except sqlite3.Error as error:
            raise outbox_error(self.path, error) from error

    def _version_of_data(self) -> int:
        (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        return int(version)
