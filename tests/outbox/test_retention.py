"""What is kept of messages that are gone, and space that is given back."""

import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reliablepub.message import Message
from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.database import KEYS_KEPT_S
from reliablepub.outbox.entry import Attempt, Changes
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite import retention, space
from reliablepub.outbox.sqlite import store as store_module
from reliablepub.outbox.sqlite.enqueue import KEYS_LOOKED_AT
from reliablepub.outbox.sqlite.lock import lock_path
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.asking import confirm, connect, count, fill, opened, park, sql, stored
from tests.outbox.conftest import DAY_S, Clock, Make, deleting
from tests.outbox.shim import CANTOPEN, shim
from tests.outcomes import REFUSED
from tests.sqlite import edit_lax, writer_of
from tests.stores import Where

IDS_OF_ATTEMPTS = "SELECT DISTINCT id FROM reliablepub.attempts ORDER BY id"


@pytest.fixture
def clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr("time.time", clock)
    return clock


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
    def enqueue(_: int) -> list[str]:
        with Outbox(path) as outbox:
            return [outbox.enqueue(Message(b""), key=f"k{n}") for n in range(20)]

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(enqueue, range(4)))
    assert found == [found[0]] * 4
    assert len(set(found[0])) == Outbox(path).status().stored == 20


def test_a_key_outlives_its_message_for_a_while(path: Path, clock: Clock) -> None:
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b"", message_id="m-1"), key="k")
        with closing(SqliteStore(path)) as store:
            store.commit(Changes(confirmed=store.read_ready(1, 1, limit=1, bytes_max=10**9)[0]))
        clock.now += KEYS_KEPT_S - 1
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
                park(store, entry)
        for number in range(3):
            clock.now += 30 * DAY_S
            outbox.enqueue(Message(b""), key=f"another {number}")
            assert outbox.enqueue(Message(b"", message_id="m-2"), key="k") == "m-1"


def test_old_keys_do_not_pile_up(path: Path, clock: Clock) -> None:
    with Outbox(path) as outbox:
        for number in range(50):
            outbox.enqueue(Message(b""), key=f"old {number}")
        with closing(SqliteStore(path)) as store:
            store.commit(Changes(confirmed=store.read_ready(1, 99, limit=99, bytes_max=10**9)[0]))
        clock.now += KEYS_KEPT_S + 1
        for number in range(20):
            outbox.enqueue(Message(b""), key=f"new {number}")
    assert count(path, "keys") == 20


def test_keys_whose_messages_are_there_do_not_keep_old_ones(path: Path, clock: Clock) -> None:
    with Outbox(path) as outbox:
        for number in range(2 * KEYS_LOOKED_AT):
            outbox.enqueue(Message(b""), key=f"open {number}")
        clock.now += 1
        for number in range(9):
            outbox.enqueue(Message(b""), key=f"gone {number}")
        with closing(SqliteStore(path)) as store:
            entries, _ = store.read_ready(1, 99, limit=99, bytes_max=10**9)
            store.commit(Changes(confirmed=entries[2 * KEYS_LOOKED_AT :]))
        clock.now += KEYS_KEPT_S + 1
        for number in range(9):
            outbox.enqueue(Message(b""), key=f"new {number}")
    assert count(path, "keys") == 2 * KEYS_LOOKED_AT + 9


def test_confirmed_messages_are_kept_for_a_while_if_asked(
    path: Path, clock: Clock, entry: Make, rows: Callable[[Path], dict[str, list[Any]]]
) -> None:
    with closing(SqliteStore(path, keep_confirmed_s=60, clock=clock)) as store:
        entries = stored(store, *(entry() for _ in range(5)))
        store.commit(Changes(confirmed=[*entries[:2], entries[3]]))
        store.commit(Changes(confirmed=entries[:2]))
        assert store.snapshot().counters.confirmed == 3
        clock.now += 59
        store.commit(Changes(confirmed=[entries[2]]))
        assert count(path, "confirmed") == 4
        clock.now += 2
        store.commit(Changes(new=[entry()]))
        assert count(path, "confirmed") == 1
    found = sql(path, "SELECT id, message_id, exchange FROM reliablepub_confirmed_messages")
    assert found == [(3, "m-3", "orders")]
    assert Outbox(path).audit().is_right
    with closing(SqliteStore(path)) as store:  # not asked any more: they go
        store.commit(Changes(new=[entry()]))
    assert count(path, "confirmed") == 0
    assert len(rows(path)["messages"]) == 3


@pytest.mark.parametrize(("asked", "kept"), [({}, 0), ({"keep_confirmed_s": 0.5}, 1)])
def test_nothing_is_kept_unless_asked_however_short(
    path: Path, clock: Clock, entry: Make, asked: dict[str, float], kept: int
) -> None:
    with closing(SqliteStore(path, clock=clock, **asked)) as store:  # type: ignore[arg-type]
        confirm(store, entry())
        assert count(path, "confirmed") == kept
        clock.now += 1
        store.commit(Changes(new=[entry()]))
        assert count(path, "confirmed") == 0


def test_they_are_pruned_in_small_steps_that_keep_up(
    path: Path, clock: Clock, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "PRUNED_MIN", 10)
    with closing(SqliteStore(path, keep_confirmed_s=60, clock=clock)) as store:
        entries = stored(store, *(entry() for _ in range(200)))
        store.commit(Changes(confirmed=entries[:100]))
        clock.now += 61
        left = [count(path, "confirmed")]
        for number in range(100, 200, 20):
            store.commit(Changes(confirmed=entries[number : number + 20]))
            left.append(count(path, "confirmed"))
    assert left == [100, 80, 60, 60, 80, 100], "twice as many go as come, until the old are gone"


def test_what_an_earlier_run_has_kept_goes_to_the_last_row(
    path: Path, clock: Clock, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "PRUNED_MIN", 1)
    with closing(SqliteStore(path, keep_confirmed_s=60, clock=clock)) as store:
        entries = [entry() for _ in range(3)]
        confirm(store, *entries)
    clock.now -= 3_600  # by whatever clock
    left = []
    with closing(SqliteStore(path, clock=clock)) as store:
        for _ in range(4):
            store.commit(Changes(new=[entry()]))
            left.append(count(path, "confirmed"))
    assert left == [2, 1, 0, 0]


@pytest.mark.usefixtures("impatient")
def test_a_relay_at_rest_prunes_them_too(
    where: Where, clock: Clock, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(where, clock=clock, keep_confirmed_s=60) as store:
        confirm(store, *(entry() for _ in range(60)))
        clock.now += 59
        confirm(store, *(entry() for _ in range(5)))
        store.relieve()
        assert count(where, "confirmed") == 65
        clock.now += 2
        left = []
        for _ in range(3):
            assert store.relieve() == ""
            left.append(count(where, "confirmed"))
        assert left == [55, 45, 35], "a few at least"
        deleting(monkeypatch, for_s=30.0)
        store.relieve()
        assert count(where, "confirmed") == 5, "as many as it can in a moment"
    with opened(where, clock=clock) as store:  # not asked any more
        store.relieve()
    assert count(where, "confirmed") == 0
    assert Outbox(where).audit().is_right


@pytest.mark.usefixtures("busy")
def test_a_relay_that_runs_for_weeks_forgets_the_history_of_messages_that_are_gone(
    where: Where, clock: Clock, entry: Make
) -> None:
    with opened(where, clock=clock) as store:
        entries = stored(store, *(entry() for _ in range(10)))
        for one in entries:
            attempts = [Attempt(one, "1-1", number, REFUSED, clock.now) for number in (1, 2, 3)]
            one.refused = 3
            store.commit(Changes(rescheduled=[one], attempts=attempts))
        intervene(outbox_at(where), [2, 3], Intervention(Action.PARK), clock=clock)
        intervene(outbox_at(where), [3], Intervention(Action.DISCARD), clock=clock)
        assert store.changed_elsewhere()
        clock.now += 8 * DAY_S
        store.relieve()
        assert len(store.touched()) == 3, "however old, until the relay has read them"
        clock.now -= 8 * DAY_S
        store.commit(Changes(confirmed=[entries[0], *entries[4:]]))

        def left() -> tuple[int, int]:
            for _ in range(50):
                assert store.relieve() == ""
            return count(where, "attempts"), count(where, "interventions")

        before = left()
        assert before[0] >= 30
        clock.now += 6 * DAY_S
        assert left() == before
        clock.now += 2 * DAY_S
        store.commit(Changes(attempts=[Attempt(entries[9], "1-1", 4, REFUSED, clock.now)]))
        assert left() != before
        kept = sql(where, IDS_OF_ATTEMPTS)
        assert kept == [(2,), (3,), (4,), (10,)], "open, parked, with interventions, or young"
        assert count(where, "interventions") == 2, "of a parked message, and the newest"


@pytest.mark.usefixtures("busy")
def test_old_rows_wait_for_whoever_writes_or_locks_them(
    where: Where, clock: Clock, entry: Make
) -> None:
    is_file = isinstance(where, Path)
    with (
        opened(where, clock=clock, keep_confirmed_s=60) as store,
        closing(connect(where)) as app,
    ):
        confirm(store, one := entry())
        store.commit(Changes(attempts=[Attempt(one, "1-1", 1, REFUSED, 1.0)]))
        clock.now += 8 * DAY_S
        if is_file:
            app.execute("BEGIN IMMEDIATE")
        else:
            app.execute("SELECT 1 FROM reliablepub.confirmed FOR UPDATE")
            app.execute("SELECT 1 FROM reliablepub.attempts FOR UPDATE")
        begun = time.monotonic()
        assert store.relieve() == ""
        if not is_file:  # such locks let others write
            confirm(store, entry())
        assert time.monotonic() - begun < 5, "less than the timeout of other locks"
        younger = 0 if is_file else 1
        assert (count(where, "confirmed"), count(where, "attempts")) == (1 + younger, 1)
        app.rollback()
        assert store.relieve() == ""
        assert (count(where, "confirmed"), count(where, "attempts")) == (younger, 0)


@pytest.mark.usefixtures("busy")
def test_a_relay_goes_on_if_what_is_kept_is_damaged(
    where: Where, clock: Clock, entry: Make
) -> None:
    cascade, kept_s = ("", 0.0) if isinstance(where, Path) else ("CASCADE", 60.0)
    with opened(where, clock=clock, keep_confirmed_s=kept_s) as store:
        confirm(store, entry())
        sql(where, f"DROP TABLE reliablepub.confirmed {cascade}")
        assert store.relieve() == ""
        assert store.commit(Changes(new=[entry()])).counters.open == 1


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("at", ["'x'", "x'31'", "NULL"])
def test_a_page_of_the_history_whose_times_are_no_numbers_is_passed(
    path: Path, clock: Clock, entry: Make, at: str
) -> None:
    with closing(SqliteStore(path, clock=clock)) as store:
        new = stored(store, *(entry() for _ in range(4)))
        attempts = [Attempt(one, "1-1", tag, REFUSED, clock.now) for tag, one in enumerate(new, 1)]
        store.commit(Changes(rescheduled=new, attempts=attempts))
        store.commit(Changes(confirmed=new))
        edit_lax(path, f"at = {at} WHERE attempt < 3", "reliablepub_attempts")
        clock.now += 8 * DAY_S
        for _ in range(5):
            assert store.relieve() == ""
    assert sql(path, IDS_OF_ATTEMPTS) == [(1,), (2,)]


@pytest.mark.usefixtures("busy")
def test_a_relay_that_was_taken_over_deletes_nothing(
    where: Where, clock: Clock, entry: Make
) -> None:
    with opened(where, clock=clock, keep_confirmed_s=60) as store:
        confirm(store, entry())
        if isinstance(where, Path):
            lock_path(where).unlink()
        else:
            sql(where, "UPDATE reliablepub.turns SET is_free = true")
        with opened(where, clock=clock, keep_confirmed_s=60):
            clock.now += DAY_S
            assert store.relieve() == ""
            assert count(where, "confirmed") == 1


def test_nothing_is_pruned_where_nothing_is_kept(path: Path, entry: Make) -> None:
    executed: list[str] = []
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=[one := entry()]))
        store._writer.opened().set_trace_callback(executed.append)
        store.commit(Changes(new=[entry()], confirmed=[one]))
    assert executed
    assert not [sql for sql in executed if "reliablepub_confirmed" in sql]


def test_a_kept_message_is_no_open_one_when_the_file_is_damaged(path: Path, entry: Make) -> None:
    with closing(SqliteStore(path, keep_confirmed_s=60)) as store:
        entries = stored(store, *(entry() for _ in range(5)))
        store.commit(Changes(confirmed=entries[:3]))
    found = Outbox(path.with_name("new.db")).salvage(path)
    assert (found.open, found.broken) == (2, ())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is plenty, and what is little, in files that are made in no time."""
    monkeypatch.setattr(space, "FREE_PAGES_MIN", 50)
    monkeypatch.setattr(space, "LEFT_PAGES_MAX", 60)


@pytest.mark.usefixtures("small")
def test_a_file_gives_its_space_back_when_little_is_left(path: Path, entry: Make) -> None:
    with closing(SqliteStore(path)) as store:
        left = stored(store, *(entry(body=b"x" * 10_000) for _ in range(200)))
        sizes = [space.pages(store._writer.opened())]
        while len(left) > 2:
            store.commit(Changes(confirmed=left[:10] if len(left) > 10 else left[:-2]))
            store.relieve()
            left = left[10:] or left[-2:]
            sizes.append(space.pages(store._writer.opened()))
        assert len(set(sizes)) == 2, "once, and for good"
        assert sizes[-1] < 100
        assert [e.message.body for e in store.read_ready(1, 200, limit=9, bytes_max=10**6)[0]] == [
            b"x" * 10_000
        ] * 2
        store.commit(Changes(confirmed=left))
        store.relieve()
    assert path.stat().st_size <= 107 * 4096


def test_a_rewrite_that_fails_is_not_tried_again_at_each_look(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def fails(connection: sqlite3.Connection) -> bool:
        tries.append(connection)
        return False

    monkeypatch.setattr(store_module, "has_space_to_give", lambda _: True)
    monkeypatch.setattr(store_module, "give_space_back", fails)
    with closing(SqliteStore(path)) as store:
        for _ in range(5):
            store.relieve()
        assert len(tries) == 1
        monkeypatch.setattr("time.monotonic", partial(float, time.monotonic() + 61))
        store.relieve()
        assert len(tries) == 2


def test_a_rewrite_needs_no_temporary_file(
    path: Path, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "FREE_PAGES_MIN", 50)
    with shim() as files, closing(SqliteStore(path)) as store:
        some = stored(store, *(entry(body=b"x" * 100_000) for _ in range(60)))
        files.fail("open", at=1, code=CANTOPEN, is_persistent=True)
        store.commit(Changes(confirmed=some[:20]))
        store.relieve()
        assert space.free_pages(store._writer.opened()) == 0


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("used", "free", "is_cut"), [(20, 49, False), (20, 50, True), (60, 50, True), (61, 50, False)]
)
def test_space_is_spared_for_the_next_burst_and_nothing_large_is_written_anew(
    path: Path, used: int, free: int, *, is_cut: bool
) -> None:
    with closing(file_of_pages(path, used, free)) as connection:
        assert space.has_space_to_give(connection) == is_cut


@pytest.mark.usefixtures("small")
def test_a_file_with_tables_of_others_is_not_written_anew(path: Path) -> None:
    """Rows that have no number of their own might get another one."""
    with closing(file_of_pages(path, 20, 80)) as connection:
        assert space.has_space_to_give(connection)
        connection.execute("CREATE TABLE orders (item)")
        assert not space.has_space_to_give(connection)


@pytest.mark.usefixtures("small")
def test_space_is_given_back_later_while_another_process_writes(path: Path) -> None:
    with closing(file_of_pages(path, 20, 80)) as connection:
        connection.execute("PRAGMA busy_timeout = 0")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            space.give_space_back(connection)
            assert space.free_pages(connection) == 80
        space.give_space_back(connection)
        assert space.free_pages(connection) == 0


def file_of_pages(path: Path, used: int, free: int) -> sqlite3.Connection:
    """A database of so many pages, and so many more that hold nothing."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("CREATE TABLE reliablepub_rows (id INTEGER PRIMARY KEY, body)")
    connection.execute("INSERT INTO reliablepub_rows VALUES (0, zeroblob(?))", (4_092 * free,))
    while space.pages(connection) < used + free:
        connection.execute("INSERT INTO reliablepub_rows (body) VALUES (zeroblob(3500))")
    connection.execute("DELETE FROM reliablepub_rows WHERE id = 0")
    assert space.pages(connection) == used + free
    assert space.free_pages(connection) == free
    return connection


def test_the_file_of_an_application_is_left_as_it_is(path: Path, app: sqlite3.Connection) -> None:
    fill(path, Message(b""))
    assert app.execute("PRAGMA auto_vacuum").fetchone() == (0,)
    with Outbox(path.with_name("own.db")) as outbox:
        outbox.enqueue(Message(b""))
        assert writer_of(outbox).opened().execute("PRAGMA auto_vacuum").fetchone() == (2,)


def test_a_program_that_is_run_every_second_does_not_fill_the_outbox_with_its_runs(
    where: Where,
) -> None:
    Outbox(where).create()
    numbers = "WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n WHERE id < 1500)"
    names, values = "pid, host, started_at", "1, 'h', 0.0"
    if not isinstance(where, Path):
        names, values = f"shard, {names}", f"0, {values}"
    sql(where, f"INSERT INTO reliablepub.runs ({names}) {numbers} SELECT {values} FROM n")
    with opened(where) as store:
        assert store.run == 1_501
        store.commit(Changes())
    assert sql(where, "SELECT min(id), max(id) FROM reliablepub.runs") == [(502, 1_501)]
