"""Whether an outbox is what it claims to be: its pages and tables, its ledger, each row's checksum.

Knows: the reading statements, what SQLite says of the file, which files belong beside it. Must
never know: how anything is changed or repaired.
"""

from __future__ import annotations

import sqlite3
import stat
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from glob import escape
from pathlib import Path
from typing import Final

from reliablepub.outbox.sqlite.database import add_outbox, reading
from reliablepub.outbox.sqlite.failures import is_damage
from reliablepub.outbox.sqlite.location import RESCUED, folder_exposure
from reliablepub.outbox.sqlite.lock import holder_pid
from reliablepub.outbox.sqlite.rows import Unreadable, check, misfit_words, misfits
from reliablepub.outbox.sqlite.sql import QUERIES
from reliablepub.outbox.sqlite.status_file import status_file_path
from reliablepub.outbox.sqlite.transactions import transaction

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
            names = [name for name, *_ in cursor.description[_CONTENTS:]]
            for message_id, exchange, routing_key, properties, key, body, *others in cursor:
                rows += 1
                beside = dict(zip(names, others, strict=True))
                texts = (message_id, exchange, routing_key, properties, key)
                try:
                    check(texts, body, beside["checksum"])
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
        lines = [line for (line,) in connection.execute(f"PRAGMA {look}({_LISTED_MAX:d})")]
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        return [str(error)]
    return [] if lines == ["ok"] else lines


_OTHERS: Final = 0o077


@dataclass(frozen=True, slots=True)
class Checkup:
    """Facts about the file.

    Attributes:
        pages: what SQLite says of the pages and indexes, where it is not "ok".
        missing: tables, indexes, triggers and views that are not there.
        changed: likewise, those that are not what they were made as.
        journal: journal mode; ``wal`` if all is well.
        bytes_unused: of free pages.
        can_shrink: whether the file was made so that free pages can be cut off.
        leftovers: files beside it that no running process needs.
        rescued: copies beside it that a relay has left whose outbox was moved.
        keys: names of the keys that messages are encrypted with, and how many of them; None stands
            for those that are not encrypted. Empty where the tables cannot be read.
        folder: who else can write to its folder, and what to do; empty if nobody can.
        readable_by_others: whether more users than the owner may read or write the file.
    """

    pages: tuple[str, ...]
    missing: tuple[str, ...]
    changed: tuple[str, ...]
    journal: str
    bytes_unused: int
    can_shrink: bool
    leftovers: tuple[Path, ...]
    rescued: tuple[Path, ...]
    keys: dict[str | None, int]
    folder: str
    readable_by_others: bool


def check_up(path: Path, *, is_quick: bool = False) -> Checkup:
    """Look at the file, in one read transaction; nothing is changed.

    Args:
        path: the outbox.
        is_quick: do not compare indexes with their tables.

    Raises:
        NotAnOutbox: there is none.
        OutboxError: it cannot be read.
    """
    with reading(path) as connection:
        pages = page_damage(connection, is_quick=is_quick)
        missing, changed = _compared(connection)
        is_whole = not (pages or missing or changed)
        keys = dict(connection.execute(QUERIES["keys_in_use"])) if is_whole else {}
        (journal,) = connection.execute("PRAGMA journal_mode").fetchone()
        (unused,) = connection.execute("PRAGMA freelist_count").fetchone()
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        (vacuum,) = connection.execute("PRAGMA auto_vacuum").fetchone()
    return Checkup(
        pages=tuple(pages),
        missing=tuple(missing),
        changed=tuple(changed),
        journal=journal,
        bytes_unused=unused * page_bytes,
        can_shrink=vacuum != 0,
        leftovers=tuple(_leftovers(path)),
        rescued=tuple(sorted(path.parent.glob(f"{escape(path.name)}{RESCUED}*"))),
        keys=keys,
        folder=folder_exposure(path.parent),
        readable_by_others=bool(stat.S_IMODE(path.stat().st_mode) & _OTHERS),
    )


def _compared(connection: sqlite3.Connection) -> tuple[list[str], list[str]]:
    """What is missing, and what is different, of what ``schema.sql`` makes."""
    found = dict(connection.execute(QUERIES["made"]).fetchall())
    wanted = _as_made()
    missing = sorted(set(wanted) - set(found))
    return missing, sorted(name for name in set(wanted) & set(found) if found[name] != wanted[name])


@cache
def _as_made() -> dict[str, str]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        with transaction(connection, Path(":memory:")):
            add_outbox(connection.cursor(), Path(":memory:"))
        return dict(connection.execute(QUERIES["made"]).fetchall())


def _leftovers(path: Path) -> list[Path]:
    """What a process that was killed may have left; the next relay removes or replaces it."""
    if holder_pid(path) is not None:
        return []
    status_file = status_file_path(path)
    beside = (status_file, status_file.with_name(status_file.name + ".new"))
    return [file for file in beside if file.exists()]
