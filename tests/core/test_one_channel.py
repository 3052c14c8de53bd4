"""Where there may be one channel only: the lanes share it, by turns, and no more is asked for."""

from __future__ import annotations

import pytest

from reliablepub._core.events import (
    Acked,
    ChannelClosed,
    ChannelOpened,
    CloseChannel,
    Command,
    Connected,
    ConnectionClose,
    ConnectionLost,
    Disconnect,
    NoChannel,
    OpenChannel,
)
from reliablepub._core.session import COUNTED_OUT_S, Session
from reliablepub.outcome import OutcomeKind
from tests.acks import singly
from tests.core.naive_broker import CONFIRM_TIMEOUT_S, ONE_CHANNEL, Rig

LIMITS = ["has_one_channel", "has_one_number"]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("guilty", [[], [0], [3, 4], [0, 10, 19]])
def test_the_guilty_are_refused_and_the_others_confirmed(limit: str, guilty: list[int]) -> None:
    rig = Rig()
    setattr(rig.broker, limit, True)
    keys = rig.submit_many(20, guilty=guilty)
    rig.run_until_idle()
    refused = {key for key in keys if rig.settling[key].kind is OutcomeKind.REFUSED}
    assert refused == set(guilty)
    assert rig.broker.connects == (2 if guilty and limit == "has_one_channel" else 1)


@pytest.mark.parametrize("limit", LIMITS)
def test_what_goes_alone_waits_until_the_channel_is_free(limit: str) -> None:
    rig = Rig()
    setattr(rig.broker, limit, True)
    rig.submit_many(3, guilty=[1])
    rig.run_until_idle()
    opened = rig.broker.channels_opened
    rig.submit_many(3)
    rig.write()
    rig.submit(kind="poison", is_alone=True)
    rig.submit_many(2)
    assert rig.write() == [], "fresh messages wait, and so does it"
    rig.run_until_idle()
    assert rig.broker.channels_opened == opened + 1


def sharing() -> Session[str]:
    """A session that knows, with "a" in flight on its channel 1."""
    session: Session[str] = Session(
        lambda _: 1, window_max=10, window_bytes_max=100, confirm_timeout_s=CONFIRM_TIMEOUT_S
    )
    session.handle(Connected(), 0)
    session.handle(ChannelOpened(1), 0)
    session.submit("a")
    session.poll_transmit(0)
    session.submit_alone("suspect", 0)
    assert list(session.poll_commands()) == [OpenChannel(1), OpenChannel(2)]
    session.handle(NoChannel(2), 0)
    return session


def commands(session: Session[str]) -> list[Command]:
    return list(session.poll_commands())


def test_the_channel_is_handed_over_and_its_tags_go_on() -> None:
    session = sharing()
    assert session.is_ready
    assert session.poll_transmit(0) == []
    session.handle(Acked(1, 1, multiple=False), 0)
    [batch] = session.poll_transmit(0)
    assert (batch.epoch, batch.first_tag, batch.keys) == (1, 2, ["suspect"])
    assert not session.is_ready
    session.submit("b")
    assert session.poll_transmit(0) == []
    session.handle(Acked(1, 2, multiple=False), 0)
    [batch] = session.poll_transmit(0)
    assert (batch.epoch, batch.first_tag, batch.keys) == (1, 3, ["b"])
    session.handle(Acked(1, 3, multiple=False), 0)
    ended = singly(session.poll_settlements())
    assert [(one.key, one.tag) for one in ended] == [("a", 1), ("suspect", 2), ("b", 3)]
    assert commands(session) == []


def test_the_next_channel_is_opened_when_the_broker_has_counted_the_last_one_out() -> None:
    session = sharing()
    session.handle(Acked(1, 1, multiple=False), 0)
    session.poll_transmit(0)
    session.handle(ChannelClosed(1, 404, "no", by_publish=True), 5)
    assert commands(session) == []
    assert session.poll_timeout() == 5 + COUNTED_OUT_S
    session.handle_timeout(5 + COUNTED_OUT_S)
    assert commands(session) == [OpenChannel(3)]
    assert session.poll_timeout() == 5 + COUNTED_OUT_S + CONFIRM_TIMEOUT_S


def test_a_wait_for_that_ends_with_the_connection() -> None:
    session = sharing()
    session.handle(ChannelClosed(1, 404, "no", by_publish=True), 5)
    session.handle(ConnectionLost("gone"), 5)
    assert session.poll_timeout() is None
    session.handle(Connected(), 5)
    assert commands(session) == [OpenChannel(3)]


def test_an_overdue_confirm_costs_the_connection() -> None:
    session = sharing()
    session.handle_timeout(CONFIRM_TIMEOUT_S)
    assert commands(session) == [
        CloseChannel(1, "no confirm within 30 s"),
        Disconnect("no confirm within 30 s"),
    ]


@pytest.mark.parametrize("close", [ONE_CHANNEL, ConnectionClose(530, "access refused")])
def test_one_that_was_refused_its_only_channel_shares_nothing(close: ConnectionClose) -> None:
    """Others may have all that the user may have; that is an outage."""
    session: Session[str] = Session(
        lambda _: 1, window_max=10, window_bytes_max=100, confirm_timeout_s=CONFIRM_TIMEOUT_S
    )
    session.handle(Connected(), 0)
    session.handle(ConnectionLost("530", close), 0)
    session.handle(Connected(), 0)
    session.handle(ChannelOpened(2), 0)
    session.submit_alone("a", 0)
    assert commands(session)[-1] == OpenChannel(3), "a second one"


def test_without_a_number_for_any_channel_the_connection_is_given_up() -> None:
    session: Session[str] = Session(
        lambda _: 1, window_max=10, window_bytes_max=100, confirm_timeout_s=CONFIRM_TIMEOUT_S
    )
    session.handle(Connected(), 0)
    session.handle(NoChannel(1), 0)
    assert commands(session)[-1] == Disconnect("the connection has no number left for a channel")


def test_a_draining_session_takes_nothing_to_be_tried_alone() -> None:
    session = sharing()
    session.drain()
    with pytest.raises(RuntimeError, match="draining"):
        session.submit_alone("b", 0)
