"""What is kept of messages that are gone, and space that is given back."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from reliablepub.message import Message
from reliablepub.outbox import Outbox, retention
from reliablepub.outbox.entry import Attempt, Entry, Turn
from reliablepub.outbox.store import SqliteStore
from reliablepub.outcome import Outcome, OutcomeKind

Make = Callable[..., Entry]
DAY_S = 86_400.0
REFUSED = Outcome(OutcomeKind.REFUSED, 404, "NOT_FOUND")


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.time", clock)
    return clock


@pytest.fixture
def app(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (id)")
        yield connection


def count(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute(f"SELECT count(*) FROM reliablepub_{table}").fetchone()[0])


def test_a_second_message_with_the_same_key_is_not_stored(path: Path) -> None:
    with Outbox(path) as outbox:
        first = outbox.enqueue(Message(b"1", message_id="m-1"), key="order 17")
        again = outbox.enqueue(Message(b"2", message_id="m-2"), key="order 17")
        other = outbox.enqueue(Message(b"3", message_id="m-3"), key="order 18")
        assert (first, again, other) == ("m-1", "m-1", "m-3")
        assert outbox.enqueue(Message(b"1", message_id="m-1")) == "m-1", "without a key"
        assert outbox.status().stored == 3
        assert outbox.audit().is_right


def test_a_key_belongs_to_the_callers_transaction(path: Path, app: sqlite3.Connection) -> None:
    outbox = Outbox(path)
    outbox.enqueue(Message(b"", message_id="m-1"), key="k", connection=app)
    app.rollback()
    for autocommit in (None, ""):
        app.isolation_level = autocommit  # type: ignore[assignment]
        with app:
            assert outbox.enqueue(Message(b"", message_id="m-2"), key="k", connection=app) == "m-2"
            assert outbox.enqueue(Message(b"", message_id="m-3"), key="k", connection=app) == "m-2"
    assert outbox.enqueue(Message(b"", message_id="m-4"), key="k") == "m-2"
    assert outbox.status().stored == 1


def test_of_many_at_once_one_is_stored(path: Path) -> None:
    ids: list[str] = []

    def enqueue() -> None:
        with Outbox(path) as outbox:
            ids.extend(outbox.enqueue(Message(b""), key=f"k{n}") for n in range(20))

    threads = [Thread(target=enqueue) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 80
    assert len(set(ids)) == Outbox(path).status().stored == 20


def test_a_key_outlives_its_message_for_a_while(path: Path, clock: Clock) -> None:
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b"", message_id="m-1"), key="k")
        with closing(SqliteStore(path)) as store:
            store.commit(Turn(confirmed=store.read_ready(1, 1, limit=1, bytes_max=10**9)[0]))
        clock.now += retention.KEYS_KEPT_S - 1
        assert outbox.enqueue(Message(b"", message_id="m-2"), key="k") == "m-1"
        clock.now += 2
        assert outbox.enqueue(Message(b"", message_id="m-3"), key="k") == "m-3"


@pytest.mark.parametrize("is_parked", [False, True])
def test_a_key_is_not_forgotten_before_its_message(
    path: Path, clock: Clock, *, is_parked: bool
) -> None:
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b"", message_id="m-1"), key="k")
        if is_parked:
            with closing(SqliteStore(path)) as store:
                (entry,) = store.read_ready(1, 1, limit=1, bytes_max=10**9)[0]
                attempt = Attempt(entry, "1-1", 1, REFUSED, 2.0)
                store.commit(Turn(parked=[attempt], attempts=[attempt]))
        for number in range(3):
            clock.now += 30 * DAY_S
            outbox.enqueue(Message(b""), key=f"another {number}")
            assert outbox.enqueue(Message(b"", message_id="m-2"), key="k") == "m-1"


def test_old_keys_do_not_pile_up(path: Path, clock: Clock) -> None:
    with Outbox(path) as outbox:
        for number in range(50):
            outbox.enqueue(Message(b""), key=f"old {number}")
        with closing(SqliteStore(path)) as store:
            store.commit(Turn(confirmed=store.read_ready(1, 99, limit=99, bytes_max=10**9)[0]))
        clock.now += retention.KEYS_KEPT_S + 1
        for number in range(20):
            outbox.enqueue(Message(b""), key=f"new {number}")
    assert count(path, "keys") == 20


def test_keys_whose_messages_are_there_do_not_keep_old_ones(path: Path, clock: Clock) -> None:
    with Outbox(path) as outbox:
        for number in range(2 * retention.KEYS_LOOKED_AT):
            outbox.enqueue(Message(b""), key=f"open {number}")
        clock.now += 1
        for number in range(9):
            outbox.enqueue(Message(b""), key=f"gone {number}")
        with closing(SqliteStore(path)) as store:
            entries, _ = store.read_ready(1, 99, limit=99, bytes_max=10**9)
            store.commit(Turn(confirmed=entries[2 * retention.KEYS_LOOKED_AT :]))
        clock.now += retention.KEYS_KEPT_S + 1
        for number in range(9):
            outbox.enqueue(Message(b""), key=f"new {number}")
    assert count(path, "keys") == 2 * retention.KEYS_LOOKED_AT + 9


def test_confirmed_messages_are_kept_for_a_while_if_asked(
    path: Path, clock: Clock, entry: Make, rows: Callable[[Path], dict[str, list[Any]]]
) -> None:
    with closing(SqliteStore(path, keep_confirmed_s=60, clock=clock)) as store:
        entries = [entry() for _ in range(5)]
        store.commit(Turn(new=entries))
        store.commit(Turn(confirmed=[*entries[:2], entries[3]]))
        store.commit(Turn(confirmed=entries[:2]))
        assert store.snapshot().counters.confirmed == 3
        clock.now += 59
        store.commit(Turn(confirmed=[entries[2]]))
        assert count(path, "confirmed") == 4
        clock.now += 2
        store.commit(Turn(new=[entry()]))
        assert count(path, "confirmed") == 1
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT id, message_id, exchange FROM reliablepub_confirmed_messages"
        assert connection.execute(query).fetchall() == [(3, "m-3", "orders")]
    assert Outbox(path).audit().is_right
    with closing(SqliteStore(path)) as store:  # not asked any more: they go
        store.commit(Turn(new=[entry()]))
    assert count(path, "confirmed") == 0
    assert len(rows(path)["messages"]) == 3


@pytest.mark.parametrize(("asked", "kept"), [({}, 0), ({"keep_confirmed_s": 0.5}, 1)])
def test_nothing_is_kept_unless_asked_however_short(
    path: Path, clock: Clock, entry: Make, asked: dict[str, float], kept: int
) -> None:
    with closing(SqliteStore(path, clock=clock, **asked)) as store:  # type: ignore[arg-type]
        store.commit(Turn(new=[one := entry()]))
        store.commit(Turn(confirmed=[one]))
        assert count(path, "confirmed") == kept


def test_they_are_pruned_in_small_steps_that_keep_up(
    path: Path, clock: Clock, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "PRUNED_MIN", 10)
    with closing(SqliteStore(path, keep_confirmed_s=60, clock=clock)) as store:
        entries = [entry() for _ in range(200)]
        store.commit(Turn(new=entries))
        store.commit(Turn(confirmed=entries[:100]))
        clock.now += 61
        left = [count(path, "confirmed")]
        for number in range(100, 200, 20):
            store.commit(Turn(confirmed=entries[number : number + 20]))
            left.append(count(path, "confirmed"))
    assert left == [100, 80, 60, 60, 80, 100], "twice as many go as come, until the old are gone"


def test_a_kept_message_is_no_open_one_when_the_file_is_damaged(path: Path, entry: Make) -> None:
    with closing(SqliteStore(path, keep_confirmed_s=60)) as store:
        entries = [entry() for _ in range(5)]
        store.commit(Turn(new=entries))
        store.commit(Turn(confirmed=entries[:3]))
    found = Outbox(path.with_name("new.db")).salvage(path)
    assert (found.open, found.broken) == (2, ())


def test_a_file_gives_its_space_back(
    path: Path, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "FREE_PAGES_MIN", 50)
    monkeypatch.setattr(retention, "PAGES_GIVEN_BACK", 20)
    with closing(SqliteStore(path)) as store:
        entries = [entry(body=b"x" * 10_000) for _ in range(200)]
        store.commit(Turn(new=entries))
        sizes = []
        while entries:
            store.commit(Turn(confirmed=entries[:10]))
            del entries[:10]
            sizes.append(store._connection.execute("PRAGMA page_count").fetchone()[0])
        for _ in range(40):
            store.commit(Turn(new=[one := entry()]))
            store.commit(Turn(confirmed=[one]))
            sizes.append(store._connection.execute("PRAGMA page_count").fetchone()[0])
    assert max(a - b for a, b in pairwise(sizes)) <= 41, "in small steps, two commits apart"
    assert sizes[-1] < sizes[0] // 4
    assert path.stat().st_size == sizes[-1] * 4096


@pytest.mark.parametrize(("free", "is_cut"), [(9, False), (10, False), (11, True)])
@pytest.mark.parametrize("odd", [0, 1])
def test_space_is_given_back_when_more_than_half_is_free(
    path: Path, monkeypatch: pytest.MonkeyPatch, free: int, *, is_cut: bool, odd: int
) -> None:
    monkeypatch.setattr(retention, "FREE_PAGES_MIN", 5)
    with closing(file_of_pages(path, 20 + odd, free)) as connection:
        retention.give_space_back(connection)
        assert (retention.free_pages(connection) < free) == is_cut


@pytest.mark.parametrize(("spare", "is_cut"), [(11, True), (12, False)])
def test_some_space_is_spared_for_the_next_burst(
    path: Path, monkeypatch: pytest.MonkeyPatch, spare: int, *, is_cut: bool
) -> None:
    monkeypatch.setattr(retention, "FREE_PAGES_MIN", spare)
    with closing(file_of_pages(path, 20, 11)) as connection:
        retention.give_space_back(connection)
        assert (retention.free_pages(connection) < 11) == is_cut


def file_of_pages(path: Path, pages: int, free: int) -> sqlite3.Connection:
    """A database of so many pages, some of them free; an empty table is one page."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    tables = 0
    while connection.execute("PRAGMA page_count").fetchone() < (pages,):
        connection.execute(f"CREATE TABLE t{tables} (n)")
        tables += 1
    for number in range(free):
        connection.execute(f"DROP TABLE t{number}")
    assert (retention.free_pages(connection), tables > free) == (free, True)
    return connection


def test_the_file_of_an_application_is_left_as_it_is(path: Path, app: sqlite3.Connection) -> None:
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b""))
    assert app.execute("PRAGMA auto_vacuum").fetchone() == (0,)
    with Outbox(path.with_name("own.db")) as outbox:
        outbox.enqueue(Message(b""))
        assert outbox._connection is not None
        assert outbox._connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
