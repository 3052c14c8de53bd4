"""Measures the environment of an outbox: SQLite, the disk, the clock; lists addresses it names.

Knows: how to measure each. Must never know: which values are good or bad, the broker.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sqlite3
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from reliablepub.outbox.sqlite.connections import reading
from reliablepub.outbox.sqlite.mounts import Mount, mount_of
from reliablepub.outbox.sqlite.sql import QUERIES

_SYNCS: Final = 10
_PAGE_BYTES: Final = 4_096


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
