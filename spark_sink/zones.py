"""The time zone of a session, under a name that Python knows.

Knows: Arrow's types, names of time zones. Must never know: messages.

Spark gives every timestamp the session's time zone by the name that the user wrote, and Java
accepts names that Python does not: ``GMT+3``, ``UTC+03:00``, ``Z``.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import pyarrow as pa

from reliablepub import ConfigurationError

_OFFSET: Final = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::?(\d\d))?(?::?00)?")

_UTC: Final = ("Z", "UT", "GMT", "Etc/UTC", "Etc/GMT")
"""Names for UTC; Python knows "UTC" itself on hosts without tzdata, too."""


def readable(column: pa.Array) -> pa.Array:
    """The column, with time zones that Python knows; it shares the memory.

    Raises:
        ConfigurationError: Python does not know the time zone.
    """
    kind = _readable(column.type)
    return column if kind is None else column.view(kind)


@lru_cache
def _readable(kind: pa.DataType) -> pa.DataType | None:
    """The type with names that Python knows; None if the type has these already."""
    known = _known(kind)
    return None if known == kind else known


def _known(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp(kind.unit, kind.tz and _zone(kind.tz))
    if pa.types.is_struct(kind):
        return pa.struct([_known_field(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_known_field(kind.key_field), _known_field(kind.item_field))
    if pa.types.is_list(kind):
        return pa.list_(_known_field(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(_known_field(kind.value_field))
    return kind


def _known_field(field: pa.Field) -> pa.Field:
    return field.with_type(_known(field.type))


def _zone(name: str) -> str:
    offset = _OFFSET.fullmatch(name)
    if offset:
        sign, hours, minutes = offset.groups()
        return f"{sign}{int(hours):02}:{minutes or '00'}"
    zone = "UTC" if name in _UTC else name
    try:
        pa.scalar(0, pa.timestamp("us", zone)).as_py()
    except (ValueError, KeyError):
        raise ConfigurationError(
            f"Python does not know the session's time zone {name!r} on this host: set "
            "spark.sql.session.timeZone to UTC, to an offset such as +03:00 or to a name such as "
            "Europe/Berlin (which needs tzdata)"
        ) from None
    return zone
