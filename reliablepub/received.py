"""Reads the properties of a consumed message as pika, aio-pika (aiormq) and kombu represent them.

Knows: the names and types that each client has for them. Must never know: these clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from reliablepub.errors import InvalidMessage
from reliablepub.headers import ATTEMPT_HEADER

_SAME: Final = (
    *("content_type", "content_encoding", "priority", "correlation_id", "reply_to"),
    *("message_id", "app_id"),
)
_NAMES: Final = (*_SAME, "headers", "delivery_mode", "expiration", "timestamp")
_TRANSIENT: Final = 1
"""AMQP's ``delivery-mode`` of a message that need not survive a restart of the broker."""


def received_fields(properties: object) -> dict[str, Any]:
    """Return the fields of a `Message` that properties stand for.

    Args:
        properties: an object with an attribute for each property, or a mapping.

    Raises:
        InvalidMessage: these are no properties, or ``expiration`` or ``timestamp`` is none.
    """
    # A whole message has them, too: aio-pika's own expiration is in seconds, and kombu has none.
    whole = getattr(properties, "properties", None)
    properties = properties if whole is None else whole
    if not isinstance(properties, Mapping) and not any(map(partial(hasattr, properties), _NAMES)):
        raise InvalidMessage("properties", f"is {properties!r:.40}, not a message's properties")

    def found(*names: str) -> Any:  # noqa: ANN401 - whatever the client has made of it
        for name in names:
            if isinstance(properties, Mapping):
                value = properties.get(name)
            else:
                value = getattr(properties, name, None)
            if value is not None:
                return value
        return None

    fields = {name: found(name) for name in _SAME}
    fields["type"] = found("message_type", "type")
    fields["persistent"] = found("delivery_mode") != _TRANSIENT
    fields["expiration"] = _expiration(found("expiration"))
    fields["timestamp"] = _timestamp(found("timestamp"))
    headers = found("headers", "application_headers") or {}
    kept = {name: _value(one) for name, one in headers.items() if name != ATTEMPT_HEADER}
    fields["headers"] = kept or None
    return {name: value for name, value in fields.items() if value is not None}


def received_body(body: bytes | bytearray | memoryview | str, fields: Mapping[str, Any]) -> bytes:
    """Return the payload; kombu makes a text of it if the message says how it is encoded.

    Raises:
        InvalidMessage: the text cannot be encoded as the message says.
    """
    if not isinstance(body, str):
        return bytes(body)
    encoding = fields.get("content_encoding", "utf-8")
    try:
        return body.encode(encoding)
    except (LookupError, UnicodeEncodeError):
        raise InvalidMessage("body", f"is not a valid text in {encoding!r:.40}") from None


def _expiration(value: Any) -> int | None:  # noqa: ANN401
    if value is None:
        return None
    try:
        return int(value)
    except (TypeError, ValueError):
        raise InvalidMessage("expiration", f"is {value!r:.40}, not a number of ms") from None


def _timestamp(value: Any) -> datetime | None:  # noqa: ANN401
    if value is None:
        return None
    if isinstance(value, datetime):
        return _in_utc(value)
    try:
        return datetime.fromtimestamp(value, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        raise InvalidMessage("timestamp", f"is {value!r:.40}, not a time since 1970") from None


def _in_utc(time: datetime) -> datetime:
    """Give a time without a time zone the one that AMQP means."""
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time


def _value(value: Any) -> Any:  # noqa: ANN401
    """Return a value of the headers as `Message` takes it."""
    if value is None or isinstance(value, str | int):  # as most are
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping):
        return {name: _value(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_value(one) for one in value]
    return _in_utc(value) if isinstance(value, datetime) else value
