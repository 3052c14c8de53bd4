"""What tests put into an outbox and ask of it, whether it is in a file or in a database.

Knows: what the tables of both are called. Must never know: what a test expects.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from reliablepub import Message, Outbox, OutboxKeys
from reliablepub.outbox.database import Database
from reliablepub.outbox.entry import Attempt, Changes, Entry, Store
from tests.outcomes import REFUSED
from tests.stores import Where, open_store


def fill(where: Where | Database, *messages: Message, keys: OutboxKeys | None = None) -> None:
    """Store messages as an application does."""
    with Outbox(where, keys=keys) as outbox:
        for message in messages:
            outbox.enqueue(message)


def opened(where: Where, **settings: Any) -> "closing[Store]":
    """The store of a relay, for a block."""
    return closing(open_store(where, **settings))


def read(store: Store, first: int = 1, last: int = 99) -> list[Message]:
    """What a relay reads of the messages with these ids, unless it parks them."""
    entries, _ = store.read_ready(first, last, limit=99, bytes_max=10**9)
    return [entry.message for entry in entries]


def ready_ids(store: Store, first: int, last: int) -> list[str | None]:
    """The ids of these messages."""
    return [message.message_id for message in read(store, first, last)]


def read_due(store: Store, now: float = 1e12) -> list[Message]:
    """What a relay reads of the messages that are due until then."""
    entries, _ = store.read_due(now, limit=99, bytes_max=10**9, loaded=())
    return [entry.message for entry in entries]


def message_ids(where: Where) -> list[object]:
    """Of the messages that are open."""
    return [row["message_id"] for row in Outbox(where).rows("open")]


def connect(where: Where) -> Any:
    """The application's own connection to the database of an outbox."""
    if isinstance(where, Path):
        return sqlite3.connect(where)
    import psycopg  # noqa: PLC0415 - tests without a PostgreSQL do not need it

    return psycopg.connect(where)


def sql(where: Where, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """Run a statement in a transaction of its own; its rows.

    Args:
        where: the outbox.
        statement: with ``reliablepub.`` before the names of tables, and ``?`` for each value.
        values: what stands there.
    """
    if isinstance(where, Path):
        statement = statement.replace("reliablepub.", "reliablepub_")
    elif values:
        statement = statement.replace("?", "%s")
    with closing(connect(where)) as connection, connection:
        cursor = connection.execute(statement, *([values] if values else []))
        return cursor.fetchall() if cursor.description else []


def count(where: Where, table: str) -> int:
    """How many rows one of our tables has."""
    [(rows,)] = sql(where, f"SELECT count(*) FROM reliablepub.{table}")
    return int(rows)


def stored(store: Store, *entries: Entry) -> list[Entry]:
    """Entries that a relay has stored."""
    store.commit(Changes(new=[*entries]))
    return [*entries]


def confirm(store: Store, *entries: Entry) -> None:
    """Store entries, and have them confirmed."""
    store.commit(Changes(new=[*entries]))
    store.commit(Changes(confirmed=[*entries]))


def park(store: Store, *entries: Entry, at: float = 2.0) -> None:
    """Have entries refused and parked."""
    attempts = [Attempt(entry, "1-1", tag, REFUSED, at) for tag, entry in enumerate(entries, 1)]
    store.commit(Changes(parked=attempts, attempts=attempts))
