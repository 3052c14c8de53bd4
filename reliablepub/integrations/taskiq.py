"""`OutboxBroker`: taskiq's broker for RabbitMQ, whose tasks leave through an outbox.

Knows: where taskiq-aio-pika hands a finished message to aio-pika. Must never know: tasks, labels,
routing, delays; all of this is taskiq's own.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from taskiq import AsyncBroker
from taskiq_aio_pika import AioPikaBroker, Queue

from reliablepub.integrations import Enqueues, message_of


class OutboxBroker(AioPikaBroker):
    """taskiq's `AioPikaBroker`: what is sent is stored, what is consumed comes from RabbitMQ.

    A process that only sends tasks has no connection to RabbitMQ, so it starts while the broker is
    down. The worker declares exchange and queues, as ever.

    Args:
        outbox: where tasks are stored: an `Outbox` stores each at once, a `SessionOutbox` makes it
            part of the transaction of an `AsyncSession` that it has `joined`.
        options: those of `AioPikaBroker`, such as ``url``.

    Example:
        In place of ``AioPikaBroker(url)``::

            broker = OutboxBroker(Outbox("app.db"), url="amqp://...")
    """

    def __init__(self, outbox: Enqueues, **options: Any) -> None:  # noqa: ANN401 - taskiq's
        super().__init__(**options)
        self._outbox: Final = outbox

    async def startup(self) -> None:
        """Start; a worker connects to RabbitMQ, and declares what it consumes."""
        if self.is_worker_process:
            await super().startup()
            if self.write_channel is not None:
                await self.write_channel.close()
        else:
            await AsyncBroker.startup(self)
            if not self._task_queues:
                self.with_queue(Queue())  # as the worker does
        stands_in: Any = _OutboxChannel(self._outbox)
        self.write_channel = stands_in


class _OutboxChannel:
    """The part of an aio-pika channel that a broker sends by."""

    def __init__(self, outbox: Enqueues) -> None:
        self._outbox = outbox
        self.default_exchange = _OutboxExchange(outbox, "")

    async def get_exchange(self, name: str, **_: object) -> _OutboxExchange:
        """Return the exchange, without asking the broker."""
        return _OutboxExchange(self._outbox, name)

    async def close(self) -> None:
        """Do nothing."""


class _OutboxExchange:
    """An exchange that stores what is published."""

    def __init__(self, outbox: Enqueues, name: str) -> None:
        self._outbox, self._name = outbox, name

    async def publish(self, message: Any, routing_key: str) -> None:  # noqa: ANN401 - aio-pika's
        """Store the message. It is always mandatory, and confirmed to the relay."""
        properties = {**dict(message.properties), "type": message.type}
        given = message_of(message.body, self._name, routing_key, properties)
        enqueue_async = getattr(self._outbox, "enqueue_async", None)
        if enqueue_async is not None:
            await enqueue_async(given)
        else:
            await asyncio.to_thread(self._outbox.enqueue, given)
