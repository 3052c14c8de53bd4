"""The intake: makes entries of chunks from callers, as far as there is room for them.

Knows: chunks, limits, and the entries in memory. Must never know: which entries are sent, or their
outcomes.

A chunk is stored by the commit of the turn that takes it in. If memory has room, its entries are
sent from there, without being read back. If the commit fails, they are removed from memory, and the
caller gets the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from reliablepub._core.session import Session
from reliablepub.errors import OutboxError, OutboxMoved, OutboxUnsure
from reliablepub.outbox.entry import HELD, Changes, Counters, Entry, is_plain
from reliablepub.relay.handover import Chunk, Inbox, Limits, Room
from reliablepub.relay.loaded import Loaded
from reliablepub.relay.pauses import Pauses
from reliablepub.relay.status import described

TURN_MESSAGES_MAX: Final = 2_000
FLOW_S: Final = 0.5
"""How long after a confirm further ones are expected, which make room in memory."""


class Intake:
    """Takes chunks from the inbox, and makes and loads their entries."""

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
        self._flowing_until = 0.0

    def confirms_flow(self, now: float) -> None:
        """Expect confirms for the next `FLOW_S` seconds.

        Called after a confirm, and after a send when nothing else is in flight.
        """
        self._flowing_until = now + FLOW_S

    def take(
        self, changes: Changes, counters: Counters, now: float, wall: float
    ) -> list[Chunk[Any]]:
        """Take chunks from the inbox, add their entries to the changes, and load what fits."""
        taken_in: list[Chunk[Any]] = []
        if self._inbox.chunks:
            taken_in = self._inbox.take(self._room(counters, now))
        is_loaded = not self._loaded.has_backlog
        for chunk in taken_in:
            chunk.entries = entries = [Entry.accepted(m, wall) for m in chunk.messages]
            if self._pauses.tracked:
                self._hold(entries, wall)
            changes.new += entries
            if chunk.source is not None:
                changes.sources[chunk.source] = changes.sources.get(chunk.source, 0) + len(entries)
            # Once a chunk does not fit, later ones wait behind it.
            is_loaded = is_loaded and self._loaded.fits(len(entries), chunk.size)
            chunk.is_loaded = is_loaded
            if is_loaded:
                self._load(chunk)
        return taken_in

    def _hold(self, entries: Sequence[Entry], wall: float) -> None:
        """Have entries for a paused destination wait in the store."""
        for entry in entries:
            if entry.is_for_now and self._pauses.holds(entry) is not None:
                entry.due_at, entry.refused_at, entry.is_plain = HELD, wall, False
                self._pauses.waits(entry)

    def _load(self, chunk: Chunk[Any]) -> None:
        """Load the entries of a chunk that wait for nothing, and submit them to the session."""
        entries = chunk.entries
        is_whole = all(map(is_plain, entries))
        chunk.loaded = entries if is_whole else [e for e in entries if e.is_for_now]
        self._loaded.add(*chunk.loaded)
        for entry in chunk.loaded:
            entry.waiter = chunk.waiter
        self._session.submit(*chunk.loaded)

    def committed(self, taken_in: Sequence[Chunk[Any]]) -> None:
        """Tell callers that their chunks are stored."""
        for chunk in taken_in:
            self._loaded.stored(chunk)
            chunk.stored()

    def undo(self, taken_in: Sequence[Chunk[Any]], changes: Changes, error: OutboxError) -> None:
        """After a commit that failed: unload the chunks' entries, and give callers the error."""
        new = [entry for chunk in taken_in for entry in chunk.loaded]
        self._session.withdraw(set(new))
        self._loaded.drop(*new)
        changes.new, changes.sources = [], {}  # outcomes stay for the next commit
        for chunk in taken_in:
            chunk.failed(error)

    def failed(self, taken_in: Sequence[Chunk[Any]], failure: BaseException) -> None:
        """After a failure that ends the relay: tell callers that their messages may be stored."""
        error = failure
        if not isinstance(failure, OutboxMoved):  # which says where the messages are
            error = OutboxUnsure(
                "the relay has failed, so it is unknown whether the message is stored: "
                f"{described(failure)}"
            )
            error.__cause__ = failure
        for chunk in taken_in:
            if not chunk.is_told:
                chunk.failed(error)

    def is_ready(self, counters: Counters, now: float) -> bool:
        """Whether `take` would take a chunk, or fail one."""
        return bool(self._inbox.chunks) and self._inbox.is_ready(self._room(counters, now))

    def lacks_room(self, counters: Counters) -> bool:
        """Whether callers wait for room: in the store, or in memory, with little left to send."""
        head = self._inbox.head
        if head is None:
            return False
        is_low = self._session.buffered < self._session.in_flight
        return is_low or self._limits.is_full(counters, head)

    def next_look(self, now: float) -> float | None:
        """When to try `take` again if nothing else happens (monotonic), or None."""
        is_waiting = bool(self._inbox.chunks) and now < self._flowing_until
        return self._flowing_until if is_waiting else None

    def _room(self, counters: Counters, now: float) -> Room:
        """Room for new chunks: that of the store; and while confirms flow, that of memory, too.

        An entry stored beyond memory has to be read back later, which costs more. So while confirms
        flow, callers wait a moment for room in memory. They do not wait for a broker that does not
        confirm, nor with a chunk that is larger than memory: then only the store's room counts.
        """
        messages = min(self._limits.messages_max - counters.open, TURN_MESSAGES_MAX)
        bytes_ = self._limits.bytes_max - counters.open_bytes
        head = self._inbox.head
        is_too_large = head is not None and head.size > self._limits.loaded_bytes_max
        if now < self._flowing_until and not (self._loaded.has_backlog or is_too_large):
            messages = min(messages, self._loaded.room)
            bytes_ = min(bytes_, self._loaded.room_bytes)
        return Room(messages, bytes_)
