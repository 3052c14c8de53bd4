"""What gives way on a full disk, so that what is open can drain and new messages have room again.

Knows: the ballast, kept confirmed rows, free pages, and in which order they go. Must never know:
messages that are open or parked, the relay.

While the disk is short of space, in this order: new messages are refused (`Ballast.check`);
confirmed messages that are kept for people are deleted, the oldest first, and none is kept; a
commit that does not fit gets the space of the ballast; free pages are cut off the file. Each commit
checkpoints behind itself, so that the log begins afresh and needs no more space. Deleting does not
overwrite what it deletes meanwhile, which would write as many bytes to the log as it frees: bodies
of confirmed messages may stay in free pages until these are used again. Verdicts are recorded in
`pieces` that the ballast can hold, however many messages a turn settles.
Space that a person frees goes to a checkpoint first: as long as less is free than the log owes to
the database, nothing is written at all, or it would be eaten up without an end.
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
from reliablepub.outbox.ballast import MARGIN_BYTES, Ballast, free_bytes
from reliablepub.outbox.checkpoints import behind_next_commit, move_what_is_owed
from reliablepub.outbox.entry import Turn
from reliablepub.outbox.failures import reported
from reliablepub.outbox.retention import free_pages, prune_confirmed
from reliablepub.outbox.sql import QUERIES
from reliablepub.outbox.transactions import transaction

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


def pieces(turn: Turn) -> Iterator[Turn]:
    """What of a turn may be recorded ahead of the rest, because it counts once however often it is.

    So each piece needs no more space than the ballast has, unless it is one large message. Nothing
    if the turn settles little.
    """
    for confirmed in _by_bytes(turn.confirmed, lambda entry: entry.message.size):
        yield Turn(confirmed=confirmed)
    for parked in _by_bytes(turn.parked, lambda attempt: attempt.entry.message.size):
        yield Turn(parked=parked)
    for discarded in _by_bytes(turn.discarded, lambda attempt: attempt.entry.message.size):
        yield Turn(discarded=discarded)


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
