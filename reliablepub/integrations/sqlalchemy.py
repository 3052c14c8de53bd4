"""`SessionOutbox`: messages that belong to a SQLAlchemy transaction.

Knows: sessions and connections of SQLAlchemy, also asynchronous ones, and which connection of the
driver is below them. Must never know: the tables of the outbox.

The message is a row in the transaction of the session: it is stored by its commit, and goes with
its rollback, or with that of the savepoint it was enqueued in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeVar
from uuid import uuid4

from sqlalchemy import Connection, Engine, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from reliablepub import Message, Outbox, ScheduleChange
from reliablepub.integrations.sqlalchemy_joining import Within, WithinAsync, through

T = TypeVar("T")

_JOINED: Final[ContextVar[Mapping[str, Within | WithinAsync]]] = ContextVar("joined_outboxes")
"""By `SessionOutbox`, and its pickled copies, such as that of a Celery application."""
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
        self._name = str(uuid4())

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
        return self._through_or_alone(within, partial(self.outbox.enqueue, message, key=key))

    def cancel(self, key: str, *, note: str = "", within: Within | None = None) -> ScheduleChange:
        """Cancel the message of a key, unless it was sent, as part of a transaction.

        Args:
            key: the key that was given to `enqueue`.
            note: the reason, for ``reliablepub outbox explain``.
            within: session or connection whose transaction this joins. None: that of `joined`, or
                else the message is cancelled at once.

        Returns:
            Whether the message was cancelled, it was too late, or the key is not known.

        Raises:
            ConfigurationError: the transaction cannot be joined (`Outbox.cancel`).
            OutboxError: nothing was changed (`Outbox.cancel`).
        """
        return self._through_or_alone(within, partial(self.outbox.cancel, key, note=note))

    def reschedule(
        self, key: str, not_before: datetime, *, note: str = "", within: Within | None = None
    ) -> ScheduleChange:
        """Send the message of a key at another time, unless it was sent; part of a transaction.

        Args:
            key: the key that was given to `enqueue`.
            not_before: the new time, with a time zone; one in the past sends the message now.
            note: the reason, for ``reliablepub outbox explain``.
            within: session or connection whose transaction this joins. None: that of `joined`, or
                else the message is rescheduled at once.

        Returns:
            Whether the message has its new time, it was too late, or the key is not known.

        Raises:
            ConfigurationError: the transaction cannot be joined (`Outbox.reschedule`).
            OutboxError: nothing was changed (`Outbox.reschedule`).
        """
        change = partial(self.outbox.reschedule, key, not_before, note=note)
        return self._through_or_alone(within, change)

    def _through_or_alone(self, within: Within | None, work: Callable[..., T]) -> T:
        target = self._target(within)
        return work() if target is None else through(target, work)

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
        target = within if within is not None else _JOINED.get({}).get(self._name)
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
        token = _JOINED.set({**_JOINED.get({}), self._name: within})
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
        through(connection, self.outbox.create)

    def _target(self, within: Within | None) -> Within | None:
        target = within if within is not None else _JOINED.get({}).get(self._name)
        if isinstance(target, AsyncSession):
            return target.sync_session
        if isinstance(target, AsyncConnection):
            return target.sync_connection
        return target


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
