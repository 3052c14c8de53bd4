"""The consumers of queues, and which of them gets the next message; direct reply-to.

Knows: prefetch, priorities, round-robin, the names of consumers of direct replies. Must never know:
channels, how messages come into a queue.
"""

from __future__ import annotations

import struct
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from reliablepub.testing.queues import Stream
from reliablepub.testing.replies import crashed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from random import Random

    from reliablepub.testing.history import Publish
    from reliablepub.testing.queues import Entry, Queue

PSEUDO_QUEUE: Final = "amq.rabbitmq.reply-to"
"""A client consumes direct replies from this name, and sets it as `reply_to` of its requests."""

_NODE_NAME: Final = b"reply@1"
_PROCESS_ID_HEAD: Final = b"\x83Xv"  # NEW_PID_EXT, with the node's name as an atom
_PROCESS_ID = struct.Struct(f">H{len(_NODE_NAME)}sIII")  # size, name, id, serial, creation
_KEY_SIZE: Final = 16


class Receiver(Protocol):
    """The consuming side of a channel, as queues and the views of a broker see it."""

    consumers: dict[str, Consumer]
    """Consumers by tag."""

    @property
    def unacked(self) -> Mapping[int, Delivery]:
        """The deliveries that are not acknowledged, by their tags."""

    @property
    def is_congested(self) -> bool:
        """Whether the client reads more slowly than the server sends."""

    @property
    def is_going_down(self) -> bool:
        """Whether the node goes down, and the client's connection with it."""

    def has_credit(self) -> bool:
        """Whether the channel-wide prefetch has room."""

    def send(self, consumer: Consumer, entry: Entry) -> None:
        """Send a message to a consumer."""

    def send_reply(self, publish: Publish) -> None:
        """Send a direct reply."""

    def handle_queue_deleted(self, consumer: Consumer) -> None:
        """Handle the deletion of a consumer's queue."""


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
    """Offset of its next message in a stream."""
    is_limited: bool = True
    """Whether a channel-wide prefetch limits it: quorum queues and streams know none."""

    def has_credit(self) -> bool:
        """Whether the consumer may get another message now."""
        # After kill -9, a quorum queue passes a message from one dead consumer to the next, and
        # counts each return (seen on 3.10.8). Without acknowledgement the message would be lost.
        if self.receiver.is_going_down and (self.no_ack or not self.queue.is_quorum):
            return False
        if self.receiver.is_congested or (self.is_limited and not self.receiver.has_credit()):
            return False
        return self.no_ack or not 0 < self.prefetch <= self.unacked


@dataclass(slots=True)
class Delivery:
    """A message that was delivered on a channel and is not acknowledged."""

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
    """Send each consumer its next messages."""
    for consumer in list(stream.consumers):
        while (
            consumer.offset < len(stream.ready)
            and consumer.has_credit()
            and consumer in stream.consumers  # a delivery may end in its cancellation
        ):
            entry = stream.ready[consumer.offset]
            consumer.offset += 1
            consumer.receiver.send(consumer, entry)


def join(queue: Queue, consumer: Consumer) -> None:
    """Add a consumer; behind a single active one of a classic queue they wait by priority."""
    place = len(queue.consumers)
    if is_single(queue) and not queue.is_quorum:
        waiting = enumerate(queue.consumers[1:], 1)
        place = next((at for at, one in waiting if one.priority < consumer.priority), place)
    queue.consumers.insert(place, consumer)


def is_single(queue: Queue) -> bool:
    """Whether one consumer gets all messages of the queue."""
    return queue.arguments.get("x-single-active-consumer") is True


def requeue(deliveries: Iterable[Delivery], now: float, *, is_lost: bool) -> None:
    """Put messages that were not acknowledged back into their queues, and deliver them.

    Args:
        deliveries: The deliveries.
        now: Time, in seconds.
        is_lost: Whether their channel has closed; otherwise the client has requeued them.
    """
    entries: dict[Queue, list[Entry]] = {}
    for delivery in deliveries:
        entries.setdefault(delivery.queue, []).append(delivery.entry)
    for queue, returned in entries.items():
        queue.requeue(returned, is_lost=is_lost)
        if not queue.is_quorum:
            queue.trim()
        queue.expire(now)  # the timer of a message that expired meanwhile has gone off
        deliver(queue, now)
        queue.trim()


@dataclass(frozen=True, slots=True)
class ReplyConsumer:
    """The one consumer of direct replies that a channel may have."""

    tag: str
    name: str
    """The routing key of its replies, which replaces the pseudo-queue in `reply_to`."""


def generated_reply_name(random: Random) -> str:
    """Make a name of RabbitMQ's form: an Erlang process id and a key, both in base64."""
    process = _PROCESS_ID.pack(len(_NODE_NAME), _NODE_NAME, random.getrandbits(15), 0, 1)
    parts = (_PROCESS_ID_HEAD + process, random.randbytes(_KEY_SIZE))
    return ".".join((PSEUDO_QUEUE, *(b64encode(part).decode() for part in parts)))


def check_reply_name(name: str) -> None:
    """Raise 541 for a name of two parts whose first part is not a process id.

    Such a name crashes RabbitMQ's channel. A name of one part, or of three, names no consumer.
    """
    prefix, _, rest = name.partition(f"{PSEUDO_QUEUE}.")
    parts = [part for part in rest.split(".") if part]
    if prefix or len(parts) != 2:  # noqa: PLR2004 - a process id and a key
        return
    try:
        is_process = b64decode(parts[0], validate=True).startswith(_PROCESS_ID_HEAD)
    except ValueError:
        is_process = False
    if not is_process:
        raise crashed()
