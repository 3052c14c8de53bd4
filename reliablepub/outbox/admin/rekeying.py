"""Key rotation: re-encrypts every message of an outbox under the first key; a relay may run.

Knows: which rows are not encrypted under that key, that each gets a new checksum. Must never know:
ciphers.

An old key can be dropped once no row needs it. A relay that holds a message in memory is not
affected: the stored bytes change, the message does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

from reliablepub.outbox.admin.interventions import chunks, step_by_step
from reliablepub.outbox.database import Database, Session
from reliablepub.outbox.encryption import OutboxKeys, current_mark
from reliablepub.outbox.rows import MISTYPED, MessageRow, Unreadable, rewritten


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
    """Encrypt each message that is not encrypted under the first key, up to 500 a transaction.

    Args:
        database: database of the outbox, which must exist.
        keys: the first key encrypts; all keys decrypt.

    Raises:
        NotAnOutbox: there is no outbox.
        OutboxSealed: a message is encrypted with a key that was not given. Transactions already
            committed remain.
        OutboxError: the outbox cannot be written. Transactions already committed remain.
    """
    with database.reading() as session:
        rows = session.run("sealed_otherwise", {"mark": current_mark(keys)}).fetchall()
    result = Rekeyed()
    with closing(database):
        steps = (partial(_step, rows=part, keys=keys) for part in chunks(rows))
        for step in step_by_step(database, steps):
            result.changed += step.changed
            result.left |= step.left
    return result


def _step(session: Session, rows: Sequence[tuple[str, int]], keys: OutboxKeys) -> Rekeyed:
    step = Rekeyed()
    for place, id_ in rows:
        query = "confirmed_message" if place == "confirmed" else "any_message"
        found = session.run(query, {"id": id_}).fetchone()
        if found is None:
            continue  # deleted since its id was read
        state = session.run("state", {"id": id_}).fetchone()
        if state is not None and not state[2]:
            step.left[id_] = MISTYPED
            continue
        try:
            columns = rewritten(MessageRow._make(found), keys, seals=True)
        except Unreadable as error:
            step.left[id_] = str(error)
            continue
        # The message may have been parked or retried since its id was read, so try both tables.
        for table in ("confirmed",) if place == "confirmed" else ("open", "parked"):
            step.changed += session.run(f"rekey_{table}", columns).rowcount
    return step
