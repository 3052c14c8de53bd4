"""People park, discard, reroute and retry messages beside a relay that holds them in memory."""

import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from reliablepub._core.events import ConnectionLost
from reliablepub.errors import OutboxUnreachable
from reliablepub.hooks import MessageGivenUp
from reliablepub.message import Message
from reliablepub.outbox.admin.interventions import Action, Effect, Intervention, intervene
from reliablepub.outbox.entry import HELD, Changes, Intervened
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import OutcomeKind
from reliablepub.relay.loaded import Waiters
from tests.asking import fill
from tests.relay.scripted import Told, World, connected, disk_full, patient


@pytest.fixture
def full(sqlite: SqliteStore) -> World:
    """A window of two, with a and b in flight; c and d are buffered."""
    return connected(sqlite, window_max=2, policy=patient(2, 5.0)).turned()


@pytest.fixture
def step_in(path: Path) -> Callable[..., Effect]:
    def do(world: World, action: Action, *ids: int, **address: Any) -> Effect:
        what = Intervention(action, person="jo@host", note="as agreed", **address)
        return intervene(outbox_at(path), ids, what, clock=lambda: world.time.wall)

    return do


def differences(path: Path) -> tuple[int, ...]:
    with closing(sqlite3.connect(path)) as connection:
        row: tuple[int, ...] = connection.execute(
            "SELECT open_difference, parked_difference, expired_difference, bytes_difference"
            " FROM reliablepub_audit"
        ).fetchone()
        return row


def test_what_is_in_flight_is_left_alone(
    full: World, step_in: Callable[..., Effect], path: Path
) -> None:
    full.hand_over("a", "b", "c", "d")
    assert full.turned().sent == ["a", "b"]
    effect = step_in(full, Action.DISCARD, 1, 2, 3, 99)
    assert (effect.changed, effect.in_flight, effect.unfit) == (1, [1, 2], [99])
    assert differences(path) == (0, 0, 0, 0)


def test_every_message_counts_and_every_byte_of_a_new_address(
    full: World, step_in: Callable[..., Effect], path: Path
) -> None:
    def counted() -> tuple[int, int]:
        with closing(sqlite3.connect(path)) as connection:
            ledger = connection.execute("SELECT parked, open_bytes FROM reliablepub_ledger")
            parked, open_bytes = ledger.fetchone()
        return parked, open_bytes

    full.hand_over("a", "b", "c", "d", "e", "f")
    full.turn()
    _, all_bytes = counted()
    assert step_in(full, Action.PARK, 3, 4).changed == 2
    assert counted() == (2, all_bytes * 4 // 6)
    assert step_in(full, Action.RETRY, 3, 4).changed == 2
    assert counted() == (0, all_bytes)
    assert step_in(full, Action.REROUTE, 5, 6, exchange="x", routing_key="longer").changed == 2
    assert counted() == (0, all_bytes + 2 * (len("xlonger") - len("q")))
    assert differences(path) == (0, 0, 0, 0)


def test_what_came_of_several_transactions_is_added_up() -> None:
    effect = Effect()
    effect.add(Effect(1, [10], [100], [1_000]))
    effect.add(Effect(2, [20], [200], [2_000]))
    assert effect == Effect(3, [10, 20], [100, 200], [1_000, 2_000])


@pytest.mark.parametrize("action", [Action.PARK, Action.DISCARD])
def test_what_is_buffered_is_not_sent_any_more(
    full: World, step_in: Callable[..., Effect], path: Path, action: Action
) -> None:
    told = full.hand_over("a", "b", "c", "d")
    full.turn()
    assert step_in(full, action, 3).changed == 1
    full.ack_all()
    full.turn()  # no time has passed, so only the commit can tell
    full.ack_all()
    assert full.turned(is_flushing=True).sent == ["a", "b", "d"]
    done = {"park": "parked", "discard": "discarded"}[action]
    assert list(told.gone) == ["c"]
    assert f"({done} by jo@host: as agreed)" in told.gone["c"]
    assert set(told.outcomes) == {"a", "b", "d"}
    assert full.in_memory == (0, 0)
    assert differences(path) == (0, 0, 0, 0)
    counters = full.relay.status.counters
    assert (counters.stored, counters.confirmed, counters.open) == (4, 3, 0)


def test_a_new_message_is_stored_though_its_commit_was_interrupted(
    full: World, step_in: Callable[..., Effect]
) -> None:
    full.hand_over("a", "b", "c")
    full.turn()
    step_in(full, Action.PARK, 3)
    told = full.hand_over("d")
    full.ack_all()
    full.turn()
    assert told.is_stored
    assert full.sent == ["a", "b", "d"]


def test_what_was_rerouted_goes_to_its_new_address_only(
    full: World, step_in: Callable[..., Effect], path: Path
) -> None:
    told = full.hand_over("a", "b", "c")
    full.turn()
    assert step_in(full, Action.REROUTE, 3, routing_key="elsewhere").changed == 1
    full.ack_all()
    assert full.turned().turned().transport.routing_keys == ["q", "q", "elsewhere"]
    full.ack_all()
    assert full.turned(is_flushing=True).sent == ["a", "b", "c"]
    assert told.kinds == dict.fromkeys("abc", OutcomeKind.CONFIRMED)
    assert full.in_memory == (0, 0)
    assert differences(path) == (0, 0, 0, 0)


def test_a_row_that_was_rerouted_is_not_read_beside_its_old_self(
    full: World, step_in: Callable[..., Effect], sqlite: SqliteStore
) -> None:
    """It is due on disk and in memory still: until memory has let go, none is given out."""
    full.hand_over("a", "b", "c")
    full.turn()
    step_in(full, Action.REROUTE, 3, routing_key="elsewhere")
    now = full.time.wall
    with pytest.raises(Intervened):
        sqlite.read_due(now, limit=9, bytes_max=9999, loaded=())
    assert [(t.id, t.routing_key, t.is_open) for t in sqlite.touched()] == [(3, "q", True)]
    (entry,), _ = sqlite.read_due(now, limit=9, bytes_max=9999, loaded=())
    assert entry.message.routing_key == "elsewhere"


def test_what_waits_to_be_sent_again_is_sent_now(
    full: World, step_in: Callable[..., Effect]
) -> None:
    told = full.hand_over("a")
    full.turn()
    full.nack(1)
    assert full.turned().sent == ["a"]
    assert step_in(full, Action.RETRY, 1).changed == 1
    assert full.turned(after_s=0.1).sent == ["a", "a"]
    full.nack(2)  # the first refusal is forgotten, so the budget of two is not spent
    full.turn()
    assert told.outcomes == {}


def test_who_waits_for_a_postponed_message_is_told_that_it_is_gone(
    full: World, step_in: Callable[..., Effect]
) -> None:
    told = full.hand_over("a")
    full.turn()
    full.nack(1)
    full.turn()
    step_in(full, Action.DISCARD, 1)
    full.turn(after_s=0.1)
    assert list(told.gone) == ["a"]
    assert full.turned(after_s=10.0).sent == ["a"]


def test_who_waits_for_an_unread_message_is_told_once(
    sqlite: SqliteStore, step_in: Callable[..., Effect]
) -> None:
    world = connected(sqlite, window_max=2, loaded_max=2)
    first = world.hand_over("a", "b")
    told = world.sends("c", "d", "e")
    assert world.in_memory[0] == 2
    step_in(world, Action.DISCARD, 3)
    step_in(world, Action.PARK, 4)
    world.turn(after_s=0.1)
    assert list(told.gone) == ["c", "d"]
    step_in(world, Action.RETRY, 4)
    for _ in range(4):
        world.turn(after_s=0.1)
        world.ack_all()
    world.turn(is_flushing=True)
    assert sorted(world.sent) == ["a", "b", "d", "e"]
    assert (list(told.gone), set(told.outcomes)) == (["c", "d"], {"e"})
    assert set(first.outcomes) == {"a", "b"}


@pytest.mark.parametrize(
    ("action", "sent"),
    [
        (Action.DISCARD, ["a", "b", "c"]),
        (Action.PARK, ["a"]),  # it holds its key
        (Action.RETRY, ["a", "a", "b", "c"]),
        (Action.REROUTE, ["a", "a", "b", "c"]),
    ],
)
def test_the_order_of_a_key_is_kept(
    sqlite: SqliteStore, step_in: Callable[..., Effect], action: Action, sent: list[str]
) -> None:
    world = connected(sqlite, policy=patient(5, 500.0))
    told = Told(world.log)
    of_key = [Message(b"x", "", "q", message_id=id_, ordering_key="k") for id_ in "abc"]
    world.inbox.put(told.chunk_of(of_key))
    world.turn()
    world.turn(after_s=0.1)
    world.hears_nack(1)
    address = {"routing_key": "elsewhere"} if action is Action.REROUTE else {}
    assert step_in(world, action, 1, **address).changed == 1
    for _ in range(6):
        world.turn(after_s=0.1)
        world.ack_all()
    assert world.sent == sent


def test_a_new_address_is_not_paused_for_the_old_one(
    full: World, step_in: Callable[..., Effect]
) -> None:
    """The relay has put it off and not committed that yet; an operator gives it a new address."""
    full.hand_over("a", "b", "c")
    full.turn()
    (entry,) = full.session.buffered_keys()
    full.session.withdraw({entry})
    full.relay._settling._postpone(entry, HELD)
    step_in(full, Action.REROUTE, 3, routing_key="elsewhere")
    full.ack_all()
    full.turn()  # no time has passed, so only the commit can tell
    assert full.turned(after_s=0.1).sent == ["a", "b", "c"]
    assert full.transport.routing_keys[-1] == "elsewhere"
    full.ack_all()
    assert full.turned(is_flushing=True).in_memory == (0, 0)


def test_a_suspect_can_be_withdrawn(full: World, step_in: Callable[..., Effect]) -> None:
    told = full.hand_over("a", "b")
    full.turn()
    full.lose_connection()
    full.turn()
    assert step_in(full, Action.PARK, 1).changed == 1  # uncertain, and not in flight any more
    full.reconnect()
    assert full.turned().sent == ["a", "b", "b"]
    assert list(told.gone) == ["a"]


@pytest.mark.parametrize("action", [Action.PARK, Action.DISCARD])
def test_the_caller_learns_whether_the_message_may_have_arrived(
    full: World, step_in: Callable[..., Effect], action: Action
) -> None:
    told = full.hand_over("a", "b", "c")
    full.turn()
    full.lose_connection()
    full.turn()
    assert step_in(full, action, 1, 3).changed == 2  # `a` was in flight, `c` never was
    full.turn(after_s=0.1)
    errors = told.withdrawals
    assert {id_: error.may_have_arrived for id_, error in errors.items()} == {"a": True, "c": False}
    assert {error.is_kept for error in errors.values()} == {action is Action.PARK}


def test_without_a_relay_nothing_is_in_flight(path: Path, step_in: Callable[..., Effect]) -> None:
    store = SqliteStore(path)
    world = connected(store, "a", window_max=2)
    store._writer.opened().close()  # as if it were killed
    store._relay_lock.release()
    assert step_in(world, Action.DISCARD, 1).changed == 1
    assert differences(path) == (0, 0, 0, 0)


def test_interventions_are_forgotten_with_their_messages(
    path: Path, step_in: Callable[..., Effect]
) -> None:
    day = 86_400.0
    fill(path, *(Message(b"x") for _ in range(2)))
    what = Intervention(Action.PARK, person="jo")
    assert intervene(outbox_at(path), [1, 2], what, clock=lambda: day).changed == 2
    gone = Intervention(Action.DISCARD, person="jo")
    assert intervene(outbox_at(path), [1], gone, clock=lambda: 2 * day).changed == 1
    with closing(SqliteStore(path, clock=lambda: 8.5 * day)) as store:
        store.relieve()
        rows = store._writer.opened().execute("SELECT id, action FROM reliablepub_interventions")
        assert rows.fetchall() == [(2, "park"), (1, "discard")]
        store.commit(Changes())


class Parked:
    """Listens to what is parked."""

    def __init__(self) -> None:
        self.events: list[MessageGivenUp] = []

    def on_parked(self, events: Sequence[MessageGivenUp]) -> None:
        self.events += events


@pytest.mark.parametrize("is_retried", [False, True])
def test_a_caller_that_waits_for_a_damaged_row_is_told_at_once(
    path: Path,
    is_retried: bool,  # noqa: FBT001
) -> None:
    """Stored beyond memory, or postponed: either way the row is read again, and found damaged."""
    with closing(SqliteStore(path)) as store:
        parked = Parked()
        loaded_max = 10 if is_retried else 2
        w = connected(store, loaded_max=loaded_max, policy=patient(9, 1.0), hooks=[parked])
        told = w.sends("a", "b", "c")
        if is_retried:
            w.hears_nack(3, multiple=True)
        with closing(sqlite3.connect(path)) as db:
            db.execute("UPDATE reliablepub_messages SET body = x'00' WHERE message_id = 'b'")
            db.commit()
        w.turn(after_s=5.0)
        w.turn()
        assert set(told.gone) == {"b"}
        assert w.relay.status.counters.parked == 1
        assert "the checksum is" in told.gone["b"]
        assert "damaged on the disk" in told.gone["b"]
        [event] = parked.events
        assert (event.message_id, event.outcome.kind) == ("b", OutcomeKind.UNCERTAIN)
        assert "the checksum is" in event.outcome.reply_text
        w.ack_all()
        w.turn(is_flushing=True)
        assert set(told.outcomes) == {"a", "c"}
        assert w.relay.status.counters.parked == 1


def test_who_reroutes_a_message_is_not_overruled_by_a_commit_whose_answer_was_lost(
    sqlite: SqliteStore, step_in: Callable[..., Effect]
) -> None:
    w = connected(sqlite, "a")

    def cut_off(turn: Changes) -> OutboxUnreachable:
        turn.sent = ()
        sqlite.commit(turn)
        return OutboxUnreachable("the connection is lost")

    def reroute(_: Changes) -> None:
        w.store.fails = lambda _: None
        assert step_in(w, Action.REROUTE, 1, routing_key="new").changed == 1

    w.relay.handle([ConnectionLost("reset")])
    w.store.fails = cut_off
    w.turn()
    w.store.fails = reroute  # after the relay has looked for changes, before it commits again
    w.turn(after_s=2.0)
    w.connect()
    assert w.turned(after_s=2.0).turned().transport.routing_keys == ["q", "new"]


@pytest.mark.parametrize("action", [Action.PARK, Action.DISCARD])
def test_who_steps_in_before_a_verdict_is_stored_has_the_last_word(
    sqlite: SqliteStore, step_in: Callable[..., Effect], path: Path, action: Action
) -> None:
    w = connected(sqlite, window_max=1)
    w.hand_over("first")
    told = w.sends("a", expires_in_s=5.0)
    w.store.fails = disk_full
    w.turn(after_s=6.0)  # a is given up, and that cannot be stored
    w.store.fails = lambda _: None
    assert step_in(w, action, 2).changed == 1
    w.turns(2, after_s=1.0)
    status = Outbox(path).status()
    expected = (0, 1, 0) if action is Action.PARK else (0, 0, 1)
    assert (status.expired, status.parked, status.discarded) == expected
    assert told.outcomes == {}
    assert differences(path) == (0, 0, 0, 0)


def test_a_waiter_of_some_of_its_messages_is_not_taken_by_the_others() -> None:
    waiters = Waiters()
    told = Told()
    waiters.stored(1, 3, told, apart={1, 3})
    assert waiters.take(1) is None
    assert waiters.take(2) is told
    assert len(waiters) == 0


def test_dropped_waiters_are_forgotten_and_the_others_kept() -> None:
    """An outage may last for days, and most applications drop their receipts."""
    waiters, kept = Waiters(), Told()
    for id_ in range(1, 20_001, 2):
        waiters.stored(id_, id_, kept if id_ % 1_000 == 1 else Told(), apart=set())
        assert len(waiters) <= 1_001
    waiters.stored(30_001, 30_500, kept, apart=set())
    for first in range(40_001, 90_001, 5):
        waiters.stored(first, first + 4, Told(), apart=set())
        assert len(waiters) <= 1_001
    assert all(waiters.take(id_) is kept for id_ in range(1, 20_001, 1_000))
    assert all(waiters.take(id_) is kept for id_ in range(30_001, 30_501))
    assert waiters.take(3) is None
    assert waiters.take(40_001) is None


def test_an_outage_in_which_each_message_was_published_alone_is_told_in_linear_time() -> None:
    waiters, told, count = Waiters(), Told(), 200_000
    for id_ in range(1, count + 1):
        waiters.stored(id_, id_, told, apart=set())
    begun = time.process_time()
    assert all(waiters.take(id_) is told for id_ in range(1, count + 1))
    assert time.process_time() - begun < 2, "0.03 s; it was 8 s"
    assert len(waiters) == 0


def test_who_waits_for_a_commit_is_told_before_callbacks_run(
    full: World, step_in: Callable[..., Effect]
) -> None:
    """A callback may wait for a thread that publishes."""
    told = full.hand_over("a", "b", "c")
    full.turn()
    later = full.hand_over("d")
    called: list[bool] = []
    told.withdrawn = lambda _: called.append(later.is_stored)  # type: ignore[assignment,method-assign]

    def step_in_first(_turn: Changes) -> None:
        step_in(full, Action.PARK, 3)

    full.store.fails = step_in_first
    full.turn()
    assert called == [True]
