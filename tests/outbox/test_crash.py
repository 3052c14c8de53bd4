"""A child process is killed before each statement; the next process finds a whole outbox."""

import os
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from reliablepub._core.events import Batch
from reliablepub.errors import OutboxError
from reliablepub.message import Message
from reliablepub.outbox.entry import Attempt, Changes, Entry
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite.location import WritingConnection
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import NACKED, Outcome, OutcomeKind

Rows = Callable[[Path], dict[str, list[tuple[Any, ...]]]]
Child = Callable[[Callable[[], None]], int]
STATEMENTS_MAX = 200


def kill_before(statement: int) -> Callable[[str], None]:
    """A trace callback: SQLite calls it as each statement begins, also for each row of many."""
    left = statement

    def trace(sql: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return trace


def new_entry(number: int) -> Entry:
    return Entry(Message(b"body", "x", "k", message_id=f"m-{number}"), 1.0)


def fill(path: Path) -> tuple[SqliteStore, Changes]:
    """A store with a history, and a turn that does everything a turn can do."""
    store = SqliteStore(path)
    old = [new_entry(n) for n in range(1, 8)]
    first = Batch(1, 1, old)
    store.commit(Changes(new=old, sources={"s": 7}, sent=[first]))
    refused = Outcome(OutcomeKind.REFUSED, 404, "NOT_FOUND")
    parked = [Attempt(e, "1-1", e.id, refused, 2.0) for e in old[2:4]]
    nacked = Attempt(old[4], "1-1", 5, NACKED, 2.0)
    old[4].due_at, old[4].nacked = 9.0, 1
    new = [new_entry(n) for n in range(8, 11)]
    turn = Changes(
        new=new,
        sources={"s": 3},
        confirmed=[old[0], old[1], old[6]],
        parked=parked,
        attempts=[*parked, nacked],
        rescheduled=[old[4]],
        sent=[Batch(2, 1, [old[5], *new])],
        finished=[first],
    )
    return store, turn


def test_a_turn_is_there_wholly_or_not_at_all(tmp_path: Path, rows: Rows, child: Child) -> None:
    folder = tmp_path / "whole"
    folder.mkdir()
    path = folder / "outbox.db"
    store, turn = fill(path)
    before = rows(path)
    store.commit(turn)
    after = rows(path)
    store.close()
    clockless = {"in_flight"}  # it has the time of writing
    seen_before = 0
    for statement in range(1, STATEMENTS_MAX):
        path = tmp_path / f"{statement}.db"

        def commit(path: Path = path, statement: int = statement) -> None:
            store, turn = fill(path)
            store._writer.opened().set_trace_callback(kill_before(statement))
            store.commit(turn)
            os._exit(0)  # after the commit, and before anything is closed

        status = child(commit)
        assert status in (0, -signal.SIGKILL)
        expected = after if status == 0 else before
        found = rows(path)
        for table in expected.keys() - clockless:
            assert found[table] == expected[table], f"{table} before statement {statement}"
        assert [r[:4] for r in found["in_flight"]] == [r[:4] for r in expected["in_flight"]]
        with closing(SqliteStore(path)) as store:  # no lease, no lock and no damage is left behind
            store.commit(Changes(new=[new_entry(99)]))
            assert store._writer.opened().execute("PRAGMA integrity_check").fetchone() == ("ok",)
        if status == 0:
            break
        seen_before += 1
    assert seen_before > 20, "the turn has more statements than that"
    assert status == 0, "the last one ran to its end"


def test_creation_is_there_wholly_or_not_at_all(
    tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = 0
    for statement in range(1, STATEMENTS_MAX):
        path = tmp_path / f"{statement}.db"

        class Killed(WritingConnection):
            kill_at = statement

            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                self.set_trace_callback(kill_before(self.kill_at))

        def create(path: Path = path, kind: type[sqlite3.Connection] = Killed) -> None:
            connect = sqlite3.connect
            sqlite3.connect = lambda *a, **o: connect(*a, **o | {"factory": kind})
            SqliteStore(path)
            os._exit(0)

        status = child(create)
        assert status in (0, -signal.SIGKILL)
        with closing(SqliteStore(path)) as store:
            assert store.commit(Changes(new=[new_entry(1)])).counters.stored == 1
        if status == 0:
            break
        kills += 1
    assert kills > 15
    assert status == 0


def test_a_database_killed_within_a_commit_before_it_had_a_log_can_be_opened(
    path: Path, child: Child
) -> None:
    def die_half_way() -> None:
        db = sqlite3.connect(path, isolation_level=None)
        db.execute("CREATE TABLE orders (body)")
        db.execute("PRAGMA cache_size = 1")  # so that pages are written before the commit
        db.execute("BEGIN")
        db.executemany("INSERT INTO orders VALUES (?)", [(bytes(4_096),)] * 50)
        os.kill(os.getpid(), signal.SIGKILL)

    assert child(die_half_way) == -signal.SIGKILL
    with pytest.raises(OutboxError, match="interrupted transaction"):
        Outbox(path).status()
    with closing(SqliteStore(path)) as store:
        assert store.commit(Changes(new=[new_entry(1)])).counters.stored == 1
        assert store._writer.opened().execute("SELECT count(*) FROM orders").fetchone() == (0,)
    assert Outbox(path).status().stored == 1


def test_recovery_itself_may_be_killed(tmp_path: Path, child: Child, rows: Rows) -> None:
    kills = 0
    for statement in range(1, STATEMENTS_MAX):
        path = tmp_path / f"{statement}.db"

        class Killed(WritingConnection):
            kill_at = statement

            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                self.set_trace_callback(kill_before(self.kill_at))

        def leave_in_flight(path: Path = path) -> None:
            fill(path)
            os._exit(0)

        def recover(path: Path = path, kind: type[sqlite3.Connection] = Killed) -> None:
            connect = sqlite3.connect
            sqlite3.connect = lambda *a, **o: connect(*a, **o | {"factory": kind})
            SqliteStore(path)
            os._exit(0)

        assert child(leave_in_flight) == 0
        status = child(recover)
        with closing(SqliteStore(path)) as store:
            found = store.read_ready(1, 99, limit=99, bytes_max=10**9)[0]
            assert [e.uncertain for e in found] == [1] * 7, (
                "counted once, however often it is tried"
            )
        assert len(rows(path)["attempts"]) == 7
        if status == 0:
            break
        kills += 1
    assert kills > 5
    assert status == 0


def test_enqueue_is_there_wholly_or_not_at_all(tmp_path: Path, child: Child) -> None:
    kills = 0
    for statement in range(1, STATEMENTS_MAX):
        path = tmp_path / f"{statement}.db"

        def enqueue(path: Path = path, statement: int = statement) -> None:
            db = sqlite3.connect(path)
            db.execute("CREATE TABLE orders (id)")
            db.set_trace_callback(kill_before(statement))
            with db:
                db.execute("INSERT INTO orders VALUES (1)")
                Outbox(path).enqueue(Message(b"order 1"), connection=db)
            os._exit(0)

        status = child(enqueue)
        with closing(sqlite3.connect(path)) as db:
            orders = db.execute("SELECT count(*) FROM orders").fetchone()[0]
            tables = db.execute(
                "SELECT count(*) FROM sqlite_schema WHERE name = 'reliablepub_messages'"
            ).fetchone()
            messages = 0
            if tables[0]:
                (messages,) = db.execute("SELECT count(*) FROM reliablepub_messages").fetchone()
        assert orders == messages == (1 if status == 0 else 0)
        if status == 0:
            break
        kills += 1
    assert kills > 15
    assert status == 0
