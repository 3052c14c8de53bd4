"""A wall clock that is set, forward or back: no retry waits for longer than its policy says."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from reliablepub.message import Message
from reliablepub.outbox.entry import Entry, Store
from reliablepub.outbox.memory import MemoryStore
from reliablepub.outbox.store import SqliteStore
from tests.relay.scripted import Time, World, patient

HOUR = 3_600.0


@dataclass
class SetTime(Time):
    """A wall clock that is ahead of the right time by so many seconds."""

    ahead: float = 0.0

    @property
    def wall(self) -> float:
        return self.now + 1_000_000.0 + self.ahead


@pytest.fixture(params=["disk", "memory"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    time = SetTime()
    is_disk = request.param == "disk"
    store = SqliteStore(tmp_path / "o.db", clock=lambda: time.wall) if is_disk else MemoryStore()
    world = World(store, time=time, policy=patient(10, 5.0))
    world.connect()
    return world


def set_clock(world: World, ahead: float) -> None:
    assert isinstance(world.time, SetTime)
    world.time.ahead = ahead


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize(("before", "after"), [(HOUR, 0.0), (0.0, HOUR), (HOUR, -9 * HOUR)])
def test_a_retry_waits_as_long_as_its_policy_says(
    world: World, key: str | None, before: float, after: float
) -> None:
    set_clock(world, before)
    world.hand_over("a", "b", ordering_key=key)
    world.turn()
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
    for _ in range(3):
        world.turn(after_s=0.6)
    assert world.sent[sent:] == ["a"]
    world.ack_all()
    for _ in range(4):
        world.turn(after_s=0.1, is_flushing=True)
        world.ack_all()
    assert world.relay.lowest_awaited(0, world.time.wall) is None


def test_a_delay_by_the_sender_is_by_the_wall_clock(world: World) -> None:
    at = datetime.fromtimestamp(world.time.wall + 100, UTC)
    world.hand_over("later", not_before=at)
    world.turn()
    set_clock(world, -HOUR)
    world.turn(after_s=200.0)
    assert world.sent == []
    set_clock(world, 0.0)
    world.turn(after_s=1.0)
    world.turn()
    assert world.sent == ["later"]


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


def test_what_is_due_since_it_was_stored_is_due_whatever_the_clock_says(tmp_path: Path) -> None:
    """So the triggers mark whoever is next of its key."""
    time = SetTime(ahead=HOUR)
    store = SqliteStore(tmp_path / "o.db", clock=lambda: time.wall)
    world = World(store, time=time, policy=patient(1, 0.0))
    entry = Entry.accepted(Message(b"x", message_id="a"), time.wall)
    entry.due_at = entry.stored_at
    world.connect()
    turn = world.relay._verdicts.turn
    turn.new.append(entry)
    store.commit(turn)
    turn.new.clear()
    time.ahead = 0.0
    for _ in range(3):
        world.turn(after_s=0.1)
    assert store.read_due(time.wall, limit=9, bytes_max=999, loaded=())[0][0].id == entry.id
    store.close()
