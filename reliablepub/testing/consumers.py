"""The consumers of queues, and which of them gets the next message.

This module knows prefetch, priorities and the round of consumers. It must never know channels, or
how messages come into a queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from reliablepub.testing.streams import Stream

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reliablepub.testing.history import Publish
    from reliablepub.testing.queues import Entry, Queue


class Receiver(Protocol):
    """The consuming side of a channel, as queues see it."""

    @property
    def is_congested(self) -> bool:
        """Whether the client reads more slowly than the server sends."""

    def has_credit(self) -> bool:
        """Whether the channel-wide prefetch allows another delivery."""

    def send(self, consumer: Consumer, entry: Entry) -> None:
        """Send a message to a consumer."""

    def send_reply(self, publish: Publish) -> None:
        """Send a direct reply."""

    def handle_queue_deleted(self, consumer: Consumer) -> None:
        """The queue of a consumer is gone."""


@dataclass(slots=True, eq=False)
class Consumer:
    """One basic.consume; `prefetch` 0 means no limit."""

    receiver: Receiver
    tag: str
    queue: Queue
    no_ack: bool
    exclusive: bool
    prefetch: int
    priority: int = 0
    unacked: int = 0
    offset: int = 0
    """Of the next message that it gets from a stream."""

    def has_credit(self) -> bool:
        """Whether the consumer may get another message now."""
        if self.receiver.is_congested:
            return False
        if self.no_ack:
            return True
        return self.receiver.has_credit() and not 0 < self.prefetch <= self.unacked


@dataclass(slots=True)
class Delivery:
    """A message that the channel got and has not acknowledged."""

    entry: Entry
    queue: Queue
    consumer: Consumer | None
    at: float
    """When it was taken from its queue, in seconds of `Node.now`."""
    loses_ack: bool = False
    """Whether a fault ignores its acknowledgement."""


def deliver(queue: Queue, now: float) -> None:
    """Deliver ready messages to consumers, round robin, those of the highest priority first."""
    if not queue.consumers:
        return
    if isinstance(queue, Stream):
        _deliver_stream(queue)
        return
    if queue.ready and queue.ready[0].expires_at != now:  # a TTL of 0 allows delivery at once
        queue.expire(now)
    has_one = is_single(queue)
    while queue.ready:
        active = queue.consumers[:1] if has_one else queue.consumers
        free = (one for one in active if one.has_credit())
        consumer = max(free, key=lambda one: one.priority, default=None)  # max() keeps the first
        if consumer is None:
            return
        if not has_one:
            queue.consumers.remove(consumer)
            queue.consumers.append(consumer)
        entry = queue.take()
        queue.expire(now)
        consumer.receiver.send(consumer, entry)


def _deliver_stream(stream: Stream) -> None:
    """Send to each consumer what comes next for it."""
    for consumer in list(stream.consumers):
        while (
            consumer.offset < len(stream.ready)
            and consumer.has_credit()
            and consumer in stream.consumers  # a delivery may end in its cancellation
        ):
            entry = stream.ready[consumer.offset]
            consumer.offset += 1
            consumer.receiver.send(consumer, entry)


def is_single(queue: Queue) -> bool:
    """Whether one consumer gets all messages of the queue."""
    return queue.arguments.get("x-single-active-consumer") is True


def requeue(deliveries: Iterable[Delivery], now: float, *, is_lost: bool) -> None:
    """Put messages that were not acknowledged back into their queues, and deliver them.

    Args:
        deliveries: The deliveries.
        now: Time, in seconds.
        is_lost: Whether their channel is gone; else the client asked for it.
    """
    entries: dict[Queue, list[Entry]] = {}
    for delivery in deliveries:
        entries.setdefault(delivery.queue, []).append(delivery.entry)
    for queue, returned in entries.items():
        queue.requeue(returned, is_lost=is_lost)
        deliver(queue, now)
