"""Which confirmed messages leave the store with which commit: whole batches, one for each new."""

from collections.abc import Callable

import pytest

from reliablepub.outcome import OutcomeKind
from reliablepub.relay.relay import LAZY_COMMIT_S
from reliablepub.relay.settling import WAIT_S
from tests.relay.scripted import World, patient

Build = Callable[..., World]
IDS = [f"{n}" for n in range(10)]


def confirmed(world: Build) -> World:
    """Ten messages of one batch, confirmed since the last turn, and still in the store."""
    w = world(*IDS)
    w.ack(10, multiple=True)
    return w


def left(w: World) -> list[str]:
    """Ids of the messages that the last commit removed as confirmed."""
    return [entry.message.message_id or "" for entry in w.store.turns[-1].confirmed]


def test_messages_leave_together_with_the_others_of_their_batch(world: Build) -> None:
    w = world(*IDS)
    for tag in (3, 9, 1, 2, 10, 5, 4, 8, 7):
        w.ack(tag)
        w.turn(after_s=0.01)
    assert len(w.store.turns) == 1
    w.hears_ack(6)
    w.turn(after_s=LAZY_COMMIT_S)
    assert left(w) == IDS, "in the order of the file"
    assert w.in_memory == (0, 0)


def test_callers_do_not_wait_for_that(world: Build) -> None:
    w = world()
    told = w.sends(*IDS)
    w.hears_ack(3)
    assert told.kinds == {"2": OutcomeKind.CONFIRMED}


def test_those_of_an_unfinished_batch_wait_for_a_while(world: Build) -> None:
    w = world(*IDS).hears_ack(3).turned(after_s=WAIT_S / 2)
    w.ack(7)
    w.turn(after_s=WAIT_S / 2 - LAZY_COMMIT_S / 2)
    assert len(w.store.turns) == 1
    assert w.turn() == pytest.approx(LAZY_COMMIT_S / 2)
    assert w.turn(after_s=LAZY_COMMIT_S / 2) == pytest.approx(LAZY_COMMIT_S)
    w.turn(after_s=LAZY_COMMIT_S)
    assert left(w) == ["2", "6"]
    w.hears_ack(10, multiple=True)
    w.turn(after_s=LAZY_COMMIT_S)
    assert left(w) == ["0", "1", "3", "4", "5", "7", "8", "9"]
    assert w.relay.status.counters.open == 0


def test_as_many_leave_as_enter(world: Build) -> None:
    w = confirmed(world)
    w.sends("a", "b", "c")
    assert left(w) == ["0", "1", "2"]
    w.sends("d")
    assert left(w) == ["3"]
    w.turn()
    w.turn(after_s=LAZY_COMMIT_S)
    assert left(w) == ["4", "5", "6", "7", "8", "9"], "nobody has more"


def test_what_another_commit_has_left_is_not_forgotten(world: Build) -> None:
    w = confirmed(world)
    w.hand_over("a", "b", "c")
    assert w.turn() == pytest.approx(LAZY_COMMIT_S)
    w.time.now += LAZY_COMMIT_S
    assert w.relay.idle_s() is None, "a turn is due"
    assert w.turn() == pytest.approx(LAZY_COMMIT_S)
    w.turn(after_s=LAZY_COMMIT_S)
    assert left(w) == ["3", "4", "5", "6", "7", "8", "9"]


def test_the_longest_wait_counts_not_which_batch_has_ended_first(world: Build) -> None:
    w = world("a", "b")
    w.sends("c", "d", "e")
    w.hears_ack(1)
    w.time.now += WAIT_S / 2
    w.ack(5)
    w.ack(4)
    w.ack(3)
    w.sends("f")
    assert left(w) == ["c"]
    w.ack(2)
    w.sends("g")
    assert left(w) == ["a"], "its batch has waited longer"
    w.hand_over("h")
    w.turn(after_s=WAIT_S / 2)
    assert left(w) == ["b"]


def test_more_leave_when_they_have_waited_long_enough(world: Build) -> None:
    w = confirmed(world)
    w.turn()
    w.hand_over("a")
    w.turn(after_s=WAIT_S)
    assert left(w) == IDS


def test_the_tags_of_a_batch_leave_last(world: Build) -> None:
    w = world("a", "b")
    (batch,) = w.store.turns[-1].sent
    w.ack(2, multiple=True)
    w.sends("c")
    assert (left(w), w.store.turns[-1].finished) == (["a"], [])
    w.sends("d")
    assert (left(w), w.store.turns[-1].finished) == (["b"], [batch])


def test_no_more_than_a_window_stays(world: Build) -> None:
    w = world(*"abcdefghij", window_max=4)
    w.ack(4, multiple=True)
    w.sends("k")
    assert left(w) == ["a"]
    w.ack(8, multiple=True)
    w.sends("l")
    assert left(w) == ["b", "c", "d"], "4 of 7 stay"
    w.ack(9)
    w.sends("m")
    assert left(w) == ["e"], "of the batch that has ended"


def test_nor_more_than_a_window_of_unfinished_batches(world: Build) -> None:
    w = world(*"abcdefghij", window_max=4)
    for tags in ((2, 3, 4), (5, 6)):
        for tag in tags:
            w.ack(tag)
        w.turn()
    assert left(w) == ["b", "c", "d"]


def test_all_leave_for_a_caller_that_waits_for_room(world: Build) -> None:
    w = world("a", "b", "c", messages_max=3)
    w.ack(2)
    waits = w.sends("d")
    w.turn(after_s=LAZY_COMMIT_S)
    assert left(w) == ["b"]
    w.turn()
    assert waits.is_stored


def test_all_leave_for_a_caller_that_waits_for_memory(world: Build) -> None:
    w = world("a", "b", "c", "d", window_max=4, loaded_max=6)
    w.ack(3)
    w.ack(4)
    w.hand_over("e", "f")
    w.turn()  # nothing is left to send, and memory is full
    waits = w.hand_over("g")
    w.hears_ack(5)
    w.turn(after_s=LAZY_COMMIT_S)
    assert left(w) == ["c", "d", "e"]
    w.turn()
    assert waits.is_stored


def test_all_leave_for_a_caller_that_flushes(world: Build) -> None:
    w = world(*IDS).hears_ack(3, is_flushing=True)
    assert left(w) == ["2"]


def test_nothing_is_committed_for_a_flush_with_nothing_confirmed(world: Build) -> None:
    w = world("a", "b").turns(3, after_s=LAZY_COMMIT_S, is_flushing=True)
    assert len(w.store.turns) == 1
    w.hears_ack(2, is_flushing=True)
    w.turn(after_s=LAZY_COMMIT_S, is_flushing=True)
    assert len(w.store.turns) == 2


def test_the_others_of_a_batch_may_end_in_any_way(world: Build) -> None:
    w = world("a", "b", "c", policy=patient(2, 0.0))
    (batch,) = w.store.turns[-1].sent
    w.ack(1)
    w.hears_nack(2)
    assert (left(w), w.store.turns[-1].finished) == ([], [])
    w.hears_loss()
    assert (left(w), w.store.turns[-1].finished) == (["a"], [batch])
    w.reconnect()
    w.turn()
    w.ack_all()
    assert w.turned(is_flushing=True).sent == ["a", "b", "c", "c", "b"]
    assert w.relay.status.counters.open == 0


def test_a_batch_without_a_confirm_leaves_its_tags_at_once(world: Build) -> None:
    w = world("a")
    (batch,) = w.store.turns[-1].sent
    assert w.hears_nack(1).store.turns[-1].finished == [batch]
    assert w.relay.status.counters.parked == 1
