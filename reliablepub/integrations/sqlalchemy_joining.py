"""How the driver's connection of a SQLAlchemy transaction is found, and code run through it.

Knows: sessions and connections of SQLAlchemy, and the drivers of SQLite below them. Must never
know: what is done through a connection.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, scoped_session

from reliablepub import ConfigurationError

T = TypeVar("T")
Within: TypeAlias = Session | scoped_session[Any] | Connection
"""Whose transaction a message joins. For a session with several engines, give the connection:
``session.connection(bind_arguments={"mapper": Order})``."""
WithinAsync: TypeAlias = AsyncSession | AsyncConnection
"""Whose transaction a message joins, with asyncio."""


def through(target: Within, work: Callable[..., T]) -> T:
    """Call ``work(connection=...)`` with what an `Outbox` takes for this session or connection."""
    connection = target if isinstance(target, Connection) else target.connection()
    if not connection.in_transaction():
        connection.begin()  # as its first statement would; the driver's connection alone does not
    if connection.dialect.name != "sqlite":
        return work(connection=connection)
    driver = connection.connection.driver_connection
    is_async = connection.dialect.is_async
    own = driver._conn if is_async else driver  # type: ignore[union-attr]  # noqa: SLF001
    if not isinstance(own, sqlite3.Connection):
        msg = f"the driver {connection.dialect.driver} is not supported: use pysqlite or aiosqlite"
        raise ConfigurationError(msg)
    if connection.in_nested_transaction() and _is_legacy(own):
        raise ConfigurationError(
            "the session is in a savepoint, and Python's sqlite3 begins no transaction before one: "
            "the message could be stored without it. Nothing was stored; call "
            "reliablepub.integrations.sqlalchemy.immediate_transactions(engine) at the start"
        )
    if not is_async:
        return work(connection=own)
    # aiosqlite has a thread for each connection, and no public way to run a function there.
    adapted: Any = connection.connection.dbapi_connection
    done: T = adapted.run_async(lambda aio: aio._execute(work, connection=own))  # noqa: SLF001
    return done


def _is_legacy(connection: sqlite3.Connection) -> bool:
    """Whether sqlite3 begins transactions itself, before INSERT, UPDATE and DELETE only."""
    has_autocommit = getattr(connection, "autocommit", None) in (True, False)
    return connection.isolation_level is not None and not has_autocommit
