"""One queue: what is ready in it, what its limits refuse or drop, and what survives a crash.

This module knows queue arguments (`x-max-length`, `x-max-length-bytes`, `x-overflow`,
`x-message-ttl`, `x-max-priority`), `expiration`, and the order of messages. Time is an argument.
It must never know exchanges, channels, how a consumer is told, or where a dead letter goes.
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
    """One message in one queue; `position` keeps its place when it is requeued."""

    publish: Publish
    position: int
    expires_at: float | None
    written: bool = False
    """Whether it would survive a crash."""
    redelivered: bool = False
    priority: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Its place in the queue."""
        return -self.priority, self.position


@dataclass(frozen=True, slots=True)
class Buried:
    """A message that a queue has dropped and a dead letter exchange awaits."""

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
    """The number of the connection that declared it exclusive."""
    arguments: dict[str, Any] = field(default_factory=dict)
    consumers: list[Any] = field(default_factory=list)
    is_deleted: bool = False
    ready: deque[Entry] = field(default_factory=deque)
    ready_bytes: int = 0
    dead: deque[Buried] = field(default_factory=deque)
    """Where dead letters go; shared by the queues of a virtual host."""
    used_at: float | None = None
    """When something last kept a queue with `x-expires` alive."""
    _position: int = 0

    def offer(self, publish: Publish, now: float) -> Entry | None:
        """Take a publish, or refuse it with None when the queue is full and rejects."""
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
        """Drop from the head what no consumer has taken and a limit does not allow."""
        while self.ready and self.arguments and self._is_full(0, room=-1):
            self.bury(self.take().publish, "maxlen")

    @property
    def priority_max(self) -> int:
        """`x-max-priority`; 0 is a queue without priorities."""
        return int(self.arguments.get("x-max-priority") or 0)

    def bury(self, publish: Publish, reason: str) -> None:
        """A message has died here; without a dead letter exchange that is all."""
        if "x-dead-letter-exchange" in self.arguments:
            self.dead.append(Buried(self, publish, reason))

    def take(self) -> Entry:
        """Remove and return the head; the queue must not be empty."""
        entry = self.ready.popleft()
        self.ready_bytes -= len(entry.publish.body)
        return entry

    def requeue(self, entries: list[Entry]) -> None:
        """Put deliveries back where they were, marked redelivered."""
        if self.is_deleted:
            return
        for entry in entries:
            entry.redelivered = True
            self.ready_bytes += len(entry.publish.body)
        self.ready = deque(sorted([*self.ready, *entries], key=lambda entry: entry.place))

    def expire(self, now: float) -> None:
        """Drop expired messages from the head, as a classic queue does."""
        while self.ready:
            expires_at = self.ready[0].expires_at
            if expires_at is None or expires_at > now:
                return
            self.bury(self.take().publish, "expired")

    def purge(self) -> int:
        """Drop everything that is ready; the number dropped."""
        count = len(self.ready)
        self.ready.clear()
        self.ready_bytes = 0
        return count

    def lose(self, *, keep_unwritten: bool) -> list[Publish]:
        """Keep what survives a restart: persistent and written; the publishes that are gone."""
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
        """Whether a limit leaves no place for one more (`room=0`) or is exceeded (`room=-1`)."""
        length_max = self.arguments.get("x-max-length")
        if length_max is not None and len(self.ready) + room >= length_max:
            return True
        bytes_max = self.arguments.get("x-max-length-bytes")
        return bytes_max is not None and self.ready_bytes + body_size > bytes_max

    def _expiry(self, publish: Publish, now: float) -> float | None:
        ttls = [self.arguments.get("x-message-ttl"), publish.properties.expiration]
        limits = [int(ttl) for ttl in ttls if ttl is not None]
        return now + min(limits) / 1000 if limits else None
