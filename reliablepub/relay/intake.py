"""Taking in: what callers hand over becomes entries, as far as there is room for them.

Knows: chunks, limits, and what is in memory. Must never know: what is sent, or what became of it.

A chunk is taken in with the changes of one turn, and its entries are sent from memory if memory has
room for them. If the turn cannot be committed, they are forgotten again, and their caller is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from reliablepub._core.session import Session
from reliablepub.errors import OutboxError
from reliablepub.outbox.entry import HELD, Counters, Entry, Turn
from reliablepub.relay.handover import Chunk, Inbox
from reliablepub.relay.limits import Limits, Room
from reliablepub.relay.loaded import Loaded
from reliablepub.relay.pauses import Pauses

TURN_MESSAGES_MAX: Final = 2_000
FLOW_S: Final = 0.5
"""How long after a confirm the next ones are counted on to make room in memory."""


@dataclass(frozen=True, slots=True)
class TakenIn:
    """A chunk of this turn, as entries.

    Attributes:
        chunk: as it was handed over.
        entries: its messages.
        is_loaded: whether they are in memory, as far as they may be sent at once.
        loaded: those that are.
    """

    chunk: Chunk
    entries: Sequence[Entry]
    is_loaded: bool
    loaded: Sequence[Entry]


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

    def take(self, turn: Turn, counters: Counters, now: float, wall: float) -> list[TakenIn]:
        """Add new chunks to the turn; their entries go on if memory has room.

        Args:
            turn: what the store will be told.
            counters: what it holds.
            now: monotonic seconds.
            wall: seconds since 1970.
        """
        taken_in: list[TakenIn] = []
        is_in_turn = not self._loaded.has_backlog
        for chunk in self._inbox.take(self._room(counters, now)):
            entries = [Entry.accepted(message, wall) for message in chunk.messages]
            if self._pauses:
                for entry in entries:
                    if entry.is_for_now and self._pauses.holds(entry) is not None:
                        entry.due_at, entry.refused_at = HELD, wall
                        self._pauses.waits(entry)
            turn.new += entries
            if chunk.source is not None:
                turn.sources[chunk.source] = turn.sources.get(chunk.source, 0) + len(entries)
            is_in_turn = is_in_turn and self._loaded.fits(len(entries), chunk.size)
            loaded = [entry for entry in entries if entry.is_for_now] if is_in_turn else []
            taken_in.append(TakenIn(chunk, entries, is_in_turn, loaded))
            self._loaded.add(*loaded)
            for entry in loaded:
                entry.waiter = chunk.waiter
                self._session.submit(entry, entry.message.size)
        return taken_in

    def committed(self, taken_in: Sequence[TakenIn]) -> None:
        """They are in the store: tell their callers."""
        for taken in taken_in:
            self._loaded.stored(
                taken.entries, taken.loaded, taken.chunk.waiter, is_loaded=taken.is_loaded
            )
            taken.chunk.stored()

    def undo(self, taken_in: Sequence[TakenIn], turn: Turn, error: OutboxError) -> None:
        """They are not: forget them, and tell their callers why."""
        new = [entry for taken in taken_in for entry in taken.loaded]
        self._session.withdraw(set(new))
        self._loaded.drop(*new)
        turn.new, turn.sources = [], {}
        for taken in taken_in:
            taken.chunk.failed(error)

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
