"""The disk is full: callers are told, nothing is sent, no verdict is lost, and it passes."""

from collections.abc import Callable, Sequence

import pytest

from reliablepub.errors import (
    OutboxDiskFailed,
    OutboxDiskFull,
    OutboxLocked,
    OutboxUnreachable,
    OutboxUnsure,
    ReliablePubError,
)
from reliablepub.hooks import LinkChanged
from reliablepub.outbox.entry import Changes, Store
from reliablepub.outcome import OutcomeKind
from reliablepub.relay.elsewhere import POLL_S
from reliablepub.relay.setback import RETRY_S
from tests.relay.conftest import Build
from tests.relay.scripted import World, disk_full


def nothing_fails(_turn: Changes) -> None:
    return None


def only_settling_works(turn: Changes) -> ReliablePubError | None:
    """As with the ballast: what only settles may use the last of the space."""
    return OutboxDiskFull("the disk is full") if turn.new else None


def locked(_turn: Changes) -> ReliablePubError:
    return OutboxLocked("locked by another process for longer than we wait")


def failing(_turn: Changes) -> ReliablePubError:
    return OutboxDiskFailed("the disk cannot be read")


def unsure(_turn: Changes) -> ReliablePubError:
    return OutboxUnsure("the disk failed during a commit, twice")


@pytest.mark.parametrize("fails", [disk_full, locked, failing, unsure])
def test_callers_of_the_turn_get_the_error_and_nothing_is_sent(
    world: Build, fails: Callable[[Changes], ReliablePubError]
) -> None:
    w = world()
    w.store.fails = fails
    told, other = w.hand_over("a"), w.hand_over("b")
    w.turn()
    assert isinstance(told.error, type(fails(Changes())))
    assert isinstance(other.error, type(fails(Changes())))
    assert w.sent == []
    assert w.in_memory == (0, 0)
    assert w.session.buffered == 0


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (None, OutboxDiskFailed),
        (OSError("input/output error"), OutboxDiskFailed),
        (OutboxUnreachable("no answer"), OutboxUnreachable),
        (OutboxLocked("no answer in time"), OutboxLocked),
        (OutboxDiskFull("the disk is full"), OutboxDiskFull),
    ],
)
def test_only_the_messages_of_a_commit_that_was_cut_off_may_be_stored(
    world: Build, cause: Exception | None, kind: type[ReliablePubError]
) -> None:
    w = world()

    def cut_off(_turn: Changes) -> ReliablePubError:
        error = OutboxUnsure("cut off")
        error.__cause__ = cause
        return error

    w.store.fails = cut_off
    told = w.sends("a")
    later = w.sends("b")
    assert (type(told.error), type(later.error)) == (OutboxUnsure, kind)
    assert isinstance(later.error, ReliablePubError)
    assert later.error.retryable


@pytest.mark.parametrize("fails", [disk_full, locked, failing, unsure])
def test_the_tags_of_a_failed_turn_are_given_to_the_next_messages(
    world: Build, fails: Callable[[Changes], ReliablePubError]
) -> None:
    w = world("a")
    w.store.fails = fails
    w.sends("b", "c")
    w.store.fails = nothing_fails
    w.hand_over("d")
    w.turn(after_s=RETRY_S)
    assert [(s.first_tag, s.ids) for s in w.transport.sendings] == [(1, ["a"]), (2, ["d"])]
    assert w.relay.status.counters.stored == 2


def test_verdicts_of_a_failed_turn_are_committed_by_a_later_one(world: Build) -> None:
    w = world()
    told = w.sends("a", "b", "c")
    w.ack(1)
    w.nack(2)
    w.store.fails = disk_full
    w.turn()
    assert told.kinds == {"a": OutcomeKind.CONFIRMED}
    w.turn(after_s=RETRY_S)
    w.ack(3)
    w.store.fails = nothing_fails
    w.turn(after_s=RETRY_S)
    counters = w.relay.status.counters
    assert (counters.confirmed, counters.parked, counters.open) == (2, 1, 0)
    assert told.kinds["b"] is OutcomeKind.NACKED
    assert w.in_memory == (0, 0)


def test_nothing_is_sent_while_the_disk_is_full(world: Build) -> None:
    w = world("a", "b", window_max=1)
    w.store.fails = disk_full
    w.ack(1)
    assert w.turns(10, after_s=RETRY_S).sent == ["a"]
    w.store.fails = nothing_fails
    assert w.turned(after_s=RETRY_S).sent == ["a", "b"]
    assert w.transport.sendings[-1].first_tag == 2


def test_a_full_disk_is_not_tried_again_before_a_moment_has_passed(world: Build) -> None:
    w = world("a")
    w.ack(1)
    w.store.fails = disk_full
    wait_s = w.turn(is_flushing=True)
    assert wait_s is not None
    assert 0 < wait_s <= RETRY_S
    attempts = w.log.count("failed")
    assert w.turns(5, after_s=0.01, is_flushing=True).log.count("failed") == attempts
    assert w.turned(after_s=RETRY_S, is_flushing=True).log.count("failed") > attempts


def test_a_caller_gets_an_answer_at_once_while_the_disk_is_full(world: Build) -> None:
    w = world()
    w.store.fails = disk_full
    w.sends("a")
    told = w.hand_over("b")
    w.turn(after_s=0.001)
    assert told.error is not None


def test_a_full_disk_drains_although_callers_keep_coming(world: Build) -> None:
    w = world("a", "b")
    w.store.fails = only_settling_works
    w.ack(2, multiple=True)
    told = w.hand_over("c")
    for _ in range(3):
        w.turn(after_s=0.001)
        w.hand_over("c")
    w.turn(after_s=0.001)
    assert told.error is not None
    assert w.relay.status.counters.confirmed == 2
    assert w.in_memory == (0, 0)


def test_a_source_does_not_advance_by_messages_that_were_not_stored(world: Build) -> None:
    w = world()
    w.store.fails = disk_full
    w.sends("a", source="file")
    w.store.fails = nothing_fails
    w.hand_over("b", source="file")
    assert w.turned(after_s=RETRY_S).store.position("file") == 1


@pytest.mark.parametrize(
    ("fails", "words"),
    [(disk_full, "disk full"), (locked, "locked"), (failing, "fails"), (unsure, "fails")],
)
def test_the_status_says_what_keeps_the_relay_from_recording(
    world: Build, fails: Callable[[Changes], ReliablePubError], words: str
) -> None:
    w = world("a")
    assert w.relay.status.reason == ""
    w.ack(1)
    w.store.fails = fails
    w.turn(is_flushing=True)
    assert words in w.relay.status.reason
    w.lose_connection()
    w.turn(after_s=0.001)
    assert words in w.relay.status.trouble
    assert words not in w.relay.status.reason, "which says why there is no connection"
    w.store.fails = nothing_fails
    assert w.turned(after_s=RETRY_S, is_flushing=True).relay.status.trouble == ""


def test_the_status_says_why_nothing_new_is_stored(world: Build) -> None:
    told: list[str] = []

    class Hook:
        def on_connected(self, events: Sequence[LinkChanged]) -> None:
            told.extend("connected" for _ in events)

    w = world(hooks=[Hook()]).turned()
    said = "disk full: no new message is stored until space is freed"
    w.store.relieve = lambda: said
    w.turn(after_s=POLL_S)
    assert (w.relay.status.reason, w.relay.status.trouble) == (said, said)
    assert told == ["connected"], "the connection is as it was"
    w.store.relieve = str
    assert w.turned(after_s=POLL_S).relay.status.reason == ""


def test_a_relay_that_cannot_look_at_the_disk_goes_on(world: Build) -> None:
    w = world().turned()

    def relieve() -> str:
        raise OutboxLocked("locked")

    w.store.relieve = relieve
    w.hand_over("a")
    assert w.turned(after_s=POLL_S).sent == ["a"]


def test_a_relay_with_nothing_left_to_commit_does_not_spin(store: Store) -> None:
    w = World(store)
    w.hand_over("a")
    w.connect()
    w.store.fails = disk_full
    assert w.turned().log[-1] == "failed"
    w.lose_connection()
    assert w.turned(after_s=RETRY_S).turned(after_s=20.0).log[-1] == "connect"
    wait_s = w.turn(after_s=0.001)
    assert wait_s is not None
    assert wait_s > 0
