"""`OutboxBroker`: taskiq's broker for RabbitMQ, with an outbox for the tasks it sends.

Knows: where taskiq-aio-pika hands a finished message to aio-pika, and how it marks a task that it
sends again. Must never know: tasks, other labels, routing, delays.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from taskiq import AsyncBroker
from taskiq_aio_pika import AioPikaBroker, Queue

from reliablepub import ConfigurationError
from reliablepub.integrations import Enqueues, message_of, warn_of_direct

_RESENT: Final = {"X-Taskiq-requeue", "_retries"}
"""Labels of a task that ``Context.requeue`` or taskiq's middleware sends again."""


class OutboxBroker(AioPikaBroker):
    """An `AioPikaBroker` that sends tasks through an outbox, and consumes as before.

    A process that only sends tasks has no connection to RabbitMQ, so it starts while the broker is
    down. Workers declare the exchange and the queues, as without an outbox.

    ``Context.requeue()`` raises, which rolls back the transaction of the task. Within a joined
    transaction, its task is therefore published directly, as without an outbox. So are this task
    and retries if they cannot be stored, for instance because the database is down.

    Args:
        outbox: stores the tasks: an `Outbox` stores each at once, a `SessionOutbox` as part of the
            transaction of an `AsyncSession` that it has `joined`, and a `DjangoOutbox` as part of
            the ``atomic`` block around ``async_to_sync(task.kiq)(...)``.
        options: options of `AioPikaBroker`, such as ``url``.

    Raises:
        ConfigurationError: the options set ``delayed_message_exchange_plugin``, whose exchange
            returns each message that it delays, so the message would be sent again.

    Example:
        In place of ``AioPikaBroker(url)``::

            broker = OutboxBroker(Outbox("app.db"), url="amqp://...")
    """

    def __init__(self, outbox: Enqueues, **options: Any) -> None:  # noqa: ANN401 - taskiq's
        if options.get("delayed_message_exchange_plugin"):
            raise ConfigurationError(
                "an x-delayed-message exchange returns each message that it delays, so a relay "
                "would send the task again and again: use delay_queue"
            )
        super().__init__(**options)
        self._outbox: Final = outbox

    async def startup(self) -> None:
        """Start the broker; a worker connects to RabbitMQ, and declares the queues it consumes."""
        if self.is_worker_process:
            await super().startup()
        else:
            await AsyncBroker.startup(self)
            if not self._task_queues:
                self.with_queue(Queue())  # as the worker does
        stands_in: Any = _OutboxChannel(self._outbox, self.write_channel)
        self.write_channel = stands_in


class _OutboxChannel:
    """The part of an aio-pika channel that taskiq's broker uses to send; it stores messages.

    Args:
        outbox: stores the messages.
        direct: the channel of a worker; None in other processes.
    """

    def __init__(self, outbox: Enqueues, direct: Any) -> None:  # noqa: ANN401 - aio-pika's
        self._outbox, self._direct = outbox, direct
        self.default_exchange = _OutboxExchange(outbox, direct, "")

    async def get_exchange(self, name: str, **_: object) -> _OutboxExchange:
        """Return the exchange, without contacting the broker."""
        return _OutboxExchange(self._outbox, self._direct, name)

    async def close(self) -> None:
        """Close the channel of a worker."""
        if self._direct is not None:
            await self._direct.close()


class _OutboxExchange:
    """An exchange that stores messages instead of publishing them."""

    def __init__(self, outbox: Enqueues, direct: Any, name: str) -> None:  # noqa: ANN401
        self._outbox, self._direct, self._name = outbox, direct, name

    async def publish(self, message: Any, routing_key: str) -> None:  # noqa: ANN401 - aio-pika's
        """Store the message. The relay sends it as mandatory, and awaits its confirm."""
        if self._direct is None or _RESENT.isdisjoint(message.headers):
            await self._store(message, routing_key)
            return
        # The worker acknowledges the running task next, so this one must not be lost. An open
        # transaction is rolled back, by the exception with which taskiq ends the running task.
        if not getattr(self._outbox, "is_joined", False):
            try:
                await self._store(message, routing_key)
            except Exception as error:  # noqa: BLE001 - of any database
                warn_of_direct(message.headers.get("task_id"), error)
            else:
                return
        exchange = self._direct.default_exchange
        if self._name:
            exchange = await self._direct.get_exchange(self._name, ensure=False)
        await exchange.publish(message, routing_key)

    async def _store(self, message: Any, routing_key: str) -> None:  # noqa: ANN401
        properties = {**dict(message.properties), "type": message.type}
        given = message_of(message.body, self._name, routing_key, properties)
        enqueue_async = getattr(self._outbox, "enqueue_async", None)
        if enqueue_async is not None:
            await enqueue_async(given)
        else:
            await asyncio.to_thread(self._outbox.enqueue, given)
