"""Key rotation: re-encrypts every message of an outbox under the first key; a relay may run.

Knows: which rows are not encrypted under that key, that each gets a new checksum, which keys a
relay has. Must never know: ciphers.

An old key can be dropped once no row needs it. A relay that holds a message in memory is not
affected: the stored bytes change, the message does not. A relay without the first key would end at
the first message that it reads, so nothing is encrypted beside one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from reliablepub.errors import OutboxError
from reliablepub.outbox.admin.interventions import CHUNK, step_by_step
from reliablepub.outbox.database import Database, Session
from reliablepub.outbox.encryption import OutboxKeys, current_mark, fingerprints, marks
from reliablepub.outbox.rows import MessageRow, Unreadable, rekeyed

STEP_BYTES: Final = 4 << 20
"""Bytes of the bodies that one transaction encrypts, unless it is one large body."""


# The statement that reads a row, and the tables in which it may be: a message may have been
# parked or retried since its id was read.
_OF_MESSAGES: Final = ("any_message", ("open", "parked"))
_PLACES: Final = {
    "open": _OF_MESSAGES,
    "parked": _OF_MESSAGES,
    "confirmed": ("confirmed_message", ("confirmed",)),
    "original": ("original_message", ("original",)),
}


@dataclass(slots=True)
class Rekeyed:
    """Result of `rekey`.

    Attributes:
        changed: number of messages that were re-encrypted under the first key.
        left: row numbers of messages that were not changed, each with the reason: damaged, forged
            (changed without the key), or not encrypted although the keys do not accept plaintext.
    """

    changed: int = 0
    left: dict[int, str] = field(default_factory=dict)


def rekey(database: Database, keys: OutboxKeys) -> Rekeyed:
    """Encrypt each message that is not encrypted under the first key, a few a transaction.

    If it raises, transactions already committed remain.
    """
    with database.reading() as session:
        _check_relays(session, database.name, keys)
        rows = session.run("sealed_otherwise", {"mark": current_mark(keys)}).fetchall()
    result, done = Rekeyed(), 0

    def steps() -> Iterator[Callable[[Session], _Step]]:
        while done < len(rows):
            part = rows[done : done + CHUNK]
            yield partial(_step, rows=part, keys=keys, name=database.name)

    with closing(database):
        for step in step_by_step(database, steps()):
            done += step.seen
            result.changed += step.result.changed
            result.left |= step.result.left
    return result


@dataclass(slots=True)
class _Step:
    """What one transaction has done."""

    result: Rekeyed = field(default_factory=Rekeyed)
    seen: int = 0  # number of rows looked at


def _step(session: Session, rows: Sequence[tuple[str, int]], keys: OutboxKeys, name: str) -> _Step:
    _check_relays(session, name, keys)  # one may have started since the last step
    step, size = _Step(), 0
    for place, id_ in rows:
        query, tables = _PLACES[place]
        found = session.run(query, {"chosen": [id_]}).fetchone()
        step.seen += 1
        if found is None:
            continue  # deleted since its id was read
        row = MessageRow._make(found)
        try:
            columns = rekeyed(row, keys) | {"id": id_}
            size += len(columns["body"])
            session.check_room(size)
            with session.attempt():
                for table in tables:
                    step.result.changed += session.run(f"rekey_{table}", columns).rowcount
        except Unreadable as error:
            step.result.left[row.id] = str(error)
        if size >= STEP_BYTES:
            break
    return step


def _check_relays(session: Session, name: str, keys: OutboxKeys) -> None:
    """Refuse to encrypt under a key that a running relay does not have."""
    key, fingerprint = next(iter(fingerprints(keys).items()))
    for relay in session.relays():
        theirs = relay.status.get("keys")  # none of a relay that has not told its status yet
        if relay.pid is None or not isinstance(theirs, dict) or theirs.get(key) == fingerprint:
            continue
        has = f"has another key of the name {key!r}" if key in theirs else f"has no key {key!r}"
        raise OutboxError(
            f"process {relay.pid}, which relays outbox {name}, {has}, and would end at the first "
            "message that is encrypted with it: add the key at the end of its keys, restart it or "
            "send it SIGHUP, and run rekey again"
        )


def missing_key(
    database: Database, before: OutboxKeys | None, after: OutboxKeys | None
) -> str | None:
    """Return the name of a key of `before` that messages need and `after` lacks, or None."""
    kept = fingerprints(after)
    dropped = [name for name, one in fingerprints(before).items() if kept.get(name) != one]
    if not dropped:
        return None
    with database.reading() as session:
        needed = (name for name in dropped if session.run("needs_key", marks(name)).fetchone())
        return next(needed, None)
