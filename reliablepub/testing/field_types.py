"""RabbitMQ's names for the types of field values, and numbers that remember as which they came.

Reply texts name types. So a number from the wire is an `int` or a `float` like any other, of a
class that says more; a plain `int`, of the test's own, is said to be what most clients send.
PURE: this module must never know how a value is read.
"""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import ClassVar


class WireInt(int):
    """An integer from the wire; its class says of which type."""

    field: ClassVar[str]


class Byte(WireInt):
    """8 bits."""

    field = "byte"


class UnsignedByte(WireInt):
    """8 bits, none of them the sign."""

    field = "unsignedbyte"


class Short(WireInt):
    """16 bits."""

    field = "short"


class UnsignedShort(WireInt):
    """16 bits, none of them the sign."""

    field = "unsignedshort"


class SignedInt(WireInt):
    """32 bits."""

    field = "signedint"


class UnsignedInt(WireInt):
    """32 bits, none of them the sign."""

    field = "unsignedint"


class Long(WireInt):
    """64 bits."""

    field = "long"


class WireFloat(float):
    """A number of 32 bits; a plain `float` is one of 64."""

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
    """Whether it is of one of the integer types."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_same(one: object, other: object) -> bool:
    """Whether a header has the value that a binding asks for: numbers of any type, but no flag."""
    return isinstance(one, bool) == isinstance(other, bool) and one == other
