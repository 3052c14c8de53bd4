"""Conversion of Arrow batches to messages: column by column, then row by row.

Knows: Arrow, and `Message`. Must never know: Spark's processes, publishers.

Values are converted in slices, a whole column of a slice at a time, so that a row costs
microseconds. A slice is small, so that neither many rows nor large ones fill the memory. If a value
cannot be converted (a year above 9999, bytes that are not UTF-8), its column is converted value by
value, and only its row is invalid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Context, Decimal
from itertools import repeat
from operator import itemgetter
from typing import Any, Final

import pyarrow as pa

from reliablepub import InvalidMessage, Message
from spark_sink.identity import ByColumns, Identity
from spark_sink.json_text import text_of
from spark_sink.keys import Key
from spark_sink.schema import REQUIRED, Columns

SLICE_ROWS_MAX: Final = 500
SLICE_BYTES_MAX: Final = 4 * 1024 * 1024

_KEY: Final = itemgetter(0)
_IN_UTC: Final = pa.timestamp("us", "UTC")
_EXACT: Final = Context(prec=80)
_UNREADABLE: Final = (ValueError, OverflowError)
"""Raised by Arrow for a date or a text that Python cannot represent."""


@dataclass(frozen=True, slots=True)
class Invalid:
    """A row that cannot be a message.

    Attributes:
        row: its index in the slice.
        problem: the reason.
    """

    row: int
    problem: str


def slices(batch: pa.RecordBatch, rows_max: int = SLICE_ROWS_MAX) -> Iterator[pa.RecordBatch]:
    """Cut a batch into pieces of at most `rows_max` rows and about 4 MiB; they share its memory."""
    if batch.num_rows == 0:
        return
    row_bytes = max(1, batch.nbytes // batch.num_rows)
    rows = max(1, min(rows_max, SLICE_BYTES_MAX // row_bytes))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


class Rows:
    """Makes messages of the rows of one task attempt.

    Args:
        columns: the source of each message property.
        identity: gives ids to rows without a column ``message_id``.
    """

    def __init__(self, columns: Columns, identity: Identity | ByColumns) -> None:
        self._columns = columns
        self._by_content = identity if not isinstance(identity, ByColumns) else None
        self._by_columns = identity if isinstance(identity, ByColumns) else None
        self._names = tuple(sorted(name for name in columns.positions if name != "value"))
        self._fixed: dict[str, Any] = columns.fixed
        self._has_ids = "message_id" in columns.positions
        self._required = tuple(name for name in self._names if name in REQUIRED)

    def messages(self, batch: pa.RecordBatch) -> Iterator[Message | Invalid]:
        """For each row in order: its message, or `Invalid`."""
        positions = self._columns.positions
        taken = _Taken()
        bodies = taken.bodies(batch.column(positions["value"]), is_json=self._columns.is_json)
        others = [taken.values(name, batch.column(positions[name])) for name in self._names]
        rest = zip(*others, strict=True) if others else repeat((), batch.num_rows)
        keys = self._keys(batch, taken)
        is_faulty = taken.is_faulty
        for row, (body, values, key) in enumerate(zip(bodies, rest, keys, strict=True)):
            try:
                if is_faulty:
                    _raise_faults((*values, *key))
                yield self._message(body, values, key)
            except InvalidMessage as error:
                yield Invalid(row, str(error))

    def _keys(self, batch: pa.RecordBatch, taken: _Taken) -> Iterable[tuple[Any, ...]]:
        """The key of each row; an empty tuple if ids do not come from ``idColumns``."""
        if self._by_columns is None:
            return repeat((), batch.num_rows)
        keys = self._columns.keys
        return zip(*[taken.key(key, batch.column(key.position)) for key in keys], strict=True)

    def _message(self, body: Any, values: tuple[Any, ...], key: tuple[Any, ...]) -> Message:  # noqa: ANN401 - see `_Taken.bodies`
        if type(body) is not bytes:
            raise body or InvalidMessage("value", "is null; a message has a body, if an empty one")
        given = self._fixed.copy()
        given.update(zip(self._names, values, strict=True))
        if None in values:
            self._check_required(given)
        if self._by_columns is not None:
            if None in key:
                raise InvalidMessage(self._columns.keys[key.index(None)].name, "is null")
            given["message_id"] = self._by_columns(key)
        elif not self._has_ids:
            assert self._by_content is not None
            given["message_id"] = self._by_content(body, values)
        return Message(body, **given)

    def _check_required(self, given: Mapping[str, Any]) -> None:
        for name in self._required:
            if given[name] is None:
                raise InvalidMessage(name, "is null")


def _raise_faults(values: tuple[Any, ...]) -> None:
    for value in values:
        if isinstance(value, InvalidMessage):
            raise value


class _Taken:
    """Converts the columns of one piece to Python values.

    Attributes:
        is_faulty: whether an `InvalidMessage` stands in place of some value.
    """

    def __init__(self) -> None:
        self.is_faulty = False

    def bodies(self, column: pa.Array, *, is_json: bool) -> list[Any]:
        """The bodies as bytes; an `InvalidMessage` for a value without JSON, None for null."""
        if is_json:
            text = text_of(column.type)
            return [
                text(value).encode() if _is_given(value) else value
                for value in self._plain("value", column)
            ]
        if not pa.types.is_binary(column.type) and not pa.types.is_large_binary(column.type):
            wide = pa.types.is_large_string(column.type)
            column = column.cast(pa.large_binary() if wide else pa.binary())  # shares the memory
        return list(column.to_pylist())

    def values(self, name: str, column: pa.Array) -> list[Any]:
        """The values of a property."""
        if name == "timestamp" and pa.types.is_timestamp(column.type):
            column = column.cast(_IN_UTC)
            return self._each(column, name, _in_utc)
        if name == "headers":
            return self._each(column, name, _headers)
        return self._plain(name, column)

    def key(self, key: Key, column: pa.Array) -> list[Any]:
        """The values of a key column, normalized."""
        if key.kind == "decimal":
            return self._each(column, key.name, _shortest)
        return self._plain(key.name, _counted(key, column))

    def _plain(self, name: str, column: pa.Array) -> list[Any]:
        try:
            values: list[Any] = column.to_pylist()
        except _UNREADABLE:
            self.is_faulty = True
            return [_taken_alone(name, column, row) for row in range(len(column))]
        return values

    def _each(self, column: pa.Array, name: str, convert: Callable[[Any], Any]) -> list[Any]:
        """The values, converted; null and `InvalidMessage` are left as they are."""
        values = self._plain(name, column)
        for row, value in enumerate(values):
            if not _is_given(value):
                continue
            try:
                values[row] = convert(value)
            except InvalidMessage as error:
                values[row], self.is_faulty = error, True
            except OverflowError:
                values[row], self.is_faulty = _out_of_range(name), True
        return values


def _is_given(value: object) -> bool:
    return value is not None and not isinstance(value, InvalidMessage)


def _taken_alone(name: str, column: pa.Array, row: int) -> Any:  # noqa: ANN401 - a value, or the reason for none
    try:
        return column[row].as_py()
    except UnicodeDecodeError:
        return InvalidMessage(name, "holds text that is not UTF-8")
    except _UNREADABLE:
        return _out_of_range(name)


def _out_of_range(name: str) -> InvalidMessage:
    return InvalidMessage(name, "holds a time outside of the years 1 to 9999")


def _counted(key: Key, column: pa.Array) -> pa.Array:
    """Timestamps as microseconds since 1970-01-01, dates as days since then."""
    if key.kind == "date":
        return column.cast(pa.int32())
    if key.kind in ("timestamp", "timestamp_ntz"):
        return column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
    return column


def _shortest(value: Decimal) -> str:
    """A decimal without trailing zeros, so that 1.50 and 1.500 give one key."""
    return f"{value.normalize(_EXACT):f}"


def _in_utc(at: datetime) -> datetime:
    return at.astimezone(UTC)


def _headers(pairs: list[Any]) -> dict[str, Any]:
    """A map, or an array of structs, as a dict in the order of its names.

    Spark promises no order of a map's entries. Sorted, they give the row one id in every replay.
    """
    items = [(p["key"], p["value"]) if isinstance(p, Mapping) else p for p in pairs]
    if any(item is None or item[0] is None for item in items):
        raise InvalidMessage("headers", "have a name that is null")
    table = {key: _header(value) for key, value in sorted(items, key=_KEY)}
    if len(table) < len(items):
        raise InvalidMessage("headers", "have a name twice")
    return table


def _header(value: object) -> object:
    return value.astimezone(UTC) if isinstance(value, datetime) else value
