"""SQL of an outbox for the name of its schema: named statements, and the scripts that create it.

Knows: how the ``.sql`` files of this package write tables and values. Must never know: what a
statement means.

In the files, ``reliablepub_messages`` stands for the table ``messages`` in the outbox's schema, and
``:name`` is a value. The name of a schema is checked before it becomes part of a statement.
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

VERSION: Final = 1
"""Version of the tables in schema.sql."""
DEFAULT_SCHEMA: Final = "reliablepub"
_SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_TABLE: Final = re.compile(r"\breliablepub_(\w*)")
_VALUE: Final = re.compile(r"(?<!:):([a-z]\w*)")


def check_schema(name: str) -> str:
    """Return the name of a schema if it needs no quotes.

    Raises:
        ConfigurationError: it has characters other than lower-case letters, digits and ``_``.
    """
    if not _SCHEMA.fullmatch(name):
        msg = f"schema {name!r} must be lower-case letters, digits and _, and begin with a letter"
        raise ConfigurationError(msg)
    return name


def within(schema: str, text: str) -> str:
    """Return SQL in which the names of tables are those of a schema."""
    return _TABLE.sub(lambda found: f"{schema}.{found[1]}" if found[1] else schema, text)


def creation(schema: str, *, shards: int = 1, allows_loss: bool = False) -> str:
    """Return the SQL that creates an outbox."""
    values = {"version": VERSION, "shards": int(shards), "allows_loss": bool(allows_loss)}
    return within(schema, text_of(__package__, "schema.sql")).format(**values)


def roles(schema: str) -> str:
    """Return the SQL that creates roles with the least privileges for an outbox."""
    return within(schema, text_of(__package__, "roles.sql")).replace("role_", f"{schema}_")


@cache
def queries(schema: str) -> dict[str, str]:
    """Return the statements for a schema in psycopg's form, with binary values, by name."""
    return {name: _VALUE.sub(r"%(\1)b", _escaped(text)) for name, text in named(schema).items()}


def for_dbapi(text: str) -> str:
    """Return a statement in the form of psycopg, psycopg2 and Django: with ``%(name)s``."""
    return _VALUE.sub(r"%(\1)s", _escaped(text))


def with_values(text: str, values: Mapping[str, object]) -> str:
    """Return a statement with its values as literals."""
    return _VALUE.sub(lambda found: Literal(values[found[1]]).as_string(None), text)


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


@cache
def named(schema: str) -> dict[str, str]:
    """Return the statements for a schema, by the name in the comment above each."""
    text = text_of_queries(
        __package__,
        bytes_of="convert_to({}, 'UTF8')",
        utc_of="reliablepub_utc({})",
        infinity="'infinity'",
    )
    return queries_of(within(schema, text))
