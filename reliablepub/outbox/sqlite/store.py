"""The SQLite store: one turn of the relay is one transaction.

Knows: the statements of a turn and their order, the ledger, and who owns the outbox. Must never
know: AMQP, why an entry has the outcome it has.

Reading marks nothing: a row leaves ``messages`` in the transaction that records its final outcome.
Other processes may add rows at any time; ids are given out under the write lock. The ledger counts
the rows that a statement has really changed, so an outcome that is recorded twice counts once. No
cursor stays open between two calls, because an open cursor keeps the write-ahead log from being
reset.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain
from typing import Any, Final

from reliablepub.errors import (
    OutboxDiskFull,
    OutboxError,
    OutboxInUse,
    OutboxLocked,
    OutboxMoved,
    PublisherForked,
)
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import (
    Attempt,
    Changes,
    Counters,
    DamagedRow,
    Entry,
    HeldExchange,
    Intervened,
    Release,
    Sent,
    Snapshot,
    Step,
    Touched,
)
from reliablepub.outbox.sqlite.ballast import Ballast
from reliablepub.outbox.sqlite.checkpoints import behind_next_commit
from reliablepub.outbox.sqlite.database import Writer, absolute, check_database
from reliablepub.outbox.sqlite.failures import reported
from reliablepub.outbox.sqlite.location import WritingConnection, rescued
from reliablepub.outbox.sqlite.lock import RelayLock
from reliablepub.outbox.sqlite.rows import (
    ID_MAX,
    TIME_MAX,
    Unreadable,
    attempt_of,
    entry_of,
    id_runs,
    plain_row_of,
    row_of,
    schedule_of,
)
from reliablepub.outbox.sqlite.space import (
    Shortage,
    give_space_back,
    has_space_to_give,
    pieces,
    prune_confirmed,
)
from reliablepub.outbox.sqlite.sql import QUERIES
from reliablepub.outbox.sqlite.status_file import remove_status_file, write_status_file
from reliablepub.outbox.sqlite.transactions import commit_with_retry, transaction
from reliablepub.outcome import OutcomeKind

PASSED_MAX: Final = 5_000
"""Rows of a page that are only looked at, because it is not their turn: some 20 ms."""


class Page:
    """Entries, up to a limit in messages and bytes; at least one, where there is any.

    Args:
        limit: messages.
        bytes_max: their bytes.
        keys: to decrypt them with, where the outbox is encrypted.

    Attributes:
        entries: what was read.
        damaged: ids of rows that are not what was stored, and what is wrong with each.
        out_of_turn: ids of rows whose time has come, and whose turn has not.
    """

    def __init__(self, limit: int, bytes_max: int, keys: OutboxKeys | None) -> None:
        self._keys = keys
        self._limit = limit
        self._bytes_max = bytes_max
        self._bytes = 0
        self.entries: list[Entry] = []
        self.damaged: dict[int, str] = {}
        self.out_of_turn: list[int] = []

    def read_ready(self, connection: sqlite3.Connection, first_id: int, last_id: int) -> int:
        """Read rows that wait for nothing, lowest ids first.

        Returns:
            up to which id all of them have been read, or passed over.
        """
        looked_at = first_id - 1
        passed = passed_bytes = 0
        with closing(connection.execute(QUERIES["ready"], (first_id, last_id))) as cursor:
            for *row, is_first in cursor:
                if not is_first:
                    passed, passed_bytes = passed + 1, passed_bytes + row[16]
                elif not self._take(row):
                    return looked_at
                looked_at = int(row[0])
                if passed >= PASSED_MAX or passed_bytes > self._bytes_max:
                    return looked_at
        return last_id

    def read_timed(
        self,
        connection: sqlite3.Connection,
        query: str,
        now: float,
        loaded: Container[int],
        *,
        in_turn: bool,
    ) -> float | None:
        """Read rows whose time in an index has come, earliest first.

        Args:
            connection: to read with.
            query: ``waiting`` or ``expiring``.
            now: wall clock.
            loaded: ids to pass over.
            in_turn: whether to leave out those that must wait for others of their key.

        Returns:
            the first time that is not among them, or None.
        """
        found, next_at = self._timed(connection, query, now, loaded)
        for at, id_ in found:
            row = connection.execute(QUERIES["message"], (id_,)).fetchone()
            if row is None:
                continue  # another process took it away in between
            is_keyed = row[14] is not None
            if in_turn and is_keyed and not _is_first(connection, id_):
                self.out_of_turn.append(id_)
            elif not self._take(row):
                return at
        return next_at

    def read_first(self, connection: sqlite3.Connection, key: str, now: float) -> bool:
        """Read the first row of a key, if it waits for nothing; False if it does not fit."""
        row = connection.execute(QUERIES["first_of_key"], {"key": key}).fetchone()
        is_for_now = row is not None and (row[6] is None or row[6] <= now)
        return not is_for_now or self._take(row)

    def _timed(
        self, connection: sqlite3.Connection, query: str, now: float, loaded: Container[int]
    ) -> tuple[list[tuple[float, int]], float | None]:
        """Times and ids from the index alone, and the first time that is not among them."""
        found: list[tuple[float, int]] = []
        with closing(connection.execute(QUERIES[query])) as cursor:
            for id_, at in cursor:
                if id_ in loaded:
                    continue
                if at > now or len(found) >= self._limit:
                    return found, at
                found.append((at, id_))
        return found, None

    def _take(self, row: Any) -> bool:  # noqa: ANN401 - a row of any types
        """Add a row's entry; False if it does not fit any more."""
        if len(self.entries) >= self._limit:
            return False
        try:
            entry = entry_of(row, self._keys)
        except Unreadable as error:
            self.damaged[row[0]] = str(error)
            return True
        self._bytes += entry.message.size
        if self.entries and self._bytes > self._bytes_max:
            return False
        self.entries.append(entry)
        return True


def _is_first(connection: sqlite3.Connection, id_: int) -> bool:
    """Whether nothing of its key has to go before."""
    return connection.execute(QUERIES["is_first_of_key"], (id_,)).fetchone() is not None


NO_CHANGE: Final = {
    "stored": 0,
    "confirmed": 0,
    "parked": 0,
    "expired": 0,
    "discarded": 0,
    "open_bytes": 0,
}
"""Parameters of ``change_ledger`` that change nothing."""
LEFT_IN_FLIGHT: Final = "the publisher ended before the broker answered"
ROWS_AT_ONCE: Final = 50
"""Rows that one statement stores: it costs half of what a statement for each would."""
_VALUES: Final = ", (" + ", ".join("?" * 9) + ")"
_INSERT_MANY: Final = QUERIES["insert_plain_message"].rstrip(";") + _VALUES * (ROWS_AT_ONCE - 1)

_SCOPES: Final = ("held", "held_of_exchange", "held_of_address")
"""Statements that find what is held: for every destination, an exchange, one routing key of it."""


def write_changes(
    connection: sqlite3.Connection,
    changes: Changes,
    now: float,
    *,
    keep_confirmed: bool,
    keys: OutboxKeys | None,
) -> Snapshot:
    """Write all that a turn changes; its new entries get their ids."""
    if keep_confirmed:
        for first, length in id_runs(sorted(entry.id for entry in changes.confirmed)):
            connection.execute(QUERIES["keep_confirmed"], (now, first, first + length - 1))
    # First, so that new rows go to the pages that this frees: each is written once, and not twice.
    confirmed, confirmed_bytes = remove(connection, [entry.id for entry in changes.confirmed])
    if changes.stepped is not None:  # before what is by the new clock already
        _step(connection, changes.stepped, now)
    last_id, stored_bytes = _insert(connection, changes.new, keys)
    if changes.sources:
        connection.executemany(QUERIES["advance_source"], changes.sources.items())
    parked, expired, parked_bytes = _park(connection, changes.parked)
    discarded, discarded_bytes = remove(connection, [gone.entry.id for gone in changes.discarded])
    if changes.rescheduled:
        connection.executemany(QUERIES["reschedule"], map(schedule_of, changes.rescheduled))
    for release in changes.released:
        _release(connection, release)
    if changes.attempts:
        connection.executemany(QUERIES["insert_attempt"], map(attempt_of, changes.attempts))
    if changes.finished:
        tags = ((sent.epoch, sent.first_tag) for sent in changes.finished)
        connection.executemany(QUERIES["delete_in_flight"], tags)
    if changes.sent:
        _write_in_flight(connection, changes.sent, now)
    change = NO_CHANGE | {
        "stored": len(changes.new),
        "confirmed": confirmed,
        "parked": parked,
        "expired": expired,
        "discarded": discarded,
        "open_bytes": stored_bytes - confirmed_bytes - parked_bytes - discarded_bytes,
    }
    row = connection.execute(QUERIES["change_ledger"], change).fetchone()
    return Snapshot(last_id, Counters(*row))


def _step(connection: sqlite3.Connection, step: Step, now: float) -> None:
    by = {"by": step.by, "since": step.since, "last_id": step.last_id, "now": now}
    for kind in ("step_retries", "step_deadlines", "due_since_stored"):
        connection.execute(QUERIES[kind], by)


def _insert(
    connection: sqlite3.Connection, new: list[Entry], keys: OutboxKeys | None
) -> tuple[int, int]:
    """Store entries, and give them their ids; the highest id then, and their bytes."""
    (last_id,) = connection.execute(QUERIES["last_id"]).fetchone()
    size = 0
    for entry in new:
        assert entry.id == 0, f"{entry.message!r} is stored already"
        last_id += 1
        entry.id = last_id
        size += entry.message.size
    if new:
        _insert_rows(connection, new, keys)
    return last_id, size


def _insert_rows(connection: sqlite3.Connection, new: list[Entry], keys: OutboxKeys | None) -> None:
    plain = [entry for entry in new if entry.is_plain and entry.due_at is None]
    rows = [plain_row_of(entry, keys) for entry in plain]
    whole = len(rows) - len(rows) % ROWS_AT_ONCE
    for first in range(0, whole, ROWS_AT_ONCE):
        values = chain.from_iterable(rows[first : first + ROWS_AT_ONCE])
        connection.execute(_INSERT_MANY, tuple(values))
    connection.executemany(QUERIES["insert_plain_message"], rows[whole:])
    if len(rows) < len(new):
        others = (row_of(e, keys) for e in new if not (e.is_plain and e.due_at is None))
        connection.executemany(QUERIES["insert_message"], others)


def park_damaged(
    connection: sqlite3.Connection, damaged: dict[int, str], now: float
) -> list[DamagedRow]:
    """Move rows that are not what was stored, by id and reason, to where a person sees them."""
    rows: list[DamagedRow] = []
    for id_, reason in damaged.items():
        row = {"id": id_, "at": now, "outcome": "refused", "reply_text": reason}
        connection.execute(QUERIES["park_as_it_is"], row)
        moved, _ = remove(connection, [id_])
        if moved:
            texts = connection.execute(QUERIES["parked_address"], (id_,)).fetchone()
            message_id, exchange, routing_key = (text.decode(errors="replace") for text in texts)
            rows.append(DamagedRow(id_, message_id, exchange, routing_key, reason))
    connection.execute(QUERIES["change_ledger"], NO_CHANGE | {"parked": len(rows)})
    connection.execute(QUERIES["recount_open_bytes"])
    return rows


def judge_left_in_flight(connection: sqlite3.Connection, now: float) -> None:
    """Write down what a relay left in flight when it ended; only while no relay is at work.

    Its fate is unknown: a queue may have it.
    """
    connection.execute(QUERIES["count_left_in_flight"])
    left = {"at": now, "reply_text": LEFT_IN_FLIGHT}
    connection.execute(QUERIES["remember_left_in_flight"], left)
    connection.execute(QUERIES["clear_in_flight"])


def remove(connection: sqlite3.Connection, ids: list[int]) -> tuple[int, int]:
    """Delete open rows; how many there really were, and their bytes."""
    count = size = 0
    for first, length in id_runs(sorted(ids)):
        run = first, first + length - 1
        size += connection.execute(QUERIES["size_of_run"], run).fetchone()[0]
        count += connection.execute(QUERIES["delete_run"], run).rowcount
    return count, size


def _park(connection: sqlite3.Connection, attempts: list[Attempt]) -> tuple[int, int, int]:
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
        connection.execute(QUERIES["park"], row)
        moved, moved_bytes = remove(connection, [entry.id])
        count[state] += moved
        size += moved_bytes
    return count["parked"], count["expired"], size


def _release(connection: sqlite3.Connection, release: Release) -> None:
    """Make due what was held, as much as is asked for."""
    scope = _SCOPES[(release.exchange is not None) + (release.routing_key is not None)]
    exchange, routing_key, id_ = release.after or (release.exchange, release.routing_key, 0)
    after = {"exchange": exchange or "", "routing_key": routing_key or "", "id": id_}
    rows = connection.execute(QUERIES[scope], after | {"limit": release.limit}).fetchall()
    connection.executemany(QUERIES["release"], ((release.at, row[0]) for row in rows))
    release.count = len(rows)
    if rows:
        id_, exchange, routing_key = rows[-1]
        release.last = exchange, routing_key, id_
    if release.is_counted:
        where = {"exchange": release.exchange, "routing_key": release.routing_key}
        (release.left,) = connection.execute(QUERIES["count_" + scope], where).fetchone()


def _write_in_flight(connection: sqlite3.Connection, ranges: list[Sent], now: float) -> None:
    for sent in ranges:
        ids = json.dumps(id_runs([entry.id for entry in sent.entries]), separators=(",", ":"))
        row = (sent.epoch, sent.first_tag, len(sent.entries), ids, now)
        connection.execute(QUERIES["insert_in_flight"], row)


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
        check_database(self.path)  # no relay lock, and so no lock file, beside what is no outbox
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
        self._relay_lock = RelayLock(self.path)
        self._writer = Writer(self.path, is_relay=True)
        try:
            with self._writer.use() as connection, reported(self.path):
                self._run, self._seen = self._begin_run(connection)
                self._version = _version(connection)
                self._shortage.look(connection)
        except BaseException:
            self._writer.close()
            self._relay_lock.release()
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

    def commit(self, changes: Changes) -> Snapshot:
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
        if changes.is_empty:
            return self.snapshot()
        self._check_usable()
        with self._rescuing(), self._writer.use() as connection:
            if not self._shortage.is_on:
                try:
                    return self._commit(connection, changes)
                except OutboxDiskFull:
                    if changes.new:
                        raise
                    self._shortage.is_on = True
            with behind_next_commit(connection):  # the log, once moved, is space again
                return self._commit_in_shortage(connection, changes)

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

    def show(self, status: Mapping[str, object]) -> None:
        """Let those who look at the outbox see how its relay is doing. Nothing depends on it."""
        write_status_file(self.path, status)

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
        if not self._relay_lock.is_held:
            return
        try:
            if not self._has_moved:
                # The end only informs: where it is missing, the next run says so.
                with suppress(OutboxError, sqlite3.Error), self._writer.use() as connection:
                    connection.execute(QUERIES["end_run"], (self._clock(), self._run))
            self._writer.close()
            remove_status_file(self.path, last)
        finally:
            self._relay_lock.release()

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

    def _commit_in_shortage(self, connection: WritingConnection, changes: Changes) -> Snapshot:
        """Even deleting writes to the log: what only settles may use the space kept for it."""
        try:
            return self._commit_pieces(connection, changes)
        except OutboxDiskFull:
            if changes.new or not self._ballast.is_whole:
                raise
        self._shortage.settle(connection, release=True)
        return self._commit_pieces(connection, changes)

    def _commit_pieces(self, connection: WritingConnection, changes: Changes) -> Snapshot:
        self._shortage.settle(connection)
        for piece in pieces(changes):
            self._commit(connection, piece)
        return self._commit(connection, changes)

    def _commit(self, connection: WritingConnection, changes: Changes) -> Snapshot:
        last: tuple[int, str | None, float] | None = None

        def write() -> tuple[Snapshot, bool]:
            nonlocal last
            if self._check_owner(connection) != self._seen:
                raise Intervened
            _forget_ids(changes)
            if changes.new:
                self._ballast.check(connection, sum([entry.message.size for entry in changes.new]))
            now = self._clock()
            keep_s = 0.0 if self._shortage.is_on else self._keep_confirmed_s
            snapshot = write_changes(
                connection, changes, now, keep_confirmed=keep_s > 0, keys=self._keys
            )
            if self._has_kept:
                before = now - keep_s if keep_s > 0 else math.inf
                pruned = prune_confirmed(connection, before, len(changes.confirmed))
                self._has_kept = self._keep_confirmed_s > 0 or pruned > 0
            if changes.new:
                entry = changes.new[-1]
                last = entry.id, entry.message.message_id, entry.stored_at
            return snapshot, not self._shortage.is_on and has_space_to_give(connection)

        def is_there() -> bool:
            """A turn without new entries may be written twice: its verdicts count once."""
            if last is None:
                return False
            return connection.execute(QUERIES["is_stored"], last).fetchone() is not None

        try:
            snapshot, is_roomy = commit_with_retry(connection, self.path, write, is_there)
        except BaseException:
            _forget_ids(changes)
            raise
        if is_roomy:
            with reported(self.path):
                give_space_back(connection)
        return snapshot

    def _check_owner(self, connection: WritingConnection) -> int:
        """The relay lock says so already, unless its file was removed: then the newest run owns.

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
        if not self._relay_lock.is_held:
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


def _forget_ids(changes: Changes) -> None:
    """What is not stored has no id."""
    for entry in changes.new:
        entry.id = 0
