"""Outboxes as the oldest versions that can be upgraded have created them, each with one message.

Knows: the frozen tables in ``earlier``. Must never know: how an outbox is upgraded.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

import psycopg

from reliablepub.outbox.postgres.sql import within
from reliablepub.outbox.sqlite.connections import OLDEST
from reliablepub.outbox.sqlite.sql import statements

EARLIER = Path(__file__).with_name("earlier")
OLDEST_IN_POSTGRES = 3
MESSAGE_ID = "m"

_MESSAGE = """INSERT INTO reliablepub_messages
(id, message_id, exchange, routing_key, stored_at, size, checksum, body)
VALUES (7, 'm', '', 'q', 1e9, 200, -1, x'78')"""
_ACT = """INSERT INTO reliablepub_interventions
(id, message_id, exchange, routing_key, at, action, person, note)
VALUES (7, 'm', '', 'q', 1e9, 'retry', 'jo', 'because')"""
_COUNT = "UPDATE reliablepub_ledger SET last_id = 7, stored = 1, open_bytes = 200"


def create_file(path: str | Path) -> None:
    """Create a file with a message for queue ``q``, in whom an operator intervened three times."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        for statement in statements((EARLIER / f"sqlite-{OLDEST}.sql").read_text()):
            connection.execute(statement)
        connection.execute("INSERT INTO reliablepub_schema VALUES (?, 0.0)", (OLDEST,))
        for statement in (_MESSAGE, _ACT, _ACT, _ACT, _COUNT):
            connection.execute(statement)
        connection.commit()
    Path(path).chmod(0o600)


def create_in_postgres(url: str, schema: str, *, shards: int = 1) -> None:
    """Create an outbox in a schema, with a message for queue ``q``."""
    text = within(schema, (EARLIER / f"postgres-{OLDEST_IN_POSTGRES}.sql").read_text())
    text = text.format(version=OLDEST_IN_POSTGRES, shards=shards, allows_loss=False)
    # A function as another commit of that version has created it.
    text = text.replace("gen_random_uuid", "md5('') || gen_random_uuid")
    with psycopg.connect(url) as connection:
        connection.execute(text.encode())
        enqueue = f"SELECT {schema}.enqueue('', 'q', 'x', message_id => '{MESSAGE_ID}')"
        connection.execute(enqueue.encode())
