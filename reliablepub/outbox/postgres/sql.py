"""The named statements of ``queries.sql`` and the script ``schema.sql``, for a schema's name.

Knows: where this package keeps its ``.sql`` files, and their conventions. Must never know: what any
statement means.

In the files, ``-- name: xyz`` stands above each statement, ``reliablepub_messages`` stands for the
table ``messages`` in the outbox's schema, and ``:name`` is a value. A schema's name is checked
before it gets into a statement; values are always bound.
"""

from __future__ import annotations

import pkgutil
import re
from functools import cache
from typing import Final

from reliablepub.errors import ConfigurationError

DEFAULT_SCHEMA: Final = "reliablepub"
_SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_NAME: Final = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
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


def _text(name: str, package: str = "reliablepub.outbox.postgres") -> str:
    # It works from a zip too, and spares the imports of `importlib.resources`, which take 10 ms.
    data = pkgutil.get_data(package, name)
    assert data is not None, "every loader of packages has data"
    return data.decode()


def within(schema: str, text: str) -> str:
    """Return SQL with the tables of a schema."""
    return _TABLE.sub(lambda found: f"{schema}.{found[1]}" if found[1] else schema, text)


def script(name: str, schema: str, **values: object) -> str:
    """Return one of this package's ``.sql`` scripts for a schema, with values in its braces."""
    return within(schema, _text(name)).format(**values)


@cache
def queries(schema: str) -> dict[str, str]:
    """Return the statements for a schema as psycopg wants them, by name."""
    return {name: _VALUE.sub(r"%(\1)b", _escaped(text)) for name, text in named(schema).items()}


def for_dbapi(text: str) -> str:
    """Return a statement as psycopg, psycopg2 and Django want it: with ``%(name)s``."""
    return _VALUE.sub(r"%(\1)s", _escaped(text))


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


@cache
def named(schema: str) -> dict[str, str]:
    """Return the statements for a schema, by the name in the comment above each."""
    found: dict[str, str] = {}
    text = _text("queries.sql", "reliablepub.outbox") + _text("queries.sql")
    parts = _NAME.split(within(schema, text))[1:]
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        statement, end, _ = part.partition(";\n")
        if name in found or not end:
            raise ValueError(f"the statement {name} is there twice, or does not end")
        found[name] = statement.strip()
    return found
