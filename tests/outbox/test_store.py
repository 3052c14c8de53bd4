"""What both stores promise, and what only a file can show."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlite_utils import Database

from reliablepub._core.events import Batch
from reliablepub.errors import OutboxError, OutboxInUse, PublisherForked
from reliablepub.message import Message
from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.entry import Attempt, Changes, Counters, DamagedRow, Entry, Store
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.rows import LEFT_IN_FLIGHT
from reliablepub.outbox.sqlite.lock import lock_path
from reliablepub.outbox.sqlite.space import PAGE_BYTES
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import NACKED, Outcome, OutcomeKind, Persistence
from tests.asking import fill, stored
from tests.outbox.conftest import Make
from tests.outbox.shim import shim
from tests.outcomes import RETURNED
from tests.sqlite import count, sql
from tests.stores import DURABLE, open_store, outbox_of

EXPIRED = Outcome(OutcomeKind.EXPIRED, 0, "too late")
ALL = {"limit": 1000, "bytes_max": 10**9}


def ids(entries: list[Entry]) -> list[int]:
    return [entry.id for entry in entries]


# ------------------------------------------------------------------------------------ both stores


@pytest.mark.parametrize("name", [field.name for field in fields(Changes)])
def test_every_field_counts_as_a_change(name: str) -> None:
    changes = Changes()
    assert changes.is_empty
    setattr(changes, name, [object()])
    assert not changes.is_empty


def test_ids_follow_each_other_in_order(any_store: Store, entry: Make) -> None:
    first, second = [entry(), entry()], [entry()]
    any_store.commit(Changes(new=first))
    snapshot = any_store.commit(Changes(new=second))
    assert ids(first + second) == [1, 2, 3]
    assert snapshot.last_id == 3
    assert snapshot == any_store.snapshot()


def test_what_was_stored_can_be_read(any_store: Store, entry: Make) -> None:
    new = [
        entry(headers={"a": b"\0", "n": 1.0}, content_type="text/plain"),
        entry(persistent=False),
    ]
    any_store.commit(Changes(new=new))
    found = any_store.read_ready(1, 9, **ALL)[0]
    assert [(e.id, e.message, e.stored_at) for e in found] == [
        (e.id, e.message, e.stored_at) for e in new
    ]


def test_a_new_entry_keeps_what_it_has_been_through(any_store: Store, entry: Make) -> None:
    new = [entry(), entry()]
    new[1].nacked, new[1].returned, new[1].refused, new[1].uncertain = 1, 2, 3, 4
    any_store.commit(Changes(new=new))
    found = any_store.read_ready(1, 9, **ALL)[0]
    assert [(e.nacked, e.returned, e.refused, e.uncertain) for e in found] == [
        (0, 0, 0, 0),
        (1, 2, 3, 4),
    ]


def test_reading_stops_at_each_limit(any_store: Store, entry: Make) -> None:
    new = [entry(body=b"x" * 1000) for _ in range(5)]
    size = new[0].message.size
    any_store.commit(Changes(new=new))
    assert ids(any_store.read_ready(2, 4, **ALL)[0]) == [2, 3, 4]
    assert ids(any_store.read_ready(1, 5, limit=2, bytes_max=10**9)[0]) == [1, 2]
    assert ids(any_store.read_ready(1, 5, limit=9, bytes_max=2 * size)[0]) == [1, 2]
    assert ids(any_store.read_ready(1, 5, limit=9, bytes_max=2 * size - 1)[0]) == [1]
    assert ids(any_store.read_ready(1, 5, limit=9, bytes_max=0)[0]) == [1]
    assert ids(any_store.read_ready(6, 9, **ALL)[0]) == []
    assert ids(any_store.read_ready(1, 5, limit=0, bytes_max=10**9)[0]) == []


def test_a_waiting_entry_is_due_and_not_ready(any_store: Store, entry: Make) -> None:
    new = stored(any_store, *(entry() for _ in range(4)))
    for one, due_at in zip(new, (50.0, None, 30.0, 40.0), strict=True):
        one.due_at = due_at
        one.nacked = 2
    any_store.commit(Changes(rescheduled=new))
    assert ids(any_store.read_ready(1, 4, **ALL)[0]) == [2]
    assert any_store.read_due(29.9, limit=9, bytes_max=1 << 30, loaded=()) == ([], 30.0)
    for _ in range(2):  # taking is only a read
        due, next_due_at = any_store.read_due(40.0, limit=9, bytes_max=1 << 30, loaded=())
        assert (ids(due), next_due_at) == ([3, 4], 50.0)
        assert [e.nacked for e in due] == [2, 2]
    due, next_due_at = any_store.read_due(60.0, limit=9, bytes_max=1 << 30, loaded={4})
    assert (ids(due), next_due_at) == ([3, 1], None)
    due, next_due_at = any_store.read_due(60.0, limit=1, bytes_max=1 << 30, loaded=())
    assert (ids(due), next_due_at) == ([3], 40.0)
    new[2].due_at = None
    any_store.commit(Changes(rescheduled=[new[2]]))
    assert ids(any_store.read_ready(1, 4, **ALL)[0]) == [2, 3]
    assert ids(any_store.read_due(60.0, limit=9, bytes_max=1 << 30, loaded=())[0]) == [4, 1]


def test_reading_what_is_due_stops_at_a_limit_in_bytes(any_store: Store, entry: Make) -> None:
    new = [entry() for _ in range(3)]
    for one in new:
        one.due_at = 10.0
    any_store.commit(Changes(new=new))
    size = new[0].message.size
    for bytes_max, found in ((0, [1]), (2 * size, [1, 2]), (2 * size - 1, [1])):
        due, next_due_at = any_store.read_due(60.0, limit=9, bytes_max=bytes_max, loaded=())
        assert (ids(due), next_due_at) == (found, 10.0)


def test_settled_entries_are_gone_and_counted(any_store: Store, entry: Make) -> None:
    new = stored(any_store, *(entry() for _ in range(4)))
    parked = [Attempt(new[1], "1-1", 2, RETURNED, 5.0), Attempt(new[2], "1-1", 3, EXPIRED, 5.0)]
    snapshot = any_store.commit(Changes(confirmed=[new[0]], parked=parked, attempts=parked))
    assert snapshot.counters == Counters(
        stored=4, confirmed=1, parked=1, expired=1, open_bytes=new[3].message.size
    )
    assert snapshot.counters.open == 1
    assert any_store.lowest_awaited(0, 1e12) == 4
    assert ids(any_store.read_ready(1, 9, **ALL)[0]) == [4]


def test_what_is_discarded_is_gone_and_counted(any_store: Store, entry: Make) -> None:
    new = stored(any_store, *(entry(body=b"x" * n) for n in range(4)))
    for gone in (new[:1], new[1:3]):
        discarded = [Attempt(one, "1-1", one.id, RETURNED, 5.0) for one in gone]
        snapshot = any_store.commit(Changes(discarded=discarded, attempts=discarded))
    assert snapshot.counters == Counters(stored=4, discarded=3, open_bytes=new[3].message.size)
    assert snapshot.counters.open == 1
    assert ids(any_store.read_ready(1, 9, **ALL)[0]) == [4]


def test_a_verdict_that_comes_twice_counts_once(any_store: Store, entry: Make) -> None:
    new = stored(any_store, *(entry() for _ in range(3)))
    any_store.commit(Changes(confirmed=[new[0], new[0]]))
    again = [Attempt(new[0], "1-1", 1, RETURNED, 5.0), Attempt(new[1], "1-1", 2, RETURNED, 5.0)]
    snapshot = any_store.commit(Changes(confirmed=[new[0]], parked=[*again, again[1]]))
    assert snapshot.counters == Counters(
        stored=3, confirmed=1, parked=1, open_bytes=new[2].message.size
    )


def test_an_empty_store(any_store: Store) -> None:
    snapshot = any_store.snapshot()
    assert (snapshot.last_id, snapshot.counters) == (0, Counters())
    assert any_store.commit(Changes()) == snapshot
    assert any_store.lowest_awaited(0, 1e12) is None
    assert any_store.read_due(1e12, limit=9, bytes_max=1 << 30, loaded=()) == ([], None)
    assert any_store.read_ready(0, 10**9, **ALL)[0] == []
    assert any_store.run == 1
    assert not any_store.changed_elsewhere()


def test_the_position_of_a_source_grows_with_its_entries(any_store: Store, entry: Make) -> None:
    assert any_store.position("file") == 0
    any_store.commit(Changes(new=[entry(), entry()], sources={"file": 2}))
    any_store.commit(Changes(new=[entry(), entry()], sources={"file": 1, "other": 1}))
    assert (any_store.position("file"), any_store.position("other")) == (3, 1)


def test_a_new_entry_may_be_sent_and_even_settled_at_once(any_store: Store, entry: Make) -> None:
    new = [entry(), entry()]
    parked = [Attempt(new[1], "1-1", 0, RETURNED, 5.0)]
    snapshot = any_store.commit(Changes(new=new, sent=[Batch(1, 1, new[:1])], parked=parked))
    assert snapshot.counters.open == 1
    assert any_store.lowest_awaited(0, 1e12) == 1


@pytest.mark.parametrize("store", DURABLE)
def test_a_refused_message_that_is_not_next_of_its_key_begins_its_time_anew(
    store: str, request: pytest.FixtureRequest, tmp_path: Path, entry: Make
) -> None:
    """No clock step finds it while it waits without a due time."""
    limits: dict[str, Any] = {"limit": 9, "bytes_max": 1 << 30, "loaded": ()}
    first, refused = entry(ordering_key="k"), entry(ordering_key="k")
    refused.due_at, refused.refused_at, refused.refused, refused.is_plain = 30.0, 20.0, 1, False
    with closing(open_store(outbox_of(store, request, tmp_path))) as own:
        own.commit(Changes(new=[first, refused]))
        assert own.read_due(60.0, **limits)[0] == []
        own.commit(Changes(confirmed=[first]))
        [found], _ = own.read_first(["k"], 60.0, bytes_max=1 << 30)
    assert (found.id, found.refused, found.refused_at) == (refused.id, 1, None)


# ----------------------------------------------------------------------------------- only a file


def test_entries_survive_and_ids_are_never_given_twice(path: Path, entry: Make) -> None:
    with closing(SqliteStore(path)) as store:
        new = stored(store, entry(), entry())
        new[1].due_at, new[1].uncertain = 77.0, 3
        store.commit(Changes(rescheduled=[new[1]], confirmed=[new[0]]))
    with closing(SqliteStore(path)) as store:
        assert store.run == 2
        (found,), _ = store.read_due(80.0, limit=1, bytes_max=1 << 30, loaded=())
        assert (found.id, found.message, found.due_at, found.uncertain) == (
            2,
            new[1].message,
            77.0,
            3,
        )
        store.commit(Changes(confirmed=[found]))
    with closing(SqliteStore(path)) as store:
        third = entry()
        assert store.commit(Changes(new=[third])).counters == Counters(
            stored=3, confirmed=2, open_bytes=third.message.size
        )
        assert third.id == 3


def test_a_failed_commit_changes_nothing(store: SqliteStore, path: Path, entry: Make) -> None:
    store.commit(Changes(new=[old := entry()]))
    before = store.snapshot()
    good, bad = entry(), Entry(Message(b"no id"), 1.0)
    with pytest.raises(OutboxError, match="message_id"):
        store.commit(Changes(new=[good, bad], confirmed=[old], sources={"s": 2}))
    assert (good.id, bad.id) == (0, 0)
    assert store.snapshot() == before
    assert store.position("s") == 0
    assert store.lowest_awaited(0, 1e12) == old.id
    store.commit(Changes(new=[good], confirmed=[old]))
    assert good.id == 2


def test_in_flight_tags_are_shown_by_message(store: SqliteStore, path: Path, entry: Make) -> None:
    new = stored(store, *(entry() for _ in range(6)))
    order = [new[2], new[3], new[0], new[5]]
    store.commit(Changes(sent=[Batch(1, 10, order), Batch(2, 1, [new[4]])]))
    nack = Attempt(new[3], "1-1", 11, NACKED, 5.0)
    store.commit(Changes(confirmed=[new[0]], attempts=[nack], rescheduled=[new[3]]))
    with closing(sqlite3.connect(path)) as connection:
        database = Database(connection)
        tags = database.query(
            "SELECT epoch, tag, id, message_id FROM reliablepub_in_flight_tags ORDER BY 1, 2"
        )
        assert [tuple(row.values()) for row in tags] == [
            ("1-1", 10, 3, "m-3"),
            ("1-1", 13, 6, "m-6"),
            ("1-2", 1, 5, "m-5"),
        ]
        assert [row["ids"] for row in database["reliablepub_in_flight"].rows] == [
            "[[3,2],[1,1],[6,1]]",
            "[[5,1]]",
        ]
    store.commit(Changes(finished=[Batch(1, 10, order)]))
    assert sql(path, "SELECT epoch FROM reliablepub_in_flight") == [("1-2",)]


def test_the_history_tells_how_each_attempt_ended(
    store: SqliteStore, path: Path, entry: Make
) -> None:
    store.commit(Changes(new=[one := entry()]))
    store.commit(Changes(attempts=[Attempt(one, "1-1", 1, NACKED, 5.0)]))
    last = Attempt(one, "1-2", 7, RETURNED, 6.0)
    one.nacked, one.returned = 1, 1
    store.commit(Changes(parked=[last], attempts=[last]))
    names = "id message_id at outcome reply_code reply_text persistence epoch tag"
    at = "1970-01-01 00:00:0"
    with closing(sqlite3.connect(path)) as connection:
        rows = list(Database(connection).query("SELECT * FROM reliablepub_history"))
        assert [list(row) for row in rows] == [names.split()] * 2
        assert [tuple(row.values()) for row in rows] == [
            (1, "m-1", f"{at}5", "nacked", 0, "basic.nack", "possibly persisted", "1-1", 1),
            (1, "m-1", f"{at}6", "returned", 312, "NO_ROUTE", "not written", "1-2", 7),
        ]
        (parked,) = Database(connection).query("SELECT * FROM reliablepub_parked_messages")
        assert (parked["attempts"], parked["reply_text"]) == (2, "NO_ROUTE")


def test_the_next_run_says_what_the_last_left_in_flight(path: Path, entry: Make) -> None:
    first = SqliteStore(path)
    new = [entry() for _ in range(3)]
    first.commit(Changes(new=new, sent=[Batch(1, 1, new)]))
    nack = Attempt(new[1], "1-1", 2, NACKED, 5.0)
    first.commit(Changes(confirmed=[new[0]], attempts=[nack], rescheduled=[new[1]]))
    first.close()
    with closing(SqliteStore(path)) as second:
        assert [(e.id, e.uncertain) for e in second.read_ready(1, 9, **ALL)[0]] == [(2, 0), (3, 1)]
    with closing(SqliteStore(path)) as third:  # and says it once
        assert [e.uncertain for e in third.read_ready(1, 9, **ALL)[0]] == [0, 1]
    assert count(path, "in_flight") == 0
    query = "SELECT id, epoch, tag, outcome, reply_text FROM reliablepub_attempts"
    assert sql(path, query) == [
        (2, "1-1", 2, "nacked", "basic.nack"),
        (3, "1-1", 3, "uncertain", LEFT_IN_FLIGHT),
    ]


def test_runs_are_written_down(path: Path) -> None:
    SqliteStore(path, clock=lambda: 5.0).close()
    found = sql(path, "SELECT id, pid, started_at, ended_at FROM reliablepub_runs")
    assert found == [(1, os.getpid(), 5.0, 5.0)]


def test_others_may_enqueue_meanwhile(store: SqliteStore, path: Path, entry: Make) -> None:
    store.commit(Changes(new=[first := entry()]))
    assert not store.changed_elsewhere()
    assert not store.may_have_changed()
    with Outbox(path) as outbox:
        message_id = outbox.enqueue(Message(b"from elsewhere"))
    assert store.may_have_changed()
    assert store.changed_elsewhere()
    assert not store.changed_elsewhere()
    assert not store.may_have_changed()
    assert store.snapshot().last_id == 2
    third = entry()
    snapshot = store.commit(Changes(new=[third], confirmed=[first]))
    assert third.id == snapshot.last_id == 3
    found = store.read_ready(1, 9, **ALL)[0]
    assert [(e.id, e.message.message_id) for e in found] == [
        (2, message_id),
        (3, third.message.message_id),
    ]
    assert snapshot.counters.open == 2
    assert snapshot.counters.open_bytes == sum(e.message.size for e in found)
    assert not store.changed_elsewhere()  # our own commit does not count


def test_only_one_relay_at_a_time(store: SqliteStore, path: Path) -> None:
    with pytest.raises(OutboxInUse, match="another publisher of this process"):
        SqliteStore(path)


@pytest.mark.parametrize("is_pruned", [False, True])
def test_a_relay_that_was_taken_over_changes_nothing(
    path: Path, entry: Make, *, is_pruned: bool
) -> None:
    """Also if the next one forgets old interventions: the newest number is lower than before."""
    loser = SqliteStore(path)
    loser.commit(Changes(new=[one := entry(), entry()]))
    if is_pruned:
        intervene(outbox_at(path), [2], Intervention(Action.PARK))
        assert loser.touched()
        sql(path, "DELETE FROM reliablepub_interventions")
    lock_path(path).unlink()  # an operator "repaired" the outbox by removing the lock
    with closing(SqliteStore(path)) as winner:
        for changes in (Changes(confirmed=[one]), Changes(new=[entry()])):
            with pytest.raises(OutboxInUse, match="taken over by process"):
                loser.commit(changes)
        assert winner.lowest_awaited(0, 1e12) == one.id
    loser.close()


def test_a_child_of_a_fork_cannot_use_it(
    store: SqliteStore, path: Path, entry: Make, child: Callable[[Callable[[], None]], int]
) -> None:
    store.commit(Changes(new=[entry()]))

    def use() -> None:
        with pytest.raises(PublisherForked, match="before the fork; open it in the child"):
            store.commit(Changes(new=[entry()]))
        with pytest.raises(PublisherForked):
            store.snapshot()
        store.close()

    assert child(use) == 0
    assert store.commit(Changes(new=[entry()])).counters.stored == 2
    with pytest.raises(OutboxInUse):
        SqliteStore(path)


def test_a_run_that_cannot_write_its_end_ends_all_the_same(path: Path) -> None:
    store = SqliteStore(path)
    store._writer.opened().execute("PRAGMA busy_timeout = 10")
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        store.close()
        other.rollback()
        assert other.execute("SELECT ended_at FROM reliablepub_runs").fetchall() == [(None,)]
    SqliteStore(path).close()


def test_a_closed_store_says_so(path: Path, entry: Make) -> None:
    store = SqliteStore(path)
    store.close()
    store.close()
    for use in (store.snapshot, lambda: store.commit(Changes(new=[entry()]))):
        with pytest.raises(OutboxError, match="is closed"):
            use()


# ------------------------------------------------------------------------------- times and order


def test_times_become_those_of_the_wall_clock_when_a_message_is_accepted() -> None:
    due = datetime.fromtimestamp(150.0, tz=UTC)
    soon, late = (
        Entry.accepted(Message(b"", expires_in_s=7.5, not_before=due, message_id="m"), now)
        for now in (100.0, 200.0)
    )
    assert (soon.stored_at, soon.due_at, soon.expires_at) == (100.0, 150.0, 107.5)
    assert (late.stored_at, late.due_at, late.expires_at) == (200.0, None, 207.5)
    message = Message(b"", not_before=due, message_id="m")
    assert Entry.accepted(message, 150.0).due_at is None, "it can go from memory, now"


def test_the_end_of_a_time_is_part_of_it() -> None:
    entry = Entry.accepted(Message(b"", expires_in_s=7.5, message_id="m"), 100.0)
    assert [entry.is_late(now) for now in (107.4, 107.5, 107.6)] == [False, True, True]


@pytest.mark.parametrize(
    ("counts", "persistence"),
    [
        ({"nacked": 2}, Persistence.POSSIBLY_PERSISTED),
        ({"returned": 2}, Persistence.NOT_WRITTEN),
        ({"refused": 2}, Persistence.NOT_WRITTEN),
        ({"uncertain": 2}, Persistence.POSSIBLY_PERSISTED),
    ],
)
def test_every_attempt_counts_and_tells_what_may_be_left_of_it(
    entry: Make, counts: dict[str, int], persistence: Persistence
) -> None:
    tried = replace(entry(), **counts)  # type: ignore[arg-type]
    assert (tried.attempts, tried.persistence) == (2, persistence)


def test_times_and_order_survive(path: Path) -> None:
    message = Message(b"", expires_in_s=7.5, ordering_key="ü", message_id="m")
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=[Entry.accepted(message, 100.0)]))
    with closing(SqliteStore(path)) as store:
        (found,) = store.read_ready(1, 1, **ALL)[0]
        assert found.expires_at == 107.5
        assert found.message == replace(message, expires_in_s=None)
        store.commit(Changes(parked=[Attempt(found, "e", 1, NACKED, 105.0)]))
    with Outbox(path) as outbox, closing(SqliteStore(path)) as store:
        outbox.retry()
        assert len(store.touched()) == 1
        (found,), _ = store.read_due(1e12, limit=1, bytes_max=1, loaded=())
        assert found.expires_at is None, "it was long past"
        assert found.message.ordering_key == "ü"


# ------------------------------------------------------------------------------------ flipped bits


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("body", b"BODY 2"),
        ("exchange", "0rders"),
        ("routing_key", ""),
        ("message_id", "m-3"),
        ("properties", '{"app_id":"x"}'),
        ("properties", "{"),
        ("exchange", "CAST(x'ff' AS TEXT)"),
        ("ordering_key", "another"),
    ],
)
@pytest.mark.parametrize("due_at", [None, 5.0])
def test_a_damaged_row_is_parked_and_never_sent(
    store: SqliteStore, entry: Make, column: str, value: Any, due_at: float | None
) -> None:
    new = [entry() for _ in range(3)]
    for one in new:
        one.due_at = due_at
    store.commit(Changes(new=new))
    is_sql = isinstance(value, str) and value.startswith("CAST")
    sql(
        store.path,
        f"UPDATE reliablepub_messages SET {column} = {value if is_sql else '?'} WHERE id = 2",
        values=() if is_sql else (value,),
    )
    if due_at is None:
        found = store.read_ready(1, 9, limit=2, bytes_max=10**9)[0]
    else:
        found, _ = store.read_due(9.0, limit=9, bytes_max=1 << 30, loaded=())
    assert ids(found) == [1, 3]
    counters = store.snapshot().counters
    assert (counters.stored, counters.parked, counters.open) == (3, 1, 2)
    assert counters.open_bytes == sum(e.message.size for e in found)
    (parked,) = Outbox(store.path).parked()
    assert (parked.id, parked.outcome) == (2, "refused")
    assert parked.reply_text.startswith("the checksum is ")
    assert parked.reply_text.endswith(
        " when it was stored: the file was damaged or edited, and the message may not be what was"
        " accepted"
    )
    about = parked.message_id, parked.exchange, parked.routing_key, parked.reply_text
    assert store.damaged() == [DamagedRow(2, *about, may_have_arrived=False)]
    assert store.damaged() == [], "told once"


def test_a_damaged_row_that_cannot_be_parked_now_is_not_sent_either(
    store: SqliteStore, entry: Make
) -> None:
    store.commit(Changes(new=[entry(), entry()]))
    with closing(sqlite3.connect(store.path)) as other:
        other.execute("UPDATE reliablepub_messages SET exchange = 'other' WHERE id = 1")
        other.commit()
        store._writer.opened().execute("PRAGMA busy_timeout = 10")
        other.execute("BEGIN IMMEDIATE")
        assert ids(store.read_ready(1, 9, **ALL)[0]) == [2]
        other.rollback()
    assert store.snapshot().counters.parked == 0
    assert ids(store.read_ready(1, 9, **ALL)[0]) == [2]
    assert store.snapshot().counters.parked == 1


def test_a_damaged_row_that_finds_no_room_among_the_parked_is_not_sent_either(
    store: SqliteStore, entry: Make
) -> None:
    store.commit(Changes(new=[entry(body=bytes(100_000))]))
    sql(store.path, "UPDATE reliablepub_messages SET exchange = 'other'")
    store.commit(Changes(new=[entry(body=bytes(100_000))]))  # takes the pages that this has freed
    (pages,) = store._writer.opened().execute("PRAGMA page_count").fetchone()
    for pages_max, parked in ((pages, 0), (10 * pages, 1)):
        store._writer.opened().execute(f"PRAGMA max_page_count = {pages_max}").fetchone()
        assert ids(store.read_ready(1, 9, **ALL)[0]) == [2]
        assert store.snapshot().counters.parked == parked


def test_what_else_keeps_a_damaged_row_from_being_parked_is_an_error(
    store: SqliteStore, entry: Make
) -> None:
    store.commit(Changes(new=[entry()]))
    sql(store.path, "UPDATE reliablepub_messages SET exchange = 'other'")

    def refuse(action: int, table: str | None, *_: object) -> int:
        is_park = action == sqlite3.SQLITE_INSERT and table == "reliablepub_parked"
        return sqlite3.SQLITE_DENY if is_park else sqlite3.SQLITE_OK

    store._writer.opened().set_authorizer(refuse)
    with pytest.raises(OutboxError, match=f"outbox {store.path} could not be used"):
        store.read_ready(1, 9, **ALL)


def test_each_damaged_row_is_told_of_however_many_reads_find_them(
    store: SqliteStore, entry: Make
) -> None:
    store.commit(Changes(new=[entry(), entry()]))
    sql(store.path, "UPDATE reliablepub_messages SET exchange = 'other'")
    for id_ in (1, 2):
        assert store.read_ready(id_, id_, **ALL)[0] == []
    assert [row.id for row in store.damaged()] == [1, 2]


def test_a_row_that_is_no_message_is_parked_too(
    store: SqliteStore, path: Path, entry: Make
) -> None:
    impossible = entry(priority=9)
    object.__setattr__(impossible.message, "priority", 999)  # as a later version might allow
    store.commit(Changes(new=[impossible, entry()]))
    assert ids(store.read_ready(1, 9, **ALL)[0]) == [2]
    (parked,) = Outbox(path).parked()
    assert "cannot be rebuilt" in parked.reply_text
    assert "priority" in parked.reply_text


def test_reading_what_is_due_does_not_read_what_waits(store: SqliteStore, entry: Make) -> None:
    new = [entry(body=bytes(10_000)) for _ in range(2000)]
    for n, one in enumerate(new):
        one.due_at = 1000.0 + n
    store.commit(Changes(new=new))
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    store._writer.opened().set_progress_handler(count, 10)
    due, next_due_at = store.read_due(1000.0, limit=100, bytes_max=1 << 30, loaded=())
    store._writer.opened().set_progress_handler(None, 0)
    assert (ids(due), next_due_at) == ([1], 1001.0)
    assert steps < 20


def test_rows_go_where_others_were_and_each_page_is_written_once(path: Path, entry: Make) -> None:
    """What is confirmed makes room for what is new, within a turn."""
    with shim() as files, closing(SqliteStore(path)) as store:
        turns = [[entry(body=bytes(1_000)) for _ in range(100)] for _ in range(8)]
        for new in turns[:4]:
            store.commit(Changes(new=new))
        (before,) = store._writer.opened().execute("PRAGMA page_count").fetchone()
        files.fail("open", at=0, code=0)
        for new, confirmed in zip(turns[4:], turns, strict=False):
            files.log = []
            store.commit(Changes(new=new, confirmed=confirmed))
            written = sum(o.kind == "write" and len(o.data) == PAGE_BYTES for o in files.log)
            assert written <= 25, "and it would be 37"
        assert store._writer.opened().execute("PRAGMA page_count").fetchone()[0] <= before + 2
        assert files.calls == 0, "nor is any copied into a temporary file"


@pytest.mark.parametrize("made", ["before the run", "before an intervention"])
def test_a_backup_that_is_restored_into_the_open_file_stops_the_relay(
    path: Path, tmp_path: Path, entry: Make, made: str
) -> None:
    fill(path, Message(b""))
    if made == "before the run":
        copy_by_sqlite(path, tmp_path / "backup.db")
    with closing(SqliteStore(path)) as store:
        if made == "before an intervention":
            copy_by_sqlite(path, tmp_path / "backup.db")
        intervene(outbox_at(path), [1], Intervention(Action.PARK))
        assert store.touched()
        store.commit(Changes(new=[entry()]))
        copy_by_sqlite(tmp_path / "backup.db", path)
        every = {"limit": 9, "bytes_max": 999, "loaded": ()}
        calls: list[Callable[[], object]] = [
            lambda: store.commit(Changes(new=[entry()])),
            lambda: store.read_due(1e12, **every),  # type: ignore[arg-type]
        ]
        for call in calls:
            with pytest.raises(OutboxError, match="older copy, perhaps a restored backup"):
                call()


@pytest.mark.parametrize("finds_out_by", ["looking", "storing", "confirming"])
def test_a_relay_ends_when_a_backup_is_restored_into_its_file(
    path: Path, entry: Make, finds_out_by: str
) -> None:
    """By SQLite's own backup, during one run: the next ids would be some that it has looked for."""
    backup = path.with_name("backup.db")
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=[entry()]))
        copy_by_sqlite(path, backup)
        new = stored(store, *(entry() for _ in range(3)))
        copy_by_sqlite(backup, path)
        fill(path, Message(b"with an id that was assigned before"))
        call: Callable[[], object] = {
            "looking": store.snapshot,
            "storing": lambda: store.commit(Changes(new=[entry() for _ in range(9)])),
            "confirming": lambda: store.commit(Changes(confirmed=[new[0]])),
        }[finds_out_by]
        with pytest.raises(OutboxError, match="was replaced by an older copy"):
            call()
        assert Outbox(path).status().open == 2
    with closing(SqliteStore(path)) as store:
        assert len(store.read_ready(1, 99, limit=9, bytes_max=10**9)[0]) == 2


def copy_by_sqlite(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as one, closing(sqlite3.connect(target)) as other:
        one.backup(other)
    target.chmod(0o600)
