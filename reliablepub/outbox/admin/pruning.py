"""Pruning by an operator: deletes old rows, and returns their space to the file system.

Knows: which rows are kept of messages, and since when. Must never know: who may prune, a relay.

A relay prunes within its own commits. This module is for outboxes without a relay, and for messages
that were given up, which no relay prunes. An intervention discards these, so that they are counted
and recorded. Rows and pages are removed in steps of a few milliseconds. Each step is a transaction
of its own, followed by a pause (`step_by_step`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from reliablepub.outbox.admin.interventions import (
    CHUNK,
    Action,
    Intervention,
    intervene,
    step_by_step,
)
from reliablepub.outbox.admin.selection import Selection, find_ids
from reliablepub.outbox.database import Database, Session, forget_keys

_NEVER: Final = -1.0
"""Before every time at which a message was given up."""
UNREAD_S: Final = 60.0
"""How long an intervention stays at least, so that a relay reads it and drops the message from
memory."""
_NUMBERS: Final = 5_000
"""Range of numbers of attempts or interventions that one step covers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Which rows are old enough to prune, in seconds since 1970; None prunes none of the kind."""

    confirmed_before: float | None = None  # kept for inspection
    parked_before: float | None = None
    expired_before: float | None = None
    history_before: float  # attempts and interventions whose messages are gone
    now: float  # the retention of keys of `Outbox.enqueue` ended before it

    @property
    def interventions_before(self) -> float:
        """Prune interventions before this time, if their messages are gone."""
        return min(self.history_before, self.now - UNREAD_S)


@dataclass(frozen=True, slots=True)
class Pruned:
    """Number of rows that were deleted, or would be, and the space of the file."""

    confirmed: int = 0  # kept after their confirm
    parked: int = 0  # now discarded, as the expired ones
    expired: int = 0
    attempts: int = 0
    interventions: int = 0
    keys: int = 0  # of `Outbox.enqueue`
    bytes_given_back: int = 0  # by which the database file is shorter
    bytes_unused: int = 0  # that stay in the file, free for new messages

    @property
    def messages(self) -> int:
        """Number of messages that can no longer be inspected."""
        return self.confirmed + self.parked + self.expired


def foresee(database: Database, times: Times) -> Pruned:
    """Return what `prune` would delete. Nothing is changed."""
    given_up = {
        state: len(find_ids(database, selection)) for state, selection in _given_up(times).items()
    }
    values = {
        "confirmed_before": times.confirmed_before,
        "parked_before": _NEVER if times.parked_before is None else times.parked_before,
        "expired_before": _NEVER if times.expired_before is None else times.expired_before,
        "discarded": sum(given_up.values()),
        "history_before": times.history_before,
        "interventions_before": times.interventions_before,
        "now": times.now,
    }
    with database.reading() as session:
        confirmed, attempts, interventions, keys = session.run("prunable", values).fetchone()
        unused = session.space().bytes_unused
    return Pruned(
        confirmed=confirmed,
        parked=given_up.get("parked", 0),
        expired=given_up.get("expired", 0),
        attempts=attempts,
        interventions=interventions,
        keys=keys,
        bytes_unused=unused,
    )


def prune(
    database: Database,
    times: Times,
    *,
    note: str = "",  # the reason, recorded with each message that is discarded
    progress: Callable[[str, int], None] = lambda _kind, _count: None,  # kind, and rows done so far
) -> Pruned:
    """Delete rows that are old enough, and shorten the file.

    Other processes may use the outbox meanwhile. If it raises, rows deleted before stay deleted.
    """
    discard = Intervention(Action.DISCARD, note=note)
    given_up = {
        state: intervene(
            database,
            find_ids(database, selection),
            discard,
            selection=selection,  # another operator may retry some meanwhile
            progress=partial(progress, state),
        ).changed
        for state, selection in _given_up(times).items()
    }
    with database.reading() as session:  # raises if there is no outbox: `write` would create one
        attempts = list(_of_history(session, "attempt", times.history_before))
        interventions = list(_of_history(session, "intervention", times.interventions_before))

    def count(kind: str, steps: Iterable[Callable[[Session], int]]) -> int:
        total = 0
        for deleted in step_by_step(database, steps):
            total += deleted
            progress(kind, total)
        return total

    with closing(database):
        pruned = Pruned(
            count("confirmed", _of_confirmed(times.confirmed_before)),
            given_up.get("parked", 0),
            given_up.get("expired", 0),
            count("attempts", attempts),
            count("interventions", interventions),
            count("keys", _of_keys(times.now)),
            count("bytes", database.shrink()),
        )
        with database.reading() as session:
            return replace(pruned, bytes_unused=session.space().bytes_unused)


def clear(database: Database) -> None:
    """Delete all messages and all deduplication keys."""
    intervene(database, find_ids(database, Selection()), Intervention(Action.DISCARD))
    prune(database, Times(confirmed_before=math.inf, history_before=math.inf, now=math.inf))


def _given_up(times: Times) -> dict[str, Selection]:
    """Return the selection of messages to discard, for each state that is to be pruned."""
    before = {"parked": times.parked_before, "expired": times.expired_before}
    return {
        state: Selection(states=(state,), given_up_before=at)
        for state, at in before.items()
        if at is not None
    }


def _of_confirmed(before: float | None) -> Iterator[Callable[[Session], int]]:
    deleted = 0 if before is None else CHUNK

    def step(session: Session) -> int:
        nonlocal deleted
        deleted = int(session.run("prune_confirmed", {"before": before, "limit": CHUNK}).rowcount)
        return deleted

    while deleted == CHUNK:
        yield step


def _of_history(session: Session, kind: str, before: float) -> Iterator[Callable[[Session], int]]:
    """Yield steps by ranges of numbers, because most rows of a range may have to stay."""
    first, last = session.run(f"{kind}_numbers").fetchone()
    if first is None:
        return
    for start in range(first, last + 1, _NUMBERS):
        end = min(last, start + _NUMBERS - 1)
        yield partial(_forget, kind=kind, values={"first": start, "last": end, "before": before})


def _forget(session: Session, kind: str, values: dict[str, object]) -> int:
    return int(session.run(f"forget_{kind}s_between", values).rowcount)


def _of_keys(now: float) -> Iterator[Callable[[Session], int]]:
    looked_at = CHUNK

    def step(session: Session) -> int:
        nonlocal looked_at
        looked_at, forgotten = forget_keys(session.run, now, CHUNK)
        return forgotten

    while looked_at == CHUNK:
        yield step
