"""Gathers facts about the file of an outbox, and about where it is, for `check` and `doctor`.

Knows: SQLite's own checks, the objects that ``schema.sql`` creates, the files beside an outbox,
their rights; the disk and the clock. Must never know: which values are good, how an outbox is
changed or repaired, the broker.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sqlite3
import stat
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from glob import escape
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from reliablepub.outbox.sqlite.connections import add_outbox, reading
from reliablepub.outbox.sqlite.failures import page_damage
from reliablepub.outbox.sqlite.location import OF_SQLITE, RESCUED, folder_exposure
from reliablepub.outbox.sqlite.lock import holder_pid
from reliablepub.outbox.sqlite.mounts import Mount, mount_of
from reliablepub.outbox.sqlite.sql import QUERIES
from reliablepub.outbox.sqlite.status_file import status_file_path
from reliablepub.outbox.sqlite.transactions import transaction

_OTHERS: Final = 0o077
_SYNCS: Final = 10
_PAGE_BYTES: Final = 4_096


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


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Facts about the environment of an outbox."""

    sqlite: str  # version of the library
    journal: str  # ``wal`` is the right one
    is_shared: bool  # whether the file also holds tables of an application
    sync_ms: float | None  # None if the disk is too full to try, or nothing can be written there
    bytes_free: int  # for this user
    bytes_total: int
    ahead_s: float  # by which the newest open message is stored in the future; 0 if it is not
    exchanges: list[str]  # at most 100 that open or parked messages name, but the default one
    queues: list[str]  # at most 100 that they name through the default exchange
    mount: Mount | None = None
    sync_problem: str = ""  # why nothing can be written; empty if it can, or if the disk is full


def look_around(path: Path) -> Surroundings:
    """Measure the environment of an outbox; write nothing into the outbox."""
    with reading(path) as connection:
        (journal,) = connection.execute("PRAGMA journal_mode").fetchone()
        exchanges, queues = (
            sorted(name for (name,) in connection.execute(QUERIES[query]) if isinstance(name, str))
            for query in ("exchanges_named", "queues_named")
        )
        (newest_at,) = connection.execute(QUERIES["newest_stored_at"]).fetchone() or (0.0,)
        (is_shared,) = connection.execute(QUERIES["is_shared"]).fetchone()
    if not isinstance(newest_at, int | float):
        newest_at = 0.0  # of a damaged row
    disk = shutil.disk_usage(path.parent)
    sync_ms, sync_problem = _sync_ms(path.parent)
    return Surroundings(
        sqlite=sqlite3.sqlite_version,
        journal=journal,
        is_shared=bool(is_shared),
        sync_ms=sync_ms,
        bytes_free=disk.free,
        bytes_total=disk.total,
        ahead_s=max(0.0, newest_at - time.time()),
        exchanges=exchanges,
        queues=queues,
        mount=mount_of(path.parent),
        sync_problem=sync_problem,
    )


def _sync_ms(folder: Path) -> tuple[float | None, str]:
    """Return the median time to write and sync a page, or None and why, unless the disk is full."""
    page = bytes(_PAGE_BYTES)
    times = []
    try:
        with TemporaryFile(dir=folder, buffering=0) as file:  # only SQLite may open the outbox
            for _ in range(_SYNCS):
                begun = time.perf_counter()
                file.write(page)
                if sys.platform == "darwin":  # whose fsync leaves the page in the drive's cache
                    fcntl.fcntl(file, fcntl.F_FULLFSYNC)
                else:
                    os.fsync(file.fileno())
                times.append(time.perf_counter() - begun)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return None, "" if is_full else error.strerror or str(error)
    return statistics.median(times) * 1_000, ""
