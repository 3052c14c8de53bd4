"""The story of one message: its state, the outcome of every attempt, and what happens next.

Knows: everything on disk about one message, the status of the running relay. Must never know: how
the story is shown.

The story of a message that has left the outbox holds only what was recorded: a message that is
confirmed at its first attempt leaves no history.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from reliablepub.errors import OutboxError
from reliablepub.outbox.admin.selection import OPEN_STATES, with_doubt
from reliablepub.outbox.database import Database, Relaying, Session
from reliablepub.outbox.rows import correlation
from reliablepub.outcome import Persistence

_LEVELS: Final = [kind.value for kind in Persistence]
"""From "not written" to "persisted". The highest value of all attempts applies to the message."""


_ROWS_NAMED: Final = ("rows_of_message_id", "rows_of_enqueue_key", "rows_once_of_message_id")
"""Lookups of a name, in order: messages in the outbox, keys (by primary key), scans of the rest."""


_NUMBER: Final = re.compile(r"[1-9][0-9]{0,18}")
"""A row number as it is shown: of at most 19 digits, without leading zeros."""


class Next(StrEnum):
    """What happens to a message next."""

    ANSWER = "the broker answers"
    SENT = "it is sent"
    SENT_LATER = "it is sent when it is due"
    HELD = "it is sent when its ordering key is free"
    PAUSED = "it is sent when its destination recovers"
    CONNECTED = "it is sent when the relay is connected"
    UNBLOCKED = "it is sent when the broker lifts its block"
    RELAYED = "it is sent when a relay runs for this outbox"
    DECIDED = "nothing until an operator decides"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Story:
    """All that is known of one message."""

    id: int
    message_id: str | None  # None if no record of it is left
    # That of its row, or ``in flight``; once it has left the outbox: ``confirmed``, ``discarded``,
    # or ``gone`` if its end is not recorded
    state: str
    message: Mapping[str, Any]  # its row without the body; empty if there is no row
    attempts: list[dict[str, Any]]  # failed ones, and a confirm that followed them
    interventions: list[dict[str, Any]]
    # Epoch, tag and time of the attempt; kept of a relay that has ended, until the next one runs
    in_flight: dict[str, Any] | None
    persistence: str | None  # one of `Persistence`; None if not known
    next: Next
    next_at: float | None  # None if not known
    held_by: int | None  # id of the message that its ordering key waits for
    before: int | None  # ready ones ahead, up to 100,000; None if it waits for something else
    relay_pid: int | None  # now, of the outbox or of the shard
    relay: Mapping[str, Any]  # contents of the status file; empty without one
    shard: int | None = None  # None if the outbox has one, or if the message has left it
    relay_silent_s: float | None = None  # of a relay that hangs, in PostgreSQL


def resolve(database: Database, name: str) -> list[int]:
    """Return the rows that an operator's name for a message can mean, the lowest id first."""
    with database.reading() as session:
        if _NUMBER.fullmatch(name):
            id_ = int(name)
            (last_id,) = session.run("last_id").fetchone()
            if 0 < id_ <= last_id:
                return [id_]
        # A key is preferred to the `message_id` of a message that has left the outbox
        for query in _ROWS_NAMED:
            found = session.run(query, {"name": name}).fetchall()
            if found:
                return sorted(id_ for (id_,) in found)
    with suppress(OutboxError), database.reading() as session:  # a user may not read properties
        found = session.run("rows_of_correlation_id", {"written": correlation(name)}).fetchall()
        return sorted(id_ for (id_,) in found)
    return []


def tell(database: Database, id_: int) -> Story:
    """Return all that is known of the message of a row."""
    with database.reading() as session:
        relays, shard = session.relays(), session.shard(id_)
        relay = relays[shard]
        found = _one(session, "one_message", {"id": id_})
        message = {} if found is None else with_doubt(found)
        attempts = _all(session, "attempts_of", {"id": id_})
        interventions = _all(session, "interventions_of", {"id": id_})
        in_flight = None
        if message.get("state") in OPEN_STATES:
            in_flight = _one(session, "in_flight", {"id": id_, "limit": 1})
        state = message.get("state") or _last_recorded(attempts, interventions)
        if in_flight is not None and relay.pid is not None:
            state = "in flight"
        holder = None
        if message.get("ordering_key") is not None and state in OPEN_STATES:
            of_key = {"ordering_key": message["ordering_key"], "id": id_}
            holder = _one(session, "key_held_by", of_key)
        following, at = _following(state, message, holder, relay)
        before = None
        if following is Next.SENT:
            ((before,),) = session.run("ready_before", {"id": id_}).fetchall()
    names = (line["message_id"] for line in (message, *attempts, *interventions) if line)
    return Story(
        id=id_,
        message_id=next(names, None),
        state=state,
        message=message,
        attempts=attempts,
        interventions=interventions,
        in_flight=in_flight,
        persistence=_persistence(state, message, attempts, in_flight),
        next=following,
        next_at=at,
        held_by=None if holder is None else holder["id"],
        before=before,
        relay_pid=relay.pid,
        relay=relay.status,
        shard=shard if message and len(relays) > 1 else None,
        relay_silent_s=relay.silent_s,
    )


def _following(
    state: str,
    message: Mapping[str, Any],
    holder: Mapping[str, Any] | None,
    relay: Relaying,
) -> tuple[Next, float | None]:
    """Return what happens next, and when, if the time is known."""
    due_at = message.get("due_at")
    if not isinstance(due_at, int | float):
        due_at = None  # also of a damaged row
    is_due = due_at is None or due_at <= time.time()
    fixed = {"in flight": Next.ANSWER, "parked": Next.DECIDED, "expired": Next.DECIDED}
    if state not in OPEN_STATES:
        return fixed.get(state, Next.NOTHING), None
    if holder is not None:
        return Next.HELD, None
    if relay.pid is None:
        return Next.RELAYED, due_at
    if message["is_held"]:
        return Next.PAUSED, None
    if not is_due:
        return Next.SENT_LATER, due_at
    link = relay.status.get("link", "")
    return {"disconnected": Next.CONNECTED, "blocked": Next.UNBLOCKED}.get(link, Next.SENT), None


def _last_recorded(attempts: list[dict[str, Any]], interventions: list[dict[str, Any]]) -> str:
    """Return the last recorded state of a message that has left the outbox, or ``gone``."""
    if interventions and interventions[-1]["action"] == "discard":
        return "discarded"
    return "confirmed" if attempts and attempts[-1]["outcome"] == "confirmed" else "gone"


def _persistence(
    state: str,
    message: Mapping[str, Any],
    attempts: list[dict[str, Any]],
    in_flight: Mapping[str, Any] | None,
) -> str | None:
    """Return the highest `Persistence` that any attempt may have reached; None if not known."""
    levels = [level for one in attempts if (level := one["persistence"]) in _LEVELS]
    # The history of an imported message stayed in its former file, but its row has the counts.
    if in_flight is not None or message.get("may_have_arrived"):
        levels.append(Persistence.POSSIBLY_PERSISTED.value)
    if state in ("gone", "confirmed"):
        return None if state == "gone" else Persistence.PERSISTED.value
    return max(levels, key=_LEVELS.index, default=Persistence.NOT_WRITTEN.value)


def _one(session: Session, query: str, values: Mapping[str, object]) -> dict[str, Any] | None:
    return next(session.rows(query, values), None)


def _all(session: Session, query: str, values: Mapping[str, object]) -> list[dict[str, Any]]:
    return list(session.rows(query, values))
