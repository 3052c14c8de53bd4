"""Destinations that keep refusing: paused, probed, and let go, while everybody else goes on.

With ordering keys too: who is paused holds those behind it in its key, wherever they go.
"""

import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tenacity import stop_after_attempt, wait_fixed

from reliablepub.message import Message
from reliablepub.outbox.entry import Store
from reliablepub.outbox.store import SqliteStore
from reliablepub.outcome import OutcomeKind
from reliablepub.policy import Breaker, Retries, RetryPolicy
from reliablepub.relay.handover import Chunk
from reliablepub.relay.status import Paused
from tests.relay.scripted import Told, World

FEW = Retries(stop_after_attempt(3), wait_fixed(1))
POLICY = RetryPolicy(FEW, FEW, FEW, breaker=Breaker(refusals_max=2, pause=wait_fixed(10)))


def hand_over(w: World, *ids: str, is_keyed: bool = False) -> Told:
    """Messages to the queue, and perhaps of the ordering key, that their ids begin with."""
    told = Told(w.log)
    messages = [
        Message(
            b"x",
            routing_key=id_[0],
            ordering_key=id_[1] if is_keyed else None,
            message_id=id_,
        )
        for id_ in ids
    ]
    w.inbox.put(Chunk(messages, told, told))
    return told


def world(store: Store) -> World:
    w = World(store, policy=POLICY, window_max=4)
    w.connect()
    return w


def paused(store: Store) -> tuple[World, Told]:
    """Queue "a" has refused two of four, the others wait, and one for "b" has gone through."""
    w = world(store)
    told = hand_over(w, "a1", "a2", "b1", "a3", "a4")
    w.turn()
    assert w.sent == ["a1", "a2", "b1", "a3"]
    w.nack(1)
    w.nack(2)
    w.turn()
    w.ack(3)
    w.turn(is_flushing=True)
    return w, told


def settle_held(w: World) -> None:
    """What was in flight when the pause began is refused too."""
    w.nack(4)
    w.turn()


def test_what_waits_to_be_sent_there_is_taken_out_of_memory(store: Store) -> None:
    w, told = paused(store)
    assert told.kinds == {"b1": OutcomeKind.CONFIRMED}
    settle_held(w)
    assert w.in_memory == (0, 0)
    assert w.session.buffered == 0
    w.turn(after_s=5)
    assert len(w.sent) == 4, "their own waits are over, the pause is not"
    [found] = w.relay.status.paused
    assert found == Paused("", "a", 3, found.probe_in_s)
    assert found.probe_in_s == pytest.approx(5)


def test_new_messages_for_it_wait_on_disk_and_others_flow(store: Store) -> None:
    w, _ = paused(store)
    settle_held(w)
    told = hand_over(w, "a5", "b2", "a6")
    w.turn()
    assert told.is_stored
    assert w.sent[4:] == ["b2"]
    assert w.in_memory == (1, w.store.turns[-1].new[1].message.size)


def test_after_the_pause_one_goes_and_the_others_when_it_is_confirmed(store: Store) -> None:
    w, told = paused(store)
    settle_held(w)
    more = hand_over(w, "a5")
    w.turn(after_s=10)
    w.turn()
    assert w.sent[4:] == ["a1"], "the first one is the probe"
    w.turn(after_s=1)
    assert w.sent[4:] == ["a1"]
    w.ack(5)
    w.turn(is_flushing=True)
    w.turn()
    w.turn()
    assert w.sent[4:] == ["a1", "a2", "a3", "a4", "a5"]
    w.ack(9, multiple=True)
    w.turn(is_flushing=True)
    w.turn(is_flushing=True)
    assert set(told.kinds) == {"a1", "a2", "a3", "a4", "b1"}
    assert set(more.kinds) == {"a5"}
    assert w.relay.status.counters.confirmed == 6
    assert w.relay.status.paused == ()
    assert w.in_memory == (0, 0)


def test_only_the_probes_spend_their_budget(store: Store) -> None:
    w, told = paused(store)
    settle_held(w)
    for tag in (5, 6):  # "a1" has two refusals left
        w.turn(after_s=10)
        w.turn()
        assert w.sent[-1] == "a1"
        w.nack(tag)
        w.turn()
    assert told.kinds["a1"] is OutcomeKind.NACKED
    assert set(told.kinds) == {"a1", "b1"}
    w.turn(after_s=10)
    w.turn()
    assert w.sent[-1] == "a2"
    assert w.relay.status.counters.open == 3


def test_a_probe_lost_with_its_connection_is_sent_again(store: Store) -> None:
    w, _ = paused(store)
    settle_held(w)
    w.turn(after_s=10)
    w.turn()
    assert w.sent[-1] == "a1"
    w.lose_connection()
    w.turn()
    w.reconnect()
    w.turn()
    assert w.sent[-1] == "a1"
    assert w.relay.status.buffered == 0


def test_without_a_connection_nothing_is_probed(store: Store) -> None:
    w, _ = paused(store)
    settle_held(w)
    w.lose_connection()
    for _ in range(5):
        w.turn(after_s=11)
        w.relay.handle([])
    assert w.session.buffered == 0


def test_when_nobody_waits_there_the_pause_is_forgotten(store: Store) -> None:
    once = Retries(stop_after_attempt(1), wait_fixed(1))
    w = World(store, policy=RetryPolicy(nacked=once, breaker=POLICY.breaker))
    w.connect()
    hand_over(w, "a1", "a2")
    w.turn()
    w.nack(2, multiple=True)
    w.turn()
    assert w.relay.status.paused
    w.turn(after_s=10)
    assert w.relay.status.paused == ()
    hand_over(w, "a3")
    w.turn()
    assert w.sent[-1] == "a3"


def test_what_a_sender_has_put_off_is_not_sent_earlier(store: Store) -> None:
    w, _ = paused(store)
    settle_held(w)
    at = datetime.fromtimestamp(w.time.wall + 100, UTC)
    told = Told(w.log)
    message = Message(b"x", routing_key="a", message_id="a9", not_before=at)
    w.inbox.put(Chunk([message], told, told))
    w.turn()
    [entry] = w.store.turns[-1].new
    assert entry.due_at == w.time.wall + 100


def test_a_next_run_lets_go_of_all_that_waits(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        w, _ = paused(store)
        settle_held(w)
    with closing(sqlite3.connect(path)) as db:
        held = db.execute("SELECT count(*) FROM reliablepub_messages WHERE due_at = 9e999")
        assert held.fetchone() == (3,)  # "a1" was refused before the pause, and waits by itself
    with closing(SqliteStore(path)) as store:
        w = World(store, policy=RetryPolicy(FEW, FEW, FEW))
        w.connect()
        for _ in range(3):
            w.turn(after_s=2)
        assert sorted(w.sent) == ["a1", "a2", "a3", "a4"]


def test_whoever_waits_for_the_outbox_to_run_empty_waits_for_them_too(store: Store) -> None:
    w, _ = paused(store)
    settle_held(w)
    hand_over(w, "a5")
    w.turn()
    assert store.lowest_awaited(5, w.time.wall) == 5  # never tried, but to be sent


def test_a_strategy_that_fails_is_replaced_by_the_default(store: Store) -> None:
    def broken(_state: object) -> float:
        raise ZeroDivisionError

    w = World(store, policy=RetryPolicy(FEW, FEW, FEW, breaker=Breaker(2, broken)))
    w.connect()
    hand_over(w, "a1", "a2")
    w.turn()
    w.nack(2, multiple=True)
    w.turn()
    assert w.relay.status.callback_errors == 1
    [found] = w.relay.status.paused
    assert found.probe_in_s == pytest.approx(1.0)


# -------------------------------------------------------------------- together with ordering keys


def turns(w: World) -> None:
    """As many as it takes to read whoever is next of its key, and send it."""
    for _ in range(4):
        w.turn(is_flushing=True)


def confirm_all(w: World) -> None:
    turns(w)
    while w.session.in_flight:
        w.ack_all()
        turns(w)


def held_by_key(store: Store) -> tuple[World, Told]:
    """Queue "a" is paused; of key "1" the first message goes there, and one to "b" is behind it.

    Key "2" goes to "a" too, key "3" to "b" only.
    """
    w = world(store)
    hand_over(w, "a-", "a+")
    turns(w)
    w.nack(2, multiple=True)
    turns(w)
    assert [paused.routing_key for paused in w.relay.status.paused] == ["a"]
    told = hand_over(w, "a1x", "b1y", "a2x", "b3x", "a1z", "b3y", "a2y", is_keyed=True)
    turns(w)
    return w, told


def test_what_is_paused_holds_its_own_key_and_no_other(store: Store) -> None:
    w, told = held_by_key(store)
    assert told.is_stored
    confirm_all(w)
    assert w.sent[2:] == ["b3x", "b3y"], "b1y is behind a1x, though its own queue is well"
    assert told.kinds == dict.fromkeys(["b3x", "b3y"], OutcomeKind.CONFIRMED)
    late = hand_over(w, "b3z", "b4x", "b1+", is_keyed=True)
    confirm_all(w)
    assert sorted(w.sent[4:]) == ["b3z", "b4x"]
    assert set(late.kinds) == {"b3z", "b4x"}


def test_after_the_probe_every_key_goes_on_in_its_order(store: Store) -> None:
    w, told = held_by_key(store)
    confirm_all(w)
    w.turn(after_s=10)
    turns(w)
    assert w.sent[4:] == ["a-"], "the first one is the probe"
    w.turn(after_s=1)
    confirm_all(w)
    for key in "123":
        sent = [id_ for id_ in w.sent if id_[1] == key]
        assert sent == {"1": ["a1x", "b1y", "a1z"], "2": ["a2x", "a2y"], "3": ["b3x", "b3y"]}[key]
    assert set(told.kinds.values()) == {OutcomeKind.CONFIRMED}
    assert len(told.kinds) == 7
    assert w.relay.status.paused == ()
    assert w.in_memory == (0, 0)


@pytest.mark.parametrize("end", ["nacked", "lost"])
def test_a_keyed_probe_that_fails_keeps_its_turn(store: Store, end: str) -> None:
    w = world(store)
    told = hand_over(w, "a1x", "b1y", "a2x", is_keyed=True)
    turns(w)
    assert w.sent == ["a1x", "a2x"]
    w.nack(2, multiple=True)
    turns(w)
    w.turn(after_s=10)
    turns(w)
    assert w.sent[2:] == ["a1x"]
    if end == "nacked":
        w.nack(3)
        turns(w)
        w.turn(after_s=10)
    else:
        w.lose_connection()
        turns(w)
        w.reconnect()
    turns(w)
    assert w.sent[2:4] == ["a1x", "a1x"], "still the head of its key"
    assert "b1y" not in w.sent
    confirm_all(w)
    assert sorted(w.sent[4:]) == ["a2x", "b1y"]
    assert set(told.kinds.values()) == {OutcomeKind.CONFIRMED}


def test_a_key_is_still_in_order_when_a_next_run_lets_go_of_it(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        w, _ = held_by_key(store)
    with closing(SqliteStore(path)) as store:
        again = World(store, policy=POLICY, time=w.time)
        again.connect()
        again.turn(after_s=2)
        confirm_all(again)
        for key, expected in {"1": ["a1x", "b1y", "a1z"], "2": ["a2x", "a2y"]}.items():
            assert [id_ for id_ in again.sent if id_[1] == key] == expected
