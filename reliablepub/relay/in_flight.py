"""Which recorded tag ranges still have outstanding tags.

Knows: ranges of tags by epoch, and when they were written. Must never know: outcomes.

The outbox records the tags in flight by range, one row for a batch, for people to read; a row may
go when no tag of its range is outstanding any more.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Final

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


_NONE: Final = _Range(0, range(0), Sent("", 0, ()), 0.0, 0)


class InFlightRanges:
    """Counts down the outstanding tags of each range."""

    def __init__(self) -> None:
        self._by_epoch: dict[int, _Epoch] = {}
        self._last = _NONE  # confirms come in runs

    def add(self, epoch: int, sent: Sent, at: float) -> None:
        """A batch has been recorded and is about to be written."""
        tags = range(sent.first_tag, sent.first_tag + len(sent.entries))
        known = self._by_epoch.setdefault(epoch, _Epoch())
        known.firsts.append(sent.first_tag)
        known.ranges.append(_Range(epoch, tags, sent, at, len(tags)))

    def settle(self, epoch: int, tag: int) -> tuple[Sent | None, float]:
        """One tag is settled; the range, if it was its last one, and when it was written."""
        found = self._last
        if found.epoch != epoch or tag not in found.tags:
            known = self._by_epoch[epoch]
            found = self._last = known.ranges[bisect_right(known.firsts, tag) - 1]
        found.left -= 1
        if found.left:
            return None, found.at
        self._remove(found)
        return found.sent, found.at

    def _remove(self, done: _Range) -> None:
        self._last = _NONE  # or its messages would stay in memory
        known = self._by_epoch[done.epoch]
        index = bisect_right(known.firsts, done.tags.start) - 1
        del known.firsts[index], known.ranges[index]
        if not known.ranges:
            del self._by_epoch[done.epoch]
