"""An exchange, a queue for each kind of message, and a consumer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pika
from pika.adapters.blocking_connection import BlockingChannel

EXCHANGE = "flights_pipeline"
BINDINGS = {
    "flights_pipeline.late": "*.late",
    "flights_pipeline.on_time": "*.on_time",
    "flights_pipeline.cancelled": "*.cancelled",
    "flights_pipeline.hours": "hour.*",
}
_PREFETCH = 1_000
_ACKED_TOGETHER = 200


class Queues:
    """The exchange and queues of the pipeline.

    Args:
        url: URL of the broker.
    """

    DUMP = "message_id STRING, routing_key STRING, value STRING"

    def __init__(self, url: str) -> None:
        self._parameters = pika.URLParameters(url)

    def declare(self) -> None:
        """Declare the exchange, the queues and their bindings."""
        with self._channel() as channel:
            channel.exchange_declare(EXCHANGE, "topic", durable=True)
            for queue, key in BINDINGS.items():
                channel.queue_declare(queue, durable=True)
                channel.queue_bind(queue, EXCHANGE, key)

    def delete(self) -> None:
        """Delete the queues and the exchange."""
        with self._channel() as channel:
            for queue in BINDINGS:
                channel.queue_delete(queue)
            channel.exchange_delete(EXCHANGE)

    def count(self) -> int:
        """The number of messages in all queues."""
        with self._channel() as channel:
            found = [channel.queue_declare(queue, passive=True) for queue in BINDINGS]
        return sum(answer.method.message_count for answer in found)

    def dump(self, path: Path) -> int:
        """Empty the queues into a file of JSON lines; returns the number of messages."""
        lines = 0
        with path.open("w") as file, self._channel() as channel:
            channel.basic_qos(prefetch_count=_PREFETCH)
            for queue in BINDINGS:
                for line in _taken(channel, queue):
                    file.write(json.dumps(line) + "\n")
                    lines += 1
        return lines

    @contextmanager
    def _channel(self) -> Iterator[BlockingChannel]:
        connection = pika.BlockingConnection(self._parameters)
        try:
            yield connection.channel()
        finally:
            if connection.is_open:
                connection.close()


def _taken(channel: BlockingChannel, queue: str) -> Iterator[dict[str, str | None]]:
    """Consume the messages that are in a queue now, waiting for the broker to deliver them."""
    left = channel.queue_declare(queue, passive=True).method.message_count
    if left == 0:
        return
    for method, properties, body in channel.consume(queue):
        assert method is not None, "without a time limit, only messages are yielded"
        assert properties is not None
        assert body is not None
        yield {
            "message_id": properties.message_id,
            "routing_key": method.routing_key,
            "value": body.decode(),
        }
        left -= 1
        if left % _ACKED_TOGETHER == 0:
            channel.basic_ack(method.delivery_tag, multiple=True)
        if left == 0:
            break
    channel.cancel()
