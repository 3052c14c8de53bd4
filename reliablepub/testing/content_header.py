"""Content headers: decodes, encodes and rewrites the properties of a message.

Knows: the wire format of the properties of class basic. Must never know: what a property means.

A message must reach its consumers with the field types that its publisher chose, and decoding loses
some of them. So `rewritten` copies the bytes that it does not change.
"""

from __future__ import annotations

import struct
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from pamqp import header
from pamqp.commands import Basic

from reliablepub.testing.decoding import ARGUMENT_READERS, Reader
from reliablepub.testing.fields import encode_entry, short_string
from reliablepub.testing.replies import frame_error
from reliablepub.testing.wire import HEADER

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

BASIC_CLASS: Final = 60
PERSISTENT: Final = 2
"""The `delivery_mode` of a message that is to be on disk."""

_FIXED = struct.Struct(">HHQ")  # class, weight, size of the body
_FIXED_SIZE = _FIXED.size
_FLAGS_SIZE = 2
_HEADERS_FLAG = Basic.Properties.flags["headers"]
_EXPIRATION_FLAG = Basic.Properties.flags["expiration"]
_REPLY_TO_FLAG = Basic.Properties.flags["reply_to"]
_PROPERTIES = tuple(
    (flag, name, ARGUMENT_READERS[Basic.Properties.amqp_type(name)])
    for name, flag in Basic.Properties.flags.items()
)
"""The properties in their order on the wire: flag, name, reader."""


def decode_header(payload: bytes) -> tuple[int, int, int]:
    """Return the class, weight and body size of a content header frame."""
    if len(payload) < _FIXED_SIZE:
        raise frame_error(HEADER, payload, "unknown_frame")
    class_id, weight, body_size = _FIXED.unpack_from(payload)
    return class_id, weight, body_size


def decode_properties(payload: bytes) -> Basic.Properties:
    """Decode the properties in a content header frame.

    Raises:
        MalformedError: The properties do not fit the flags.
    """
    properties = Basic.Properties()
    reader = Reader(payload, _FIXED_SIZE)
    flags = reader.number(_FLAGS_SIZE)
    for flag, name, read in _PROPERTIES:
        if flags & flag:
            setattr(properties, name, read(reader))
    reader.expect_end()
    return properties


def encode_properties(named: dict[str, Any], body_size: int) -> bytes:
    """Encode properties that a test gives by name; the message is persistent by default.

    Raises:
        ValueError: There is no such property, or its value cannot be encoded.
    """
    if unknown := sorted(named.keys() - set(Basic.Properties.attributes())):
        raise ValueError(f"there is no property {unknown[0]!r}")
    try:
        if isinstance(named.get("timestamp"), int):
            named = named | {"timestamp": datetime.fromtimestamp(named["timestamp"], UTC)}
        properties = Basic.Properties(**{"delivery_mode": PERSISTENT} | named)
        return header.ContentHeader(0, body_size, properties).marshal()
    except (TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
        raise ValueError(f"a property cannot be encoded: {error}") from error


def rewritten(
    payload: bytes,
    *,
    drop: Collection[str] = (),
    add: Mapping[str, Any] | None = None,
    keep_expiration: bool = True,
    reply_to: str | None = None,
) -> bytes:
    """Return a content header with some headers dropped, and others replaced or added.

    Args:
        payload: A well-formed content header, which the caller has decoded before.
        drop: Names of headers to remove.
        add: Headers to set. Then all headers are sorted by name, as rabbit_misc:set_table_value
            does.
        keep_expiration: Whether the `expiration` property stays.
        reply_to: The new value of the `reply_to` property, if it has one; None leaves it.
    """
    add = add or {}
    reader = Reader(payload, _FIXED_SIZE)
    flags = reader.number(_FLAGS_SIZE)
    parts: list[bytes] = []
    new_flags = flags | (_HEADERS_FLAG if add else 0)
    for flag, _, read in _PROPERTIES:
        start = reader.at
        if flags & flag:
            read(reader)
        if flag == _HEADERS_FLAG and new_flags & flag:
            parts.append(_table(payload[start : reader.at], drop, add))
        elif flag == _EXPIRATION_FLAG and not keep_expiration:
            new_flags &= ~flag
        elif flag == _REPLY_TO_FLAG and flags & flag and reply_to is not None:
            parts.append(short_string(reply_to))
        else:
            parts.append(payload[start : reader.at])
    return payload[:_FIXED_SIZE] + new_flags.to_bytes(2, "big") + b"".join(parts)


def _table(data: bytes, drop: Collection[str], add: Mapping[str, Any]) -> bytes:
    """Return the new field table with its length prefix; `data` is empty if there was none."""
    reader = Reader(data, min(4, len(data)))
    entries: list[tuple[str, bytes]] = []
    while reader.at < reader.end:
        start = reader.at
        name = reader.shortstr()
        reader.value(0)
        if name not in drop and name not in add:
            entries.append((name, data[start : reader.at]))
    if add:
        entries += [(name, encode_entry(name, value)) for name, value in add.items()]
        entries.sort(key=lambda entry: entry[0])
    table = b"".join(encoded for _, encoded in entries)
    return len(table).to_bytes(4, "big") + table
