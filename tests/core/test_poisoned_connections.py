"""Messages that cost the whole connection: found, set aside, and never refused.

An outage looks like a message that ends connections, so no message is refused for one.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from reliablepub._core.events import (
    Acked,
    ChannelOpened,
    CloseChannel,
    Connected,
    ConnectionClose,
    ConnectionLost,
    OpenChannel,
)
from reliablepub._core.quarantine import ASIDE_MAX_S, ASIDE_S
from reliablepub._core.session import Session
from reliablepub.outcome import Outcome, OutcomeKind
from tests.acks import singly
from tests.core.naive_broker import CONFIRM_TIMEOUT_S, Rig, refused

CONFIRMED, REFUSED = OutcomeKind.CONFIRMED, OutcomeKind.REFUSED
FORCED = ConnectionClose(320, "CONNECTION_FORCED - bye")


def rig_of(count: int, *guilty: int, kind: str = "fatal", window_max: int = 1_000) -> Rig:
    """Connected, with so many messages buffered, some of them costing the connection."""
    rig = Rig(window_max=window_max, window_bytes_max=1_000_000)
    rig.broker.connect()
    rig.submit_many(count, guilty=guilty, kind=kind)
    return rig


def confirmed(rig: Rig) -> list[int]:
    return [key for key, outcome in rig.settling.items() if outcome.kind is CONFIRMED]


def test_fresh_messages_wait_while_a_suspect_is_tried_and_no_longer() -> None:
    rig = rig_of(8, 3)
    while not rig.session._quarantine.waiting:
        rig.step()
    fresh = rig.submit()
    while not rig.session.aside:
        rig.step()
        assert set(rig.live) in (set(), {fresh}) or fresh not in rig.live
    while fresh not in rig.settling:
        rig.step()
    assert rig.sent[fresh] == 1
    assert refused(rig) == []


def connected() -> Session[str]:
    session: Session[str] = Session(
        lambda _: 1, window_max=10, window_bytes_max=100, confirm_timeout_s=CONFIRM_TIMEOUT_S
    )
    session.handle(Connected(), 0)
    session.handle(ChannelOpened(1), 0)
    return session


def send_and_lose(session: Session[str], times: int) -> None:
    """Send whatever can be sent, and lose the connection before a word; it is made again."""
    for _ in range(times):
        session.poll_transmit(0)
        session.handle(ConnectionLost("reset"), 0)
        session.handle(Connected(), 0)
        list(session.poll_commands())
        session.handle(ChannelOpened(session._last_epoch), 0)


def suspect_behind_a_fresh_message() -> Session[str]:
    """At ASIDE_S, "b" is in flight, and "a", which was set aside, is due."""
    session = connected()
    session.submit("a")
    send_and_lose(session, 3)
    assert session.aside == 1
    session.submit("b")
    [batch] = session.poll_transmit(0)
    assert batch.keys == ["b"]
    session.handle_timeout(ASIDE_S)  # "a" is due
    assert list(session.poll_commands()) == [OpenChannel(5)]
    session.handle(ChannelOpened(5), ASIDE_S)
    return session


def test_the_suspects_wait_for_what_is_in_flight_beside_them() -> None:
    session = suspect_behind_a_fresh_message()
    session.submit("c")
    assert session.poll_transmit(ASIDE_S) == [], "b is in flight"


def test_losses_of_a_suspect_that_waits_are_not_those_of_whom_it_waits_for() -> None:
    session = suspect_behind_a_fresh_message()
    session.handle(ConnectionLost("reset"), ASIDE_S)
    session.handle(Connected(), ASIDE_S)
    assert session.aside == 1
    assert session.poll_timeout() == ASIDE_S + ASIDE_S, "b, for the first time"


def test_a_suspect_that_waits_stays_alone_when_another_message_is_found_guilty() -> None:
    session = suspect_behind_a_fresh_message()
    close = ConnectionClose(540, "NOT_IMPLEMENTED")
    session.handle(ConnectionLost("closed", close), ASIDE_S)  # because of "b"
    session.handle(Connected(), ASIDE_S)
    for command in list(session.poll_commands()):
        assert isinstance(command, OpenChannel)
        session.handle(ChannelOpened(command.epoch), ASIDE_S)
    session.submit("c")
    assert [batch.keys for batch in session.poll_transmit(ASIDE_S)] == [["a"]]


def test_a_word_about_one_suspect_says_nothing_of_the_next_one() -> None:
    session = connected()
    session.submit("a")
    session.submit("b")
    send_and_lose(session, 3)  # "a" and "b" are tried one by one from here on
    [batch] = session.poll_transmit(0)
    assert batch.keys == ["a"]
    session.handle(Acked(batch.epoch, 1, multiple=False), 0)
    [batch] = session.poll_transmit(0)
    assert batch.keys == ["b"]
    session.handle(ConnectionLost("reset"), 0)
    assert session.aside == 1


def test_a_connection_lost_after_a_word_is_not_the_first_of_three() -> None:
    session = connected()
    session.submit("a")
    session.submit("b")
    session.poll_transmit(0)
    session.handle(Acked(1, 1, multiple=False), 0)
    send_and_lose(session, 3)
    assert session.aside == 0
    send_and_lose(session, 1)
    assert session.aside == 1


@pytest.mark.parametrize("count", [1, 2])
def test_suspects_whom_nobody_blames_are_told_what_has_happened(count: int) -> None:
    session = connected()
    for key in "ab"[:count]:
        session.submit(key)
    send_and_lose(session, 3)
    settlements = list(singly(session.poll_settlements()))
    assert len(settlements) == 3 * count
    assert {settlement.outcome for settlement in settlements} == {
        Outcome(OutcomeKind.UNCERTAIN, 0, "connection lost: reset")
    }


def test_connections_lost_with_nothing_in_flight_make_nobody_suspect() -> None:
    session = connected()
    send_and_lose(session, 3)
    session.submit("a")
    send_and_lose(session, 2)
    assert (session.aside, session.buffered) == (0, 1)
    send_and_lose(session, 1)
    assert (session.aside, session.buffered) == (1, 1)


def test_poison_of_a_channel_among_suspects_of_a_connection_is_refused() -> None:
    rig = rig_of(16, 9)
    rig.broker.poison.update({2, 10})
    while len(rig.settling) < 15:
        assert rig.step()
    assert {key: rig.settling[key].reply_code for key in refused(rig)} == {2: 404, 10: 404}
    assert rig.session.aside == 1


@pytest.mark.parametrize("close", [None, FORCED])
def test_an_outage_makes_nobody_suspect(close: ConnectionClose | None) -> None:
    rig = rig_of(10)
    for _ in range(2):
        while not rig.live:
            rig.step()
        if close is None:
            rig.broker.drop()
        else:
            rig.broker.close_connection(close)
        rig.hear()
    rig.run_until_idle()
    assert len(confirmed(rig)) == 10
    assert rig.broker.channels_opened == 3  # no quarantine


def test_connections_lost_after_a_verdict_are_outages_however_many() -> None:
    rig = Rig()
    for _ in range(10):
        rig.broker.connect()
        first = rig.submit()
        while first not in rig.settling:
            rig.step()
        rig.submit()
        while not rig.live:
            rig.step()
        rig.broker.drop()
        rig.hear()
    rig.run_until_idle()
    assert rig.broker.channels_opened == 11
    assert len(confirmed(rig)) == 20


@pytest.mark.parametrize("kind", ["deadly", "fatal", "hard"])
@pytest.mark.parametrize("guilty", [(0,), (57,), (99,), (3, 70)])
def test_what_ends_connections_is_set_aside_and_all_others_pass(
    guilty: tuple[int, ...], kind: str
) -> None:
    rig = rig_of(100, *guilty, kind=kind)
    while rig.session.aside < len(guilty) or len(confirmed(rig)) + len(guilty) < 100:
        assert rig.step()
    assert sorted(confirmed(rig)) == sorted(set(range(100)) - set(guilty))
    assert len(rig.settling) == 100 - len(guilty), "of the others nothing is claimed"
    assert rig.broker.connects <= 3 * len(guilty) * (math.log2(100) + 2)


def test_who_is_set_aside_is_tried_alone_after_waits_that_grow() -> None:
    rig = rig_of(1, 0, kind="deadly")
    while not rig.session.aside:
        rig.step()
    at: list[float] = []
    while len(at) < 9:
        sent = rig.sent[0]
        assert rig.step()
        if rig.sent[0] > sent:
            at.append(rig.now)
            rig.submit()
        assert 0 not in rig.live or set(rig.live) == {0}, "nothing beside it"
    waits = [b - a for a, b in pairwise(at)]
    assert waits[:6] == pytest.approx([2, 4, 8, 16, 32, ASIDE_MAX_S], abs=0.01)
    assert max(waits) <= ASIDE_MAX_S + 0.01
    assert 0 not in rig.settling
    rig.broker.deadly.clear()
    rig.run_until_idle()
    assert rig.settling[0].kind is CONFIRMED


def test_a_suspect_that_outlives_its_deadline_is_a_suspect_no_more() -> None:
    rig = rig_of(1, 0, kind="deadly")
    while not rig.session.aside:
        rig.step()
    rig.broker.deadly.clear()
    while not rig.live:
        rig.step()
    for channel in rig.broker.channels.values():
        channel.is_mute = True
    rig.advance(CONFIRM_TIMEOUT_S)
    assert list(rig.session._main.buffer) == [0]
    fresh = rig.submit()
    rig.run_until_idle()
    assert {rig.settling[key].kind for key in (0, fresh)} == {CONFIRMED}


def test_who_is_set_aside_can_be_withdrawn() -> None:
    rig = rig_of(1, 0, kind="deadly")
    while not rig.session.aside:
        rig.step()
    rig.withdraw({0})
    assert (rig.session.aside, rig.session.buffered) == (0, 0)
    rig.run_until_idle()
    assert rig.settling == {}


def test_nobody_set_aside_is_waited_for_without_a_connection() -> None:
    rig = rig_of(1, 0, kind="deadly")
    while not rig.session.aside:
        rig.step()
    assert not rig.broker.is_connected
    assert rig.session.poll_timeout() is None


# ---------------------------------------------------------------------- whom the words name


def named(key: int, words: str) -> bool:
    return words == "no" and key % 10 == 7


@pytest.mark.parametrize("guilty", [(7,), (17,), (7, 97), (7, 50), (3,)])
def test_whom_the_words_name_is_tried_first(guilty: tuple[int, ...]) -> None:
    rig = Rig(window_max=100, is_named=named)
    rig.broker.connect()
    rig.submit_many(100, guilty=guilty)
    rig.run_until_idle()
    assert sorted(refused(rig)) == list(guilty)
    assert len(confirmed(rig)) == 100 - len(guilty)


def test_the_only_one_named_costs_one_channel_more_and_no_halving() -> None:
    rig = Rig(window_max=100, is_named=lambda key, words: (key, words) == (42, "no"))
    rig.broker.connect()
    rig.submit_many(100, guilty=[42])
    rig.run_until_idle()
    assert refused(rig) == [42]
    assert rig.broker.channels_closed == 2
    assert max(rig.broker.arrivals.values()) <= 2


def test_words_that_name_everybody_tell_nothing() -> None:
    rig = Rig(window_max=100, is_named=lambda _key, _words: True)
    rig.broker.connect()
    rig.submit_many(100, guilty=[42])
    rig.run_until_idle()
    assert refused(rig) == [42]
    assert rig.broker.channels_closed <= math.ceil(math.log2(100)) + 1


def test_the_quarantine_channel_is_closed_when_all_are_set_aside() -> None:
    rig = rig_of(2, 0, kind="deadly")
    while 1 not in rig.settling:
        rig.step()
    rig.submit()
    while 2 not in rig.settling:
        rig.step()
    assert not any(isinstance(command, CloseChannel) for command in rig.broker.inbox)
    assert len(rig.broker.channels) == 1
