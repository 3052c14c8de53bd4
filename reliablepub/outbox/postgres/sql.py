"""The named statements of ``queries.sql`` and the script ``schema.sql``, for a schema's name.

Knows: how tables and values are written in the files. Must never know: what any statement means.

In the files, ``reliablepub_messages`` stands for the table ``messages`` in the outbox's schema, and
``:name`` is a value. A schema's name is checked before it gets into a statement; values are always
bound.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Final

from psycopg.sql import Literal

from reliablepub.errors import ConfigurationError
from reliablepub.outbox.queries import named as queries_of
from reliablepub.outbox.queries import text_of, text_of_queries

DEFAULT_SCHEMA: Final = "reliablepub"
_SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_TABLE: Final = re.compile(r"\breliablepub_(\w*)")
_VALUE: Final = re.compile(r"(?<!:):([a-z]\w*)")


def check_schema(name: str) -> str:
    """Return the name of a schema, if it needs no quotes.

    Raises:
        ConfigurationError: it has other characters than lower-case letters, digits and ``_``.
    """
    if not _SCHEMA.fullmatch(name):
        msg = f"schema {name!r} must be lower-case letters, digits and _, and begin with a letter"
        raise ConfigurationError(msg)
    return name


def within(schema: str, text: str) -> str:
    """Return SQL with the tables of a schema."""
    return _TABLE.sub(lambda found: f"{schema}.{found[1]}" if found[1] else schema, text)


def script(name: str, schema: str, **values: object) -> str:
    """Return one of this package's ``.sql`` scripts for a schema, with values in its braces."""
    return within(schema, text_of(__package__, name)).format(**values)


@cache
def queries(schema: str) -> dict[str, str]:
    """Return the statements for a schema as psycopg wants them, by name."""
    return {name: _VALUE.sub(r"%(\1)b", _escaped(text)) for name, text in named(schema).items()}


def for_dbapi(text: str) -> str:
    """Return a statement as psycopg, psycopg2 and Django want it: with ``%(name)s``."""
    return _VALUE.sub(r"%(\1)s", _escaped(text))


def with_values(text: str, values: Mapping[str, object]) -> str:
    """Return a statement in which its values are literals."""
    return _VALUE.sub(lambda found: Literal(values[found[1]]).as_string(None), text)


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


@cache
def named(schema: str) -> dict[str, str]:
    """Return the statements for a schema, by the name in the comment above each."""
    return queries_of(within(schema, text_of_queries(__package__)))
