"""The typed values of the columns that name a row (``idColumns``).

Knows: which of Spark's types can be a key. Must never know: digests, what is published.

What is digested does not depend on the session's time zone, the width of an integer or the scale
of a decimal: `rows` brings each value to one form. Values of different kinds (1 and ``'1'``) differ
by their kind, which is digested too.
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
"""What a key may be made of, in words."""


@dataclass(frozen=True)
class Key:
    """A column that is part of a row's name.

    Attributes:
        name: in lower case, as Spark takes no notice of it.
        position: index in the DataFrame.
        kind: of its values.
    """

    name: str
    position: int
    kind: str


def kind_of(kind: DataType) -> str | None:
    """The kind of a column's values; None where they are no key (floating, nested)."""
    return _KINDS.get(type(kind))
