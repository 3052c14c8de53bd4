"""Which entries are in memory, and which are still to be read: bounded, and nothing twice.

Knows: ids, sizes, due times and waiters. Must never know: what becomes of an entry.

An entry is found in one of two ways. New ones by id: either they go into memory when they are
stored, or their ids are remembered as backlog. Postponed ones by the time they fall due; their rows
stay as they are when they are read, so the store is told which of them are in memory already.
"""

from __future__ import annotations

from typing import Final

from reliablepub.outbox.entry import Entry, Store, Waiter
from reliablepub.relay.backlog import Backlog

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
        self._due: set[int] = set()
        self._next_due: float | None = wall
        self._waiters: dict[int, Waiter] = {}

    @property
    def has_backlog(self) -> bool:
        """Whether stored entries wait to be read; new ones must then wait behind them."""
        return bool(self._backlog)

    @property
    def next_due(self) -> float | None:
        """When the next postponed entry can be read (wall clock); None also if memory is full."""
        return self._next_due if self._is_low else None

    @property
    def wants_more(self) -> bool:
        """Whether there is something to read and room for a page of it."""
        return bool(self._backlog) and self._is_low

    @property
    def _is_low(self) -> bool:
        return self._messages <= self._messages_max // 2 and self._bytes <= self._bytes_max // 2

    @property
    def room(self) -> int:
        """How many messages may be added."""
        return self._messages_max - self._messages

    @property
    def room_bytes(self) -> int:
        """How many bytes may be added."""
        return self._bytes_max - self._bytes

    def fits(self, messages: int, bytes_: int) -> bool:
        """Whether so much may be added."""
        return messages <= self.room and bytes_ <= self.room_bytes

    def add(self, entry: Entry) -> None:
        """An entry is in memory now."""
        self._messages += 1
        self._bytes += entry.message.size

    def drop(self, entry: Entry) -> None:
        """An entry has left the store, or never came into it."""
        self._messages -= 1
        self._bytes -= entry.message.size
        self._due.discard(entry.id)

    def postpone(self, entry: Entry) -> None:
        """An entry leaves memory until it falls due; its row says when."""
        self.drop(entry)
        if entry.waiter is not None:
            self._waiters[entry.id] = entry.waiter
        if entry.due_at is not None:
            self._next_due = min(entry.due_at, self._next_due or entry.due_at)

    def stored(self, first: int, last: int, waiter: Waiter | None, *, is_loaded: bool) -> None:
        """New ids: in memory already, or to be read later."""
        if is_loaded:
            self._backlog.loaded(first, last)
        else:
            self._backlog.spilled(first, last, waiter)

    def others(self, last_id: int, wall: float) -> None:
        """Another process has changed the store: new ids, or postponed entries made due."""
        self._backlog.others(last_id)
        self._next_due = wall

    def read(self, wall: float) -> list[Entry]:
        """Read a page of what is due and a page of what comes next, if memory is half empty."""
        if not self._is_low:
            return []
        entries = self._read_due(wall) + self._read_backlog()
        for entry in entries:
            self.add(entry)
        return entries

    def _read_due(self, wall: float) -> list[Entry]:
        if self._next_due is None or self._next_due > wall:
            return []
        entries, self._next_due = self._store.read_due(
            wall, limit=PAGE, bytes_max=self._bytes_max // 2, loaded=self._due
        )
        for entry in entries:
            entry.waiter = self._waiters.pop(entry.id, None)
            self._due.add(entry.id)
        return entries

    def _read_backlog(self) -> list[Entry]:
        head = self._backlog.head
        if head is None:
            return []
        entries = self._store.read_ready(
            head.first, head.last, limit=PAGE, bytes_max=self._bytes_max // 2
        )
        for entry in entries:
            entry.waiter = head.waiter
        self._backlog.advance(entries[-1].id if entries else head.last)
        return entries
