"""Retention: finds what was kept for long enough, a little at a time.

Knows: kept confirmed messages, history, deduplication keys, how often to look for old rows. Must
never know: turns, open or parked messages.

A commit that confirms messages also deletes old ones that were kept. `Retention` finds what is
left: old history and keys, and kept messages of a relay that confirms nothing. It only reads, so a
relay writes nothing if nothing is old.
"""

from __future__ import annotations

import time
from math import inf
from typing import Any, Final

from reliablepub.outbox import history
from reliablepub.outbox.database import KEYS_KEPT_S
from reliablepub.outbox.postgres.server import Link, Step
from reliablepub.outbox.rows import ATTEMPTS_RETENTION_S

LOOK_S: Final = 1.0
"""Seconds from one look to the next."""
PRUNED_MIN: Final = 100
"""Kept rows that one commit deletes, or twice as many as it confirms if that is more."""
KEYS_LOOK_S: Final = 60.0
"""Seconds to the next look for overdue keys after one that found none."""
DELETING_S: Final = 0.02
"""Seconds after which a look deletes no more."""
_LATE_S: Final = 5.0
"""By how much another relay's clock may be behind, and its commit late. A kept message that is
older than all others by more is found an hour later at the latest."""
BRIEFLY: Final[Step] = ("wait_briefly", {})
"""Precedes what can be done later in a transaction: it waits only 20 ms for a lock."""


class Retention:
    """Finds old rows of an outbox."""

    def __init__(self, link: Link, keep_confirmed_s: float, now: float, shards: int) -> None:
        self._link = link
        self._keep_s = keep_confirmed_s  # 0 keeps none
        # The relay of another shard may keep messages while this one keeps none.
        self._left_before = inf if shards == 1 else now
        # Whether there may be old confirmed messages: an earlier run may have kept some.
        self.is_pruning: bool = keep_confirmed_s > 0 or bool(link.read("any_kept", {}))
        self._look_at = 0.0
        self._since, self._pass_at = -inf, 0.0
        self._keys_since, self._keys_at = -inf, 0.0
        self._passes = history.Passes()
        self._found: dict[str, dict[str, Any]] = {}

    def prune(self, now: float, limit: int = 0) -> Step:
        """Return the statement that deletes the oldest kept messages, `PRUNED_MIN` or more."""
        values = {"since": self._since, "before": self._before(now)}
        return "prune_kept", values | {"limit": max(PRUNED_MIN, limit)}

    def is_due(self) -> bool:
        """Whether `LOOK_S` have passed since this last returned True."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_S
        return True

    def look(self, now: float) -> list[Step]:
        """Return a setting, and statements that delete a part of what is old; empty if nothing is.

        Those with a ``limit`` return a count: there is more to delete if it is the limit.
        """
        has_kept = self.is_pruning and self._has_kept(self._before(now))
        old = [*self._old_history(now - ATTEMPTS_RETENTION_S), *self._old_keys(now)]
        return [BRIEFLY, *old, self.prune(now)] if has_kept or old else []

    def has_deleted(self) -> None:
        """Go on after the pages of history of the last look."""
        self._passes.deleted(self._found)

    def _before(self, now: float) -> float:
        return now - self._keep_s if self._keep_s > 0 else self._left_before

    def _has_kept(self, before: float) -> bool:
        """Whether confirmed messages of before a time are kept."""
        if (monotonic := time.monotonic()) >= self._pass_at:
            self._since, self._pass_at = -inf, monotonic + history.PASS_S
        [(oldest,)] = self._link.read("oldest_kept", {"since": self._since})
        has_kept = oldest is not None and oldest <= before
        self._since = (oldest if has_kept else before) - _LATE_S
        self.is_pruning = has_kept or self._keep_s > 0
        return has_kept

    def _old_history(self, before: float) -> list[Step]:
        """Return the deletion of the next page of each table, unless it has no old rows."""
        self._found = self._passes.old(self._page_of, before, time.monotonic())
        return [(f"forget_{kind}_between", values) for kind, values in self._found.items()]

    def _old_keys(self, now: float) -> list[Step]:
        """Return the deletion of the next overdue keys, unless there are none."""
        if (monotonic := time.monotonic()) < self._keys_at:
            return []
        # `since` skips keys that were deleted: see `oldest_kept`.
        [(oldest,)] = self._link.read("oldest_key", {"since": self._keys_since})
        if oldest is None or oldest >= now:
            self._keys_since, self._keys_at = -inf, monotonic + KEYS_LOOK_S
            return []
        self._keys_since = oldest
        values = {"since": oldest, "now": now, "until": now + KEYS_KEPT_S, "limit": history.PAGE}
        return [("forget_overdue_keys", values)]

    def _page_of(self, name: str, page: dict[str, Any]) -> tuple[int | None, float]:
        [(last, oldest)] = self._link.read(name, page)
        return last, oldest
