"""Cancels and reschedules messages that were not sent; lists messages by due time.

Knows: deduplication keys, and which intervention each request is. Must never know: how a relay
learns of an intervention (see `reliablepub.outbox.admin.interventions`), how it publishes.

A message is either cancelled or sent, never both. The transaction that removes its row leaves a
message that is in flight, or that a queue may hold. After it, the relay drops the row from memory
before it sends anything else.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final

from reliablepub.message import Message
from reliablepub.outbox.admin.interventions import Action, Intervention, change, delete
from reliablepub.outbox.admin.selection import Selection, found_by_due_time
from reliablepub.outbox.database import Database, Session

_FOREVER: Final = 1e300
"""Later than every due time but infinity, which marks messages of a paused destination."""


class ScheduleChange(Enum):
    """Result of `Outbox.cancel` and `Outbox.reschedule`; only `MADE` is true."""

    MADE = "made"
    """The message is cancelled, or has its new time."""
    TOO_LATE = "too late"
    """The message is in flight, was sent or may have been sent, or was given up and cannot be
    rescheduled. Nothing was changed."""
    UNKNOWN = "unknown"
    """The outbox has no message with this key: none was enqueued, it was cancelled, or the key was
    forgotten after 7 days."""

    def __bool__(self) -> bool:
        """Whether the change was made."""
        return self is ScheduleChange.MADE


def cancelling(note: str) -> Intervention:
    """Return the intervention that cancels messages."""
    return Intervention(Action.DISCARD, note=note, is_unsent=True)


def rescheduling(not_before: datetime, note: str) -> Intervention:
    """Return the intervention that sends messages at another time; a past time sends them now."""
    Message(b"", not_before=not_before)  # checks it
    at = f"rescheduled to {not_before.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    note = f"{at}: {note}" if note else at
    return Intervention(Action.RETRY, note=note, due_at=not_before.timestamp(), is_unsent=True)


def by_key(session: Session, key: str, intervention: Intervention) -> ScheduleChange:
    """Apply an intervention to the message of a deduplication key, within an open transaction.

    The key of a cancelled message is forgotten: a later message with it is stored.
    """
    found = session.run("rows_of_enqueue_key", {"name": key}).fetchone()
    if found is None:
        return ScheduleChange.UNKNOWN
    (id_,) = found
    if session.is_own(id_):
        _change_own(session, id_, intervention)
    elif not change(session, [id_], intervention, time.time()).changed:
        return ScheduleChange.TOO_LATE
    if intervention.action is Action.DISCARD:
        session.run("forget_key", {"key": key})
    return ScheduleChange.MADE


def _change_own(session: Session, id_: int, intervention: Intervention) -> None:
    """Change a message that this transaction has stored, and which no ledger counts yet."""
    if intervention.action is Action.DISCARD:
        delete(session, "delete_open", [id_])
    else:
        session.run("due_at", {"chosen": [id_], "due_at": intervention.due_at})


def due(
    database: Database, selection: Selection, *, due_before: float | None, limit: int
) -> list[dict[str, Any]]:
    """List waiting messages by the time at which they are due, the next one first."""
    # Both leave out messages for a paused destination: they have no such time
    latest = _FOREVER if due_before is None else due_before
    chosen = replace(selection, states=("waiting",), due_before=latest)
    return found_by_due_time(database, chosen, limit=limit)
