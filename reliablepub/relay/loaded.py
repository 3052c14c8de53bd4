"""The entries in memory, and what to read next: memory is bounded, and no entry is loaded twice.

Knows: ids, sizes, times and waiters. Must never know: the outcome of an entry.

The relay finds an entry in one of two ways:

- A new entry by its id. It is loaded when it is stored; or its id joins the backlog, a short list
  of ranges. Most ids are higher than all before; the store names those that come late.
- A postponed entry by its due time. Reading does not mark its row, so each read tells the store
  which due entries are in memory already, or must let another of their key go first.

Expired entries are read only to be given up. For entries in memory, the earliest deadline is kept;
entries on disk are found by an index.

Entries that share an ordering key are loaded one at a time (`reliablepub._core.ordering`). When one
has left memory, the relay asks the store for the next.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, filterfalse
from operator import attrgetter
from typing import Any, Final
from weakref import ref

from reliablepub._core.ordering import KeyOrder
from reliablepub.outbox.entry import TRANSIENT, Entry, Snapshot, Store, Waiter, is_plain, size_of
from reliablepub.relay.handover import Chunk


@dataclass(slots=True)
class IdRange:
    """Ids ``first`` to ``last`` inclusive."""

    first: int
    last: int


_FIRST: Final = attrgetter("first")
_LAST: Final = attrgetter("last")


class Backlog:
    """Ranges of ids that are still to be read: late ones first, then the others, lowest first."""

    def __init__(self, last_id: int) -> None:
        self._ranges: deque[IdRange] = deque()
        self._late: list[IdRange] = []  # in order, and apart from each other
        self._seen = 0
        self.others(last_id)  # at the start, all ids in the store are unread

    def __bool__(self) -> bool:
        """Whether anything is unread."""
        return bool(self._ranges or self._late)

    def others(self, last_id: int) -> None:
        """Add the ids up to this one that are not known yet."""
        if last_id <= self._seen:
            return
        if self._ranges and self._ranges[-1].last == self._seen:
            self._ranges[-1].last = last_id
        else:
            self._ranges.append(IdRange(self._seen + 1, last_id))
        self._seen = last_id

    def late(self, first: int, last: int) -> None:
        """Add known ids whose entries have become visible now, unless they are unread anyway."""
        for unread in self._ranges:
            if first < unread.first:
                self._add_late(first, min(last, unread.first - 1))
            first = max(first, unread.last + 1)
            if first > last:
                return
        self._add_late(first, last)

    def _add_late(self, first: int, last: int) -> None:
        """Add ids, in one range with those that they touch: no id may be read twice."""
        begin = bisect_left(self._late, first - 1, key=_LAST)
        end = bisect_right(self._late, last + 1, key=_FIRST)
        for other in self._late[begin:end]:
            first, last = min(first, other.first), max(last, other.last)
        self._late[begin:end] = [IdRange(first, last)]

    def loaded(self, first: int, last: int) -> None:
        """Skip new ids: their entries are in memory, or are found by their times or their key."""
        self.others(first - 1)
        self._seen = max(self._seen, last)

    @property
    def head(self) -> IdRange | None:
        """The range to read from next."""
        ranges = self._late or self._ranges
        return ranges[0] if ranges else None

    def advance(self, last_read: int) -> None:
        """Remove the ids up to this one, which have been read, from the head range."""
        ranges = self._late or self._ranges
        head = ranges[0]
        head.first = last_read + 1
        if head.first > head.last:
            del ranges[0]


@dataclass(slots=True)
class _Range:
    """Ids ``first`` to ``last`` of one waiter, except those in ``taken``, which were loaded."""

    first: int
    last: int
    waiter: ref[Waiter]
    taken: set[int]


_CROWDED_MIN: Final = 1_000


class Waiters:
    """Waiters of entries that are not in memory, by id; a chunk of messages takes one range."""

    def __init__(self) -> None:
        # Waiters are referenced weakly: an outage may last, and most applications drop receipts.
        self._firsts: list[int] = []
        self._ranges: list[_Range] = []
        self._single: dict[int, ref[Waiter]] = {}
        self._crowded_at = _CROWDED_MIN

    def __len__(self) -> int:
        """The number of ranges and single ids."""
        return len(self._ranges) + len(self._single)

    @property
    def are_wanted(self) -> bool:
        """Whether an application still holds a receipt."""
        waiters = chain(self._single.values(), (found.waiter for found in self._ranges))
        return any(waiter() is not None for waiter in waiters)

    def stored(self, first: int, last: int, waiter: Waiter, *, apart: set[int]) -> None:
        """Remember the waiter of new ids, higher than all before, except those ``apart``."""
        if first == last:  # removing one of a million ranges moves all after it
            self.put(first, waiter)
            return
        self._firsts.append(first)
        # Entries ``apart`` hold the waiter themselves, or are not the waiter's.
        self._ranges.append(_Range(first, last, ref(waiter), apart))
        self._sweep_if_crowded()

    def put(self, id_: int, waiter: Waiter) -> None:
        """Remember the waiter of an entry that has left memory."""
        self._single[id_] = ref(waiter)
        self._sweep_if_crowded()

    def take(self, id_: int) -> Waiter | None:
        """Remove and return the waiter of an entry that is loaded now; None if it has none."""
        waiter = self._single.pop(id_, None)
        if waiter is not None:
            return waiter()
        index = bisect_right(self._firsts, id_) - 1
        if index < 0:
            return None
        found = self._ranges[index]
        if found.last < id_ or id_ in found.taken:
            return None
        found.taken.add(id_)
        if len(found.taken) > found.last - found.first:
            del self._firsts[index], self._ranges[index]
        return found.waiter()

    def _sweep_if_crowded(self) -> None:
        """Forget dropped waiters, each time that the number of all has doubled."""
        if len(self) <= self._crowded_at:
            return
        left = self._single.items()
        self._single = {id_: waiter for id_, waiter in left if waiter() is not None}
        self._ranges = [found for found in self._ranges if found.waiter() is not None]
        self._firsts = [found.first for found in self._ranges]
        self._crowded_at = max(_CROWDED_MIN, 2 * len(self))


_NEVER = float("inf")


class Deadlines:
    """Tracks when the next entry expires."""

    def __init__(self, wall: float) -> None:
        self._watched: dict[int, Entry] = {}
        self._next_watched = _NEVER
        self._next_on_disk = wall  # entries of earlier runs may have expired already
        self._looked_at = wall

    @property
    def watched(self) -> dict[int, Entry]:
        """The entries in memory that have a deadline, by id."""
        return self._watched

    @property
    def next_at(self) -> float | None:
        """When the next entry expires (wall clock), or None."""
        next_at = min(self._next_watched, self._next_on_disk)
        return None if next_at == _NEVER else next_at

    def is_due(self, wall: float) -> bool:
        """Whether entries may have expired, in memory or on disk. Asked each turn."""
        if wall < self._looked_at:  # the clock was set back: expired entries may be in time again
            self._next_watched = wall
        self._looked_at = wall
        return self._next_watched <= wall or self._next_on_disk <= wall

    def is_due_on_disk(self, wall: float) -> bool:
        """Whether expired entries may be on disk."""
        return self._next_on_disk <= wall

    def watch(self, entry: Entry) -> None:
        """Track an entry that is in memory now."""
        if entry.expires_at is not None:
            self._watched[entry.id] = entry
            self._next_watched = min(self._next_watched, entry.expires_at)

    def forget(self, entry: Entry) -> None:
        """Stop tracking an entry that has left memory."""
        self._watched.pop(entry.id, None)

    def on_disk(self, expires_at: float | None) -> None:
        """Note a deadline of an entry on disk, or a time before which none on disk expires."""
        if expires_at is not None:
            self._next_on_disk = min(self._next_on_disk, expires_at)

    def read(self, next_on_disk: float | None) -> None:
        """Note that expired entries were read, and when the next one on disk expires."""
        self._next_on_disk = _NEVER if next_on_disk is None else next_on_disk

    def late(self, wall: float) -> list[Entry]:
        """Entries in memory that have expired; earlier calls may have returned some of them."""
        if self._next_watched > wall:
            return []
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
"""Entries in one read. While a read lasts, SQLite cannot reset its log."""


class Loaded:
    """Counts the entries in memory, and reads further ones from the store."""

    def __init__(
        self,
        store: Store,
        *,
        last_id: int,  # highest one in the store now; all up to it are backlog
        messages_max: int,
        bytes_max: int,
        wall: float,
        waiters: Waiters | None = None,  # of an earlier run
    ) -> None:
        self._store = store
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._messages = 0
        self._bytes = 0
        self._backlog = Backlog(last_id)
        self._is_passing = False
        self.is_connecting = False  # to the broker; set before `read`
        self._due: dict[int, Entry] = {}
        self._next_due: float | None = wall  # postponed entries may be due already
        self._deadlines = Deadlines(wall)
        self._late_page: Sequence[int] = ()
        self._order = KeyOrder()
        self.waiters: Final = waiters or Waiters()

    @property
    def has_backlog(self) -> bool:
        """Whether stored entries wait to be read. New entries must then wait behind them."""
        return bool(self._backlog)

    @property
    def is_empty(self) -> bool:
        """Whether no entry is in memory, and none is known that is to be read, now or later."""
        is_unread = self._backlog or self._order.wanted or self._next_due is not None
        return not (self._messages or is_unread)

    @property
    def next_due(self) -> float | None:
        """When the next postponed entry is due (wall clock); None also while memory is full."""
        return self._next_due if self._next_due is not None and self._is_low else None

    @property
    def next_late(self) -> float | None:
        """When the next entry expires (wall clock), or None."""
        return self._deadlines.next_at

    def is_due(self, wall: float) -> bool:
        """Whether `read`, `late` or `read_late` may find an entry. Asked each turn."""
        is_due = self._next_due is not None and self._next_due <= wall
        is_late = self._deadlines.is_due(wall)
        return is_due or is_late or bool(self._backlog or self._order.wanted)

    @property
    def wants_more(self) -> bool:
        """Whether there are entries to read and room for them."""
        if not (self._order.wanted or self._backlog):
            return False  # as in most turns
        return (self._is_low and self._reads_backlog) or self._wants_next_of_keys

    @property
    def _reads_backlog(self) -> bool:
        # Millions of entries that wait for their time are passed page by page. A handshake takes
        # several turns: it would wait for a page in each.
        return bool(self._backlog) and not (self.is_connecting and self._is_passing)

    @property
    def _wants_next_of_keys(self) -> bool:
        """Whether there are keys whose next entry is to be read, and room for an entry."""
        if not self._order.wanted:
            return False
        # `room` leaves space for one entry of each such key.
        return self._messages < self._messages_max and self._bytes < self._bytes_max

    @property
    def _is_low(self) -> bool:
        return self._messages <= self._messages_max // 2 and self._bytes <= self._bytes_max // 2

    @property
    def room(self) -> int:
        """How many more messages memory has room for."""
        return self._messages_max - self._messages - len(self._order.wanted)

    @property
    def room_bytes(self) -> int:
        """How many more bytes memory has room for."""
        return self._bytes_max - self._bytes

    def fits(self, messages: int, bytes_: int) -> bool:
        """Whether memory has room for so many messages and bytes."""
        held = self._messages + len(self._order.wanted) + messages
        return held <= self._messages_max and self._bytes + bytes_ <= self._bytes_max

    def add(self, *entries: Entry) -> None:
        """Count entries that are in memory now."""
        self._messages += len(entries)
        self._bytes += sum(map(size_of, entries))

    def drop(self, *entries: Entry) -> None:
        """Remove entries that have left the store, or were never stored."""
        self._leave(entries, is_settled=True)

    def _leave(self, entries: Sequence[Entry], *, is_settled: bool) -> None:
        self._messages -= len(entries)
        self._bytes -= sum(map(size_of, entries))
        for entry in filterfalse(is_plain, entries):
            self._due.pop(entry.id, None)
            if entry.expires_at is not None:
                self._deadlines.forget(entry)
            key = entry.message.ordering_key
            if key is not None and self._order.leave(key, entry.id, is_settled=is_settled):
                self._next_due = float("-inf")  # `_read_due` has left out those that were passed

    def postpone(self, entry: Entry) -> None:
        """Remove an entry until it is due, as its row says. It remains the next of its key."""
        self._leave((entry,), is_settled=False)
        if entry.waiter is not None:
            self.waiters.put(entry.id, entry.waiter)
        self._on_disk(entry)

    def unload(self, entry: Entry) -> None:
        """Remove an entry that an operator has changed; what the store holds of it counts."""
        self.drop(entry)
        if entry.waiter is not None:
            self.waiters.put(entry.id, entry.waiter)
        self._deadlines.on_disk(entry.expires_at)

    def changed_on_disk(
        self, id_: int, *, is_open: bool, ordering_key: str | None = None
    ) -> Waiter | None:
        """Note a change to an entry not in memory; return the waiter to tell if it is not open."""
        self._next_due = float("-inf")  # the entry may be due now
        if ordering_key is not None:
            self._order.want(ordering_key)
        waiter = self.waiters.take(id_)
        if waiter is None or not is_open:
            return waiter
        self.waiters.put(id_, waiter)
        return None

    def stored(self, chunk: Chunk[Any]) -> None:
        """Note that a chunk was committed. Its ``loaded`` entries are in memory already."""
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
            if last - first >= len(entries):  # ids between them are those of other processes
                ids |= {*range(first, last)} - {entry.id for entry in entries}
            self.waiters.stored(first, last, waiter, apart=ids)

    def _on_disk(self, entry: Entry) -> None:
        """Note the times by which an entry on disk is found again."""
        self._deadlines.on_disk(entry.expires_at)
        if entry.due_at is not None:
            is_next = self._next_due is None or entry.due_at < self._next_due
            self._next_due = entry.due_at if is_next else self._next_due

    def others(self, snapshot: Snapshot, wall: float) -> None:
        """Note that another process has changed the store: entries may be new, due or expired."""
        self._backlog.others(snapshot.last_id)
        for first, last in snapshot.late:
            self._backlog.late(first, last)
        self._next_due = wall
        self._deadlines.on_disk(wall)

    def due_now(self, wall: float) -> None:
        """Note that entries on disk were made due."""
        self._next_due = wall

    def rebase(self, by: float, postponed: Iterable[Entry]) -> set[int]:
        """Move the times of retries in memory, as the wall clock was set; return their ids.

        Those that are postponed are about to leave memory.
        """
        timed = {*self._due.values(), *postponed}
        for entry in timed:
            entry.rebase(by)
        return {entry.id for entry in timed}

    def read(self, wall: float) -> list[Entry]:
        """Read a page of entries to send. If this raises, nothing was read."""
        found: list[Entry] = []
        kinds: list[Callable[[float], list[Entry]]] = []
        if self._is_low:  # entries that are next of their key need only room
            kinds.append(self._read_due)
            if self._reads_backlog:
                kinds.append(self._read_backlog)
        for read in (*kinds, self._read_next_of_keys):
            try:
                found += read(wall)
            except TRANSIENT:
                if not found:
                    raise
                break  # entries read so far must be returned: they are not read again
        late = self._deadlines.watched  # `read_late` may have loaded some already, to give them up
        entries = [entry for entry in found if entry.id not in late and self._is_admitted(entry)]
        self._due.update((entry.id, entry) for entry in entries if entry.due_at is not None)
        self._have_read(entries)
        return entries

    def _is_admitted(self, entry: Entry) -> bool:
        key = entry.message.ordering_key
        return key is None or self._order.admit(key, entry.id)

    def _read_next_of_keys(self, wall: float) -> list[Entry]:
        if not self._wants_next_of_keys:
            return []
        keys = self._order.next_wanted(min(PAGE, self._messages_max - self._messages))
        looked_at = 0
        try:
            entries, looked_at = self._store.read_first(keys, wall, bytes_max=self.room_bytes)
        finally:
            for key in keys[looked_at:]:
                self._order.want(key)
        return entries

    def late(self, wall: float) -> list[Entry]:
        """Entries in memory that have expired; earlier calls may have returned some of them."""
        return self._deadlines.late(wall)

    def read_late(self, wall: float) -> list[Entry]:
        """Read a page of expired entries from the store; they are in memory until given up."""
        if not self._deadlines.is_due_on_disk(wall):
            return []
        # A page at a time: while no commit succeeds, further ones would fill the memory.
        if any(id_ in self._deadlines.watched for id_ in self._late_page):
            return []
        entries, next_at = self._store.read_expired(
            wall, limit=PAGE, bytes_max=self._bytes_max // 2, loaded=self._deadlines.watched
        )
        self._deadlines.read(next_at)
        self._late_page = [entry.id for entry in entries]
        self._have_read(entries)
        return entries

    def _have_read(self, entries: Sequence[Entry]) -> None:
        self.add(*entries)
        for entry in entries:
            entry.waiter = self.waiters.take(entry.id)
            self._deadlines.watch(entry)

    def _read_due(self, wall: float) -> list[Entry]:
        if self._next_due is None or self._next_due > wall:
            return []
        # Otherwise these could fill each page, and no other entry would be read.
        loaded = ChainMap[int, Any](self._due, self._order.passed, self._deadlines.watched)
        entries, self._next_due = self._store.read_due(
            wall, limit=PAGE, bytes_max=self._bytes_max // 2, loaded=loaded
        )
        return entries

    def _read_backlog(self, _: float) -> list[Entry]:
        head = self._backlog.head
        if head is None:
            return []
        entries, looked_at = self._store.read_ready(
            head.first, head.last, limit=PAGE, bytes_max=self._bytes_max // 2
        )
        self._backlog.advance(looked_at)
        self._is_passing = not entries
        return entries
