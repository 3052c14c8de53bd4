"""Ordering keys: one message of a key at a time, in their order, whatever happens to each."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from reliablepub._core.events import ChannelClosed, Returned
from reliablepub.errors import OutboxDiskFailed
from reliablepub.message import Message
from reliablepub.outbox.admin.interventions import Action, Intervention, change, intervene
from reliablepub.outbox.admin.story import tell
from reliablepub.outbox.database import Session
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outbox.sqlite.transactions import transaction
from reliablepub.outcome import OutcomeKind
from reliablepub.relay.elsewhere import POLL_S
from reliablepub.relay.loaded import PAGE
from tests.asking import fill
from tests.relay.conftest import Build
from tests.relay.scripted import Told, World, connected, disk_full, patient
from tests.stores import open_store

AFTER_ALL = datetime(2100, 1, 1, tzinfo=UTC)
LONG = 10_000_000_000.0
"""Past the real time, at which people's changes fall due."""


def confirm_all(w: World) -> None:
    """Confirm whatever is sent until nothing more can be."""
    idle = 0
    for _ in range(1_000):
        w.turn(is_flushing=True)
        idle = 0 if w.session.in_flight else idle + 1
        if idle == 3:
            return
        w.ack_all()
    raise AssertionError("it never ran empty")


def assert_nothing_is_left(w: World) -> None:
    loaded = w.relay._loaded
    assert w.in_memory == (0, 0)
    assert (len(loaded._order.wanted), len(loaded._order._admitted), len(loaded.waiters)) == (
        0,
        0,
        0,
    )


def assert_all_go(w: World, sent: list[str]) -> None:
    """Confirm whatever is sent; in the end it was this, and nothing is left."""
    confirm_all(w)
    assert w.sent == sent
    assert_nothing_is_left(w)


def enqueue(path: Path, *ids: str, key: str | None = "k") -> None:
    fill(path, *(Message(b"", message_id=id_, ordering_key=key) for id_ in ids))


# -------------------------------------------------------------------- one after the other


def enqueue_skipped(path: Path) -> None:
    """Two of a key, the first of which is parked, and a person lets the key go on without it."""
    enqueue(path, "a", "b")
    for action in (Action.PARK, Action.SKIP):
        assert intervene(outbox_at(path), [1], Intervention(action)).changed == 1


def test_each_waits_for_the_confirm_of_the_one_before(world: Build) -> None:
    w = world()
    told = w.sends("a", "b", "c", ordering_key="k")
    w.turn()
    for n, sent in enumerate((["a"], ["a", "b"], ["a", "b", "c"]), 1):
        assert w.turned().sent == sent
        w.hears_ack(n, is_flushing=True)
    assert told.kinds == dict.fromkeys("abc", OutcomeKind.CONFIRMED)
    w.turn()
    assert_nothing_is_left(w)


def test_keys_do_not_wait_for_each_other_and_messages_without_a_key_do_not_wait(
    world: Build,
) -> None:
    w = world()
    w.hand_over("a1", "a2", ordering_key="a")
    w.hand_over("b1", "b2", ordering_key="b")
    w.sends("x", "y")
    w.turn()
    assert sorted(w.sent) == ["a1", "b1", "x", "y"]
    confirm_all(w)
    assert sorted(w.sent) == ["a1", "a2", "b1", "b2", "x", "y"]
    assert_nothing_is_left(w)


def test_a_chunk_may_hold_many_keys_and_none(world: Build) -> None:
    w = world()
    told = Told(w.log)
    keys = [None, "k", "k", None, "l", "k", "l"]
    messages = [Message(b"", message_id=f"{n}{k}", ordering_key=k) for n, k in enumerate(keys)]
    w.inbox.put(told.chunk_of(messages))
    confirm_all(w)
    for key in ("k", "l"):
        assert [id_ for id_ in w.sent if id_.endswith(key)] == [
            f"{n}{k}" for n, k in enumerate(keys) if k == key
        ]
    assert len(told.outcomes) == len(keys)
    assert_nothing_is_left(w)


def test_what_memory_has_no_room_for_keeps_its_order(world: Build) -> None:
    w = world(window_max=3, loaded_max=4)
    expected = [f"{n}-{n % 7}" for n in range(100)]
    tolds = []
    for id_ in expected:
        tolds.append(w.hand_over(id_, ordering_key=id_.split("-")[1]))
        assert w.turned().in_memory[0] <= 4
    confirm_all(w)
    for key in range(7):
        ends = f"-{key}"
        assert [i for i in w.sent if i.endswith(ends)] == [i for i in expected if i.endswith(ends)]
    assert all(told.outcomes for told in tolds)
    assert_nothing_is_left(w)


def test_a_full_page_ends_before_what_waits_for_its_key(world: Build) -> None:
    """A large message that is not next of its key must not stand for those before it."""
    w = world(loaded_bytes_max=2_000)
    w.hand_over("in memory", body=bytes(1_500))
    w.hand_over("fills the page", body=bytes(1_100))
    w.hand_over("first", ordering_key="k")
    w.hand_over("second", ordering_key="k", body=bytes(900))
    assert_all_go(w, ["in memory", "fills the page", "first", "second"])


def test_several_processes_share_a_key_in_the_order_of_their_commits(
    sqlite: SqliteStore, path: Path
) -> None:
    w = connected(sqlite)
    w.sends("own1", ordering_key="k")
    enqueue(path, "other1", "other2")
    w.sends("own2", ordering_key="k")
    w.turn(after_s=POLL_S)
    enqueue(path, "other3")
    w.turn(after_s=POLL_S)
    assert_all_go(w, ["own1", "other1", "other2", "own2", "other3"])


# -------------------------------------------------------------------- retries, outages, restarts


@pytest.mark.parametrize("kind", ["nacked", "returned", "refused"])
def test_a_retry_keeps_its_place(world: Build, kind: str) -> None:
    w = world(policy=patient(3, 5.0))
    w.sends("a", "b", ordering_key="k")
    w.turn()
    if kind == "nacked":
        w.nack(1)
    elif kind == "returned":
        w.relay.handle([Returned(w.epoch, 1, 312, "NO_ROUTE")])
        w.ack(1)
    else:
        w.relay.handle([ChannelClosed(w.epoch, 406, "TOO LARGE", by_publish=True)])
        w.open_channel()
    w.hand_over("c", ordering_key="k")
    assert w.turns(3, after_s=1.0).sent == ["a"], "those behind it wait with it"
    assert w.turned(after_s=5.0).sent == ["a", "a"]
    assert_all_go(w, ["a", "a", "b", "c"])


def test_an_outage_keeps_the_order(world: Build) -> None:
    w = world()
    w.sends("a", "b", ordering_key="k")
    w.turn()
    w.hears_loss()
    w.reconnect()
    assert w.turned().sent == ["a", "a"]
    confirm_all(w)
    assert w.sent == ["a", "a", "b"]


def test_the_order_survives_the_process(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        w = connected(store, policy=patient(9, 5.0))
        w.sends("a", "b", "c", ordering_key="k")
        w.turn()
        w.hears_nack(1)
    with closing(SqliteStore(path)) as store:
        again = World(store, time=w.time)
        again.connect()
        again.turn()
        assert again.sent == [], "the first one waits for its retry"
        again.turn(after_s=5.0)
        confirm_all(again)
        assert again.sent == ["a", "b", "c"]
        assert_nothing_is_left(again)


def test_a_commit_that_fails_loses_no_turn(world: Build) -> None:
    w = world()
    w.sends("a", "b", ordering_key="k")
    w.turn()
    w.ack(1)
    w.store.fails = disk_full
    assert w.turns(3, after_s=1.0).sent == ["a"], "that it is confirmed is not on disk yet"
    w.store.fails = lambda _turn: None
    w.turn(after_s=1.0)
    assert_all_go(w, ["a", "b"])


# -------------------------------------------------------------------- delays and deadlines


def test_a_delay_holds_up_those_behind_it(world: Build) -> None:
    w = world()
    due = datetime.fromtimestamp(w.time.wall + 5.0, tz=UTC)
    w.hand_over("a", ordering_key="k", not_before=due)
    w.sends("b", ordering_key="k")
    assert w.turned(after_s=4.0).sent == []
    w.turn(after_s=1.0)
    assert_all_go(w, ["a", "b"])


def test_whose_time_comes_before_its_turn_waits_for_its_turn(world: Build) -> None:
    w = world()
    due = datetime.fromtimestamp(w.time.wall + 5.0, tz=UTC)
    w.hand_over("a", ordering_key="k")
    w.sends("b", ordering_key="k", not_before=due)
    assert w.turns(3, after_s=3.0).sent == ["a"]
    wait_s = w.turn()
    assert wait_s is not None
    assert wait_s > 0, "the relay does not spin"
    confirm_all(w)
    assert w.sent == ["a", "b"]


def test_a_message_that_expires_lets_the_next_one_go(world: Build) -> None:
    w = world(policy=patient(9, 60.0))
    first = w.hand_over("a", ordering_key="k", expires_in_s=5.0)
    w.sends("b", ordering_key="k")
    w.turn()
    w.hears_nack(1)
    w.turn(after_s=5.0)
    assert first.kinds == {"a": OutcomeKind.EXPIRED}
    assert_all_go(w, ["a", "b"])


def test_one_that_expires_before_its_turn_leaves_the_others_in_order(world: Build) -> None:
    w = world()
    w.hand_over("a", ordering_key="k")
    told = w.hand_over("b", ordering_key="k", expires_in_s=5.0)
    w.sends("c", ordering_key="k")
    w.turn()
    w.turn(after_s=5.0)
    assert told.kinds == {"b": OutcomeKind.EXPIRED}
    assert w.sent == ["a"]
    assert_all_go(w, ["a", "c"])


# -------------------------------------------------------------------- a key that is held


def held(sqlite: SqliteStore) -> World:
    """Of a key the first message is confirmed, the second is parked, and two wait behind it."""
    w = connected(sqlite)
    w.hand_over("a", "b", "c", "d", ordering_key="k")
    w.sends("x", ordering_key="other")
    w.turn()
    w.ack_all()
    w.turns(2)
    w.hears_nack(3)
    confirm_all(w)
    assert w.sent == ["a", "x", "b"]
    return w


def test_a_parked_message_holds_its_key_where_operators_see_it(
    sqlite: SqliteStore, path: Path
) -> None:
    w = held(sqlite)
    w.hand_over("e", ordering_key="k")
    assert w.turned(after_s=100.0).sent == ["a", "x", "b"]
    assert w.relay.lowest_awaited(0, w.time.wall) is None, "a flush does not wait for an operator"
    with Outbox(path) as outbox:
        [key] = outbox.held_keys()
        assert (key.ordering_key, key.message_id, key.outcome) == ("k", "b", "nacked")
        assert key.held_back == 3
        assert outbox.status().held_keys == 1
    rows = sqlite._writer.opened().execute("SELECT * FROM reliablepub_held_keys").fetchall()
    assert [(row[0], row[2], row[-1]) for row in rows] == [("k", "b", 3)]


def test_a_held_key_can_be_resumed(sqlite: SqliteStore, path: Path) -> None:
    w = held(sqlite)
    with Outbox(path) as outbox:
        assert outbox.resume_key("k") == 1
        assert outbox.resume_key("k") == 0
        assert outbox.held_keys() == []
    w.turn(after_s=LONG)
    assert_all_go(w, ["a", "x", "b", "b", "c", "d"])


def test_a_held_key_can_be_skipped_and_what_held_it_stays_parked(
    sqlite: SqliteStore, path: Path
) -> None:
    w = held(sqlite)
    with Outbox(path) as outbox:
        assert outbox.skip_key("k") == 1
        assert outbox.skip_key("k") == 0
        w.turn(after_s=POLL_S)
        confirm_all(w)
        assert w.sent == ["a", "x", "b", "c", "d"]
        [parked] = outbox.parked()
        assert parked.message_id == "b"
        assert [did["action"] for did in tell(outbox_at(path), parked.id).interventions] == ["skip"]
        outbox.retry()
    w.turn(after_s=LONG)
    assert_all_go(w, ["a", "x", "b", "c", "d", "b"])


def test_a_key_goes_on_when_what_holds_it_is_discarded(sqlite: SqliteStore, path: Path) -> None:
    w = held(sqlite)
    [key] = Outbox(path).held_keys()
    assert intervene(outbox_at(path), [key.id], Intervention(Action.DISCARD)).changed == 1
    w.turn(after_s=POLL_S)
    confirm_all(w)
    assert w.sent == ["a", "x", "b", "c", "d"]


def test_a_key_goes_on_when_an_open_message_is_discarded(sqlite: SqliteStore, path: Path) -> None:
    w = connected(sqlite, policy=patient(9, 60.0))
    w.sends("a", "b", "c", ordering_key="k")
    w.turn()
    w.hears_nack(1)
    first = sqlite.lowest_awaited(0, LONG)
    assert first is not None
    assert intervene(outbox_at(path), [first], Intervention(Action.DISCARD)).changed == 1
    w.turn(after_s=POLL_S)
    assert_all_go(w, ["a", "b", "c"])


@pytest.mark.postgres
@pytest.mark.parametrize("action", [Action.DISCARD, Action.SKIP])
def test_a_key_goes_on_with_what_is_stored_while_its_first_message_is_removed(
    postgres_outbox: str, action: Action
) -> None:
    """Neither the operator's transaction nor the relay can tell that it will be the first."""
    outbox = Outbox(postgres_outbox)
    outbox.enqueue(Message(b"", message_id="a", ordering_key="k", not_before=AFTER_ALL), key="a")
    if action is Action.SKIP:
        assert intervene(outbox_at(postgres_outbox), [1], Intervention(Action.PARK)).changed == 1
    with closing(open_store(postgres_outbox)) as store:
        w = connected(store).turned()

        def remove(session: Session) -> None:
            assert change(session, [1], Intervention(action), 0.0).changed == 1
            outbox.enqueue(Message(b"", message_id="b", ordering_key="k"))
            assert w.turned(after_s=POLL_S).turned().sent == []

        outbox_at(postgres_outbox).write(remove)
        w.turn(after_s=POLL_S)
        confirm_all(w)
        assert w.sent == ["b"]
        assert_nothing_is_left(w)


def test_what_is_parked_out_of_turn_holds_back_only_those_behind_it(
    sqlite: SqliteStore, path: Path
) -> None:
    w = connected(sqlite)
    w.sends("a", "b", "c", "d", ordering_key="k")
    w.turn()
    first = sqlite.lowest_awaited(0, LONG)
    assert first is not None
    assert intervene(outbox_at(path), [first + 2], Intervention(Action.PARK)).changed == 1
    w.turn(after_s=POLL_S)
    confirm_all(w)
    assert w.sent == ["a", "b"]
    [key] = Outbox(path).held_keys()
    assert (key.message_id, key.held_back) == ("c", 1)


def test_what_is_retried_goes_before_a_later_one_of_its_key_that_waits(path: Path) -> None:
    enqueue_skipped(path)
    with closing(SqliteStore(path)) as store:
        w = connected(store, policy=patient(5, 1_000.0))
        assert w.turned().sent == ["b"]
        assert Outbox(path).retry() == 1
        assert w.turned(after_s=POLL_S).sent == ["b"], "it waits for its turn"
        w.nack(1)
        assert w.turns(10, after_s=1.0).sent == ["b", "a"]
        w.hears_ack(2, is_flushing=True)
        assert w.sent == ["b", "a"], "the later one still waits for its retry"
        assert w.turned(after_s=1_000.0).turned().sent == ["b", "a", "b"]
        assert w.hears_ack(3, is_flushing=True).in_memory == (0, 0)
        assert w.relay.status.counters.open == 0


def test_what_is_put_off_while_it_waits_for_its_turn_goes_when_it_is_due(path: Path) -> None:
    enqueue_skipped(path)
    with closing(SqliteStore(path)) as store:
        w = connected(store, confirm_timeout_s=1_000.0).turned()
        assert Outbox(path).retry() == 1
        w.turn(after_s=POLL_S)
        later = Intervention(Action.RETRY, due_at=w.time.wall + 5.0)
        assert intervene(outbox_at(path), [1], later).changed == 1
        w.turn(after_s=1.0)
        assert w.hears_ack(1, is_flushing=True).turns(10, after_s=1.0).sent == ["b", "a"]


def test_a_disk_that_fails_while_a_read_tidies_up_does_not_end_the_relay(
    sqlite: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue(path, "a", "b")
    w = connected(sqlite, confirm_timeout_s=1_000.0)
    assert w.turned().sent == ["a"]
    reroute = Intervention(Action.REROUTE, routing_key="r")
    assert intervene(outbox_at(path), [2], reroute).changed == 1
    failures = [OutboxDiskFailed("disk I/O error")]

    @contextmanager
    def failing(*args: Any) -> Iterator[None]:
        if failures:
            raise failures.pop()
        with transaction(*args):
            yield

    monkeypatch.setattr("reliablepub.outbox.sqlite.store.transaction", failing)
    w.turn(after_s=1.0)
    assert not failures
    confirm_all(w)
    assert w.sent == ["a", "b"]


@pytest.mark.parametrize("action", [Action.RETRY, Action.DISCARD])
def test_those_that_must_wait_for_their_turn_hold_up_nothing_else_that_is_due(
    sqlite: SqliteStore, path: Path, action: Action
) -> None:
    w = World(sqlite, window_max=2 * PAGE, loaded_max=8 * PAGE)
    keys = [str(n) for n in range(PAGE + 1)]
    for name, brief_s in (("early", 1.0), ("late", None)):
        messages = [
            Message(b"", "", "q", None, f"{name} {key}", ordering_key=key, expires_in_s=brief_s)
            for key in keys
        ]
        w.inbox.put(Told(w.log).chunk_of(messages))
    w.turn()
    w.turns(5, after_s=2.0)
    w.connect()
    assert w.turns(5).sent == [f"late {key}" for key in keys], "the early ones have expired"
    assert intervene(outbox_at(path), range(1, PAGE + 2), Intervention(action)).changed > PAGE
    w.sends("x", not_before=datetime.fromtimestamp(w.time.wall + 1.0, tz=UTC))
    waits = [w.turn(after_s=1.0) for _ in range(10)]
    assert w.sent[len(keys) :] == ["x"]
    assert waits[-1] is None or waits[-1] > 0.0, "it is at rest"


def test_a_key_is_still_held_after_a_restart(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        w = held(store)
    with closing(SqliteStore(path)) as store:
        again = World(store, time=w.time)
        again.connect()
        again.turn(after_s=100.0)
        assert again.sent == []
        Outbox(path).skip_key("k")
        again.turn(after_s=POLL_S)
        confirm_all(again)
        assert again.sent == ["c", "d"]


def test_without_an_outbox_giving_up_is_final_and_the_key_goes_on() -> None:
    from reliablepub.outbox.memory import MemoryStore  # noqa: PLC0415

    w = connected(MemoryStore())
    told = w.sends("a", "b", ordering_key="k")
    w.turn()
    w.hears_nack(1)
    confirm_all(w)
    assert told.kinds == {"a": OutcomeKind.NACKED, "b": OutcomeKind.CONFIRMED}
    assert_nothing_is_left(w)


# -------------------------------------------------------------------- many


def test_a_long_key_is_passed_over_a_page_at_a_time(sqlite: SqliteStore) -> None:
    w = World(sqlite, loaded_max=100, messages_max=100_000)
    for n in range(0, 12_000, 500):
        w.sends(*(f"k{i}" for i in range(n, n + 500)), ordering_key="k")
    again = World(sqlite, time=w.time, messages_max=100_000)
    again.connect()
    again.hand_over("x")
    turns = 0
    while "x" not in again.sent:
        again.turn()
        turns += 1
        assert turns < 10
    assert turns > 1, "not all at once: other work goes on in between"
    assert again.sent == ["k0", "x"]
    assert again.in_memory[0] == 2


def test_many_keys_cost_memory_only_for_what_is_on_its_way(sqlite: SqliteStore) -> None:
    w = connected(sqlite, window_max=10, loaded_max=20)
    for n in range(0, 5_000, 500):
        told = Told()
        ids = range(n, n + 500)
        messages = [Message(b"", message_id=f"m{i}", ordering_key=f"key{i}") for i in ids]
        w.inbox.put(told.chunk_of(messages))
        w.turn()
    for _ in range(50):
        w.turn(is_flushing=True)
        w.ack_all()
        turns = w.relay._loaded._order
        assert len(turns._admitted) + len(turns.wanted) <= 20 + 500
        assert len(w.relay._loaded.waiters) <= 10
