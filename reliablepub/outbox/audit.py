"""Whether an outbox is what it claims to be: the ledger recounted, each row against its checksum.

Knows: the reading statements. Must never know: how anything is changed or repaired.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reliablepub.outbox.bookkeeping import misfit_words, misfits
from reliablepub.outbox.database import reading
from reliablepub.outbox.failures import is_damage
from reliablepub.outbox.rows import Unreadable, check
from reliablepub.outbox.sql import QUERIES

_DIFFERENCES: Final = ("open", "parked", "expired", "open_bytes")
_LISTED_MAX: Final = 100
_CONTENTS: Final = 6
"""Columns of the message itself; those behind them stand beside it."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What was recounted; all is well when nothing is listed.

    Attributes:
        rows: messages whose checksum was compared, open and parked ones.
        differences: counters of the ledger that are not what the rows add up to, and by how much
            they are higher.
        damaged: ids of rows whose checksum is wrong, or beside whose message stands a size, a time
            or a count that this library never writes; and what is wrong with each. A relay parks
            them, and never sends them.
        structure: what SQLite says of the pages of the file, where it is not "ok". The rows are
            not looked at then.
    """

    rows: int
    differences: dict[str, int]
    damaged: dict[int, str]
    structure: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Whether everything adds up."""
        return not (self.differences or self.damaged or self.structure)


def audit(path: Path) -> Audit:
    """Recount everything, in one consistent read.

    Raises:
        NotAnOutbox: there is none.
        OutboxError: it cannot be read.
    """
    with reading(path) as connection:
        lines = page_damage(connection)
        if lines:
            return Audit(0, {}, {}, tuple(lines))
        counted = connection.execute(QUERIES["audit"]).fetchone()
        differences = {
            name: value for name, value in zip(_DIFFERENCES, counted, strict=True) if value
        }
        rows, damaged = 0, {}
        for query in ("open_contents", "parked_contents"):
            cursor = connection.execute(QUERIES[query])
            names = [column[0] for column in cursor.description[_CONTENTS:]]
            for row in cursor:
                rows += 1
                beside = dict(zip(names, row[_CONTENTS:], strict=True))
                try:
                    check(row[:5], row[5], beside["checksum"])
                except Unreadable as error:
                    damaged[beside["id"]] = str(error)
                else:
                    if any(misfits(beside)):
                        damaged[beside["id"]] = misfit_words(beside)
        return Audit(rows, differences, damaged, ())


def page_damage(connection: sqlite3.Connection, *, is_quick: bool = True) -> list[str]:
    """What SQLite says of the pages, where they are not right; it gives up on too large a damage.

    Args:
        connection: to look with.
        is_quick: do not compare indexes with their tables.
    """
    look = "quick_check" if is_quick else "integrity_check"
    try:
        lines = [row[0] for row in connection.execute(f"PRAGMA {look}({_LISTED_MAX:d})")]
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        return [str(error)]
    return [] if lines == ["ok"] else lines
