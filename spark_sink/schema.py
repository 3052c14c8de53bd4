"""The columns that a DataFrame may have, checked on the driver before any task starts.

Knows: Spark's types, and which of them each message property accepts. Must never know: data.

The columns follow Spark's Kafka sink: ``value`` is the body, the others are optional, and an option
overrides a column of its name. Unlike in the Kafka sink, an unknown column is an error, because it
is more often a misspelt ``routing_key`` than a column to ignore. Only columns that ``idColumns``
names may be present and not be sent.

A digest of a key does not depend on the session's time zone, the width of an integer or the scale
of a decimal: `rows` normalizes each value. The digest covers the kind too, so 1 and ``'1'`` differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    CharType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
)

from spark_sink.failures import SchemaError
from spark_sink.settings import Settings

_WHOLE: Final = (ByteType, ShortType, IntegerType, LongType)
_TEXTS: Final = (StringType, CharType, VarcharType)
_HEADER: Final = (
    *_TEXTS,
    BinaryType,
    BooleanType,
    *_WHOLE,
    FloatType,
    DoubleType,
    DecimalType,
    DateType,
    TimestampType,
    TimestampNTZType,
)
_JSON_KEYS: Final = (*_TEXTS, BooleanType, *_WHOLE)
_JSON: Final = (*_HEADER, NullType)
"""Types that `json_text` writes, besides structs, arrays and maps."""

_TO_JSON: Final = "Spark's to_json, which gives a string"
_SPATIAL: Final = ("geometry", "geography")
"""Types of Spark 4.1 and later, by their names."""
_AS_BINARY: Final = "ST_AsBinary: Spark's to_json does not write it either"


def _is_headers(kind: DataType) -> bool:
    if isinstance(kind, MapType):
        return isinstance(kind.keyType, _TEXTS) and _is_header(kind.valueType)
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, StructType):
        pair = kind.elementType
        return (
            pair.names == ["key", "value"]
            and isinstance(pair["key"].dataType, _TEXTS)
            and _is_header(pair["value"].dataType)
        )
    if not isinstance(kind, StructType) or len(set(kind.names)) < len(kind.names):
        return False
    return all(_is_header(field.dataType) for field in kind.fields)


def _is_header(kind: DataType) -> bool:
    return (
        _is_header(kind.elementType) if isinstance(kind, ArrayType) else isinstance(kind, _HEADER)
    )


def have_doubles(schema: StructType) -> bool:
    """Whether a DataFrame has headers with numbers of binary floating point."""
    return "headers" in schema.names and _has_doubles(schema["headers"].dataType)


def _has_doubles(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(_has_doubles(field.dataType) for field in kind.fields)
    if isinstance(kind, ArrayType):
        return _has_doubles(kind.elementType)
    if isinstance(kind, MapType):
        return _has_doubles(kind.valueType)
    return isinstance(kind, FloatType | DoubleType)


_TEXT: Final = ("string", _TEXTS)
_NUMBER: Final = ("tinyint, smallint, int or bigint", _WHOLE)
COLUMNS: Final[dict[str, tuple[str, tuple[type[DataType], ...]]]] = {
    "value": (
        "string or binary (another, such as a struct, with valueFormat=json)",
        (*_TEXTS, BinaryType),
    ),
    "exchange": _TEXT,
    "routing_key": _TEXT,
    "headers": (
        (
            "map<string, T>, array<struct<key: string, value: T>> or a struct with fields of any "
            "T; T is string, binary, boolean, number, decimal, date, timestamp, or array<T>"
        ),
        (MapType, ArrayType, StructType),  # and `_is_headers`
    ),
    "message_id": _TEXT,
    "content_type": _TEXT,
    "content_encoding": _TEXT,
    "correlation_id": _TEXT,
    "reply_to": _TEXT,
    "type": _TEXT,
    "user_id": _TEXT,
    "app_id": _TEXT,
    "persistent": ("boolean", (BooleanType,)),
    "priority": _NUMBER,
    "expiration": _NUMBER,
    "timestamp": ("timestamp (with time zone)", (TimestampType,)),
}
"""Every accepted column: its types, in words and as classes."""

_KEY_KINDS: Final[dict[type[DataType], str]] = {
    StringType: "string",
    CharType: "string",
    VarcharType: "string",
    ByteType: "integer",
    ShortType: "integer",
    IntegerType: "integer",
    LongType: "integer",
    BooleanType: "boolean",
    BinaryType: "binary",
    DecimalType: "decimal",
    DateType: "date",
    TimestampType: "timestamp",
    TimestampNTZType: "timestamp_ntz",
}
_KEYS: Final = ", ".join(dict.fromkeys(_KEY_KINDS.values()))
"""Names of the kinds that a key may have, for error texts."""

OF_REPORT: Final = ("_outcome", "_reply_code", "_reply_text", "_message_id", "_partition", "_row")
"""Columns that the report adds to failed rows."""

REQUIRED: Final = ("value", "exchange", "routing_key", "message_id")
"""Columns that, if present, must not be null; in others null means "not set"."""


@dataclass(frozen=True)
class Key:
    """A column, or a field of a struct, that is part of the key of a row.

    Attributes:
        name: its name in lower case, because Spark ignores the case of column names.
        position: index in the DataFrame.
        kind: kind of its values.
        path: for a field, its index in the struct of the column, and so on.
    """

    name: str
    position: int
    kind: str
    path: tuple[int, ...] = ()


@dataclass(frozen=True)
class Columns:
    """The source of each message property.

    Attributes:
        positions: column name -> index in the DataFrame, for the columns that are used.
        fixed: property -> the value that an option gives to every message.
        is_json: whether ``value`` is sent as JSON.
        keys: the columns of ``idColumns``; empty without this option.
    """

    positions: dict[str, int]
    fixed: dict[str, object]
    is_json: bool
    keys: tuple[Key, ...] = ()

    @property
    def have_ids(self) -> bool:
        """Whether the data gives each row its id, independent of the partitions."""
        return bool(self.keys) or "message_id" in self.positions


def match(schema: StructType, settings: Settings) -> Columns:
    """Match a DataFrame's columns with message properties.

    Raises:
        SchemaError: with every problem found, and what is allowed.
    """
    names = schema.names
    problems = [
        f"column {name!r} occurs twice" for name in sorted(set(names)) if names.count(name) > 1
    ]
    is_json = settings.value_format == "json"
    keys, key_problems = _keys(schema, settings.id_columns)
    problems += key_problems
    of_keys = {schema.names[key.position] for key in keys}
    of_report = [name for name in names if name in OF_REPORT and name not in of_keys]
    if of_report:
        problems.append(f"{', '.join(of_report)} come from the report of failed rows; drop them")
    clashing = [name for name in names if name in of_keys and name.lower() in OF_REPORT]
    if clashing and settings.report is not None:
        problems.append(
            f"the report adds columns of its own with the names {', '.join(clashing)}; rename "
            "these columns of idColumns"
        )
    for field in schema.fields:
        if field.name in of_report:
            continue
        if field.name in COLUMNS or field.name not in of_keys:
            problems += _problems_of(field.name, field.dataType, is_json=is_json)
    if settings.collects:
        problems += [
            f"{problem}, which the report cannot keep: cast it to another type"
            for field in schema.fields
            for problem in _not_kept(field.dataType, field.name)
        ]
    fixed = {
        name: getattr(settings, name)
        for name in COLUMNS
        if getattr(settings, name, None) is not None
    }
    positions = {name: i for i, name in enumerate(names) if name in COLUMNS and name not in fixed}
    problems += _missing(positions, fixed, settings)
    if problems:
        raise SchemaError(f"this DataFrame cannot be published: {'; '.join(problems)}")
    if "persistent" not in positions:
        fixed.setdefault("persistent", True)
    return Columns(positions, fixed, is_json, keys)


def _keys(schema: StructType, wanted: tuple[str, ...]) -> tuple[tuple[Key, ...], list[str]]:
    """The columns that ``idColumns`` names, and their problems."""
    found = [_key(schema, name) for name in wanted]
    keys = tuple(key for key in found if isinstance(key, Key))
    return keys, [f"idColumns: {problem}" for problem in found if isinstance(problem, str)]


def _key(schema: StructType, name: str) -> Key | str:
    """A key, or what keeps it from being one."""
    paths = _paths(schema, name.lower())
    if len(paths) > 1:
        return f"columns differ from {name!r} only in upper and lower case; rename one"
    if not paths:
        lower = [one.lower() for one in schema.names]
        close = get_close_matches(name.lower(), lower, n=1)
        hint = f" (did you mean {schema.names[lower.index(close[0])]!r}?)" if close else ""
        return f"there is no column {name!r}{hint}"
    position, *path = paths[0]
    found = schema.fields[position].dataType
    for at in path:
        assert isinstance(found, StructType), "`_paths` looks into structs alone"
        found = found.fields[at].dataType
    kind = _KEY_KINDS.get(type(found))
    if kind is None:
        return f"column {name!r} is {found.simpleString()}; a key is {_KEYS}"
    return Key(name.lower(), position, kind, tuple(path))


def _paths(struct: StructType, name: str) -> list[tuple[int, ...]]:
    """Where ``k.a`` is: a column of that name, or else a field of the struct ``k``."""
    whole: list[tuple[int, ...]] = [
        (at,) for at, one in enumerate(struct.names) if one.lower() == name
    ]
    head, dot, rest = name.partition(".")
    if whole or not dot:
        return whole
    return [
        (at, *inner)
        for at, field in enumerate(struct.fields)
        if field.name.lower() == head and isinstance(field.dataType, StructType)
        for inner in _paths(field.dataType, rest)
    ]


def _problems_of(name: str, kind: DataType, *, is_json: bool) -> list[str]:
    if name not in COLUMNS:
        close = get_close_matches(name.lower(), COLUMNS, n=1)
        hint = f"did you mean {close[0]!r}" if close else f"there may be {', '.join(COLUMNS)}"
        return [f"column {name!r} is not known ({hint}; put your data into 'value')"]
    allowed, kinds = COLUMNS[name]
    if name == "value" and is_json:
        return [
            f"{problem}, which valueFormat=json does not write: use {remedy}"
            for problem, remedy in _no_json(kind, "value")
        ]
    if isinstance(kind, kinds) and (name != "headers" or _is_headers(kind)):
        return []
    return [f"column {name!r} is {kind.simpleString()}; it must be {allowed}"]


def _no_json(kind: DataType, path: str) -> Iterator[tuple[str, str]]:
    """Parts of a type that are not written as JSON, with their paths, and what to use instead."""
    if isinstance(kind, StructType):
        if len(set(kind.names)) < len(kind.names):  # Spark passes no such struct to Python
            yield f"{path!r} has two fields of the same name", _TO_JSON
        for field in kind.fields:
            yield from _no_json(field.dataType, f"{path}.{field.name}")
    elif isinstance(kind, ArrayType):
        yield from _no_json(kind.elementType, f"{path}[]")
    elif isinstance(kind, MapType):
        if not isinstance(kind.keyType, _JSON_KEYS):
            yield f"{path!r} has keys of type {kind.keyType.simpleString()}", _TO_JSON
        yield from _no_json(kind.valueType, f"{path}[]")
    elif type(kind) not in _JSON:
        name = kind.simpleString()
        yield f"{path!r} is {name}", _AS_BINARY if name.startswith(_SPATIAL) else _TO_JSON


def _not_kept(kind: DataType, path: str) -> Iterator[str]:
    """Parts of a type that Parquet does not hold, or Spark does not read, with their paths."""
    if isinstance(kind, StructType):
        if not kind.fields:
            yield f"{path!r} is a struct without fields"
        if len({name.lower() for name in kind.names}) < len(kind.names):  # Spark reads no such file
            yield f"{path!r} has fields that differ only in upper and lower case"
        for field in kind.fields:
            yield from _not_kept(field.dataType, f"{path}.{field.name}")
    elif isinstance(kind, ArrayType):
        if isinstance(kind.elementType, NullType) and not kind.containsNull:
            yield f"{path!r} is {kind.simpleString()}"
        yield from _not_kept(kind.elementType, f"{path}[]")
    elif isinstance(kind, MapType):
        yield from _not_kept(kind.valueType, f"{path}[]")


def _missing(positions: dict[str, int], fixed: dict[str, object], settings: Settings) -> list[str]:
    problems = []
    if "value" not in positions:
        problems.append("column 'value' is missing; it is the body of the message")
    has_exchange = "exchange" in positions or fixed.get("exchange", "") != ""
    if not has_exchange and "routing_key" not in positions and not fixed.get("routing_key"):
        problems.append(
            "there is neither an exchange nor a routing key (each a column or an option); to the "
            "default exchange, the routing key is the name of the queue"
        )
    given = {
        "a column 'message_id'": "message_id" in positions,
        "idColumns": bool(settings.id_columns),
        "identity=position": settings.identity != "content",
    }
    identities = [name for name, is_given in given.items() if is_given]
    if len(identities) > 1:
        problems.append(f"both {identities[0]} and {identities[1]}; drop one")
    return problems
