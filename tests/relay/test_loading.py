"""What is on disk only: more than memory holds, what others enqueue, and what falls due."""

import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliablepub._core.events import ChannelClosed, Connected, Returned
from reliablepub.errors import OutboxError, OutboxLocked
from reliablepub.message import Message
from reliablepub.outbox.entry import TRANSIENT, Store
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import OutcomeKind
from reliablepub.relay.elsewhere import POLL_S
from reliablepub.relay.handover import Latch
from reliablepub.relay.loaded import Backlog
from reliablepub.relay.relay import STRANDED_S
from reliablepub.relay.setback import RETRY_S
from reliablepub.relay.thread import Flush
from tests.asking import fill
from tests.relay.conftest import Build
from tests.relay.scripted import PARK_AT_ONCE, World, connected, patient
from tests.sqlite import sql

LATER = datetime.now(UTC) + timedelta(days=1)
MANY = [f"m{n}" for n in range(100)]


def drain(w: World) -> None:
    """Confirm whatever is sent until nothing is open."""
    for _ in range(1_000):
        w.turn(is_flushing=True)
        if w.relay.lowest_awaited(0, w.time.wall) is None:
            return
        w.ack_all()
    raise AssertionError("it never ran empty")


# -------------------------------------------------------------------- the backlog


@given(
    unread=st.integers(0, 20),
    told=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 5)), max_size=12),
    step=st.integers(1, 7),
)
def test_late_ids_are_read_once_however_often_they_are_told(
    unread: int, told: list[tuple[int, int]], step: int
) -> None:
    backlog = Backlog(20 - unread)
    read: list[int] = []

    def read_on() -> None:
        while (head := backlog.head) is not None:
            last = min(head.last, head.first + step - 1)
            read.extend(range(head.first, last + 1))
            backlog.advance(last)

    read_on()
    read.clear()
    backlog.others(20)  # `unread` ids that are no late ones
    late = {id_ for first, more in told for id_ in range(first, min(first + more, 20) + 1)}
    for first, more in told:
        backlog.late(first, min(first + more, 20))
    read_on()
    assert sorted(read) == sorted(late | {*range(21 - unread, 21)})


def test_what_memory_has_no_room_for_is_read_back_in_order_and_once(world: Build) -> None:
    w = world(window_max=5, loaded_max=10)
    tolds = [w.hand_over(*MANY[n : n + 7]) for n in range(0, 100, 7)]
    w.turn()
    assert all(told.is_stored for told in tolds)
    assert w.in_memory[0] <= 10
    drain(w)
    assert w.sent == MANY
    assert w.in_memory == (0, 0)


def test_waiters_of_what_was_spilled_are_told(world: Build) -> None:
    w = world(window_max=5, loaded_max=10)
    first, second = w.hand_over(*MANY[:20]), w.hand_over(*MANY[20:30])
    w.turn()
    drain(w)
    assert list(first.outcomes) == MANY[:20]
    assert list(second.outcomes) == MANY[20:30]


def test_memory_holds_no_more_bytes_than_it_may(world: Build) -> None:
    w = world(loaded_bytes_max=10_000)
    for id_ in MANY:
        w.hand_over(id_, body=bytes(1_000))
    for _ in range(200):
        assert w.turned(is_flushing=True).in_memory[1] <= 10_000
        w.ack_all()
    assert w.sent == MANY


def test_a_message_larger_than_memory_is_sent_all_the_same(world: Build) -> None:
    w = world(loaded_bytes_max=1_000)
    told = w.sends("large", body=bytes(5_000))
    drain(w)
    assert told.kinds == {"large": OutcomeKind.CONFIRMED}
    assert w.in_memory == (0, 0)


def test_a_message_larger_than_memory_does_not_wait_for_confirms_to_cease(world: Build) -> None:
    """Nor does any that its publisher hands over after it."""
    w = world(loaded_bytes_max=1_000)
    begun = w.time.wall
    for n in range(30):
        due = datetime.fromtimestamp(begun + 1 + n / 5, UTC)
        w.hand_over(f"m{n}", not_before=due)
    w.turn()
    w.turn(after_s=1.05)
    w.ack_all()
    w.turn(after_s=0.2)
    large = w.hand_over("large", body=bytes(5_000))
    small = w.hand_over("small")
    for _ in range(3):
        w.turn()
        w.ack_all()
        w.turn(after_s=0.2)
    assert large.is_stored
    assert small.is_stored
    drain(w)
    assert large.kinds == {"large": OutcomeKind.CONFIRMED}


def test_new_messages_wait_behind_the_backlog(world: Build) -> None:
    w = world("a", "b", "c", window_max=1, loaded_max=2)
    w.sends("d")
    drain(w)
    assert w.sent == ["a", "b", "c", "d"]


def test_the_relay_goes_on_reading_without_being_woken(world: Build) -> None:
    w = world(loaded_max=2)
    w.hand_over("a", "b", "c")
    assert w.turn() == 0.0


def test_a_handshake_does_not_wait_while_what_is_sent_later_is_passed(
    monkeypatch: pytest.MonkeyPatch, sqlite: SqliteStore, path: Path
) -> None:
    """It takes several turns, and millions of scheduled messages many pages."""
    monkeypatch.setattr("reliablepub.outbox.sqlite.store.SCANNED_MAX", 3)
    with Outbox(path) as outbox:
        for n in range(12):
            outbox.enqueue(Message(b"", message_id=f"m{n}", not_before=LATER))
        outbox.enqueue(Message(b"", message_id="now"))
    w = World(sqlite)
    unread = []
    for _ in range(5):  # it connects in the first one
        wait_s = w.turn()
        unread.append(w.relay._loaded._backlog.head)
    assert [None if head is None else head.first for head in unread] == [4] * 5
    assert wait_s
    w.relay.handle([Connected()])
    w.open_channel()
    assert w.turns(5).sent == ["now"]


# -------------------------------------------------------------------- other processes


def test_what_another_process_enqueues_is_sent_within_a_poll_and_once(
    sqlite: SqliteStore, path: Path
) -> None:
    w = connected(sqlite)
    with Outbox(path) as outbox:
        for n in range(3):
            outbox.enqueue(Message(b"", message_id=f"other{n}"))
        assert w.turned(after_s=POLL_S).sent == ["other0", "other1", "other2"]
        w.hand_over("own")
        outbox.enqueue(Message(b"", message_id="last"))
        w.turn()
        w.turn(after_s=POLL_S)
    drain(w)
    assert sorted(w.sent) == ["last", "other0", "other1", "other2", "own"]
    assert w.relay.status.counters.confirmed == 5


def fails_once(w: World, name: str, kind: type[OutboxError] = OutboxLocked) -> list[OutboxError]:
    """The first call of a method of the store fails; the errors still to be raised."""
    errors, real = [kind("not now")], getattr(w.store, name)

    def call(*args: object, **options: object) -> object:
        if errors:
            raise errors.pop()
        return real(*args, **options)

    setattr(w.store, name, call)
    return errors


def test_what_another_process_enqueues_is_found_although_the_first_look_at_it_fails(
    sqlite: SqliteStore, path: Path
) -> None:
    w = connected(sqlite).turned()
    fill(path, Message(b"", routing_key="q", message_id="a"))
    errors = fails_once(w, "snapshot")
    w.turns(5, after_s=1.0)
    assert not errors
    assert w.sent == ["a"]


@pytest.mark.parametrize("kind", TRANSIENT)
@pytest.mark.parametrize("read", ["changed_elsewhere", "snapshot", "read_ready"])
def test_a_read_that_fails_is_told_to_callers_and_repeated(
    sqlite: SqliteStore, path: Path, read: str, kind: type[OutboxError]
) -> None:
    w = connected(sqlite).turned()
    fill(path, Message(b"", routing_key="q", message_id="a"))
    fails_once(w, read, kind)
    turned_away = w.hand_over("b")
    assert w.turned(after_s=1.0).relay.status.trouble
    assert isinstance(turned_away.error, kind)
    assert w.turns(3, after_s=1.0).sent == ["a"]
    assert w.relay.status.trouble == ""


@pytest.mark.parametrize("kind", TRANSIENT)
@pytest.mark.parametrize("call", ["changed_elsewhere", "commit"])
def test_trouble_ends_when_new_messages_are_accepted_again(
    sqlite: SqliteStore, call: str, kind: type[OutboxError]
) -> None:
    w = World(sqlite).turned()
    fails_once(w, call, kind)
    w.hand_over("a")
    assert w.turned(after_s=1.0).relay.status.trouble
    assert w.turned(after_s=RETRY_S).relay.status.trouble == "", "with nothing to commit"


def test_trouble_stays_the_same_while_the_store_cannot_be_read(
    sqlite: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = World(sqlite, bell=sqlite.bell).turned()
    with monkeypatch.context() as patch:
        patch.setattr(
            w.store,
            "changed_elsewhere",
            Mock(side_effect=OutboxLocked("locked by another process")),
            raising=False,
        )
        w.turn(after_s=1.0)
        for _ in range(10):
            assert w.turned(after_s=0.1).relay.status.trouble
    assert w.turned(after_s=1.0).relay.status.trouble == ""


@pytest.mark.parametrize("kind", TRANSIENT)
def test_trouble_of_an_idle_relay_ends_with_the_first_read_that_succeeds(
    sqlite: SqliteStore, kind: type[OutboxError]
) -> None:
    w = World(sqlite, bell=sqlite.bell).turns(30, after_s=0.1)
    fails_once(w, "changed_elsewhere", kind)
    assert w.turned(after_s=1.0).relay.status.trouble
    assert w.turns(20, after_s=RETRY_S / 2).relay.status.trouble == "", "with nothing to commit"


def test_a_flush_does_not_end_because_its_first_look_fails(sqlite: SqliteStore, path: Path) -> None:
    w = connected(sqlite).turned()
    fill(path, Message(b"", routing_key="q", message_id="a"))
    w.time.now += 1e9  # so that the message is due by the virtual clock
    errors = fails_once(w, "changed_elsewhere")
    flush = Flush(Latch())
    for _ in range(3):
        assert not flush.look(w.relay)
        w.turn(after_s=1.0)
    assert not errors
    w.hears_ack(1, is_flushing=True)
    assert flush.look(w.relay)


def test_expired_messages_do_not_fill_the_memory_while_no_commit_succeeds(
    sqlite: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reliablepub.relay.loaded.PAGE", 2)
    fill(path, *(Message(b"", message_id=str(n), expires_in_s=1.0) for n in range(40)))
    w = World(sqlite, loaded_max=4)
    w.time.now += 1e10
    w.store.fails = lambda _turn: OutboxLocked("locked by another process")
    for _ in range(20):
        assert w.turned(after_s=1.0).in_memory[0] <= 4 + 2, "what memory has room for, and a page"
    w.store.fails = lambda _turn: None
    assert w.turns(40, after_s=1.0).relay.status.counters.expired == 40


def test_an_idle_relay_takes_a_turn_when_another_process_has_stored_something(
    sqlite: SqliteStore, path: Path
) -> None:
    w = connected(sqlite).turned()
    w.time.now += POLL_S
    w.turn()
    w.time.now += POLL_S
    assert w.relay.idle_s() is not None
    fill(path, Message(b"", message_id="other"))
    assert w.relay.idle_s() is not None, "it has just looked"
    w.time.now += POLL_S
    assert w.relay.idle_s() is None
    assert w.turned().sent == ["other"]


def test_the_relay_listens_no_longer_than_a_poll(world: Build) -> None:
    wait_s = world().turn(after_s=1.0)
    assert wait_s is not None
    assert wait_s <= POLL_S


def test_memory_full_and_something_to_read_is_no_reason_to_spin(
    sqlite: SqliteStore, path: Path
) -> None:
    w = World(sqlite, loaded_max=2)
    w.sends("a", "b")
    fill(path, Message(b"", message_id="other"))
    w.turn(after_s=POLL_S)
    wait_s = w.turn(after_s=POLL_S / 5)
    assert wait_s is not None
    assert wait_s > 0


def test_what_a_person_retries_is_sent_again_and_counted_once(
    sqlite: SqliteStore, path: Path
) -> None:
    w = connected(sqlite, "a")
    assert w.hears_nack(1).relay.status.counters.parked == 1
    with Outbox(path) as outbox:
        assert outbox.retry() == 1
    w.turn(after_s=10_000_000_000.0)  # past the real time, at which it is due
    assert w.sent == ["a", "a"]
    w.hears_ack(2, is_flushing=True)
    counters = w.relay.status.counters
    assert (counters.stored, counters.confirmed, counters.parked) == (1, 1, 0)


# -------------------------------------------------------------------- retries


def test_a_nacked_message_goes_again_when_it_is_due_and_not_before(world: Build) -> None:
    w = world(policy=patient(3, 5.0))
    told = w.sends("a")
    assert w.hears_nack(1).in_memory == (0, 0)
    assert w.turned(after_s=4.99).sent == ["a"]
    assert w.turned(after_s=0.02).sent == ["a", "a"]
    assert w.turned(after_s=10.0).sent == ["a", "a"]
    w.hears_ack(2, is_flushing=True)
    assert told.kinds == {"a": OutcomeKind.CONFIRMED}
    assert w.in_memory == (0, 0)


def test_the_relay_wakes_up_when_a_retry_falls_due(world: Build) -> None:
    w = world("a", policy=patient(3, 0.03))
    w.nack(1)
    assert w.turn() == pytest.approx(0.03)


@pytest.mark.parametrize("kind", ["nacked", "returned", "refused"])
def test_a_message_is_parked_when_its_budget_is_spent(world: Build, kind: str) -> None:
    w = world(policy=patient(3, 1.0))
    told = w.hand_over("a")
    for _ in range(3):
        w.turn(after_s=1.5)
        tag = w.transport.sendings[-1].first_tag
        if kind == "nacked":
            w.nack(tag)
        elif kind == "returned":
            w.relay.handle([Returned(w.epoch, tag, 312, "NO_ROUTE")])
            w.ack(tag)
        else:
            w.relay.handle([ChannelClosed(w.epoch, 406, "TOO LARGE", by_publish=True)])
            w.open_channel()
        w.turn()
    assert w.sent == ["a"] * 3
    assert told.kinds == {"a": OutcomeKind(kind)}
    counters = w.relay.status.counters
    assert (counters.parked, counters.open, counters.open_bytes) == (1, 0, 0)
    assert w.in_memory == (0, 0)


def test_a_retry_that_became_uncertain_is_not_read_a_second_time(world: Build) -> None:
    w = world("a", "b", policy=patient(9, 1.0))
    assert w.hears_nack(2, multiple=True).turned(after_s=2.0).sent == ["a", "b"] * 2
    w.hears_loss()
    w.reconnect()
    assert w.turned().turned(after_s=5.0).sent == ["a", "b"] * 3
    assert w.hears_ack(2, multiple=True, is_flushing=True).relay.status.open == 0
    assert w.in_memory == (0, 0)


def test_a_retry_waits_for_room_in_memory_without_spinning(world: Build) -> None:
    w = world("a", policy=patient(9, 1.0), window_max=2, loaded_max=2).hears_nack(1)
    w.hand_over("b", "c")
    w.turn(after_s=0.5)
    wait_s = w.turn(after_s=0.51)
    assert wait_s is not None
    assert wait_s > 0
    assert w.hears_ack(2, is_flushing=True).turned().sent == ["a", "b", "c", "a"]


def test_retries_of_an_earlier_run_are_found_again(path: Path) -> None:
    store = SqliteStore(path)
    w = connected(store, "a", policy=patient(9, 1.0)).hears_nack(1)
    time = w.time
    store.close()
    store = SqliteStore(path)
    w = connected(store, time=time)
    assert w.turned().sent == []
    assert w.turned(after_s=1.1).sent == ["a"]
    store.close()


def test_a_backlog_of_an_earlier_run_is_sent_before_what_is_new(store: Store) -> None:
    w = World(store)
    w.sends(*MANY)
    again = World(store)
    again.connect()
    again.hand_over("new")
    again.turn()
    drain(again)
    assert again.sent == [*MANY, "new"]


# -------------------------------------------------------------------- what no read finds


def hide(path: Path, id_: int) -> None:
    """Make a message due, without its entry in the index of due times, as damage does."""
    name = "reliablepub_messages_waiting"
    [(whole,)] = sql(path, f"SELECT sql FROM sqlite_schema WHERE name = '{name}'")
    for definition in (f"{whole} AND due_at > 9e9", whole):
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            if definition is whole:
                change = "UPDATE reliablepub_messages SET due_at = 5 WHERE id = ?"
                connection.execute(change, (id_,))
            connection.execute("PRAGMA writable_schema = ON")
            define = "UPDATE sqlite_schema SET sql = ? WHERE name = ?"
            connection.execute(define, (definition, name))
            (version,) = connection.execute("PRAGMA schema_version").fetchone()
            connection.execute(f"PRAGMA schema_version = {version + 1}")


def test_a_message_that_a_damaged_index_hides_is_named(path: Path) -> None:
    fill(path, *(Message(b"", routing_key="q", message_id=name) for name in "abc"))
    hide(path, 2)
    with closing(SqliteStore(path)) as store:
        w = connected(store)
        assert w.turned().sent == ["a", "c"]
        w.ack_all()
        w.turn(is_flushing=True)
        w.turn(after_s=STRANDED_S)
        assert w.relay.status.reason == "", "it may have been stored just now"
        w.turn(after_s=STRANDED_S)
        assert w.relay.status.reason.startswith("message 2 is open and due, and no read finds it")
        assert w.relay.status.trouble == "", "others are accepted and published"
        sql(path, "REINDEX reliablepub_messages_waiting")
        assert w.turned(after_s=STRANDED_S).relay.status.reason == ""
        assert w.sent == ["a", "c", "b"]


def test_messages_that_wait_for_something_are_not_called_hidden(store: Store) -> None:
    w = connected(store, policy=PARK_AT_ONCE)
    w.hand_over("a", "b", ordering_key="k")
    later = datetime.fromtimestamp(w.time.wall + 500.0, tz=UTC)
    w.hand_over("later", not_before=later)
    w.hand_over("first", not_before=later, ordering_key="l")
    w.sends("behind", ordering_key="l")
    w.nack(1)
    assert w.relay.lowest_awaited(3, w.time.wall) is None, "a flush waits for none of them"
    for _ in range(4):
        assert w.turned(after_s=STRANDED_S).relay.status.reason == ""
