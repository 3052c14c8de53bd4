"""Conversion of Arrow batches to messages, column by column.

Knows: Arrow, and `Message`. Must never know: Spark's processes, publishers.

Values are converted, and messages made, in slices: a whole column of a slice at a time, so that a
row costs microseconds. A slice is small, so that neither many rows nor large ones fill the memory.
If a value cannot be converted (a year above 9999, bytes that are not UTF-8), its column is
converted value by value, and only its row is invalid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from itertools import repeat
from operator import itemgetter
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from reliablepub import InvalidMessage, Message
from spark_sink.identity import ByColumns, Identity
from spark_sink.json_text import text_of
from spark_sink.schema import REQUIRED, Columns, Key
from spark_sink.zones import readable

SLICE_ROWS_MAX: Final = 500
SLICE_BYTES_MAX: Final = 4 * 1024 * 1024

_DEFAULTS: Final = {f.name: f.default for f in fields(Message) if f.init and f.name != "body"}
"""The properties of a message in the order of its arguments, and what each is if not given."""
_KEY: Final = itemgetter(0)
_IN_UTC: Final = pa.timestamp("us", "UTC")
_EXACT: Final = Context(prec=80)
_UNREADABLE: Final = (ValueError, OverflowError)
"""Raised by Arrow for a date or a text that Python cannot represent."""


@dataclass(frozen=True, slots=True)
class Invalid:
    """A row that cannot be a message.

    Attributes:
        problem: the reason.
    """

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
        self._constants = _DEFAULTS | columns.fixed
        given = {"message_id", *self._names, *columns.fixed}
        order = tuple(_DEFAULTS)
        self._arguments = order[: max(order.index(name) for name in given) + 1]
        used = ["value", *self._names, *(key.name for key in columns.keys)]
        self._is_needed = [
            (name, name in REQUIRED or at > len(self._names)) for at, name in enumerate(used)
        ]

    def messages(self, batch: pa.RecordBatch) -> list[Message | Invalid]:
        """For each row in order: its message, or `Invalid`."""
        positions = self._columns.positions
        taken = _Taken()
        bodies = taken.bodies(batch.column(positions["value"]), is_json=self._columns.is_json)
        others = [taken.values(name, batch.column(positions[name])) for name in self._names]
        keys = [(key, key_column(key, batch)) for key in self._columns.keys]
        columns = [bodies, *others, *(taken.key(key, column) for key, column in keys)]
        needed = [batch.column(at) for name, at in positions.items() if name in REQUIRED]
        has_gaps = any(column.null_count for column in (*needed, *(column for _, column in keys)))
        problems = self._problems(columns) if taken.is_faulty or has_gaps else {}
        if not problems:
            return self._made(columns)
        rows = [row for row in range(batch.num_rows) if row not in problems]
        made = self._made([[column[row] for row in rows] for column in columns])
        found = problems | dict(zip(rows, made, strict=True))
        return [found[row] for row in range(batch.num_rows)]

    def _problems(self, columns: list[list[Any]]) -> dict[int, Message | Invalid]:
        """The rows that have a value that no message can hold, or lack one, by their number."""
        problems: dict[int, Message | Invalid] = {}
        for (name, is_needed), column in zip(self._is_needed, columns, strict=True):
            for row, value in enumerate(column):
                if value is None and is_needed:
                    text = "is null; a message needs a body, even an empty one"
                    null = InvalidMessage(name, text if name == "value" else "is null")
                    problems.setdefault(row, Invalid(str(null)))
                elif isinstance(value, InvalidMessage):
                    problems.setdefault(row, Invalid(str(value)))
        return problems

    def _made(self, columns: list[list[Any]]) -> list[Message | Invalid]:
        """Messages of the rows; `Invalid` for a row that breaks a limit of AMQP."""
        bodies, others = columns[0], columns[1 : len(self._names) + 1]
        given = dict(zip(self._names, others, strict=True))
        if self._by_columns is not None:
            given["message_id"] = self._by_columns(zip(*columns[len(others) + 1 :], strict=True))
        elif "message_id" not in given:
            assert self._by_content is not None
            rests = zip(*others, strict=True) if others else repeat((), len(bodies))
            given["message_id"] = self._by_content(bodies, rests)
        constants = self._constants
        arguments = [given.get(name) or repeat(constants[name]) for name in self._arguments]
        try:
            return list(map(Message, bodies, *arguments))
        except InvalidMessage:
            return [_message(*row) for row in zip(bodies, *arguments, strict=False)]


def _message(*arguments: Any) -> Message | Invalid:  # noqa: ANN401 - as `Message` has them
    try:
        return Message(*arguments)
    except InvalidMessage as error:
        return Invalid(str(error))


def key_column(key: Key, batch: pa.RecordBatch) -> pa.Array:
    """The values of a key; null where a struct around it is null."""
    column = batch.column(key.position)
    return pc.struct_field(column, list(key.path)) if key.path else column


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
        if name == "persistent":
            return [value is not False for value in self._plain(name, column)]
        return self._plain(name, column)

    def key(self, key: Key, column: pa.Array) -> list[Any]:
        """The values of a key column, normalized."""
        if key.kind == "decimal":
            return self._each(column, key.name, _shortest)
        return self._plain(key.name, _counted(key, column))

    def _plain(self, name: str, column: pa.Array) -> list[Any]:
        column = readable(column)
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


def _headers(given: Any) -> dict[str, Any]:  # noqa: ANN401 - a map, an array or a struct
    """A map, an array of structs or a struct, as a dict in the order of its names.

    Spark promises no order of a map's entries. Sorted, they give the row one id in every replay.
    """
    if isinstance(given, Mapping):  # a struct, which has each field in every row
        items = [(name, value) for name, value in given.items() if value is not None]
    else:
        items = [(p["key"], p["value"]) if isinstance(p, Mapping) else p for p in given]
    if any(item is None or item[0] is None for item in items):
        raise InvalidMessage("headers", "have a name that is null")
    table = {key: _header(value) for key, value in sorted(items, key=_KEY)}
    if len(table) < len(items):
        raise InvalidMessage("headers", "have a name twice")
    return table


def _header(value: object) -> object:
    """A value that an AMQP table holds.

    An AMQP decimal has 32 bits, and Spark's default type gives 1.5 as 1.500000000000000000. What is
    no moment, a date and a time without a zone, is text: AMQP has nothing else for it.
    """
    if isinstance(value, list):
        return [_header(item) for item in value]
    if isinstance(value, Decimal):
        return Decimal(_shortest(value))
    if isinstance(value, date) and getattr(value, "tzinfo", None) is None:
        return value.isoformat()
    return _in_utc(value)


def _in_utc(value: object) -> object:
    """A time in UTC; any other value unchanged."""
    return value.astimezone(UTC) if isinstance(value, datetime) else value
