"""A wall clock that is set, forward or back: no retry waits for longer than its policy says.

A deadline is a time by the wall clock, and so is a delay by the sender.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tenacity import stop_after_delay, wait_fixed

from reliablepub._core.events import ChannelOpened, Nacked
from reliablepub.errors import OutboxLocked
from reliablepub.message import Message
from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.entry import HELD, Changes, Entry, Release, Store
from reliablepub.outbox.memory import MemoryStore
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import OutcomeKind
from reliablepub.policy import Breaker, Retries, RetryPolicy
from tests.relay.scripted import Time, Told, World, connected, patient
from tests.sqlite import sql

HOUR = 3_600.0


@dataclass
class SetTime(Time):
    """A wall clock that is ahead of the right time by so many seconds."""

    ahead: float = 0.0

    @property
    def wall(self) -> float:
        return super().wall + self.ahead


@pytest.fixture(params=["disk", "memory"])
def build(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[RetryPolicy], World]:
    def world(policy: RetryPolicy) -> World:
        time = SetTime()
        path = tmp_path / "o.db"
        is_disk = request.param == "disk"
        store = SqliteStore(path, clock=lambda: time.wall) if is_disk else MemoryStore()
        return connected(store, time=time, policy=policy)

    return world


@pytest.fixture
def world(build: Callable[[RetryPolicy], World]) -> World:
    return build(patient(10, 5.0))


A_DAY = Retries(stop_after_delay(24 * HOUR), lambda _: 5.0)


def set_clock(world: World, ahead: float) -> None:
    assert isinstance(world.time, SetTime)
    world.time.ahead = ahead


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize(("before", "after"), [(HOUR, 0.0), (0.0, HOUR), (HOUR, -9 * HOUR)])
def test_a_retry_waits_as_long_as_its_policy_says(
    world: World, key: str | None, before: float, after: float
) -> None:
    set_clock(world, before)
    world.sends("a", "b", ordering_key=key)
    world.turn()
    tag_of_a = 1
    world.nack(tag_of_a)
    if key is None:
        world.ack(2)
    world.turn()
    sent = len(world.sent)
    set_clock(world, after)
    world.turn(after_s=4.0)
    world.turn()
    assert len(world.sent) == sent
    assert world.turns(3, after_s=0.6).sent[sent:] == ["a"]
    world.ack_all()
    for _ in range(4):
        world.turn(after_s=0.1, is_flushing=True)
        world.ack_all()
    assert world.relay.lowest_awaited(0, world.time.wall) is None


@pytest.mark.parametrize("ahead", [HOUR, -HOUR])
def test_a_refusal_that_is_not_stored_yet_waits_no_longer(world: World, ahead: float) -> None:
    world.sends("a")
    assert world.hears_nack(1).turned(after_s=6.0).sent == ["a", "a"]
    world.store.fails = lambda _: OutboxLocked("another process has the lock")
    assert world.hears_nack(2).log[-1] == "failed"
    set_clock(world, ahead)
    world.store.fails = lambda _: None
    assert world.turns(4, after_s=1.0).sent == ["a", "a"]
    assert world.turns(3, after_s=0.6).sent == ["a", "a", "a"]


def test_a_delay_by_the_sender_is_by_the_wall_clock(world: World) -> None:
    at = datetime.fromtimestamp(world.time.wall + 100, UTC)
    world.sends("later", not_before=at)
    set_clock(world, -HOUR)
    assert world.turned(after_s=200.0).sent == []
    set_clock(world, 0.0)
    assert world.turned(after_s=1.0).turned().sent == ["later"]


@pytest.mark.parametrize("ahead", [HOUR, 1.0, 0.0])
def test_a_retry_of_an_earlier_run_waits_no_longer(tmp_path: Path, ahead: float) -> None:
    time = SetTime(ahead=ahead)
    path = tmp_path / "o.db"
    first = World(SqliteStore(path, clock=lambda: time.wall), time=time, policy=patient(10, 5.0))
    first.connect()
    first.hand_over("a")
    first.turn()
    first.nack(1)
    first.turn()
    first.store.close()
    time.ahead = 0.0
    second: Store = SqliteStore(path, clock=lambda: time.wall)
    entries, next_at = second.read_due(time.wall, limit=9, bytes_max=999, loaded=())
    assert entries == []
    assert next_at is not None
    assert 4.9 < next_at - time.wall < 5.1 + (ahead if ahead < 1 else 0)
    second.close()


def parked_head(world: World) -> int:
    """Park the first of two messages of one key, so that the second waits; return its number."""
    world.connect()
    world.sends("first", "second", ordering_key="k")
    assert world.turned().hears_nack(1).sent == ["first"]
    return 1


ADVANCES: dict[str, Callable[[Outbox, int], object]] = {
    "the key is skipped": lambda outbox, _: outbox.skip_key("k"),
    "the head is retried": lambda outbox, first: outbox.retry([first]),
    "the head is discarded": lambda outbox, first: intervene(
        outbox_at(outbox.path), [first], Intervention(Action.DISCARD)
    ),
}


@pytest.mark.parametrize("relay", ["it runs", "another one starts"])
@pytest.mark.parametrize("advance", ADVANCES)
def test_an_operator_who_frees_a_key_is_not_made_to_wait_for_a_clock_that_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advance: str, relay: str
) -> None:
    time = SetTime(ahead=HOUR)
    monkeypatch.setattr("time.time", lambda: time.wall)
    path = tmp_path / "o.db"
    world = World(SqliteStore(path, clock=lambda: time.wall), time=time, policy=patient(1, 0.0))
    first = parked_head(world)
    if relay == "it runs":
        time.ahead = 0.0
        world.turn(after_s=0.1)
    time.now += 1.0
    with Outbox(path) as outbox:
        ADVANCES[advance](outbox, first)
    if relay == "another one starts":
        world.store.close()
        time.ahead = 0.0
        store = SqliteStore(path, clock=lambda: time.wall)
        world = connected(store, time=time, policy=patient(1, 0.0))
    sent = len(world.sent)
    for _ in range(6):
        world.turn(after_s=0.1)
        world.ack_all()
    assert world.sent[sent:] == (
        ["first", "second"] if advance == "the head is retried" else ["second"]
    )
    world.store.close()


def test_what_was_released_to_an_earlier_run_waits_no_longer(tmp_path: Path) -> None:
    time = SetTime(ahead=HOUR)
    path = tmp_path / "o.db"
    with closing(SqliteStore(path, clock=lambda: time.wall)) as store:
        entry = Entry.accepted(Message(b"x", message_id="a"), time.wall)
        entry.due_at, entry.refused_at, entry.is_plain = HELD, time.wall, False
        store.commit(Changes(new=[entry]))
        time.now += 1.0
        store.commit(Changes(released=[Release(None, None, 9)]))
    time.ahead = 0.0
    with closing(SqliteStore(path, clock=lambda: time.wall)) as store:
        entries, _ = store.read_due(time.wall, limit=9, bytes_max=999, loaded=())
        assert [entry.message.message_id for entry in entries] == ["a"]


def told_of(world: World, *, where: str) -> Told:
    """A message that expires in 60 s, and where it waits meanwhile."""
    if where == "behind the window":
        world.hand_over(*(f"f{n}" for n in range(100)))
    told = world.sends("a", expires_in_s=60.0)
    if where == "for a retry":
        world.hears_nack(1)
    elif where == "on the wire":
        world.turn(after_s=1.0)
    return told


@pytest.mark.parametrize("where", ["behind the window", "for a retry", "on the wire"])
def test_a_deadline_is_by_the_wall_clock(world: World, where: str) -> None:
    told = told_of(world, where=where)
    set_clock(world, -HOUR)
    world.turns(14, after_s=5.0)
    assert told.outcomes == {}
    set_clock(world, 0.0)
    if where != "behind the window":
        world.lose_connection()
    world.turns(2, after_s=0.1)
    assert told.kinds == {"a": OutcomeKind.EXPIRED}


def test_a_deadline_on_disk_is_by_the_wall_clock(tmp_path: Path) -> None:
    time = SetTime()
    with closing(SqliteStore(tmp_path / "o.db", clock=lambda: time.wall)) as store:
        world = World(store, time=time, loaded_max=2)
        told = world.sends(*(f"m{n}" for n in range(20)), expires_in_s=60.0)
        set_clock(world, HOUR)
        world.turns(4, after_s=0.1)
        assert list(told.kinds.values()) == [OutcomeKind.EXPIRED] * 20


def test_a_host_that_slept_has_not_set_its_clock(world: World) -> None:
    told = world.sends("a", "b", expires_in_s=60.0)
    world.lose_connection()
    world.time.asleep = 61.0
    world.turn()
    assert set(told.kinds.values()) == {OutcomeKind.EXPIRED}


@pytest.mark.parametrize("ahead", [25 * HOUR, -25 * HOUR])
@pytest.mark.parametrize("where", ["for a retry", "in memory", "between"])
def test_a_budget_in_time_is_not_spent_by_a_clock(
    build: Callable[[RetryPolicy], World], where: str, ahead: float
) -> None:
    world = build(RetryPolicy(A_DAY, A_DAY, A_DAY, breaker=None))
    told = world.sends("a")
    world.nack(1)
    if where == "between":
        set_clock(world, ahead)
    world.turn()
    if where == "for a retry":
        set_clock(world, ahead)
    assert world.turned(after_s=6.0).turned().sent == ["a", "a"]
    if where == "in memory":
        set_clock(world, ahead)
        world.turn()
    world.hears_nack(2)
    assert told.outcomes == {}
    world.time.now += 24 * HOUR
    assert world.turns(2).sent == ["a", "a", "a"]
    world.hears_nack(3)
    assert told.kinds == {"a": OutcomeKind.NACKED}


@pytest.mark.parametrize("breaker", [None, Breaker(refusals_max=1, pause=wait_fixed(5))])
def test_a_budget_in_time_ends_although_an_earlier_run_had_a_clock_far_ahead(
    path: Path, breaker: Breaker | None
) -> None:
    brief = Retries(stop_after_delay(30), wait_fixed(1))
    policy = RetryPolicy(brief, brief, brief, breaker=breaker)
    time = Time(now=300 * HOUR)
    with closing(SqliteStore(path, clock=lambda: time.wall)) as store:
        world = connected(store, "a", policy=policy, time=time).hears_nack(1)
    time = Time()
    with closing(SqliteStore(path, clock=lambda: time.wall)) as store:
        world = connected(store, policy=policy, time=time)
        for _ in range(60):
            world.turn(after_s=1.0)
            world.relay.handle([ChannelOpened(world.asked_epochs[-1])])  # perhaps that of a probe
            if world.session.in_flight:
                sent = world.transport.sendings[-1]
                world.relay.handle([Nacked(sent.epoch, sent.first_tag, multiple=False)])
        assert world.relay.status.counters.parked == 1


@pytest.mark.parametrize("ahead", [25 * HOUR, -25 * HOUR])
def test_what_waits_for_a_destination_waits_no_longer_and_is_given_up_no_earlier(
    build: Callable[[RetryPolicy], World], ahead: float
) -> None:
    world = build(RetryPolicy(A_DAY, A_DAY, A_DAY))
    tolds = [world.hand_over(f"m{n}") for n in range(5)]
    world.turn()
    for tag in range(1, 6):
        world.nack(tag)  # the fifth in a row pauses it
    world.turn()
    late = world.sends("late")
    assert "late" not in world.sent
    set_clock(world, ahead)
    is_refused = False
    for _ in range(60):
        before = len(world.transport.sendings)
        world.turn(after_s=1.0)
        for sending in world.transport.sendings[before:]:
            for tag, id_ in enumerate(sending.ids, sending.first_tag):
                if id_ == "late" and not is_refused:
                    world.nack(tag)
                    is_refused = True
                else:
                    world.ack(tag)
    assert is_refused
    assert late.kinds == {"late": OutcomeKind.CONFIRMED}
    assert {kind for told in tolds for kind in told.kinds.values()} == {OutcomeKind.CONFIRMED}


def rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    return sql(path, query)
