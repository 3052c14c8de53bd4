"""Who waits for entries that are on disk only: found again when these are read.

Knows: ids. Must never know: what is waited for.

A chunk of many messages has one waiter, and is remembered as one range: what is on disk only may be
millions.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from reliablepub.outbox.entry import Waiter


@dataclass(slots=True)
class _Range:
    """Ids ``first`` to ``last`` of one waiter, but for the ones that are in memory by now."""

    first: int
    last: int
    waiter: Waiter
    taken: set[int]


class Waiters:
    """Waiters by the ids of their entries."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._ranges: list[_Range] = []
        self._single: dict[int, Waiter] = {}

    def __len__(self) -> int:
        """How many are remembered, a range counting once."""
        return len(self._ranges) + len(self._single)

    def stored(self, first: int, last: int, waiter: Waiter, *, in_memory: set[int]) -> None:
        """New ids, which only grow; some of them may be in memory, with their waiter."""
        self._firsts.append(first)
        self._ranges.append(_Range(first, last, waiter, in_memory))

    def put(self, id_: int, waiter: Waiter) -> None:
        """An entry has left memory."""
        self._single[id_] = waiter

    def take(self, id_: int) -> Waiter | None:
        """An entry has been read: whoever waits for it is told by it from now on."""
        waiter = self._single.pop(id_, None)
        if waiter is not None:
            return waiter
        index = bisect_right(self._firsts, id_) - 1
        if index < 0:
            return None
        found = self._ranges[index]
        if found.last < id_ or id_ in found.taken:
            return None
        found.taken.add(id_)
        if len(found.taken) > found.last - found.first:
            del self._firsts[index], self._ranges[index]
        return found.waiter
