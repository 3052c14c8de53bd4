"""Which recorded tag ranges still have outstanding tags.

Knows: ranges of tags by epoch, and when they were written. Must never know: outcomes.

The outbox records the tags in flight by range, one row for a batch, for people to read; a row may
go when no tag of its range is outstanding any more.
"""

from __future__ import annotations

from bisect import bisect_right

from reliablepub.outbox.entry import Sent


class InFlightRanges:
    """Counts down the outstanding tags of each range."""

    def __init__(self) -> None:
        self._by_epoch: dict[int, tuple[list[int], list[tuple[Sent, float]], list[int]]] = {}

    def add(self, epoch: int, sent: Sent, at: float) -> None:
        """A batch has been recorded and is about to be written."""
        firsts, ranges, left = self._by_epoch.setdefault(epoch, ([], [], []))
        firsts.append(sent.first_tag)
        ranges.append((sent, at))
        left.append(len(sent.entries))

    def settle(self, epoch: int, tag: int) -> tuple[Sent | None, float]:
        """One tag is settled; the range, if it was its last one, and when it was written."""
        firsts, ranges, left = self._by_epoch[epoch]
        index = bisect_right(firsts, tag) - 1
        finished, at = ranges[index]
        left[index] -= 1
        if left[index]:
            return None, at
        del firsts[index], ranges[index], left[index]
        if not firsts:
            del self._by_epoch[epoch]
        return finished, at
