"""`OutboxBroker`: dramatiq's broker for RabbitMQ, whose messages leave through an outbox.

Knows: where dramatiq hands a finished message to pika. Must never know: actors, middleware, how a
message is encoded or delayed; all of this is dramatiq's own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from dramatiq import Message
from dramatiq.brokers.rabbitmq import RabbitmqBroker

from reliablepub import Queue, Topology
from reliablepub.integrations import Enqueues, message_of

_CHANNEL: Any = RabbitmqBroker.channel
"""A property: the channel to RabbitMQ of a thread."""


class OutboxBroker(RabbitmqBroker):
    """dramatiq's `RabbitmqBroker`: what is sent is stored, what is consumed comes from RabbitMQ.

    Also what a worker sends leaves through the outbox: retries, pipelines, callbacks.

    Args:
        outbox: where messages are stored: an `Outbox` stores each at once, an outbox of SQLAlchemy
            or Django makes it part of their transaction.
        options: those of `RabbitmqBroker`, such as ``url``.

    Example:
        In place of ``RabbitmqBroker(url=...)``::

            dramatiq.set_broker(OutboxBroker(Outbox("app.db"), url="amqp://..."))
    """

    def __init__(self, outbox: Enqueues, **options: Any) -> None:  # noqa: ANN401 - dramatiq's
        self._diversion: Final = _Diversion()
        self._outbox: Final = outbox
        super().__init__(**options)

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Store a message.

        Args:
            message: the message of an actor.
            delay: how long to wait before it is processed, in milliseconds.

        Raises:
            OutboxError: the message was not stored (`Outbox.enqueue`).
        """
        with self._diverted(_OutboxChannel(self._outbox)):
            return super().enqueue(message, delay=delay)

    def declare_queue(self, queue_name: str, *, ensure: bool = False) -> None:
        """Declare a queue; in `enqueue`, without asking the broker.

        Args:
            queue_name: name of the queue.
            ensure: whether to create the queue at the broker, if necessary.
        """
        is_stored = isinstance(self._diversion.channel, _OutboxChannel)
        super().declare_queue(queue_name, ensure=ensure and not is_stored)

    def topology(self) -> Topology:
        """Return the queues of all actors, for the relay: ``Publisher(topology=...)``.

        dramatiq's own broker declares a queue before it sends a message there.
        """
        pending, self.queues_pending = self.queues_pending, set(self.queues)
        declared = _Declared()
        with self._diverted(declared):
            for name in sorted(self.queues):
                self.declare_queue(name, ensure=True)
        self.queues_pending = pending
        return Topology(queues=tuple(declared.queues))

    @contextmanager
    def _diverted(self, channel: object) -> Iterator[None]:
        before, self._diversion.channel = self._diversion.channel, channel
        try:
            yield
        finally:
            self._diversion.channel = before

    def _channel_now(self) -> Any:  # noqa: ANN401 - pika's, or one of this module
        diverted = self._diversion.channel
        return _CHANNEL.fget(self) if diverted is None else diverted

    channel = property(_channel_now, None, _CHANNEL.fdel)


class _Diversion(threading.local):
    """What stands for the channel to RabbitMQ in this thread."""

    channel: Any = None


class _OutboxChannel:
    """A channel that stores what is published."""

    def __init__(self, outbox: Enqueues) -> None:
        self._outbox = outbox

    def basic_publish(
        self, *, exchange: str, routing_key: str, body: bytes, properties: object, **_: object
    ) -> None:
        """Store the message. It is always mandatory, and confirmed to the relay."""
        self._outbox.enqueue(message_of(body, exchange, routing_key, vars(properties)))


class _Declared:
    """A channel that notes the queues that are declared."""

    def __init__(self) -> None:
        self.queues: list[Queue] = []

    def queue_declare(
        self, *, queue: str, durable: bool, arguments: dict[str, Any] | None = None
    ) -> None:
        """Note the queue."""
        self.queues.append(Queue(queue, durable=durable, arguments=arguments or {}))
