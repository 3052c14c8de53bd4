"""The confirm ledger, cell by cell of the table in its docstring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from reliablepub._core.confirms import ConfirmLedger, EpochUntrusted, Violation
from reliablepub.outcome import CONFIRMED, NACKED, Outcome, OutcomeKind

GONE = Outcome(OutcomeKind.UNCERTAIN, 0, "channel gone")
NO_ROUTE = Outcome(OutcomeKind.RETURNED, 312, "NO_ROUTE")

Ledger = ConfirmLedger[str]
Settled = list[tuple[int, str, Outcome]]


def ledger_of(count: int) -> Ledger:
    """A ledger with tags 1 to count in flight; the key of tag 7 is "m7"."""
    ledger = Ledger(epoch=1)
    for tag in range(1, count + 1):
        assert ledger.register([f"m{tag}"]) == tag
    return ledger


def ack(ledger: Ledger, tag: int, *, multiple: bool = False) -> Settled:
    return ledger.handle_confirm(tag, CONFIRMED, multiple=multiple)


def nack(ledger: Ledger, tag: int, *, multiple: bool = False) -> Settled:
    return ledger.handle_confirm(tag, NACKED, multiple=multiple)


def return_(ledger: Ledger, tag: int) -> Settled:
    ledger.handle_return(tag, NO_ROUTE.reply_code, NO_ROUTE.reply_text)
    return []


def gone(ledger: Ledger, _tag: int) -> Settled:
    return ledger.close(GONE)


def in_flight() -> Ledger:
    return ledger_of(1)


def returned() -> Ledger:
    ledger = ledger_of(1)
    return_(ledger, 1)
    return ledger


def settled() -> Ledger:
    ledger = ledger_of(1)
    ack(ledger, 1)
    return ledger


@pytest.mark.parametrize(
    ("state", "hears", "outcome", "violation"),
    [
        (in_flight, return_, None, None),
        (in_flight, ack, CONFIRMED, None),
        (in_flight, nack, NACKED, None),
        (in_flight, gone, GONE, None),
        (returned, return_, None, Violation.RETURN_REPEATED),
        (returned, ack, NO_ROUTE, None),
        (returned, nack, NO_ROUTE, None),
        (returned, gone, NO_ROUTE, None),
        (settled, return_, None, Violation.RETURN_NOT_OUTSTANDING),
        (settled, ack, None, Violation.TAG_NOT_OUTSTANDING),
        (settled, nack, None, Violation.TAG_NOT_OUTSTANDING),
        (settled, gone, None, None),
    ],
)
def test_each_cell_of_the_table(
    state: Callable[[], Ledger],
    hears: Callable[[Ledger, int], Settled],
    outcome: Outcome | None,
    violation: Violation | None,
) -> None:
    ledger = state()
    expected = [] if outcome is None else [(1, "m1", outcome)]
    assert hears(ledger, 1) == expected
    assert ledger.violations == (Counter() if violation is None else Counter({violation: 1}))


@pytest.mark.parametrize("state", [in_flight, returned, settled])
def test_sending_takes_a_new_tag_and_never_a_used_one(state: Callable[[], Ledger]) -> None:
    assert state().register(["next"]) == 2


def test_a_return_alone_settles_nothing() -> None:
    ledger = returned()
    assert (ledger.outstanding, ledger.unreturned) == (1, [])


def test_multiple_settles_all_up_to_its_tag_in_order() -> None:
    ledger = ledger_of(4)
    assert ack(ledger, 3, multiple=True) == [(tag, f"m{tag}", CONFIRMED) for tag in (1, 2, 3)]
    assert ledger.outstanding == 1
    assert ledger.lowest_tag == 4


def test_single_settles_only_its_tag() -> None:
    ledger = ledger_of(3)
    assert ack(ledger, 2) == [(2, "m2", CONFIRMED)]
    assert ledger.lowest_tag == 1


def test_singles_out_of_order_and_then_a_lower_multiple() -> None:
    ledger = ledger_of(40)
    ack(ledger, 34, multiple=True)
    assert ack(ledger, 37) == [(37, "m37", CONFIRMED)]
    assert ack(ledger, 39) == [(39, "m39", CONFIRMED)]
    assert ack(ledger, 36, multiple=True) == [(35, "m35", CONFIRMED), (36, "m36", CONFIRMED)]
    assert ack(ledger, 40, multiple=True) == [(38, "m38", CONFIRMED), (40, "m40", CONFIRMED)]
    assert not ledger.violations


def test_an_ack_over_a_returned_tag_confirms_its_neighbors_only() -> None:
    ledger = ledger_of(3)
    return_(ledger, 2)
    assert ack(ledger, 3, multiple=True) == [
        (1, "m1", CONFIRMED),
        (2, "m2", NO_ROUTE),
        (3, "m3", CONFIRMED),
    ]
    assert ledger.outstanding == len(ledger.unreturned)


def test_a_duplicate_never_settles_another_message() -> None:
    ledger = ledger_of(3)
    ack(ledger, 2, multiple=True)
    assert ack(ledger, 2, multiple=True) == []
    assert nack(ledger, 2) == []
    assert ledger.outstanding == 1
    assert ledger.violations == {Violation.TAG_NOT_OUTSTANDING: 2}


def test_each_violation_is_counted_however_often() -> None:
    ledger = returned()
    for _ in range(3):
        return_(ledger, 1)
    ack(ledger, 1)
    for _ in range(2):
        return_(ledger, 1)
    assert ledger.violations == {Violation.RETURN_REPEATED: 3, Violation.RETURN_NOT_OUTSTANDING: 2}


def test_a_multiple_below_an_earlier_one_is_a_violation() -> None:
    ledger = ledger_of(5)
    ack(ledger, 4, multiple=True)
    assert nack(ledger, 3, multiple=True) == []  # RabbitMQ up to 3.7 did this
    assert ledger.violations == {Violation.TAG_NOT_OUTSTANDING: 1}
    assert ack(ledger, 5) == [(5, "m5", CONFIRMED)]


def ack_multiple(ledger: Ledger, tag: int) -> Settled:
    return ack(ledger, tag, multiple=True)


def nack_multiple(ledger: Ledger, tag: int) -> Settled:
    return nack(ledger, tag, multiple=True)


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize(
    ("hears", "beyond", "violation", "words"),
    [
        (ack, 0, Violation.TAG_ZERO, "confirmed without naming a tag"),
        (nack, 0, Violation.TAG_ZERO, "confirmed without naming a tag"),
        (ack_multiple, 0, Violation.TAG_ZERO, "confirmed without naming a tag"),
        (nack_multiple, 0, Violation.TAG_ZERO, "confirmed without naming a tag"),
        (ack, 1, Violation.TAG_BEYOND_LAST, "confirmed tag {tag}, the last one sent is {count}"),
        (nack_multiple, 1, Violation.TAG_BEYOND_LAST, "tag {tag}, the last one sent is {count}"),
        (return_, 0, Violation.RETURN_UNKNOWN, r"an unknown message \(312 NO_ROUTE\)"),
        (return_, 1, Violation.RETURN_UNKNOWN, r"an unknown message \(312 NO_ROUTE\)"),
    ],
)
def test_what_cannot_be_matched_raises_and_changes_nothing(
    count: int,
    hears: Callable[[Ledger, int], Settled],
    beyond: int,
    violation: Violation,
    words: str,
) -> None:
    ledger = ledger_of(count)
    tag = count + beyond if beyond else 0
    with pytest.raises(EpochUntrusted, match=words.format(tag=tag, count=count)):
        hears(ledger, tag)
    assert ledger.violations == {violation: 1}
    assert (ledger.outstanding, len(ledger.unreturned), ledger.lowest_tag) == (count, count, 1)
    assert gone(ledger, 0) == [(tag, f"m{tag}", GONE) for tag in range(1, count + 1)]


def test_violations_add_up() -> None:
    ledger = ledger_of(1)
    for _ in range(2):
        with pytest.raises(EpochUntrusted):
            return_(ledger, 2)
    assert ledger.violations == {Violation.RETURN_UNKNOWN: 2}


@pytest.mark.parametrize("tag", [1, 2, 3])
def test_acks_are_settled_at_once_up_to_the_last_tag(tag: int) -> None:
    tags = list(range(1, tag + 1))
    keys = [f"m{tag}" for tag in tags]
    assert ledger_of(3).handle_acks_up_to(tag) == (tags, keys)
    assert ledger_of(3).handle_acks(tags) == keys


def test_a_tag_that_was_taken_back_was_never_sent() -> None:
    ledger = ledger_of(2)
    ledger.take_back(2)
    with pytest.raises(EpochUntrusted):
        ack(ledger, 2)
    with pytest.raises(EpochUntrusted):
        return_(ledger, 2)
    assert ledger.outstanding == 1


def test_taking_back_the_newest_does_not_shift_the_sequence() -> None:
    ledger = ledger_of(3)
    assert ledger.take_back(3) == "m3"
    assert ledger.take_back(2) == "m2"
    assert (ledger.last_tag, ledger.outstanding) == (1, 1)
    assert ledger.register(["other"]) == 2
    assert ack(ledger, 2, multiple=True) == [(1, "m1", CONFIRMED), (2, "other", CONFIRMED)]


@pytest.mark.parametrize(("state", "tag"), [(in_flight, 2), (returned, 1), (settled, 1)])
def test_taking_back_what_was_written_is_a_bug(state: Callable[[], Ledger], tag: int) -> None:
    ledger = state()
    before = (ledger.last_tag, ledger.outstanding, ledger.unreturned)
    with pytest.raises(ValueError, match="cannot be taken back"):
        ledger.take_back(tag)
    assert (ledger.last_tag, ledger.outstanding, ledger.unreturned) == before


def test_taking_back_an_older_tag_is_a_bug() -> None:
    ledger = ledger_of(3)
    with pytest.raises(ValueError, match="tag 2 cannot be taken back: the newest is 3"):
        ledger.take_back(2)
    assert ledger.outstanding == 3


def test_an_empty_ledger_has_nothing_to_settle() -> None:
    ledger = ledger_of(0)
    assert (ledger.last_tag, ledger.lowest_tag) == (0, 1)
    assert gone(ledger, 0) == []


def test_closing_settles_in_the_order_of_the_tags() -> None:
    ledger = ledger_of(3)
    return_(ledger, 2)
    assert gone(ledger, 0) == [(1, "m1", GONE), (2, "m2", NO_ROUTE), (3, "m3", GONE)]
    assert (ledger.outstanding, ledger.unreturned) == (0, [])
