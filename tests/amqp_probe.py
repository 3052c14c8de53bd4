"""`AmqpProbe`: how a test looks at a broker, the fake or the real one, with the same code.

It knows AMQP through pika's blocking client, an independent one, and nothing of reliablepub. Every
call opens a connection of its own, so that a killed broker or a closed channel is no concern of it.
"""

import contextlib
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import pika
from pika.adapters.blocking_connection import BlockingChannel

_POLL_S = 0.005
_FEW = 100
"""Messages that are as well taken one by one."""


class AmqpProbe:
    """Declares, binds and drains at one URL; deletes what it declared when it is closed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._queues: list[str] = []
        self._exchanges: list[str] = []

    @property
    def version(self) -> tuple[int, ...]:
        """The version of RabbitMQ that the broker announces."""
        with self._channel() as channel:
            announced = (channel.connection._impl.server_properties or {})["version"]
        return tuple(int(part) for part in announced.split("."))

    def declare_queue(
        self,
        name: str | None = None,
        *,
        durable: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The name of the new queue, a fresh one by default."""
        name = name or unique("queue")
        with self._channel() as channel:
            channel.queue_declare(name, durable=durable, arguments=dict(arguments or {}))
        self._queues.append(name)
        return name

    def declare_exchange(
        self, name: str | None = None, *, kind: str = "direct", durable: bool = True
    ) -> str:
        """The name of the new exchange, a fresh one by default."""
        name = name or unique("exchange")
        with self._channel() as channel:
            channel.exchange_declare(name, exchange_type=kind, durable=durable)
        self._exchanges.append(name)
        return name

    def bind(self, queue: str, exchange: str, routing_key: str = "") -> None:
        """Route what comes to the exchange with this key to the queue."""
        with self._channel() as channel:
            channel.queue_bind(queue, exchange, routing_key)

    def unbind(self, queue: str, exchange: str, routing_key: str = "") -> None:
        """The opposite of `bind`."""
        with self._channel() as channel:
            channel.queue_unbind(queue, exchange, routing_key)

    def delete_queue(self, name: str) -> None:
        """Delete the queue, if it is there."""
        with self._channel() as channel:
            channel.queue_delete(name)

    def purge(self, *queues: str) -> None:
        """Drop what is in the queues."""
        with self._channel() as channel:
            for queue in queues:
                channel.queue_purge(queue)

    def delete_exchange(self, name: str) -> None:
        """Delete the exchange, if it is there."""
        with self._channel() as channel:
            channel.exchange_delete(name)

    def count(self, queue: str) -> int:
        """How many messages are ready in the queue."""
        with self._channel() as channel:
            return int(channel.queue_declare(queue, passive=True).method.message_count)

    def drain(
        self, queue: str, expected: int = 0, *, timeout_s: float = 120.0
    ) -> list[tuple[bytes, pika.BasicProperties]]:
        """Take everything out of the queue, in order.

        Returns when the queue is empty and at least `expected` messages came, or after `timeout_s`
        with what is there. More than expected is returned too: duplicates should be seen.
        """
        deadline = time.monotonic() + timeout_s
        messages: list[tuple[bytes, pika.BasicProperties]] = []
        with self._channel() as channel:
            messages += _consumed(channel, queue, expected, deadline)
            while time.monotonic() < deadline:
                _, properties, body = channel.basic_get(queue, auto_ack=True)
                if body is not None and properties is not None:
                    messages.append((body, properties))
                elif len(messages) >= expected:
                    break
                else:
                    time.sleep(_POLL_S)
        return messages

    def close(self) -> None:
        """Delete what was declared here."""
        with self._channel() as channel:
            for queue in self._queues:
                channel.queue_delete(queue)
            for exchange in self._exchanges:
                channel.exchange_delete(exchange)

    @contextlib.contextmanager
    def _channel(self) -> Iterator[BlockingChannel]:
        with contextlib.closing(
            pika.BlockingConnection(pika.URLParameters(self.url))
        ) as connection:
            yield connection.channel()


def unique(prefix: str) -> str:
    """A name that no other test has."""
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


def _consumed(
    channel: BlockingChannel, queue: str, expected: int, deadline: float
) -> list[tuple[bytes, pika.BasicProperties]]:
    """As many as are expected, quickly; but whether there are more, only ``basic.get`` can tell."""
    messages: list[tuple[bytes, pika.BasicProperties]] = []
    if expected < _FEW:
        return messages
    channel.basic_qos(prefetch_count=_FEW)
    for method, properties, body in channel.consume(queue, inactivity_timeout=_POLL_S):
        if method is not None and properties is not None and body is not None:
            messages.append((body, properties))
            if len(messages) % (_FEW // 2) == 0 or len(messages) == expected:
                channel.basic_ack(method.delivery_tag, multiple=True)
        if len(messages) == expected or time.monotonic() > deadline:
            break
    channel.cancel()
    return messages
