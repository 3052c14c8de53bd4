"""Decodes methods and field values.

Knows: the wire format; pamqp defines the methods and their arguments. Must never know: what a
method means.

This module reads the bytes itself, because a server must refuse input that is truncated, nested too
deeply or larger than agreed, and because basic.publish is too frequent for a general decoder.
"""

from __future__ import annotations

import math
import struct
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from pamqp import commands

from reliablepub.testing.fields import WireFloat, WireInt
from reliablepub.testing.replies import AmqpError, SilentlyRefused, erlang_binary, frame_error
from reliablepub.testing.wire import METHOD

if TYPE_CHECKING:
    from collections.abc import Callable

    from pamqp.base import Frame

TABLE_DEPTH_MAX: Final = 32
PUBLISH: Final = b"\x00\x3c\x00\x28"
"""The class and method ids of basic.publish, first in its method frame."""

_IDS_SIZE: Final = 4
_FLOAT, _DOUBLE = struct.Struct(">f"), struct.Struct(">d")


def is_utf8(text: str) -> bool:
    """Whether a short string was UTF-8 on the wire."""
    return text.isascii() or not any("\ud800" <= one <= "\udfff" for one in text)


class MalformedError(Exception):
    """Bytes that cannot be decoded; the caller chooses the reply code."""


class NestedTooDeeplyError(MalformedError):
    """More levels of tables than `TABLE_DEPTH_MAX`, which RabbitMQ does not limit."""


class UndecodableError(AmqpError):
    """501: the arguments of a method cannot be decoded."""

    def __init__(self, payload: bytes) -> None:
        super().__init__(501, f"cannot decode {erlang_binary(payload[_IDS_SIZE:])}")


class Reader:
    """Reads the fields of one payload, or raises `MalformedError`."""

    __slots__ = ("at", "data", "end")

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data: Final = data
        self.at: int = at
        self.end: Final = len(data)

    def take(self, size: int) -> bytes:
        """Read exactly `size` bytes."""
        start = self.at
        self.at = start + size
        if self.at > self.end:
            raise MalformedError("a field runs past the end of its frame")
        return self.data[start : self.at]

    def number(self, size: int, *, signed: bool = False) -> int:
        """Read an integer of `size` bytes."""
        return int.from_bytes(self.take(size), "big", signed=signed)

    def shortstr(self) -> str:
        """Read a short string; bytes that are not UTF-8 become lone surrogates."""
        return self.take(self.take(1)[0]).decode(errors="surrogateescape")

    def longstr(self) -> str | bytes:
        """Read a long string; return bytes if it is not UTF-8."""
        text = self.take(self.number(4))
        try:
            return text.decode()
        except UnicodeDecodeError:
            return text

    def timestamp(self) -> datetime | int:
        """Read a timestamp."""
        seconds = self.number(8)
        try:
            return datetime.fromtimestamp(seconds, tz=UTC)
        except (ValueError, OverflowError, OSError):
            return WireInt(seconds, "timestamp")

    def real(self, form: struct.Struct) -> float:
        """Read a float or a double; Erlang has neither infinity nor NaN."""
        value: float = form.unpack(self.take(form.size))[0]
        if not math.isfinite(value):
            raise MalformedError("a number is not finite")
        return value

    def decimal(self) -> Decimal:
        """Read a decimal."""
        scale = self.number(1)
        return Decimal(self.number(4, signed=True)).scaleb(-scale)

    def table(self, depth: int = 0) -> dict[str, Any]:
        """Read a field table with its length prefix."""
        end = self._nested_end(depth)
        table = {}
        while self.at < end:
            key = self.shortstr()
            table[key] = self.value(depth)
        self._expect(end)
        return table

    def array(self, depth: int) -> list[Any]:
        """Read a field array."""
        end = self._nested_end(depth)
        items = []
        while self.at < end:
            items.append(self.value(depth))
        self._expect(end)
        return items

    def value(self, depth: int) -> Any:  # noqa: ANN401 - a field value is of any type
        """Read a field value with its type prefix."""
        kind = self.take(1)
        if kind == b"F":
            return self.table(depth + 1)
        if kind == b"A":
            return self.array(depth + 1)
        read = _FIELD_READERS.get(kind)
        if read is None:
            raise MalformedError(f"unknown field type {kind!r}")
        return read(self)

    def expect_end(self) -> None:
        """Raise `MalformedError` unless everything was read."""
        self._expect(self.end)

    def _nested_end(self, depth: int) -> int:
        if depth > TABLE_DEPTH_MAX:
            raise NestedTooDeeplyError
        end = self.number(4) + self.at
        if end > self.end:
            raise MalformedError("a table runs past the end of its frame")
        return end

    def _expect(self, end: int) -> None:
        if self.at != end:
            raise MalformedError("there are bytes left over")


# The type letters that RabbitMQ uses (rabbit_binary_parser:parse_table), errata included.
_FIELD_READERS: dict[bytes, Callable[[Reader], Any]] = {
    b"t": lambda r: bool(r.number(1)),
    b"b": lambda r: WireInt(r.number(1, signed=True), "byte"),
    b"B": lambda r: WireInt(r.number(1), "unsignedbyte"),
    b"s": lambda r: WireInt(r.number(2, signed=True), "short"),
    b"u": lambda r: WireInt(r.number(2), "unsignedshort"),
    b"I": lambda r: WireInt(r.number(4, signed=True), "signedint"),
    b"i": lambda r: WireInt(r.number(4), "unsignedint"),
    b"l": lambda r: WireInt(r.number(8, signed=True), "long"),
    b"L": lambda r: WireInt(r.number(8, signed=True), "long"),
    b"f": lambda r: WireFloat(r.real(_FLOAT)),
    b"d": lambda r: r.real(_DOUBLE),
    b"D": Reader.decimal,
    b"S": Reader.longstr,
    b"T": Reader.timestamp,
    b"V": lambda _: None,
    b"x": lambda r: bytearray(r.take(r.number(4))),
}

ARGUMENT_READERS: dict[str, Callable[[Reader], Any]] = {
    "octet": lambda r: r.number(1),
    "short": lambda r: r.number(2),
    "long": lambda r: r.number(4),
    "longlong": lambda r: r.number(8),
    "shortstr": Reader.shortstr,
    "longstr": Reader.longstr,
    "table": Reader.table,
    "timestamp": Reader.timestamp,
}
"""Readers of the arguments of methods and of properties, by their types in AMQP."""


def ids_of(payload: bytes) -> tuple[int, int]:
    """Return the class and method ids of a method frame."""
    return int.from_bytes(payload[:2], "big"), int.from_bytes(payload[2:4], "big")


def decode_method(payload: bytes) -> Frame:
    """Decode the method of a method frame.

    Raises:
        UndecodableError: The arguments are malformed.
        AmqpError: 501 for a name that is not UTF-8.
        SilentlyRefused: There is no such method.
    """
    if len(payload) < _IDS_SIZE:
        raise frame_error(METHOD, payload, "unknown_frame")
    reader = Reader(payload)
    index = reader.number(_IDS_SIZE)
    kind: type[Frame] | None = commands.INDEX_MAPPING.get(index)
    if kind is None:
        raise SilentlyRefused  # rabbit_reader crashes
    try:
        return _read_method(kind, reader)
    except MalformedError:
        raise UndecodableError(payload) from None


def _read_method(kind: type[Frame], reader: Reader) -> Frame:
    # Not `__init__`, which warns of deprecated methods: a client may send them.
    method: Frame = kind.__new__(kind)
    bits, bit = 0, 8
    names: list[str] = []
    tables: dict[str, bytes] = {}
    for name in kind.attributes():
        argument = kind.amqp_type(name)
        if argument == "bit":
            if bit == 8:  # noqa: PLR2004 - consecutive bits share octets
                bits, bit = reader.number(1), 0
            setattr(method, name, bool(bits >> bit & 1))
            bit += 1
            continue
        bit = 8
        if argument == "table":
            tables[name] = reader.take(reader.number(4))
            continue
        value = ARGUMENT_READERS[argument](reader)
        setattr(method, name, value)
        if argument == "shortstr":
            names.append(value)
    reader.expect_end()
    # RabbitMQ looks into the arguments when it has told all of them apart.
    if not all(map(is_utf8, names)):
        raise AmqpError(501, "Malformed UTF-8 in shortstr", (0, 0))
    for name, data in tables.items():
        setattr(method, name, _read_table(data))
    return method


def _read_table(data: bytes) -> dict[str, Any]:
    try:
        return decode_table(data)
    except NestedTooDeeplyError:
        raise
    except MalformedError:
        raise SilentlyRefused from None  # rabbit_reader crashes


def decode_publish(payload: bytes) -> tuple[str, str, bool, bool]:
    """Decode the exchange, routing key, mandatory and immediate of a basic.publish."""
    reader = Reader(payload, _IDS_SIZE + 2)  # skip the ids and the reserved ticket
    try:
        exchange = reader.shortstr()
        routing_key = reader.shortstr()
        bits = reader.number(1)
        reader.expect_end()
    except MalformedError:
        raise UndecodableError(payload) from None
    return exchange, routing_key, bool(bits & 1), bool(bits & 2)


def decode_table(data: bytes) -> dict[str, Any]:
    """Decode a field table without its length prefix, as AMQPLAIN sends it.

    Raises:
        MalformedError: It is not a table.
    """
    return Reader(len(data).to_bytes(4, "big") + data).table()
