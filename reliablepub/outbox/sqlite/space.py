"""Disk space: retention of what is gone, and what is freed on a full disk.

Knows: confirmed rows, history, deduplication keys, free pages, the ballast, the order in which they
are freed. Must never know: open or parked messages, the relay.

Old confirmed rows and keys are deleted a few at a time, within transactions that are made for other
reasons. So no transaction takes noticeably longer. `Retention` deletes what these leave: old
history, and confirmed rows of a relay that commits nothing. Free pages are removed from the file
all at once, when few pages are in use after an outage. SQLite can also remove single pages, but
searches its list of free pages each time: with a million pages, removing one takes 3 ms.

While the disk is full:

- New messages are refused (`Ballast.check`).
- Confirmed rows are deleted, the oldest first, and no new ones are kept.
- A commit that does not fit gets the space of the ballast.
- Free pages are removed from the file, a few at a time.
- Each commit is followed by a checkpoint, so that the log is reset and does not grow.
- ``secure_delete`` is FAST: overwriting deleted rows would write as many bytes to the log as it
  frees. Bodies of confirmed messages may stay in free pages until these are reused.
- Outcomes are recorded in `pieces` that fit into the ballast, however many messages a turn settles.
- Space that an operator frees is first used for a checkpoint: nothing is written while less space
  is free than the log needs to copy its pages to the database.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from reliablepub.errors import OutboxDiskFull, OutboxError
from reliablepub.outbox import history
from reliablepub.outbox.database import KEYS_KEPT_S, forget_keys
from reliablepub.outbox.entry import Changes, Intervened
from reliablepub.outbox.rows import ATTEMPTS_RETENTION_S
from reliablepub.outbox.sqlite.ballast import MARGIN_BYTES, Ballast, free_bytes
from reliablepub.outbox.sqlite.checkpoints import behind_next_commit, move_what_is_owed
from reliablepub.outbox.sqlite.connections import PAGE_BYTES
from reliablepub.outbox.sqlite.failures import reported
from reliablepub.outbox.sqlite.sql import QUERIES
from reliablepub.outbox.sqlite.transactions import transaction, waiting_at_most

PRUNED_MIN: Final = 100
"""Kept rows that one commit deletes; twice as many as it confirms if that is more, so that rows
cannot accumulate."""
DELETING_S: Final = 0.02
"""About the most seconds for which `Retention` waits for the write lock, and then holds it."""
KEYS_LOOKED_AT: Final = 4
"""Overdue keys that are checked whenever a key is stored."""
FREE_PAGES_MIN: Final = 32 * 1024 * 1024 // PAGE_BYTES
"""Minimum number of free pages for a rewrite of the file; fewer are kept for the next burst."""
LEFT_PAGES_MAX: Final = 8 * 1024 * 1024 // PAGE_BYTES
"""Maximum number of used pages for a rewrite of the file: copying them takes 0.1 s."""
REWRITE_RETRY_S: Final = 60.0
"""Seconds after a rewrite that failed: on a disk that is almost full, each one fills it."""


def prune_confirmed(
    connection: sqlite3.Connection, confirmed_before: float, just_confirmed: int
) -> int:
    """Delete the oldest confirmed rows before a time; return how many."""
    values = {"before": confirmed_before, "limit": max(PRUNED_MIN, 2 * just_confirmed)}
    return connection.execute(QUERIES["prune_confirmed"], values).rowcount


def has_space_to_give(connection: sqlite3.Connection) -> bool:
    """Whether much of the file is free, little is in use, and no table is the application's."""
    free = free_pages(connection)
    if free < FREE_PAGES_MIN or pages(connection) - free > LEFT_PAGES_MAX:
        return False
    return connection.execute(QUERIES["tables_of_others"]).fetchone() is None


def give_space_back(connection: sqlite3.Connection) -> bool:
    """Rewrite the file without its free pages (``VACUUM``), outside a transaction.

    Returns:
        False if that failed (the disk is full, or another process writes): the file is not changed.
    """
    try:
        connection.execute("VACUUM")
    except sqlite3.OperationalError:
        return False
    return True


def pages(connection: sqlite3.Connection) -> int:
    """Return the number of pages of the file."""
    (count,) = connection.execute("PRAGMA page_count").fetchone()
    return int(count)


def free_pages(connection: sqlite3.Connection) -> int:
    """Return the number of pages that hold nothing."""
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    return int(free)


def first_with_key(cursor: sqlite3.Cursor, key: str, now: float) -> str | None:
    """Return the ``message_id`` that was enqueued under a key before, or None."""
    (first,) = cursor.execute(QUERIES["key"], {"key": key, "now": now}).fetchone() or (None,)
    return None if first is None else str(first)


def remember_key(cursor: sqlite3.Cursor, key: str, id_: int, message_id: str, now: float) -> None:
    """Store a key, and forget a few overdue ones."""
    forget_keys(lambda name, values: cursor.execute(QUERIES[name], values), now, KEYS_LOOKED_AT)
    cursor.execute(QUERIES["remember_key"], (key, id_, message_id, now + KEYS_KEPT_S))


class Retention:
    """Deletes what was kept for long enough, a little at a time.

    Args:
        path: path of the outbox.
        keep_confirmed_s: how long confirmed messages are kept.
    """

    def __init__(self, path: Path, keep_confirmed_s: float) -> None:
        self._path = path
        self._keep_confirmed_s = keep_confirmed_s
        self._next_look_at = 0.0
        self._passes = history.Passes()

    def look(self, connection: sqlite3.Connection, now: float, check: Callable[[], object]) -> bool:
        """Delete a part of what is old, at most every `LOOK_S`.

        Args:
            connection: the relay's connection.
            now: wall clock, seconds since 1970.
            check: called in the transaction; raises if another relay owns the outbox, or if this
                one has not read every intervention, which may be old by a clock that was set.

        Returns:
            whether anything was deleted.
        """
        begun = time.monotonic()
        if begun < self._next_look_at:
            return False
        self._next_look_at = begun + LOOK_S
        kept_before = now - self._keep_confirmed_s if self._keep_confirmed_s > 0 else math.inf
        # No error ends the relay: what is kept for inspection may be damaged.
        with suppress(OutboxError, Intervened), reported(self._path):
            old = connection.execute(QUERIES["has_confirmed"], {"before": kept_before}).fetchone()
            found = self._passes.old(
                lambda name, page: connection.execute(QUERIES[name], page).fetchone(),
                now - ATTEMPTS_RETENTION_S,
                begun,
            )
            if old is None and not found:
                return False
            with (
                waiting_at_most(connection, DELETING_S),
                transaction(connection, self._path),
            ):
                check()
                for kind, values in found.items():
                    connection.execute(QUERIES[f"forget_{kind}_between"], values)
                while prune_confirmed(connection, kept_before, 0) == PRUNED_MIN:
                    if time.monotonic() > begun + DELETING_S:
                        break
            self._passes.deleted(found)
            return True
        return False


T = TypeVar("T")

LOW_BYTES: Final = 1024 * 1024
"""With fewer spare bytes, the disk counts as full; `Ballast.check` requires less."""
LOOK_S: Final = 1.0
"""Interval of checks while the disk has space."""
SHORT_LOOK_S: Final = 0.25
"""Interval of checks while the disk is full."""
PRUNED: Final = 250
"""`prune_confirmed` deletes twice as many in one transaction."""
CUT_PAGES: Final = 64
"""Pages that one transaction removes from the file: 0.5 MiB of log."""
CUT_S: Final = 0.02
PIECE_BYTES: Final = 1024 * 1024
"""Bytes of the messages that one transaction settles on a full disk. Parking writes a message to
the log and, if no page is free, to the end of the database."""
DISK_FULL: Final = "disk full: no new message is stored until space is freed"


def pieces(changes: Changes) -> Iterator[Changes]:
    """Divide the outcomes of a turn into pieces of about `PIECE_BYTES`, to be committed before it.

    So each piece fits into the ballast, unless it is one large message. The turn is committed after
    its pieces: an outcome that is recorded twice counts once. A turn that settles less than
    `PIECE_BYTES` has no pieces.
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
    """Detects that the disk of an outbox is full, and frees space.

    Args:
        path: path of the outbox.
        ballast: reserved space, released and reserved again.

    Attributes:
        is_on: whether the disk counts as full.
    """

    def __init__(self, path: Path, ballast: Ballast) -> None:
        self._path = path
        self._ballast = ballast
        self._next_look_at = 0.0
        self.is_on = False

    def settle(self, connection: sqlite3.Connection, *, release: bool = False) -> None:
        """Checkpoint the log, before a transaction that stores no new messages.

        Args:
            connection: the relay's connection.
            release: whether to release the ballast, because the transaction did not fit.

        Raises:
            OutboxDiskFull: the checkpoint needs more space than is free; nothing was written.
        """
        with reported(self._path):
            connection.execute("PRAGMA secure_delete = FAST")
        if release:
            with transaction(connection, self._path):  # no `Ballast.check` runs under its lock
                self._ballast.release()
        with reported(self._path):
            owed = move_what_is_owed(connection, self._path)
        lacking = owed + MARGIN_BYTES - free_bytes(self._path.parent)
        if owed and lacking > 0:
            raise OutboxDiskFull(
                f"outbox {self._path} cannot record confirms, because the disk is full: free some "
                f"space, at least {lacking:.0f} bytes; messages accepted before are safe"
            )

    def look(self, connection: sqlite3.Connection) -> str:
        """Check the disk at intervals, and free space if it is full.

        Returns:
            Why new messages are refused; empty if there is space.
        """
        now = time.monotonic()
        if now >= self._next_look_at:
            self._look(connection)
            self._next_look_at = now + (SHORT_LOOK_S if self.is_on else LOOK_S)
        return DISK_FULL if self.is_on else ""

    def _look(self, connection: sqlite3.Connection) -> None:
        spare = self._ballast.spare_bytes(connection)
        if spare < LOW_BYTES:
            self.is_on = True
            connection.execute("PRAGMA secure_delete = FAST")
            with suppress(OutboxError):  # retried at the next look
                self._give(connection)
            spare = self._ballast.spare_bytes(connection)
        self._ballast.restore_within(spare)
        if spare >= LOW_BYTES and self.is_on:
            self.is_on = False
            connection.execute("PRAGMA secure_delete = ON")

    def _give(self, connection: sqlite3.Connection) -> None:
        """Delete confirmed rows that are kept, and remove free pages from the file."""
        has_kept = (
            connection.execute(QUERIES["has_confirmed"], {"before": math.inf}).fetchone()
            is not None
        )
        (vacuum,) = connection.execute("PRAGMA auto_vacuum").fetchone()
        if not has_kept and not (vacuum and free_pages(connection)):
            return
        try:
            self._shrink(connection, release=False)
        except OutboxDiskFull:
            if vacuum:  # removing free pages gives back the space of the ballast, and more
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
