"""Creates an outbox, and prints the SQL that does.

Knows: the scripts of this package. Must never know: what a relay does with the tables.
"""

from __future__ import annotations

from typing import Any

from reliablepub.outbox.postgres.enqueue import execute
from reliablepub.outbox.postgres.server import VERSION, Server, reported
from reliablepub.outbox.postgres.sql import script


def creation(schema: str, *, shards: int = 1, allows_loss: bool = False) -> str:
    """Return the SQL that creates an outbox."""
    values = {"version": VERSION, "shards": int(shards), "allows_loss": bool(allows_loss)}
    return script("schema.sql", schema, **values)


def roles(schema: str) -> str:
    """Return the SQL that creates roles with the least privileges for an outbox."""
    return script("roles.sql", schema).replace("role_", f"{schema}_")


def create(
    server: Server,
    *,
    shards: int = 1,
    allows_loss: bool = False,
    connection: Any = None,  # noqa: ANN401 - of a library that the application chose
) -> None:
    """Create an outbox, in one transaction.

    Args:
        server: where the outbox is to be.
        shards: how many relays can share the work.
        allows_loss: whether commits may be acknowledged before they are on disk, where the
            server's ``synchronous_commit`` is off.
        connection: the application's connection, whose transaction it becomes part of.

    Raises:
        OutboxError: nothing was created; the schema exists, for instance.
    """
    text = creation(server.schema, shards=shards, allows_loss=allows_loss)
    if connection is not None:
        execute(connection, text)
        return
    with reported(server), server.connect() as own, own.transaction():
        own.execute(text)  # without values: any number of statements
