"""Which version of the outbox a database holds, and how it becomes the newest.

Knows: the table ``reliablepub_schema`` and the files in ``migrations``. Must never know: messages.

The database may be an application's own, with tables, a ``user_version`` and an ``application_id``
of its own: none of these is looked at, or touched. Each migration and its record are in one
transaction, so they come together or not at all.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Final

from reliablepub.errors import NotAnOutbox, OutboxError
from reliablepub.outbox.sql import QUERIES, script, statements

MIGRATIONS: Final = (
    "0001_first_schema.sql",
    "0002_schedule.sql",
    "0003_interventions.sql",
    "0004_first_refusal.sql",
    "0005_retention.sql",
    "0006_skipped_keys.sql",
    "0007_held_keys.sql",
    "0008_paused_destinations.sql",
)
"""The files in ``migrations``: the first leads to version 1."""


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
    newest = len(MIGRATIONS)
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
    return version_of(cursor, path) == len(MIGRATIONS)


def refuse_utf16(cursor: sqlite3.Cursor, path: Path) -> None:
    """Refuse a database whose texts are UTF-16: checksums are over UTF-8, which is what is sent.

    Raises:
        OutboxError: says what to do.
    """
    (encoding,) = cursor.execute("PRAGMA encoding").fetchone()
    if encoding != "UTF-8":
        raise OutboxError(
            f"database {path} keeps its texts as {encoding}, and an outbox needs UTF-8: nothing "
            "was stored. Use an outbox file of its own, or copy the application's tables into a "
            "new database with PRAGMA encoding = 'UTF-8'; none can change its encoding later"
        )


def migrate(cursor: sqlite3.Cursor, path: Path) -> None:
    """Bring a database to the newest version, within the open transaction of the caller.

    Args:
        cursor: inside a transaction that may write.
        path: for the errors.

    Raises:
        NotAnOutbox: the outbox is of a newer version.
        OutboxError: the database is no UTF-8 one.
    """
    refuse_utf16(cursor, path)
    version = version_of(cursor, path)
    for number, name in enumerate(MIGRATIONS, 1):
        if number > version:
            for statement in statements(script("migrations", name)):
                cursor.execute(statement)
            cursor.execute(QUERIES["record_migration"], (number, time.time()))
