"""A message's properties and headers as JSON text that people can read, and back without loss.

Knows: which properties a `Message` has, and JSON. Must never know: tables, AMQP's own encoding.

Only what is set is written, so an ordinary message has ``{}``. JSON has no bytes, decimals or
times: these become objects with one telling key, ``{"$bytes": "..."}``. A header table of the user
that happens to look like such an object is wrapped, as ``{"$table": {...}}``: nothing is ambiguous.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal
from functools import partial
from json import JSONDecodeError, JSONEncoder, loads
from typing import Any, Final

from reliablepub.headers import FieldValue
from reliablepub.message import Message

_PLAIN: Final = (
    "priority",
    "expiration",
    "content_type",
    "content_encoding",
    "correlation_id",
    "reply_to",
    "type",
    "user_id",
    "app_id",
)
_TAGGED: Final = '{"$'
"""Only a table whose first name begins with ``$`` gives this: quotes in strings are escaped."""
_encode: Final = JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode


def to_text(message: Message) -> str:
    """All properties but ``message_id``, as JSON."""
    m = message
    if m.is_plain and m.headers is None and m.persistent:
        return "{}"
    found: dict[str, Any] = {
        name: value for name in _PLAIN if (value := getattr(m, name)) is not None
    }
    if not m.persistent:
        found["persistent"] = False
    if m.timestamp is not None:
        found["timestamp"] = m.timestamp.isoformat()
    if m.headers is None:
        return _encode(found)
    return _with_headers(found, m.headers)


def from_text(text: str) -> dict[str, Any]:
    """Keyword arguments for `Message`.

    Raises:
        ValueError: the text was not written by `to_text`.
    """
    if text == "{}":
        return {}
    try:
        found = loads(text)
    except (JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the properties are not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("the properties are not a JSON object")  # noqa: TRY004 - the data's fault
    if "timestamp" in found:
        found["timestamp"] = datetime.fromisoformat(found["timestamp"])
    if "headers" in found and _TAGGED in text:
        # The outermost table is one of AMQP's and never a tagged value.
        found["headers"] = _untagged_table(found["headers"])
    return found


def _with_headers(found: dict[str, Any], headers: Mapping[str, FieldValue]) -> str:
    """Try the plain way, which is what nearly all headers need, before looking at each value."""
    try:
        found["headers"] = headers
        text = _encode(found)
        if _TAGGED not in text:
            return text
    except TypeError:  # bytes, Decimal, datetime
        pass
    found["headers"] = {name: _tagged(value) for name, value in headers.items()}
    return _encode(found)


def _tagged(value: FieldValue) -> Any:  # noqa: ANN401 - whatever JSON has
    """The value as JSON has it, or as an object with one telling key."""
    result: Any = value
    match value:
        case bytes():
            result = {"$bytes": b64encode(value).decode()}
        case Decimal():
            result = {"$decimal": str(value)}
        case datetime():
            result = {"$datetime": value.isoformat()}
        case Mapping():
            result = {name: _tagged(inner) for name, inner in value.items()}
            if len(result) == 1 and _UNTAG.keys() >= result.keys():
                result = {"$table": result}
        case list() | tuple():
            result = [_tagged(inner) for inner in value]
    return result


def _untagged(value: Any) -> Any:  # noqa: ANN401 - the inverse of `_tagged`
    if isinstance(value, list):
        return [_untagged(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, inner),) = value.items()
        if tag in _UNTAG:
            return _UNTAG[tag](inner)
    return _untagged_table(value)


def _untagged_table(table: dict[str, Any]) -> dict[str, Any]:
    return {name: _untagged(inner) for name, inner in table.items()}


_UNTAG: Final[dict[str, Callable[[Any], Any]]] = {
    "$bytes": partial(b64decode, validate=True),
    "$decimal": Decimal,
    "$datetime": datetime.fromisoformat,
    "$table": _untagged_table,
}
