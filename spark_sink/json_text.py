"""A JSON writer for Arrow values, with the output of Spark's `to_json`.

Knows: JSON, Arrow's types. Must never know: messages, Spark's types (`schema` checks them).

As with `to_json`, a null field of a struct is left out, times are in the session's time zone and
cut to milliseconds, and a number that JSON lacks is text (``"NaN"``). The entries of a map are
sorted: Spark promises no order of them, and the body is part of a row's identity.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Callable
from datetime import datetime
from json import JSONEncoder
from math import isfinite, isnan
from operator import itemgetter
from typing import Any, Final, TypeAlias

import pyarrow as pa

Text: TypeAlias = Callable[[Any], str]
_KEY: Final = itemgetter(0)
_string: Final = JSONEncoder(ensure_ascii=False).encode


def text_of(kind: pa.DataType) -> Text:
    """The function that writes values of an Arrow type."""
    for is_such, make in _TEXTS:
        if is_such(kind):
            text = make(kind)
            return lambda value: "null" if value is None else text(value)
    raise TypeError(f"{kind} is not written as JSON")  # `schema` refuses such columns before


def _struct(kind: pa.DataType) -> Text:
    fields = [(field.name, f"{_string(field.name)}:", text_of(field.type)) for field in kind]

    def text(row: dict[str, Any]) -> str:
        given = [start + write(row[name]) for name, start, write in fields if row[name] is not None]
        return "{" + ",".join(given) + "}"

    return text


def _map(kind: pa.DataType) -> Text:
    name: Text = _boolean if pa.types.is_boolean(kind.key_type) else str
    item = text_of(kind.item_type)
    return lambda pairs: (
        "{" + ",".join([f"{_string(name(k))}:{item(v)}" for k, v in sorted(pairs, key=_KEY)]) + "}"
    )


def _list(kind: pa.DataType) -> Text:
    item = text_of(kind.value_type)
    return lambda items: "[" + ",".join([item(each) for each in items]) + "]"


def _boolean(value: bool) -> str:  # noqa: FBT001 - it is a value
    return "true" if value else "false"


def _number(value: float) -> str:
    if isfinite(value):
        return repr(value)
    return '"NaN"' if isnan(value) else '"Infinity"' if value > 0 else '"-Infinity"'


def _single(value: float) -> str:
    """A 32-bit float in the fewest digits that identify it: 0.1, not 0.10000000149011612."""
    if not isfinite(value):
        return _number(value)
    for digits in range(6, 9):
        text = f"{value:.{digits}g}"
        if struct.unpack("f", struct.pack("f", float(text)))[0] == value:
            return repr(float(text))
    return repr(float(f"{value:.9g}"))


def _timestamp(at: datetime) -> str:
    text = at.isoformat(timespec="milliseconds")  # truncates, as Java does
    return f'"{text[:-6]}Z"' if text.endswith("+00:00") else f'"{text}"'


_TEXTS: Final[tuple[tuple[Callable[[Any], bool], Callable[[Any], Text]], ...]] = (
    (pa.types.is_string, lambda _: _string),
    (pa.types.is_large_string, lambda _: _string),
    (pa.types.is_boolean, lambda _: _boolean),
    (pa.types.is_integer, lambda _: str),
    (pa.types.is_float32, lambda _: _single),
    (pa.types.is_float64, lambda _: _number),
    (pa.types.is_decimal, lambda _: str),
    (pa.types.is_struct, _struct),
    (pa.types.is_map, _map),
    (pa.types.is_list, _list),
    (pa.types.is_large_list, _list),
    (pa.types.is_timestamp, lambda _: _timestamp),
    (pa.types.is_date, lambda _: lambda day: f'"{day.isoformat()}"'),
    (pa.types.is_binary, lambda _: lambda data: f'"{b64encode(data).decode()}"'),
    (pa.types.is_large_binary, lambda _: lambda data: f'"{b64encode(data).decode()}"'),
    (pa.types.is_null, lambda _: str),
)
