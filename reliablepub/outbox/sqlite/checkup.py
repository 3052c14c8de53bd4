"""Checks the file of an outbox: pages, tables, access rights, leftover files beside it.

Knows: SQLite's own checks, the objects that ``schema.sql`` creates, which files belong beside an
outbox. Must never know: how an outbox is changed or repaired.
"""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from glob import escape
from pathlib import Path
from typing import Final

from reliablepub.outbox.sqlite.connections import add_outbox, reading
from reliablepub.outbox.sqlite.failures import is_damage
from reliablepub.outbox.sqlite.location import OF_SQLITE, RESCUED, folder_exposure
from reliablepub.outbox.sqlite.lock import holder_pid
from reliablepub.outbox.sqlite.sql import QUERIES
from reliablepub.outbox.sqlite.status_file import status_file_path
from reliablepub.outbox.sqlite.transactions import transaction

_LISTED_MAX: Final = 100
_OTHERS: Final = 0o077


def page_damage(connection: sqlite3.Connection, *, is_quick: bool = True) -> list[str]:
    """Return errors that SQLite reports about the pages of the file, at most 100."""
    # The quick check does not compare indexes with their tables.
    look = "quick_check" if is_quick else "integrity_check"
    try:
        lines = [line for (line,) in connection.execute(f"PRAGMA {look}({_LISTED_MAX:d})")]
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        return [str(error)]  # the damage made SQLite give up
    return [] if lines == ["ok"] else lines


@dataclass(frozen=True, slots=True)
class Checkup:
    """Facts about the file of an outbox."""

    pages: tuple[str, ...]  # errors that SQLite reports about pages and indexes
    missing: tuple[str, ...]  # tables, indexes, triggers and views of ``schema.sql``
    changed: tuple[str, ...]  # those that differ from ``schema.sql``
    journal: str  # should be ``wal``
    bytes_unused: int  # in free pages
    can_shrink: bool  # whether free pages can be cut off
    leftovers: tuple[Path, ...]
    rescued: tuple[Path, ...]  # copies that relays made when the outbox was moved
    # Messages by the name of their key; None for those that are not encrypted. Empty if anything
    # is damaged, missing or changed
    keys: dict[str | None, int]
    folder: str  # which other users can write to it, and how to change that; empty if none can
    exposed: tuple[Path, ...]  # files of the outbox that other users can read or write


def check_up(path: Path, *, is_quick: bool = False) -> Checkup:
    """Gather facts about the file of an outbox in one read transaction; change nothing."""
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
        exposed=tuple(_exposed(path)),
    )


def _exposed(path: Path) -> Iterator[Path]:
    for suffix in ("", *OF_SQLITE):
        file = path.with_name(path.name + suffix)
        with suppress(OSError):
            if stat.S_IMODE(file.stat().st_mode) & _OTHERS:
                yield file


def _compared(connection: sqlite3.Connection) -> tuple[list[str], list[str]]:
    """Return which objects of ``schema.sql`` are missing from the file, and which differ."""
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
    """Return status files of a killed relay, which the next relay removes or replaces."""
    if holder_pid(path) is not None:
        return []
    status_file = status_file_path(path)
    beside = (status_file, status_file.with_name(status_file.name + ".new"))
    return [file for file in beside if file.exists()]
