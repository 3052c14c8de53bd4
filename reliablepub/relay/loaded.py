"""Which entries are in memory, and which are still to be read: bounded, and nothing twice.

Knows: ids, sizes, times and waiters. Must never know: what becomes of an entry.

An entry is found in one of two ways. New ones by id: either they go into memory when they are
stored, or their ids are remembered as backlog, a short list of ranges (ids only grow, and become
visible in their order). Postponed ones by the time they fall due; their rows stay as they are when
they are read, so the store is told which of them are in memory already. Expired entries are read
only to be given up; of what is in memory the earliest deadline is remembered, and an index finds
what is on disk.

Entries that share an ordering key come into memory one at a time (`reliablepub._core.ordering`):
when one has left, the store is asked for the next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from reliablepub._core.ordering import KeyOrder
from reliablepub.outbox.entry import Entry, Store, Waiter
from reliablepub.relay.handover import Chunk


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


@dataclass(slots=True)
class _Range:
    """Ids ``first`` to ``last`` of one waiter, but for the ones that are in memory by now."""

    first: int
    last: int
    waiter: Waiter
    taken: set[int]


class Waiters:
    """Waiters of entries that are on disk only, by id: one range for a chunk of many messages."""

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


_NEVER = float("inf")


class Deadlines:
    """When the next entry is too late.

    Args:
        wall: now; entries of earlier runs may be too late already.
    """

    def __init__(self, wall: float) -> None:
        self._watched: dict[int, Entry] = {}
        self._next_watched = _NEVER
        self._next_on_disk = wall
        self._looked_at = wall

    @property
    def watched(self) -> Container[int]:
        """Ids of the entries in memory that have a deadline."""
        return self._watched

    @property
    def next_at(self) -> float | None:
        """When something has to be done (wall clock), or None."""
        next_at = min(self._next_watched, self._next_on_disk)
        return None if next_at == _NEVER else next_at

    def is_due_on_disk(self, wall: float) -> bool:
        """Whether there are late entries to be read."""
        return self._next_on_disk <= wall

    @property
    def entries(self) -> Collection[Entry]:
        """Entries in memory that have a deadline."""
        return self._watched.values()

    def step(self, wall: float) -> None:
        """The wall clock was set, and all deadlines with it: look at each of them."""
        self._next_watched = wall

    def watch(self, entry: Entry) -> None:
        """An entry is in memory from now on."""
        if entry.expires_at is not None:
            self._watched[entry.id] = entry
            self._next_watched = min(self._next_watched, entry.expires_at)

    def forget(self, entry: Entry) -> None:
        """An entry has left memory for good."""
        self._watched.pop(entry.id, None)

    def on_disk(self, expires_at: float | None) -> None:
        """An entry is on disk only; or, as far as is known then, the earliest one of all."""
        if expires_at is not None:
            self._next_on_disk = min(self._next_on_disk, expires_at)

    def read(self, next_on_disk: float | None) -> None:
        """Late entries have been read; the next one on disk is late at that time."""
        self._next_on_disk = _NEVER if next_on_disk is None else next_on_disk

    def late(self, wall: float) -> list[Entry]:
        """Entries in memory that are too late; perhaps not for the first time."""
        if self._next_watched > wall >= self._looked_at:
            self._looked_at = wall
            return []
        self._looked_at = wall  # should the clock be set back, what was late then is not now
        late = []
        self._next_watched = _NEVER
        for entry in self._watched.values():
            assert entry.expires_at is not None
            if entry.expires_at <= wall:
                late.append(entry)
            else:
                self._next_watched = min(self._next_watched, entry.expires_at)
        return late


PAGE: Final = 500
"""Rows read at once: no long cursors, so that the write-ahead log can be reset behind us."""


class Loaded:
    """Entries in memory, within limits, and where the next ones come from.

    Args:
        store: where entries are read from.
        last_id: highest id in it now: everything up to it is backlog.
        messages_max: most entries in memory.
        bytes_max: most bytes in memory.
        wall: now; postponed entries may have fallen due before.
    """

    def __init__(
        self, store: Store, *, last_id: int, messages_max: int, bytes_max: int, wall: float
    ) -> None:
        self._store = store
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._messages = 0
        self._bytes = 0
        self._backlog = Backlog(last_id)
        self._due: dict[int, Entry] = {}
        self._next_due: float | None = wall
        self._deadlines = Deadlines(wall)
        self._order = KeyOrder()
        self._waiters = Waiters()

    @property
    def has_backlog(self) -> bool:
        """Whether stored entries wait to be read; new ones must then wait behind them."""
        return bool(self._backlog)

    @property
    def next_due(self) -> float | None:
        """When the next postponed entry can be read (wall clock); None also if memory is full."""
        return self._next_due if self._is_low else None

    @property
    def next_late(self) -> float | None:
        """When the next entry is too late (wall clock), or None."""
        return self._deadlines.next_at

    @property
    def wants_more(self) -> bool:
        """Whether there is something to read and room for a page of it."""
        return (bool(self._backlog) and self._is_low) or self._wants_turns

    @property
    def _wants_turns(self) -> bool:
        """Those that follow others have room: it was left to them."""
        has_room = self._messages < self._messages_max and self._bytes < self._bytes_max
        return bool(self._order.wanted) and has_room

    @property
    def _is_low(self) -> bool:
        return self._messages <= self._messages_max // 2 and self._bytes <= self._bytes_max // 2

    @property
    def room(self) -> int:
        """How many messages may be added."""
        return self._messages_max - self._messages - self._order.wanted

    @property
    def room_bytes(self) -> int:
        """How many bytes may be added."""
        return self._bytes_max - self._bytes

    def fits(self, messages: int, bytes_: int) -> bool:
        """Whether so much may be added."""
        return messages <= self.room and bytes_ <= self.room_bytes

    def add(self, *entries: Entry) -> None:
        """Entries are in memory now."""
        self._messages += len(entries)
        self._bytes += sum([entry.message.size for entry in entries])

    def drop(self, *entries: Entry) -> None:
        """Entries have left the store, or never came into it."""
        self._leave(entries, is_settled=True)

    def _leave(self, entries: Sequence[Entry], *, is_settled: bool) -> None:
        self._messages -= len(entries)
        self._bytes -= sum([entry.message.size for entry in entries])
        for entry in entries:
            if self._due:
                self._due.pop(entry.id, None)
            if entry.expires_at is not None:
                self._deadlines.forget(entry)
            if (key := entry.message.ordering_key) is not None:
                self._order.leave(key, entry.id, is_settled=is_settled)

    def postpone(self, entry: Entry) -> None:
        """An entry leaves memory until it falls due; its row says when. It is still its turn."""
        self._leave((entry,), is_settled=False)
        if entry.waiter is not None:
            self._waiters.put(entry.id, entry.waiter)
        self._on_disk(entry)

    def let_go(self, entry: Entry) -> None:
        """An entry leaves memory; what the store says of it holds."""
        self.drop(entry)
        if entry.waiter is not None:
            self._waiters.put(entry.id, entry.waiter)
        self._deadlines.on_disk(entry.expires_at)

    def take_out(self, id_: int, *, is_open: bool) -> Waiter | None:
        """An entry that is not in memory is due now, or was taken out of the store.

        Returns:
            who waits for it, if it is not open any more.
        """
        self._next_due = float("-inf")
        waiter = self._waiters.take(id_)
        if waiter is None or not is_open:
            return waiter
        self._waiters.put(id_, waiter)
        return None

    def stored(self, chunk: Chunk[Any]) -> None:
        """A chunk is in the store; some of its entries are in memory already."""
        entries, waiter = chunk.entries, chunk.waiter
        first, last = entries[0].id, entries[-1].id
        if chunk.is_loaded:
            self._backlog.loaded(first, last)
        else:
            self._backlog.others(last)
        for entry in chunk.loaded:
            if entry.expires_at is not None:
                self._deadlines.watch(entry)
        if len(chunk.loaded) == len(entries):
            return
        ids = {entry.id for entry in chunk.loaded}
        for entry in entries:
            if entry.id not in ids:
                self._on_disk(entry)
                if chunk.is_loaded and entry.message.ordering_key is not None:
                    self._order.want(entry.message.ordering_key)
        if waiter is not None:
            self._waiters.stored(first, last, waiter, in_memory=ids)

    def _on_disk(self, entry: Entry) -> None:
        """An entry is to be found again by its times."""
        self._deadlines.on_disk(entry.expires_at)
        if entry.due_at is not None:
            self._next_due = min(entry.due_at, self._next_due or entry.due_at)

    def others(self, last_id: int, wall: float) -> None:
        """Another process has changed the store: new ids, with or without times, or others due."""
        self._backlog.others(last_id)
        self._next_due = wall
        self._deadlines.on_disk(wall)

    def due_now(self, wall: float) -> None:
        """Entries on disk have been made due."""
        self._next_due = wall

    def step(self, by: float, wall: float, others: Iterable[Entry]) -> set[int]:
        """The wall clock was set: so are the times of entries in memory.

        Args:
            by: seconds.
            wall: now.
            others: which have been put off, and are about to leave memory.

        Returns:
            ids of all that were moved.
        """
        timed = {*self._deadlines.entries, *self._due.values(), *others}
        for entry in timed:
            entry.step(by)
        self._deadlines.step(wall)
        return {entry.id for entry in timed}

    def stepped(self, wall: float) -> None:
        """The times of entries on disk have been set with the clock."""
        self._next_due = wall
        self._deadlines.on_disk(wall)

    def read(self, wall: float) -> list[Entry]:
        """Read what is due and what comes next, if memory is half empty; and whose turn it is.

        Raises:
            Intervened: as `Store.read_due`; nothing was read.
        """
        found: list[Entry] = []
        if self._is_low:
            found = self._read_due(wall) + self._read_backlog()
        found += self._read_turns(wall)
        late = self._deadlines.watched  # which may have been read already, only to be given up
        entries = [entry for entry in found if entry.id not in late and self._is_admitted(entry)]
        self._due.update((entry.id, entry) for entry in entries if entry.due_at is not None)
        self._have_read(entries)
        return entries

    def _is_admitted(self, entry: Entry) -> bool:
        key = entry.message.ordering_key
        return key is None or self._order.admit(key, entry.id)

    def _read_turns(self, wall: float) -> list[Entry]:
        if not self._wants_turns:
            return []
        keys = self._order.next_wanted(min(PAGE, self._messages_max - self._messages))
        entries, looked_at = self._store.read_first(keys, wall, bytes_max=self.room_bytes)
        for key in keys[looked_at:]:
            self._order.want(key)
        return entries

    def late(self, wall: float) -> list[Entry]:
        """Entries in memory that are too late; perhaps not for the first time."""
        return self._deadlines.late(wall)

    def read_late(self, wall: float) -> list[Entry]:
        """Read a page of those that are not; they count as being in memory until they are gone."""
        if not self._deadlines.is_due_on_disk(wall):
            return []
        entries, next_at = self._store.read_expired(
            wall, limit=PAGE, bytes_max=self._bytes_max // 2, loaded=self._deadlines.watched
        )
        self._deadlines.read(next_at)
        self._have_read(entries)
        return entries

    def _have_read(self, entries: Sequence[Entry]) -> None:
        self.add(*entries)
        for entry in entries:
            entry.waiter = self._waiters.take(entry.id)
            self._deadlines.watch(entry)

    def _read_due(self, wall: float) -> list[Entry]:
        if self._next_due is None or self._next_due > wall:
            return []
        entries, self._next_due = self._store.read_due(
            wall, limit=PAGE, bytes_max=self._bytes_max // 2, loaded=self._due
        )
        return entries

    def _read_backlog(self) -> list[Entry]:
        head = self._backlog.head
        if head is None:
            return []
        entries, looked_at = self._store.read_ready(
            head.first, head.last, limit=PAGE, bytes_max=self._bytes_max // 2
        )
        self._backlog.advance(looked_at)
        return entries
