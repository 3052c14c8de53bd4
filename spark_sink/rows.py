"""From Arrow batches to messages: column by column, then row by row.

Knows: Arrow, and `Message`. Must never know: Spark's processes, publishers.

Values are taken out of Arrow in slices, a whole column of a slice at a time; that is what makes a
row cost microseconds. A slice is small, so that neither many rows nor large ones fill the memory.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any, Final, TypeAlias

import pyarrow as pa

from reliablepub import InvalidMessage, Message
from spark_sink.identity import Identity
from spark_sink.schema import REQUIRED, Columns

SLICE_ROWS_MAX: Final = 500
SLICE_BYTES_MAX: Final = 4 * 1024 * 1024

Converter: TypeAlias = Callable[[Any], Any]
_KEY: Final = itemgetter(0)


@dataclass(frozen=True, slots=True)
class Invalid:
    """A row that is no message.

    Attributes:
        row: its index in the slice.
        problem: why.
    """

    row: int
    problem: str


def slices(batch: pa.RecordBatch, rows_max: int = SLICE_ROWS_MAX) -> Iterator[pa.RecordBatch]:
    """Cut a batch into pieces of bounded rows and bytes; they share its memory."""
    if batch.num_rows == 0:
        return
    row_bytes = max(1, batch.nbytes // batch.num_rows)
    rows = max(1, min(rows_max, SLICE_BYTES_MAX // row_bytes))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


class Rows:
    """Makes messages of the rows of one attempt of a task.

    Args:
        columns: where each property comes from.
        identity: names the rows that no column ``message_id`` names.
    """

    def __init__(self, columns: Columns, identity: Identity) -> None:
        self._columns = columns
        self._identity = identity
        self._names = tuple(sorted(name for name in columns.positions if name != "value"))
        self._fixed: dict[str, Any] = columns.fixed
        self._has_ids = "message_id" in columns.positions
        self._required = tuple(name for name in self._names if name in REQUIRED)

    def messages(self, batch: pa.RecordBatch) -> Iterator[Message | Invalid]:
        """One message for each row, or why it is none, in order."""
        positions = self._columns.positions
        bodies = _bodies(batch.column(positions["value"]), is_json=self._columns.is_json)
        others = [_values(name, batch.column(positions[name])) for name in self._names]
        rest = zip(*others, strict=True) if others else iter([()] * batch.num_rows)
        for row, (body, values) in enumerate(zip(bodies, rest, strict=True)):
            try:
                yield self._message(body, values)
            except InvalidMessage as error:
                yield Invalid(row, str(error))

    def _message(self, body: Any, values: tuple[Any, ...]) -> Message:  # noqa: ANN401 - see `_bodies`
        if type(body) is not bytes:
            raise body or InvalidMessage("value", "is null; a message has a body, if an empty one")
        given = self._fixed.copy()
        given.update(zip(self._names, values, strict=True))
        if None in values:
            self._check_required(given)
        if isinstance(given.get("headers"), InvalidMessage):
            raise given["headers"]
        if not self._has_ids:
            given["message_id"] = self._identity(body, values)
        return Message(body, **given)

    def _check_required(self, given: Mapping[str, Any]) -> None:
        for name in self._required:
            if given[name] is None:
                raise InvalidMessage(name, "is null")


def _bodies(column: pa.Array, *, is_json: bool) -> list[Any]:
    if is_json:
        as_plain = plain(column.type)
        return [None if value is None else _json(as_plain, value) for value in column.to_pylist()]
    if not pa.types.is_binary(column.type) and not pa.types.is_large_binary(column.type):
        wide = pa.types.is_large_string(column.type)
        column = column.cast(pa.large_binary() if wide else pa.binary())  # shares the memory
    return list(column.to_pylist())


def _values(name: str, column: pa.Array) -> list[Any]:
    values: list[Any] = column.to_pylist()
    if name == "timestamp":
        return [None if value is None else value.astimezone(UTC) for value in values]
    if name == "headers":
        return [None if pairs is None else _headers(pairs) for pairs in values]
    return values


def _headers(pairs: list[Any]) -> dict[str, Any] | InvalidMessage:
    """A map, or an array of structs, as a table in the order of its names.

    Spark promises no order of a map's entries; sorted, they give the row the same id each time.
    """
    items = [(p["key"], p["value"]) if isinstance(p, Mapping) else p for p in pairs]
    if any(item is None or item[0] is None for item in items):
        return InvalidMessage("headers", "have a name that is null")
    table = {key: _header(value) for key, value in sorted(items, key=_KEY)}
    if len(table) < len(items):
        return InvalidMessage("headers", "have a name twice")
    return table


def _header(value: object) -> object:
    return value.astimezone(UTC) if isinstance(value, datetime) else value


def _json(as_plain: Converter, value: object) -> bytes | InvalidMessage:
    """Compact UTF-8."""
    try:
        text = json.dumps(
            as_plain(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False
        )
    except ValueError:
        return InvalidMessage("value", "holds a number that JSON cannot: infinite, or not a number")
    return text.encode()


def plain(kind: pa.DataType) -> Converter:
    """How a value of this type becomes what `json.dumps` can write.

    Fields keep the schema's order, maps are sorted by name (see `_headers`), nulls stay. What JSON
    lacks becomes text: exact decimals, times in ISO 8601 (with a zone: in UTC), binary in base64.
    """
    for is_such, make in _PLAIN:
        if is_such(kind):
            return _or_null(make(kind))
    return lambda value: value


def _plain_struct(kind: pa.DataType) -> Converter:
    fields = [(field.name, plain(field.type)) for field in kind]
    return lambda row: {name: convert(row[name]) for name, convert in fields}


def _plain_map(kind: pa.DataType) -> Converter:
    name, item = plain(kind.key_type), plain(kind.item_type)
    return lambda pairs: {str(name(k)): item(v) for k, v in sorted(pairs, key=_KEY)}


def _plain_list(kind: pa.DataType) -> Converter:
    item = plain(kind.value_type)
    return lambda items: [item(each) for each in items]


def _plain_timestamp(kind: pa.DataType) -> Converter:
    if kind.tz is None:
        return lambda at: at.isoformat()
    return lambda at: at.astimezone(UTC).isoformat().replace("+00:00", "Z")


_PLAIN: Final[tuple[tuple[Callable[[Any], bool], Callable[[Any], Converter]], ...]] = (
    (pa.types.is_struct, _plain_struct),
    (pa.types.is_map, _plain_map),
    (pa.types.is_list, _plain_list),
    (pa.types.is_timestamp, _plain_timestamp),
    (pa.types.is_date, lambda _: lambda day: day.isoformat()),
    (pa.types.is_decimal, lambda _: str),
    (pa.types.is_binary, lambda _: lambda data: b64encode(data).decode()),
    (pa.types.is_duration, lambda _: lambda span: span.total_seconds()),
)


def _or_null(convert: Converter) -> Converter:
    return lambda value: None if value is None else convert(value)
