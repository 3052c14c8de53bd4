"""Pruning by an operator: delete old rows, and return their space to the file system.

Knows: which rows are kept of messages, and since when. Must never know: who may prune, a relay.

A relay prunes within its own commits (`reliablepub.outbox.sqlite.space`). This module is for
outboxes without a relay, and for rows that no relay prunes: messages that were given up. An
intervention discards these, so that they are counted and recorded. Rows and pages are removed in
steps of a few milliseconds, each in its own transaction, with an equally long pause after it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from reliablepub.outbox.admin.interventions import (
    CHUNK,
    Action,
    Intervention,
    intervene,
    step_by_step,
)
from reliablepub.outbox.admin.selection import Selection, find_ids
from reliablepub.outbox.sqlite.database import open_writer, reading
from reliablepub.outbox.sqlite.failures import reported
from reliablepub.outbox.sqlite.space import (
    forget_keys,
    free_pages,
    give_space_back,
    has_space_to_give,
    pages,
)
from reliablepub.outbox.sqlite.sql import QUERIES

_NUMBERS: Final = 5_000
"""Numbers of attempts or interventions that one step looks at."""
_CUTTING_S: Final = 0.005
"""Seconds for which one step removes free pages. The more are free, the longer each one takes."""
_NOBODY: Final[Callable[[str, int], None]] = lambda _what, _count: None  # noqa: E731


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Which rows are old enough to prune, in seconds since 1970; None prunes none of the kind.

    Attributes:
        confirmed_before: prune messages that were confirmed until this time and are kept for
            inspection.
        parked_before: prune messages that were parked until this time.
        expired_before: prune messages that expired until this time.
        history_before: prune attempts and interventions before this time, if their messages are
            gone.
        now: prune keys of `Outbox.enqueue` whose retention ended before this time.
    """

    confirmed_before: float | None = None
    parked_before: float | None = None
    expired_before: float | None = None
    history_before: float
    now: float


@dataclass(frozen=True, slots=True)
class Pruned:
    """Number of rows that were deleted, or would be, and the space of the file.

    Attributes:
        confirmed: messages that were kept after their confirm.
        parked: parked messages, now discarded.
        expired: expired messages, now discarded.
        attempts: attempts in the history.
        interventions: interventions of operators in the history.
        keys: keys of `Outbox.enqueue`.
        bytes_given_back: bytes by which the database file is shorter.
        bytes_unused: bytes that stay in the file, free for new messages.
    """

    confirmed: int = 0
    parked: int = 0
    expired: int = 0
    attempts: int = 0
    interventions: int = 0
    keys: int = 0
    bytes_given_back: int = 0
    bytes_unused: int = 0

    @property
    def messages(self) -> int:
        """Number of messages that can no longer be inspected."""
        return self.confirmed + self.parked + self.expired


def foresee(path: Path, times: Times) -> Pruned:
    """Return what `prune` would delete. Nothing is changed.

    Raises:
        NotAnOutbox: there is no outbox.
    """
    given_up = {state: len(ids) for state, ids in _given_up(path, times).items()}
    values = {
        "confirmed_before": times.confirmed_before,
        "history_before": times.history_before,
        "now": times.now,
    }
    with reading(path) as connection:
        counts = connection.execute(QUERIES["prunable"], values).fetchone()
        confirmed, attempts, interventions, keys = counts
        unused = free_pages(connection) * _page_bytes(connection)
    return Pruned(
        confirmed=confirmed,
        parked=given_up["parked"],
        expired=given_up["expired"],
        attempts=attempts,
        interventions=interventions,
        keys=keys,
        bytes_unused=unused,
    )


def prune(
    path: Path,
    times: Times,
    *,
    note: str = "",
    progress: Callable[[str, int], None] = _NOBODY,
) -> Pruned:
    """Delete rows that are old enough, and shorten the file.

    Any number of other processes may use the outbox meanwhile.

    Args:
        path: path of the outbox, which must exist.
        times: which rows are old enough.
        note: the reason, recorded with each message that is discarded.
        progress: called after each step with the kind of rows and how many are done so far.

    Raises:
        NotAnOutbox: there is no outbox.
        OutboxError: the outbox cannot be written; rows deleted before stay deleted.
    """
    what = Intervention(Action.DISCARD, note=note)
    given_up = {
        state: intervene(path, ids, what, progress=partial(progress, state)).changed
        for state, ids in _given_up(path, times).items()
    }
    with reading(path):
        pass  # raises if there is no outbox, because `open_writer` would create one
    with closing(open_writer(path, is_relay=False)) as connection:

        def count(kind: str, steps: Iterator[Callable[[], int]]) -> int:
            total = 0
            for deleted in step_by_step(connection, path, steps):
                total += deleted
                progress(kind, total)
            return total

        confirmed = 0
        if times.confirmed_before is not None:
            confirmed = count("confirmed", _of_confirmed(connection, times.confirmed_before))
        pruned = Pruned(
            confirmed,
            given_up["parked"],
            given_up["expired"],
            count("attempts", _of_history(connection, "attempt", times.history_before)),
            count("interventions", _of_history(connection, "intervention", times.history_before)),
            count("keys", _of_keys(connection, times.now)),
        )
        before = pages(connection)
        with reported(path):
            if has_space_to_give(connection):
                give_space_back(connection)
        cut = before - pages(connection) + count("pages", _of_pages(connection))
        size = _page_bytes(connection)
        return replace(
            pruned, bytes_given_back=cut * size, bytes_unused=free_pages(connection) * size
        )


def _given_up(path: Path, times: Times) -> dict[str, list[int]]:
    before = {"parked": times.parked_before, "expired": times.expired_before}
    return {
        state: [] if at is None else find_ids(path, Selection(states=(state,), given_up_before=at))
        for state, at in before.items()
    }


def _of_confirmed(connection: sqlite3.Connection, before: float) -> Iterator[Callable[[], int]]:
    query, deleted = QUERIES["prune_confirmed"], CHUNK

    def step() -> int:
        nonlocal deleted
        deleted = connection.execute(query, (before, CHUNK)).rowcount
        return deleted

    while deleted == CHUNK:
        yield step


def _of_history(
    connection: sqlite3.Connection, kind: str, before: float
) -> Iterator[Callable[[], int]]:
    """Yield steps by ranges of numbers, because most rows of a range may have to stay."""
    first, last = connection.execute(QUERIES[f"{kind}_numbers"]).fetchone()
    if first is None:
        return
    query = QUERIES[f"forget_{kind}s_between"]
    for start in range(first, last + 1, _NUMBERS):
        values = (start, min(last, start + _NUMBERS - 1), before)
        yield lambda values=values: connection.execute(query, values).rowcount  # type: ignore[misc]


def _of_keys(connection: sqlite3.Connection, now: float) -> Iterator[Callable[[], int]]:
    looked_at = CHUNK

    def step() -> int:
        nonlocal looked_at
        looked_at, forgotten = forget_keys(connection.cursor(), now, CHUNK)
        return forgotten

    while looked_at == CHUNK:
        yield step


def _of_pages(connection: sqlite3.Connection) -> Iterator[Callable[[], int]]:
    """Yield steps until no page is free, or the file cannot be shortened."""
    cut = 1

    def step() -> int:
        nonlocal cut
        before, until = pages(connection), time.monotonic() + _CUTTING_S
        for _ in range(free_pages(connection)):  # `sqlite3` removes only one page per call
            connection.execute("PRAGMA incremental_vacuum(1)")
            if time.monotonic() > until:
                break
        cut = before - pages(connection)
        return cut

    while cut > 0:
        yield step


def _page_bytes(connection: sqlite3.Connection) -> int:
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    return int(size)
