"""RabbitMQ's names for the types of field values, and number classes that keep their wire type.

RabbitMQ's reply texts name types. So a number from the wire is an instance of a subclass of `int`
or `float` that names its type. A plain `int`, which only a test passes, counts as `signedint`, the
type that most clients send.
PURE: this module must never know how a value is decoded.
"""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import ClassVar


class WireInt(int):
    """An integer from the wire; each subclass is one field type."""

    field: ClassVar[str]


class Byte(WireInt):
    """8 bits."""

    field = "byte"


class UnsignedByte(WireInt):
    """8 bits, unsigned."""

    field = "unsignedbyte"


class Short(WireInt):
    """16 bits."""

    field = "short"


class UnsignedShort(WireInt):
    """16 bits, unsigned."""

    field = "unsignedshort"


class SignedInt(WireInt):
    """32 bits."""

    field = "signedint"


class UnsignedInt(WireInt):
    """32 bits, unsigned."""

    field = "unsignedint"


class Long(WireInt):
    """64 bits."""

    field = "long"


class LateTimestamp(WireInt):
    """A timestamp after the year 9999, in seconds: too late for a `datetime`."""

    field = "timestamp"


class WireFloat(float):
    """A float of 32 bits; a plain `float` has 64."""

    field: ClassVar[str] = "float"


_NAMES: dict[type, str] = {
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
}


def field_type(value: object) -> str:
    """RabbitMQ's name for the type of a field value."""
    if isinstance(value, WireInt | WireFloat):
        return value.field
    return _NAMES.get(type(value), "void")


def is_integer(value: object) -> bool:
    """Whether a value has one of the integer types; a `bool` does not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_same(one: object, other: object) -> bool:
    """Whether two field values are equal; the types of numbers do not matter, but bool does."""
    return isinstance(one, bool) == isinstance(other, bool) and one == other
