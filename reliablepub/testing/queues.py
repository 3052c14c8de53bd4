"""One queue: its ready messages, its limits, and the messages that survive a crash.

Knows: what the arguments and `expiration` do to messages, the order of messages, and how quorum
queues and streams differ from a classic queue. Time is an argument. Must never know: exchanges,
channels, how messages are delivered, where a dead letter goes.

Streams have no protocol of their own, no segments and no retention here: no message is ever
dropped, and each message is a chunk of its own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from reliablepub.testing.fields import is_integer
from reliablepub.testing.queue_arguments import queue_type, seconds_of
from reliablepub.testing.replies import crashed

if TYPE_CHECKING:
    from reliablepub.testing.history import Publish

_BEFORE_ALL = -(1 << 62)
"""Position of the first message that came back to the head of a quorum queue."""

_LOW_LIMIT = 0.8
"""A quorum queue that refuses takes messages again at this share of its limits (rabbit_fifo)."""


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
    is_repeated: bool = False
    """Whether it is the copy that `RepeatDelivery` delivers."""
    delivery_count: int = 0
    """How often the message was returned to a quorum queue."""

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
    """`rejected`, `expired`, `maxlen` or `delivery_limit`."""


@dataclass(slots=True, eq=False)
class Queue:
    """A classic queue, or a quorum queue."""

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
    _returned: int = _BEFORE_ALL
    _refuses: bool = False
    """Whether a quorum queue with `reject-publish` has exceeded a limit."""

    @property
    def kind(self) -> str:
        """`classic`, `quorum` or `stream`."""
        return queue_type(self.arguments)

    @property
    def is_quorum(self) -> bool:
        """Whether it is a quorum queue."""
        return bool(self.arguments) and self.arguments.get("x-queue-type") == "quorum"

    @property
    def rejects(self) -> bool:
        """Whether it rejects messages when it is full; otherwise it drops its head.

        A quorum queue takes `reject-publish-dlx` for the default (rabbit_quorum_queue:overflow).
        """
        overflow = self.arguments.get("x-overflow")
        return overflow == "reject-publish" or (
            overflow == "reject-publish-dlx" and not self.is_quorum
        )

    def writes(self, publish: Publish) -> bool:
        """Whether the message goes to disk: on a quorum queue, whatever its delivery mode."""
        return self.durable and (publish.is_persistent or self.is_quorum)

    def offer(self, publish: Publish, now: float) -> Entry | None:
        """Add a publish; return None if the queue is full and refuses it."""
        if self.arguments:
            self.expire(now)
            if self.is_quorum:
                self._refuses = self._refuses and not self._has_room_again()
                if self._refuses:
                    return None
            elif self.rejects and self._is_full(len(publish.body)):
                if self.arguments["x-overflow"] == "reject-publish-dlx":
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
        """Drop messages from the head while a limit is exceeded.

        A queue that rejects keeps them; if it is a quorum queue, it refuses the next message.
        """
        if self.arguments and self.rejects:
            self._refuses = self._refuses or (self.is_quorum and self._is_full(0, room=-1))
            return
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

    def put_back(self, entry: Entry) -> None:
        """Put a message that was taken and not delivered back at the head."""
        if not self.is_deleted:
            self.ready.appendleft(entry)
            self.ready_bytes += len(entry.publish.body)

    def requeue(self, entries: list[Entry], *, is_lost: bool = False) -> None:
        """Put deliveries back into their places, marked as redelivered.

        Args:
            entries: The deliveries.
            is_lost: Whether the channel has closed; otherwise the client has requeued them.
        """
        if self.is_deleted:
            return
        if self.is_quorum:
            entries = self._counted(entries, is_lost=is_lost)
        for entry in entries:
            entry.redelivered = True
            self.ready_bytes += len(entry.publish.body)
        self.ready = deque(sorted([*self.ready, *entries], key=lambda entry: entry.place))

    def _counted(self, entries: list[Entry], *, is_lost: bool) -> list[Entry]:
        """Count a delivery of each message, and set its new place; drop it beyond the limit.

        A message that its client requeues goes to the tail, unless there is a delivery limit.
        """
        limit = self.arguments.get("x-delivery-limit")
        kept = []
        for entry in entries:
            entry.delivery_count += 1
            if isinstance(limit, int) and entry.delivery_count > limit:
                self.bury(entry.publish, "delivery_limit")
                continue
            if is_lost or limit is not None:
                self._returned += 1
                entry.position = self._returned
            else:
                self._position += 1
                entry.position = self._position
            kept.append(entry)
        return kept

    def expire(self, now: float) -> None:
        """Drop expired messages, from the head only, as a classic queue does."""
        while self.ready:
            expires_at = self.ready[0].expires_at
            if expires_at is None or expires_at > now:
                return
            self.bury(self.take().publish, "expired")

    def purge(self) -> int:
        """Drop all ready messages; return their number."""
        count = len(self.ready)
        self.ready.clear()
        self.ready_bytes = 0
        return count

    def lose(self, *, keep_unwritten: bool) -> list[Publish]:
        """Drop all messages that do not survive a restart; return their publishes.

        Persistent messages in a durable queue, and all in a quorum queue, survive if written.
        """
        kept: deque[Entry] = deque()
        lost = []
        for entry in self.ready:
            if self.writes(entry.publish) and (entry.written or keep_unwritten):
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

    def _has_room_again(self) -> bool:
        """Whether the lengths have fallen to the share of the limits that ends a refusal."""
        lengths = (
            ("x-max-length", len(self.ready)),
            ("x-max-length-bytes", self.ready_bytes),
        )
        limits = ((self.arguments.get(name), length) for name, length in lengths)
        return all(limit is None or length <= int(limit * _LOW_LIMIT) for limit, length in limits)

    def _expiry(self, publish: Publish, now: float) -> float | None:
        ttls = [self.arguments.get("x-message-ttl"), publish.properties.expiration]
        limits = [int(ttl) for ttl in ttls if ttl is not None]
        return now + min(limits) / 1000 if limits else None


@dataclass(slots=True, eq=False)
class Stream(Queue):
    """A stream: `ready` holds every message, and the offset of a message is its index there."""

    _stored_at: list[float] = field(default_factory=list)

    def offer(self, publish: Publish, now: float) -> Entry:
        """Append a publish."""
        entry = Entry(publish, len(self.ready), None)
        self.ready.append(entry)
        self._stored_at.append(now)
        return entry

    def writes(self, publish: Publish) -> bool:
        """Every message goes to disk."""
        del publish
        return True

    def trim(self) -> None:
        """Drop nothing: a limit concerns whole segments of 500 MB."""

    def expire(self, now: float) -> None:
        """Drop nothing."""

    def put_back(self, entry: Entry) -> None:
        """Do nothing: a delivery takes nothing."""

    def requeue(self, entries: list[Entry], *, is_lost: bool = False) -> None:
        """Do nothing: a delivery takes nothing."""

    def lose(self, *, keep_unwritten: bool) -> list[Publish]:
        """Drop all messages that do not survive a restart; return their publishes."""
        lost = Queue.lose(self, keep_unwritten=keep_unwritten)
        del self._stored_at[len(self.ready) :]
        return lost

    def first_offset(self, start: object, now: float, wall: float) -> int | None:
        """Return the offset at which a consumer begins; None for an age in an unknown unit.

        Args:
            start: The argument `x-stream-offset`, or "next".
            now: Time, in seconds.
            wall: The same time, in seconds since 1970.

        Raises:
            AmqpError: 541 for any other value that RabbitMQ does not understand.
        """
        end = len(self.ready)
        if start == "first":
            return 0
        if start == "last":
            return max(0, end - 1)
        if start == "next":
            return end
        if isinstance(start, int) and is_integer(start):
            return min(max(0, start), end)
        if isinstance(start, datetime):
            return bisect_left(self._stored_at, now - (wall - start.timestamp()))
        if isinstance(start, str):
            age_s = seconds_of(start)
            return None if age_s is None else bisect_left(self._stored_at, now - age_s)
        raise crashed()


def new_queue(name: str, *, arguments: dict[str, Any], **flags: Any) -> Queue:  # noqa: ANN401 - of `Queue`
    """Make a queue of the type that its arguments name."""
    kind = Stream if queue_type(arguments) == "stream" else Queue
    return kind(name, arguments=arguments, **flags)
