"""Which entries are in memory, and which are still to be read: bounded, and nothing twice.

Knows: ids, sizes, times and waiters. Must never know: what becomes of an entry.

An entry is found in one of two ways. New ones by id: either they go into memory when they are
stored, or their ids are remembered as backlog. Those that are put off, by their sender or for a
retry, by the time they fall due; their rows stay as they are when they are read, so the store is
told which of them are in memory already. Whoever is too late on disk is read only to be given up.

Those that share an ordering key come into memory one at a time (`reliablepub._core.turns`): when
one has left, the store is asked for the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from reliablepub._core.turns import Turns
from reliablepub.outbox.entry import Entry, Store, Waiter
from reliablepub.relay.backlog import Backlog
from reliablepub.relay.deadlines import Deadlines
from reliablepub.relay.waiters import Waiters

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
        self._turns = Turns()
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
        return bool(self._turns.wanted) and has_room

    @property
    def _is_low(self) -> bool:
        return self._messages <= self._messages_max // 2 and self._bytes <= self._bytes_max // 2

    @property
    def room(self) -> int:
        """How many messages may be added."""
        return self._messages_max - self._messages - self._turns.wanted

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
                self._turns.leave(key, entry.id, is_settled=is_settled)

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

    def stored(
        self,
        entries: Sequence[Entry],
        in_memory: Sequence[Entry],
        waiter: Waiter | None,
        *,
        is_loaded: bool,
    ) -> None:
        """New entries of one waiter, and those of them that are in memory already.

        Args:
            entries: all of them.
            in_memory: as far as they may go at once, if ``is_loaded``.
            waiter: theirs.
            is_loaded: whether all others have to wait for something.
        """
        first, last = entries[0].id, entries[-1].id
        if is_loaded:
            self._backlog.loaded(first, last)
        else:
            self._backlog.others(last)
        for entry in in_memory:
            if entry.expires_at is not None:
                self._deadlines.watch(entry)
        if len(in_memory) == len(entries):
            return
        ids = {entry.id for entry in in_memory}
        for entry in entries:
            if entry.id not in ids:
                self._on_disk(entry)
                if is_loaded and entry.message.ordering_key is not None:
                    self._turns.want(entry.message.ordering_key)
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
        return key is None or self._turns.admit(key, entry.id)

    def _read_turns(self, wall: float) -> list[Entry]:
        if not self._wants_turns:
            return []
        keys = self._turns.next_wanted(min(PAGE, self._messages_max - self._messages))
        entries, looked_at = self._store.read_first(keys, wall, bytes_max=self.room_bytes)
        for key in keys[looked_at:]:
            self._turns.want(key)
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
