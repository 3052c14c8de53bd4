"""Cancels and reschedules messages that were not sent yet; lists what is due when.

Knows: deduplication keys, and which intervention each request is. Must never know: how a relay
learns of it (`reliablepub.outbox.admin.interventions`), or what a relay does with a message.

A message is cancelled, or it is sent, never both: the row is removed in a transaction that leaves
alone what is in flight and what a queue may hold, and a relay sends nothing after it without having
dropped the row from memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final

from reliablepub.message import Message
from reliablepub.outbox.admin.interventions import (
    CHUNK,
    Action,
    Effect,
    Intervention,
    change,
    step_by_step,
)
from reliablepub.outbox.admin.selection import Selection, found_by_due_time
from reliablepub.outbox.database import Database, Session

_FOREVER: Final = 1e300
"""Later than any due time, and earlier than that of a paused destination's messages."""


class ScheduleChange(Enum):
    """Result of `Outbox.cancel` and `Outbox.reschedule`; only `MADE` is true."""

    MADE = "made"
    """The message is cancelled, or has its new time."""
    TOO_LATE = "too late"
    """The message is in flight, was sent or may have been, or was given up: nothing was changed."""
    UNKNOWN = "unknown"
    """The outbox knows no message with this key: there was none, it was cancelled, or its key was
    forgotten after 7 days."""

    def __bool__(self) -> bool:
        """Whether the change was made."""
        return self is ScheduleChange.MADE


def cancelling(note: str) -> Intervention:
    """Return the intervention that cancels messages."""
    return Intervention(Action.DISCARD, note=note, is_unsent=True)


def rescheduling(not_before: datetime, note: str) -> Intervention:
    """Return the intervention that sends messages at another time; one in the past sends now.

    Raises:
        InvalidMessage: the time is not a datetime with a time zone, or is before 1970.
    """
    Message(b"", not_before=not_before)  # checks it
    at = f"rescheduled to {not_before.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    note = f"{at}: {note}" if note else at
    return Intervention(Action.RETRY, note=note, due_at=not_before.timestamp(), is_unsent=True)


def by_key(session: Session, key: str, what: Intervention) -> ScheduleChange:
    """Apply an intervention to the message of a deduplication key, within an open transaction.

    The key of a cancelled message is forgotten: a later message with it is stored.
    """
    found = session.run("rows_of_enqueue_key", {"name": key}).fetchone()
    if found is None:
        return ScheduleChange.UNKNOWN
    (id_,) = found
    if session.is_own(id_):
        _change_own(session, id_, what)
    elif not change(session, [id_], what, time.time()).changed:
        return ScheduleChange.TOO_LATE
    if what.action is Action.DISCARD:
        session.run("forget_key", {"key": key})
    return ScheduleChange.MADE


def _change_own(session: Session, id_: int, what: Intervention) -> None:
    """Change a message that this transaction has stored: no relay and no ledger knows of it."""
    if what.action is Action.DISCARD:
        session.run("delete_open", {"id": id_})
    else:
        session.run("due_at", {"id": id_, "due_at": what.due_at})


def by_ids(
    database: Database, ids: Sequence[int], what: Intervention, progress: Callable[[int], None]
) -> Effect:
    """Apply an intervention to messages, a few hundred in each transaction.

    Args:
        database: database of the outbox, which must exist.
        ids: ids of the messages.
        what: the intervention, of `cancelling` or `rescheduling`.
        progress: called after each transaction with the number of ids processed so far.

    Raises:
        NotAnOutbox: there is no outbox.
        OutboxError: the outbox cannot be written; transactions before it stay committed.
    """
    with database.reading():
        pass  # raises if there is no outbox, because `write` would create one
    chunks = [ids[first : first + CHUNK] for first in range(0, len(ids), CHUNK)]

    def step(chunk: Sequence[int]) -> Callable[[Session], Effect]:
        return lambda session: _change_and_forget(session, list(chunk), what)

    effect, done = Effect(), 0
    for chunk, came_to in zip(chunks, step_by_step(database, map(step, chunks)), strict=True):
        effect.add(came_to)
        done += len(chunk)
        progress(done)
    return effect


def _change_and_forget(session: Session, ids: list[int], what: Intervention) -> Effect:
    effect = change(session, ids, what, time.time())
    if what.action is Action.DISCARD:
        left = {*effect.in_flight, *effect.unfit, *effect.damaged}
        for id_ in ids:
            if id_ not in left:
                session.run("forget_keys_of", {"id": id_})
    return effect


def due(
    database: Database, selection: Selection, *, due_before: float | None, limit: int
) -> list[dict[str, Any]]:
    """List waiting messages by the time at which they are due, the next one first.

    Messages for a paused destination have no such time, and are left out.

    Args:
        database: database of the outbox.
        selection: filter for the messages; its states do not matter.
        due_before: latest time (seconds since 1970); None for any.
        limit: maximum number of messages to list.

    Raises:
        NotAnOutbox: there is no outbox.
    """
    latest = _FOREVER if due_before is None else due_before
    chosen = replace(selection, states=("waiting",), due_before=latest)
    return found_by_due_time(database, chosen, limit=limit)
