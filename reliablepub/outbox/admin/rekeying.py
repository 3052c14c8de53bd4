"""Every message in an outbox encrypted under the first key, beside whatever relays it.

Knows: which rows are not, and that each is written under a new checksum. Must never know: ciphers.

An old key can be dropped when no row needs it, and parked messages may lie for months. A relay that
holds a message in memory is not concerned: only what is on disk changes, and not what it means.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from reliablepub.outbox.admin.interventions import CHUNK, step_by_step
from reliablepub.outbox.encryption import OutboxKeys, current_mark
from reliablepub.outbox.sqlite.database import open_writer, reading
from reliablepub.outbox.sqlite.rows import MessageRow, Unreadable, rewritten
from reliablepub.outbox.sqlite.sql import QUERIES


@dataclass(slots=True)
class Rekeyed:
    """What came of it.

    Attributes:
        changed: messages that are encrypted under the first key now, and were not before.
        left: row numbers of messages left as they were, each with the reason: damaged, changed by
            an intruder, or not encrypted although no such message is accepted.
    """

    changed: int = 0
    left: dict[int, str] = field(default_factory=dict)


def rekey(
    path: Path,
    keys: OutboxKeys,
) -> Rekeyed:
    """Encrypt what is not encrypted under the first key, a few hundred messages a transaction.

    Args:
        path: the outbox; it must exist.
        keys: the first encrypts; the others, and it, decrypt.

    Raises:
        NotAnOutbox: there is no outbox.
        OutboxSealed: a message is encrypted with a key that was not given; those before it are
            done.
        OutboxError: the outbox cannot be written; likewise.
    """
    with reading(path) as connection:
        rows = connection.execute(
            QUERIES["sealed_otherwise"], {"mark": current_mark(keys)}
        ).fetchall()
    result = Rekeyed()
    chunks = [rows[first : first + CHUNK] for first in range(0, len(rows), CHUNK)]
    with closing(open_writer(path, is_relay=False)) as connection:
        steps = (partial(_step, connection, chunk, keys) for chunk in chunks)
        for step in step_by_step(connection, path, steps):
            result.changed += step.changed
            result.left |= step.left
    return result


def _step(
    connection: sqlite3.Connection, chunk: list[tuple[str, int]], keys: OutboxKeys
) -> Rekeyed:
    step = Rekeyed()
    for place, id_ in chunk:
        query = "confirmed_message" if place == "confirmed" else "any_message"
        found = connection.execute(QUERIES[query], {"id": id_}).fetchone()
        if found is None:
            continue  # gone in between
        try:
            columns = rewritten(MessageRow._make(found), keys, seals=True)
        except Unreadable as error:
            step.left[id_] = str(error)
            continue
        # It may have been parked, or put back, in between: then its row is in the other table.
        for table in ("confirmed",) if place == "confirmed" else ("open", "parked"):
            step.changed += connection.execute(QUERIES[f"rekey_{table}"], columns).rowcount
    return step
