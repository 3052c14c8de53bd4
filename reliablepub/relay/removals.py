"""The removal of confirmed entries from the store: which of them leave with which commit.

Knows: batches in flight, and how long their confirmed entries have waited. Must never know: how a
store removes an entry, or what becomes of entries that were not confirmed.

A broker with several queues confirms in the order in which they sync their disks. If each entry
left with the next commit, most of those next to it in the file would stay: a page with seven rows
would be written three times, and a statement would remove three rows. So entries leave with the
others of their batch, whose ids are consecutive, and as many leave as enter with the same commit,
which then use the pages of those that leave. On disk, that takes a sixth off the processor time of
a message.

Until then a crash duplicates them, as it does those in flight. So at most a window of them wait,
and at most `WAIT_S`. The row with the tags of a batch leaves last: after a crash, all messages that
a queue may have are known.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final

from reliablepub._core.events import Batch, ConfirmedEach
from reliablepub.outbox.entry import Changes, Entry, id_of

WAIT_S: Final = 0.2
"""How long confirmed entries wait for others, in seconds: several syncs of a broker's disk."""


class Removals:
    """Confirmed entries that are still in the store.

    Attributes:
        count: number of these entries.
    """

    __slots__ = ("_finished", "_unfinished", "count")

    def __init__(self) -> None:
        self.count = 0
        # Each with the time of its first confirm, which is their order.
        self._unfinished: dict[Batch[Entry], float] = {}
        self._finished: deque[tuple[Batch[Entry], float]] = deque()

    def confirmed(self, run: ConfirmedEach[Entry], now: float) -> None:
        """Note that entries were confirmed (at ``now``, monotonic seconds)."""
        first = 0
        for batch, count in run.batches:
            batch.confirmed += run.keys[first : first + count]
            self._unfinished.setdefault(batch, now)
            self.ended(batch, count)
            first += count
        self.count += first

    def ended(self, batch: Batch[Entry], count: int) -> None:
        """Note that so many further attempts of a batch have ended."""
        batch.outstanding -= count
        if not batch.outstanding:
            batch.confirmed.sort(key=id_of)
            self._finished.append((batch, self._unfinished.pop(batch, -inf)))

    @property
    def next_at(self) -> float:
        """When an unfinished batch will have waited for `WAIT_S` (monotonic); infinity if none."""
        return next(iter(self._unfinished.values()), inf) + WAIT_S

    def are_due(self, before: float) -> bool:
        """Whether a batch is finished, or has had its first confirm before that."""
        return bool(self._finished) or self.next_at <= before + WAIT_S

    def take(self, changes: Changes, *, least: int, stay_max: int, before: float) -> None:
        """Add entries, oldest first, to the changes of the next commit.

        Args:
            changes: get the entries, and the batches of which none is left.
            least: how many entries of finished batches, as far as there are any.
            stay_max: how many may stay.
            before: of batches whose first confirm came before that (monotonic), all leave.
        """
        least = max(least, self.count - stay_max)
        while self._finished:
            batch, since = self._finished[0]
            left = len(batch.confirmed)
            count = left if since <= before else min(least, left)
            self._leave(batch, count, changes)
            if count < left:
                break
            least = max(0, least - count)
            changes.finished.append(batch)
            self._finished.popleft()
        while self._unfinished:
            batch, since = next(iter(self._unfinished.items()))
            if since > before and self.count <= stay_max:
                break
            del self._unfinished[batch]  # it is here again after its next confirm
            self._leave(batch, len(batch.confirmed), changes)

    def _leave(self, batch: Batch[Entry], count: int, changes: Changes) -> None:
        changes.confirmed += batch.confirmed[:count]
        del batch.confirmed[:count]
        self.count -= count
