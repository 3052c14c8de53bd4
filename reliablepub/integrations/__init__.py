"""Integrations that store a framework's messages in an outbox: one module each, loaded on demand.

Knows: the methods of an outbox that a task queue calls, and the names of AMQP properties. Must
never know: a framework.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from reliablepub import Message

LOGGER: Final = logging.getLogger("reliablepub.integrations")
OF_THE_RELAY: Final = ("rp-attempt",)
"""Headers that the relay adds. A worker that retries a task may pass on headers it received."""
_AS_GIVEN: Final = (
    *("content_type", "content_encoding", "priority", "correlation_id", "reply_to"),
    *("message_id", "type", "user_id", "app_id"),
)
_PERSISTENT: Final = 2


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
    fields = {name: properties.get(name) for name in _AS_GIVEN}
    expiration, headers = properties.get("expiration"), properties.get("headers")
    return Message(
        body.encode() if isinstance(body, str) else bytes(body),
        exchange,
        routing_key,
        None if headers is None else {k: v for k, v in headers.items() if k not in OF_THE_RELAY},
        expiration=None if expiration is None else int(expiration),
        timestamp=_timestamp(properties.get("timestamp")),
        persistent=properties.get("delivery_mode") == _PERSISTENT,
        **fields,
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


def _timestamp(value: datetime | float | None) -> datetime | None:
    if not isinstance(value, datetime):
        return None if value is None else datetime.fromtimestamp(value, UTC)
    return value if value.tzinfo else value.replace(tzinfo=UTC)  # as AMQP clients read it
