"""SQL of an outbox for the name of its schema: named statements, and the scripts that create it.

Knows: how the ``.sql`` files of this package write tables and values. Must never know: what a
statement means, or psycopg: a command that only prints or compares SQL runs without it.

In the files, ``reliablepub_messages`` stands for the table ``messages`` in the outbox's schema, and
``:name`` is a value. The name of a schema is checked before it becomes part of a statement.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Final

from reliablepub.errors import ConfigurationError
from reliablepub.outbox.queries import named as queries_of
from reliablepub.outbox.queries import text_of, text_of_queries

VERSION: Final = 4
"""Version of the tables in schema.sql."""
DEFAULT_SCHEMA: Final = "reliablepub"
_SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_RESERVED: Final = re.compile(
    r"all|analyse|analyze|and|any|array|as|asc|asymmetric|authorization|binary|both|case|cast|"
    r"check|collate|collation|column|concurrently|constraint|create|cross|current_catalog|"
    r"current_date|current_role|current_schema|current_time|current_timestamp|current_user|"
    r"default|deferrable|desc|distinct|do|else|end|except|false|fetch|for|foreign|freeze|from|"
    r"full|grant|group|having|ilike|in|initially|inner|intersect|into|is|isnull|join|lateral|"
    r"leading|left|like|limit|localtime|localtimestamp|natural|not|notnull|null|offset|on|"
    r"only|or|order|outer|overlaps|placing|primary|references|returning|right|select|"
    r"session_user|similar|some|symmetric|system_user|table|tablesample|then|to|trailing|true|"
    r"union|unique|user|using|variadic|verbose|when|where|window|with"
)
"""Words that need quotes as the name of a schema."""
_NAME: Final = re.compile(r"('reliablepub_'|\breliablepub_(\w*)|\brole_(\w*))")
_ROLE: Final = "_enqueuer"
"""The longest suffix of a role."""
_NAME_MAX: Final = 63
"""Characters of a name in PostgreSQL."""
_FUNCTION: Final = re.compile(
    r"^CREATE FUNCTION [^(]*\.(\w+)\(.*?AS \$\$(.*?)\$\$;", re.DOTALL | re.MULTILINE
)
_REPLACED: Final = re.compile(
    r"^CREATE (FUNCTION [^;]*?\$\$.*?\$\$|VIEW .*?);$", re.DOTALL | re.MULTILINE
)
_VALUE: Final = re.compile(r"(?<!:):([a-z]\w*)")


def check_schema(name: str) -> str:
    """Return the name of a schema if this library can use it."""
    if not _SCHEMA.fullmatch(name):
        msg = f"schema {name!r} must be lower-case letters, digits and _, and begin with a letter"
        raise ConfigurationError(msg)
    return name


def within(schema: str, text: str) -> str:
    """Return SQL in which the names of tables are those of a schema."""
    quoted = f'"{schema}"' if _RESERVED.fullmatch(schema) else schema

    def named_in(found: re.Match[str]) -> str:
        if found[2] is None:
            return f"'{schema}'" if found[3] is None else f"{schema}_{found[3]}"
        return f"{quoted}.{found[2]}" if found[2] else quoted

    return _NAME.sub(named_in, text)


def creation(schema: str, *, shards: int = 1, allows_loss: bool = False) -> str:
    """Return the SQL that creates an outbox."""
    values = {"version": VERSION, "shards": int(shards), "allows_loss": bool(allows_loss)}
    return within(schema, text_of(__package__, "schema.sql")).format(**values)


def functions(schema: str, shards: int) -> dict[str, str]:
    """Return the body of each function of an outbox, by name."""
    return dict(_FUNCTION.findall(creation(schema, shards=shards)))


def changed(schema: str, shards: int, bodies: Mapping[str, str]) -> list[str]:
    """Name the functions of which an outbox has other bodies than those of this version."""
    ours = functions(schema, shards)
    return sorted(name for name, body in ours.items() if bodies.get(name) != body)


def recreation(schema: str, shards: int) -> str:
    """Return the SQL that creates the functions and views of an outbox anew."""
    made = _REPLACED.findall(creation(schema, shards=shards))
    return "".join(f"CREATE OR REPLACE {text};\n" for text in made)


def roles(schema: str) -> str:
    """Return the SQL that creates roles with the least privileges for an outbox."""
    if len(schema + _ROLE) > _NAME_MAX:  # PostgreSQL would cut off the names of the roles
        room = _NAME_MAX - len(_ROLE)
        raise ConfigurationError(f"schema {schema!r} has more than {room} characters for its roles")
    return within(schema, text_of(__package__, "roles.sql"))


@cache
def queries(schema: str) -> dict[str, str]:
    """Return the statements for a schema in psycopg's form, with binary values, by name."""
    return {name: for_psycopg(text) for name, text in named(schema).items()}


@lru_cache(maxsize=64)
def for_psycopg(text: str) -> str:
    """Return a statement in the form of psycopg, with binary values: ``%(name)b``."""
    return _VALUE.sub(r"%(\1)b", _escaped(text))


@lru_cache(maxsize=64)
def for_dbapi(text: str) -> str:
    """Return a statement in the form of psycopg2, Django and psycopg: with ``%(name)s``."""
    return _VALUE.sub(r"%(\1)s", _escaped(text))


def with_values(text: str, literal: Callable[[str], str]) -> str:
    """Return a statement with its values as literals, each found by its name."""
    return _VALUE.sub(lambda found: literal(found[1]), text)


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


@cache
def named(schema: str) -> dict[str, str]:
    """Return the statements for a schema, by the name in the comment above each."""
    text = text_of_queries(
        __package__,
        bytes_of="convert_to({}, 'UTF8')",
        utc_of="reliablepub_utc({})",
        is_chosen="{} = ANY (CAST(:chosen AS bigint[]))",
        infinity="'infinity'",
    )
    return queries_of(within(schema, text))
