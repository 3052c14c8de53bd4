"""Frameworks whose messages leave through an outbox: one module each, imported on demand.

Knows: what a task queue needs of an outbox. Must never know: a framework.
"""

from __future__ import annotations

from typing import Protocol

from reliablepub import Message


class Enqueues(Protocol):
    """Stores messages: `Outbox`, or an outbox that joins the transactions of a framework."""

    def enqueue(self, message: Message, *, key: str | None = None) -> str:
        """Store one message and return its ``message_id``.

        Args:
            message: the message.
            key: deduplication key. A second message with this key is not stored.
        """
        ...
