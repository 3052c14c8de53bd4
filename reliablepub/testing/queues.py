"""One queue: its ready messages, its limits, and the messages that survive a crash.

This module knows queue arguments (`x-max-length`, `x-max-length-bytes`, `x-overflow`,
`x-message-ttl`, `x-max-priority`), `expiration`, and the order of messages. Time is an argument.
It must never know exchanges, channels, how messages are delivered, or where a dead letter goes.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reliablepub.testing.history import Publish

REJECTING = frozenset({"reject-publish", "reject-publish-dlx"})


@dataclass(slots=True, eq=False)
class Entry:
    """One message in one queue; `position` restores its place when it is requeued."""

    publish: Publish
    position: int
    expires_at: float | None
    written: bool = False
    """Whether the message is on disk."""
    redelivered: bool = False
    priority: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Sort key of the message's place in the queue: priority, then position."""
        return -self.priority, self.position


@dataclass(frozen=True, slots=True)
class Buried:
    """A message that a queue has dropped, to be routed to its dead letter exchange."""

    queue: Queue
    publish: Publish
    reason: str
    """`rejected`, `expired` or `maxlen`."""


@dataclass(slots=True, eq=False)
class Queue:
    """A classic queue."""

    name: str
    durable: bool = False
    auto_delete: bool = False
    owner: int | None = None
    """Number of the connection that declared the queue exclusive; None if not exclusive."""
    arguments: dict[str, Any] = field(default_factory=dict)
    consumers: list[Any] = field(default_factory=list)
    is_deleted: bool = False
    ready: deque[Entry] = field(default_factory=deque)
    ready_bytes: int = 0
    dead: deque[Buried] = field(default_factory=deque)
    """Dead letters to be routed; shared by all queues of a virtual host."""
    used_at: float | None = None
    """When a queue with `x-expires` was last used."""
    _position: int = 0

    def offer(self, publish: Publish, now: float) -> Entry | None:
        """Add a publish; None if the queue is full and refuses it."""
        if self.arguments:
            self.expire(now)
            overflow = self.arguments.get("x-overflow")
            if overflow in REJECTING and self._is_full(len(publish.body)):
                if overflow == "reject-publish-dlx":
                    self.bury(publish, "maxlen")
                return None
        self._position += 1
        entry = Entry(publish, self._position, self._expiry(publish, now))
        self.ready_bytes += len(publish.body)
        if not self.arguments:
            self.ready.append(entry)
            return entry
        entry.priority = min(publish.properties.priority or 0, self.priority_max)
        if self.ready and self.ready[-1].place > entry.place:
            insort(self.ready, entry, key=lambda one: one.place)
        else:
            self.ready.append(entry)
        return entry

    def trim(self) -> None:
        """Drop messages from the head while a limit is exceeded."""
        while self.ready and self.arguments and self._is_full(0, room=-1):
            self.bury(self.take().publish, "maxlen")

    @property
    def priority_max(self) -> int:
        """`x-max-priority`; 0 for a queue without priorities."""
        return int(self.arguments.get("x-max-priority") or 0)

    def bury(self, publish: Publish, reason: str) -> None:
        """Dead-letter a dropped message, if the queue has a dead letter exchange."""
        if "x-dead-letter-exchange" in self.arguments:
            self.dead.append(Buried(self, publish, reason))

    def take(self) -> Entry:
        """Remove and return the head; the queue must not be empty."""
        entry = self.ready.popleft()
        self.ready_bytes -= len(entry.publish.body)
        return entry

    def requeue(self, entries: list[Entry]) -> None:
        """Put deliveries back into their places, marked as redelivered."""
        if self.is_deleted:
            return
        for entry in entries:
            entry.redelivered = True
            self.ready_bytes += len(entry.publish.body)
        self.ready = deque(sorted([*self.ready, *entries], key=lambda entry: entry.place))

    def expire(self, now: float) -> None:
        """Drop expired messages from the head only, as a classic queue does."""
        while self.ready:
            expires_at = self.ready[0].expires_at
            if expires_at is None or expires_at > now:
                return
            self.bury(self.take().publish, "expired")

    def purge(self) -> int:
        """Drop all ready messages; returns their number."""
        count = len(self.ready)
        self.ready.clear()
        self.ready_bytes = 0
        return count

    def lose(self, *, keep_unwritten: bool) -> list[Publish]:
        """Drop all messages that do not survive a restart; returns their publishes.

        Persistent messages in a durable queue survive if they are written.
        """
        kept: deque[Entry] = deque()
        lost = []
        for entry in self.ready:
            survives = entry.publish.is_persistent and (entry.written or keep_unwritten)
            if self.durable and survives:
                entry.written = True
                kept.append(entry)
            else:
                lost.append(entry.publish)
        self.ready = kept
        self.ready_bytes = sum(len(entry.publish.body) for entry in kept)
        return lost

    def _is_full(self, body_size: int, *, room: int = 0) -> bool:
        """Whether a limit is reached (`room=0`) or exceeded (`room=-1`)."""
        length_max = self.arguments.get("x-max-length")
        if length_max is not None and len(self.ready) + room >= length_max:
            return True
        bytes_max = self.arguments.get("x-max-length-bytes")
        return bytes_max is not None and self.ready_bytes + body_size > bytes_max

    def _expiry(self, publish: Publish, now: float) -> float | None:
        ttls = [self.arguments.get("x-message-ttl"), publish.properties.expiration]
        limits = [int(ttl) for ttl in ttls if ttl is not None]
        return now + min(limits) / 1000 if limits else None
