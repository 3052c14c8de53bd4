"""Field values of AMQP tables: RabbitMQ's names for their types, and their encoding.

Knows: the wire types (rabbit_binary_generator:generate_table). Must never know: how a value is
decoded, what a table means.

A number from the wire keeps its type, because RabbitMQ's reply texts name types, and a consumer
gets a header with the type that the publisher chose. pamqp chooses the smallest integer type that
fits, and sorts the entries of a table.
"""

from __future__ import annotations

import struct
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Self

from reliablepub.testing.replies import erlang_binary

if TYPE_CHECKING:
    from collections.abc import Mapping


class WireInt(int):
    """An integer from the wire, and its type.

    A plain `int`, which only a test passes, counts as ``signedint``, the type that most clients
    send. A timestamp after the year 9999, too late for a `datetime`, is a `WireInt` in seconds.
    """

    field: str

    def __new__(cls, value: int, field: str = "signedint") -> Self:
        """Return the integer with its type."""
        made = super().__new__(cls, value)
        made.field = field
        return made


class WireFloat(float):
    """A float of 32 bits; a plain `float` has 64."""


_NUMBERS: Final = {
    "bool": (b"t", ">?"),
    "byte": (b"b", ">b"),
    "unsignedbyte": (b"B", ">B"),
    "short": (b"s", ">h"),
    "unsignedshort": (b"u", ">H"),
    "signedint": (b"I", ">i"),
    "unsignedint": (b"i", ">I"),
    "long": (b"l", ">q"),
    "timestamp": (b"T", ">Q"),
    "float": (b"f", ">f"),
    "double": (b"d", ">d"),
}
"""Letter and form of each type of a fixed size, by RabbitMQ's name."""
_NAMES: Final[dict[type, str]] = {
    bool: "bool",
    bytearray: "binary",
    bytes: "longstr",
    datetime: "timestamp",
    Decimal: "decimal",
    dict: "table",
    float: "double",
    int: "signedint",
    list: "array",
    str: "longstr",
    WireFloat: "float",
}


def field_type(value: object) -> str:
    """Return RabbitMQ's name for the type of a field value."""
    return value.field if isinstance(value, WireInt) else _NAMES.get(type(value), "void")


def is_integer(value: object) -> bool:
    """Whether a value has one of the integer types; a `bool` and a timestamp do not."""
    return isinstance(value, int) and field_type(value) not in ("bool", "timestamp")


def is_same(one: object, other: object) -> bool:
    """Whether two field values are equal; the types of numbers do not matter, but bool does."""
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def erlang_term(value: object) -> str:  # noqa: PLR0911 - of any type
    """Return a value as RabbitMQ prints it (io_lib's ~p)."""
    match value:
        case None:
            return "undefined"
        case bool():
            return str(value).lower()
        case str():
            return erlang_binary(value.encode(errors="surrogateescape"))
        case bytes() | bytearray():
            return erlang_binary(bytes(value))
        case datetime():
            return str(int(value.timestamp()))
        case Decimal():
            return "{{{},{}}}".format(*_scaled(value))
        case list():
            items = (f"{{{field_type(one)},{erlang_term(one)}}}" for one in value)
            return f"[{','.join(items)}]"
        case dict():
            entries = (
                f"{{{erlang_term(name)},{field_type(one)},{erlang_term(one)}}}"
                for name, one in value.items()
            )
            return f"[{','.join(entries)}]"
        case _:
            return str(value)


def encode_entry(name: str, value: object) -> bytes:
    """Encode one entry of a table: its name, and its value with the type."""
    return short_string(name) + _value(value)


def short_string(text: str) -> bytes:
    """Encode a short string; lone surrogates become the bytes that they stand for."""
    data = text.encode(errors="surrogateescape")
    return len(data).to_bytes(1, "big") + data


def _value(value: Any) -> bytes:  # noqa: ANN401, PLR0911 - of any type
    if value is None:
        return b"V"
    if isinstance(value, dict):
        return b"F" + _table(value)
    if isinstance(value, list):
        return b"A" + _sized(b"".join(_value(item) for item in value))
    if isinstance(value, Decimal):
        return struct.pack(">cBi", b"D", *_scaled(value))
    if isinstance(value, str):
        return b"S" + _sized(value.encode(errors="surrogateescape"))
    if isinstance(value, bytes | bytearray):
        return (b"S" if isinstance(value, bytes) else b"x") + _sized(bytes(value))
    letter, form = _NUMBERS[field_type(value)]
    number = int(value.timestamp()) if isinstance(value, datetime) else value
    return letter + struct.pack(form, number)


def _scaled(value: Decimal) -> tuple[int, int]:
    """The number of decimals, and the value without its point."""
    scale = -int(value.as_tuple().exponent)
    return scale, int(value.scaleb(scale))


def _table(table: Mapping[str, object]) -> bytes:
    return _sized(b"".join(encode_entry(name, value) for name, value in table.items()))


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data
