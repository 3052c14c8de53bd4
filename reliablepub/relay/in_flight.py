"""Which recorded tag ranges still have outstanding tags.

Knows: ranges of tags by epoch, and when they were written. Must never know: outcomes.

The outbox records the tags in flight by range, one row for a batch, for people to read; a row may
go when no tag of its range is outstanding any more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from reliablepub.outbox.entry import Sent


@dataclass(slots=True, eq=False)
class _Range:
    """Tags that were written together, and how many of them are outstanding."""

    epoch: int
    tags: range
    sent: Sent
    at: float
    left: int


@dataclass(slots=True)
class _Epoch:
    """The ranges of one epoch, by their first tags."""

    firsts: list[int] = field(default_factory=list)
    ranges: list[_Range] = field(default_factory=list)


class Settled(NamedTuple):
    """Some tags of one range are settled.

    Attributes:
        tags: how many.
        at: when they were written.
        finished: the range, if none of its tags is outstanding any more.
    """

    tags: int
    at: float
    finished: Sent | None


_NONE: Final = _Range(0, range(0), Sent("", 0, ()), 0.0, 0)


class InFlightRanges:
    """Counts down the outstanding tags of each range."""

    def __init__(self) -> None:
        self._by_epoch: dict[int, _Epoch] = {}

    def add(self, epoch: int, sent: Sent, at: float) -> None:
        """A batch has been recorded and is about to be written."""
        tags = range(sent.first_tag, sent.first_tag + len(sent.entries))
        known = self._by_epoch.setdefault(epoch, _Epoch())
        known.firsts.append(sent.first_tag)
        known.ranges.append(_Range(epoch, tags, sent, at, len(tags)))

    def settle(self, epoch: int, tags: Iterable[int]) -> list[Settled]:
        """Tags are settled, which mostly lie in few ranges."""
        known = self._by_epoch[epoch]
        settled: list[Settled] = []
        found, inside, count = _NONE, _NONE.tags, 0
        for tag in tags:
            if tag not in inside:
                self._count_down(found, count, settled)
                found, count = known.ranges[bisect_right(known.firsts, tag) - 1], 0
                inside = found.tags
            count += 1
        self._count_down(found, count, settled)
        return settled

    def _count_down(self, found: _Range, count: int, settled: list[Settled]) -> None:
        if not count:
            return
        found.left -= count
        settled.append(Settled(count, found.at, None if found.left else found.sent))
        if not found.left:
            self._remove(found)

    def _remove(self, done: _Range) -> None:
        known = self._by_epoch[done.epoch]
        index = bisect_right(known.firsts, done.tags.start) - 1
        del known.firsts[index], known.ranges[index]
        if not known.ranges:
            del self._by_epoch[done.epoch]
