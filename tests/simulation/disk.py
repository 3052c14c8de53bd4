"""What is on disk, read with a connection of one's own: the checker's eyes.

It knows the outbox's tables and views as a person with the `sqlite3` shell does. It must never know
the store's code.
"""

import sqlite3
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from reliablepub.outbox.entry import Changes, Snapshot
from reliablepub.outbox.memory import MemoryStore
from tests.stores import Where

Words: TypeAlias = tuple[str, int, str]
"""Outcome, reply code and reply text."""


class Disk(Protocol):
    """What a checker may look at.

    Attributes:
        run: number of the run that relays it.
    """

    run: int

    def open_ids(self) -> list[str]:
        """The ``message_id`` of every open row."""

    def parked(self) -> dict[str, Words]:
        """Who is parked, and the reason."""

    def before(self, message_id: str, key: str) -> list[str]:
        """Who of its key has to be settled before it: stored earlier and open, or holding it."""

    def in_flight(self, epoch: int, first_tag: int) -> int | None:
        """How many tags are recorded from this one on; None if no record is kept."""

    def audit(self) -> list[int]:
        """Differences of the ledger that are not 0."""

    def position(self, source: str) -> int:
        """Of a named source."""


def _connected(where: Where) -> Any:
    if isinstance(where, Path):
        uri = f"{where.as_uri()}?mode=ro"
        return sqlite3.connect(uri, uri=True, isolation_level=None)
    from tests.simulation.database import Connection  # noqa: PLC0415 - it needs psycopg

    return Connection(where)


class Durable:
    """An outbox in a file or a database, seen from outside."""

    def __init__(self, where: Where, run: int = 0) -> None:
        self.run = run
        self._connection = _connected(where)

    def open_ids(self) -> list[str]:
        rows = self._connection.execute("SELECT message_id FROM reliablepub_messages")
        return [row[0] for row in rows]

    def parked(self) -> dict[str, Words]:
        rows = self._connection.execute(
            "SELECT message_id, outcome, reply_code, reply_text FROM reliablepub_parked"
        )
        return {id_: (kind, code, text) for id_, kind, code, text in rows}

    def rows(self) -> dict[int, str]:
        """By number, the ``message_id`` of every row, open or parked."""
        rows = self._connection.execute(
            "SELECT id, message_id FROM reliablepub_messages"
            " UNION ALL SELECT id, message_id FROM reliablepub_parked ORDER BY id"
        )
        return dict(rows.fetchall())

    def held_keys(self) -> dict[str, list[str]]:
        """Ordering keys that wait for a person, and which messages hold them."""
        held: dict[str, list[str]] = {}
        rows = self._connection.execute(
            "SELECT ordering_key, message_id FROM reliablepub_held_keys ORDER BY id"
        )
        for key, message_id in rows:
            held.setdefault(key, []).append(message_id)
        return held

    def before(self, message_id: str, key: str) -> list[str]:
        rows = self._connection.execute(
            "SELECT message_id FROM (SELECT id, message_id, ordering_key FROM reliablepub_messages"
            " UNION ALL SELECT id, message_id, ordering_key FROM reliablepub_parked"
            " WHERE state = 'parked' AND is_skipped = 0) AS kept WHERE ordering_key = ?"
            " AND id < (SELECT id FROM reliablepub_messages WHERE message_id = ?)",
            (key, message_id),
        )
        return [row[0] for row in rows]

    def in_flight(self, epoch: int, first_tag: int) -> int | None:
        row = self._connection.execute(
            "SELECT count FROM reliablepub_in_flight WHERE epoch = ? AND first_tag = ?",
            (f"{self.run}-{epoch}", first_tag),
        ).fetchone()
        return row[0] if row else 0

    def left_in_flight(self) -> int:
        """Rows for people that nobody took away."""
        (count,) = self._connection.execute("SELECT count(*) FROM reliablepub_in_flight").fetchone()
        return int(count)

    def audit(self) -> list[int]:
        row = self._connection.execute(
            "SELECT open_difference, parked_difference, expired_difference, bytes_difference"
            " FROM reliablepub_audit"
        ).fetchone()
        return [difference for difference in row if difference]

    def position(self, source: str) -> int:
        row = self._connection.execute(
            "SELECT position FROM reliablepub_sources WHERE name = ?", (source,)
        ).fetchone()
        return row[0] if row else 0

    def close(self) -> None:
        self._connection.close()


class MemoryOfOne:
    """The store of a publisher without a disk: it counts what it parks, so that is noted here."""

    def __init__(self, store: MemoryStore) -> None:
        self.run = store.run
        self._store = store
        self._parked: dict[str, Words] = {}

    def committed(self, turn: Changes, snapshot: Snapshot) -> None:
        """Note who was parked by a turn."""
        for attempt in turn.parked:
            outcome = attempt.outcome
            words = (outcome.kind, outcome.reply_code, outcome.reply_text)
            self._parked[attempt.entry.message.message_id or ""] = words
        assert snapshot.counters.parked + snapshot.counters.expired == len(self._parked)
        counters = snapshot.counters
        assert counters.parked + counters.expired == len(self._parked)

    def open_ids(self) -> list[str]:
        return [entry.message.message_id or "" for entry in self._store._open.values()]

    def parked(self) -> dict[str, Words]:
        return dict(self._parked)

    def before(self, message_id: str, key: str) -> list[str]:
        of_key = [e for e in self._store._open.values() if e.message.ordering_key == key]
        (own,) = (e.id for e in of_key if e.message.message_id == message_id)
        return [e.message.message_id or "" for e in of_key if e.id < own]

    def in_flight(self, epoch: int, first_tag: int) -> int | None:
        return None

    def audit(self) -> list[int]:
        counters = self._store.snapshot().counters
        size = sum(entry.message.size for entry in self._store._open.values())
        differences = [counters.open - len(self._store._open), counters.open_bytes - size]
        return [difference for difference in differences if difference]

    def position(self, source: str) -> int:
        return self._store.position(source)
