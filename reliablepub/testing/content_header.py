"""Rewrites headers and `reply_to` in an encoded content header; other bytes stay as they were.

Header values must arrive with the field types that the publisher chose, and decoding loses some of
them. So this module copies bytes. It must never know what a header means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pamqp import commands, encode

from reliablepub.testing.decoding import PROPERTIES, Reader
from reliablepub.testing.field_encoding import encode_entry

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_FIXED_SIZE = 12
_HEADERS_FLAG = commands.Basic.Properties.flags["headers"]
_EXPIRATION_FLAG = commands.Basic.Properties.flags["expiration"]
_REPLY_TO_FLAG = commands.Basic.Properties.flags["reply_to"]


def rewritten(
    payload: bytes,
    *,
    drop: Collection[str] = (),
    add: Mapping[str, Any] | None = None,
    keep_expiration: bool = True,
    reply_to: str | None = None,
) -> bytes:
    """A content header with some headers dropped, and others replaced or added.

    Args:
        payload: A well-formed content header: the caller has decoded it before.
        drop: Names of headers to remove.
        add: Headers to set. Then all headers are sorted by name, as rabbit_misc:set_table_value
            does.
        keep_expiration: Whether the `expiration` property stays.
        reply_to: The new value of the `reply_to` property, if it has one; None leaves it.
    """
    add = add or {}
    flags = int.from_bytes(payload[_FIXED_SIZE : _FIXED_SIZE + 2], "big")
    reader = Reader(payload, _FIXED_SIZE + 2)
    parts: list[bytes] = []
    new_flags = flags | (_HEADERS_FLAG if add else 0)
    for flag, _, read in PROPERTIES:
        start = reader.at
        if flags & flag:
            read(reader)
        if flag == _HEADERS_FLAG and new_flags & flag:
            parts.append(_table(payload[start : reader.at], drop, add))
        elif flag == _EXPIRATION_FLAG and not keep_expiration:
            new_flags &= ~flag
        elif flag == _REPLY_TO_FLAG and flags & flag and reply_to is not None:
            parts.append(encode.short_string(reply_to))
        else:
            parts.append(payload[start : reader.at])
    return payload[:_FIXED_SIZE] + new_flags.to_bytes(2, "big") + b"".join(parts)


def _table(data: bytes, drop: Collection[str], add: Mapping[str, Any]) -> bytes:
    """The new field table with its length prefix; `data` is empty if there was no table."""
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
