"""Facts about the server of an outbox: settings, replicas, vacuum, owners of the shards.

Knows: how to query each with the privileges of a reader. Must never know: which values are good,
the broker.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from reliablepub.outbox.database import Database, LostCommits, Session, Standby
from reliablepub.outbox.postgres.sql import DEFAULT_SCHEMA, changed


@dataclass(frozen=True, slots=True)
class Owner:
    """The newest turn of a shard."""

    shard: int
    pid: int | None  # None if no relay has ever owned the shard
    host: str
    is_free: bool  # the relay has released the shard
    silent_s: float  # since the relay's newest turn
    is_linked: bool = False  # the relay's connection is open, as far as that is known


@dataclass(frozen=True, slots=True)
class ServerSurroundings:
    """Facts about the server of an outbox."""

    server: dict[str, Any]  # of `surroundings`, `privileges` and, if visible, `activity`
    owners: list[Owner]
    clock_off_s: float  # the server's clock, minus that of this host
    ahead_s: float  # how far in the future the newest open message was stored, or 0
    exchanges: list[str]  # named by open or parked messages, except the default one; at most 100
    queues: list[str]  # named through the default exchange; at most 100
    changed: list[str]  # functions that differ from those that this version creates
    behind: dict[str, int] = field(default_factory=dict)  # sequences: highest number in use
    lost: list[LostCommits] = field(default_factory=list)  # the newest first
    passed_over: list[int] = field(default_factory=list)  # due, and not sent by a relay at work
    standbys: list[Standby] = field(default_factory=list)


def look_around(database: Database) -> ServerSurroundings:
    """Query the server of an outbox; read-only."""
    with database.reading() as session:
        (server,) = session.rows("surroundings")
        now = time.time()
        server |= next(session.rows("privileges"))
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
        standbys=database.standbys(),
    )


def read_privileges(database: Database) -> dict[str, Any]:
    """What this role may that a relay needs; see the statement ``privileges``."""
    with database.reading() as session:
        return next(session.rows("privileges"))


def _changed(session: Session) -> list[str]:
    """Name the functions that another version has created, or another program has changed."""
    (made,) = session.rows("outbox")
    found = list(session.rows("functions"))
    schema = next((row["schema"] for row in found), DEFAULT_SCHEMA)
    return changed(schema, made["shards"], {row["name"]: row["body"] for row in found})
