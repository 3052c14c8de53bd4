"""The short path: callers store messages that come alone, and the relay learns of them."""

import gc
import signal
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from reliablepub._core.events import Connected
from reliablepub.errors import OutboxDiskFull, OutboxInUse, OutboxUnsure
from reliablepub.message import Message
from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.entry import Changes, Entry, OpenLimits, Store
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.sqlite.location import Place
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import OutcomeKind
from reliablepub.relay import lone
from reliablepub.relay.lone import LoneMessages, Stored
from reliablepub.relay.withdrawals import tell_withdrawn
from tests.relay.scripted import Told, World

LIMITS = OpenLimits(1_000, 1_000_000)
SMALL = Message(b"x", routing_key="q", message_id="m")


class Writer:
    """Stores under the ids that it is asked for, as long as the test lets it."""

    def __init__(self) -> None:
        self.stored: list[Entry] = []
        self.terms: list[bool] = []
        self.is_prepared = True
        self.is_closed = False
        self.last_id = 0
        self.before: Callable[[], object] = lambda: None
        self.after: Callable[[], object] = lambda: None

    def prepare(self, _limits: OpenLimits, *, is_sent: bool) -> None:
        self.terms.append(is_sent)
        self.is_prepared = True

    def next_id(self) -> int:
        return self.last_id + 1

    def store(self, entry: Entry) -> bool:
        self.before()
        if entry.id != self.next_id():
            return False
        self.last_id = entry.id
        self.stored.append(entry)
        self.after()
        return True

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def writer() -> Writer:
    return Writer()


@pytest.fixture
def messages(writer: Writer) -> LoneMessages:
    messages = LoneMessages(lambda: None, lambda: 0.0)
    messages.lend(writer, LIMITS, is_sent=True)
    return messages


# -------------------------------------------------------------------- callers


def test_nobody_can_store_before_the_writer_is_lent_and_after_it_was_recalled(
    writer: Writer,
) -> None:
    messages = LoneMessages(lambda: None)
    assert not messages.store(SMALL, None)
    assert messages.is_wanted
    messages.lend(None, LIMITS, is_sent=True)
    assert not messages.store(SMALL, None)
    messages.lend(writer, LIMITS, is_sent=True)
    assert messages.store(SMALL, None)
    assert messages.recall()
    assert not messages.store(SMALL, None)
    messages.lend(writer, LIMITS, is_sent=True)
    messages.end()
    assert writer.is_closed
    assert not messages.store(SMALL, None)


def test_the_terms_are_set_when_they_change_and_when_they_were_lost(
    messages: LoneMessages, writer: Writer
) -> None:
    messages.lend(writer, LIMITS, is_sent=True)
    messages.lend(writer, LIMITS, is_sent=False)
    messages.lend(writer, LIMITS, is_sent=False)
    writer.is_prepared = False
    messages.lend(writer, LIMITS, is_sent=False)
    assert writer.terms == [True, False, False]


@pytest.mark.parametrize(
    "fields", [{"ordering_key": "k"}, {"expires_in_s": 9.0}], ids=["key", "deadline"]
)
def test_only_plain_messages_take_the_short_path(
    messages: LoneMessages, fields: dict[str, Any]
) -> None:
    assert not messages.store(Message(b"x", routing_key="q", message_id="m", **fields), None)


def test_a_handler_that_publishes_meanwhile_takes_the_long_path(
    messages: LoneMessages, writer: Writer
) -> None:
    nested: list[bool] = []
    writer.before = lambda: nested.append(messages.store(SMALL, None))
    assert messages.store(SMALL, None)
    assert nested == [False]
    assert len(writer.stored) == 1


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_caller_who_is_interrupted_gives_the_writer_back(
    messages: LoneMessages, writer: Writer, moment: str
) -> None:
    def interrupt() -> None:
        setattr(writer, moment, lambda: None)
        raise KeyboardInterrupt

    setattr(writer, moment, interrupt)
    with pytest.raises(KeyboardInterrupt):
        messages.store(SMALL, None)
    assert not messages.take(), "the relay finds the row, if there is one, by a look"
    assert messages.recognize(Entry(SMALL, 0.0, id=1)) is None
    assert messages.store(SMALL, None)


def test_an_id_that_another_process_has_taken(messages: LoneMessages, writer: Writer) -> None:
    def take_one() -> None:
        writer.last_id += 1
        writer.before = lambda: None

    writer.before = take_one
    assert messages.store(SMALL, None)
    assert [entry.id for entry in writer.stored] == [2]
    theirs = Entry(SMALL, 1.0, id=1)
    assert messages.recognize(theirs) is None
    writer.before = lambda: setattr(writer, "last_id", writer.last_id + 1)
    assert not messages.store(SMALL, None)


def test_an_error_closes_the_short_path_for_this_message_alone(
    messages: LoneMessages, writer: Writer
) -> None:
    with mock.patch.object(writer, "before", side_effect=OutboxDiskFull("full")):
        assert not messages.store(SMALL, None)
    with (
        mock.patch.object(writer, "before", side_effect=OutboxUnsure("unsure")),
        pytest.raises(OutboxUnsure),
    ):
        messages.store(SMALL, None)
    assert messages.recognize(Entry(SMALL, 0.0, id=1)) is None
    assert messages.store(SMALL, None)


def test_threads_that_publish_at_the_same_time_share_the_commits_of_the_relay(
    messages: LoneMessages, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stored: list[bool] = []

    def elsewhere() -> None:
        thread = threading.Thread(target=lambda: stored.append(messages.store(SMALL, None)))
        thread.start()
        thread.join()

    def here() -> None:
        stored.append(messages.store(SMALL, None))

    for gap_s, call in (
        (0.0, here),
        (0.001, elsewhere),
        (0.001, here),
        (0.02, here),
        (0.02, elsewhere),
    ):
        now += gap_s
        call()
    assert stored == [True, False, False, True, True]


def test_callers_wait_a_moment_for_a_commit_of_the_relay(
    messages: LoneMessages, monkeypatch: pytest.MonkeyPatch
) -> None:
    with messages.reserved():
        assert not messages.store(SMALL, None)
        monkeypatch.setattr(lone, "_LOOKS", 100_000)
        monkeypatch.setattr(lone, "_SHARED_S", 0.0)
        thread = threading.Thread(target=messages.store, args=(SMALL, None))
        thread.start()
        time.sleep(0.01)
    thread.join(30)
    assert len(messages.stored) == 1


def test_a_relay_that_does_not_come_to_it_is_waited_for(messages: LoneMessages) -> None:
    count = 0
    while messages.store(SMALL, None):
        count += 1
    assert count == 32
    assert len(messages.take()) == 32
    assert messages.store(SMALL, None)


def test_the_end_waits_for_a_caller_but_not_for_ever(
    messages: LoneMessages, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lone, "_END_S", 0.01)
    still_open: list[bool] = []

    def close() -> None:  # as a signal handler may
        messages.end()
        still_open.append(not writer.is_closed)

    writer.before = close
    assert messages.store(SMALL, None), "it was under way"
    assert still_open == [True]
    assert writer.is_closed, "by its caller"
    assert not messages.store(SMALL, None)


def test_a_signal_may_interrupt_any_instruction(messages: LoneMessages, writer: Writer) -> None:
    """Whenever it does, the next message takes the short path again, and each is told once."""
    sent, interrupted = 0, 0

    def interrupt(*_: object) -> None:
        raise InterruptedError

    gc.collect()
    gc.disable()  # it would interrupt a `__del__`
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for n in range(2_000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.000_01 + n % 97 * 0.000_002)
                sent += messages.store(SMALL, None)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except InterruptedError:
                interrupted += 1
            messages.take()
            messages._users.clear()  # interrupted just before it is given back, it stays shut
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert sent
    assert interrupted
    assert sent <= len(writer.stored) <= sent + interrupted


# -------------------------------------------------------------------- the relay


@pytest.fixture
def world(sqlite: SqliteStore) -> Iterator[World]:
    """Connected, with the short path open."""
    world = World(sqlite)
    world.connect()
    assert world.store_alone("refused") is None
    world.turn()
    yield world
    world.lone.end()


def stored(world: World, id_: str) -> Told:
    told = world.store_alone(id_)
    assert told is not None, "the short path is closed"
    return told


def noted(world: World) -> list[int]:
    with world.store._writer as connection:  # WatchedStore passes it on
        query = "SELECT first_tag FROM reliablepub_in_flight WHERE epoch LIKE '%-0' ORDER BY 1"
        return [id_ for (id_,) in connection.execute(query)]


def tags(world: World) -> int:
    with world.store._writer as connection:
        query = "SELECT count(*) FROM reliablepub_in_flight WHERE epoch NOT LIKE '%-0'"
        (count,) = connection.execute(query).fetchone()
        return int(count)


def test_a_memory_store_has_no_short_path(store: Store) -> None:
    world = World(store)
    world.connect()
    world.lone.is_wanted = True
    world.turn()
    assert (world.store_alone("m") is not None) == isinstance(store, SqliteStore)
    world.lone.end()


def test_it_is_sent_without_a_commit_of_the_relay(world: World) -> None:
    told = stored(world, "a")
    assert world.relay.status.open == 0
    world.turn()
    assert world.sent == ["a"]
    assert not any(line.startswith("commit") for line in world.log)
    assert (world.relay.status.open, world.relay.status.in_flight) == (1, 1)
    assert noted(world) == [1]
    world.ack_all()
    world.turn()
    assert told.kinds == {"a": OutcomeKind.CONFIRMED}
    assert noted(world) == [1], "with its row, after a moment"
    world.turn(after_s=0.1)
    assert (noted(world), world.relay.status.open) == ([], 0)
    assert world.in_memory == (0, 0)


def test_hooks_hear_of_it_once_and_before_its_confirm(sqlite: SqliteStore) -> None:
    heard: list[str] = []

    class Hook:
        def on_stored(self, events: Any) -> None:
            heard.extend(f"stored {event.message_id}" for event in events)

        def on_confirmed(self, events: Any) -> None:
            heard.extend(f"confirmed {event.message_id}" for event in events)

    world = World(sqlite, hooks=[Hook()])
    world.connect()
    world.lone.is_wanted = True
    world.turn()
    stored(world, "a")
    world.turn()
    world.ack_all()
    world.turn()
    assert heard == ["stored a", "confirmed a"]
    world.lone.end()


def test_while_it_cannot_be_sent_it_is_not_noted(world: World) -> None:
    world.lose_connection()
    stored(world, "noted")  # the relay has not taken a turn since
    assert noted(world) == [1]
    world.turn()
    world.turn(after_s=0.05)
    assert noted(world) == []
    stored(world, "not noted")
    assert noted(world) == []
    world.turn(after_s=100.0)
    world.relay.handle([Connected()])
    world.open_channel()
    world.turn()
    assert world.sent == ["noted", "not noted"]
    assert tags(world) == 1, "the tags of both were committed as one batch"


@pytest.mark.parametrize("end", ["nack", "lose"])
def test_the_note_goes_with_the_outcome_of_its_attempt(world: World, end: str) -> None:
    told = stored(world, "a")
    world.turn()
    if end == "nack":
        world.nack(1)
        world.turn()
        assert told.kinds == {"a": OutcomeKind.NACKED}
        assert (noted(world), tags(world)) == ([], 0)
    else:
        world.lose_connection()
        world.turn()
        world.reconnect()
        world.turn()
        assert world.sent == ["a", "a"]
        assert (noted(world), tags(world)) == ([], 1), "the second attempt has a tag"


def test_a_commit_that_fails_keeps_it_to_be_sent_later(world: World) -> None:
    stored(world, "alone")
    caller = world.hand_over("other")
    world.store.fails = lambda _turn: OutboxDiskFull("full")
    world.turn()
    assert caller.error is not None
    assert world.sent == []
    world.store.fails = lambda _turn: None
    world.turn(after_s=10.0)
    assert world.sent == ["alone"]
    assert (noted(world), tags(world)) == ([], 1)


def test_a_look_that_comes_first_reads_it_and_its_caller_is_told(world: World) -> None:
    taken, world.lone.take = world.lone.take, list  # type: ignore[method-assign]
    told = stored(world, "a")
    handed, world.lone.stored = world.lone.stored, type(world.lone.stored)()
    world.relay.look()
    world.turn()
    assert world.sent == ["a"]
    world.lone.take, world.lone.stored = taken, handed  # type: ignore[method-assign]
    world.turn()
    assert world.sent == ["a"], "it is in memory once"
    world.ack_all()
    world.turn(after_s=0.1)
    assert told.kinds == {"a": OutcomeKind.CONFIRMED}
    assert (noted(world), world.relay.status.open) == ([], 0)


@pytest.mark.parametrize("is_known", [True, False], ids=["by a look", "before any look"])
def test_an_operator_takes_it_before_the_relay_does(
    world: World, path: Path, *, is_known: bool
) -> None:
    world.lose_connection()
    world.turn()  # from now on, it is not noted as in flight, and may be taken
    told = world.hand_over("before")
    world.turn()
    assert told.is_stored
    told = stored(world, "a")
    handed, world.lone.stored = world.lone.stored, type(world.lone.stored)()
    what = Intervention(Action.DISCARD, person="jo@host", note="")
    intervene(outbox_at(path), [2], what, clock=lambda: world.time.wall)
    if is_known:
        world.relay.look()
    else:
        tell_withdrawn(world.relay._withdrawals.unload())
    world.lone.stored = handed
    world.turn(after_s=100.0)
    world.relay.handle([Connected()])
    world.open_channel()
    world.turn()
    assert world.sent == ["before"]
    assert list(told.gone) == ["a"]


def test_a_handler_that_raises_after_the_commit_leaves_no_note(world: World) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with (
        mock.patch.object(Place, "check", interrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        world.store_alone("a")
    assert noted(world) == [1]
    world.turn(after_s=0.1)
    world.turn(after_s=0.1)
    assert world.sent == ["a"]
    assert (noted(world), tags(world)) == ([], 1)
    world.ack_all()
    world.turn(is_flushing=True)
    assert world.relay.status.open == 0


def assert_note_stays(world: World) -> None:
    """The message is in flight, also after the next commit."""
    world.turn()
    assert world.sent == ["a"]
    world.hand_over("other")
    world.turn()
    assert noted(world) == [1]


def test_a_handler_that_raises_after_the_hand_over_leaves_the_note(world: World) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with mock.patch.object(world.lone, "_wake", interrupt), pytest.raises(KeyboardInterrupt):
        world.store_alone("a")
    assert_note_stays(world)


@pytest.mark.parametrize("is_taken", [False, True], ids=["at once", "when the relay has taken it"])
def test_a_handler_that_raises_right_after_the_hand_over_leaves_the_note(
    world: World, *, is_taken: bool
) -> None:
    class Interrupted(deque[Stored]):
        def append(self, one: Stored) -> None:
            super().append(one)
            if is_taken:
                world.turn()
            raise KeyboardInterrupt

    world.lone.stored = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        world.store_alone("a")
    assert_note_stays(world)
    assert not world.lone.doubtful


def test_after_another_relay_has_taken_over_nothing_is_stored(world: World, path: Path) -> None:
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("INSERT INTO reliablepub_runs (pid, host, started_at) VALUES (1, 'other', 0)")
    assert world.store_alone("a") is None
    world.hand_over("b")
    with pytest.raises(OutboxInUse):
        world.turn()


def test_what_was_stored_before_a_drain_is_counted_and_not_sent(world: World) -> None:
    stored(world, "a")
    world.relay.drain()
    world.turn(is_flushing=True)
    assert (world.relay.status.open, noted(world), world.sent) == (1, [], [])


def test_chunks_are_sent_after_what_their_caller_has_stored_before(world: World) -> None:
    stored(world, "first")
    world.hand_over("second")
    world.turn()
    assert world.sent == ["first", "second"]


def test_beyond_what_memory_holds_it_is_read_later(sqlite: SqliteStore) -> None:
    world = World(sqlite, loaded_max=2)
    world.lone.is_wanted = True
    world.turn()
    told = [stored(world, f"{n}") for n in range(5) if world.turn() is not None]
    assert world.in_memory[0] <= 2
    world.connect()
    for _ in range(20):
        world.turn(after_s=0.05)
        world.ack_all()
    world.turn(after_s=0.3)
    assert [list(one.kinds.values()) for one in told] == [[OutcomeKind.CONFIRMED]] * 5
    assert world.sent == list("01234")
    world.lone.end()


@pytest.mark.parametrize("reason", ["held up", "draining"])
def test_the_relay_closes_the_short_path(world: World, reason: str) -> None:
    if reason == "draining":
        world.relay.drain()
    else:
        world.store.fails = lambda _turn: OutboxDiskFull("full")
        world.hand_over("other")
    world.turn()
    assert world.store_alone("a") is None


def test_it_counts_for_the_limit(sqlite: SqliteStore) -> None:
    world = World(sqlite, messages_max=2)
    world.lone.is_wanted = True
    world.turn()
    assert [world.store_alone(f"{n}") is not None for n in range(3)] == [True, True, False]
    world.turn()
    assert world.relay.status.open == 2
    caller = world.hand_over("x")
    world.turn()
    assert not caller.is_stored
    world.lone.end()


def test_nothing_is_committed_for_it_by_an_empty_turn(world: World) -> None:
    stored(world, "a")
    world.turn()
    assert all(isinstance(turn, Changes) and not turn.sent for turn in world.store.turns)
