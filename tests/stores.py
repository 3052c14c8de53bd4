"""The kinds of stores that a test runs on: `STORES`, and `DURABLE` ones.

Knows: how a store of each kind is opened, and what it needs. Must never know: what a store
promises.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from reliablepub.outbox.entry import TRANSIENT, RunEnded, Store
from reliablepub.outbox.memory import MemoryStore
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.waiting import until

POSTGRES: Final = pytest.param("postgres", marks=pytest.mark.postgres)
DURABLE: Final = ("sqlite", POSTGRES)
"""Kinds of stores whose messages outlive the process."""
STORES: Final = ("sqlite", "memory", POSTGRES)
"""All kinds."""

Where = Path | str
"""What `Publisher` and `Outbox` take: the path of a file, or the URL of a database."""


def outbox_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> Where | None:
    """Where the outbox of a test is, or is to be; None in memory."""
    if kind == "memory":
        return None
    if kind == "sqlite":
        return folder / "outbox.db"
    url: str = request.getfixturevalue("postgres_outbox")
    return url


def open_store(
    where: Where | None, clock: Callable[[], float] = time.time, **settings: Any
) -> Store:
    """Open a store as its relay does; None is the one in memory.

    Args:
        where: the outbox.
        clock: of the wall.
        settings: ``keys`` and ``keep_confirmed_s``, of those that are kept.
    """
    if where is None:
        return MemoryStore()
    if isinstance(where, Path):
        return SqliteStore(where, clock=clock, **settings)
    from reliablepub.outbox.postgres.server import Server  # noqa: PLC0415 - it needs psycopg
    from reliablepub.outbox.postgres.store import PostgresStore  # noqa: PLC0415

    return PostgresStore(Server.of(where), clock=clock, **settings)


def begin_anew(store: Store) -> RunEnded:
    """Look, as the relay does, until the store has begun another run; return what it tells."""
    ended: list[RunEnded] = []

    def look() -> bool:
        try:
            store.changed_elsewhere()
        except RunEnded as error:
            ended.append(error)
        except TRANSIENT:
            pass
        return bool(ended)

    until(look)
    return ended[0]
