"""Which stored entries have not been looked at yet: a short list of id ranges.

Knows: ids. Must never know: what is in a row.

Entries that are stored while there is room go to the wire from memory. The rest, what other
processes enqueue, and what an earlier run left, is on disk only; it is found by id, since ids only
grow and become visible in their order (one writer at a time). So "not looked at" is a list of
ranges.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True)
class IdRange:
    """Ids ``first`` to ``last`` inclusive."""

    first: int
    last: int


class Backlog:
    """The ranges of ids that are on disk and not in memory, lowest first.

    Args:
        last_id: highest id in the store at the start: everything up to it is unread.
    """

    def __init__(self, last_id: int) -> None:
        self._ranges: deque[IdRange] = deque()
        self._seen = 0
        self.others(last_id)

    def __bool__(self) -> bool:
        """Whether anything is unread."""
        return bool(self._ranges)

    def others(self, last_id: int) -> None:
        """Ids up to this one exist; those we have not seen are to be read when there is room."""
        if last_id <= self._seen:
            return
        if self._ranges and self._ranges[-1].last == self._seen:
            self._ranges[-1].last = last_id
        else:
            self._ranges.append(IdRange(self._seen + 1, last_id))
        self._seen = last_id

    def loaded(self, first: int, last: int) -> None:
        """These new ids need not be read: in memory already, or to be found otherwise."""
        self.others(first - 1)
        self._seen = last

    @property
    def head(self) -> IdRange | None:
        """The range to read from next."""
        return self._ranges[0] if self._ranges else None

    def advance(self, last_read: int) -> None:
        """Everything in the head range up to this id has been read."""
        head = self._ranges[0]
        head.first = last_read + 1
        if head.first > head.last:
            self._ranges.popleft()
