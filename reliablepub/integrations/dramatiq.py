"""`OutboxBroker`: dramatiq's broker for RabbitMQ, with an outbox for the messages it sends.

Knows: where dramatiq hands a finished message to pika. Must never know: actors, middleware, how
dramatiq encodes or delays a message.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from dramatiq import Message
from dramatiq.brokers.rabbitmq import RabbitmqBroker

from reliablepub import Queue, Topology
from reliablepub.integrations import Enqueues, message_of, warn_of_direct

_CHANNEL: Any = RabbitmqBroker.channel
"""The property of dramatiq's broker that gives each thread its channel to RabbitMQ."""
_FOLLOWING: Final = ("process_message", "skip_message")
"""Signals after which dramatiq's middleware sends retries, pipelines and callbacks."""


class OutboxBroker(RabbitmqBroker):
    """A `RabbitmqBroker` that sends messages through an outbox, and consumes as before.

    Messages that a worker sends are stored too: retries, pipelines, callbacks. Those that cannot be
    stored, for instance because the database is down, are published directly: dramatiq would only
    log the error, and acknowledge the message that they follow. So are messages that follow a
    failed actor if a middleware has joined its transaction, which will be rolled back.

    Args:
        outbox: stores the messages: an `Outbox` stores each at once, an outbox of SQLAlchemy or
            Django as part of its transaction.
        options: options of `RabbitmqBroker`, such as ``url``.

    Example:
        In place of ``RabbitmqBroker(url=...)``::

            dramatiq.set_broker(OutboxBroker(Outbox("app.db"), url="amqp://..."))
    """

    queues_pending: set[str]

    def __init__(self, outbox: Enqueues, **options: Any) -> None:  # noqa: ANN401 - dramatiq's
        self._diversion: Final = _Diversion()
        self._outbox: Final = outbox
        super().__init__(**options)

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Store a message.

        Args:
            message: the message of an actor.
            delay: milliseconds before the message is processed.

        Raises:
            OutboxError: the message was not stored (`Outbox.enqueue`).
        """
        # The open transaction of an actor that has failed will be rolled back.
        if not (self._diversion.has_failed and getattr(self._outbox, "is_joined", False)):
            try:
                with self._diverted(_OutboxChannel(self._outbox)):
                    return super().enqueue(message, delay=delay)
            except Exception as error:
                if not self._diversion.falls_back:
                    raise
                warn_of_direct(message.message_id, error)
        return super().enqueue(message, delay=delay)

    def emit_after(self, signal: str, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - dramatiq's
        """Run middleware; that of a worker may send what follows a message."""
        now = self._diversion
        before = now.falls_back, now.has_failed
        now.falls_back = signal in _FOLLOWING
        # A transaction that middleware begins from here on is its own.
        is_joined = getattr(self._outbox, "is_joined", False)
        now.has_failed = is_joined and kwargs.get("exception") is not None
        try:
            super().emit_after(signal, *args, **kwargs)
        finally:
            now.falls_back, now.has_failed = before

    def declare_queue(self, queue_name: str, *, ensure: bool = False) -> None:
        """Declare a queue; within `enqueue`, without contacting the broker.

        Args:
            queue_name: name of the queue.
            ensure: whether to create the queue at the broker, if necessary.
        """
        is_stored = isinstance(self._diversion.channel, _OutboxChannel)
        super().declare_queue(queue_name, ensure=ensure and not is_stored)

    def topology(self) -> Topology:
        """Return the queues of all actors, for the relay: ``Publisher(topology=...)``.

        dramatiq's own broker declares a queue before it sends a message to it.
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

    channel: Any = property(_channel_now, None, _CHANNEL.fdel)


class _Diversion(threading.local):
    """The object that replaces this thread's channel to RabbitMQ; None for the real one.

    Attributes:
        channel: the object.
        falls_back: whether a message that cannot be stored is published directly.
        has_failed: whether middleware runs because an actor has failed within a transaction.
    """

    channel: Any = None
    falls_back: bool = False
    has_failed: bool = False


class _OutboxChannel:
    """A channel that stores messages instead of publishing them."""

    def __init__(self, outbox: Enqueues) -> None:
        self._outbox = outbox

    def basic_publish(
        self, *, exchange: str, routing_key: str, body: bytes, properties: object, **_: object
    ) -> None:
        """Store the message. The relay sends it as mandatory, and awaits its confirm."""
        self._outbox.enqueue(message_of(body, exchange, routing_key, vars(properties)))


class _Declared:
    """A channel that records declared queues."""

    def __init__(self) -> None:
        self.queues: list[Queue] = []

    def queue_declare(
        self, *, queue: str, durable: bool, arguments: dict[str, Any] | None = None
    ) -> None:
        """Record the queue."""
        self.queues.append(Queue(queue, durable=durable, arguments=arguments or {}))
