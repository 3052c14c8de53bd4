"""Changes of the wall clock: moves the times of stored messages, a part in each commit.

Knows: the indexes of times, the progress of each change. Must never know: how a change of the clock
is detected.

Moving a row takes about 10 µs, so moving a million rows in one commit would stop the relay for
seconds. Until the last part is committed, the relay reads no stored message, because it could not
tell which clock a time belongs to.

A walk follows an index of times against the change: from the last row if the clock was set forward.
So a moved row lands behind the walk, and is not visited again. Rows that the relay writes meanwhile
have times of the new clock, and are left out by their ids.
"""

from __future__ import annotations

import json
import math
import sqlite3
from dataclasses import dataclass, field, replace
from typing import Final

from reliablepub.outbox.entry import Changes, Step
from reliablepub.outbox.sqlite.sql import QUERIES

PART: Final = 2_000
"""Rows in one part: about 25 ms."""
PART_BYTES: Final = 4 << 20
"""Bytes of the messages in one part, unless the part is one large message."""
PART_OF_A_FULL_DISK: Final = 50
"""Rows in one part while the disk is full: each may change a page, which takes space in the log."""
_KINDS: Final = ("deadlines", "retries")


@dataclass(frozen=True, slots=True)
class _Walk:
    """One unfinished change of the clock."""

    step: Step
    now: float  # of its first commit, by the new clock
    until: int  # highest id at that time; rows with higher ids have times of the new clock
    rescheduled: set[int] = field(default_factory=set)  # ids with retry times of the new clock
    kinds: tuple[str, ...] = _KINDS  # indexes that are not finished
    at: float = -1.0  # the walk along the first of them continues at this time
    id: int = 0  # and at this id

    def from_the_start(self) -> _Walk:
        """Return the walk at the beginning of an index."""
        if self.step.by < 0:
            return replace(self, at=-1.0, id=0)
        return replace(self, at=math.inf, id=2**63 - 1)

    def further(self, connection: sqlite3.Connection, limit: int) -> tuple[_Walk, int]:
        """Move at most ``limit`` rows; return the walk at its new place, and the limit left."""
        kind = self.kinds[0]
        way = "back" if self.step.by < 0 else "forward"
        place = {"at": self.at, "id": self.id, "limit": limit}
        rows = connection.execute(QUERIES[f"next_{kind}_{way}"], place).fetchall()
        met, size = 0, 0
        for _, _, row_bytes in rows:
            size += row_bytes
            if met and size > PART_BYTES:
                break
            met += 1
        step = self.step
        how = {"by": step.by, "since": step.since, "last_id": step.last_id, "now": self.now}
        exempt = self.rescheduled if kind == "retries" else ()
        ids = [id_ for id_, *_ in rows[:met] if id_ <= self.until and id_ not in exempt]
        connection.execute(QUERIES[f"step_{kind}"], how | {"ids": json.dumps(ids)})
        if met == len(rows) < limit:
            return replace(self, kinds=self.kinds[1:]).from_the_start(), limit - met
        id_, at, _ = rows[met - 1]
        return replace(self, at=at, id=id_), 0


class ClockSteps:
    """The changes of the wall clock that are not finished."""

    def __init__(self) -> None:
        self.walks: list[_Walk] = []  # oldest first; if empty, stored times are of this clock
        self._written: list[_Walk] = []

    def write(
        self,
        connection: sqlite3.Connection,
        step: Step | None,
        now: float,
        *,
        is_disk_full: bool = False,
    ) -> None:
        """Move the next part, in the transaction of a commit and before its other changes."""
        walks = list(self.walks)
        if step is not None:
            (last_id,) = connection.execute(QUERIES["last_id"]).fetchone()
            walks.append(_Walk(step, now, last_id).from_the_start())
        left = PART_OF_A_FULL_DISK if is_disk_full else PART
        while walks and left:
            walks[0], left = walks[0].further(connection, left)
            if not walks[0].kinds:
                del walks[0]
        self._written = walks

    def committed(self, changes: Changes) -> None:
        """Record that a transaction with these changes was committed."""
        self.walks = self._written
        for walk in self.walks:
            walk.rescheduled.update(entry.id for entry in changes.rescheduled)
