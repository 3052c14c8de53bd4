"""Taking in: what callers hand over becomes entries, as far as there is room for them.

Knows: chunks, limits, and what is in memory. Must never know: what is sent, or what became of it.

A chunk is taken in with the changes of one turn, and its entries are sent from memory if memory has
room for them. If the turn cannot be committed, they are forgotten again, and their caller is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from reliablepub._core.session import Session
from reliablepub.errors import OutboxError
from reliablepub.outbox.entry import HELD, Changes, Counters, Entry
from reliablepub.relay.handover import Chunk, Inbox, Limits, Room
from reliablepub.relay.loaded import Loaded
from reliablepub.relay.pauses import Pauses

TURN_MESSAGES_MAX: Final = 2_000
FLOW_S: Final = 0.5
"""How long after a confirm the next ones are counted on to make room in memory."""


class Intake:
    """Between the inbox and what is in memory.

    Args:
        inbox: what callers hand over.
        limits: what may be held.
        loaded: what is in memory.
        session: what sends it.
        pauses: what has to wait on disk.
    """

    def __init__(
        self,
        inbox: Inbox,
        limits: Limits,
        loaded: Loaded,
        session: Session[Entry],
        pauses: Pauses,
    ) -> None:
        self._inbox = inbox
        self._limits = limits
        self._loaded = loaded
        self._session = session
        self._pauses = pauses
        self._refusal: OutboxError | None = None
        self._refuse_until = 0.0
        self._flowing_until = 0.0

    def confirms_flow(self, now: float) -> None:
        """There was a confirm; or what was just sent is all there is in flight, so one is due."""
        self._flowing_until = now + FLOW_S

    def turn_away(self, now: float) -> None:
        """While the store has no room for new messages, their callers learn it at once."""
        if self._refusal is None:
            return
        if now < self._refuse_until:
            for chunk in self._inbox.take(lambda _: True):
                chunk.failed(self._refusal)
        else:
            self._refusal = None

    def refuse(self, error: OutboxError, until: float) -> None:
        """Turn new messages away until then."""
        self._refusal, self._refuse_until = error, until

    def take(
        self, changes: Changes, counters: Counters, now: float, wall: float
    ) -> list[Chunk[Any]]:
        """Add new chunks to the turn; their entries go on if memory has room.

        Args:
            changes: what the store will be told.
            counters: what it holds.
            now: monotonic seconds.
            wall: seconds since 1970.

        Returns:
            the chunks; each has its entries now.
        """
        taken_in = self._inbox.take(self._room(counters, now))
        is_loaded = not self._loaded.has_backlog
        for chunk in taken_in:
            chunk.entries = entries = [Entry.accepted(m, wall) for m in chunk.messages]
            if self._pauses:
                self._hold(entries, wall)
            changes.new += entries
            if chunk.source is not None:
                changes.sources[chunk.source] = changes.sources.get(chunk.source, 0) + len(entries)
            is_loaded = is_loaded and self._loaded.fits(len(entries), chunk.size)
            chunk.is_loaded = is_loaded
            if is_loaded:
                self._load(chunk)
        return taken_in

    def _hold(self, entries: Sequence[Entry], wall: float) -> None:
        """Messages to a paused destination wait in the store."""
        for entry in entries:
            if entry.is_for_now and self._pauses.holds(entry) is not None:
                entry.due_at, entry.refused_at, entry.is_plain = HELD, wall, False
                self._pauses.waits(entry)

    def _load(self, chunk: Chunk[Any]) -> None:
        """Entries that wait for nothing go to the session from memory."""
        chunk.loaded = [e for e in chunk.entries if e.is_plain or e.is_for_now]
        self._loaded.add(*chunk.loaded)
        for entry in chunk.loaded:
            entry.waiter = chunk.waiter
        self._session.submit_all([(entry, entry.message.size) for entry in chunk.loaded])

    def committed(self, taken_in: Sequence[Chunk[Any]]) -> None:
        """They are in the store: tell their callers."""
        for chunk in taken_in:
            self._loaded.stored(chunk)
            chunk.stored()

    def undo(self, taken_in: Sequence[Chunk[Any]], changes: Changes, error: OutboxError) -> None:
        """They are not: forget them, and tell their callers why."""
        new = [entry for chunk in taken_in for entry in chunk.loaded]
        self._session.withdraw(set(new))
        self._loaded.drop(*new)
        changes.new, changes.sources = [], {}
        for chunk in taken_in:
            chunk.failed(error)

    @property
    def is_empty(self) -> bool:
        """Whether no chunk waits to be taken."""
        return not self._inbox

    def is_ready(self, counters: Counters, now: float) -> bool:
        """Whether `take` would take something."""
        return self._inbox.is_ready(self._room(counters, now))

    def next_look(self, now: float) -> float | None:
        """When there may be room again that nothing else tells of (monotonic), or None."""
        times = [self._refuse_until] if self._refusal is not None else []
        if self._inbox and now < self._flowing_until:
            times.append(self._flowing_until)
        return min(times, default=None)

    def _room(self, counters: Counters, now: float) -> Room:
        """For what there is room in the store; and in memory too, while confirms make some.

        What is stored beyond that is only read back a moment later. But nobody waits for a broker
        that does not confirm: then only the store counts.
        """
        messages = min(self._limits.messages_max - counters.open, TURN_MESSAGES_MAX)
        bytes_ = self._limits.bytes_max - counters.open_bytes
        if now < self._flowing_until and not self._loaded.has_backlog:
            messages = min(messages, self._loaded.room)
            bytes_ = min(bytes_, self._loaded.room_bytes)
        return Room(messages, bytes_)
