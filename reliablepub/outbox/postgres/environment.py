"""Facts about the server of an outbox: settings, replicas, vacuum, owners of the shards.

Knows: how to query each with the privileges of a reader. Must never know: which values are good,
the broker.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from reliablepub.outbox.database import Database, LostCommits, Session
from reliablepub.outbox.postgres.sql import DEFAULT_SCHEMA, functions


@dataclass(frozen=True, slots=True)
class Owner:
    """The newest turn of a shard.

    Attributes:
        shard: number of the shard.
        pid: process id of the relay that owns it; None if no relay ever has.
        host: name of that relay's host.
        is_free: whether the relay has released the shard.
        silent_s: seconds since the relay's newest turn.
    """

    shard: int
    pid: int | None
    host: str
    is_free: bool
    silent_s: float


@dataclass(frozen=True, slots=True)
class ServerSurroundings:
    """Facts about the server of an outbox.

    Attributes:
        server: settings and figures by name; see the statements ``surroundings``, ``privileges``
            and ``activity``. The last ones are missing if this role may not see them.
        owners: the owner of each shard.
        clock_off_s: the server's clock, minus the clock of this host, in seconds.
        ahead_s: seconds by which the newest open message was stored in the future, or 0.
        exchanges: exchanges, other than the default one, that open or parked messages name; at most
            100.
        queues: queues that open or parked messages name through the default exchange; at most 100.
        changed: functions of the outbox that differ from those that this version creates.
        behind: sequences that are behind their rows: the highest number in use, by name.
        lost: fail-overs that have lost commits, the newest first.
        passed_over: ids of messages that are due and that a relay at work does not send.
    """

    server: dict[str, Any]
    owners: list[Owner]
    clock_off_s: float
    ahead_s: float
    exchanges: list[str]
    queues: list[str]
    changed: list[str]
    behind: dict[str, int] = field(default_factory=dict)
    lost: list[LostCommits] = field(default_factory=list)
    passed_over: list[int] = field(default_factory=list)


def look_around(database: Database) -> ServerSurroundings:
    """Query the server of an outbox; read-only.

    Raises:
        NotAnOutbox: there is no outbox.
        OutboxError: the server cannot be reached, or the user may not read the outbox.
    """
    with database.reading() as session:
        (server,) = session.rows("surroundings")
        now = time.time()
        server |= _privileges(session)
        if server["sees_activity"]:
            server |= next(session.rows("activity"))
        owners = [Owner(**row) for row in session.rows("owners")]
        newest = next(iter(session.rows("newest_stored_at")), {"stored_at": 0.0})
        exchanges = sorted(row["exchange"] for row in session.rows("exchanges_named"))
        queues = sorted(row["routing_key"] for row in session.rows("queues_named"))
        changed = _changed(session)
        behind = {row["name"]: row["most"] for row in session.rows("sequences_behind")}
    return ServerSurroundings(
        server=server,
        owners=owners,
        clock_off_s=server["now"] - now,
        ahead_s=max(0.0, newest["stored_at"] - now),
        exchanges=exchanges,
        queues=queues,
        changed=changed,
        behind=behind,
        lost=database.lost_commits(),
        passed_over=database.passed_over(),
    )


def read_privileges(database: Database) -> dict[str, Any]:
    """What this role may that a relay needs; see the statement ``privileges``."""
    with database.reading() as session:
        return _privileges(session)


def _privileges(session: Session) -> dict[str, Any]:
    return next(session.rows("privileges"))


def _changed(session: Session) -> list[str]:
    """Name the functions that another version has created, or another program has changed.

    There are no migrations: an outbox keeps the functions that it was created with.
    """
    (made,) = session.rows("made_with")
    found = list(session.rows("functions"))
    bodies = {row["name"]: row["body"] for row in found}
    schema = next((row["schema"] for row in found), DEFAULT_SCHEMA)
    ours = functions(schema, made["shards"])
    return sorted(name for name, body in ours.items() if bodies.get(name) != body)
