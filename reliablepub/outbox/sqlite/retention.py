"""Retention: deletes what was kept for long enough, a little at a time.

Knows: kept confirmed rows, history. Must never know: open or parked messages, the relay, disk
space.

Old confirmed rows are deleted a few at a time, within transactions that are made for other
reasons. So no transaction takes noticeably longer. `Retention` deletes what these leave: old
history, and confirmed rows of a relay that commits nothing.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from reliablepub.errors import OutboxError
from reliablepub.outbox import history
from reliablepub.outbox.entry import Intervened
from reliablepub.outbox.rows import ATTEMPTS_RETENTION_S
from reliablepub.outbox.sqlite.failures import reported
from reliablepub.outbox.sqlite.sql import QUERIES
from reliablepub.outbox.sqlite.transactions import transaction, waiting_at_most

LOOK_S: Final = 1.0
"""Seconds from one look to the next."""
PRUNED_MIN: Final = 100
"""Kept rows that one commit deletes; twice as many as it confirms if that is more, so that rows
cannot accumulate."""
DELETING_S: Final = 0.02
"""About the most seconds for which `Retention` waits for the write lock, and then holds it."""


def prune_confirmed(
    connection: sqlite3.Connection, confirmed_before: float, just_confirmed: int
) -> int:
    """Delete the oldest confirmed rows before a time; return how many."""
    values = {"before": confirmed_before, "limit": max(PRUNED_MIN, 2 * just_confirmed)}
    return connection.execute(QUERIES["prune_confirmed"], values).rowcount


class Retention:
    """Deletes what was kept for long enough, a little at a time."""

    def __init__(self, path: Path, keep_confirmed_s: float) -> None:
        self._path = path
        self._keep_confirmed_s = keep_confirmed_s
        self._next_look_at = 0.0
        self._passes = history.Passes()

    def look(self, connection: sqlite3.Connection, now: float, check: Callable[[], object]) -> None:
        """Delete a part of what is old, at most every `LOOK_S`."""
        begun = time.monotonic()
        if begun < self._next_look_at:
            return
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
                return
            with (
                waiting_at_most(connection, DELETING_S),
                transaction(connection, self._path),
            ):
                # Raises if another relay owns the outbox, or if this one has not read every
                # intervention, which may be old by a clock that was set.
                check()
                for kind, values in found.items():
                    connection.execute(QUERIES[f"forget_{kind}_between"], values)
                while prune_confirmed(connection, kept_before, 0) == PRUNED_MIN:
                    if time.monotonic() > begun + DELETING_S:
                        break
            self._passes.deleted(found)
