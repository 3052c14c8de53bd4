"""The types of the columns that are the key of a row (``idColumns``).

Knows: which of Spark's types can be a key. Must never know: digests, what is published.

A digest does not depend on the session's time zone, the width of an integer or the scale of a
decimal: `rows` normalizes each value. The digest covers the kind too, so 1 and ``'1'`` differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    CharType,
    DataType,
    DateType,
    DecimalType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
)

_KINDS: Final[dict[type[DataType], str]] = {
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
KINDS: Final = ", ".join(dict.fromkeys(_KINDS.values()))
"""Names of the kinds that a key may have, for error texts."""


@dataclass(frozen=True)
class Key:
    """A column that is part of the key of a row.

    Attributes:
        name: in lower case, because Spark ignores the case of column names.
        position: index in the DataFrame.
        kind: of its values.
    """

    name: str
    position: int
    kind: str


def kind_of(kind: DataType) -> str | None:
    """The kind of a column's values; None if they cannot be a key (floating point, nested)."""
    return _KINDS.get(type(kind))
