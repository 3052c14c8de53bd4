"""In-memory store, for a publisher without an outbox file. Nothing survives the process.

A parked message is not kept, so it does not hold its ordering key: no operator could release it.

Knows: the contract of `Store`. Must never know: SQL, files.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress, filterfalse, repeat
from typing import Final

from reliablepub.outbox.entry import (
    AT_ONCE,
    HELD,
    Changes,
    Counters,
    DamagedRow,
    Entry,
    HeldExchange,
    Release,
    Snapshot,
    Touched,
    id_of,
    is_plain,
    size_of,
)
from reliablepub.outcome import OutcomeKind

_CROWDED_MIN: Final = 1_000


class _Times:
    """A heap of times and entry ids. A time that differs from its entry's current one is stale."""

    def __init__(self, time_of: Callable[[int], float | None]) -> None:
        self._time_of = time_of  # None for an entry that has no time or is gone
        self._heap: list[tuple[float, int]] = []
        self._crowded_at = _CROWDED_MIN

    def add(self, at: float, id_: int) -> None:
        heapq.heappush(self._heap, (at, id_))
        if len(self._heap) > self._crowded_at:
            # Stale times are dropped each time the heap has doubled.
            self._heap = [item for item in set(self._heap) if self._time_of(item[1]) == item[0]]
            heapq.heapify(self._heap)
            self._crowded_at = max(_CROWDED_MIN, 2 * len(self._heap))

    def first(
        self, now: float, limit: int, loaded: Container[int]
    ) -> tuple[list[tuple[float, int]], float | None]:
        """Return at most ``limit`` times up to ``now``, with their ids, and the time after them."""
        found: list[tuple[float, int]] = []
        keep: list[tuple[float, int]] = []
        next_at: float | None = None
        while self._heap:
            at, id_ = item = heapq.heappop(self._heap)
            if self._time_of(id_) != at or (keep and keep[-1] == item):
                continue
            keep.append(item)
            if id_ in loaded:
                continue
            if at > now or len(found) >= limit:
                next_at = at
                break
            found.append(item)
        for item in keep:  # reading marks nothing
            heapq.heappush(self._heap, item)
        return found, next_at


class MemoryStore:
    """Keeps open entries in a dict. Parked ones are only counted: their caller was told why."""

    check: Final = None
    wall: Final = staticmethod(time.time)
    rest_s: Final = 0.05
    """A commit moves all times."""

    def __init__(self) -> None:
        self._open: dict[int, Entry] = {}
        self._waiting = _Times(self._due_at)
        self._expiring = _Times(self._expires_at)
        self._by_key: dict[str, deque[int]] = {}
        self._held: dict[str, dict[str, dict[int, None]]] = {}  # by exchange and routing key
        self._positions: dict[str, int] = {}
        self._snapshot = Snapshot(0, Counters())
        self._lowest_id = 1

    @property
    def run(self) -> int:
        """Always 1: no earlier run leaves anything behind."""
        return 1

    def snapshot(self) -> Snapshot:
        """Return the ledger and the highest id."""
        return self._snapshot

    def commit(self, changes: Changes) -> Snapshot:
        """Apply the changes of one turn. It cannot fail."""
        last_id, counters = self._snapshot.last_id, self._snapshot.counters
        if changes.rebase is not None:
            by_new_clock = changes.rebase.moved | {entry.id for entry in changes.rescheduled}
            self._rebase(changes.rebase.by, by_new_clock)
        assert not any(map(id_of, changes.new)), "an entry is stored already"
        for last_id, entry in enumerate(changes.new, last_id + 1):  # noqa: B020 - it goes on
            entry.id = last_id
        self._open.update(zip(map(id_of, changes.new), changes.new, strict=True))
        for entry in filterfalse(is_plain, changes.new):
            self._remember(entry)
        for name, count in changes.sources.items():
            self._positions[name] = self.position(name) + count
        confirmed, confirmed_bytes = self._take_out(changes.confirmed)
        is_expired = [attempt.outcome.kind is OutcomeKind.EXPIRED for attempt in changes.parked]
        given_up = [attempt.entry for attempt in changes.parked]
        expired, expired_bytes = self._take_out(compress(given_up, is_expired))
        parked, parked_bytes = self._take_out(given_up)  # the expired ones are gone already
        discarded, discarded_bytes = self._take_out(gone.entry for gone in changes.discarded)
        gone_bytes = confirmed_bytes + expired_bytes + parked_bytes + discarded_bytes
        open_bytes = counters.open_bytes + sum(map(size_of, changes.new)) - gone_bytes
        for entry in (*filterfalse(is_plain, changes.new), *changes.rescheduled):
            if entry.due_at is not None and entry.id in self._open:
                if entry.due_at == HELD:
                    self._remember_held(entry)
                else:
                    self._waiting.add(entry.due_at, entry.id)
        for release in changes.released:
            self._release(release)
        counters = replace(
            counters,
            stored=counters.stored + len(changes.new),
            confirmed=counters.confirmed + confirmed,
            parked=counters.parked + parked,
            expired=counters.expired + expired,
            discarded=counters.discarded + discarded,
            open_bytes=open_bytes,
        )
        self._snapshot = Snapshot(last_id, counters)
        return self._snapshot

    def _rebase(self, by: float, by_new_clock: Container[int]) -> None:
        for entry in self._open.values():
            if entry.id not in by_new_clock:
                entry.rebase(by)
            if entry.due_at not in {None, HELD} and entry.refused_at is not None:
                self._waiting.add(entry.due_at, entry.id)

    def _release(self, release: Release) -> None:
        """Make held entries due, lowest ids first."""
        exchanges = (
            [self._held.get(release.exchange, {})]
            if release.exchange is not None
            else (self._held.values())
        )
        held = [
            id_
            for exchange in exchanges
            for routing_key, ids in exchange.items()
            if release.routing_key in {None, routing_key}
            for id_ in ids
        ]
        chosen = heapq.nsmallest(release.limit, (id_ for id_ in held if id_ > release.after))
        for id_ in chosen:
            entry = self._open[id_]
            self._forget_held(entry)
            entry.due_at = AT_ONCE
            self._waiting.add(AT_ONCE, id_)
        release.count = len(chosen)
        release.last = chosen[-1] if chosen else 0
        if release.is_counted:
            release.left = len(held) - len(chosen)

    def _remember_held(self, entry: Entry) -> None:
        message = entry.message
        routing_keys = self._held.setdefault(message.exchange, {})
        routing_keys.setdefault(message.routing_key, {})[entry.id] = None

    def _forget_held(self, entry: Entry) -> None:
        message = entry.message
        routing_keys = self._held.get(message.exchange, {})
        ids = routing_keys.get(message.routing_key, {})
        ids.pop(entry.id, None)
        if not ids:
            routing_keys.pop(message.routing_key, None)
        if not routing_keys:
            self._held.pop(message.exchange, None)

    def _take_out(self, entries: Iterable[Entry]) -> tuple[int, int]:
        """Remove entries; return how many of them were open, and their bytes."""
        gone = list(map(self._open.pop, map(id_of, entries), repeat(None)))
        if self._held:
            for entry in gone:
                if entry is not None:
                    self._forget_held(entry)
        left = list(filter(None, gone))
        for entry in filterfalse(is_plain, left):
            self._leave_key(entry)
        return len(left), sum(map(size_of, left))

    def read_ready(
        self, first_id: int, last_id: int, *, limit: int, bytes_max: int
    ) -> tuple[list[Entry], int]:
        """Read entries with ``first_id <= id <= last_id`` that are due now, lowest ids first."""
        entries: list[Entry] = []
        size = 0
        first_id = max(first_id, self._lowest_open())
        for id_ in range(first_id, min(last_id, self._snapshot.last_id) + 1):
            entry = self._open.get(id_)
            if entry is None or entry.due_at is not None or not self._is_first(entry):
                continue
            size += entry.message.size
            if len(entries) >= limit or (entries and size > bytes_max):
                return entries, id_ - 1
            entries.append(entry)
        return entries, last_id

    def read_first(
        self, keys: Sequence[str], now: float, *, bytes_max: int
    ) -> tuple[list[Entry], int]:
        """Read the first open entry of each ordering key, if it is due."""
        entries: list[Entry] = []
        size = 0
        for index, key in enumerate(keys):
            entry = self._first_of(key)
            if entry is None or (entry.due_at is not None and entry.due_at > now):
                continue
            size += entry.message.size
            if entries and size > bytes_max:
                return entries, index
            entries.append(entry)
        return entries, len(keys)

    def read_due(
        self, now: float, *, limit: int, bytes_max: int, loaded: Container[int]
    ) -> tuple[list[Entry], float | None]:
        """Read entries whose ``due_at`` has passed and whose id is not in ``loaded``."""
        found, next_at = self._read_timed(self._waiting, now, limit, bytes_max, loaded)
        entries = [entry for entry in found if self._is_first(entry)]
        for entry in found:
            if not self._is_first(entry):
                entry.due_at = None
        return entries, next_at

    def read_expired(
        self, now: float, *, limit: int, bytes_max: int, loaded: Container[int]
    ) -> tuple[list[Entry], float | None]:
        """Read entries whose ``expires_at`` has passed and whose id is not in ``loaded``."""
        return self._read_timed(self._expiring, now, limit, bytes_max, loaded)

    def lowest_awaited(self, first_id: int, at: float) -> int | None:
        """Return the lowest open id, from ``first_id`` on, that was to be sent by ``at``."""
        for id_ in self._ids_from(first_id):
            entry = self._open.get(id_)
            if entry is None or not _is_awaited(entry, at):
                continue
            key = entry.message.ordering_key
            first = None if key is None else self._first_of(key)
            if first is None or _is_awaited(first, at):
                return id_
        return None

    def _read_timed(
        self, times: _Times, now: float, limit: int, bytes_max: int, loaded: Container[int]
    ) -> tuple[list[Entry], float | None]:
        found, next_at = times.first(now, limit, loaded)
        entries: list[Entry] = []
        size = 0
        for at, id_ in found:
            entry = self._open[id_]
            size += entry.message.size
            if entries and size > bytes_max:
                return entries, at
            entries.append(entry)
        return entries, next_at

    def _remember(self, entry: Entry) -> None:
        """Index an entry by its deadline and by its ordering key."""
        if entry.expires_at is not None:
            self._expiring.add(entry.expires_at, entry.id)
        if entry.message.ordering_key is not None:
            self._by_key.setdefault(entry.message.ordering_key, deque()).append(entry.id)

    def _leave_key(self, entry: Entry) -> None:
        """Remove an entry that is gone from its key; it may have expired behind others."""
        key = entry.message.ordering_key
        if key is not None:
            ids = self._by_key[key]
            ids.remove(entry.id)
            if not ids:
                del self._by_key[key]

    def _is_first(self, entry: Entry) -> bool:
        key = entry.message.ordering_key
        return key is None or self._first_of(key) is entry

    def _first_of(self, key: str) -> Entry | None:
        """Return the open entry of this key that was stored first."""
        ids = self._by_key.get(key)
        return self._open[ids[0]] if ids else None

    def _due_at(self, id_: int) -> float | None:
        entry = self._open.get(id_)
        return None if entry is None else entry.due_at

    def _expires_at(self, id_: int) -> float | None:
        entry = self._open.get(id_)
        return None if entry is None else entry.expires_at

    def _ids_from(self, first_id: int) -> Iterable[int]:
        """Return the ids from ``first_id`` on, in order; if most are gone, only the open ones."""
        # Between an entry for tomorrow and the next open one may lie millions of ids.
        ids = range(max(first_id, self._lowest_open()), self._snapshot.last_id + 1)
        return ids if len(ids) <= len(self._open) else (id_ for id_ in self._open if id_ in ids)

    def _lowest_open(self) -> int:
        """Return the lowest open id, or the highest id plus 1 if none is open."""
        while self._lowest_id <= self._snapshot.last_id and self._lowest_id not in self._open:
            self._lowest_id += 1  # ids only grow, so the search goes on where it ended
        return self._lowest_id

    def missed(self, id_: int) -> None:
        """Do nothing: what hides a message from reads will hide it from the next ones."""

    def held_exchanges(self, limit: int) -> list[HeldExchange]:  # noqa: ARG002 - of the contract
        """Return nothing: no entry is held from an earlier run."""
        return []

    @property
    def bell(self) -> None:
        """None: other processes cannot write to this store."""
        return

    def changed_elsewhere(self) -> bool:
        """Return False: other processes cannot write to this store."""
        return False

    def may_have_changed(self) -> bool:
        """Return False: other processes cannot write to this store."""
        return False

    def relieve(self) -> str:
        """Return an empty text: the relay limits what is in memory."""
        return ""

    def show(self, status: Mapping[str, object]) -> None:
        """Do nothing: other processes cannot see this store."""

    def damaged(self) -> list[DamagedRow]:
        """Return nothing: entries in memory are not checked for damage."""
        return []

    def touched(self) -> list[Touched]:
        """Return nothing: operators cannot reach this store."""
        return []

    def position(self, source: str) -> int:
        """Return how many entries of a named source were stored."""
        return self._positions.get(source, 0)

    def close(self, last: Mapping[str, object] | None = None) -> None:  # noqa: ARG002 - not shown
        """Drop all entries."""
        self._open.clear()


def _is_awaited(entry: Entry, at: float) -> bool:
    """Whether an entry was to be sent by ``at``: it waits for no time that its sender chose."""
    if entry.due_at is None or entry.due_at <= at or entry.due_at == HELD:
        return True
    return bool(entry.nacked + entry.returned + entry.refused) or entry.refused_at is not None
