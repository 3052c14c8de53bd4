"""One turn: take in, commit, send, in this order and no other."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from reliablepub._core.events import ChannelClosed, Returned
from reliablepub.errors import (
    OutboxError,
    OutboxFull,
    OutboxInUse,
    OutboxMoved,
    OutboxUnreachable,
    OutboxUnsure,
    PublisherClosed,
)
from reliablepub.message import Message
from reliablepub.outbox.entry import Changes, Snapshot
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import OutcomeKind
from reliablepub.relay.elsewhere import POLL_S
from reliablepub.relay.handover import WITHDRAWN_MAX, Chunk, Inbox, Latch, Stream
from reliablepub.relay.relay import LAZY_COMMIT_S, LOOK_S
from reliablepub.relay.status import Link
from tests.relay.conftest import Build
from tests.relay.scripted import Told, World


def test_a_message_is_stored_then_its_caller_is_told_then_it_is_sent(world: Build) -> None:
    w = world("a", "b")
    assert w.log[-3:] == ["commit a b", "stored", "send a b"]


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (ZeroDivisionError("a bug"), OutboxUnsure),
        (OutboxMoved("the file was moved"), OutboxMoved),
        (OutboxInUse("another relay has taken over"), OutboxUnsure),
    ],
)
def test_a_relay_that_fails_tells_callers_whose_messages_may_be_stored(
    world: Build, failure: Exception, told: type
) -> None:
    w = world()
    commit = w.store.commit

    def fails(turn: Changes) -> Snapshot:
        commit(turn)
        raise failure

    w.store.commit = fails  # type: ignore[method-assign]
    caller = w.hand_over("a")
    with pytest.raises(type(failure)):
        w.turn()
    assert isinstance(caller.error, told)
    assert not caller.is_stored


@pytest.mark.parametrize("kind", [OutboxUnreachable, OutboxUnsure])
def test_tags_of_a_commit_that_may_have_happened_are_not_left_in_flight(
    sqlite: SqliteStore, path: Path, kind: type[OutboxError]
) -> None:
    w = World(sqlite)
    commit = w.store.commit

    def is_cut_off(turn: Changes) -> Snapshot:
        if turn.sent:
            w.store.commit = commit  # type: ignore[method-assign]
            commit(replace(turn, finished=[]))
            raise kind("the answer was lost")
        return commit(turn)

    w.sends("a")
    w.store.commit = is_cut_off  # type: ignore[method-assign]
    w.connect()
    w.turn()
    w.lose_connection()
    w.turns(3, after_s=1.0)
    with closing(sqlite3.connect(path)) as connection:
        (left,) = connection.execute("SELECT count(*) FROM reliablepub_in_flight").fetchone()
    assert left == 0


def test_a_relay_that_fails_after_it_has_told_its_callers_tells_them_nothing_else(
    world: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world()
    caller = w.hand_over("a")
    monkeypatch.setattr(w.relay, "_send", Mock(side_effect=ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        w.turn()
    assert caller.is_stored
    assert caller.error is None


def test_a_confirm_is_told_at_once_and_committed_within_the_lazy_time(world: Build) -> None:
    w = world()
    told = w.sends("a")
    w.ack(1)
    wait_s = w.turn()
    assert told.kinds == {"a": OutcomeKind.CONFIRMED}
    assert w.relay.status.open == 1
    assert wait_s == pytest.approx(LAZY_COMMIT_S)
    assert w.turned(after_s=LAZY_COMMIT_S).relay.status.open == 0
    assert w.in_memory == (0, 0)


def test_a_confirm_rides_on_the_commit_of_the_next_message(world: Build) -> None:
    w = world("a")
    w.ack(1)
    w.sends("b")
    assert w.relay.status.counters.confirmed == 1
    assert w.sent == ["a", "b"]


def test_a_confirm_is_committed_at_once_during_a_flush(world: Build) -> None:
    w = world("a")
    assert w.hears_ack(1, is_flushing=True).relay.lowest_awaited(0, w.time.wall) is None


def test_tags_follow_each_other_from_turn_to_turn(world: Build) -> None:
    w = world("a", "b")
    w.sends("c")
    assert [(s.first_tag, s.ids) for s in w.transport.sendings] == [(1, ["a", "b"]), (3, ["c"])]


def test_nothing_is_committed_in_a_turn_in_which_nothing_happened(world: Build) -> None:
    w = world()
    before = len(w.log)
    assert w.turn(after_s=1.0) == pytest.approx(POLL_S)
    assert w.log[before:] == []


def test_what_the_window_does_not_allow_is_stored_and_sent_later(world: Build) -> None:
    w = world("a", "b", "c", window_max=2)
    assert w.sent == ["a", "b"]
    assert w.hears_ack(1).sent == ["a", "b", "c"]


def test_there_is_no_hurry_while_half_a_window_is_in_flight_and_no_caller_waits(
    world: Build,
) -> None:
    w = world(window_max=4, loaded_max=6)
    assert not w.relay.is_unhurried, "there is nothing to wait for"
    w.sends("a", "b", "c", "d")
    assert not w.relay.is_unhurried, "what comes next can be sent at once"
    w.sends("e")
    assert w.relay.is_unhurried
    waiting = w.hand_over("f")
    assert not w.relay.is_unhurried, "f waits for the disk"
    w.turn()
    assert waiting.is_stored
    w.hand_over("g")
    assert w.relay.is_unhurried, "g waits for room, which comes with confirms"
    w.ack(4, multiple=True)
    assert not w.relay.is_unhurried, "the broker has nothing to do"


def test_a_chunk_that_is_not_taken_drops_its_messages(world: Build) -> None:
    w = world()
    stored, withdrawn, late = (Told(w.log).chunk_of([Message(b"", message_id=i)]) for i in "abc")
    w.inbox.put(stored)
    w.turn()
    w.inbox.put(withdrawn)
    with pytest.raises(OutboxFull):
        withdrawn.withdraw_because(OutboxFull("the outbox is full"))
    w.inbox.close(PublisherClosed("closed"))
    with pytest.raises(PublisherClosed):
        w.inbox.put(late)
    assert [chunk.messages for chunk in (withdrawn, late)] == [(), ()]


def test_a_chunk_behind_withdrawn_ones_wakes_the_relay() -> None:
    woken = []
    inbox = Inbox(lambda: woken.append(len(inbox.chunks)))
    first, second, third = (Chunk([Message(b"")], Latch()) for _ in range(3))
    inbox.put(first)
    inbox.put(second)
    first.withdraw()
    inbox.put(third)
    assert woken == [1, 3], "nobody else would: the caller of the first has gone"


def test_a_turn_while_a_chunk_is_withdrawn_leaves_no_gap_in_its_stream(world: Build) -> None:
    w = world(messages_max=1)
    told, stream = Told(w.log), Stream()

    class Claimed(Chunk[Latch]):
        def claim(self) -> bool:
            is_claimed = super().claim()
            if is_claimed:
                w.turn()  # the relay's thread runs here
            return is_claimed

    first = Claimed([Message(b"", message_id="a")], Latch(), told, source="s", stream=stream)
    later = Chunk([Message(b"", message_id="b")], Latch(), told, source="s", stream=stream)
    w.inbox.put(first)
    w.inbox.put(later)
    with pytest.raises(OutboxFull):
        first.withdraw_because(OutboxFull("the outbox is full"))
    w.turn()
    assert isinstance(later.error, OutboxFull)
    assert w.relay.status.counters.stored == 0


def test_callers_that_give_up_behind_one_that_waits_leave_nothing_behind(world: Build) -> None:
    w = world("open", messages_max=1, confirm_timeout_s=1e9)
    patient = [w.hand_over(f"patient {number}") for number in range(2)]
    for number in range(5 * WITHDRAWN_MAX):
        told = w.hand_over("impatient")
        assert told.chunk is not None
        assert told.chunk.withdraw()
        if number == WITHDRAWN_MAX:
            patient.append(w.hand_over("patient 2"))
        if not number % 100:
            w.turn(after_s=1.0)
        assert len(w.inbox.chunks) <= WITHDRAWN_MAX + 200
    assert [told.is_stored for told in patient] == [False] * 3
    for _ in range(12):
        w.ack_all()
        w.turn(after_s=1.0)
    assert w.sent == ["open", "patient 0", "patient 1", "patient 2"]


def test_messages_are_stored_while_the_broker_is_away(store: object) -> None:
    w = World(store)  # type: ignore[arg-type]
    assert w.sends("a").is_stored
    assert w.relay.status.link is Link.CONNECTING
    w.relay.handle([])
    assert w.sent == []


def test_a_message_that_cannot_be_encoded_is_refused_and_the_others_go_out(world: Build) -> None:
    w = world()
    w.transport.unencodable = {"b", "d"}
    told = w.hand_over("a", "b", "c", "d", "e")
    w.turns(5)
    assert [(s.first_tag, s.ids) for s in w.transport.sendings] == [(1, ["a", "c", "e"])]
    w.hears_ack(3, multiple=True, is_flushing=True)
    assert told.kinds["b"] is told.kinds["d"] is OutcomeKind.REFUSED
    assert list(told.kinds.values()).count(OutcomeKind.CONFIRMED) == 3
    assert w.relay.status.counters.parked == 2
    assert w.in_memory == (0, 0)


def test_the_turn_after_an_unencodable_message_does_not_wait(world: Build) -> None:
    w = world()
    w.transport.unencodable = {"a"}
    w.hand_over("a", "b")
    assert w.turn() == 0.0


def test_a_channel_closed_because_of_a_message_parks_it_with_the_brokers_words(
    world: Build,
) -> None:
    w = world()
    told = w.sends("a")
    w.relay.handle([ChannelClosed(w.epoch, 404, "NOT_FOUND - no exchange", by_publish=True)])
    w.turn()
    outcome = told.outcomes["a"]
    assert (outcome.kind, outcome.reply_code) == (OutcomeKind.REFUSED, 404)
    assert w.relay.status.counters.parked == 1
    assert w.in_memory == (0, 0)


def test_a_returned_message_is_never_confirmed(world: Build) -> None:
    w = world()
    told = w.sends("a", "b")
    w.relay.handle([Returned(w.epoch, 1, 312, "NO_ROUTE")])
    w.hears_ack(2, multiple=True)
    assert told.kinds == {"a": OutcomeKind.RETURNED, "b": OutcomeKind.CONFIRMED}


def test_callers_of_a_parked_message_are_told_only_after_the_commit(world: Build) -> None:
    w = world("a")
    assert w.hears_nack(1).log[-2:] == ["commit", "told a nacked"]


def test_a_source_advances_with_the_messages_that_came_from_it(world: Build) -> None:
    w = world()
    w.hand_over("a", "b", source="file")
    w.sends("c", source="file")
    assert w.store.position("file") == 3


def test_an_outbox_that_is_full_takes_a_chunk_when_there_is_room_again(world: Build) -> None:
    w = world(messages_max=2)
    w.hand_over("a", "b")
    late = w.sends("c")
    assert not late.is_stored
    w.hears_ack(1, is_flushing=True)
    w.turn()
    assert late.is_stored
    assert w.sent == ["a", "b", "c"]


def test_a_draining_relay_takes_nothing_in_and_still_settles(world: Build) -> None:
    w = world(window_max=1, loaded_max=2)
    w.hand_over("a", "b")
    assert w.sends("c", "d").is_stored
    w.relay.drain()
    late = w.hand_over("e")
    w.hears_ack(1, is_flushing=True)
    wait_s = w.turn(is_flushing=True)
    assert wait_s is not None
    assert wait_s > 0
    assert w.sent == ["a"]
    assert w.relay.status.counters.confirmed == 1
    assert not late.is_stored
    assert w.relay.status.open == 3


def test_an_idle_relay_looks_and_takes_no_turn(world: Build) -> None:
    w = world().turned()
    before = w.relay.turns
    for _ in range(3):
        w.time.now += POLL_S
        assert w.relay.idle_s() == pytest.approx(POLL_S)
    assert w.relay.turns == before + 3, "its turns show that it is alive"


def test_an_idle_relay_takes_a_turn_when_there_is_something_to_do(world: Build) -> None:
    w = world()
    assert w.turned().relay.idle_s() is not None
    w.hand_over("a")
    assert w.relay.idle_s() is None
    w.turn()
    w.ack(1)
    assert w.relay.idle_s() is None, "the broker has said something"
    assert w.turned().relay.idle_s() is not None
    w.time.now += LAZY_COMMIT_S
    assert w.relay.idle_s() is None, "the confirm is to be committed"
    w.turn()
    w.time.now += LOOK_S
    assert w.relay.idle_s() is None, "it looks at its files, the disk and the clocks"
    w.turn()
    w.relay.drain()
    assert w.relay.idle_s() is None
