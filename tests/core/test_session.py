"""The session in virtual time: window, epochs, deadlines, blocking, loss, take-back, drain."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import inf
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliablepub._core.confirms import Violation
from reliablepub._core.events import (
    Acked,
    AckedEach,
    Batch,
    Blocked,
    ChannelClosed,
    ChannelOpened,
    CloseChannel,
    Command,
    ConfirmedEach,
    Connected,
    ConnectionClose,
    ConnectionLost,
    Disconnect,
    Event,
    Leaving,
    Nacked,
    NoChannel,
    OpenChannel,
    Returned,
    Settlement,
    Unblocked,
)
from reliablepub._core.session import Session
from reliablepub.outcome import CONFIRMED, NACKED, Outcome, OutcomeKind
from tests.acks import singly

UNCERTAIN = OutcomeKind.UNCERTAIN


@dataclass
class Client:
    """A session and a clock; every answer is polled at once."""

    window_max: int = 4
    sizes: dict[str, int] = field(default_factory=dict)
    session: Session[str] = field(init=False)
    now: float = 100.0
    commands: list[Command] = field(default_factory=list)
    ended: list[tuple[str, Outcome]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = Session(
            self.sizes.__getitem__,
            window_max=self.window_max,
            window_bytes_max=100,
            confirm_timeout_s=30,
        )

    def hears(self, *events: Event, after: float = 0.0) -> Self:
        self.now += after
        for event in events:
            self.session.handle(event, self.now)
            self.poll()
        return self

    def poll(self) -> None:
        self.commands += self.session.poll_commands()
        self.ended += [(s.key, s.outcome) for s in singly(self.session.poll_settlements())]

    def submits(self, keys: str, size: int = 1) -> None:
        self.sizes |= dict.fromkeys(keys, size)
        self.session.submit(*keys)

    def writes(self) -> str:
        """What goes out now, one word a batch: "2.5:ab" is a with tag 5 and b with 6 of epoch 2."""
        batches = self.session.poll_transmit(self.now)
        return " ".join(f"{b.epoch}.{b.first_tag}:{''.join(b.keys)}" for b in batches)

    def sends(self, keys: str, size: int = 1) -> str:
        """`submits` and `writes`."""
        self.submits(keys, size)
        return self.writes()

    def waits(self, seconds: float) -> Self:
        self.now += seconds
        self.session.handle_timeout(self.now)
        self.poll()
        return self

    def took(self) -> list[Command]:
        commands, self.commands = self.commands, []
        return commands

    def kinds(self) -> str:
        """What has ended, as "a:confirmed b:nacked"."""
        ended, self.ended = self.ended, []
        return " ".join(f"{key}:{outcome.kind}" for key, outcome in ended)


def connected(window_max: int = 4) -> Client:
    """With its channel open, epoch 1."""
    client = Client(window_max)
    assert client.hears(Connected(), ChannelOpened(1)).took() == [OpenChannel(1)]
    return client


def sending(keys: str, window_max: int = 4, *, size: int = 1) -> Client:
    """The same, and these messages are written as far as the window goes."""
    client = connected(window_max)
    client.sends(keys, size)
    return client


# ------------------------------------------------------------------------------------------ runs


@given(
    tags=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    returned=st.sets(st.integers(1, 4)),
    epoch=st.sampled_from([1, 1, 1, 7]),
)
def test_a_run_of_acks_is_the_same_as_one_after_the_other(
    tags: list[int], returned: set[int], epoch: int
) -> None:
    at_once, one_by_one = connected(), connected()
    for client in (at_once, one_by_one):
        client.sends("abcd")
        client.hears(*(Returned(1, tag, 312, "NO_ROUTE") for tag in returned))
    at_once.hears(AckedEach(epoch, tags))
    one_by_one.hears(*(Acked(epoch, tag, multiple=False) for tag in tags))
    assert at_once.ended == one_by_one.ended
    assert at_once.took() == one_by_one.took()
    for client in (at_once, one_by_one):
        client.hears(ConnectionLost("over"))
    assert at_once.ended == one_by_one.ended
    assert at_once.session.stale == one_by_one.session.stale
    assert at_once.session.violations == one_by_one.session.violations
    assert (at_once.session.in_flight_bytes, at_once.session.buffered) == (
        one_by_one.session.in_flight_bytes,
        one_by_one.session.buffered,
    )


def test_what_is_confirmed_in_a_row_is_told_at_once() -> None:
    client = sending("abcdef")
    assert client.hears(Acked(1, 4, multiple=False)).kinds() == "d:confirmed"
    session = client.session
    session.handle(AckedEach(1, [2, 1]), client.now)
    session.handle(Acked(1, 3, multiple=True), client.now)
    [run] = session.poll_settlements()
    assert isinstance(run, ConfirmedEach)
    assert (run.epoch, run.tags, run.keys) == (1, [2, 1, 3], ["b", "a", "c"])
    client.writes()
    session.handle(Acked(1, 5, multiple=False), client.now)
    session.handle(Nacked(1, 6, multiple=True), client.now)
    run, nacked = session.poll_settlements()
    assert isinstance(run, ConfirmedEach)
    assert isinstance(nacked, Settlement)
    assert (run.epoch, run.tags, run.keys) == (1, [5], ["e"])
    assert nacked[:4] == ("f", 1, 6, NACKED)


def test_a_multiple_nack_confirms_nothing() -> None:
    assert sending("abc").hears(Nacked(1, 2, multiple=True)).kinds() == "a:nacked b:nacked"


def test_confirms_name_the_batches_they_belong_to() -> None:
    client = connected(window_max=99)
    written = []
    for keys in ("abc", "de", "fg"):
        client.submits(keys)
        written += client.session.poll_transmit(client.now)
    first, second, third = written
    client.session.handle(AckedEach(1, [2, 4, 5, 3, 6]), client.now)
    [run] = client.session.poll_settlements()
    assert isinstance(run, ConfirmedEach)
    assert run.batches == [(first, 1), (second, 2), (first, 1), (third, 1)]
    assert [one.batch for one in run.each()] == [first, second, second, first, third]
    client.session.handle(Nacked(1, 7, multiple=True), client.now)
    ended = [(one.key, one.batch) for one in singly(client.session.poll_settlements())]
    assert ended == [("a", first), ("g", third)]
    assert not client.session._main._batches, "all of their messages are settled"


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_is_over_with_its_last_message_in_whatever_order_confirms_come(seed: int) -> None:
    chance = random.Random(seed)
    client = connected(window_max=99)
    left: dict[int, Batch[str]] = {}
    for _ in range(5):
        client.submits("x" * chance.randint(1, 6))
        for batch in client.session.poll_transmit(client.now):
            tags = range(batch.first_tag, batch.first_tag + len(batch.keys))
            left |= dict.fromkeys(tags, batch)
            assert batch.outstanding == len(tags)
    while left:
        some = chance.sample(sorted(left), chance.randint(1, min(3, len(left))))
        client.session.handle(AckedEach(1, some), client.now)
        for one in singly(client.session.poll_settlements()):
            assert one.batch is left.pop(one.tag)
        kept = list(dict.fromkeys(left[tag] for tag in sorted(left)))
        assert [batch for batch in client.session._main._batches if batch in kept] == kept
    assert not client.session._main._batches


def test_confirms_of_two_channels_are_told_apart() -> None:
    client = sending("ab")
    client.hears(ChannelClosed(1, 406, "no", by_publish=True), ChannelOpened(2), ChannelOpened(3))
    assert client.sends("c") == "3.1:a 2.1:c"
    for epoch in (2, 3):
        client.session.handle(AckedEach(epoch, [1]), client.now)
    of_main, of_suspects = client.session.poll_settlements()
    for run, epoch, key in ((of_main, 2, "c"), (of_suspects, 3, "a")):
        assert isinstance(run, ConfirmedEach)
        assert (run.epoch, run.tags, run.keys) == (epoch, [1], [key])


def test_runs_of_acks_in_quarantine_bring_the_next_suspects() -> None:
    client = sending("ab")
    client.hears(ChannelClosed(1, 406, "no", by_publish=True), ChannelOpened(2), ChannelOpened(3))
    client.took()
    assert client.writes() == "3.1:a"
    assert client.hears(AckedEach(3, [1])).writes() == "3.2:b"
    assert client.hears(AckedEach(3, [2])).took() == [CloseChannel(3, "quarantine is empty")]
    assert client.kinds() == "a:uncertain b:uncertain a:confirmed b:confirmed"


# ---------------------------------------------------------------------------------------- window


def test_nothing_is_written_before_the_channel_is_open() -> None:
    client = Client()
    client.submits("a")
    assert (client.session.is_connected, client.session.blocked_reason) == (False, None)
    assert client.writes() == ""
    client.hears(Connected())
    assert not client.session.is_ready
    assert client.writes() == ""
    assert client.hears(ChannelOpened(1)).session.is_ready
    assert client.writes() == "1.1:a"


def test_the_window_counts_messages() -> None:
    client = connected()
    assert client.sends("abcdef") == "1.1:abcd"
    assert client.writes() == ""
    assert client.hears(Acked(1, 2, multiple=True)).writes() == "1.5:ef"
    assert (client.session.in_flight, client.session.buffered) == (4, 0)


def test_the_window_counts_bytes() -> None:
    client = connected()
    assert client.sends("abc", size=40) == "1.1:ab"
    assert client.session.in_flight_bytes == 80
    assert client.hears(Acked(1, 1, multiple=False)).writes() == "1.3:c"


def test_the_window_is_filled_to_the_byte() -> None:
    client = connected()
    assert client.sends("abc", size=50) == "1.1:ab"
    assert client.session.in_flight_bytes == 100


def test_a_message_larger_than_the_window_goes_alone() -> None:
    client = connected()
    client.submits("a", size=10)
    client.submits("B", size=500)
    assert client.sends("c", size=10) == "1.1:a"
    assert client.writes() == ""
    assert client.hears(Acked(1, 1, multiple=False)).writes() == "1.2:B"
    assert client.writes() == ""
    assert client.hears(Acked(1, 2, multiple=False)).writes() == "1.3:c"


def test_verdicts_reach_the_caller_in_order() -> None:
    client = sending("abcd")
    client.hears(
        Returned(1, 2, 312, "NO_ROUTE"), Acked(1, 2, multiple=True), Nacked(1, 4, multiple=False)
    )
    assert client.ended == [
        ("a", CONFIRMED),
        ("b", Outcome(OutcomeKind.RETURNED, 312, "NO_ROUTE")),
        ("d", NACKED),
    ]


def test_verdicts_are_kept_until_they_are_asked_for() -> None:
    client = sending("abc")
    for event in (
        Acked(1, 1, multiple=False),
        Nacked(1, 2, multiple=False),
        ConnectionLost("reset"),
    ):
        client.session.handle(event, client.now)
    client.poll()
    assert client.kinds() == "a:confirmed b:nacked c:uncertain"


# ---------------------------------------------------------------------------------------- epochs


def test_there_is_output_until_it_is_taken() -> None:
    session = Client(sizes={"a": 1}).session
    assert not session.has_output
    session.handle(Connected(), 100.0)
    assert session.has_output  # the command that opens the channel
    (opening,) = session.poll_commands()
    assert isinstance(opening, OpenChannel)
    assert not session.has_output
    session.handle(ChannelOpened(opening.epoch), 100.0)
    session.submit("a")
    session.poll_transmit(100.0)
    assert not session.has_output
    session.handle(Acked(opening.epoch, 1, multiple=False), 100.0)
    assert session.has_output  # the confirm
    assert session.poll_settlements()
    assert not session.has_output


def test_uncertain_messages_go_first_and_in_order_on_the_next_epoch() -> None:
    client = sending("abcdef").hears(Acked(1, 2, multiple=False), ConnectionLost("reset"))
    assert client.kinds() == "b:confirmed a:uncertain c:uncertain d:uncertain"
    assert client.hears(Connected(), ChannelOpened(2)).writes() == "2.1:acde"


def test_a_channel_closed_for_no_fault_of_ours_costs_the_connection() -> None:
    client = sending("ab").hears(ChannelClosed(1, 541, "oops", by_publish=False))
    assert client.took() == [Disconnect("channel closed: 541 oops")]
    assert client.ended[0] == ("a", Outcome(UNCERTAIN, 0, "channel closed: 541 oops"))
    assert client.kinds() == "a:uncertain b:uncertain"
    assert client.session.is_connected is False
    assert client.session.poll_timeout() is None
    assert client.hears(ConnectionLost("channel closed")).took() == []
    assert client.hears(Connected(), ChannelOpened(2)).took() == [OpenChannel(2)]
    assert client.writes() == "2.1:ab"


def test_a_channel_closed_before_it_was_open_costs_the_connection() -> None:
    client = Client().hears(Connected())
    client.took()
    client.hears(ChannelClosed(1, 540, "no confirms here", by_publish=False))
    assert client.took() == [Disconnect("channel closed: 540 no confirms here")]


def test_a_lost_connection_makes_everything_in_flight_uncertain() -> None:
    client = sending("abcdef")
    client.hears(Returned(1, 1, 312, "NO_ROUTE"), ConnectionLost("reset by peer"))
    assert client.ended[1] == ("b", Outcome(UNCERTAIN, 0, "connection lost: reset by peer"))
    assert client.kinds() == "a:returned b:uncertain c:uncertain d:uncertain"
    assert client.session.is_connected is False
    assert client.session.in_flight_bytes == 0
    assert client.writes() == ""
    assert client.took() == []
    assert client.hears(Connected(), ChannelOpened(2)).took() == [OpenChannel(2)]
    assert client.writes() == "2.1:bcde"


def test_orders_for_a_connection_that_is_gone_are_forgotten() -> None:
    client = Client()
    client.session.handle(Connected(), client.now)
    client.session.handle(ConnectionLost("at once"), client.now)
    client.poll()
    assert client.took() == []


def test_a_connection_that_could_not_be_made_changes_nothing() -> None:
    client = Client()
    client.submits("a")
    client.hears(ConnectionLost("refused"), ConnectionLost("refused"))
    assert (client.session.buffered, client.ended, client.took()) == (1, [], [])


@pytest.mark.parametrize(
    "late",
    [
        Acked(1, 0, multiple=True),
        Nacked(1, 1, multiple=False),
        Returned(1, 1, 312, "NO_ROUTE"),
        ChannelClosed(1, 404, "NOT_FOUND", by_publish=True),
        ChannelOpened(1),
        Acked(9, 1_000, multiple=True),
    ],
)
def test_words_of_another_epoch_change_nothing_and_are_counted(late: Event) -> None:
    client = sending("ab").hears(ConnectionLost("reset"), Connected(), ChannelOpened(2))
    client.writes()
    client.kinds()
    client.took()
    assert client.hears(late, late).session.stale == 2
    assert (client.kinds(), client.took(), client.session.in_flight) == ("", [], 2)
    assert not client.session.violations


def test_a_channel_that_opens_twice_is_stale_news() -> None:
    assert connected().hears(ChannelOpened(1), ChannelOpened(1)).session.stale == 2


def test_violations_are_counted_over_all_epochs() -> None:
    client = sending("a").hears(Acked(1, 1, multiple=True), Acked(1, 1, multiple=True))
    client.hears(ConnectionLost("reset"), Connected(), ChannelOpened(2))
    client.hears(Nacked(2, 0, multiple=True))
    client.hears(ConnectionLost("no sense"), Connected(), ChannelOpened(3))
    client.sends("b")
    client.hears(Nacked(3, 1, multiple=False), Nacked(3, 1, multiple=False))
    assert client.session.violations == {Violation.TAG_NOT_OUTSTANDING: 2, Violation.TAG_ZERO: 1}


def test_violations_on_the_quarantine_channel_are_counted_while_it_is_open() -> None:
    client = sending("abcd").hears(ChannelClosed(1, 404, "NOT_FOUND", by_publish=True))
    assert client.hears(ChannelOpened(2), ChannelOpened(3)).writes() == "3.1:ab"
    client.hears(Acked(3, 1, multiple=False), Acked(3, 1, multiple=False))
    assert client.session.in_flight == 1
    assert client.session.violations == {Violation.TAG_NOT_OUTSTANDING: 1}


BEYOND = "the broker confirmed tag 4, the last one sent is 3"
NAMELESS = "the broker confirmed without naming a tag"
UNKNOWN = "the broker returned an unknown message (312 NO_ROUTE)"


@pytest.mark.parametrize(
    ("words", "reason", "violation"),
    [
        (Acked(1, 4, multiple=True), BEYOND, Violation.TAG_BEYOND_LAST),
        (Nacked(1, 4, multiple=False), BEYOND, Violation.TAG_BEYOND_LAST),
        (Acked(1, 0, multiple=True), NAMELESS, Violation.TAG_ZERO),
        (Acked(1, 0, multiple=False), NAMELESS, Violation.TAG_ZERO),
        (Nacked(1, 0, multiple=True), NAMELESS, Violation.TAG_ZERO),
        (Returned(1, 0, 312, "NO_ROUTE"), UNKNOWN, Violation.RETURN_UNKNOWN),
        (Returned(1, 4, 312, "NO_ROUTE"), UNKNOWN, Violation.RETURN_UNKNOWN),
    ],
)
def test_what_cannot_be_matched_ends_the_connection(
    words: Event, reason: str, violation: Violation
) -> None:
    client = sending("abc")
    assert client.hears(Acked(1, 1, multiple=False), words).took() == [Disconnect(reason)]
    assert client.ended[-1] == ("c", Outcome(UNCERTAIN, 0, reason))
    assert client.kinds() == "a:confirmed b:uncertain c:uncertain"
    assert client.session.violations == {violation: 1}
    client.hears(Acked(1, 3, multiple=True))
    assert client.hears(ConnectionLost(reason), Connected(), ChannelOpened(2)).kinds() == ""
    assert client.session.stale == 1
    assert client.writes() == "2.1:bc"


def test_a_message_returned_without_its_header_is_not_confirmed_by_the_ack_that_follows() -> None:
    client = sending("a").hears(Returned(1, 0, 312, "NO_ROUTE"), Acked(1, 1, multiple=False))
    assert client.kinds() == "a:uncertain"
    client.hears(ConnectionLost("no sense"), Connected(), ChannelOpened(2))
    assert client.writes() == "2.1:a"
    client.hears(Returned(2, 1, 312, "NO_ROUTE"), Acked(2, 1, multiple=False))
    assert client.kinds() == "a:returned"


def test_a_return_of_what_is_settled_is_counted_and_nothing_else() -> None:
    client = sending("ab")
    assert client.hears(Acked(1, 1, multiple=False), Returned(1, 1, 312, "NO_ROUTE")).took() == []
    assert client.session.violations == {Violation.RETURN_NOT_OUTSTANDING: 1}
    assert client.hears(Acked(1, 2, multiple=False)).kinds() == "a:confirmed b:confirmed"


# ------------------------------------------------------------------------------------ quarantine

POISON = ConnectionClose(540, "NOT_IMPLEMENTED")


def test_fresh_messages_flow_beside_the_halves_of_a_half() -> None:
    client = sending("abcd").hears(ChannelClosed(1, 404, "NOT_FOUND", by_publish=True))
    assert client.hears(ChannelOpened(2), ChannelOpened(3)).writes() == "3.1:ab"
    client.hears(ChannelClosed(3, 404, "NOT_FOUND", by_publish=True), ChannelOpened(4))
    assert client.sends("e") == "4.1:a 2.1:e"


def test_suspects_of_a_connection_stay_alone_when_only_their_channel_is_closed() -> None:
    client = connected()
    client.submits("abcd")
    for epoch in (1, 2, 3):
        client.writes()
        client.hears(ConnectionLost("reset"), Connected(), ChannelOpened(epoch + 1))
    assert client.hears(ChannelOpened(5)).writes() == "5.1:ab"
    client.hears(ChannelClosed(5, 404, "NOT_FOUND", by_publish=True), ChannelOpened(6))
    assert client.sends("e") == "6.1:a"


# ------------------------------------------------------------------------------------- deadlines


def test_an_overdue_confirm_retires_the_channel() -> None:
    client = sending("ab")
    assert client.hears(Acked(1, 2, multiple=False)).session.poll_timeout() == 130
    assert client.waits(29.9).took() == []
    assert client.waits(0.1).took() == [CloseChannel(1, "no confirm within 30 s"), OpenChannel(2)]
    assert client.ended[-1] == ("a", Outcome(UNCERTAIN, 0, "no confirm within 30 s"))
    assert client.kinds() == "b:confirmed a:uncertain"
    client.submits("c")
    assert client.hears(Acked(1, 1, multiple=True), ChannelOpened(2)).kinds() == ""
    assert client.writes() == "2.1:a 2.2:c"


def overdue_among_others() -> Client:
    """Of "a" to "d", "a" is overdue, "b" is confirmed, and the others were written 10 s later."""
    client = sending("ab")
    client.now += 10
    client.sends("cd")
    assert client.hears(Acked(1, 2, multiple=False)).waits(20).took() == [OpenChannel(2)]
    assert client.kinds() == "b:confirmed"
    return client


def retiring() -> Client:
    """The same, and "e" is sent on the channel that new messages got."""
    client = overdue_among_others()
    client.submits("e")
    assert client.hears(ChannelOpened(2)).writes() == "2.1:e"
    return client


def test_what_is_not_overdue_is_confirmed_on_its_channel() -> None:
    """So that it is not sent twice because of another queue that confirms nothing."""
    client = retiring()
    assert client.hears(AckedEach(1, [3]), Acked(2, 1, multiple=False)).took() == []
    client.hears(Acked(1, 4, multiple=False))
    assert client.waits(0).took() == [CloseChannel(1, "no confirm within 30 s")]
    assert client.kinds() == "c:confirmed e:confirmed d:confirmed a:uncertain"
    assert client.writes() == "2.2:a"


def test_a_run_of_single_confirms_may_be_the_last_of_a_retiring_channel() -> None:
    client = retiring().hears(AckedEach(1, [3, 4])).waits(0)
    assert client.took() == [CloseChannel(1, "no confirm within 30 s")]
    assert client.kinds() == "c:confirmed d:confirmed a:uncertain"


def test_a_late_confirm_may_arrive_together_with_the_last_of_a_retiring_channel() -> None:
    client = retiring().hears(AckedEach(1, [3, 4]))
    assert client.session.poll_timeout() == -inf
    client.hears(Acked(1, 1, multiple=False)).waits(0)
    assert client.kinds() == "c:confirmed d:confirmed a:confirmed"
    assert client.took() == [CloseChannel(1, "no confirm within 30 s")]


def test_a_late_message_that_is_confirmed_after_all_is_not_sent_again() -> None:
    client = retiring().hears(Acked(1, 1, multiple=False), Acked(1, 4, multiple=True))
    assert client.waits(0).took() == [CloseChannel(1, "no confirm within 30 s")]
    assert client.kinds() == "a:confirmed c:confirmed d:confirmed"
    assert client.session.in_flight == 1


def test_a_retiring_channel_ends_when_all_of_it_is_overdue() -> None:
    client = retiring()
    assert client.session.poll_timeout() == 170, "it was too short for the first one"
    assert client.hears(Acked(2, 1, multiple=False)).session.poll_timeout() == 140
    assert client.hears(Leaving(1, 4)).session.poll_timeout() == 160
    assert client.waits(29.9).took() == []
    assert client.waits(0.1).took() == [CloseChannel(1, "no confirm within 30 s")]
    assert client.kinds() == "e:confirmed a:uncertain c:uncertain d:uncertain"
    assert client.writes() == "2.2:a", "late messages have a quarter of the window"


def test_a_retiring_channel_that_the_broker_closes_has_suspects_like_any_other() -> None:
    client = retiring().hears(ChannelClosed(1, 404, "NOT_FOUND", by_publish=True))
    assert client.took() == [OpenChannel(3)]
    assert client.hears(ChannelOpened(3)).kinds() == "a:uncertain c:uncertain d:uncertain"
    assert client.writes() == "3.1:ac"


def test_what_a_retiring_channel_has_in_flight_is_sent_first_after_a_lost_connection() -> None:
    client = retiring().hears(ConnectionLost("gone"), Connected(), ChannelOpened(3))
    assert client.writes() == "3.1:acde"


def test_a_third_channel_is_too_many() -> None:
    """The retiring channel would hold the only number for as long as nothing is confirmed."""
    client = overdue_among_others().hears(NoChannel(2))
    assert client.took() == [Disconnect("the connection has no number left for a channel")]
    assert client.hears(ConnectionLost("gone"), Connected(), ChannelOpened(3)).writes() == "3.1:acd"
    assert client.kinds() == "a:uncertain c:uncertain d:uncertain"


def test_a_suspect_that_is_overdue_ends_no_retiring_channel() -> None:
    client = retiring().hears(Acked(2, 1, multiple=False))
    client.sizes["s"] = 1
    client.session.submit_alone("s", client.now)
    client.poll()
    assert client.hears(ChannelOpened(3)).writes() == "3.1:s"
    client.took()
    client.hears(Leaving(1, 4), after=20)
    assert client.waits(10).took() == [CloseChannel(3, "no confirm within 30 s")]
    assert client.kinds() == "e:confirmed s:uncertain"
    assert client.hears(Acked(1, 4, multiple=True)).kinds() == "a:confirmed c:confirmed d:confirmed"


def test_the_deadline_is_that_of_the_oldest_message_not_confirmed() -> None:
    client = sending("a")
    client.now += 10
    client.sends("b")
    assert client.hears(Acked(1, 1, multiple=False)).session.poll_timeout() == 140
    assert client.hears(Acked(1, 2, multiple=False)).session.poll_timeout() is None


def test_the_next_oldest_has_the_time_again() -> None:
    """A broker that confirms one message after the other is slow, and does not owe anything."""
    client = sending("abcd")
    for tag in (1, 2, 3):
        client.hears(AckedEach(1, [tag]) if tag % 2 else Acked(1, tag, multiple=True), after=29)
        assert client.session.poll_timeout() == client.now + 30
    assert client.waits(30).kinds() == "a:confirmed b:confirmed c:confirmed d:uncertain"


def test_confirms_of_younger_ones_give_the_oldest_no_time() -> None:
    client = sending("abcd").hears(AckedEach(1, [2, 3]), after=29)
    assert client.hears(Acked(1, 4, multiple=False)).session.poll_timeout() == 130
    assert client.waits(1).kinds() == "b:confirmed c:confirmed d:confirmed a:uncertain"


def test_a_return_of_more_than_was_sent_ends_the_epoch() -> None:
    client = sending("ab", size=10)
    assert client.hears(Returned(1, 1, 312, "NO_ROUTE", 10)).took() == []
    client.hears(Returned(1, 2, 312, "NO_ROUTE", 11))
    said = "the broker returned 11 bytes of a message that has fewer"
    assert client.took() == [Disconnect(said)]
    assert client.kinds() == "a:returned b:uncertain"
    assert client.session.violations == {Violation.RETURN_TOO_LARGE: 1}


# ------------------------------------------------------------------------------------ slow links


def test_time_that_is_not_enough_is_doubled_until_a_confirm_comes_in_time() -> None:
    """What a proxy holds has left, as far as can be seen."""
    client = connected()
    client.submits("a")
    for epoch, seconds in enumerate([30, 60, 120, 240, 480, 480], 1):
        client.writes()
        assert client.session.poll_timeout() == client.now + seconds
        assert client.waits(seconds).kinds() == "a:uncertain"
        said = f"no confirm within {seconds} s"
        if epoch < 3:
            assert client.took() == [CloseChannel(epoch, said), OpenChannel(epoch + 1)]
        else:
            assert client.took() == [CloseChannel(epoch, said), Disconnect(said)]
            client.hears(ConnectionLost(said), Connected())
            assert client.took() == [OpenChannel(epoch + 1)]
        client.hears(ChannelOpened(epoch + 1))
    client.sends("bc")
    client.hears(Acked(7, 1, multiple=False), after=31)
    client.hears(AckedEach(7, [2]), after=31)
    assert client.session.poll_timeout() == client.now + 480, "neither came in time"
    client.hears(AckedEach(7, [3]), after=29)
    client.sends("d")
    assert client.session.poll_timeout() == client.now + 30


def test_the_deadline_of_what_leaves_begins_when_it_has_left() -> None:
    client = sending("ab")
    for _ in range(5):
        client.hears(Leaving(1, 1), after=29)
    assert client.session.poll_timeout() == client.now + 30
    assert client.waits(29).kinds() == ""
    assert client.waits(1).kinds() == "a:uncertain b:uncertain"


def test_what_has_left_has_its_deadline_whatever_leaves_behind_it() -> None:
    client = sending("abc").hears(Leaving(1, 1), after=10)
    client.hears(Leaving(1, 2), after=10)
    assert client.hears(Leaving(1, 3), Leaving(1, 3), after=15).session.poll_timeout() == 110 + 30
    client.hears(Acked(1, 1, multiple=False))
    assert client.session.poll_timeout() == client.now + 30, "it is the oldest since now"
    assert client.hears(Leaving(1, 3), after=20).session.poll_timeout() == 135 + 30
    client.hears(Acked(1, 2, multiple=False))
    assert client.hears(Leaving(1, 3), after=20).session.poll_timeout() == client.now + 30


def test_the_deadline_stands_still_for_what_is_both_blocked_and_leaving() -> None:
    client = sending("a").hears(Leaving(1, 1), Blocked("disk"), after=10)
    assert client.hears(Unblocked(), after=100).session.poll_timeout() == client.now + 30


def test_a_channel_has_time_to_open_while_its_bytes_leave() -> None:
    client = Client().hears(Connected())
    client.hears(Leaving(1, 0), after=29)
    assert client.hears(Leaving(1, 0), after=29).session.poll_timeout() == client.now + 30
    client.hears(ChannelOpened(1))
    client.sends("a")
    assert client.session.poll_timeout() == client.now + 30


def test_what_leaves_for_a_channel_that_is_over_is_nothing_stale() -> None:
    assert connected().hears(Leaving(7, 1)).session.stale == 0


@pytest.mark.parametrize("start", [0.1, 100.3, 1e9 / 3])
def test_a_timer_that_fires_when_asked_for_finds_its_deadline_due(start: float) -> None:
    client = connected()
    client.now = start
    client.hears(Blocked("disk"), after=0.1)
    client.hears(Unblocked(), after=0.7)
    client.sends("a")
    due = client.session.poll_timeout()
    assert due is not None
    client.session.handle_timeout(due)
    client.poll()
    assert client.kinds() == "a:uncertain"


def test_a_channel_that_does_not_open_costs_the_connection_once() -> None:
    client = Client().hears(Connected())
    client.took()
    assert client.session.poll_timeout() == 130
    assert client.waits(30).took() == [Disconnect("no channel within 30 s")]
    assert client.session.poll_timeout() is None
    assert not client.session.is_connected
    assert client.waits(1_000).took() == []
    assert client.hears(ConnectionLost("dropped"), Connected()).took() == [OpenChannel(2)]


@pytest.mark.parametrize(
    "words",
    [
        ChannelClosed(2, 320, "closing", by_publish=False),
        ChannelClosed(2, 404, "NOT_FOUND", by_publish=True),
        Acked(2, 0, multiple=True),
        Returned(2, 1, 312, "NO_ROUTE"),
    ],
)
def test_a_connection_given_up_is_asked_for_nothing_more(words: Event) -> None:
    client = sending("ab")
    client.hears(ChannelClosed(1, 404, "NOT_FOUND", by_publish=True), ChannelOpened(2))
    client.took()  # the quarantine channel never opens
    client.submits("c")
    assert client.waits(30).took() == [Disconnect("no channel within 30 s")]
    assert not client.session.is_ready
    assert client.writes() == ""
    client.hears(words)
    client.session.withdraw({"a", "b"})
    client.poll()
    assert client.took() == []
    assert client.hears(ConnectionLost("dropped"), Connected()).took() == [OpenChannel(4)]


def test_two_overdue_openings_drop_the_connection_once() -> None:
    client = sending("ab").hears(ChannelClosed(1, 404, "NOT_FOUND", by_publish=True))
    client.took()
    assert client.waits(30).took() == [Disconnect("no channel within 30 s")]


# --------------------------------------------------------------------------------------- blocked


def test_a_blocked_broker_is_sent_nothing_and_still_listened_to() -> None:
    client = sending("ab").hears(Blocked("low on disk"))
    client.submits("c")
    assert client.session.blocked_reason == "low on disk"
    assert not client.session.is_ready
    assert client.writes() == ""
    assert client.hears(Acked(1, 1, multiple=False)).kinds() == "a:confirmed"
    assert client.hears(Unblocked()).session.blocked_reason is None
    assert client.writes() == "1.3:c"


def test_the_deadline_stands_still_while_blocked() -> None:
    client = sending("a")
    assert client.hears(Blocked("low on disk"), after=20).session.poll_timeout() is None
    assert client.waits(3_600).took() == []
    assert client.hears(Unblocked()).session.poll_timeout() == client.now + 10
    assert client.waits(9.9).took() == []
    assert client.waits(0.1).kinds() == "a:uncertain"


def test_blocked_twice_counts_from_the_first_time() -> None:
    client = sending("a").hears(Blocked("low on disk"))
    client.hears(Blocked("low on memory"), after=50)
    assert client.session.blocked_reason == "low on memory"
    assert client.hears(Unblocked(), after=50).session.poll_timeout() == client.now + 30
    assert client.hears(Unblocked(), after=1).session.poll_timeout() == client.now + 29


def test_a_lost_connection_is_no_longer_blocked() -> None:
    client = sending("a").hears(Blocked("low on disk"))
    assert client.hears(ConnectionLost("reset"), after=100).session.blocked_reason is None
    assert client.hears(Connected(), ChannelOpened(2)).writes() == "2.1:a"
    assert client.session.poll_timeout() == client.now + 30


def test_a_new_connection_is_not_blocked() -> None:
    client = Client().hears(Blocked("late news of an old connection"))
    assert client.hears(Connected(), after=1_000).session.blocked_reason is None
    assert client.session.poll_timeout() == client.now + 30


def test_a_channel_opened_while_blocked_gets_its_time_afterwards() -> None:
    client = connected().hears(Blocked("low on disk"))
    client.hears(ChannelClosed(1, 404, "NOT_FOUND", by_publish=True), after=10)
    assert client.hears(Unblocked(), after=500).session.poll_timeout() == client.now + 30


# ------------------------------------------------------------------- take back, withdraw, drain


def test_what_was_not_written_is_taken_back_and_keeps_its_place() -> None:
    client = sending("a")
    client.submits("bc", size=7)
    batches = client.session.poll_transmit(client.now + 5)
    client.session.take_back(batches)
    assert (client.session.in_flight, client.session.in_flight_bytes) == (1, 1)
    assert client.session.poll_timeout() == 130
    assert client.sends("d") == "1.2:bcd"
    client.hears(Acked(1, 4, multiple=True))
    assert client.kinds() == "a:confirmed b:confirmed c:confirmed d:confirmed"


def test_taking_back_out_of_turn_is_a_bug() -> None:
    client = connected()
    client.submits("a")
    (batch,) = client.session.poll_transmit(client.now)
    client.hears(Acked(1, 1, multiple=False))
    with pytest.raises(ValueError, match="cannot be taken back"):
        client.session.take_back([batch])
    with pytest.raises(ValueError, match="epoch 7 is over"):
        client.session.take_back([Batch(7, 1, ["a"])])


def test_withdrawn_messages_are_never_sent() -> None:
    client = sending("abcdefg")
    withdrawn = client.session.withdraw({"a", "f", "unknown"})  # a is in flight already
    assert withdrawn == ["f"]
    assert client.session.buffered == 2
    client.hears(Acked(1, 4, multiple=True))
    assert client.kinds() == "a:confirmed b:confirmed c:confirmed d:confirmed"
    assert client.writes() == "1.5:eg"


def test_a_draining_session_sends_nothing_more_and_settles_what_is_in_flight() -> None:
    client = sending("abcde")
    client.session.drain()
    with pytest.raises(RuntimeError, match=r"^a draining session takes no more messages$"):
        client.session.submit("f")
    with pytest.raises(RuntimeError, match=r"^a draining session takes no more messages$"):
        client.session.submit_alone("f", client.now)
    assert client.hears(Acked(1, 2, multiple=True)).kinds() == "a:confirmed b:confirmed"
    assert client.writes() == ""
    assert client.waits(30).kinds() == "c:uncertain d:uncertain"
    assert client.hears(ChannelOpened(2)).writes() == ""
    assert (client.session.in_flight, client.session.buffered) == (0, 3)


def test_events_are_handled_by_their_type() -> None:
    with pytest.raises(KeyError):
        Client().session.handle("connected", 0.0)  # type: ignore[arg-type]


# ------------------------------------------------------------------- a queue that never confirms


def test_a_queue_that_confirms_nothing_does_not_keep_the_others_waiting() -> None:
    """For hours: every tenth message is for it, so it could fill the window many times over."""
    client, confirmed, submitted = connected(window_max=8), 0, 0
    while client.now < 100 + 2 * 3600:
        for _ in range(2):
            submitted += 1
            key = f"{'stuck' if submitted % 10 == 0 else 'other'} {submitted}"
            client.sizes[key] = 1
            client.session.submit(key)
        client.waits(10)
        for command in client.took():
            if isinstance(command, OpenChannel):
                client.hears(ChannelOpened(command.epoch))
        while batches := client.session.poll_transmit(client.now):
            for batch in batches:
                others = [n for n, key in enumerate(batch.keys) if key.startswith("other")]
                client.hears(
                    *(Acked(batch.epoch, batch.first_tag + n, multiple=False) for n in others)
                )
                confirmed += len(others)
        assert client.session.in_flight <= 8
    assert confirmed >= submitted * 0.9 - 8
    assert client.session.buffered + client.session.in_flight == submitted - confirmed


def overdue(window_max: int = 8) -> Client:
    """With eight late messages, "a" to "h", of which "a" and "b" may go; epoch 2."""
    client = sending("abcdefgh", window_max)
    client.waits(30)  # all of them: the first time, the broker as a whole may be slow
    assert client.hears(ChannelOpened(2)).writes() == "2.1:abcdefgh"
    client.waits(60)
    client.hears(ChannelOpened(3))
    client.took(), client.kinds()
    return client


def test_late_messages_take_a_part_of_the_window_that_grows_with_their_answers() -> None:
    client = overdue()
    assert client.sends("xyz") == "3.1:ab 3.3:xyz"
    assert client.session.buffered == 6
    assert client.hears(Acked(3, 1, multiple=False)).writes() == "3.6:cde"
    assert client.hears(Nacked(3, 2, multiple=False)).writes() == "3.9:fg", "the window is full"
    assert client.hears(Acked(3, 9, multiple=True)).writes() == "3.11:h"
    assert client.hears(Acked(3, 11, multiple=True)).session.in_flight == 0
    assert client.session.buffered == 0


def test_a_broker_that_confirms_nothing_costs_the_connection_the_third_time() -> None:
    """Another node may be the one that confirms."""
    client = overdue()
    assert client.sends("x") == "3.1:ab 3.3:x"
    client.waits(120)
    reason = "no confirm within 120 s"
    assert client.took() == [CloseChannel(3, reason), Disconnect(reason)]
    assert client.kinds() == "a:uncertain b:uncertain x:uncertain"


def test_a_broker_that_confirms_newer_messages_keeps_the_connection() -> None:
    client = overdue()
    client.sends("x")
    client.hears(Acked(3, 3, multiple=False), after=119)
    assert client.waits(1).took() == [CloseChannel(3, "no confirm within 120 s"), OpenChannel(4)]


def test_late_messages_can_be_taken_back_withdrawn_and_lost_like_others() -> None:
    client = overdue()
    client.submits("x")
    client.session.take_back(client.session.poll_transmit(client.now))
    assert [*client.session.buffered_keys()] == [*"xabcdefgh"]
    assert client.session.withdraw({"b", "x", "h"}) == ["x", "b", "h"]
    assert client.writes() == "3.1:ac"
    client.hears(ConnectionLost("gone"), Connected(), ChannelOpened(4))
    assert client.kinds() == "a:uncertain c:uncertain"
    assert client.sends("y") == "4.1:de 4.3:y"
    client.session.take_back([])
    assert [*client.session.buffered_keys()] == [*"fgac"]


def test_a_late_message_that_waits_for_bytes_goes_before_newer_ones() -> None:
    client = connected()
    client.submits("a", size=90)
    client.sends("b", size=10)
    client.hears(Acked(1, 2, multiple=False))
    assert client.waits(30).hears(ChannelOpened(2)).sends("cdef", size=20) == "2.1:a"
    assert client.hears(Acked(2, 1, multiple=False)).writes() == "2.2:cdef"


def test_newer_messages_leave_the_bytes_to_a_late_one_that_does_not_fit() -> None:
    client = connected(window_max=4)
    for key, size in (("a", 40), ("b", 50), ("n", 10)):
        client.submits(key, size=size)
    client.writes()
    client.hears(Acked(1, 3, multiple=False))
    client.waits(30)
    client.hears(ChannelOpened(2))
    client.submits("c", size=60)
    assert client.sends("d", size=20) == "2.1:a 2.2:c"
    assert client.hears(Acked(2, 1, multiple=False)).writes() == ""
    assert client.hears(Acked(2, 2, multiple=False)).writes() == "2.3:b 2.4:d"


def test_a_window_of_one_message_keeps_its_order() -> None:
    client = connected(window_max=1)
    client.submits("abc")
    for epoch, waited in ((1, 30), (2, 60), (3, 120)):
        assert client.writes() == f"{epoch}.1:a"
        client.waits(waited)
        client.hears(ChannelOpened(epoch + 1))
    assert [*client.session.buffered_keys()] == [*"abc"]


def test_a_window_that_has_shrunk_to_one_message_is_not_taken_by_a_late_one() -> None:
    client = connected()
    client.session = Session(
        lambda _: 1, window_min=1, window_max=8, window_bytes_max=100, confirm_timeout_s=30
    )
    client.hears(Connected(), ChannelOpened(1))
    client.session.window.size = 8
    client.session.submit(*"abcd")
    client.writes()
    client.waits(30)
    client.session.window.size = 8
    client.hears(ChannelOpened(2))
    client.writes()
    client.session.window.size = 2
    assert client.waits(60).hears(ChannelOpened(3)).session.window.size == 1
    client.session.submit("x")
    assert client.writes() == "3.1:x"
    assert client.hears(Acked(3, 1, multiple=False)).writes() == "3.2:a"
