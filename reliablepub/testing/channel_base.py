"""What the parts of a channel share: its connection, its answers, and what it finds by name.

This module knows what a part sees of its channel, of the connection and of a transaction. It must
never know the parts themselves, or which method does what.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Protocol

from pamqp import commands

from reliablepub.testing import encoding, wire
from reliablepub.testing.node import Client
from reliablepub.testing.options import EVERYTHING
from reliablepub.testing.replies import AmqpError
from reliablepub.testing.streams import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from pamqp.base import Frame

    from reliablepub.testing.consumers import Delivery
    from reliablepub.testing.direct_reply import ReplyConsumer
    from reliablepub.testing.history import Publish
    from reliablepub.testing.node import Node
    from reliablepub.testing.queues import Queue
    from reliablepub.testing.routing import Exchange

_EXPIRED: Final = (
    'backend rabbit_auth_backend_oauth2 returned an error: "Provided JWT token has expired at '
    'timestamp 1700000000 (validated at 1700000001)"'
)
"""RabbitMQ's words, with two times; a test should not depend on them."""


class Peer(Client, Protocol):
    """The connection of a channel, as the channel sees it."""

    node: Node
    number: int

    @property
    def frame_max(self) -> int:
        """The negotiated frame size."""

    @property
    def has_expired(self) -> bool:
        """Whether the client logged in with a token, and it has expired."""

    @property
    def is_congested(self) -> bool:
        """Whether the client must read before the server sends it more."""

    def has_capability(self, name: str) -> bool:
        """Whether the client announced a capability."""

    def send(self, data: bytes) -> None:
        """Send bytes."""

    def withhold(self, publish: Publish, resume: Callable[[Publish], None]) -> None:
        """Keep a publish, and process nothing behind it, until the alarm or the freeze is over."""

    def cut(self, *, sent: int | None = None, received: int | None = None, reset: bool) -> None:
        """End the TCP connection after a number of further bytes."""

    def go_mute(self) -> None:
        """Stop reading and writing without closing."""


class Transacting(Protocol):
    """The transaction of a channel."""

    def add_publish(self, publish: Publish) -> None:
        """Hold a publish until the commit."""

    def add_settlement(self, deliveries: dict[int, Delivery], requeue: bool | None) -> None:  # noqa: FBT001
        """Hold back the settlement of deliveries until the commit."""

    def handle_settled(self, publish: Publish) -> None:
        """A publish of the commit is on disk, or a queue has refused it."""

    def commit(self) -> None:
        """tx.commit."""

    def rollback(self) -> None:
        """tx.rollback."""

    def release(self) -> None:
        """The channel is gone: roll back."""


class ChannelBase(ABC):
    """A channel, as its parts see it: open, or closed by the server and waiting for close-ok."""

    def __init__(self, connection: Peer, number: int) -> None:
        self.connection = connection
        self.number = number
        self.is_open = True
        self.is_awaiting_close_ok = False
        self.last_queue = ""
        """The queue that an empty name stands for: the last one declared on this channel."""
        self.transaction: Transacting | None = None
        self.reply_consumer: ReplyConsumer | None = None
        """The consumer of direct replies."""

    # ------------------------------------------------------------------------------ frames out

    def reply(self, method: Frame, *, nowait: bool = False) -> None:
        """Answer with a method, unless the client asked for no answer."""
        if not nowait:
            self.connection.send(encoding.encode_method(self.number, method))

    def send_method(self, payload: bytes) -> None:
        """Send a method that is encoded already."""
        self.connection.send(wire.encode_frame(wire.METHOD, self.number, payload))

    def send_content(self, method: bytes, publish: Publish) -> None:
        """Send a method with the content of a publish."""
        frame_max = self.connection.frame_max
        self.connection.send(
            encoding.encode_content(self.number, method, publish.header, publish.body, frame_max)
        )

    def close(self, code: int, text: str, ids: tuple[int, int]) -> None:
        """Send channel.close; publishes in flight get no confirm, and later input is ignored."""
        if not self.is_open:
            return
        self.release()
        self.is_awaiting_close_ok = True
        self.send_method(encoding.encode_close(commands.Channel.Close, code, text, ids))

    @abstractmethod
    def release(self) -> None:
        """Stop: open delivery tags are dropped, deliveries go back to their queues."""

    # ------------------------------------------------------------------------------ look-ups

    def check_access(self, right: str, what: str, name: str) -> None:
        """Raise 403 unless the user has the right to `configure`, `write` or `read` the name."""
        if self.connection.has_expired:
            place, user = self.place(what, name or "amq.default"), self.connection.user
            raise AmqpError(403, f"access to {place} refused for user '{user}', {_EXPIRED}")
        if not self.connection.permissions.allow(right, name or "amq.default"):
            place, user = self.place(what, name or "amq.default"), self.connection.user
            raise AmqpError(403, f"access to {place} refused for user '{user}'")

    def name_or_last(self, name: str) -> str:
        """The name; an empty one stands for the last queue declared on this channel."""
        if not name and not self.last_queue:
            raise AmqpError(404, "no previously declared queue")
        return name or self.last_queue

    def queue_or_last(self, name: str, right: str) -> Queue:
        """The queue; an empty name stands for the last one declared on this channel."""
        name = self.name_or_last(name)
        self.check_access(right, "queue", name)
        return self.queue(name)

    def exchange(self, name: str, right: str | None) -> Exchange:
        """The exchange; raises 403 without the right (None needs none), or 404."""
        client = self.connection
        if right is not None and (client.permissions is not EVERYTHING or client.has_expired):
            self.check_access(right, "exchange", name)
        exchange = self.connection.vhost.exchanges.get(name)
        if exchange is None:
            explanation = f"no {self.place('exchange', name)}"
            raise AmqpError(404, explanation)
        return exchange

    def queue(self, name: str) -> Queue:
        """The queue; raises 404, or 405 if the queue is exclusive to another connection."""
        queue = self.connection.vhost.queues.get(name)
        if queue is None:
            explanation = f"no {self.place('queue', name)}"
            raise AmqpError(404, explanation)
        if queue.owner not in (None, self.connection.number):
            raise self.locked(name)
        return queue

    def locked(self, name: str) -> AmqpError:
        """405: exclusive to another connection, or declared with a different exclusive flag."""
        return AmqpError(
            405,
            f"cannot obtain exclusive access to locked {self.place('queue', name)}. "
            "It could be originally declared on another connection or the exclusive property "
            "value does not match that of the original declaration.",
        )

    def check_not_stream(self, queue: Queue, what: str) -> None:
        """Raise 540 if the queue is a stream, which cannot do this."""
        if isinstance(queue, Stream):
            where = self.place("queue", queue.name)
            raise AmqpError(540, f"{what} not supported by stream queues {where}")

    def reply_name(self) -> str:
        """The name that replaces the pseudo-queue in `reply_to`; raises 406 without a consumer."""
        if self.reply_consumer is None:
            raise AmqpError(406, "fast reply consumer does not exist")
        return self.reply_consumer.name

    def place(self, what: str, name: str) -> str:
        """`queue 'q' in vhost '/'`, as in RabbitMQ's texts (rabbit_misc:rs)."""
        return f"{what} '{name}' in vhost '{self.connection.vhost.name}'"
