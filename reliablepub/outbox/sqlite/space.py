"""Disk space: what is kept of messages that are gone, and what gives way on a full disk.

Knows: confirmed rows, deduplication keys, free pages, the ballast, and in which order they go. Must
never know: open or parked messages, the relay.

Old rows are deleted in small steps inside transactions that are made anyway, so none of these takes
noticeably longer and nothing has to run beside them. Free pages are cut off the file all at once,
when little is left after an outage: SQLite can also cut them off one by one, but it looks through
its list of free pages each time, and with a million pages one takes 3 ms.

While the disk is short of space, in this order: new messages are refused (`Ballast.check`);
confirmed rows are deleted, the oldest first, and none is kept; a commit that does not fit gets the
space of the ballast; free pages are cut off the file. Each commit checkpoints behind itself, so
that the log begins afresh and needs no more space. Deleted rows are not overwritten meanwhile,
which would write as many bytes to the log as it frees: bodies of confirmed messages may stay in
free pages until these are used again. Outcomes are recorded in `pieces` that the ballast can hold,
however many messages a turn settles. Space that an operator frees goes to a checkpoint first: as
long as less is free than the log owes to the database, nothing is written at all.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from reliablepub.errors import OutboxDiskFull, OutboxError
from reliablepub.outbox.entry import Changes
from reliablepub.outbox.sqlite.ballast import MARGIN_BYTES, Ballast, free_bytes
from reliablepub.outbox.sqlite.checkpoints import behind_next_commit, move_what_is_owed
from reliablepub.outbox.sqlite.database import PAGE_BYTES
from reliablepub.outbox.sqlite.failures import reported
from reliablepub.outbox.sqlite.sql import QUERIES
from reliablepub.outbox.sqlite.transactions import transaction

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


T = TypeVar("T")

LOW_BYTES: Final = 1024 * 1024
"""With less than this to spare, the disk counts as full; `Ballast.check` asks for less."""
LOOK_S: Final = 1.0
"""How often the disk is looked at while it has space."""
SHORT_LOOK_S: Final = 0.25
"""How often while it has none."""
PRUNED: Final = 250
"""`prune_confirmed` deletes twice as many in one transaction."""
CUT_PAGES: Final = 64
"""Pages that are cut off the file in one transaction: half a mebibyte of log."""
CUT_S: Final = 0.02
PIECE_BYTES: Final = 1024 * 1024
"""Of messages that are settled in one transaction. To park one writes it to the log and, where no
page is free, to the end of the database."""
DISK_FULL: Final = "disk full: no new message is stored until space is freed"


def pieces(changes: Changes) -> Iterator[Changes]:
    """What of a turn may be recorded ahead of the rest, because it counts once however often it is.

    So each piece needs no more space than the ballast has, unless it is one large message. Nothing
    if the turn settles little.
    """
    for confirmed in _by_bytes(changes.confirmed, lambda entry: entry.message.size):
        yield Changes(confirmed=confirmed)
    for parked in _by_bytes(changes.parked, lambda attempt: attempt.entry.message.size):
        yield Changes(parked=parked)
    for discarded in _by_bytes(changes.discarded, lambda attempt: attempt.entry.message.size):
        yield Changes(discarded=discarded)


def _by_bytes(settled: list[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    piece, size = list[T](), 0
    for one in settled:
        piece.append(one)
        size += size_of(one)
        if size >= PIECE_BYTES:
            yield piece
            piece, size = [], 0


class Shortage:
    """Whether the disk of an outbox is full, and what its relay does about it.

    Args:
        path: of the outbox.
        ballast: given back, and kept again.

    Attributes:
        is_on: whether space is short.
    """

    def __init__(self, path: Path, ballast: Ballast) -> None:
        self._path = path
        self._ballast = ballast
        self._next_look_at = 0.0
        self.is_on = False

    def settle(self, connection: sqlite3.Connection, *, release: bool = False) -> None:
        """Before a transaction that only settles: have the log moved into the database.

        Args:
            connection: the relay's.
            release: the disk was too full for the transaction, so it gets the ballast.

        Raises:
            OutboxDiskFull: less is free than the log needs to be moved; nothing was written.
        """
        with reported(self._path):
            connection.execute("PRAGMA secure_delete = FAST")
        if release:
            with transaction(connection, self._path):  # whose lock everybody's check waits for
                self._ballast.release()
        with reported(self._path):
            owed = move_what_is_owed(connection, self._path)
        lacking = owed + MARGIN_BYTES - free_bytes(self._path.parent)
        if owed and lacking > 0:
            raise OutboxDiskFull(
                f"outbox {self._path} cannot even record what was confirmed, because the disk is "
                f"full: free some space, at least {lacking:.0f} bytes; what was accepted before "
                "stays"
            )

    def look(self, connection: sqlite3.Connection) -> str:
        """Look at the disk now and then, and have something give way if it is full.

        Returns:
            why no new message is taken; empty when there is space.
        """
        now = time.monotonic()
        if now >= self._next_look_at:
            with reported(self._path):
                self._look(connection)
            self._next_look_at = now + (SHORT_LOOK_S if self.is_on else LOOK_S)
        return DISK_FULL if self.is_on else ""

    def _look(self, connection: sqlite3.Connection) -> None:
        spare = self._ballast.spare_bytes(connection)
        if spare < LOW_BYTES:
            self.is_on = True
            connection.execute("PRAGMA secure_delete = FAST")
            with suppress(OutboxError):  # then at the next look
                self._give(connection)
            spare = self._ballast.spare_bytes(connection)
        self._ballast.restore_within(spare)
        if spare >= LOW_BYTES and self.is_on:
            self.is_on = False
            connection.execute("PRAGMA secure_delete = ON")

    def _give(self, connection: sqlite3.Connection) -> None:
        """Delete what is kept, and shorten the file where it can be."""
        has_kept = connection.execute(QUERIES["has_confirmed"]).fetchone() is not None
        (vacuum,) = connection.execute("PRAGMA auto_vacuum").fetchone()
        if not has_kept and not (vacuum and free_pages(connection)):
            return
        try:
            self._shrink(connection, release=False)
        except OutboxDiskFull:
            if vacuum:  # the ballast comes back with more
                self._shrink(connection, release=True)

    def _shrink(self, connection: sqlite3.Connection, *, release: bool) -> None:
        self.settle(connection, release=release)
        with behind_next_commit(connection), transaction(connection, self._path):
            prune_confirmed(connection, math.inf, PRUNED)
            _cut_off(connection)


def _cut_off(connection: sqlite3.Connection) -> None:
    until = time.monotonic() + CUT_S
    for _ in range(min(CUT_PAGES, free_pages(connection))):
        connection.execute("PRAGMA incremental_vacuum(1)")
        if time.monotonic() > until:
            break
