"""A child process is killed before each statement; the next process finds a whole outbox."""

import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
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
from reliablepub.outcome import NACKED
from tests.outcomes import REFUSED
from tests.sqlite import count, sql

Rows = Callable[[Path], dict[str, list[tuple[Any, ...]]]]
Child = Callable[[Callable[[], None]], int]
STATEMENTS_MAX = 200


def kill_before(statement: int) -> Callable[[str], None]:
    """A trace callback: SQLite calls it as each statement begins, also for each row of many."""
    left = statement

    def trace(_sql: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return trace


def kill_connections_before(statement: int) -> None:
    """Have each connection that this process opens kill it before its n-th statement."""

    class Killed(WritingConnection):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.set_trace_callback(kill_before(statement))

    connect = sqlite3.connect
    sqlite3.connect = lambda *args, **options: connect(*args, **options | {"factory": Killed})


def killed_at_each_statement(
    child: Child, act: Callable[[int], None], *, more_than: int
) -> Iterator[tuple[int, bool]]:
    """Run `act(n)` in a child for n from 1 until it ends by itself; yield n and whether it did."""
    for statement in range(1, STATEMENTS_MAX):
        status = child(partial(act, statement))
        assert status in (0, -signal.SIGKILL)
        yield statement, status == 0
        if status == 0:
            assert statement > more_than, "it has fewer statements than expected"
            return
    pytest.fail("it has more statements than that")


def new_entry(number: int) -> Entry:
    return Entry(Message(b"body", "x", "k", message_id=f"m-{number}"), 1.0)


def fill(path: Path) -> tuple[SqliteStore, Changes]:
    """A store with a history, and a turn that does everything a turn can do."""
    store = SqliteStore(path)
    old = [new_entry(n) for n in range(1, 8)]
    first = Batch(1, 1, old)
    store.commit(Changes(new=old, sources={"s": 7}, sent=[first]))
    parked = [Attempt(e, "1-1", e.id, REFUSED, 2.0) for e in old[2:4]]
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
    whole = tmp_path / "whole.db"
    store, turn = fill(whole)
    before = rows(whole)
    store.commit(turn)
    after = rows(whole)
    store.close()
    clockless = {"in_flight"}  # it has the time of writing

    def commit(statement: int) -> None:
        store, turn = fill(tmp_path / f"{statement}.db")
        store._writer.opened().set_trace_callback(kill_before(statement))
        store.commit(turn)
        os._exit(0)  # after the commit, and before anything is closed

    for statement, has_ended in killed_at_each_statement(child, commit, more_than=21):
        path = tmp_path / f"{statement}.db"
        expected = after if has_ended else before
        found = rows(path)
        for table in expected.keys() - clockless:
            assert found[table] == expected[table], f"{table} before statement {statement}"
        assert [r[:4] for r in found["in_flight"]] == [r[:4] for r in expected["in_flight"]]
        with closing(SqliteStore(path)) as store:  # no lock and no damage is left behind
            store.commit(Changes(new=[new_entry(99)]))
            assert store._writer.opened().execute("PRAGMA integrity_check").fetchone() == ("ok",)


def open_and_be_killed(folder: Path, statement: int) -> None:
    kill_connections_before(statement)
    SqliteStore(folder / f"{statement}.db")
    os._exit(0)


def test_creation_is_there_wholly_or_not_at_all(tmp_path: Path, child: Child) -> None:
    create = partial(open_and_be_killed, tmp_path)
    for statement, _ in killed_at_each_statement(child, create, more_than=16):
        with closing(SqliteStore(tmp_path / f"{statement}.db")) as store:
            assert store.commit(Changes(new=[new_entry(1)])).counters.stored == 1


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
    def leave_in_flight(path: Path) -> None:
        fill(path)
        os._exit(0)

    for statement in range(1, STATEMENTS_MAX):
        path = tmp_path / f"{statement}.db"
        assert child(partial(leave_in_flight, path)) == 0
        status = child(partial(open_and_be_killed, tmp_path, statement))
        with closing(SqliteStore(path)) as store:
            found = store.read_ready(1, 99, limit=99, bytes_max=10**9)[0]
            assert [e.uncertain for e in found] == [1] * 7, "once, however often it is tried"
        assert len(rows(path)["attempts"]) == 7
        if status == 0:
            break
    assert statement > 6
    assert status == 0


def test_enqueue_is_there_wholly_or_not_at_all(tmp_path: Path, child: Child) -> None:
    def enqueue(statement: int) -> None:
        path = tmp_path / f"{statement}.db"
        db = sqlite3.connect(path)
        db.execute("CREATE TABLE orders (id)")
        db.set_trace_callback(kill_before(statement))
        with db:
            db.execute("INSERT INTO orders VALUES (1)")
            Outbox(path).enqueue(Message(b"order 1"), connection=db)
        os._exit(0)

    tables = "SELECT count(*) FROM sqlite_schema WHERE name = 'reliablepub_messages'"
    for statement, has_ended in killed_at_each_statement(child, enqueue, more_than=16):
        path = tmp_path / f"{statement}.db"
        assert sql(path, "SELECT count(*) FROM orders") == [(has_ended,)]
        messages = count(path, "messages") if sql(path, tables) == [(1,)] else 0
        assert messages == has_ended
