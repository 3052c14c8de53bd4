"""The channel by which kombu's producer stores a task, and until when the task is held.

Knows: what a `kombu.Producer` asks of a channel, and where a task message has its id and its ETA.
Must never know: the application, routing, who sends.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import datetime, tzinfo
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware

from reliablepub import Message
from reliablepub.integrations import Enqueues, message_of


def channel_of(message: Any, outbox: Enqueues, hold_in: tzinfo | None) -> OutboxChannel:  # noqa: ANN401
    """Return the channel for a task.

    A task that is held keeps its ETA, which is past when a worker reads it.

    Args:
        message: the task message, as Celery makes it.
        outbox: where it is stored.
        hold_in: the time zone of an ETA without one, to hold the task until its ETA; None holds no
            task.
    """
    # Protocol 1 has these fields in the body, protocol 2 in the headers.
    fields = message.body if isinstance(message.body, dict) else message.headers
    if hold_in is None or not fields["eta"]:
        return OutboxChannel(outbox)
    due = maybe_make_aware(maybe_iso8601(fields["eta"]), hold_in)  # as a worker reads it
    key, retries = fields["id"], fields["retries"]
    return _HoldingChannel(outbox, f"{key} retry {retries}" if retries else key, due)


class OutboxChannel:
    """The part of a channel that a `kombu.Producer` uses."""

    is_bound = True
    connection = None

    def __init__(self, outbox: Enqueues) -> None:
        self._outbox = outbox

    def prepare_message(  # noqa: PLR0917 - as kombu calls it
        self,
        body: bytes | str,
        priority: int | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        headers: dict[str, Any] | None = None,
        properties: dict[str, Any] | None = None,
    ) -> tuple[bytes | str, dict[str, Any]]:
        """Return the message, for `basic_publish`."""
        given = {
            **(properties or {}),
            "priority": priority,
            "content_type": content_type,
            "content_encoding": content_encoding,
            "headers": headers or {},
        }
        return body, given

    def basic_publish(
        self,
        message: tuple[bytes | str, dict[str, Any]],
        exchange: str = "",
        routing_key: str = "",
        **_: object,
    ) -> None:
        """Store the message. It is always mandatory, and confirmed to the relay."""
        body, properties = message
        self._store(message_of(body, exchange, routing_key, properties))

    def _store(self, message: Message) -> None:
        self._outbox.enqueue(message)


class _HoldingChannel(OutboxChannel):
    """Stores a task until it is due."""

    def __init__(self, outbox: Enqueues, key: str, due: datetime) -> None:
        super().__init__(outbox)
        self._key, self._due = key, due

    def _store(self, message: Message) -> None:
        own_id = message.message_id or str(uuid.uuid4())
        message = replace(message, message_id=own_id, not_before=self._due)
        if self._outbox.enqueue(message, key=self._key) != own_id:
            # Another task has had this id (as `Task.replace` gives it): store this one as well.
            self._outbox.enqueue(message)
