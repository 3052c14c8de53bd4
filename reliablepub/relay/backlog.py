"""Which stored entries have not been loaded yet: a short list of id ranges.

Knows: ids, and who waits for them. Must never know: what is in a row.

Entries that are stored while there is room go to the wire from memory. The rest, what other
processes enqueue, and what an earlier run left, is on disk only; it is found by id, since ids only
grow and become visible in their order (one writer at a time). So "not loaded" is a list of ranges.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from reliablepub.outbox.entry import Waiter


@dataclass(slots=True)
class IdRange:
    """Ids ``first`` to ``last`` inclusive, and who waits for their outcome, if anybody."""

    first: int
    last: int
    waiter: Waiter | None = None


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
        """Ids up to this one exist; those we have not seen were stored by somebody else."""
        if last_id > self._seen:
            self._ranges.append(IdRange(self._seen + 1, last_id))
            self._seen = last_id

    def loaded(self, first: int, last: int) -> None:
        """These new ids are in memory already."""
        self.others(first - 1)
        self._seen = last

    def spilled(self, first: int, last: int, waiter: Waiter | None) -> None:
        """These new ids are on disk only, to be read when there is room."""
        self.others(first - 1)
        self._ranges.append(IdRange(first, last, waiter))
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
