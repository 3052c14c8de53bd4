"""Message headers: validated and copied, so that each value can be encoded as an AMQP field.

Knows: field tables (AMQP 0-9-1, 4.2.5.5), the encoded size of each value, and RabbitMQ's limits
and reserved names. Must never know: the other properties of a message, or the encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from math import isfinite
from typing import Any, Final, NoReturn, TypeAlias

from reliablepub.errors import InvalidMessage

FieldValue: TypeAlias = (
    bool
    | int
    | float
    | str
    | bytes
    | Decimal
    | datetime
    | Sequence["FieldValue"]
    | Mapping[str, "FieldValue"]
    | None
)
"""A value in an AMQP field table (RabbitMQ's rabbit_binary_parser)."""

ATTEMPT_HEADER: Final = "rp-attempt"
"""Header that identifies an attempt. ``basic.return`` carries no delivery tag, so a return is
matched by this header. The name is short because the broker handles every byte of a header."""
SHORT_STRING_MAX: Final = 255
NESTING_MAX: Final = 32

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_INT32_MAX = 2**31 - 1
_DECIMAL_PLACES_MAX = 255
_DECIMAL_DIGITS_MAX = 10
EXACT: Final = Context(prec=28, Emin=MIN_EMIN, Emax=MAX_EMAX, clamp=0, traps=[])
"""For decimals of `_DECIMAL_DIGITS_MAX` digits. The application's context may round or raise."""
_ROUTING_HEADERS = ("CC", "BCC")
"""RabbitMQ routes by these too, and closes the channel if one of them is not a list."""


class _Fixed:
    """A table or list of a message, which is immutable.

    A value that AMQP cannot hold, set in place after the checks, would fail the commit of the
    relay, and with it every message of its turn.
    """

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "the headers of a Message, and the arguments of a declaration, cannot be changed; make "
            "another one, as by dataclasses.replace(message, headers={**message.headers, ...})"
        )

    __setitem__ = __delitem__ = __ior__ = __iadd__ = __imul__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse
    append = extend = insert = remove = reverse = sort = _refuse


class _Table(_Fixed, dict[str, FieldValue]):
    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the content: by default it would be set item by item."""
        return _Table, (dict(self),)


class _List(_Fixed, list[FieldValue]):
    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the content: by default it would be set item by item."""
        return _List, (list(self),)


def checked_headers(headers: object, room: int) -> tuple[dict[str, FieldValue], int]:
    """Validate headers.

    Args:
        headers: the mapping that the application gave.
        room: most bytes that the encoded table may take.

    Returns:
        A copy of the headers that cannot be changed, and their encoded size in bytes.

    Raises:
        InvalidMessage: AMQP cannot hold a name or value, a name is reserved, or there are too many
            bytes.
    """
    if not isinstance(headers, Mapping):
        raise InvalidMessage("headers", f"is {type(headers).__name__}, not a mapping")
    table, size = _checked_table("headers", headers, 1)
    if ATTEMPT_HEADER in table:
        raise InvalidMessage(f"headers[{ATTEMPT_HEADER!r}]", "is reserved; leave it out")
    for name in _ROUTING_HEADERS:
        if name in table and not isinstance(table[name], list):
            raise InvalidMessage(f"headers[{name!r}]", "is not a list of routing keys")
    if size > room:
        raise InvalidMessage(
            "headers",
            f"take {size} bytes; the header frame holds {room} (put large data in the body)",
        )
    return table, size


def checked_arguments(arguments: Mapping[Any, object]) -> dict[str, FieldValue]:
    """Validate the arguments of a declaration.

    Returns:
        A copy that cannot be changed.

    Raises:
        InvalidMessage: AMQP, or pika's encoder, cannot hold a name or value.
    """
    table, _ = _checked_table("arguments", arguments, 1)
    _check_no_float("arguments", table)
    return table


def _check_no_float(path: str, value: object) -> None:
    if isinstance(value, float):
        raise InvalidMessage(path, f"is {value}; RabbitMQ's arguments have no fractions")
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _check_no_float(f"{path}[{name!r}]", inner)


def utf8(name: str, value: str) -> bytes:
    """Encode a string as UTF-8.

    Raises:
        InvalidMessage: the value is not a str, or holds an unpaired surrogate.
    """
    if not issubclass(type(value), str):  # `isinstance` would let a lazy proxy pass
        raise InvalidMessage(name, f"is {type(value).__name__}, not str")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(name, f"cannot be encoded as UTF-8: {error.reason}") from None


def checked_datetime(name: str, value: datetime) -> datetime:
    """Convert a datetime to UTC.

    Raises:
        InvalidMessage: the datetime has no time zone, or is before 1970 or after 9999.
    """
    if value.utcoffset() is None:
        raise InvalidMessage(name, "is a datetime without a time zone; give it one, such as UTC")
    if value.timestamp() < 0:
        raise InvalidMessage(name, "is before 1970; AMQP timestamps are unsigned")
    try:
        utc = value.astimezone(UTC)
    except OverflowError:
        raise InvalidMessage(name, "is after the year 9999 in UTC") from None
    # Also of a subclass, whose methods may differ: the store calls them later.
    if type(utc) is not datetime:
        clock = time(utc.hour, utc.minute, utc.second, utc.microsecond, tzinfo=UTC)
        utc = datetime.combine(date(utc.year, utc.month, utc.day), clock)
    return utc


_Path: TypeAlias = "str | tuple[_Path, object]"
"""Where a value is: the name of a field, or a path and a key. Only an error needs it as a text."""


def _said(path: _Path) -> str:
    return path if isinstance(path, str) else f"{_said(path[0])}[{path[1]!r}]"


def _text_bytes(path: _Path, text: str) -> int:
    return len(text) if text.isascii() else len(utf8(_said(path), text))


def _checked_table(
    path: _Path, table: Mapping[Any, object], depth: int
) -> tuple[dict[str, FieldValue], int]:
    """Return a copy of the table, and its encoded size in bytes."""
    copy: dict[str, FieldValue] = {}
    size = 4
    for name, value in table.items():
        if not issubclass(type(name), str):  # `isinstance` would let a lazy proxy pass
            raise InvalidMessage(_said(path), f"has the name {name!r}, which is not a str")
        name = str.__str__(name)  # noqa: PLW2901 - a member of a `StrEnum` becomes a plain str
        inner = path, name
        length = _text_bytes(inner, name)
        if length > SHORT_STRING_MAX:
            problem = f"has a name of {length} bytes; at most {SHORT_STRING_MAX}"
            raise InvalidMessage(_said(path), problem)
        copy[name], value_size = _checked_value(inner, value, depth)
        size += 1 + length + value_size
    return _Table(copy), size


_SCALARS: Final = frozenset({str, int, bool, float, bytes, type(None)})


def _checked_value(path: _Path, value: object, depth: int) -> tuple[FieldValue, int]:
    """Return a copy of the value, and its encoded size in bytes including the type octet."""
    if depth > NESTING_MAX:
        raise InvalidMessage(_said(path), f"is nested more than {NESTING_MAX} deep")
    if type(value) in _SCALARS:  # as most are: to ask whether they are mappings takes longest
        return _checked_scalar(path, value)
    match value:
        case list() | tuple():
            items = [_checked_value((path, i), v, depth + 1) for i, v in enumerate(value)]
            return _List([item for item, _ in items]), 5 + sum(size for _, size in items)
        case Mapping():
            table, size = _checked_table(path, value, depth + 1)
            return table, 1 + size
        case _:
            return _checked_scalar(path, value)


def _checked_scalar(path: _Path, value: object) -> tuple[FieldValue, int]:
    copy: FieldValue
    if value.__class__ is not type(value):  # a lazy proxy, which `match` takes for its object
        raise _no_field(path, value)
    match value:
        case str():
            copy = str.__str__(value)  # also of a subclass, whose methods may differ
            size = 5 + _text_bytes(path, copy)
        case None:
            copy, size = None, 1
        case bool():  # before int, of which bool is a subclass
            copy, size = value, 2
        case int() | float():
            copy, size = _checked_number(path, value), 9
        case bytes():
            copy = bytes.__getitem__(value, slice(None))  # also of a subclass, as above
            size = 5 + len(copy)
        case Decimal():
            copy, size = _checked_decimal(path, value), 6
        case datetime():
            copy, size = checked_datetime(_said(path), value), 9
        case _:
            raise _no_field(path, value)
    return copy, size


def _no_field(path: _Path, value: object) -> InvalidMessage:
    return InvalidMessage(_said(path), f"is {type(value).__name__}, which AMQP tables cannot hold")


def _checked_number(path: _Path, value: float) -> float:
    if isinstance(value, int):
        if not _INT64_MIN <= value <= _INT64_MAX:
            raise InvalidMessage(_said(path), "does not fit 64 bits")
        return int(value)  # an IntEnum becomes a plain int
    if not isfinite(value):
        raise InvalidMessage(_said(path), f"is {value}; many AMQP clients cannot decode that")
    return float(value)


def _checked_decimal(path: _Path, value: Decimal) -> Decimal:
    """Check that AMQP can hold the decimal: a 32-bit integer and 0 to 255 decimal places."""
    if not value.is_finite():
        raise InvalidMessage(_said(path), "is a decimal that is not a finite number")
    exponent = int(value.as_tuple().exponent)
    fits = (
        exponent >= -_DECIMAL_PLACES_MAX
        # Checked first, so that `scaleb` never computes a huge power of ten.
        and value.adjusted() - min(exponent, 0) < _DECIMAL_DIGITS_MAX
        and abs(int(value.scaleb(max(0, -exponent), EXACT))) <= _INT32_MAX
    )
    if not fits:
        raise InvalidMessage(_said(path), "does not fit an AMQP decimal (32 bits, 255 places)")
    return Decimal(value)  # also of a subclass, whose methods may differ
