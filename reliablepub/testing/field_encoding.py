"""Encodes field tables with RabbitMQ's types (rabbit_binary_generator:generate_table).

A number that came from the wire keeps its type, and a table keeps the order of its entries; pamqp
chooses the smallest integer type that fits, and sorts.
PURE: this module must never know what a table means.
"""

from __future__ import annotations

import struct
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from pamqp import encode

from reliablepub.testing.field_types import field_type

if TYPE_CHECKING:
    from collections.abc import Mapping

_NUMBERS: Final = {
    "bool": struct.Struct(">c?"),
    "byte": struct.Struct(">cb"),
    "unsignedbyte": struct.Struct(">cB"),
    "short": struct.Struct(">ch"),
    "unsignedshort": struct.Struct(">cH"),
    "signedint": struct.Struct(">ci"),
    "unsignedint": struct.Struct(">cI"),
    "long": struct.Struct(">cq"),
    "timestamp": struct.Struct(">cQ"),
    "float": struct.Struct(">cf"),
    "double": struct.Struct(">cd"),
}
_DECIMAL = struct.Struct(">cBi")
_LETTERS: Final = {
    "bool": b"t",
    "byte": b"b",
    "unsignedbyte": b"B",
    "short": b"s",
    "unsignedshort": b"u",
    "signedint": b"I",
    "unsignedint": b"i",
    "long": b"l",
    "timestamp": b"T",
    "float": b"f",
    "double": b"d",
    "longstr": b"S",
    "binary": b"x",
}


def encode_entry(name: str, value: object) -> bytes:
    """One entry of a table: its name, and its value with the type."""
    return encode.short_string(name) + _value(value)


def _value(value: Any) -> bytes:  # noqa: ANN401 - a field value is of any type
    if value is None:
        return b"V"
    if isinstance(value, dict):
        return b"F" + _table(value)
    if isinstance(value, list):
        return b"A" + _sized(b"".join(_value(item) for item in value))
    if isinstance(value, Decimal):
        scale = -int(value.as_tuple().exponent)
        return _DECIMAL.pack(b"D", scale, int(value.scaleb(scale)))
    kind = field_type(value)
    letter = _LETTERS[kind]
    if kind in _NUMBERS:
        number = int(value.timestamp()) if isinstance(value, datetime) else value
        return _NUMBERS[kind].pack(letter, number)
    return letter + _sized(value.encode() if isinstance(value, str) else bytes(value))


def _table(table: Mapping[str, object]) -> bytes:
    return _sized(b"".join(encode_entry(name, value) for name, value in table.items()))


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data
