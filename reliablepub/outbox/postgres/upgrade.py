"""Gives an outbox of an earlier version the tables, functions and views of this one.

Knows: the steps in ``upgrade.sql``, one for each version. Must never know: what a table or a
function is for.
"""

from __future__ import annotations

from typing import Any, Final

import psycopg

from reliablepub.errors import NotAnOutbox
from reliablepub.outbox.postgres.server import Server, emptied, refuse_version, reported
from reliablepub.outbox.postgres.sql import (
    VERSION,
    changed,
    named,
    recreation,
    within,
)
from reliablepub.outbox.queries import steps_of

_LOCK_S: Final = 10
"""Seconds to wait for locks of applications and relays."""


def upgrade(server: Server) -> list[str]:
    """Upgrade the outbox, in one transaction; return what was done."""
    with reported(server), server.connect() as own, own.transaction():
        own.execute(f"SET LOCAL lock_timeout = '{_LOCK_S:d}s'")
        done, text = _needed(server, own)
        own.execute(text.encode())  # without values: any number of statements
        return done


def upgrade_sql(server: Server) -> str:
    """Return the SQL that `upgrade` would run; empty if there is nothing to do."""
    with reported(server), server.connect() as own:
        return _needed(server, own)[1]


def _needed(server: Server, own: psycopg.Connection[Any]) -> tuple[list[str], str]:
    """Return what is to be done, in words and in SQL."""
    texts, schema = named(server.schema), server.schema
    if not own.execute(texts["is_there"].replace(":schema", "%s").encode(), (schema,)).fetchone():
        raise NotAnOutbox(f"{server} holds no outbox; create it: `reliablepub outbox create`")
    found = own.execute(texts["outbox"].encode()).fetchone()
    if found is None:
        raise emptied(server)
    version, shards, _ = found
    steps = steps_of(__package__)
    if not min(steps) <= version <= VERSION:
        raise refuse_version(server, version)
    bodies = {name: body for _, name, body in own.execute(texts["functions"].encode())}
    others = changed(schema, shards, bodies)
    done = [f"function {name} is that of this version" for name in others]
    text = ""
    if version < VERSION:
        done = [f"tables of version {version} are now of version {VERSION}", *done]
        text = "".join(within(schema, steps[number]) for number in range(version, VERSION))
    return done, text + recreation(schema, shards) if done else ""
