"""Deadlines and delays of messages: in memory and on disk, with and without a broker."""

from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from reliablepub._core.events import Blocked, Returned, Unblocked
from reliablepub.message import Message
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import Outcome, OutcomeKind, Persistence
from reliablepub.relay.clock import Clock
from reliablepub.relay.elsewhere import POLL_S
from reliablepub.relay.relay import LAZY_COMMIT_S
from tests.asking import fill
from tests.relay.conftest import Build
from tests.relay.scripted import Time, Told, World, connected, disk_full, patient

EXPIRED = OutcomeKind.EXPIRED
NOT_SENT = Outcome(EXPIRED, 0, "not sent", Persistence.NOT_WRITTEN)
MAYBE = Outcome(EXPIRED, 0, "may have arrived", Persistence.POSSIBLY_PERSISTED)
DID_NOT = Outcome(EXPIRED, 0, "did not arrive", Persistence.NOT_WRITTEN)
MANY = [f"m{n}" for n in range(100)]


def ledger(w: World) -> tuple[int, int, int, int]:
    """Confirmed, parked, expired and open."""
    counters = w.relay.status.counters
    return counters.confirmed, counters.parked, counters.expired, counters.open


def in_s(w: World, seconds: float) -> datetime:
    return datetime.fromtimestamp(w.time.wall + seconds, tz=UTC)


def awaited(w: World) -> int | None:
    return w.relay.lowest_awaited(0, w.time.wall)


# -------------------------------------------------------------------- expiry: where it is decided


def test_a_message_that_waits_for_the_window_expires_unsent(world: Build) -> None:
    w = world(window_max=1)
    w.hand_over("first")
    told = w.sends("a", "b", expires_in_s=5.0)
    w.turn(after_s=4.9)
    assert told.outcomes == {}
    w.turn(after_s=0.1)
    assert told.outcomes == {"a": NOT_SENT, "b": NOT_SENT}
    assert ledger(w) == (0, 0, 2, 1)
    assert w.hears_ack(1, is_flushing=True).sent == ["first"]
    assert w.in_memory == (0, 0)


def test_the_relay_wakes_up_for_a_deadline(world: Build) -> None:
    w = world(window_max=1)
    w.hand_over("first")
    w.sends("a", expires_in_s=POLL_S / 5)
    assert w.turn() == pytest.approx(POLL_S / 5)


@pytest.mark.parametrize("confirmed_after_s", [4.9, 5.0, 20.0])
def test_a_confirm_wins_however_late_because_it_is_true(
    world: Build, confirmed_after_s: float
) -> None:
    w = world()
    told = w.sends("a", expires_in_s=5.0)
    w.turn(after_s=confirmed_after_s)
    assert told.outcomes == {}, "an attempt on the wire is not decided by a clock"
    w.hears_ack(1, is_flushing=True)
    assert told.kinds == {"a": OutcomeKind.CONFIRMED}
    assert ledger(w) == (1, 0, 0, 0)


def test_what_becomes_uncertain_too_late_is_not_sent_again(world: Build) -> None:
    w = world()
    told, other = w.hand_over("a", expires_in_s=5.0), w.hand_over("b")
    w.turn(after_s=0.0)
    w.turn(after_s=6.0)
    w.hears_loss()
    assert told.outcomes == {"a": MAYBE}
    assert other.outcomes == {}
    w.reconnect()
    assert w.turned().sent == ["a", "b", "b"]
    assert ledger(w) == (0, 0, 1, 1)


def test_what_became_uncertain_in_time_expires_while_it_waits_for_a_connection(
    world: Build,
) -> None:
    w = world()
    told = w.sends("a", expires_in_s=5.0)
    w.hears_loss()
    assert told.outcomes == {}
    w.turn(after_s=5.0)
    assert told.outcomes == {"a": MAYBE}
    assert w.in_memory == (0, 0)


def test_a_refusal_too_late_is_the_last_one(world: Build) -> None:
    w = world(policy=patient(9, 1.0))
    returned = w.hand_over("returned", expires_in_s=5.0)
    nacked = w.sends("nacked", expires_in_s=5.0)
    w.relay.handle([Returned(w.epoch, 1, 312, "NO_ROUTE")])
    w.turn(after_s=6.0)
    w.ack(1)
    w.hears_nack(2)
    assert returned.outcomes == {"returned": DID_NOT}
    assert nacked.outcomes == {"nacked": MAYBE}
    assert ledger(w) == (0, 0, 2, 0)


def test_a_refusal_that_is_final_is_told_as_what_it_is(world: Build) -> None:
    w = world()
    told = w.sends("a", expires_in_s=5.0)
    w.nack(1)
    w.turn(after_s=6.0)
    assert told.kinds == {"a": OutcomeKind.NACKED}
    assert ledger(w) == (0, 1, 0, 0)


def test_a_message_expires_while_it_waits_for_its_retry(world: Build) -> None:
    w = world(policy=patient(9, 60.0))
    told = w.sends("a", expires_in_s=5.0)
    assert w.hears_nack(1).in_memory == (0, 0)
    w.turn(after_s=5.0)
    assert told.outcomes == {"a": MAYBE}
    assert w.turned(after_s=100.0).sent == ["a"]
    assert w.in_memory == (0, 0)


def test_messages_expire_in_an_alarm_and_those_on_the_wire_wait_for_its_end(world: Build) -> None:
    w = world(window_max=1)
    told = w.sends("wire", "waits", expires_in_s=5.0)
    w.relay.handle([Blocked("memory")])
    w.turn(after_s=3_600.0)
    assert told.outcomes == {"waits": NOT_SENT}
    w.relay.handle([Unblocked()])
    w.hears_ack(1, is_flushing=True)
    assert told.kinds["wire"] is OutcomeKind.CONFIRMED


# -------------------------------------------------------------------- expiry: on disk only


def test_what_is_on_disk_only_expires_too_and_its_waiters_are_told(world: Build) -> None:
    w = world(window_max=1, loaded_max=2)
    first = w.hand_over("first")
    tolds = [w.hand_over(*MANY[n : n + 10], expires_in_s=5.0) for n in range(0, 100, 10)]
    w.turn()
    w.turn(after_s=5.0)
    w.turns(5)
    assert [told.outcomes for told in tolds] == [
        dict.fromkeys(MANY[n : n + 10], NOT_SENT) for n in range(0, 100, 10)
    ]
    assert len(w.relay._loaded.waiters) == 0
    w.hears_ack(1, is_flushing=True)
    assert first.kinds == {"first": OutcomeKind.CONFIRMED}
    assert w.in_memory == (0, 0)
    assert w.sent == ["first"]


def test_without_a_connection_messages_expire_all_the_same(path: Path) -> None:
    time = Time()
    with closing(SqliteStore(path)) as store:
        w = World(store, time=time, loaded_max=2)
        told = w.sends(*MANY, expires_in_s=5.0)
        w.turn(after_s=5.0)
        w.turn()
        assert told.outcomes == dict.fromkeys(MANY, NOT_SENT)
    with Outbox(path) as outbox:
        status = outbox.status()
        assert (status.expired, status.open) == (100, 0)
        [parked, *_] = outbox.parked()
        assert (parked.state, parked.outcome, parked.reply_text, parked.attempts) == (
            *("expired", "expired", "not sent"),
            0,
        )


def test_what_expires_together_is_given_up_a_page_at_a_time(sqlite: SqliteStore) -> None:
    w = World(sqlite)
    for n in range(0, 3_000, 500):
        w.hand_over(*(f"m{i}" for i in range(n, n + 500)), expires_in_s=5.0)
    w.turns(3)
    again = World(sqlite, time=w.time)
    w.time.now += 6.0
    counts = []
    while again.relay.status.counters.expired < 3_000:
        again.turn()
        counts.append(again.relay.status.counters.expired)
    assert max(b - a for a, b in zip([0, *counts], counts, strict=False)) <= 1_000
    assert again.in_memory == (0, 0)


def test_messages_that_expire_one_by_one_are_gathered(world: Build) -> None:
    """Each commit takes as long as a commit of many."""
    w = world(window_max=1)
    w.hand_over("first")
    tolds = [w.hand_over(f"m{n}", expires_in_s=1.0 + n / 500) for n in range(100)]
    w.turn()
    commits = w.log.count("commit")
    w.time.now += 1.0
    wait_s = w.turn()
    turns = 0
    while any(not told.outcomes for told in tolds):
        assert wait_s is not None
        assert wait_s <= LAZY_COMMIT_S + 1e-6
        wait_s = w.turn(after_s=max(wait_s, 1e-6))
        turns += 1
    assert turns <= 24
    assert w.log.count("commit") - commits <= 12
    assert w.time.now - 51.0 < 0.2 + LAZY_COMMIT_S
    assert w.in_memory[0] == 1


def test_many_that_expire_soon_after_others_are_not(world: Build) -> None:
    w = world(window_max=1)
    w.hand_over("first")
    one = w.hand_over("one", expires_in_s=1.0)
    many = w.sends(*MANY, expires_in_s=1.001)
    w.turn(after_s=1.0)
    assert one.outcomes
    w.turn(after_s=0.001)
    assert many.outcomes == dict.fromkeys(MANY, NOT_SENT)


def test_a_deadline_survives_the_process(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        w = World(store)
        w.hand_over("a", expires_in_s=5.0)
        w.sends("b", expires_in_s=50.0)
    time = w.time
    time.now += 10.0
    with closing(SqliteStore(path)) as store:
        w = connected(store, time=time)
        assert w.turned().sent == ["b"]
        assert ledger(w) == (0, 0, 1, 1)


def test_what_another_process_put_in_expires_without_being_read_first(
    sqlite: SqliteStore, path: Path
) -> None:
    w = World(sqlite, loaded_max=2)
    w.sends("a", "b")
    fill(path, Message(b"", message_id="other", expires_in_s=1.0))
    w.turn(after_s=POLL_S)
    w.turn(after_s=10_000_000_000.0)  # past the real time
    assert ledger(w) == (0, 0, 1, 2)


def test_an_expired_message_that_is_retried_has_no_deadline(
    sqlite: SqliteStore, path: Path
) -> None:
    w = World(sqlite)
    w.sends("a", expires_in_s=5.0)
    w.turn(after_s=5.0)
    assert ledger(w) == (0, 0, 1, 0)
    with Outbox(path) as outbox:
        assert outbox.retry() == 1
    w.connect()
    assert w.turned(after_s=10_000_000_000.0).sent == ["a"]
    assert ledger(w) == (0, 0, 0, 1)


def test_expiry_waits_for_a_disk_that_is_full(world: Build) -> None:
    w = world(window_max=1)
    w.hand_over("first")
    told = w.sends("a", expires_in_s=5.0)
    w.store.fails = disk_full
    w.turns(3, after_s=5.0)
    assert told.outcomes == {}
    w.store.fails = lambda _turn: None
    w.turn(after_s=1.0)
    assert told.outcomes == {"a": NOT_SENT}
    assert ledger(w) == (0, 0, 1, 1)
    assert w.hears_ack(1, is_flushing=True).in_memory == (0, 0)


def test_what_could_not_be_given_up_is_not_read_a_second_time_and_sent(world: Build) -> None:
    w = world(window_max=1, loaded_max=2)
    w.hand_over("first")
    told = w.sends(*MANY[:10], expires_in_s=5.0)
    w.store.fails = lambda turn: disk_full(turn) if turn.parked else None
    w.turn(after_s=5.0)
    w.ack(1)
    w.turn(after_s=1.0)
    w.store.fails = lambda _turn: None
    assert w.turned(after_s=1.0).turned(is_flushing=True).sent == ["first"]
    assert told.outcomes == dict.fromkeys(MANY[:10], NOT_SENT)
    assert w.in_memory == (0, 0)


def test_the_story_of_a_message_tells_its_attempts_and_its_end(sqlite: SqliteStore) -> None:
    w = connected(sqlite)
    w.sends("a", expires_in_s=5.0)
    w.hears_loss("reset")
    w.turn(after_s=5.0)
    rows = (
        sqlite._writer.opened()
        .execute("SELECT outcome, reply_text, persistence FROM reliablepub_history")
        .fetchall()
    )
    assert rows == [
        ("uncertain", "connection lost: reset", "possibly persisted"),
        ("expired", "may have arrived", "possibly persisted"),
    ]


# -------------------------------------------------------------------- clocks that are set


def test_a_clock_that_is_set_back_expires_nothing_twice_and_nothing_too_early(world: Build) -> None:
    w = world()
    wall = w.time.now
    w.relay._clock = Clock(lambda: w.time.now, lambda: wall)
    told = w.sends("a", expires_in_s=5.0)
    wall += 6.0
    w.turn()  # it is late, and on the wire
    wall -= 6.0
    w.hears_loss()
    assert told.outcomes == {}, "there is time left"
    wall += 4.9
    w.turn(after_s=4.9)
    assert told.outcomes == {}
    wall += 0.2
    w.turn(after_s=0.2)
    assert told.outcomes == {"a": MAYBE}


# -------------------------------------------------------------------- delays


def test_a_delayed_message_is_stored_at_once_and_sent_when_it_is_due(world: Build) -> None:
    w = world()
    told = w.hand_over("later", not_before=in_s(w, 5.0))
    now = w.sends("now")
    assert told.is_stored
    assert w.turned(after_s=4.9).sent == ["now"]
    assert w.in_memory[0] == 1
    assert w.turned(after_s=0.1).sent == ["now", "later"]
    w.hears_ack(2, multiple=True, is_flushing=True)
    assert told.kinds == {"later": OutcomeKind.CONFIRMED}
    assert now.kinds == {"now": OutcomeKind.CONFIRMED}
    assert w.in_memory == (0, 0)
    assert len(w.relay._loaded.waiters) == 0


def test_messages_for_now_and_for_later_may_come_together(world: Build) -> None:
    w = world()
    told = Told(w.log)
    options: list[dict[str, Any]] = [{}, {"not_before": in_s(w, 5.0)}, {}]
    messages = [Message(b"", message_id=id_, **o) for id_, o in zip("abc", options, strict=True)]
    w.inbox.put(told.chunk_of(messages))
    assert w.turned().sent == ["a", "c"]
    assert w.turned(after_s=5.0).sent == ["a", "c", "b"]
    w.hears_ack(3, multiple=True, is_flushing=True)
    assert set(told.outcomes) == {"a", "b", "c"}


def test_what_is_due_already_goes_at_once(world: Build) -> None:
    w = world()
    w.hand_over("a", not_before=in_s(w, -5.0))
    w.sends("b", not_before=in_s(w, 0.0))
    assert w.sent == ["a", "b"]


def test_a_delay_survives_the_process(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        w = World(store)
        w.sends("a", not_before=in_s(w, 5.0))
    with closing(SqliteStore(path)) as store:
        w = connected(store, time=w.time)
        assert w.turned().sent == []
        assert w.turned(after_s=5.0).sent == ["a"]


def test_a_message_that_is_due_after_its_deadline_is_never_sent(world: Build) -> None:
    w = world()
    told = w.sends("a", not_before=in_s(w, 10.0), expires_in_s=5.0)
    w.turn(after_s=5.0)
    assert told.outcomes == {"a": NOT_SENT}
    assert w.turned(after_s=5.0).sent == []


def test_a_clock_that_is_set_forward_makes_it_due_and_one_set_back_lets_it_wait(
    world: Build,
) -> None:
    w = world()
    wall = w.time.now
    w.relay._clock = Clock(lambda: w.time.now, lambda: wall)
    due = datetime.fromtimestamp(wall + 3_600.0, tz=UTC)
    w.sends("a", "b", not_before=due)
    wall -= 7_200.0
    assert w.turned(after_s=3_600.0).sent == []
    wall += 3 * 3_600.0
    w.turn(after_s=POLL_S)  # notices the step, and moves what waits for a retry first
    assert w.turned(after_s=POLL_S).sent == ["a", "b"]


def test_a_flush_does_not_wait_for_a_delayed_message(world: Build) -> None:
    w = world(policy=patient(3, 1.0))
    w.sends("tomorrow", not_before=in_s(w, 86_400.0))
    assert awaited(w) is None
    w.sends("now", "soon")
    assert awaited(w) == 2
    w.ack(1)
    w.hears_nack(2, is_flushing=True)
    assert awaited(w) == 3, "a retry is waited for"
    w.turn(after_s=1.0)
    w.hears_ack(3, is_flushing=True)
    assert awaited(w) is None
    w.time.now += 86_400.0
    assert awaited(w) == 1
