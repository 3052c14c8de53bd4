"""The process dies: the next relay on the same file publishes everything that was promised."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from reliablepub.outbox.sqlite.store import SqliteStore
from tests.relay.scripted import World, connected, patient


class Crashing:
    """Relays on one file; each is dropped without a word, only the kernel frees its lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.store = SqliteStore(path)

    def restart(self) -> SqliteStore:
        self.store._writer.opened().close()
        self.store._relay_lock.release()
        self.store = SqliteStore(self._path)
        return self.store


@pytest.fixture
def crashing(path: Path) -> Iterator[Crashing]:
    crashing = Crashing(path)
    yield crashing
    crashing.store.close()


def test_everything_accepted_and_not_confirmed_is_sent_again_under_its_id(
    crashing: Crashing,
) -> None:
    w = connected(crashing.store, "a", "b", "c", "d", "e", window_max=3)
    assert w.hears_ack(2, is_flushing=True).sent == ["a", "b", "c", "d"]
    after = World(crashing.restart())
    after.connect()
    after.turn()
    assert after.sent == ["a", "c", "d", "e"]


def test_a_confirm_that_was_not_committed_costs_a_duplicate_and_no_more(crashing: Crashing) -> None:
    connected(crashing.store, "a").hears_ack(1)
    after = World(crashing.restart())
    after.connect()
    after.turn()
    after.ack(1)
    after.turn(is_flushing=True)
    counters = after.relay.status.counters
    assert (after.sent, counters.stored, counters.confirmed) == (["a"], 1, 1)


def test_the_budget_goes_on_where_it_was(crashing: Crashing) -> None:
    w = connected(crashing.store, "a", policy=patient(2, 0.0)).hears_nack(1)
    after = World(crashing.restart(), time=w.time, policy=patient(2, 0.0))
    after.connect()
    after.turn()
    after.nack(1)
    after.turn()
    assert after.relay.status.counters.parked == 1


def test_attempts_of_two_runs_have_different_names(crashing: Crashing) -> None:
    names = set[tuple[str]]()
    for _ in range(2):
        connected(crashing.store, f"m{crashing.store.run}")
        in_flight = "SELECT epoch FROM reliablepub_in_flight"
        names |= {*crashing.store._writer.opened().execute(in_flight)}
        crashing.restart()
    assert len(names) == 2


def test_a_new_relay_gives_no_id_a_second_time(crashing: Crashing) -> None:
    w = connected(crashing.store, "a").hears_ack(1, is_flushing=True)
    first = w.relay.look() or 0
    after = World(crashing.restart())
    after.hand_over("b")
    after.turn()
    assert (after.relay.look() or 0) > first
