"""What is kept of messages that are gone, and for how long; and space that is given back.

Knows: confirmed rows, keys and free pages. Must never know: who asks for it, or when a transaction
begins.

What is deleted goes in small steps inside transactions that are made anyway, so none of them takes
noticeably longer, and nothing has to run beside them.

Space is given back between two of them, all at once, as soon as little is left: after an outage,
when the backlog has gone out. SQLite can also cut free pages off one by one, but it looks through
the list of them for each that it cuts: of a million pages, one takes 3 ms.
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import Final

from reliablepub.outbox.database import PAGE_BYTES
from reliablepub.outbox.sql import QUERIES

KEYS_KEPT_S: Final = 7 * 86_400.0
"""How long a key is remembered; and as long as its message is there, open or given up."""
PRUNED_MIN: Final = 100
"""Kept rows that one commit deletes, or twice as many as it confirms: they cannot pile up."""
KEYS_LOOKED_AT: Final = 4
"""Overdue keys that each new one looks at."""
FREE_PAGES_MIN: Final = 32 * 1024 * 1024 // PAGE_BYTES
"""So much stays for the next burst."""
LEFT_PAGES_MAX: Final = 8 * 1024 * 1024 // PAGE_BYTES
"""So much is copied in a tenth of a second."""


def prune_confirmed(
    connection: sqlite3.Connection, confirmed_before: float, just_confirmed: int
) -> int:
    """Delete the oldest kept rows, if they are old enough; how many were."""
    limit = max(PRUNED_MIN, 2 * just_confirmed)
    return connection.execute(QUERIES["prune_confirmed"], (confirmed_before, limit)).rowcount


def has_space_to_give(connection: sqlite3.Connection) -> bool:
    """Whether much of the file is free, little is left, and all of that is ours."""
    free = free_pages(connection)
    if free < FREE_PAGES_MIN or pages(connection) - free > LEFT_PAGES_MAX:
        return False
    return connection.execute(QUERIES["tables_of_others"]).fetchone() is None


def give_space_back(connection: sqlite3.Connection) -> None:
    """Write the file anew, without its free pages; not inside a transaction.

    Where it fails (the disk is full, somebody else writes), the file stays as it is.
    """
    with contextlib.suppress(sqlite3.OperationalError):
        connection.execute("VACUUM")


def pages(connection: sqlite3.Connection) -> int:
    """Pages of the file."""
    (count,) = connection.execute("PRAGMA page_count").fetchone()
    return int(count)


def free_pages(connection: sqlite3.Connection) -> int:
    """Those of them that hold nothing."""
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    return int(free)


def first_with_key(cursor: sqlite3.Cursor, key: str, now: float) -> str | None:
    """The ``message_id`` that was enqueued under a key before, if that is remembered."""
    row = cursor.execute(QUERIES["key"], {"key": key, "now": now}).fetchone()
    return None if row is None else str(row[0])


def remember_key(cursor: sqlite3.Cursor, key: str, id_: int, message_id: str, now: float) -> None:
    """From here on the key is taken; and a few that are overdue are looked at."""
    forget_keys(cursor, now, KEYS_LOOKED_AT)
    cursor.execute(QUERIES["remember_key"], (key, id_, message_id, now + KEYS_KEPT_S))


def forget_keys(cursor: sqlite3.Cursor, now: float, limit: int) -> tuple[int, int]:
    """Look at keys that are overdue; those whose message is still there are kept on.

    Returns:
        how many were looked at, and how many of them are forgotten.
    """
    overdue = cursor.execute(QUERIES["overdue_keys"], (now, limit)).fetchall()
    for old, is_there in overdue:
        if is_there:
            cursor.execute(QUERIES["prolong_key"], (now + KEYS_KEPT_S, old))
        else:
            cursor.execute(QUERIES["forget_key"], (old,))
    return len(overdue), sum(not is_there for _, is_there in overdue)
