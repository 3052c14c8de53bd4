"""Who is at fault when a channel closes: the table of `reliablepub._core.evidence`, row by row."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from reliablepub._core.events import ChannelClosed
from reliablepub._core.evidence import SEVERAL, STRIKES_MAX, Evidence, Verdict, is_soft
from reliablepub.outcome import Concern, Outcome, OutcomeKind, Persistence
from tests.acks import singly
from tests.core.naive_broker import Rig, refused

CONFIRMED, REFUSED = OutcomeKind.CONFIRMED, OutcomeKind.REFUSED
UNFIT = Outcome(REFUSED, 406, "PRECONDITION_FAILED")


def place_of(key: str) -> str:
    """Keys are "x1", "x2", "y1": a place and a number."""
    return key[0]


def judged(history: str) -> Verdict:
    """The last verdict of a history.

    "+x1" has passed, "-x1" was refused alone, "?x1" was sent alone without a suspicion; "new"
    connects, and "close" is that of a channel with fresh messages.
    """
    evidence = Evidence(place_of, is_weighed=True)
    evidence.connected()
    verdict = Verdict.UNCLEAR
    for event in history.split():
        if event == "new":
            evidence.connected()
        elif event == "close":
            evidence.fresh_suspects()
        elif event[0] == "?":
            evidence.sent_alone(event[1:])
        elif event[0] == "+":
            evidence.passed([event[1:]])
        else:
            verdict = evidence.verdict(event[1:], UNFIT)
    return verdict


@pytest.mark.parametrize(
    ("history", "verdict"),
    [
        ("-x1", Verdict.UNCLEAR),
        ("-x1 -x1 -x1 -x1", Verdict.UNCLEAR),  # one message is not several
        ("-x1 -x2", Verdict.UNCLEAR),
        ("+x1 -x2", Verdict.REFUSED),
        ("-x1 +x2 -x1", Verdict.REFUSED),
        ("-x1 -x2 -x3 +x4 -x1", Verdict.REFUSED),
        ("+x1 new -x2", Verdict.UNCLEAR),  # that was another connection
        ("+y1 -x1", Verdict.UNCLEAR),  # that was another place
        ("-x1 -x2 -x3", Verdict.BROKER),
        ("-x1 -x2 new -x3", Verdict.BROKER),
        ("-x1 -x2 -x3 -x3", Verdict.BROKER),
        ("-x1 -x2 -x3 -y1", Verdict.BROKER),
        ("-x1 -x2 -x3 +y1 -y2", Verdict.REFUSED),
        ("+x1 -x2 -x3", Verdict.UNCLEAR),  # one that passes speaks against one
        ("+x1 +x2 -x3 -x4", Verdict.REFUSED),
        ("+x1 -x2 -x3 -x4 -x5", Verdict.BROKER),
        ("+x1 " * 20 + "-a -b -c -d -e -f -g -h -i -j".replace("-", "-x"), Verdict.REFUSED),
        ("+x1 " * 20 + "-a -b -c -d -e -f -g -h -i -j -k".replace("-", "-x"), Verdict.UNCLEAR),
        ("+x1 close -x2", Verdict.UNCLEAR),  # perhaps the beginning of an outage
        ("+x1 ?x2 -x2", Verdict.UNCLEAR),  # that was before
        ("+x1 ?y2 -x2", Verdict.REFUSED),
        ("+y1 -x1 -x2 -x3", Verdict.PLACE),
        ("+y1 -y2 -x1 -x2 -x3", Verdict.BROKER),
        ("-x1 -x2 +y1 -x3", Verdict.PLACE),
        ("-x1 -x2 -x3 +y1 -x1", Verdict.PLACE),
        ("-x1 -x2 +y1 -x3 +x4 new -x5", Verdict.UNCLEAR),
    ],
)
def test_a_message_is_judged_by_what_passed(history: str, verdict: Verdict) -> None:
    assert judged(history) is verdict


def test_a_doubt_about_the_broker_ends_with_the_first_message_that_passes() -> None:
    evidence = Evidence(place_of, is_weighed=True)
    for number in range(SEVERAL):
        evidence.verdict(f"x{number}", UNFIT)
    assert evidence.doubt is UNFIT
    evidence.passed(["y1"])
    assert evidence.doubt is None


@pytest.mark.parametrize(
    "text",
    ["NOT_FOUND - no exchange 'x' in vhost '/'", "user_id property set to 'a' but authenticated"],
)
def test_a_reply_that_names_a_place_or_a_user_needs_no_evidence(text: str) -> None:
    outcome = Outcome(REFUSED, 404 if "exchange" in text else 406, text)
    evidence = Evidence(place_of, is_weighed=True)
    assert evidence.verdict("x1", outcome) is Verdict.REFUSED


def test_without_a_breaker_each_soft_error_is_about_its_message() -> None:
    evidence = Evidence(place_of, is_weighed=False)
    assert evidence.verdict("x1", UNFIT) is Verdict.REFUSED


@pytest.mark.parametrize("code", [311, 313, 403, 404, 405, 406])
def test_an_error_of_a_channel_is_soft(code: int) -> None:
    assert is_soft(code)


@pytest.mark.parametrize("code", [320, 402, 501, 502, 503, 504, 505, 506, 530, 540, 541])
def test_an_error_of_a_connection_is_hard(code: int) -> None:
    assert not is_soft(code)


# ---------------------------------------------------------------------- in a session


def rig_of(count: int, *guilty: int, places: int = 1, is_weighed: bool = True) -> Rig:
    """Connected, with so many messages buffered, some of them unfit, to their places by turns."""
    rig = Rig(
        window_max=1_000,
        window_bytes_max=1_000_000,
        place_of=lambda key: key % places,
        is_weighed=is_weighed,
    )
    rig.broker.connect()
    rig.submit_many(count, guilty=guilty, kind="unfit")
    return rig


@pytest.mark.parametrize("count", [2, 3, 8, 100])
def test_a_single_unfit_message_among_good_ones_is_refused_at_once(count: int) -> None:
    for guilty in range(count):
        rig = rig_of(count, guilty)
        began = rig.now
        while rig.broker.is_connected and len(rig.settling) < count:
            assert rig.step()
        assert refused(rig) == [guilty]
        assert rig.settling[guilty] == Outcome(REFUSED, 406, "no")
        assert rig.now == began, "without a wait"
        assert rig.broker.channels_closed <= math.ceil(math.log2(count)) + 2


@pytest.mark.parametrize("guilty", [(0, 1), (3, 500, 501, 502), tuple(range(0, 1000, 100))])
def test_k_unfit_among_n_cost_some_k_log_n_channels(guilty: tuple[int, ...]) -> None:
    rig = rig_of(1_000, *guilty)
    rig.run_until_idle()
    assert sorted(refused(rig)) == list(guilty)
    assert rig.broker.channels_opened <= 2 + len(guilty) * (math.log2(1_000) + 3)


def test_a_message_that_is_alone_is_not_refused_until_another_one_has_passed() -> None:
    rig = rig_of(1, 0)
    at: list[float] = []
    while len(at) < 5:
        sent = rig.sent[0]
        assert rig.step()
        if rig.sent[0] > sent:
            at.append(rig.now)
    assert [b - a for a, b in pairwise(at)] == pytest.approx([1, 2, 4, 8], abs=0.01)
    assert (refused(rig), rig.broker.connects) == ([], 1)
    fresh, began = rig.submit(), rig.now
    while 0 not in rig.settling:
        assert rig.step()
    assert rig.settling[fresh].kind is CONFIRMED
    assert (refused(rig), rig.now) == ([0], began)
    assert rig.session.why_aside == ""


def test_what_is_not_judged_yet_is_uncertain_and_did_not_arrive() -> None:
    rig = rig_of(1)
    while not rig.live:
        rig.step()
    rig.session.handle(ChannelClosed(1, 406, "no", by_publish=True), rig.now)
    [outcome] = {one.outcome for one in singly(rig.session.poll_settlements())}
    assert outcome.kind is OutcomeKind.UNCERTAIN
    assert outcome.persistence is Persistence.NOT_WRITTEN
    words = "closed the channel, and no other message has passed since: no"
    assert (outcome.reply_code, outcome.reply_text) == (406, words)
    assert rig.session.why_aside == f"406 {words}"


def test_suspects_of_a_hard_error_are_not_judged_by_what_passed_before_it() -> None:
    rig = rig_of(2)
    while len(rig.live) < 2:
        assert rig.step()
    evidence = rig.session._evidence
    evidence.passed([2])
    evidence._strikes = STRIKES_MAX - 1
    rig.session.handle(ChannelClosed(1, 541, "INTERNAL_ERROR", by_publish=True), rig.now)
    assert evidence.verdict(0, UNFIT) is Verdict.UNCLEAR


@pytest.mark.parametrize("places", [1, 10])
def test_a_broker_that_refuses_every_message_refuses_none_for_good(places: int) -> None:
    rig = rig_of(1_000, places=places)
    rig.broker.refuses_all = True
    for _ in range(3_000):
        assert rig.step()
    assert rig.settling == {}
    assert rig.session.refuses_all == "the broker refuses every message: 406 no"
    connects, closed = rig.broker.connects, rig.broker.channels_closed
    while rig.broker.connects < connects + 50:
        assert rig.step()
        assert len(rig.live) <= 1
    assert rig.broker.channels_closed <= closed + 50, "one probe for each connection"
    assert max(rig.broker.arrivals.values(), default=0) == 0
    assert len([key for key in rig.sent if rig.sent[key] > 1]) > 40, "each time another one"
    rig.broker.refuses_all = False
    rig.run_until_idle()
    assert {outcome.kind for outcome in rig.settling.values()} == {CONFIRMED}
    assert max(rig.broker.arrivals.values()) == 1
    assert rig.session.refuses_all == ""


def in_doubt() -> Rig:
    """The broker has refused every message, and none of them is left."""
    rig = rig_of(0)
    rig.broker.refuses_all = True
    rig.submit_many(SEVERAL)
    while not rig.session.refuses_all:
        assert rig.step()
    rig.withdraw(set(rig.session.buffered_keys()))
    return rig


def test_fresh_messages_are_probes_too() -> None:
    rig = in_doubt()
    fresh = rig.submit()
    sent = rig.broker.connects
    while rig.broker.connects < sent + 3:
        assert rig.step()
    assert rig.sent[fresh] >= 1
    rig.broker.refuses_all = False
    rig.run_until_idle()
    assert rig.settling[fresh].kind is CONFIRMED


def test_a_message_that_comes_when_no_other_is_left_is_the_next_probe() -> None:
    rig = in_doubt()
    while rig.step():  # connected again, with nothing to send
        pass
    assert rig.session.refuses_all
    rig.broker.refuses_all = False
    fresh = rig.submit()
    rig.run_until_idle()
    assert rig.settling[fresh].kind is CONFIRMED
    assert rig.session.refuses_all == ""


def test_a_place_that_refuses_every_message_is_told_as_such_and_the_others_flow() -> None:
    """One place alone: each message to it is unfit."""
    rig = rig_of(100, *range(0, 100, 10), places=10)
    rig.run_until_idle()
    assert len(refused(rig)) == 10
    concerns = {rig.settling[key].concern for key in refused(rig)}
    assert concerns == {Concern.EXCHANGE}
    assert len([one for one in rig.settling.values() if one.kind is CONFIRMED]) == 90


def test_without_a_breaker_all_are_refused() -> None:
    rig = rig_of(16, *range(16), is_weighed=False)
    rig.run_until_idle()
    assert len(refused(rig)) == 16


def flows(rig: Rig) -> int:
    """Submit a good message, and step until it is confirmed; the connections that it took."""
    connects, fresh = rig.broker.connects, rig.submit()
    for _ in range(200):
        assert rig.step()
        if fresh in rig.settling:
            break
    assert rig.settling[fresh].kind is CONFIRMED
    return rig.broker.connects - connects


@pytest.mark.parametrize("count", [SEVERAL, 10, 50])
def test_unfit_messages_in_a_row_keep_no_later_one_waiting(count: int) -> None:
    rig = rig_of(count, *range(count))
    while not rig.session.refuses_all:
        assert rig.step()
    while len(refused(rig)) < count:
        assert flows(rig) <= 2
    assert rig.session.refuses_all == ""


def test_a_message_to_a_place_that_has_refused_none_is_the_first_probe() -> None:
    rig = Rig(window_max=100, window_bytes_max=100, place_of=lambda key: key == SEVERAL)
    rig.broker.connect()
    rig.submit_many(SEVERAL, guilty=range(SEVERAL), kind="unfit")
    while not rig.session.refuses_all:
        assert rig.step()
    connects, good, newest = rig.broker.connects, rig.submit(), rig.submit(kind="unfit")
    while good not in rig.settling:
        assert rig.step()
    assert (rig.broker.connects - connects, rig.sent[newest]) == (1, 0)
