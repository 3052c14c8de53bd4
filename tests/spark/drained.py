"""What is in a queue: how much, and all of it, taken out fast by a consumer of pika's.

Knows: AMQP through pika. Must never know: reliablepub, Spark.
"""

import time
from collections import Counter
from contextlib import suppress

import pika
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPError

from tests.amqp_probe import AmqpProbe


def drained(url: str, queue: str, *, quiet_s: float = 0.3) -> list[tuple[str, bytes]]:
    """The `(message_id, body)` of every message, in order; ends when the queue is empty and quiet.

    A busy broker may be quiet for a while with messages left.
    """
    found: list[tuple[str, bytes]] = []
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    last = time.monotonic()
    for method, properties, body in channel.consume(queue, auto_ack=True, inactivity_timeout=0.05):
        if method is not None and properties is not None and body is not None:
            found.append((str(properties.message_id), body))
            last = time.monotonic()
        elif time.monotonic() - last > quiet_s:
            last = time.monotonic()
            is_empty = not channel.queue_declare(queue, passive=True).method.message_count
            if is_empty and not channel.get_waiting_message_count():
                break
    channel.cancel()
    connection.close()
    return found


def arrived(url: str, queue: str) -> int:
    """How many messages are in the queue; 0 while the broker is down, or too busy to say."""
    with suppress(AMQPError, AMQPConnectorException, OSError):
        return AmqpProbe(url).count(queue)
    return 0


def assert_once_by_id(found: list[tuple[str, bytes]], expected: Counter[bytes]) -> None:
    """None is missing, and who keeps one message for each id has exactly what was written."""
    by_id: dict[str, bytes] = {}
    for message_id, body in found:
        assert by_id.setdefault(message_id, body) == body, "one id, two bodies"
    assert Counter(by_id.values()) == expected
