"""A channel that stores tasks: the part of kombu's that a `kombu.Producer` uses.

Knows: how kombu writes a message with py-amqp, and where a task message has its id and its ETA.
Must never know: how Celery sends a task.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, tzinfo
from typing import Any, Final

from celery.utils.time import maybe_iso8601, maybe_make_aware

from reliablepub import Message
from reliablepub.integrations import Enqueues, message_of

_UNLOCK: Final = "celery.chord_unlock"
"""Celery's task that waits for the header of a chord, for result backends that cannot count."""


def fields_of(message: Any) -> Mapping[str, Any]:  # noqa: ANN401 - Celery has no types
    """Return the fields of a task message: protocol 1 has them in the body, 2 in the headers."""
    fields: Mapping[str, Any] = message.headers
    return message.body if isinstance(message.body, dict) else fields


def nesting_of(message: Any) -> int:  # noqa: ANN401
    """Return how often the task of a message was replaced; Celery numbers what replaces a task.

    The task that polls the header of a chord has no number. It carries the body, which has one.
    """
    fields = fields_of(message)
    nesting = fields.get("replaced_task_nesting")
    if fields["task"] == _UNLOCK:
        args = fields["args"] if fields is message.body else message.body[0]
        nesting = args[1].get("options", {}).get("replaced_task_nesting")
    return nesting or 0


def channel_of(message: Any, outbox: Enqueues, hold_in: tzinfo | None) -> _OutboxChannel:  # noqa: ANN401 - Celery has no types
    """The channel for a task.

    A held task keeps its ETA, which has passed when a worker reads it.

    Args:
        message: the task message, as Celery makes it.
        outbox: stores the task.
        hold_in: time zone of an ETA without one; None if no task is held until its ETA.
    """
    fields = fields_of(message)
    if hold_in is None or not fields["eta"]:
        return _OutboxChannel(outbox)
    due = maybe_make_aware(maybe_iso8601(fields["eta"]), hold_in)  # parsed as a worker does
    key, retries = fields["id"], fields["retries"]
    return _HoldingChannel(outbox, f"{key} retry {retries}" if retries else key, due)


def _as_text(value: Any) -> Any:  # noqa: ANN401
    """Return headers with bytes as text where they are UTF-8: py-amqp writes both as a string."""
    if value is None or isinstance(value, str | int):  # as most are
        return value
    if isinstance(value, Mapping):
        return {name: _as_text(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_text(one) for one in value]
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
    return value


class _OutboxChannel:
    """The part of a channel that a `kombu.Producer` uses; it stores messages."""

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
            "headers": _as_text(headers or {}),
        }
        return body, given

    def basic_publish(
        self,
        message: tuple[bytes | str, dict[str, Any]],
        exchange: str = "",
        routing_key: str = "",
        **_: object,
    ) -> None:
        """Store the message. The relay sends it as mandatory, and awaits its confirm."""
        body, properties = message
        self._store(message_of(body, exchange, routing_key, properties))

    def _store(self, message: Message) -> None:
        self._outbox.enqueue(message)


class _HoldingChannel(_OutboxChannel):
    """Stores a task until it is due."""

    def __init__(self, outbox: Enqueues, key: str, due: datetime) -> None:
        super().__init__(outbox)
        self._key, self._due = key, due

    def _store(self, message: Message) -> None:
        own_id = message.message_id or str(uuid.uuid4())
        message = replace(message, message_id=own_id, not_before=self._due)
        if self._outbox.enqueue(message, key=self._key) != own_id:
            # An earlier task had this id (`Task.replace` reuses it): store this one without a key.
            self._outbox.enqueue(message)
