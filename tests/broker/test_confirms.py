"""Coalescing as rabbit_channel:coalesce_and_send does it."""

from random import Random

import pytest

from reliablepub.testing.confirms import Confirm, ConfirmLedger, coalesce


def words(confirms: list[Confirm]) -> list[str]:
    return [
        f"{'nack' if one.nack else 'ack'} {one.delivery_tag}{' multiple' if one.multiple else ''}"
        for one in confirms
    ]


@pytest.mark.parametrize(
    ("verdicts", "opposite", "lowest", "expected"),
    [
        ([1], [], None, ["ack 1"]),
        ([1, 2, 3], [], None, ["ack 3 multiple"]),
        ([3, 1, 2], [], None, ["ack 3 multiple"]),
        ([1, 2, 5, 7], [], 3, ["ack 2 multiple", "ack 5", "ack 7"]),
        ([5, 7], [], 3, ["ack 5", "ack 7"]),
        ([1, 2, 4, 5], [3], None, ["ack 2 multiple", "ack 4", "ack 5"]),
        ([2, 4, 6], [1], None, ["ack 2", "ack 4", "ack 6"]),
        ([1, 4, 6], [5], 2, ["ack 1 multiple", "ack 4", "ack 6"]),
    ],
)
def test_acks_below_the_cutoff_are_one(
    verdicts: list[int], opposite: list[int], lowest: int | None, expected: list[str]
) -> None:
    assert words(coalesce(verdicts, opposite, lowest, nack=False)) == expected


def test_a_lone_nack_may_be_multiple() -> None:
    assert words(coalesce([4], [], None, nack=True)) == ["nack 4 multiple"]
    assert words(coalesce([4], [], 3, nack=True)) == ["nack 4"]


def ledger_of(size: int) -> ConfirmLedger:
    ledger = ConfirmLedger()
    assert [ledger.open_tag() for _ in range(size)] == list(range(1, size + 1))
    return ledger


def test_acks_come_before_nacks_and_neither_covers_the_other() -> None:
    ledger = ledger_of(4)
    for tag in (1, 2, 4):
        ledger.settle(tag, nack=False)
    ledger.settle(3, nack=True)
    assert words(ledger.poll(Random(0))) == ["ack 2 multiple", "ack 4", "nack 3"]
    assert ledger.poll(Random(0)) == []


def test_confirms_come_out_of_order() -> None:
    ledger = ledger_of(3)
    ledger.settle(3, nack=False)
    assert words(ledger.poll(Random(0))) == ["ack 3"]
    ledger.settle(1, nack=False)
    ledger.settle(2, nack=False)
    assert words(ledger.poll(Random(0))) == ["ack 2 multiple"]


def test_shuffled_tags_are_single_and_no_multiple_ack_covers_them() -> None:
    ledger = ledger_of(10)
    for tag in range(1, 11):
        if tag % 2:
            ledger.settle(tag, nack=False)
        else:
            ledger.settle_shuffled(tag, nack=False)
    confirms = ledger.poll(Random(1))
    assert confirms[0] == Confirm(1, multiple=True)
    assert not any(one.multiple for one in confirms[1:])
    assert sorted(one.delivery_tag for one in confirms) == list(range(1, 11))
    tail = [one.delivery_tag for one in confirms[-5:]]
    assert sorted(tail) == [2, 4, 6, 8, 10]
    assert tail != sorted(tail)
