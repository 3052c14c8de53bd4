"""Which version of the outbox a database holds, and how it becomes the newest.

Knows: the table ``reliablepub_schema`` and the files in ``migrations``. Must never know: messages.

The database may be an application's own, with tables, a ``user_version`` and an ``application_id``
of its own: none of these is looked at, or touched. Each migration and its record are in one
transaction, so they come together or not at all.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from reliablepub.errors import NotAnOutbox
from reliablepub.outbox.sql import QUERIES, script, statements


@cache
def migrations() -> Sequence[str]:
    """Names of the migration files, in order: ``0001_first_schema.sql`` leads to version 1."""
    folder = files("reliablepub.outbox").joinpath("migrations")
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".sql"))
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
    return tuple(names)


def version_of(cursor: sqlite3.Cursor, path: Path) -> int:
    """Which version of the outbox the database holds; 0 for none.

    Within a transaction, or another process may create the outbox between the two statements.

    Raises:
        NotAnOutbox: the outbox is of a newer version.
    """
    assert cursor.connection.in_transaction
    (count,) = cursor.execute(QUERIES["has_schema"]).fetchone()
    if not count:
        return 0
    (version,) = cursor.execute(QUERIES["schema_version"]).fetchone()
    newest = len(migrations())
    if version > newest:
        raise NotAnOutbox(
            f"outbox {path} has version {version}, and this reliablepub knows versions up to "
            f"{newest}; upgrade reliablepub"
        )
    return int(version)


def is_current(cursor: sqlite3.Cursor, path: Path) -> bool:
    """Whether the database holds an outbox of this version; False when `migrate` can make it so.

    Raises:
        NotAnOutbox: the outbox is of a newer version.
    """
    return version_of(cursor, path) == len(migrations())


def migrate(cursor: sqlite3.Cursor, path: Path) -> None:
    """Bring a database to the newest version, within the open transaction of the caller.

    Args:
        cursor: inside a transaction that may write.
        path: for the errors.

    Raises:
        NotAnOutbox: the outbox is of a newer version.
    """
    version = version_of(cursor, path)
    for number, name in enumerate(migrations(), 1):
        if number > version:
            for statement in statements(script("migrations", name)):
                cursor.execute(statement)
            cursor.execute(QUERIES["record_migration"], (number, time.time()))
