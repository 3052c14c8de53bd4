"""Gives an outbox of an earlier version the tables of this one.

Knows: the steps in ``upgrade.sql``, one for each version, and the lock that excludes a relay. Must
never know: what a table is for.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

from reliablepub.errors import OutboxInUse
from reliablepub.outbox.queries import steps_of
from reliablepub.outbox.sqlite import checkpoints
from reliablepub.outbox.sqlite.connections import (
    BUSY_TIMEOUT_S,
    OLDEST,
    VERSION,
    check_file,
    check_version,
    lacks_outbox,
    uri_of,
)
from reliablepub.outbox.sqlite.failures import reported
from reliablepub.outbox.sqlite.forks import GATE
from reliablepub.outbox.sqlite.location import check_side_files
from reliablepub.outbox.sqlite.lock import RelayLock
from reliablepub.outbox.sqlite.sql import QUERIES, statements
from reliablepub.outbox.sqlite.transactions import transaction


def upgrade(path: Path) -> list[str]:
    """Upgrade the outbox, in one transaction, while no relay runs; return what was done."""
    if not check_file(path):
        raise lacks_outbox(path)
    check_side_files(path)
    with GATE.use(), reported(path), closing(_opened(path)) as connection:
        if _version(connection.cursor(), path) == VERSION:
            return []  # beside a relay, too
    relay_lock = RelayLock.borrow(path)
    if relay_lock is None:
        raise OutboxInUse(f"a relay runs on outbox {path}; stop it, upgrade, and start the new one")
    try:
        with (
            GATE.use(),
            reported(path),
            closing(_opened(path)) as connection,
            transaction(connection, path),
        ):
            return _upgraded(connection.cursor(), path)
    finally:
        relay_lock.release()


def _opened(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        uri_of(path, "rw"), uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None
    )
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA temp_store = MEMORY")
    checkpoints.begin(connection, is_relay=False)
    return connection


def _version(cursor: sqlite3.Cursor, path: Path) -> int:
    (count,) = cursor.execute(QUERIES["has_schema"]).fetchone()
    if not count:
        raise lacks_outbox(path)
    (found,) = cursor.execute(QUERIES["schema_version"]).fetchone()
    check_version(found, path, oldest=OLDEST)
    return int(found)


def _upgraded(cursor: sqlite3.Cursor, path: Path) -> list[str]:
    steps, found = steps_of(__package__), _version(cursor, path)
    for version in range(found, VERSION):
        for statement in statements(steps[version]):
            cursor.execute(statement)
        cursor.execute(QUERIES["record_version"], (version + 1, time.time()))
    return [f"tables of version {found} are now of version {VERSION}"] if found < VERSION else []
