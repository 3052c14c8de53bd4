"""Which version of the outbox a database holds, and how it becomes the newest.

Knows: ``application_id``, ``user_version`` and the files in ``migrations``. Must never know:
messages.

Both numbers are in the file's header and part of its transactions, so a migration and its record
come together or not at all.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Final

from reliablepub.errors import NotAnOutbox
from reliablepub.outbox.sql import script, statements

APPLICATION_ID: Final = 0x52505542  # "RPUB", for file(1) and for us
_TABLES = frozenset(("messages", "parked", "attempts", "in_flight", "ledger", "runs", "sources"))


def migrations() -> Sequence[str]:
    """Names of the migration files, in order: ``0001_first_schema.sql`` leads to version 1."""
    folder = files("reliablepub.outbox").joinpath("migrations")
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".sql"))
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
    return names


def is_current(cursor: sqlite3.Cursor, path: Path) -> bool:
    """Whether the database is an outbox of this version; False when it may be made one.

    Within a transaction, or two numbers are read between which another process creates the outbox.

    Raises:
        NotAnOutbox: it is something else, or of a newer version.
    """
    assert cursor.connection.in_transaction
    (application_id,) = cursor.execute("PRAGMA application_id").fetchone()
    (version,) = cursor.execute("PRAGMA user_version").fetchone()
    newest = len(migrations())
    if application_id == APPLICATION_ID:
        if version > newest:
            raise NotAnOutbox(
                f"outbox {path} has version {version}, and this reliablepub knows versions up to "
                f"{newest}; upgrade reliablepub"
            )
        return bool(version == newest)
    if application_id or version:
        raise NotAnOutbox(
            f"{path} is the database of another application (application_id {application_id}, "
            f"user_version {version}), and has no outbox; give the outbox a file of its own"
        )
    return False


def migrate(cursor: sqlite3.Cursor, path: Path, *, among_other_tables: bool = False) -> None:
    """Bring a database to the newest version, within the open transaction of the caller.

    Args:
        cursor: inside a transaction that may write.
        path: for the errors.
        among_other_tables: whether a database that has tables, but no outbox, gets one.

    Raises:
        NotAnOutbox: it is something else, or of a newer version.
    """
    if is_current(cursor, path):
        return
    (version,) = cursor.execute("PRAGMA user_version").fetchone()
    if version == 0:
        _check_room(cursor, path, among_other_tables=among_other_tables)
        cursor.execute(f"PRAGMA application_id = {APPLICATION_ID:d}")
    for number, name in enumerate(migrations(), 1):
        if number > version:
            for statement in statements(script("migrations", name)):
                cursor.execute(statement)
            cursor.execute(f"PRAGMA user_version = {number:d}")  # a PRAGMA takes no parameters


def _check_room(cursor: sqlite3.Cursor, path: Path, *, among_other_tables: bool) -> None:
    rows = cursor.execute(
        "SELECT name FROM sqlite_schema WHERE type IN ('table', 'view')"
    ).fetchall()
    tables = {str(row[0]) for row in rows}
    if tables and not among_other_tables:
        raise NotAnOutbox(
            f"{path} is a database without an outbox; the first Outbox(path).enqueue(message, "
            "connection=...) of its application adds one"
        )
    if taken := sorted(tables & _TABLES):
        raise NotAnOutbox(
            f"{path} already has a table {taken[0]!r} of its own, where the outbox would put one; "
            "give the outbox a file of its own"
        )
