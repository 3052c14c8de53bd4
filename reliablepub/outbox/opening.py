"""Finds the database of an outbox: the one place that tells a path from a URL.

Knows: what a URL begins with, and which package its database is in. Must never know: how a database
is opened.
"""

from __future__ import annotations

import os
import re
from typing import Final, TypeAlias

from reliablepub.errors import ConfigurationError
from reliablepub.outbox.database import Database

Where: TypeAlias = str | os.PathLike[str] | Database
"""The path of a SQLite file, the URL of a database, or the database itself."""


def outbox_at(where: Where) -> Database:
    """Return the database of an outbox, without opening it."""
    if not isinstance(where, str | os.PathLike):
        if not hasattr(where, "open_store"):
            kind = type(where).__name__
            msg = f"an outbox is given as a path or a URL; this is of type {kind}"
            raise ConfigurationError(msg)
        return where
    scheme, separator, rest = str(where).partition("://")
    if not separator:
        _check_path(str(where))
        # Here, because a program loads only the database that it uses.
        from reliablepub.outbox.sqlite.database import SqliteDatabase  # noqa: PLC0415

        return SqliteDatabase(where)
    if scheme in ("postgresql", "postgres"):
        try:
            from reliablepub.outbox.postgres.database import PostgresDatabase  # noqa: PLC0415
        except ModuleNotFoundError as error:
            if error.name != "psycopg":
                raise
            needs = "an outbox in PostgreSQL needs psycopg 3"
            msg = f"{needs}: install reliablepub with the extra postgres"
            raise ConfigurationError(msg) from error

        return PostgresDatabase(str(where))
    msg = f"an outbox is a file or a postgresql:// URL; {scheme}:// is neither"
    path = rest.removeprefix("/")
    if scheme.startswith("sqlite") and path and not {"@", "?"} & set(path):  # near a password
        msg += f"; write its path alone: {path}"
    elif scheme.startswith(("postgresql+", "postgres+")):
        msg += "; write postgresql://, without the driver"
    raise ConfigurationError(msg)


_NO_PATH: Final = re.compile(
    r"^postgres(ql)?(:|//)|\bpassword\s*=|^\w+\s*=\s*\S+\s+\w+\s*=|^[^/]+:[^/]*@"
)
"""Not the path of a file: a mistyped URL; parameters of libpq, such as ``host=db password=...``; a
URL without its scheme, such as ``app:password@db/shop``."""


def _check_path(path: str) -> None:
    """Refuse names that have a special meaning for SQLite, and are not the path of a file."""
    if _NO_PATH.search(path):
        # Not quoted: it may hold a password.
        raise ConfigurationError(
            "an outbox is a file or a URL that begins with postgresql://; this is neither"
        )
    if path.startswith((":memory:", "file:", "~/")) or not path.strip():
        msg = f"an outbox needs the path of a file; {path!r} is not one"
        if path.startswith(":memory:"):
            msg += "; for messages in memory only, Publisher(url, outbox=None)"
        elif path.startswith("~/"):
            msg += ": only a shell expands ~; use Path(...).expanduser()"
        raise ConfigurationError(msg)
    if "\0" in path:
        raise ConfigurationError("the path of the outbox has the character U+0000")
