"""What an outbox stands on: SQLite, the disk below it, the clock; and which addresses it names.

Knows: how these are measured. Must never know: what is good and what is bad, the broker.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from reliablepub.outbox.sqlite.database import reading
from reliablepub.outbox.sqlite.sql import QUERIES

_SYNCS: Final = 10
_PAGE_BYTES: Final = 4_096


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Facts.

    Attributes:
        sqlite: version of the library in use.
        journal: the journal mode of the file; ``wal`` if all is well.
        is_shared: whether the file is an application's own database, too.
        sync_ms: median time of writing and syncing a page beside the outbox; None if the disk is
            too full to try.
        bytes_free: on the disk, for this user.
        bytes_total: of the disk.
        ahead_s: how far the newest message lies in the future; 0 if it does not.
        exchanges: that open or parked messages are to go to, but for the default one; at most 100.
        queues: that they are to go to through the default exchange; at most 100.
    """

    sqlite: str
    journal: str
    is_shared: bool
    sync_ms: float | None
    bytes_free: int
    bytes_total: int
    ahead_s: float
    exchanges: list[str]
    queues: list[str]


def look_around(path: Path) -> Surroundings:
    """Measure what an outbox stands on; writes nothing into it.

    Raises:
        NotAnOutbox: there is none.
        OutboxError: it cannot be read.
        OSError: nothing can be written beside it, for another reason than a full disk.
    """
    with reading(path) as connection:
        (journal,) = connection.execute("PRAGMA journal_mode").fetchone()
        exchanges, queues = (
            sorted(name for (name,) in connection.execute(QUERIES[query]))
            for query in ("exchanges_named", "queues_named")
        )
        (newest_at,) = connection.execute(QUERIES["newest_stored_at"]).fetchone() or (0.0,)
        (is_shared,) = connection.execute(QUERIES["is_shared"]).fetchone()
    disk = shutil.disk_usage(path.parent)
    return Surroundings(
        sqlite=sqlite3.sqlite_version,
        journal=journal,
        is_shared=bool(is_shared),
        sync_ms=_sync_ms(path.parent),
        bytes_free=disk.free,
        bytes_total=disk.total,
        ahead_s=max(0.0, newest_at - time.time()),
        exchanges=exchanges,
        queues=queues,
    )


def _sync_ms(folder: Path) -> float | None:
    """On a file of its own: the outbox is opened by nothing but SQLite."""
    page = bytes(_PAGE_BYTES)
    times = []
    try:
        with TemporaryFile(dir=folder, buffering=0) as file:
            for _ in range(_SYNCS):
                begun = time.perf_counter()
                file.write(page)
                os.fsync(file.fileno())
                times.append(time.perf_counter() - begun)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return None
    return statistics.median(times) * 1_000
