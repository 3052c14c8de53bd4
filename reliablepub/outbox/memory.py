"""The store of a publisher without a disk: the same contract, and nothing survives the process.

Knows: the contract of `Store`. Must never know: SQL, files.
"""

from __future__ import annotations

import heapq
from collections.abc import Container
from dataclasses import replace

from reliablepub.outbox.entry import Counters, Entry, Snapshot, Turn
from reliablepub.outcome import OutcomeKind


class MemoryStore:
    """Open entries in a dict; parked ones are only counted, because their caller was told."""

    def __init__(self) -> None:
        self._open: dict[int, Entry] = {}
        # Times and ids; one that disagrees with its entry is stale, and skipped when it is met.
        self._waiting: list[tuple[float, int]] = []
        self._positions: dict[str, int] = {}
        self._snapshot = Snapshot(0, Counters())
        self._lowest_id = 1

    @property
    def run(self) -> int:
        """Always the first: nothing is left of an earlier one."""
        return 1

    def snapshot(self) -> Snapshot:
        """The ledger and the highest id."""
        return self._snapshot

    def commit(self, turn: Turn) -> Snapshot:
        """Take one turn; it cannot fail."""
        last_id, counters = self._snapshot.last_id, self._snapshot.counters
        size = 0
        for entry in turn.new:
            assert entry.id == 0, f"{entry.message!r} is stored already"
            last_id += 1
            entry.id = last_id
            self._open[last_id] = entry
            size += entry.message.size
        for name, count in turn.sources.items():
            self._positions[name] = self.position(name) + count
        confirmed = parked = expired = 0
        for entry in turn.confirmed:
            if self._open.pop(entry.id, None):
                confirmed += 1
                size -= entry.message.size
        for attempt in turn.parked:
            if self._open.pop(attempt.entry.id, None):
                is_expired = attempt.outcome.kind is OutcomeKind.EXPIRED
                expired += is_expired
                parked += not is_expired
                size -= attempt.entry.message.size
        for entry in (*turn.new, *turn.rescheduled):
            if entry.due_at is not None and entry.id in self._open:
                heapq.heappush(self._waiting, (entry.due_at, entry.id))
        counters = replace(
            counters,
            stored=counters.stored + len(turn.new),
            confirmed=counters.confirmed + confirmed,
            parked=counters.parked + parked,
            expired=counters.expired + expired,
            open_bytes=counters.open_bytes + size,
        )
        self._snapshot = Snapshot(last_id, counters)
        return self._snapshot

    def read_ready(self, first_id: int, last_id: int, *, limit: int, bytes_max: int) -> list[Entry]:
        """Entries with ``first_id <= id <= last_id`` that wait for nothing, lowest ids first."""
        entries: list[Entry] = []
        size = 0
        first_id = max(first_id, self.lowest_open() or 1)
        for id_ in range(first_id, min(last_id, self._snapshot.last_id) + 1):
            entry = self._open.get(id_)
            if entry is None or entry.due_at is not None:
                continue
            size += entry.message.size
            if len(entries) >= limit or (entries and size > bytes_max):
                break
            entries.append(entry)
        return entries

    def read_due(
        self, now: float, *, limit: int, bytes_max: int, loaded: Container[int]
    ) -> tuple[list[Entry], float | None]:
        """Entries whose ``due_at`` has come and whose id is not in ``loaded``, earliest first."""
        entries: list[Entry] = []
        keep: list[tuple[float, int]] = []
        next_due_at: float | None = None
        size = 0
        while self._waiting:
            due_at, id_ = heapq.heappop(self._waiting)
            entry = self._open.get(id_)
            if entry is None or entry.due_at != due_at or (keep and keep[-1] == (due_at, id_)):
                continue
            keep.append((due_at, id_))
            if id_ in loaded:
                continue
            size += entry.message.size
            if due_at > now or len(entries) >= limit or (entries and size > bytes_max):
                next_due_at = due_at
                break
            entries.append(entry)
        for item in keep:
            heapq.heappush(self._waiting, item)
        return entries, next_due_at

    def lowest_open(self) -> int | None:
        """Lowest id that is still open, or None."""
        if not self._open:
            return None
        while self._lowest_id not in self._open:  # ids only grow, so this never looks back
            self._lowest_id += 1
        return self._lowest_id

    def changed_elsewhere(self) -> bool:
        """Never: nobody else can see it."""
        return False

    def position(self, source: str) -> int:
        """How many entries of a named source have been stored."""
        return self._positions.get(source, 0)

    def close(self) -> None:
        """Forget everything."""
        self._open.clear()
        self._waiting.clear()
