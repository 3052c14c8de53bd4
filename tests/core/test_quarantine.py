"""Which message made the broker close the channel: found, refused, and nobody else harmed."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from reliablepub._core.confirms import Violation
from reliablepub._core.events import ChannelClosed, CloseChannel, ConnectionLost, OpenChannel
from reliablepub._core.quarantine import ASIDE_MAX_S, Quarantine
from reliablepub._core.window import Window
from reliablepub.outcome import Outcome, OutcomeKind
from tests.acks import singly
from tests.core.naive_broker import Rig, refused

CONFIRMED, REFUSED = OutcomeKind.CONFIRMED, OutcomeKind.REFUSED


def rig_of(count: int, *guilty: int, window_max: int = 1_000) -> Rig:
    """Connected, with so many messages buffered, some of them poison."""
    rig = Rig(window_max=window_max, window_bytes_max=1_000_000)
    rig.broker.connect()
    rig.submit_many(count, guilty=guilty)
    return rig


def until_suspected(rig: Rig) -> None:
    """Until the first close has been heard."""
    while not rig.broker.channels_closed or rig.broker.outbox:
        assert rig.step()


def test_a_single_suspect_is_refused_in_the_brokers_words() -> None:
    rig = rig_of(1, 0)
    rig.run_until_idle()
    assert rig.settling == {0: Outcome(REFUSED, 404, "no")}
    assert rig.broker.channels_opened == 2  # the one it closed, and the main one again


@pytest.mark.parametrize("count", [2, 3, 8, 100])
def test_wherever_the_guilty_one_stands_it_alone_is_refused(count: int) -> None:
    for guilty in range(count):
        rig = rig_of(count, guilty)
        rig.run_until_idle()
        assert refused(rig) == [guilty]
        assert len(rig.settling) == count
        closes = rig.broker.channels_closed
        assert closes <= math.ceil(math.log2(count)) + 1
        assert max(rig.broker.arrivals.values()) <= closes + 1


@pytest.mark.parametrize(
    "guilty", [(0, 1), (0, 999), (3, 500, 501, 502), tuple(range(0, 1000, 100))]
)
def test_k_guilty_among_n_cost_some_k_log_n_channels(guilty: tuple[int, ...]) -> None:
    count = 1_000
    rig = rig_of(count, *guilty)
    rig.run_until_idle()
    assert sorted(refused(rig)) == list(guilty)
    assert rig.broker.channels_opened <= 2 + len(guilty) * (math.log2(count) + 2)


def test_only_guilty_ones() -> None:
    rig = rig_of(16, *range(16))
    rig.run_until_idle()
    assert len(refused(rig)) == 16


def test_fresh_messages_keep_flowing_meanwhile() -> None:
    rig = rig_of(64, 10)
    until_suspected(rig)
    fresh = rig.submit()
    while fresh not in rig.settling:
        rig.step()
    assert rig.settling[fresh].kind is CONFIRMED
    assert not refused(rig)
    assert rig.sent[fresh] == 1


def test_both_channels_share_one_window() -> None:
    rig = rig_of(8, 5, window_max=8)
    until_suspected(rig)
    rig.submit_many(20)
    most = 0
    while rig.step():  # and the rig checks every write
        most = max(most, rig.session._quarantine.in_flight + rig.session._main.in_flight)
    assert most == 8
    assert refused(rig) == [5]


def test_a_large_suspect_is_not_starved_by_small_fresh_messages() -> None:
    rig = Rig(window_max=100, window_bytes_max=100)
    rig.broker.connect()
    guilty, large = rig.submit(10, kind="poison"), rig.submit(90)
    until_suspected(rig)
    for _ in range(20):
        rig.submit(10)
    for _ in range(50):
        rig.submit(10)
        rig.write()
        while rig.is_anything_under_way:
            rig.step()
        for epoch in filter(rig.broker.owes, rig.broker.channels):
            rig.broker.confirm(epoch, rig.broker.channels[epoch].unconfirmed[0], multiple=False)
    assert rig.settling[guilty].kind is REFUSED
    assert rig.settling[large].kind is CONFIRMED


def test_returned_messages_are_no_suspects() -> None:
    rig = Rig()
    rig.broker.connect()
    returned = [rig.submit(kind="unroutable") for _ in range(3)]
    guilty = rig.submit(kind="poison")
    rig.run_until_idle()
    assert rig.broker.channels_closed == 1  # a single suspect was left
    assert {rig.settling[key].kind for key in returned} == {OutcomeKind.RETURNED}
    assert refused(rig) == [guilty]


def test_a_close_without_a_suspect_refuses_nobody() -> None:
    rig = Rig()
    rig.broker.connect()
    rig.submit(kind="unroutable")
    while not rig.broker.returned:
        rig.step()
    rig.broker.close_channel(1, 404, by_publish=True)
    rig.run_until_idle()
    assert rig.settling == {0: Outcome(OutcomeKind.RETURNED, 312, "NO_ROUTE")}


def test_a_second_poison_in_the_fresh_messages_joins_the_quarantine() -> None:
    rig = rig_of(20, 4)
    until_suspected(rig)
    later = rig.submit_many(20)
    poison = rig.submit(kind="poison")
    rig.run_until_idle()
    assert sorted(refused(rig)) == [4, poison]
    assert all(rig.settling[key].kind is CONFIRMED for key in later)


@pytest.mark.parametrize("guilty", range(12))
@pytest.mark.parametrize("room", [1, 2, 5])
def test_what_was_not_written_yet_is_innocent_of_the_close(guilty: int, room: int) -> None:
    rig = rig_of(12, guilty, window_max=12)
    until_suspected(rig)
    rig.window_max = room
    rig.session.window = Window(room, room)  # so that no group of 6 goes out at once
    rig.run_until_idle()
    assert refused(rig) == [guilty]
    assert len(rig.settling) == 12


@pytest.mark.parametrize("steps", range(0, 60, 3))
def test_a_connection_lost_in_the_middle_changes_nothing_in_the_end(steps: int) -> None:
    rig = rig_of(16, 3, 11)
    until_suspected(rig)
    for _ in range(steps):
        rig.step()
    rig.broker.drop(with_late_words=steps % 2 == 0)
    rig.run_until_idle()
    assert sorted(refused(rig)) == [3, 11]
    assert len(rig.settling) == 16


def test_a_confirm_overdue_in_quarantine_sends_the_group_again() -> None:
    rig = rig_of(4, 0)
    until_suspected(rig)
    while not any(epoch > 2 and rig.broker.owes(epoch) for epoch in rig.broker.channels):
        assert rig.step()
    for channel in rig.broker.channels.values():
        channel.is_mute = True
    rig.run_until_idle()
    assert refused(rig) == [0]


def test_words_not_to_be_believed_in_quarantine_send_the_group_again_there() -> None:
    rig = rig_of(4, 0)
    until_suspected(rig)
    while not any(epoch > 2 and rig.broker.owes(epoch) for epoch in rig.broker.channels):
        assert rig.step()
    rig.broker.confirm(max(rig.broker.channels), 0, multiple=True)
    rig.run_until_idle()
    assert refused(rig) == [0]
    assert rig.session.violations == {Violation.TAG_ZERO: 1}


def test_a_quarantine_closed_for_no_fault_of_ours_keeps_its_suspects() -> None:
    rig = rig_of(4, 0)
    until_suspected(rig)
    while len(rig.broker.channels) < 2:
        assert rig.step()
    rig.broker.close_channel(max(rig.broker.channels), 541, by_publish=False)
    while rig.broker.is_connected:
        rig.hear()
    rig.run_until_idle()
    assert refused(rig) == [0]
    assert len(rig.settling) == 4


def test_the_quarantine_channel_is_closed_when_it_is_empty() -> None:
    rig = rig_of(8, 7)
    rig.run_until_idle()
    assert len(rig.broker.channels) == 1  # the main one
    assert rig.session.poll_timeout() is None


def test_withdrawn_suspects_leave_the_quarantine() -> None:
    rig = rig_of(8, 2)
    until_suspected(rig)
    rig.withdraw({0, 1, 2, 4, 5, 6})  # the first group but one, the second but one
    assert rig.session.buffered == 2
    assert set(rig.session.buffered_keys()) == {3, 7}
    rig.run_until_idle()
    assert {key: outcome.kind for key, outcome in rig.settling.items()} == {
        3: CONFIRMED,
        7: CONFIRMED,
    }


def test_withdrawing_the_first_group_lets_the_second_one_go() -> None:
    rig = rig_of(8, 6)
    until_suspected(rig)
    rig.withdraw({0, 1, 2, 3})
    rig.run_until_idle()
    assert refused(rig) == [6]
    assert len(rig.settling) == 4


def test_withdrawing_all_suspects_closes_the_quarantine_channel() -> None:
    rig = rig_of(2, 0)
    until_suspected(rig)
    rig.withdraw({0, 1})
    assert rig.broker.inbox[-1] == CloseChannel(3, "quarantine is empty")
    rig.run_until_idle()
    assert rig.settling == {}


def test_suspects_withdrawn_while_disconnected_need_no_channel() -> None:
    rig = rig_of(2, 0)
    until_suspected(rig)
    rig.session.handle(ConnectionLost("reset"), rig.now)
    rig.withdraw({0, 1})
    assert list(rig.session.poll_commands()) == []


def test_the_suspects_are_told_why_they_are_uncertain() -> None:
    rig = rig_of(2)
    while len(rig.live) < 2:
        rig.step()
    rig.session.handle(ChannelClosed(1, 403, "ACCESS_REFUSED", by_publish=True), rig.now)
    outcomes = {settlement.outcome for settlement in singly(rig.session.poll_settlements())}
    words = "this message, or one in flight with it, closed the channel: ACCESS_REFUSED"
    assert outcomes == {Outcome(OutcomeKind.UNCERTAIN, 403, words)}
    assert list(rig.session.poll_commands()) == [OpenChannel(2), OpenChannel(3)]


def test_the_wait_aside_stays_bounded_however_many_connections_are_lost() -> None:
    quarantine = Quarantine[int](Counter(), lambda _: 1)
    quarantine.set_aside(7, 0.0, "gone", losses=5_000)
    [(at, _)] = quarantine.aside
    assert at == ASIDE_MAX_S
