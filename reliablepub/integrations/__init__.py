"""Integrations that store a framework's messages in an outbox: one module each, loaded on demand.

Knows: the methods of an outbox that a task queue calls. Must never know: a framework.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, Protocol

from reliablepub import Message

LOGGER: Final = logging.getLogger("reliablepub.integrations")
_PERSISTENT: Final = 2
"""AMQP's ``delivery-mode``; without one, a message of an AMQP client is transient."""


class Enqueues(Protocol):
    """An `Outbox`, or an outbox that joins the transactions of a framework.

    The latter also has ``is_joined``, whether a message would join an open transaction now, and
    ``enqueue_async``, which does so from a coroutine.
    """

    def enqueue(self, message: Message, *, key: str | None = None) -> str:
        """Store one message and return its ``message_id``.

        Args:
            message: the message.
            key: deduplication key. A second message with this key is not stored.
        """
        ...


def message_of(
    body: bytes | str, exchange: str, routing_key: str, properties: Mapping[str, Any]
) -> Message:
    """Return the message that an AMQP client would publish with these properties.

    Args:
        body: the body; text is encoded as UTF-8.
        exchange: name of the exchange.
        routing_key: routing key.
        properties: AMQP properties by name; other names are ignored, as AMQP clients do.

    Raises:
        InvalidMessage: AMQP cannot carry it.
    """
    return Message.received(
        body.encode() if isinstance(body, str) else body,
        properties,
        exchange=exchange,
        routing_key=routing_key,
        user_id=properties.get("user_id"),
        persistent=properties.get("delivery_mode") == _PERSISTENT,
    )


def warn_of_direct(task_id: object, error: Exception) -> None:
    """Log that a worker publishes a task directly, as without an outbox, since it was not stored.

    A worker does so with tasks that would otherwise be lost: the framework acknowledges the running
    task, whether its retry, or what follows it, was stored or not. The database may be down, and be
    why it is retried.

    Args:
        task_id: the task.
        error: raised by the outbox. Its text may have the body, so its type alone is logged.
    """
    kind = type(error).__name__
    LOGGER.warning(
        "task %s is published directly, as storing it raised %s",
        task_id,
        kind,
        extra={"event": "published_directly"},
    )
