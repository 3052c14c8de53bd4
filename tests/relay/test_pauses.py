"""Destinations that keep refusing: paused, probed, and let go, while the others go on.

With ordering keys too: who is paused holds those behind it in its key, wherever they go.
"""

import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tenacity import stop_after_attempt, stop_after_delay, wait_fixed

from reliablepub._core.events import Acked, ChannelClosed, ChannelOpened, Nacked
from reliablepub.errors import OutboxLocked
from reliablepub.message import Message
from reliablepub.outbox.entry import Store
from reliablepub.outbox.memory import MemoryStore
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import OutcomeKind
from reliablepub.policy import Breaker, GiveUp, Refusal, Retries, RetryIn, RetryPolicy
from reliablepub.relay.status import Paused
from tests.relay.scripted import ONCE, Told, World, connected
from tests.sqlite import sql

FEW = Retries(stop_after_attempt(3), wait_fixed(1))
POLICY = RetryPolicy(FEW, FEW, FEW, breaker=Breaker(refusals_max=2, pause=wait_fixed(10)))


def hand_over(w: World, *ids: str, is_keyed: bool = False) -> Told:
    """Messages to the queue, and perhaps of the ordering key, that their ids begin with."""
    told = Told(w.log)
    messages = [
        Message(b"x", routing_key=id_[0], ordering_key=id_[1] if is_keyed else None, message_id=id_)
        for id_ in ids
    ]
    w.inbox.put(told.chunk_of(messages))
    return told


def world(store: Store) -> World:
    return connected(store, policy=POLICY, window_max=4)


def paused(store: Store) -> tuple[World, Told]:
    """Queue "a" has refused two of four, the others wait, and one for "b" has gone through."""
    w = world(store)
    told = hand_over(w, "a1", "a2", "b1", "a3", "a4")
    assert w.turned().sent == ["a1", "a2", "b1", "a3"]
    w.nack(1)
    w.hears_nack(2)
    w.hears_ack(3, is_flushing=True)
    return w, told


def open_quarantine(w: World) -> int:
    """The channel on which a probe of an exchange goes; its epoch."""
    w.turns(3)
    epoch = w.asked_epochs[-1]
    assert epoch != w.epoch
    w.relay.handle([ChannelOpened(epoch)])
    w.turn()
    return epoch


def settle_held(w: World) -> None:
    """What was in flight when the pause began is refused too."""
    w.hears_nack(4)


def test_what_waits_to_be_sent_there_is_taken_out_of_memory(store: Store) -> None:
    w, told = paused(store)
    assert told.kinds == {"b1": OutcomeKind.CONFIRMED}
    settle_held(w)
    assert w.in_memory == (0, 0)
    assert w.session.buffered == 0
    w.turn(after_s=5)
    assert len(w.sent) == 4, "their own waits are over, the pause is not"
    [found] = w.relay.status.paused
    reason, since = "nacked: basic.nack", w.time.wall - 5
    assert found == Paused("", "a", 3, found.probe_in_s, since, reason, waiting=4)
    assert found.probe_in_s == pytest.approx(5)
    assert w.relay.status.paused_destinations == 1


def test_it_is_told_when_the_first_messages_are_given_up(store: Store) -> None:
    """By the first refusal of the message that has paused it, and the budget of its kind."""
    policy = replace(POLICY, nacked=replace(FEW, stop=stop_after_delay(60)))
    w = connected(store, policy=policy).turned()
    hand_over(w, "a1", "a2", "a3")
    w.turn()
    begun = w.time.wall
    w.nack(1)
    w.hears_nack(2)
    [found] = w.relay.status.paused
    assert found.gives_up_at == begun + 60


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
    assert w.turned().sent[4:] == ["a4"], "the first one that was never sent is the probe"
    assert w.turned(after_s=1).sent[4:] == ["a4"]
    w.hears_ack(5, is_flushing=True)
    assert w.turns(2).sent[4:] == ["a4", "a1", "a2"], "two for each confirm"
    w.hears_ack(7, multiple=True, is_flushing=True)
    assert w.turns(2).sent[4:] == ["a4", "a1", "a2", "a3", "a5"]
    w.hears_ack(9, multiple=True, is_flushing=True)
    w.turn(is_flushing=True)
    assert set(told.kinds) == {"a1", "a2", "a3", "a4", "b1"}
    assert set(more.kinds) == {"a5"}
    assert w.relay.status.counters.confirmed == 6
    assert w.relay.status.paused == ()
    assert w.in_memory == (0, 0)


def next_probe(w: World) -> str:
    """What is sent after the pause; its queue is still full."""
    w.turn(after_s=10)
    w.turns(3)
    sent = w.sent[-1]
    w.hears_nack(len(w.sent))
    return sent


def test_probes_go_by_turns_and_only_they_spend_their_budget(store: Store) -> None:
    w, told = paused(store)
    settle_held(w)
    assert [next_probe(w) for _ in range(5)] == ["a4", "a1", "a2", "a3", "a4"]
    assert told.kinds == {"b1": OutcomeKind.CONFIRMED}, "a1 has one refusal left"
    assert next_probe(w) == "a1"
    assert told.kinds["a1"] is OutcomeKind.NACKED
    assert w.relay.status.counters.open == 3


def test_a_fresh_message_goes_before_those_that_were_sent(store: Store) -> None:
    w, _ = paused(store)
    settle_held(w)
    assert [next_probe(w) for _ in range(2)] == ["a4", "a1"]
    hand_over(w, "a5")
    assert [next_probe(w) for _ in range(2)] == ["a5", "a2"]


def test_many_fresh_messages_go_soon_and_those_that_were_sent_ever_more_slowly() -> None:
    """A fan-out with one full queue: the other has every message in minutes, and few copies."""
    w = connected(MemoryStore(), policy=RetryPolicy(), window_max=10)
    names = [f"m{n}" for n in range(100)]
    told = to_exchange(w, *names, exchange="fan")
    begun, all_sent_at = w.time.now, 0.0
    while w.time.now < begun + 3_600:
        wait_s = w.turn() or 0.0
        while w.session.in_flight:
            last = w.transport.sendings[-1]
            w.hears_nack(last.first_tag + len(last.ids) - 1, multiple=True)
        if not all_sent_at and set(w.sent) == set(names):
            all_sent_at = w.time.now - begun
        w.time.now += max(wait_s, 0.05)
    assert 0 < all_sent_at < 180
    assert max(Counter(w.sent).values()) <= 5
    [found] = w.relay.status.paused
    assert (found.exchange, found.routing_key, told.outcomes) == ("fan", None, {})


def test_a_probe_lost_with_its_connection_is_sent_again(store: Store) -> None:
    w, _ = paused(store)
    settle_held(w)
    assert w.turned(after_s=10).turned().sent[-1] == "a4"
    w.hears_loss()
    w.reconnect()
    assert w.turned().sent[-1] == "a4"
    assert w.relay.status.buffered == 0


def test_without_a_connection_nothing_is_probed(store: Store) -> None:
    w, _ = paused(store)
    settle_held(w)
    w.lose_connection()
    for _ in range(5):
        w.turn(after_s=11)
        w.relay.handle([])
    assert w.session.buffered == 0


def test_without_waiting_messages_the_pause_is_forgotten(store: Store) -> None:
    w = connected(store, policy=RetryPolicy(nacked=FEW, breaker=Breaker(1, wait_fixed(10))))
    told = hand_over(w, "a1")
    for tag in (1, 2, 3):
        assert w.turned(after_s=10).turns(3).relay.status.paused == () or tag > 1
        w.hears_nack(tag)
    assert told.kinds == {"a1": OutcomeKind.NACKED}
    assert w.relay.status.paused
    assert w.turned(after_s=10).turns(4).relay.status.paused == ()
    hand_over(w, "a3")
    assert w.turned().sent[-1] == "a3"


def test_where_the_policy_gives_up_at_once_nothing_is_paused(store: Store) -> None:
    once = Retries(stop_after_attempt(1), wait_fixed(1))
    w = connected(store, policy=RetryPolicy(nacked=once, unavailable=once, breaker=Breaker(1)))
    told = hand_over(w, "a1", "a2", "a3")
    w.turn()
    w.hears_nack(3, multiple=True)
    assert set(told.kinds) == {"a1", "a2", "a3"}
    assert w.relay.status.paused == ()


def test_what_a_sender_has_put_off_is_not_sent_earlier(store: Store) -> None:
    w, _ = paused(store)
    settle_held(w)
    at = datetime.fromtimestamp(w.time.wall + 100, UTC)
    told = Told(w.log)
    message = Message(b"x", routing_key="a", message_id="a9", not_before=at)
    w.inbox.put(told.chunk_of([message]))
    w.turn()
    [entry] = w.store.turns[-1].new
    assert entry.due_at == w.time.wall + 100


def left_by_an_earlier_run(path: Path) -> float:
    """Three wait for "a", one was refused before the pause; when that was."""
    with closing(SqliteStore(path)) as store:
        w, _ = paused(store)
        settle_held(w)
        since = w.time.wall
    with closing(sqlite3.connect(path)) as db:
        held = db.execute("SELECT count(*) FROM reliablepub_messages WHERE due_at = 9e999")
        assert held.fetchone() == (3,)  # "a1" was refused before the pause, and waits by itself
    return since


def test_a_next_run_probes_before_all_go(path: Path) -> None:
    since = left_by_an_earlier_run(path)
    with closing(SqliteStore(path)) as store:
        w = World(store, policy=POLICY)
        w.time.now += 50
        w.connect()
        w.turn()
        [found] = w.relay.status.paused
        unknown = "refused: refused in an earlier run; not probed yet"
        assert found == Paused("", None, 0, found.probe_in_s, since, unknown, waiting=3)
        hand_over(w, "b7")
        w.turn()
        epoch = open_quarantine(w)
        assert w.sent == ["a1"], "alone: it may cost the channel"
        w.relay.handle([Acked(epoch, 1, multiple=False)])
        w.turns(4, is_flushing=True)
        assert sorted(w.sent) == ["a1", "a2", "a3", "a4", "b7"]
        assert w.relay.status.paused == ()


def test_a_next_run_without_a_breaker_lets_go_of_all_that_waits(path: Path) -> None:
    left_by_an_earlier_run(path)
    with closing(SqliteStore(path)) as store:
        w = connected(store, policy=RetryPolicy(FEW, FEW, FEW, breaker=None)).turns(3, after_s=2)
        assert sorted(w.sent) == ["a1", "a2", "a3", "a4"]


def test_a_flush_waits_for_them_too(store: Store) -> None:
    w, _ = paused(store)
    settle_held(w)
    hand_over(w, "a5")
    w.turn()
    assert store.lowest_awaited(5, w.time.wall) == 5  # never tried, but to be sent


def test_a_strategy_that_fails_is_replaced_by_the_default(store: Store) -> None:
    def broken(_state: object) -> float:
        raise ZeroDivisionError

    w = connected(store, policy=RetryPolicy(FEW, FEW, FEW, breaker=Breaker(2, broken)))
    hand_over(w, "a1", "a2")
    assert w.turned().hears_nack(2, multiple=True).relay.status.callback_errors == 1
    [found] = w.relay.status.paused
    assert found.probe_in_s == pytest.approx(1.0)


# -------------------------------------------------------------------- together with ordering keys


def turns(w: World) -> None:
    """As many turns as it takes to read the next message of the key, and send it."""
    w.turns(4, is_flushing=True)


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
    assert w.sent[4:] == ["a1x"], "the first one that was never sent is the probe"
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
    assert w.sent[2:] == ["a1x"], "none is fresh"
    if end == "nacked":
        w.nack(3)
        turns(w)
        w.turn(after_s=10)
    else:
        w.lose_connection()
        turns(w)
        w.reconnect()
    turns(w)
    assert w.sent[2:4] == ["a1x", "a2x" if end == "nacked" else "a1x"]
    assert "b1y" not in w.sent, "behind the head of its key"
    confirm_all(w)
    assert sorted(w.sent[4:]) == ["a1x" if end == "nacked" else "a2x", "b1y"]
    assert set(told.kinds.values()) == {OutcomeKind.CONFIRMED}


def test_a_key_is_still_in_order_when_a_next_run_lets_go_of_it(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        w, _ = held_by_key(store)
    with closing(SqliteStore(path)) as store:
        again = World(store, policy=POLICY, time=w.time)
        again.connect()
        again.turn(after_s=2)
        again.turn()
        epoch = open_quarantine(again)
        again.relay.handle([Acked(epoch, 1, multiple=False)])
        confirm_all(again)
        for key, expected in {"1": ["a1x", "b1y", "a1z"], "2": ["a2x", "a2y"]}.items():
            assert [id_ for id_ in again.sent if id_[1] == key] == expected


# -------------------------------------------------------------------- whole exchanges

NOT_FOUND = "NOT_FOUND - no exchange 'x' in vhost '/'"
HOUR = Retries(stop_after_delay(3_600), wait_fixed(10))
PATIENT = RetryPolicy(HOUR, HOUR, unavailable=HOUR, breaker=Breaker(2, wait_fixed(10)))


def to_exchange(w: World, *ids: str, exchange: str = "x") -> Told:
    """Messages to an exchange, each with a routing key of its own."""
    told = Told(w.log)
    messages = [Message(b"x", exchange=exchange, routing_key=id_, message_id=id_) for id_ in ids]
    w.inbox.put(told.chunk_of(messages))
    return told


def missing(store: Store, policy: RetryPolicy = PATIENT) -> tuple[World, Told]:
    """Exchange "x" does not exist: "a" has cost the channel, "b" and "c" wait."""
    w = connected(store, policy=policy)
    told = to_exchange(w, "a")
    w.turn()
    w.relay.handle([ChannelClosed(w.epoch, 404, NOT_FOUND, by_publish=True)])
    w.open_channel()
    w.turn()
    more = to_exchange(w, "b", "c")
    assert w.turned().sent == ["a"]
    assert told.outcomes == more.outcomes == {}
    return w, more


def refuse_probe(w: World) -> None:
    """Its turn comes, and the exchange is still missing."""
    w.turn(after_s=10)
    epoch = open_quarantine(w)
    w.relay.handle([ChannelClosed(epoch, 404, NOT_FOUND, by_publish=True)])
    w.turns(4)


def test_a_probe_that_cannot_be_written_ends_no_pause(store: Store) -> None:
    w, _ = missing(store)
    w.transport.unencodable = {"b"}
    w.turn(after_s=10)
    open_quarantine(w)
    assert w.turns(4).relay.status.counters.parked == 1
    assert w.relay.status.paused[0].exchange == "x"
    assert w.sent == ["a"]
    w.turn(after_s=10)
    epoch = open_quarantine(w)
    assert w.sent == ["a", "c"], "the next probe"
    w.relay.handle([Acked(epoch, 1, multiple=False)])
    assert w.turns(4).relay.status.paused == ()
    assert w.sent == ["a", "c", "a"]


def test_one_refusal_of_an_exchange_pauses_it_for_every_routing_key(store: Store) -> None:
    w, _ = missing(store)
    [found] = w.relay.status.paused
    assert (found.exchange, found.routing_key, found.waiting) == ("x", None, 3)
    assert found.reason == f"refused: 404 {NOT_FOUND}"
    to_exchange(w, "y1", exchange="y")
    assert w.turned().sent == ["a", "y1"], "others flow"
    assert w.in_memory[0] == 1


def test_its_probe_goes_alone_and_costs_no_other_channel(store: Store) -> None:
    w, _ = missing(store)
    main = w.epoch
    refuse_probe(w)
    assert w.sent == ["a", "b"]
    assert w.transport.sendings[-1].epoch != main
    to_exchange(w, "y1", exchange="y")
    w.turn()
    assert (w.transport.sendings[-1].epoch, w.sent[-1]) == (main, "y1")
    assert w.relay.status.paused[0].refusals == 2


def test_when_the_exchange_is_there_again_all_go(store: Store) -> None:
    w, more = missing(store)
    w.turn(after_s=10)
    epoch = open_quarantine(w)
    w.relay.handle([Acked(epoch, 1, multiple=False)])
    assert w.turns(4, is_flushing=True).sent[1:] == ["b", "a", "c"]
    assert w.relay.status.paused == ()
    w.ack_all()
    w.turn(is_flushing=True)
    assert set(more.kinds) == {"b", "c"}
    assert w.in_memory == (0, 0)


def test_an_exchange_that_refuses_a_message_for_another_reason_is_there(store: Store) -> None:
    w, _ = missing(store)
    w.turn(after_s=10)
    epoch = open_quarantine(w)
    w.relay.handle([Nacked(epoch, 1, multiple=False)])
    assert w.turns(4, is_flushing=True).sent[1:] == ["b", "a", "c"]
    assert w.relay.status.counters.parked == 0


def test_probes_of_an_exchange_without_an_answer_let_the_others_go(store: Store) -> None:
    """A queue that does not confirm is no reason to hold back what goes to other queues."""
    w, _ = missing(store)
    w.turn(after_s=10)
    open_quarantine(w)
    for _ in range(4):
        w.turn(after_s=9)
        w.turn(after_s=1)
    assert w.relay.status.paused == ()
    w.relay.handle([ChannelOpened(w.asked_epochs[-1])])
    w.turns(3)
    assert "b" in w.sent, "and c, as soon as b is answered"


def test_pauses_that_are_shorter_than_the_way_to_the_broker_go_on(store: Store) -> None:
    breaker = Breaker(refusals_max=2, pause=wait_fixed(0.2))
    w, _ = missing(store, replace(PATIENT, breaker=breaker))
    to_exchange(w, *(f"d{n}" for n in range(100)))
    w.turn(after_s=0.2)
    open_quarantine(w)
    assert w.turns(20, after_s=0.2).relay.status.paused, "the answer may be under way"
    assert w.turns(20, after_s=0.2).relay.status.paused == ()


def test_after_its_time_a_refused_message_takes_the_others_along_although_there_is_no_pause(
    store: Store,
) -> None:
    """Otherwise each of them would be sent, and cost the channel."""
    w, more = missing(store, replace(PATIENT, unavailable=HOUR))
    w.turn(after_s=10)
    open_quarantine(w)
    for _ in range(4):
        w.turn(after_s=10)
        w.turns(3)
    assert w.relay.status.paused == ()
    w.time.now += 3_600
    w.relay.handle([ChannelOpened(w.asked_epochs[-1])])
    w.turn()
    alone = w.transport.sendings[-1].epoch
    w.relay.handle([ChannelClosed(alone, 404, NOT_FOUND, by_publish=True)])
    sent = len(w.sent)
    w.turns(6)
    assert set(more.kinds) == {"b", "c"}
    assert w.sent[sent:] == []


@pytest.mark.parametrize("by", ["budget", "decide"])
def test_what_is_given_up_at_once_pauses_no_exchange_although_it_was_nacked_before(
    store: Store, by: str
) -> None:
    """Others, which would be given up at once too, would wait for one probe after the other."""

    def decide(refusal: Refusal) -> GiveUp | None:
        return GiveUp.PARK if refusal.outcome.reply_code == 404 else None

    given_up_at_once = (
        replace(PATIENT, unavailable=ONCE) if by == "budget" else replace(PATIENT, decide=decide)
    )
    w = connected(store, policy=given_up_at_once)
    told = to_exchange(w, "a")
    assert w.turned().hears_nack(1).turned(after_s=10).sent == ["a", "a"]
    w.relay.handle([ChannelClosed(w.epoch, 404, NOT_FOUND, by_publish=True)])
    w.open_channel()
    assert told.kinds == {"a": OutcomeKind.REFUSED}
    assert w.relay.status.paused == ()
    to_exchange(w, "b")
    assert w.turned().sent == ["a", "a", "b"]


@pytest.mark.parametrize("then", [GiveUp.PARK, GiveUp.DISCARD])
def test_after_its_time_everything_that_waits_is_given_up_with_the_brokers_words(
    store: Store, then: GiveUp
) -> None:
    patience = replace(HOUR, then=then)
    w, more = missing(store, replace(PATIENT, unavailable=patience))
    w.time.now += 3_600
    late = to_exchange(w, "d")
    refuse_probe(w)
    w.turns(3)
    assert set(more.kinds) == {"b", "c"}
    assert w.sent == ["a", "b"], "the others were not sent for it"
    assert NOT_FOUND in more.outcomes["c"].reply_text
    assert "for which it has waited" in more.outcomes["c"].reply_text
    counters = w.relay.status.counters
    assert (counters.parked, counters.discarded) == ((3, 0) if then is GiveUp.PARK else (0, 3))
    assert late.outcomes == {}, "its time has just begun"
    assert counters.open == 1
    assert w.relay.status.paused[0].waiting == 1


def test_who_waits_may_be_kept_by_the_callback(store: Store) -> None:
    asked: list[str] = []

    def decide(refusal: Refusal) -> RetryIn | None:
        asked.append(refusal.message_id)
        return RetryIn(5) if refusal.message_id == "b" else None

    w, more = missing(store, replace(PATIENT, decide=decide))
    w.time.now += 3_600
    refuse_probe(w)
    w.turns(3)
    assert set(more.kinds) == {"c"}
    assert asked[:2] == ["a", "b"]
    assert set(asked[2:]) == {"a", "b", "c"}, "and only when their time is over"
    assert w.relay.status.counters.open == 1


def test_the_time_of_what_waits_goes_on_in_the_next_run(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        w, _ = missing(store)
    with closing(SqliteStore(path)) as store:
        again = World(store, policy=PATIENT, time=w.time)
        again.time.now += 3_600
        again.connect()
        epoch = open_quarantine(again)
        assert again.relay.status.counters.parked == 0, "nothing is known yet"
        again.relay.handle([ChannelClosed(epoch, 404, NOT_FOUND, by_publish=True)])
        for _ in range(6):
            again.turn()
        assert len(again.sent) == 1
        assert again.relay.status.counters.parked == 3


def test_more_exchanges_than_are_remembered_are_let_go(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        w, _ = missing(store)
    few = replace(PATIENT, breaker=Breaker(2, wait_fixed(10), destinations_max=1))
    sql(path, "UPDATE reliablepub_messages SET exchange = 'z', due_at = 9e999 WHERE id = 3")
    with closing(SqliteStore(path)) as store:
        again = World(store, policy=few, time=w.time)
        again.connect()
        for _ in range(4):
            again.turn()
        assert again.relay.status.paused_destinations == 1
        again.relay.handle([])
        counters = again.relay.status.counters
        assert (counters.open, counters.parked) == (2, 1), "the row is not what was stored"


def test_a_page_after_the_other_goes_and_what_is_paused_again_waits(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reliablepub.relay.pauses.PAGE", 2)
    w, _ = missing(store)
    to_exchange(w, *(f"n{n}" for n in range(7)))
    w.turn()
    w.turn(after_s=10)
    epoch = open_quarantine(w)
    w.relay.handle([Acked(epoch, 1, multiple=False)])
    w.turns(12, is_flushing=True)
    assert len(set(w.sent)) == 10
    assert w.relay.status.paused == ()


def test_what_waits_again_while_a_page_awaits_its_commit_goes_too(
    sqlite: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reliablepub.relay.pauses.PAGE", 1)
    often = Retries(stop_after_attempt(9), wait_fixed(1))
    policy = RetryPolicy(often, often, often, breaker=Breaker(pause=wait_fixed(10)))
    w = connected(sqlite, policy=policy, window_max=2, confirm_timeout_s=1_000.0)
    gone = ChannelClosed(w.epoch, 404, "NOT_FOUND - no exchange 'ex' in vhost '/'", by_publish=True)
    w.sends("a", exchange="ex")
    w.relay.handle([gone])
    w.open_channel()
    w.sends(*"bcdef", exchange="ex")
    w.turn(after_s=11.0)
    probing = open_quarantine(w)
    assert w.sent == ["a", "b"]
    while w.sent == ["a", "b"]:  # the exchange is there again, and the queue is slow to confirm
        w.turn(after_s=1.0)
    assert len(w.sent) == 3, "so the pause has ended, and a page at a time goes"
    w.store.fails = lambda _turn: OutboxLocked("locked by another process")
    w.turn()
    w.relay.handle([replace(gone, epoch=w.epoch)])
    w.turn()
    w.relay.handle([Acked(probing, 1, multiple=False)])  # which ends the second pause
    w.turn()
    w.store.fails = lambda _turn: None
    w.turn(after_s=1.0)
    w.open_channel()
    for _ in range(30):
        w.turn(after_s=1.0)
        w.ack_all()
    assert w.relay.status.counters.open == 0


# -------------------------------------------------------------------- a user_id

FOREIGN = "PRECONDITION_FAILED - user_id property set to 'u1' but authenticated user was 'guest'"


def of_user(w: World, *ids: str, user_id: str | None = "u1") -> Told:
    """Messages with a ``user_id``."""
    told = Told(w.log)
    w.inbox.put(
        told.chunk_of(
            [Message(b"x", routing_key="q", user_id=user_id, message_id=id_) for id_ in ids]
        )
    )
    return told


def foreign(store: Store) -> tuple[World, Told]:
    """The broker has refused the ``user_id`` of "a"; "b" and "c" have it too."""
    w = connected(store, policy=PATIENT)
    told = of_user(w, "a")
    w.turn()
    w.relay.handle([ChannelClosed(w.epoch, 406, FOREIGN, by_publish=True)])
    w.open_channel()
    w.turn()
    of_user(w, "b", "c")
    w.turn()
    return w, told


def test_a_foreign_user_id_is_paused_and_all_others_flow(store: Store) -> None:
    w, told = foreign(store)
    of_user(w, "d", user_id=None)
    of_user(w, "e", user_id="guest")
    assert w.turned().sent == ["a", "d", "e"]
    [found] = w.relay.status.paused
    assert (found.user_id, found.exchange, found.routing_key, found.waiting) == ("u1", "", None, 3)
    assert found.reason.startswith(f"refused: 406 {FOREIGN}; log in as this user, or give")
    assert found.reason.endswith("the relay's user the tag impersonator")
    assert told.outcomes == {}


def test_when_the_user_id_is_accepted_all_with_it_go(store: Store) -> None:
    w, told = foreign(store)
    w.turn(after_s=10)
    epoch = open_quarantine(w)
    assert w.sent == ["a", "a"], "the probe goes alone"
    w.relay.handle([Acked(epoch, 1, multiple=False)])
    assert w.turns(4, is_flushing=True).sent == ["a", "a", "b", "c"]
    assert w.relay.status.paused == ()
    assert told.kinds == {"a": OutcomeKind.CONFIRMED}


def test_a_foreign_user_id_of_an_earlier_run_pauses_no_exchange_for_long(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        w, _ = foreign(store)
    with closing(SqliteStore(path)) as store:
        again = World(store, policy=PATIENT, time=w.time)
        again.connect()
        epoch = open_quarantine(again)
        again.relay.handle([ChannelClosed(epoch, 406, FOREIGN, by_publish=True)])
        for _ in range(6):
            again.turn()
        of_user(again, "d", user_id=None)
        again.turn()
        assert again.sent[-1] == "d"
        [found] = again.relay.status.paused
        assert found.user_id == "u1"
        assert again.relay.status.counters.open == 4
