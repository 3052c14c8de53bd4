"""Losing the connection: waits that grow and start afresh, and what was in flight goes again."""

import pytest

from reliablepub._core.events import ChannelClosed, Connected, ConnectionClose, ConnectionLost
from reliablepub.outbox.entry import Store
from reliablepub.outcome import OutcomeKind
from reliablepub.relay.connection import Reconnect
from reliablepub.relay.status import Link, waits_for
from tests.relay.scripted import World, connected, patient


@pytest.fixture
def full_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest wait that the jitter may give."""
    monkeypatch.setattr("random.uniform", lambda _low, high: high)


@pytest.mark.usefixtures("full_waits")
def test_waits_grow_while_connections_fail_and_stay_bounded() -> None:
    reconnect = Reconnect(0.0)
    waits = []
    for _ in range(12):
        reconnect.started()
        reconnect.lost(0.0)
        assert reconnect.due_at is not None
        waits.append(reconnect.due_at)
    assert waits == sorted(waits)
    assert waits[0] < 0.5
    assert waits[-1] == 15.0


@pytest.mark.usefixtures("full_waits")
def test_a_connection_that_lived_starts_the_waits_afresh() -> None:
    reconnect = Reconnect(0.0)
    for _ in range(12):
        reconnect.lost(0.0)
    reconnect.connected(0.0)
    reconnect.lost(11.0)
    assert reconnect.due_at is not None
    assert reconnect.due_at - 11.0 < 0.5


@pytest.mark.usefixtures("full_waits")
def test_connections_that_are_lost_at_once_do_not_start_them_afresh() -> None:
    reconnect = Reconnect(0.0)
    for _ in range(12):
        reconnect.connected(0.0)
        reconnect.lost(1.0)
    assert reconnect.due_at == 16.0


@pytest.mark.usefixtures("full_waits")
def test_a_connection_that_confirmed_something_starts_the_waits_afresh() -> None:
    reconnect = Reconnect(0.0)
    for _ in range(12):
        reconnect.lost(0.0)
    reconnect.connected(0.0)
    reconnect.proved()
    reconnect.lost(1.0)
    assert reconnect.due_at is not None
    assert reconnect.due_at - 1.0 < 0.5


@pytest.mark.usefixtures("full_waits")
@pytest.mark.parametrize(("acked", "connects"), [([1], 1), ([], 0)])
def test_a_broker_that_closes_every_channel_is_asked_less_and_less_until_it_confirms(
    store: Store, acked: list[int], connects: int
) -> None:
    w = connected(store)
    for _ in range(8):
        w.relay.handle([ChannelClosed(w.epoch, 541, "INTERNAL_ERROR", by_publish=False)])
        assert w.turned().log[-1] == "disconnect"
        w.lose_connection("channel closed")
        w.reconnect()
    w.sends("a")
    for tag in acked:
        w.ack(tag)
    w.turn()
    w.lose_connection()
    before = w.log.count("connect")
    assert w.turned(after_s=0.5).log.count("connect") - before == connects


def test_one_attempt_to_connect_is_under_way_at_a_time(store: Store) -> None:
    w = World(store)
    assert w.turns(5, after_s=10.0).log.count("connect") == 1
    w.lose_connection("refused")
    assert w.turned(after_s=20.0).log.count("connect") == 2


def test_the_status_says_why_there_is_no_connection(store: Store) -> None:
    w = World(store).turned().hears_loss("connection refused")
    assert (w.relay.status.link, w.relay.status.reason) == (Link.DISCONNECTED, "connection refused")
    w.turn(after_s=20.0)
    assert (w.relay.status.link, w.relay.status.reason) == (Link.CONNECTING, "connection refused")
    w.relay.handle([Connected()])
    w.turn()
    assert (w.relay.status.link, w.relay.status.reason) == (Link.CONNECTED, "")


def test_the_status_counts_refusals_in_a_row(store: Store) -> None:
    w = World(store)
    counts = []
    for end in (
        ConnectionLost("refused the credentials", None, is_refusal=True),
        ConnectionLost("refused the credentials", None, is_refusal=True),
        ConnectionLost("connection refused", None),
        ConnectionLost("refused the credentials", None, is_refusal=True),
        Connected(),
    ):
        w.turn(after_s=20.0)
        w.relay.handle([end])
        w.turn()
        counts.append(w.relay.status.refusals)
    assert counts == [1, 2, 0, 1, 0]


def test_what_was_in_flight_is_sent_again_first_and_under_the_same_id(store: Store) -> None:
    w = connected(store, window_max=2)
    told = w.sends("a", "b", "c")
    w.hears_loss()
    w.reconnect()
    assert w.turned().sent == ["a", "b", "a", "b"]
    assert w.transport.sendings[-1].first_tag == 1
    w.hears_ack(2, multiple=True)
    w.hears_ack(3, is_flushing=True)
    assert set(told.kinds.values()) == {OutcomeKind.CONFIRMED}
    assert w.relay.status.counters.confirmed == 3
    assert w.in_memory == (0, 0)


def test_uncertain_attempts_never_spend_the_budget(store: Store) -> None:
    w = connected(store, policy=patient(2, 0.0))
    told = w.hand_over("a")
    for _ in range(10):
        w.turn()
        w.hears_loss()
        w.reconnect()
    assert w.turned().hears_ack(1, is_flushing=True).sent == ["a"] * 11
    assert told.kinds == {"a": OutcomeKind.CONFIRMED}


def test_the_relay_wakes_up_to_connect_again(store: Store) -> None:
    w = World(store).turned()
    w.relay.handle([ConnectionLost("x")])
    for _ in range(10_000):
        wait_s = w.turn()
        if w.log.count("connect") == 2:
            break
        assert wait_s is not None
        assert wait_s > 0
        w.time.now += wait_s
    assert w.log.count("connect") == 2
    assert w.time.now < 51.0


def test_a_connection_closed_for_its_frames_while_nothing_is_in_flight_is_asked_less_and_less(
    store: Store,
) -> None:
    """No message is the cause: a proxy, or another broker, does not take what the client says."""
    w = connected(store)
    close, begun = ConnectionClose(501, "FRAME_ERROR"), w.time.now
    for _ in range(12):
        w.relay.handle([ConnectionLost("501", close)])
        attempts = w.log.count("connect")
        while w.log.count("connect") == attempts:
            w.turn(after_s=0.1)
        w.relay.handle([Connected()])
        w.turn()
    assert w.time.now - begun > 10.0, "it connects as often as it can"


def test_a_connection_closed_at_each_publish_is_an_outage(store: Store) -> None:
    w = connected(store)
    told, begun = w.hand_over("a", "b"), w.time.now
    close = ConnectionClose(530, "NOT_ALLOWED")
    for _ in range(12):
        w.turn()
        w.relay.handle([ConnectionLost("530", close)])
        attempts = w.log.count("connect")
        while w.log.count("connect") == attempts:
            w.turn(after_s=0.1)
        w.relay.handle([Connected()])
        w.open_channel()
    assert w.time.now - begun > 10.0, "it connects as often as it can"
    assert (told.outcomes, w.relay.status.counters.parked) == ({}, 0)


def test_a_message_set_aside_is_seen_in_the_status(store: Store) -> None:
    w = connected(store)
    w.hand_over("a")
    for _ in range(2):
        w.turn()
        w.lose_connection()
        w.reconnect()
    assert w.turned().hears_loss().sent == ["a"] * 3
    assert (w.relay.status.aside, w.relay.status.open) == (1, 1)
    assert w.relay.status.aside_reason == "connection lost: gone"
    [_, told] = waits_for(w.relay.status)
    assert told == "1 message is set aside, to be tried alone: connection lost: gone"
    w.reconnect()
    w.open_channel()
    assert w.turned().sent == ["a"] * 4, "it was due, and went alone"
    w.ack_all()
    w.turn(is_flushing=True)
    assert (w.relay.status.aside, w.relay.status.open) == (0, 0)
    assert w.relay.status.aside_reason == ""
