"""`SessionOutbox`: messages that belong to a SQLAlchemy transaction.

Knows: sessions and connections of SQLAlchemy, also asynchronous ones, and which connection of the
driver is below them. Must never know: the tables of the outbox.

The message is a row in the transaction of the session: it is stored by its commit, and goes with
its rollback, or with that of the savepoint it was enqueued in.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from sqlalchemy import Connection, Engine, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session, scoped_session

from reliablepub import ConfigurationError, Message, Outbox

Within: TypeAlias = Session | scoped_session[Any] | Connection
"""Whose transaction a message joins. For a session with several engines, give the connection:
``session.connection(bind_arguments={"mapper": Order})``."""
WithinAsync: TypeAlias = AsyncSession | AsyncConnection
"""Whose transaction a message joins, with asyncio."""
T = TypeVar("T")

_JOINED: Final[ContextVar[Mapping[SessionOutbox, Within | WithinAsync]]] = ContextVar(
    "reliablepub_sqlalchemy"
)
_PREFIX: Final = "reliablepub"


class SessionOutbox:
    """An outbox in the database of SQLAlchemy sessions.

    Args:
        outbox: the outbox, in the database that the sessions use.

    Example:
        The message exists if, and only if, the order does::

            with Session(engine) as session, session.begin():
                session.add(order)
                outbox.enqueue(Message(b"..."), within=session)
    """

    def __init__(self, outbox: Outbox) -> None:
        self.outbox: Final = outbox

    def enqueue(
        self, message: Message, *, key: str | None = None, within: Within | None = None
    ) -> str:
        """Store one message, as part of a transaction.

        Args:
            message: the message. It gets a ``message_id`` if it has none.
            key: deduplication key (`Outbox.enqueue`).
            within: session or connection whose transaction the message joins; a transaction begins
                if there is none. None: that of `joined`, or else the message is stored at once.

        Returns:
            The ``message_id``, or that of the first message with this key.

        Raises:
            ConfigurationError: the session is connected to another database, or its savepoint would
                not be rolled back with its transaction (`immediate_transactions`).
            OutboxError: the message was not stored (`Outbox.enqueue`).
        """
        target = self._target(within)
        if target is None:
            return self.outbox.enqueue(message, key=key)
        return _through(target, partial(self.outbox.enqueue, message, key=key))

    async def enqueue_async(
        self,
        message: Message,
        *,
        key: str | None = None,
        within: Within | WithinAsync | None = None,
    ) -> str:
        """Store one message, as part of the transaction of an `AsyncSession` or `AsyncConnection`.

        The arguments, results and errors are those of `enqueue`.
        """
        target = within if within is not None else _JOINED.get({}).get(self)
        if isinstance(target, AsyncSession | AsyncConnection):
            return await target.run_sync(lambda sync: self.enqueue(message, key=key, within=sync))
        return await asyncio.to_thread(self.enqueue, message, key=key, within=target)

    @contextmanager
    def joined(self, within: Within | WithinAsync) -> Iterator[None]:
        """Have all messages of the block join a transaction, where no session can be passed.

        The block covers its thread or task, and the tasks that it starts. With an `AsyncSession`,
        a synchronous `enqueue` in the block runs below ``await session.run_sync(...)``.

        Args:
            within: session or connection whose transaction the messages join.
        """
        token = _JOINED.set({**_JOINED.get({}), self: within})
        try:
            yield
        finally:
            _JOINED.reset(token)

    def create(self, connection: Connection) -> None:
        """Add the outbox to the database, if it is not there yet: for a migration.

        Args:
            connection: the connection, such as ``op.get_bind()`` of Alembic.

        Raises:
            ConfigurationError: the connection is to another database.
            OutboxError: the outbox was not added (`Outbox.create`).
        """
        _through(connection, self.outbox.create)

    def _target(self, within: Within | None) -> Within | None:
        target = within if within is not None else _JOINED.get({}).get(self)
        if isinstance(target, AsyncSession):
            return target.sync_session
        if isinstance(target, AsyncConnection):
            return target.sync_connection
        return target


def _through(target: Within, work: Callable[..., T]) -> T:
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


def immediate_transactions(engine: Engine | AsyncEngine) -> None:
    """Have each transaction of a SQLite engine begin with ``BEGIN IMMEDIATE``.

    Savepoints are then rolled back with their transaction, and transactions that write wait for
    each other in place of *database is locked*. Call it before the engine is used.

    Args:
        engine: an engine for SQLite.
    """
    engine = engine.sync_engine if isinstance(engine, AsyncEngine) else engine

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _record: object) -> None:  # noqa: ANN401 - the driver's
        connection.isolation_level = None  # sqlite3 begins no transaction of its own

    @event.listens_for(engine, "begin")
    def _begun(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def include_name(name: str | None, type_: str, _parents: object) -> bool:
    """Leave the outbox out of what Alembic compares: ``context.configure(include_name=...)``.

    Without it, ``alembic revision --autogenerate`` would drop the tables of the outbox.

    Args:
        name: name of a schema, table or part of a table.
        type_: what has the name, such as ``table``.
    """
    return type_ not in {"schema", "table"} or not (name or "").startswith(_PREFIX)
