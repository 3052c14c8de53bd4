"""Ranges of tags, counted down."""

import random
import weakref

import pytest

from reliablepub.outbox.entry import Entry, Sent
from reliablepub.relay.settling import InFlightRanges


class Entries(list[Entry]):
    """A list whose end can be noticed."""


def sent(first_tag: int, count: int) -> Sent:
    return Sent("1-1", first_tag, [Entry(message=None, stored_at=0.0)] * count)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(20))
def test_a_range_is_over_with_its_last_tag_in_whatever_order_they_come(seed: int) -> None:
    chance = random.Random(seed)
    ranges, left, at = InFlightRanges(), dict[tuple[int, int], Sent](), dict[Sent, float]()
    for epoch in (1, 2):
        first_tag = 1
        for time in range(5):
            batch = sent(first_tag, chance.randint(1, 6))
            ranges.add(epoch, batch, float(time))
            at[batch] = float(time)
            tags = range(first_tag, first_tag + len(batch.entries))
            left |= {(epoch, tag): batch for tag in tags}
            first_tag = tags.stop
    for epoch, tag in chance.sample(sorted(left), len(left)):
        batch = left.pop((epoch, tag))
        is_over = batch not in left.values()
        assert ranges.settle(epoch, [tag]) == [(1, at[batch], batch if is_over else None)]


def test_a_run_of_tags_is_counted_range_by_range() -> None:
    ranges = InFlightRanges()
    first, second, third = sent(1, 3), sent(4, 2), sent(6, 2)
    for at, batch in enumerate((first, second, third)):
        ranges.add(1, batch, float(at))
    assert ranges.settle(1, [2, 4, 5, 3, 6]) == [
        (1, 0.0, None),
        (2, 1.0, second),
        (1, 0.0, None),
        (1, 2.0, None),
    ]
    assert ranges.settle(1, [7, 1]) == [(1, 2.0, third), (1, 0.0, first)]
    assert not ranges._by_epoch


def test_no_message_is_kept_once_all_are_settled() -> None:
    ranges, entries = InFlightRanges(), Entries(sent(1, 2).entries)
    is_there = weakref.ref(entries)
    ranges.add(1, Sent("1-1", 1, entries), 0.0)
    del entries
    for tag in (1, 2):
        assert is_there() is not None
        ranges.settle(1, [tag])
    assert is_there() is None
