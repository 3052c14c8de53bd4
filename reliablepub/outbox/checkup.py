"""Whether the file of an outbox is whole: its pages, its tables, and what lies beside it.

Knows: what SQLite says of the file, what the migrations make, which files there may be. Must never
know: whether the counts add up (`audit`), what to do about anything.
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

from reliablepub.outbox.audit import page_damage
from reliablepub.outbox.database import looking
from reliablepub.outbox.lease import holder_pid
from reliablepub.outbox.migrate import MIGRATIONS, migrate
from reliablepub.outbox.picture import picture_path
from reliablepub.outbox.rescue import RESCUED
from reliablepub.outbox.side_files import folder_exposure
from reliablepub.outbox.sql import QUERIES
from reliablepub.outbox.transactions import transaction

_OTHERS: Final = 0o077


@dataclass(frozen=True, slots=True)
class Checkup:
    """Facts about the file.

    Attributes:
        version: of the outbox in it.
        newest: the version that this library makes.
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

    version: int
    newest: int
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
    with looking(path) as (connection, version):
        pages = page_damage(connection, is_quick=is_quick)
        missing, changed = _compared(connection) if version == len(MIGRATIONS) else ([], [])
        is_whole = version == len(MIGRATIONS) and not (pages or missing or changed)
        keys = dict(connection.execute(QUERIES["keys_in_use"])) if is_whole else {}
        (journal,) = connection.execute("PRAGMA journal_mode").fetchone()
        (unused,) = connection.execute("PRAGMA freelist_count").fetchone()
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        (vacuum,) = connection.execute("PRAGMA auto_vacuum").fetchone()
    return Checkup(
        version=version,
        newest=len(MIGRATIONS),
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
    """What is missing, and what is different, of what the migrations make."""
    found = dict(connection.execute(QUERIES["made"]).fetchall())
    wanted = _as_made()
    missing = sorted(set(wanted) - set(found))
    return missing, sorted(name for name in set(wanted) & set(found) if found[name] != wanted[name])


@cache
def _as_made() -> dict[str, str]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        with transaction(connection, Path(":memory:")):
            migrate(connection.cursor(), Path(":memory:"))
        return dict(connection.execute(QUERIES["made"]).fetchall())


def _leftovers(path: Path) -> list[Path]:
    """What a process that was killed may have left; the next relay removes or replaces it."""
    if holder_pid(path) is not None:
        return []
    picture = picture_path(path)
    beside = (picture, picture.with_name(picture.name + ".new"))
    return [file for file in beside if file.exists()]
