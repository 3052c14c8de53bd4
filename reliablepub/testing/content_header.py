"""A content header with other headers in it, every other byte as it was.

What a publisher sent must arrive with the very types it chose, which a decoded table no longer
knows. So this module cuts and pastes bytes. It must never know what a header means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pamqp import commands, encode

from reliablepub.testing.decoding import PROPERTIES, Reader

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_FIXED_SIZE = 12
_HEADERS_FLAG = commands.Basic.Properties.flags["headers"]
_EXPIRATION_FLAG = commands.Basic.Properties.flags["expiration"]


def rewritten(
    payload: bytes,
    *,
    drop: Collection[str] = (),
    add: Mapping[str, Any] | None = None,
    keep_expiration: bool = True,
) -> bytes:
    """The content header without some headers, with others in their place or behind.

    It must have been decoded before: it is taken to be well formed.
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
        else:
            parts.append(payload[start : reader.at])
    return payload[:_FIXED_SIZE] + new_flags.to_bytes(2, "big") + b"".join(parts)


def _table(data: bytes, drop: Collection[str], add: Mapping[str, Any]) -> bytes:
    """A field table, which may be absent, with its length in front."""
    reader = Reader(data, min(4, len(data)))
    entries: list[bytes] = []
    while reader.at < reader.end:
        start = reader.at
        name = reader.shortstr()
        reader.value(0)
        if name not in drop and name not in add:
            entries.append(data[start : reader.at])
    entries.append(encode.field_table(dict(add))[4:])
    table = b"".join(entries)
    return len(table).to_bytes(4, "big") + table
