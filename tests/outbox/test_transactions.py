"""What a transaction leaves behind, and says, when a part of it fails."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from reliablepub.errors import (
    OutboxDiskFailed,
    OutboxDiskFull,
    OutboxError,
    OutboxLocked,
    OutboxUnsure,
)
from reliablepub.message import Message
from reliablepub.outbox.entry import Changes
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.patience import Patience
from reliablepub.outbox.sqlite import transactions
from reliablepub.outbox.sqlite.location import Place, WritingConnection
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outbox.sqlite.transactions import transaction
from tests.outbox.conftest import Make
from tests.sqlite import writer_of

FULL, IOERR_FSYNC = sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_FSYNC


def failure(code: int) -> sqlite3.Error:
    error = sqlite3.OperationalError(f"code {code}")
    error.sqlite_errorcode = code
    return error


class Failing(WritingConnection):
    """Its next commits end with these codes (0: well), its rollbacks with that one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.commits: list[int] = []
        self.rollback_code = 0

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        if sql == "COMMIT" and self.commits and (code := self.commits.pop(0)):
            raise failure(code)
        if sql == "ROLLBACK" and self.rollback_code:
            raise failure(self.rollback_code)
        return super().execute(sql, *parameters)


@pytest.fixture
def connection(path: Path) -> Iterator[Failing]:
    with closing(
        sqlite3.connect(path, isolation_level=None, timeout=0, factory=Failing)
    ) as connection:
        connection.execute("CREATE TABLE t (n)")
        connection.place = Place(path)
        yield connection


def stored(connection: Failing) -> list[int]:
    return [n for (n,) in connection.execute("SELECT n FROM t ORDER BY n")]


def test_a_transaction_has_the_write_lock_from_its_begin(connection: Failing, path: Path) -> None:
    with (
        closing(sqlite3.connect(path, timeout=0)) as other,
        transaction(connection, path),
        pytest.raises(sqlite3.OperationalError, match="locked"),
    ):
        other.execute("INSERT INTO t VALUES (0)")
    assert not connection.in_transaction


def test_who_cannot_have_the_lock_has_changed_nothing(connection: Failing, path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(OutboxLocked), transaction(connection, path):
            pytest.fail("it has begun")
    assert not connection.in_transaction


class Waiting:
    """The clock of a writer that waits, and another connection that gives the lock back in time.

    Args:
        other: holds the lock.
        held_s: for how long.
    """

    def __init__(self, other: sqlite3.Connection, held_s: float) -> None:
        self._other, self._held_s = other, held_s
        self.now = 0.0
        self.tries = 1
        other.execute("BEGIN IMMEDIATE")

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.tries += 1
        if self._other.in_transaction and self.now >= self._held_s:
            self._other.execute("ROLLBACK")


@pytest.fixture
def waiting(
    connection: Failing, path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[float], Waiting]]:
    connection.execute("PRAGMA busy_timeout = 5000")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:

        def wait(held_s: float) -> Waiting:
            clock = Waiting(other, held_s)
            monkeypatch.setattr(transactions, "time", clock)
            return clock

        yield wait


@pytest.mark.parametrize("held_s", [0.000_1, 0.002, 0.05, 1.0, 4.99])
def test_a_lock_that_was_given_back_is_taken_within_a_millisecond(
    connection: Failing, path: Path, held_s: float, waiting: Callable[[float], Waiting]
) -> None:
    clock = waiting(held_s)
    with transaction(connection, path):
        assert clock.now - held_s <= 0.001
    assert clock.now == pytest.approx(connection.patience.lock_wait_s)
    # Other writers, and the one that has the lock, need the processor.
    assert clock.tries <= 2 + min(held_s / 0.000_2, 50 + held_s / 0.001)


def test_the_wait_for_a_lock_ends_at_the_timeout_of_the_connection(
    connection: Failing, path: Path, waiting: Callable[[float], Waiting]
) -> None:
    clock = waiting(60.0)
    with pytest.raises(OutboxLocked, match="database is locked"), transaction(connection, path):
        pytest.fail("it has begun")
    assert clock.now == pytest.approx(5.0)


@pytest.mark.parametrize("held_s", [0.0, 0.1, 60.0])
def test_the_timeout_of_an_applications_connection_stays(
    path: Path, held_s: float, waiting: Callable[[float], Waiting]
) -> None:
    Outbox(path).create()
    with closing(sqlite3.connect(path, timeout=0.25)) as application:
        clock = waiting(held_s)
        if held_s > 0.25:
            with pytest.raises(OutboxLocked):
                Outbox(path).enqueue(b"", connection=application)
            assert clock.now == pytest.approx(0.25)
        else:
            Outbox(path).enqueue(b"", connection=application)
        assert application.execute("PRAGMA busy_timeout").fetchone() == (250,)


@pytest.mark.parametrize("begun", [False, True])
def test_a_connection_that_reads_an_older_state_is_told_so_at_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, begun: bool
) -> None:
    outbox = Outbox(path)
    waits = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: pytest.fail("it waits"))
    for _ in range(4):
        outbox.enqueue(b"")
    with closing(sqlite3.connect(path, isolation_level=None)) as application:
        if begun:
            application.execute("BEGIN")
        rows = application.execute("SELECT id FROM reliablepub_messages")
        assert next(rows) == (1,)
        outbox.enqueue(b"")
        monkeypatch.setattr(transactions, "time", waits)
        with pytest.raises(OutboxError, match="changed since this connection began to") as error:
            outbox.enqueue(b"", connection=application)
        assert not error.value.retryable
        rows.close()
        if begun:
            application.execute("ROLLBACK")
        outbox.enqueue(b"", connection=application)
    assert outbox.status().open == 6


def insert_and_fail(connection: Failing, error: Exception | None) -> None:
    connection.execute("INSERT INTO t VALUES (1)")
    if error is not None:
        raise error


@pytest.mark.parametrize(
    ("before", "at_commit", "told"),
    [
        pytest.param(ZeroDivisionError(), 0, ZeroDivisionError, id="no error of SQLite's"),
        pytest.param(failure(IOERR_FSYNC), 0, OutboxDiskFailed, id="a disk that fails before"),
        pytest.param(None, FULL, OutboxDiskFull, id="a full disk at the commit"),
    ],
)
def test_an_error_that_leaves_no_doubt_undoes_all(
    connection: Failing, path: Path, before: Exception | None, at_commit: int, told: Any
) -> None:
    connection.commits = [at_commit]
    with pytest.raises(told) as caught, transaction(connection, path):
        insert_and_fail(connection, before)
    if isinstance(caught.value, OutboxError):
        assert str(path) in str(caught.value)
        assert isinstance(caught.value.__cause__, sqlite3.OperationalError)
    assert (stored(connection), connection.in_transaction) == ([], False)


def test_a_disk_that_fails_in_the_commit_leaves_its_fate_open(
    connection: Failing, path: Path
) -> None:
    connection.commits = [IOERR_FSYNC]
    words = f"outbox {path}.*it is unknown.*code {IOERR_FSYNC}"
    with pytest.raises(OutboxUnsure, match=words), transaction(connection, path):
        connection.execute("INSERT INTO t VALUES (1)")
    assert not connection.in_transaction


def test_a_rollback_that_fails_does_not_hide_why_it_was_needed(
    connection: Failing, path: Path
) -> None:
    connection.rollback_code = IOERR_FSYNC
    with pytest.raises(OutboxDiskFull), transaction(connection, path):
        raise failure(FULL)


# ------------------------------------------------------------------------------ a turn of the store


class Doubtful:
    """A store's connection; the disk fails in its next commits, which come to light or are lost."""

    def __init__(self, real: sqlite3.Connection, *fates: str) -> None:
        self.real = real
        self.fates = list(fates)

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        if sql == "COMMIT" and self.fates:
            if self.fates.pop(0) == "light":
                self.real.execute(sql)
            raise failure(IOERR_FSYNC)
        return self.real.execute(sql, *parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def doubt(store: SqliteStore | Outbox, *fates: Literal["light", "lost"]) -> None:
    writer = store._writer if isinstance(store, SqliteStore) else writer_of(store)
    real = writer.opened()
    writer.connection = Doubtful(real, *fates)  # type: ignore[assignment]


def test_a_turn_that_was_lost_can_be_tried_again(store: SqliteStore, entry: Make) -> None:
    store.commit(Changes(new=[old := entry()]))
    doubt(store, "lost")
    changes = Changes(new=(new := [entry(), entry()]), confirmed=[old])
    with pytest.raises(OutboxUnsure):
        store.commit(changes)
    assert [one.id for one in new] == [0, 0]
    snapshot = store.commit(changes)
    assert [one.id for one in new] == [2, 3]
    assert (snapshot.counters.stored, snapshot.counters.confirmed) == (3, 1)
    found, _ = store.read_ready(1, 9, limit=9, bytes_max=10**9)
    assert [one.id for one in found] == [2, 3]


def test_a_turn_that_came_to_light_is_found(store: SqliteStore, entry: Make) -> None:
    doubt(store, "light")
    new = [entry() for _ in range(3)]
    with pytest.raises(OutboxUnsure):
        store.commit(Changes(new=new))
    assert [one.id for one in new] == [0, 0, 0]
    assert store.changed_elsewhere()
    assert store.snapshot().counters.stored == 3


def test_outcomes_that_came_to_light_may_be_written_twice(store: SqliteStore, entry: Make) -> None:
    store.commit(Changes(new=(new := [entry(), entry()])))
    doubt(store, "light")
    changes = Changes(confirmed=new[:1])
    with pytest.raises(OutboxUnsure):
        store.commit(changes)
    counters = store.commit(changes).counters
    assert (counters.stored, counters.confirmed, counters.open) == (2, 1, 1)


# ------------------------------------------------------------------------- a message of `enqueue`


@pytest.mark.parametrize(("fate", "stored"), [("lost", 1), ("light", 2)])
def test_a_message_in_doubt_is_told_as_such(
    path: Path, fate: Literal["light", "lost"], stored: int
) -> None:
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b"before"))
        doubt(outbox, fate)
        with pytest.raises(OutboxUnsure):
            outbox.enqueue(Message(b"in doubt"))
        assert outbox.status().open == stored


def test_the_time_spent_waiting_never_falls(path: Path) -> None:
    """Prometheus takes a counter that falls for one that began anew, and counts it twice."""
    patience = Patience("")
    store = SqliteStore(path, patience=patience)
    writer = store._writer
    first = writer.opened()
    first.patience.lock_wait_s = 2.0
    writer.rest()  # as before a fork
    second = writer.opened()
    assert second is not first
    second.patience.lock_wait_s += 0.5
    store.close()
    assert 2.5 <= patience.lock_wait_s < 3.5
    assert writer.connection is None
