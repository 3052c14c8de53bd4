"""SQLite store: one turn of the relay is one transaction.

Knows: the statements of a turn and their order, the ledger, and who owns the outbox. Must never
know: AMQP, why an entry has its outcome.

Reading marks nothing: a row leaves ``messages`` in the transaction that records its final outcome.
Other processes may add rows at any time; ids are assigned under the write lock. The ledger counts
the rows that a statement has changed, so an outcome that is recorded twice counts once. No cursor
stays open between two calls, because an open cursor keeps the write-ahead log from being reset.
"""

from __future__ import annotations

import math
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Final, NoReturn

from reliablepub.errors import (
    OutboxDiskFull,
    OutboxError,
    OutboxInUse,
    OutboxMoved,
    OutboxUnsure,
    PublisherForked,
)
from reliablepub.outbox.database import NO_CHANGE
from reliablepub.outbox.encryption import OutboxKeys, fingerprints
from reliablepub.outbox.entry import (
    TRANSIENT,
    Attempt,
    Changes,
    DamagedRow,
    Entry,
    HeldExchange,
    Intervened,
    Release,
    Snapshot,
    Touched,
    id_of,
    size_of,
)
from reliablepub.outbox.patience import Patience
from reliablepub.outbox.rows import (
    ID_MAX,
    LEFT_IN_FLIGHT,
    MISTYPED,
    PASSED_MAX,
    SCANNED_MAX,
    TIME_MAX,
    MessageRow,
    Page,
    Unopened,
    attempt_of,
    given_up_of,
    id_runs,
    in_flight_of,
    is_due_time,
    is_mistyped,
    is_time,
    schedule_of,
    tags_of,
)
from reliablepub.outbox.sqlite.bell import Bell
from reliablepub.outbox.sqlite.checkpoints import LongLog, checkpointing
from reliablepub.outbox.sqlite.connections import Writer, absolute, check_database, ledger_of
from reliablepub.outbox.sqlite.enqueue import insert
from reliablepub.outbox.sqlite.location import WritingConnection, rescued
from reliablepub.outbox.sqlite.lock import RelayLock
from reliablepub.outbox.sqlite.retention import Retention, prune_confirmed
from reliablepub.outbox.sqlite.space import (
    REWRITE_RETRY_S,
    Ballast,
    Shortage,
    give_space_back,
    has_space_to_give,
    make_room,
    pieces,
)
from reliablepub.outbox.sqlite.sql import QUERIES
from reliablepub.outbox.sqlite.status_file import (
    forget_killed,
    remove_status_file,
    write_status_file,
)
from reliablepub.outbox.sqlite.transactions import (
    must_have_changed,
    transaction,
    transaction_at_path,
)


class SqlitePage(Page):
    """A page of entries, and how it is read."""

    def read_ready(self, connection: sqlite3.Connection, first_id: int, last_id: int) -> int:
        """Read rows due now, lowest ids first; return the id up to which all were looked at."""
        first = _next_id_stored(connection, first_id, last_id)
        if first is None:
            return last_id
        last_id = min(last_id, first + SCANNED_MAX - 1)
        looked_at = first_id - 1
        passed = passed_bytes = 0
        with closing(connection.execute(QUERIES["ready"], (first, last_id))) as cursor:
            for *columns, is_first in cursor:
                row = MessageRow._make(columns)
                if not is_first and isinstance(row.size, int):  # its body was not read
                    passed, passed_bytes = passed + 1, passed_bytes + row.size
                elif not self.take(row):
                    return looked_at
                looked_at = row.id
                if passed >= PASSED_MAX or passed_bytes > self.bytes_max:
                    return looked_at
        return last_id

    def read_timed(
        self,
        connection: sqlite3.Connection,
        query: str,  # ``waiting``: only rows that are next of their ordering key; or ``expiring``
        now: float,
        loaded: Container[int],  # ids to skip
    ) -> float | None:
        """Read rows whose time in an index has passed; return the first time that was not read."""
        found, next_at = self._from_index(connection, query, now, loaded)
        for at, id_ in found:
            columns = connection.execute(QUERIES["message"], (id_,)).fetchone()
            if columns is None:
                continue  # another process removed it since the index was read
            row = MessageRow._make(columns)
            is_keyed = row.ordering_key is not None
            if (
                query == "waiting"
                and is_keyed
                and not _is_first(connection, id_)
                and not is_mistyped(row)  # SQLite refuses to change such a row
            ):
                self.not_next.append(id_)
            elif not self.take(row):
                return at
        return next_at

    def read_first(self, connection: sqlite3.Connection, key: str, now: float) -> bool:
        """Read the first row of an ordering key, if it is due; return False if it does not fit."""
        columns = connection.execute(QUERIES["first_of_key"], {"key": key}).fetchone()
        if columns is None:
            return True
        row = MessageRow._make(columns)
        waits = is_due_time(row.due_at) and row.due_at > now  # type: ignore[operator]
        return waits or self.take(row)  # which finds a time of another type

    def _from_index(
        self, connection: sqlite3.Connection, query: str, now: float, loaded: Container[int]
    ) -> tuple[list[tuple[float, int]], float | None]:
        """Return times and ids from the index alone, and the time after them."""
        found: list[tuple[float, int]] = []
        with closing(connection.execute(QUERIES[query])) as cursor:
            for id_, at in cursor:
                if id_ in loaded:
                    continue  # the relay knows its time
                if at > now or len(found) >= self.limit:
                    return found, at
                found.append((at, id_))
        return found, None


def _next_id_stored(connection: sqlite3.Connection, first_id: int, last_id: int) -> int | None:
    """Return the lowest open id of a range."""
    limits = {"first_id": first_id, "last_id": last_id}
    (found,) = connection.execute(QUERIES["next_id_stored"], limits).fetchone()
    return None if found is None else int(found)


def _is_first(connection: sqlite3.Connection, id_: int) -> bool:
    """Whether the row is next of its ordering key."""
    return connection.execute(QUERIES["is_first_of_key"], (id_,)).fetchone() is not None


def write_changes(
    connection: sqlite3.Connection,
    changes: Changes,
    now: float,
    *,
    run: int,
    new_bytes: int,
    keep_confirmed: bool,
    keys: OutboxKeys | None,
) -> None:
    """Write the changes of a turn, and set the ids of its new entries, of ``new_bytes`` in all."""
    if keep_confirmed:
        for first, length in id_runs(sorted(map(id_of, changes.confirmed))):
            connection.execute(QUERIES["keep_confirmed"], (now, first, first + length - 1))
    # Deleted first, so that new rows reuse the freed pages, and each page is written only once.
    confirmed, confirmed_bytes = remove(connection, list(map(id_of, changes.confirmed)))
    if changes.new:
        (last_id,) = connection.execute(QUERIES["last_id"]).fetchone()
        insert(connection, changes.new, last_id, keys)
    if changes.sources:
        sources = ({"name": name, "count": count} for name, count in changes.sources.items())
        connection.executemany(QUERIES["advance_source"], sources)
    parked = expired = parked_bytes = discarded = discarded_bytes = 0
    if changes.parked or changes.discarded:
        parked, expired, parked_bytes = _park(connection, changes.parked)
        gone = [attempt.entry.id for attempt in changes.discarded]
        discarded, discarded_bytes = remove(connection, gone)
    if changes.rebase is not None:
        connection.execute(QUERIES["rebase"], {"by": changes.rebase.by})
    if changes.rescheduled:
        connection.executemany(QUERIES["reschedule"], map(schedule_of, changes.rescheduled))
    for release in changes.released:
        _release(connection, release)
    if changes.attempts:
        connection.executemany(QUERIES["insert_attempt"], map(attempt_of, changes.attempts))
    _write_tags(connection, changes, now, run)
    change = NO_CHANGE | {
        "ids": len(changes.new),
        "stored": len(changes.new),
        "confirmed": confirmed,
        "parked": parked,
        "expired": expired,
        "discarded": discarded,
        "open_bytes": new_bytes - confirmed_bytes - parked_bytes - discarded_bytes,
    }
    must_have_changed(connection.execute(QUERIES["change_ledger"], change))


def _write_tags(connection: sqlite3.Connection, changes: Changes, now: float, run: int) -> None:
    """Remove and add what is in flight."""
    if changes.finished:
        tags = (tags_of(sent, run) for sent in changes.finished)
        connection.executemany(QUERIES["delete_in_flight"], tags)
    for sent in changes.sent:
        connection.execute(QUERIES["insert_in_flight"], (*in_flight_of(sent, run), now))


def park_damaged(
    connection: sqlite3.Connection, damaged: dict[int, str], now: float
) -> list[DamagedRow]:
    """Park damaged rows with a reason each, given by id."""
    rows: list[DamagedRow] = []
    for id_, reason in damaged.items():
        row = {"chosen": f"[{id_}]", "at": now, "outcome": "refused", "reply_text": reason}
        connection.execute(QUERIES["park_as_it_is"], row)
        moved, _ = remove(connection, [id_])
        if moved:
            *texts, doubt = connection.execute(QUERIES["parked_address"], (id_,)).fetchone()
            message_id, exchange, routing_key = (text.decode(errors="replace") for text in texts)
            rows.append(DamagedRow(id_, message_id, exchange, routing_key, reason, bool(doubt)))
    connection.execute(QUERIES["change_ledger"], NO_CHANGE | {"parked": len(rows)})
    connection.execute(QUERIES["recount_open_bytes"])
    return rows


def settle_left_in_flight(connection: sqlite3.Connection, now: float) -> None:
    """Record messages that an ended relay left in flight as uncertain: a queue may have them.

    Only while no relay runs.
    """
    connection.execute(QUERIES["forget_unreadable_tags"])
    connection.execute(QUERIES["count_left_in_flight"])
    left = {"at": now, "reply_text": LEFT_IN_FLIGHT}
    connection.execute(QUERIES["remember_left_in_flight"], left)
    connection.execute(QUERIES["clear_in_flight"])


def remove(connection: sqlite3.Connection, ids: list[int]) -> tuple[int, int]:
    """Delete open rows; return how many rows were there, and their bytes."""
    count = size = 0
    if not ids:
        return count, size
    for first, length in id_runs(sorted(ids)):
        run = first, first + length - 1
        (size_of_run,) = connection.execute(QUERIES["size_of_run"], run).fetchone()
        size += size_of_run
        count += connection.execute(QUERIES["delete_run"], run).rowcount
    return count, size


def _park(connection: sqlite3.Connection, attempts: list[Attempt]) -> tuple[int, int, int]:
    """Park open rows; return how many were parked, how many expired, and the bytes of both."""
    count = {"parked": 0, "expired": 0}
    size = 0
    for attempt in attempts:
        _, state, *_ = row = given_up_of(attempt)
        connection.execute(QUERIES["park"], row)
        moved, moved_bytes = remove(connection, [attempt.entry.id])
        count[state] += moved
        size += moved_bytes
    return count["parked"], count["expired"], size


def _release(connection: sqlite3.Connection, release: Release) -> None:
    """Make held rows due, at most ``release.limit`` of them."""
    scope = "held" if release.exchange is None else "held_of_exchange"
    if release.routing_key is not None:
        scope = "held_of_address"
    where = {"exchange": release.exchange, "routing_key": release.routing_key}
    page = where | {"id": release.after, "limit": release.limit}
    ids = connection.execute(QUERIES[scope], page).fetchall()
    connection.executemany(QUERIES["release"], ids)
    release.count = len(ids)
    (release.last,) = ids[-1] if ids else (0,)
    if release.is_counted:
        (release.left,) = connection.execute(QUERIES["count_" + scope], where).fetchone()


_REACTIONS_MAX: Final = 3
"""A commit may need a checkpoint, the space of the ballast, and that a damaged row is parked."""
REREAD_S: Final = 1.0
"""Seconds after which pages are read again, which makes one commit a twentieth slower."""
NEVER_READ: Final = (
    "its id or one of its times is not a value that this library writes; the file was damaged or "
    "edited"
)


class SqliteStore:
    """The outbox file, opened by its relay. `Store` documents the contract of each method."""

    check: Final = None

    wall: Final = staticmethod(time.time)
    rest_s: Final = 0.05
    """To ask a file is cheap."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep_confirmed_s: float = 0.0,  # 0 keeps none
        keys: OutboxKeys | None = None,
        clock: Callable[[], float] = time.time,
        patience: Patience | None = None,  # for the locks of other processes
    ) -> None:
        self.path: Final = absolute(path)
        self._patience = patience
        self._keep_confirmed_s = keep_confirmed_s
        self._has_kept = True  # an earlier run may have kept some
        self._keys = keys
        self._clock = clock
        self._pid = os.getpid()
        self._has_moved = False
        self._damaged: list[DamagedRow] = []
        self._unopened = Unopened()
        self._unfit: dict[int, str] = {}
        self._last_id = 0
        self._next_rewrite_at = self._next_reread_at = 0.0
        check_database(self.path)  # first: taking the lock makes a lock file beside the database
        self._ballast = Ballast(self.path)
        self._shortage = Shortage(self.path, self._ballast)
        self._long_log = LongLog(self.path)
        self._retention = Retention(self.path, keep_confirmed_s)
        try:
            self._open()
        except OutboxDiskFull:
            # Opening needs space: for the lock file, the index of the log, and the run's row.
            if not self._ballast.release():
                raise
            self._open()

    def _open(self) -> None:
        self._relay_lock = RelayLock(self.path)
        forget_killed(self.path)
        self._writer = Writer(self.path, is_relay=True, patience=self._patience)
        self._bell = Bell(self.path)
        try:
            with self._writer as connection:
                self._bell.arm()
                try:
                    self._run, self._seen = self._begin_run(connection)
                except OutboxError as error:
                    self._park_mistyped(connection, error)
                    self._run, self._seen = self._begin_run(connection)
                if not self._bell.has_rung():  # a bell that works rings at the commit above
                    self._bell.close()
                self._version: tuple[WritingConnection, int] | None = _version_of(connection)
                self._shortage.look(connection)
        except BaseException:
            self._bell.close()
            self._writer.close()
            self._relay_lock.release()
            raise

    @property
    def run(self) -> int:
        """Number of this relay's run on this outbox, higher than that of every earlier run."""
        return self._run

    @property
    def bell(self) -> Bell | None:
        """Rings when a process writes to the log; None if it did not ring at the first commit."""
        return self._bell if self._bell.fileno() >= 0 else None

    def snapshot(self) -> Snapshot:
        """Read the current ledger and highest id. Other processes may have stored entries."""
        with self._usable as connection:
            snapshot = self._read_ledger(connection)
        self._check_ids(snapshot.last_id)
        self._last_id = snapshot.last_id
        return snapshot

    def commit(self, changes: Changes) -> Snapshot:
        """Store the changes of one turn in one transaction, and set the ids of new entries."""
        if changes.is_empty:
            return self.snapshot()
        with self._usable as connection:
            for reactions_left in range(_REACTIONS_MAX, -1, -1):
                try:
                    return self._commit(connection, changes)
                except BaseException as error:
                    _forget_ids(changes)
                    if not (isinstance(error, OutboxError) and reactions_left):
                        raise
                    self._react(connection, changes, error)
        raise AssertionError  # the last try returns or raises

    def _react(self, connection: WritingConnection, changes: Changes, error: OutboxError) -> None:
        """After a commit that failed: make another try possible, or raise."""
        match error:
            case OutboxMoved():
                self._rescue(error)
            case OutboxUnsure():
                # The new entries may be there, or be found later if this process ends before a
                # commit succeeds. Look for them as for those of another process.
                self._version = None
                if not connection.is_unsure:
                    # All is committed, and it is only unknown where: write nothing twice.
                    changes.rebase, changes.attempts = None, []
                raise error
            case OutboxDiskFull() if not changes.new and not self._shortage.is_on:
                self._shortage.is_on = True  # from now on, a checkpoint follows each commit
            case OutboxDiskFull() if not changes.new and self._ballast.is_whole:
                make_room(connection, self.path, self._ballast, release=True)
            case _:
                self._park_mistyped(connection, error)

    def relieve(self) -> str:
        """Free space if the disk is full; say why new entries cannot be stored, or return ""."""
        self._relay_lock.keep()
        if self._unfit:
            self._put_right()
        with self._usable as connection:
            self._forget_pages(connection)
            trouble = self._shortage.look(connection)
            if not trouble:  # on a full disk, each commit moves the log
                self._long_log.restart(connection, partial(self._check_owner, connection))
                check = partial(self._check_current, connection)
                self._retention.look(connection, self._clock(), check)
                if has_space_to_give(connection):
                    self._give_space_back(connection)
            return trouble

    def read_ready(
        self, first_id: int, last_id: int, *, limit: int, bytes_max: int
    ) -> tuple[list[Entry], int]:
        """Read entries with ``first_id <= id <= last_id`` that are due now, lowest ids first."""
        page = SqlitePage(limit, bytes_max, self._keys)
        with self._usable as connection:
            looked_at = page.read_ready(connection, first_id, last_id)
        return self._readable(page), looked_at

    def read_due(
        self, now: float, *, limit: int, bytes_max: int, loaded: Container[int]
    ) -> tuple[list[Entry], float | None]:
        """Read entries whose ``due_at`` has passed and whose id is not in ``loaded``."""
        page = SqlitePage(limit, bytes_max, self._keys)
        return self._read_timed(page, "waiting", now, loaded)

    def read_expired(
        self, now: float, *, limit: int, bytes_max: int, loaded: Container[int]
    ) -> tuple[list[Entry], float | None]:
        """Read entries whose ``expires_at`` has passed and whose id is not in ``loaded``."""
        page = SqlitePage(limit, bytes_max, self._keys)
        return self._read_timed(page, "expiring", now, loaded)

    def _read_timed(
        self, page: SqlitePage, query: str, now: float, loaded: Container[int]
    ) -> tuple[list[Entry], float | None]:
        """Read entries whose time in an index has come, unless an operator changed messages."""
        with self._usable as connection:
            next_at = page.read_timed(connection, query, now, loaded)
            # After an intervention, one may be in memory already, with its former address.
            self._check_current(connection)
        return self._readable(page), next_at

    def read_first(
        self, keys: Sequence[str], now: float, *, bytes_max: int
    ) -> tuple[list[Entry], int]:
        """Read the first open entry of each ordering key, if it is due and its key is not held."""
        page = SqlitePage(len(keys), bytes_max, self._keys)
        looked_at = 0
        with self._usable as connection:
            for key in keys:
                if not page.read_first(connection, key, now):
                    break
                looked_at += 1
        return self._readable(page), looked_at

    def _readable(self, page: SqlitePage) -> list[Entry]:
        """Return the entries of a page, and keep its other rows from being read again and again."""
        self._unopened.judge(page)
        if page.damaged or page.not_next:
            self._unfit |= page.damaged
            self._put_right(page.not_next)
        return page.entries

    def _put_right(self, not_next: Sequence[int] = ()) -> None:
        """Park damaged rows, and clear the due times of rows that are not next of their key."""
        damaged: list[DamagedRow] = []
        # If that is not possible now, `relieve` tries again: nothing else would read a damaged row
        # of the backlog again.
        with suppress(*TRANSIENT), self._writer as connection:
            with transaction(connection, self.path):
                self._check_owner(connection)
                if self._unfit:
                    damaged = park_damaged(connection, self._unfit, self._clock())
                connection.executemany(QUERIES["wait_for_key"], ((id_,) for id_ in not_next))
            self._damaged += damaged
            self._unfit = {}

    def lowest_awaited(self, first_id: int, at: float) -> int | None:
        """Return the lowest open id, from ``first_id`` on, that was to be sent by ``at``."""
        with self._usable as connection:
            first = _next_id_stored(connection, first_id, ID_MAX)
            if first is None:
                return None
            last = min(first + SCANNED_MAX - 1, ID_MAX)
            limits = {"first_id": first, "last_id": last, "at": at}
            (lowest,) = connection.execute(QUERIES["lowest_awaited"], limits).fetchone() or (None,)
            return _next_id_stored(connection, last + 1, ID_MAX) if lowest is None else int(lowest)

    def missed(self, id_: int) -> None:
        """Do nothing: what hides a message from reads will hide it from the next ones."""

    def held_exchanges(self, limit: int) -> list[HeldExchange]:
        """Return at most ``limit`` exchanges that have `HELD` entries."""
        found: list[HeldExchange] = []
        with self._usable as connection:
            for name, count, first in connection.execute(QUERIES["held_exchanges"], (limit,)):
                (since,) = connection.execute(QUERIES["refused_at"], (first,)).fetchone() or (None,)
                since = since if is_time(since) else None
                with suppress(UnicodeDecodeError, AttributeError):
                    name = name.decode()  # noqa: PLW2901 - it stays bytes or NULL if damaged
                found.append(HeldExchange(name if isinstance(name, str) else None, count, since))
        return found

    def changed_elsewhere(self) -> bool:
        """Whether another process has written to the store since the last call."""
        try:
            with self._usable:
                connection = self._writer.renewed()
                connection.place.note_index()  # first, so that a write after it is noticed
                before, self._version = self._version, _version_of(connection)
        except OutboxMoved as error:
            self._rescue(error)
        return before != self._version

    def may_have_changed(self) -> bool:
        """Whether a process may have written since `changed_elsewhere` was last asked."""
        connection = self._writer.connection
        if connection is None:
            return True
        if not connection.place.has_new_index():
            return False
        try:
            with self._usable as connection:
                connection.place.note_index()
                # If SQLite's lock was lost, `changed_elsewhere` has to open the file again, before
                # another process that closes the file deletes the log.
                if self._version == _version_of(connection) and connection.place.is_locked:
                    return False  # the commit was one of this connection
                connection.place.forget_index()
        except OutboxError:
            pass  # `changed_elsewhere` raises it
        return True

    def show(self, status: Mapping[str, object]) -> None:
        """Write the relay's status file. No decision depends on it."""
        write_status_file(self.path, {**status, "keys": fingerprints(self._keys)})

    def damaged(self) -> list[DamagedRow]:
        """Return the rows that were found damaged and parked since the last call."""
        rows, self._damaged = self._damaged, []
        return rows

    def touched(self) -> list[Touched]:
        """Return interventions in messages since the last call, or since the store was opened."""
        with self._usable as connection:
            rows = connection.execute(QUERIES["touched"], {"seen": self._seen}).fetchall()
        if rows:
            self._seen, *_ = rows[-1]
        return [
            Touched(id_, message_id, exchange, key, action, person, note, *map(bool, states))
            for _, id_, message_id, exchange, key, action, person, note, *states in rows
        ]

    def position(self, source: str) -> int:
        """Return how many entries of a named source were ever stored."""
        with self._usable as connection:
            row = connection.execute(QUERIES["position"], {"name": source}).fetchone()
            (position,) = row or (0,)
            return int(position)

    def close(self, last: Mapping[str, object] | None = None) -> None:
        """Close the connection and release the lock. Committed entries remain."""
        if os.getpid() != self._pid:
            return  # opened by the parent process: closing it here could remove the parent's log
        if not self._relay_lock.is_held:
            return
        try:
            if not self._has_moved:
                # A relay that is killed does neither: nothing that was stored depends on it.
                end = {"now": self._clock(), "run": self._run}
                with suppress(OutboxError), self._writer as c, transaction(c, self.path):
                    c.execute(QUERIES["end_run"], end)
            self._bell.close()
            self._writer.close()
            remove_status_file(self.path, last)
        finally:
            self._relay_lock.release()

    def _begin_run(self, connection: WritingConnection) -> tuple[int, int]:
        """Become the owner; return the number of the run, and that of the newest intervention."""
        now = self._clock()
        # The log may come from a process that was killed while its disk failed, so its pages may
        # be in the page cache only. The checkpoint writes and syncs them into the database.
        with checkpointing(connection), transaction(connection, self.path):
            limits = {"id_max": ID_MAX, "time_max": TIME_MAX}
            never_read = [id_ for (id_,) in connection.execute(QUERIES["never_read"], limits)]
            if never_read:
                reasons = dict.fromkeys(never_read, NEVER_READ)
                self._damaged += park_damaged(connection, reasons, now)
            settle_left_in_flight(connection, now)
            connection.execute(QUERIES["raise_last_id"], {"id_max": ID_MAX})
            connection.execute(QUERIES["rebase_retries"], {"now": now})
            names = (os.getpid(), socket.gethostname(), now)
            connection.execute(QUERIES["begin_run"], names)
            connection.execute(QUERIES["forget_old_runs"])
            run, _, seen = connection.execute(QUERIES["owner"]).fetchone()
        return run, seen

    def _commit(self, connection: WritingConnection, changes: Changes) -> Snapshot:
        if not self._shortage.is_on:
            snapshot = self._write(connection, changes)
        else:
            # It may change every page. If the clock was set back, the next start does it.
            changes.rebase = None
            make_room(connection, self.path, self._ballast)
            with checkpointing(connection):  # a checkpoint lets the log reuse its space
                for piece in pieces(changes):
                    self._write(connection, piece)
                snapshot = self._write(connection, changes)
        self._last_id = snapshot.last_id
        # Ignores the ring of this commit, and with it perhaps one of another process, whose commit
        # is then visible: only one process writes at a time.
        self._bell.has_rung()
        return snapshot

    def _write(self, connection: WritingConnection, changes: Changes) -> Snapshot:
        """Write changes in one transaction."""
        new_bytes = sum(map(size_of, changes.new))
        keep_s = 0.0 if self._shortage.is_on else self._keep_confirmed_s
        with transaction_at_path(connection, self.path):
            if self._check_owner(connection) != self._seen:  # `_check_current`, without its call
                raise Intervened
            if changes.new:
                self._ballast.check(connection, new_bytes)
            now = self._clock()
            write_changes(
                connection,
                changes,
                now,
                run=self._run,
                new_bytes=new_bytes,
                keep_confirmed=keep_s > 0,
                keys=self._keys,
            )
            snapshot = self._read_ledger(connection)
            self._check_ids(snapshot.last_id - len(changes.new))
            if self._has_kept:
                before = now - keep_s if keep_s > 0 else math.inf
                pruned = prune_confirmed(connection, before, len(changes.confirmed))
                self._has_kept = self._keep_confirmed_s > 0 or pruned > 0
        return snapshot

    def _read_ledger(self, connection: WritingConnection) -> Snapshot:
        row = connection.execute(QUERIES["snapshot"]).fetchone()
        return Snapshot(*ledger_of(row, self.path))

    def _give_space_back(self, connection: WritingConnection) -> None:
        """Rewrite the file, unless that has just failed."""
        if time.monotonic() >= self._next_rewrite_at and not give_space_back(connection):
            self._next_rewrite_at = time.monotonic() + REWRITE_RETRY_S

    def _forget_pages(self, connection: WritingConnection) -> None:
        """Empty the page cache now and then, so that the change counter rises (see `location`)."""
        now = time.monotonic()
        if now >= self._next_reread_at:
            self._next_reread_at = now + REREAD_S
            connection.execute("PRAGMA shrink_memory")

    def _park_mistyped(self, connection: WritingConnection, error: OutboxError) -> None:
        """Park the damaged rows that SQLite has refused to change; raise if that was not why."""
        if not isinstance(error.__cause__, sqlite3.IntegrityError):
            raise error
        with transaction(connection, self.path):
            mistyped = [id_ for (id_,) in connection.execute(QUERIES["mistyped"])]
            if not mistyped:
                raise error
            damaged = park_damaged(connection, dict.fromkeys(mistyped, MISTYPED), self._clock())
        self._damaged += damaged

    def _check_owner(self, connection: WritingConnection) -> int:
        """Check that this is the newest run; return the number of the newest intervention."""
        # The lock alone fails if the lock file was removed.
        run, pid, newest = connection.execute(QUERIES["owner"]).fetchone() or (0, 0, 0)
        if run > self._run:
            raise OutboxInUse(
                f"outbox {self.path} was taken over by process {pid}; this relay stops"
            )
        if run < self._run or newest < self._seen:
            raise self._older_copy()
        return int(newest)

    def _check_ids(self, last_id: int) -> None:
        """Check that no id is assigned a second time: the relay would not look for its message."""
        if last_id < self._last_id:
            raise self._older_copy()

    def _older_copy(self) -> OutboxError:
        return OutboxError(
            f"outbox {self.path} was replaced by an older copy, perhaps a restored backup: "
            "this relay stops; messages that were stored after the copy was made are not in it"
        )

    def _check_current(self, connection: WritingConnection) -> None:
        """Check that this is the newest run, and that it has read every intervention."""
        if self._check_owner(connection) != self._seen:
            raise Intervened

    def _rescue(self, error: OutboxMoved) -> NoReturn:
        """Copy the open database, because the path leads to other files now."""
        self._has_moved = True
        connection = self._writer.connection
        if connection is None:  # closed for a fork, and moved before it was opened again
            raise error
        told = rescued(connection, self.path, self._run, error)
        self._writer.leave()
        raise told from error

    @property
    def _usable(self) -> Writer:
        """The connection to read or write with; raises if the store is closed, or was forked."""
        if os.getpid() != self._pid:
            raise PublisherForked(
                f"outbox {self.path} was opened before the fork; open it in the child"
            )
        if not self._relay_lock.is_held:
            raise OutboxError(f"outbox {self.path} is closed")
        return self._writer


def _version_of(connection: WritingConnection) -> tuple[WritingConnection, int]:
    """Return a value that changes when another connection writes; it belongs to one connection."""
    (version,) = connection.execute("PRAGMA data_version").fetchone()
    return connection, version


def _forget_ids(changes: Changes) -> None:
    """Reset the ids of new entries: an entry that is not stored has none."""
    if any(map(id_of, changes.new)):
        for entry in changes.new:
            entry.id = 0
