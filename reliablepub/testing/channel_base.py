"""What the two sides of a channel share: its connection, answers, look-ups, and its transaction.

Knows: what each side sees of the channel and of the connection. Must never know: `publishing`,
`consuming`, which method does what.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Protocol

from pamqp import commands

from reliablepub.testing import wire
from reliablepub.testing.node import Client
from reliablepub.testing.options import EVERYTHING
from reliablepub.testing.queues import Stream
from reliablepub.testing.replies import AmqpError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pamqp.base import Frame

    from reliablepub.testing.consumers import Delivery, ReplyConsumer
    from reliablepub.testing.history import Publish
    from reliablepub.testing.node import Node
    from reliablepub.testing.queues import Queue
    from reliablepub.testing.routing import Exchange

_EXPIRED: Final = (
    'backend rabbit_auth_backend_oauth2 returned an error: "Provided JWT token has expired at '
    'timestamp 1700000000 (validated at 1700000001)"'
)
"""RabbitMQ's text, with two fixed times; a test should not depend on it."""


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
        """Keep a publish, and process no input after it, until the alarm or the freeze ends."""

    def cut(self, *, sent: int | None = None, received: int | None = None, reset: bool) -> None:
        """End the TCP connection after a number of further bytes."""

    def go_mute(self) -> None:
        """Stop reading and writing without closing."""


class ChannelBase(ABC):
    """A channel, as its two sides see it: not open yet, open, or closed by the server."""

    def __init__(self, connection: Peer, number: int) -> None:
        self.connection = connection
        self.number = number
        self.is_open = False
        self.is_awaiting_close_ok: bool = False
        self.is_gone = False
        """Whether both sides have closed the channel, and its number is free."""
        self.last_queue = ""
        """The last queue declared on this channel, which an empty name means."""
        self.transaction: Transaction | None = None
        self.reply_consumer: ReplyConsumer | None = None
        """The consumer of direct replies."""

    # ------------------------------------------------------------------------------ frames out

    def reply(self, method: Frame, *, nowait: bool = False) -> None:
        """Answer with a method, unless the client asked for no answer."""
        if not nowait:
            self.connection.send(wire.encode_method(self.number, method))

    def send_method(self, payload: bytes) -> None:
        """Send an encoded method."""
        self.connection.send(wire.encode_frame(wire.METHOD, self.number, payload))

    def send_content(self, method: bytes, publish: Publish) -> None:
        """Send a method with the content of a publish."""
        frame_max = self.connection.frame_max
        self.connection.send(
            wire.encode_content(self.number, method, publish.header, publish.body, frame_max)
        )

    def close(self, code: int, text: str, ids: tuple[int, int]) -> None:
        """Send channel.close; publishes in flight get no confirm, and later input is ignored."""
        if not self.is_open:
            return
        self.release()
        self.is_awaiting_close_ok = True
        self.send_method(wire.encode_close(commands.Channel.Close, code, text, ids))

    @abstractmethod
    def release(self) -> None:
        """Stop: drop open delivery tags, and requeue unacknowledged deliveries."""

    # ------------------------------------------------------------------------------ look-ups

    def check_access(self, right: str, what: str, name: str) -> None:
        """Raise 403 unless the user has the right to `configure`, `write` or `read` the name."""
        client, name = self.connection, name or "amq.default"
        if client.has_expired or not client.permissions.allow(right, name):
            refused = f"access to {self.place(what, name)} refused for user '{client.user}'"
            raise AmqpError(403, f"{refused}, {_EXPIRED}" if client.has_expired else refused)

    def name_or_last(self, name: str) -> str:
        """Return the name; an empty one means the last queue declared on this channel."""
        if not name and not self.last_queue:
            raise AmqpError(404, "no previously declared queue")
        return name or self.last_queue

    def queue_or_last(self, name: str, right: str) -> Queue:
        """Return a queue; an empty name means the last one declared on this channel."""
        name = self.name_or_last(name)
        self.check_access(right, "queue", name)
        return self.queue(name)

    def exchange(self, name: str, right: str | None) -> Exchange:
        """Return an exchange; raise 404, or 403 without the right (None checks no right)."""
        client = self.connection
        if right is not None and (client.permissions is not EVERYTHING or client.has_expired):
            self.check_access(right, "exchange", name)
        exchange = self.connection.vhost.exchanges.get(name)
        if exchange is None:
            raise AmqpError(404, f"no {self.place('exchange', name)}")
        return exchange

    def queue(self, name: str) -> Queue:
        """Return a queue; raise 404, or 405 if it is exclusive to another connection."""
        queue = self.connection.vhost.queues.get(name)
        if queue is None:
            raise AmqpError(404, f"no {self.place('queue', name)}")
        if queue.owner not in (None, self.connection.number):
            raise self.locked(name)
        return queue

    def locked(self, name: str) -> AmqpError:
        """Make a 405: exclusive to another connection, or declared with another exclusive flag."""
        return AmqpError(
            405,
            f"cannot obtain exclusive access to locked {self.place('queue', name)}. "
            "It could be originally declared on another connection or the exclusive property "
            "value does not match that of the original declaration.",
        )

    def check_not_stream(self, queue: Queue, what: str) -> None:
        """Raise 540 if the queue is a stream, which does not support this."""
        if isinstance(queue, Stream):
            where = self.place("queue", queue.name)
            raise AmqpError(540, f"{what} not supported by stream queues {where}")

    def reply_name(self) -> str:
        """Return the name that replaces the pseudo-queue in `reply_to`; raise 406 if none does."""
        if self.reply_consumer is None:
            raise AmqpError(406, "fast reply consumer does not exist")
        return self.reply_consumer.name

    def place(self, what: str, name: str) -> str:
        """Return `queue 'q' in vhost '/'`, as in RabbitMQ's texts (rabbit_misc:rs)."""
        return f"{what} '{name}' in vhost '{self.connection.vhost.name}'"


class Transaction:
    """The open transaction of a channel; a commit or rollback begins the next one.

    It holds back publishes that passed their checks, and settlements of deliveries. As a confirm,
    commit-ok waits until the messages are on disk.

    Args:
        channel: The channel.
        take: Routes a publish.
        settle: Acks (None), requeues (True) or drops (False) deliveries by tag.
        reopen: Makes deliveries unacknowledged again.
    """

    def __init__(
        self,
        channel: ChannelBase,
        take: Callable[[Publish], None],
        settle: Callable[[dict[int, Delivery], bool | None], None],
        reopen: Callable[[dict[int, Delivery]], None],
    ) -> None:
        self._channel = channel
        self._take = take
        self._settle = settle
        self._reopen = reopen
        self._publishes: list[Publish] = []
        self._settlements: list[tuple[dict[int, Delivery], bool | None]] = []
        self._committing: set[Publish] = set()
        self._has_failed = False

    def add_publish(self, publish: Publish) -> None:
        """Hold a publish until the commit."""
        self._publishes.append(publish)

    def add_settlement(self, deliveries: dict[int, Delivery], requeue: bool | None) -> None:  # noqa: FBT001
        """Hold back the settlement of deliveries until the commit."""
        self._settlements.append((deliveries, requeue))

    def commit(self) -> None:
        """tx.commit."""
        publishes, self._publishes = self._publishes, []
        settlements, self._settlements = self._settlements, []
        self._has_failed = False
        self._committing = set(publishes)
        for publish in publishes:
            self._take(publish)
        for deliveries, requeue in settlements:
            self._settle(deliveries, requeue)
        if not publishes:
            self._complete()

    def rollback(self) -> None:
        """tx.rollback."""
        self.release()
        self._channel.reply(commands.Tx.RollbackOk())

    def release(self) -> None:
        """Roll back: drop the publishes; the deliveries are unacknowledged again."""
        for publish in self._publishes:
            publish.mark_lost()
        for deliveries, _ in self._settlements:
            self._reopen(deliveries)
        self._publishes, self._settlements = [], []

    def handle_settled(self, publish: Publish) -> None:
        """Handle a publish of the commit that is on disk, or that a queue has refused."""
        if publish not in self._committing:
            return
        self._committing.discard(publish)
        self._has_failed = self._has_failed or publish.rejected
        if not self._committing:
            self._complete()

    def _complete(self) -> None:
        if self._has_failed:
            error = AmqpError(406, "partial tx completion")
            self._channel.close(error.code, error.reply_text, (90, 20))
        else:
            self._channel.reply(commands.Tx.CommitOk())
