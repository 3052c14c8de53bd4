"""`SessionOutbox`: stores messages as part of a SQLAlchemy transaction.

Knows: sessions and connections of SQLAlchemy, including asynchronous ones, and the driver's
connection below them. Must never know: the tables of the outbox.

The message is a row in the transaction of the session: the commit stores it, and a rollback of the
transaction, or of the savepoint it was enqueued in, removes it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar
from uuid import uuid4

from sqlalchemy import Connection, Engine, event
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
)
from sqlalchemy.orm import Session, scoped_session

from reliablepub import ConfigurationError, Message, Outbox, ScheduleChange
from reliablepub.integrations.sqlalchemy_sqlite import begin_immediate, check_control
from reliablepub.integrations.threads import in_thread

T = TypeVar("T")
Within: TypeAlias = Session | scoped_session[Any] | Connection
"""The session or connection whose transaction a message joins. For a session with several engines,
give the connection: ``session.connection(bind_arguments={"mapper": Order})``."""
WithinAsync: TypeAlias = AsyncSession | async_scoped_session[Any] | AsyncConnection
"""The asynchronous session or connection whose transaction a message joins."""

_PREFIX: Final = "reliablepub"


@dataclass(slots=True)
class _Block:
    """A block of `SessionOutbox.joined`. A task that it starts has it in its context for good."""

    within: Within | WithinAsync
    has_ended: bool = False


_JOINED: Final[ContextVar[Mapping[str, tuple[_Block, ...]]]] = ContextVar("joined_outboxes")
"""The blocks of each `SessionOutbox`, the inner last, by a name that its pickled copies share."""


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
                if there is none. None: the transaction of `joined`; outside `joined`, the message
                is stored at once.

        Returns:
            The ``message_id``, or that of the first message with this key.

        Raises:
            ConfigurationError: the session is connected to another SQLite file, or the message
                would not be committed and rolled back with it (`immediate_transactions`).
            OutboxError: the message was not stored (`Outbox.enqueue`).
        """
        return self._through_or_alone(within, partial(self.outbox.enqueue, message, key=key))

    def enqueue_many(
        self, messages: Iterable[Message], *, within: Within | None = None
    ) -> list[str]:
        """Store many messages, as part of a transaction, and return their ids.

        Args:
            messages: read in chunks (`Outbox.enqueue_many`).
            within: as in `enqueue`; without a transaction, each chunk is stored at once.

        Raises:
            ConfigurationError: as in `enqueue`.
            OutboxError: a message was not stored; roll the transaction back.
        """
        return self._through_or_alone(within, partial(self.outbox.enqueue_many, messages))

    def cancel(self, key: str, *, note: str = "", within: Within | None = None) -> ScheduleChange:
        """Cancel the message with a key, unless it was sent, as part of a transaction.

        Args:
            key: the key that was given to `enqueue`.
            note: the reason, for ``reliablepub outbox explain``.
            within: as in `enqueue`.

        Returns:
            Whether the message was cancelled, it was already too late, or the key is unknown.

        Raises:
            ConfigurationError: the transaction cannot be joined (`Outbox.cancel`).
            OutboxError: nothing was changed (`Outbox.cancel`).
        """
        return self._through_or_alone(within, partial(self.outbox.cancel, key, note=note))

    def reschedule(
        self, key: str, not_before: datetime, *, note: str = "", within: Within | None = None
    ) -> ScheduleChange:
        """Reschedule the message with a key, unless it was sent, as part of a transaction.

        Args:
            key: the key that was given to `enqueue`.
            not_before: the new time, with a time zone; a time in the past sends the message now.
            note: the reason, for ``reliablepub outbox explain``.
            within: as in `enqueue`.

        Returns:
            Whether the message was rescheduled, it was already too late, or the key is unknown.

        Raises:
            ConfigurationError: the transaction cannot be joined (`Outbox.reschedule`).
            OutboxError: nothing was changed (`Outbox.reschedule`).
        """
        change = partial(self.outbox.reschedule, key, not_before, note=note)
        return self._through_or_alone(within, change)

    def _through_or_alone(self, within: Within | None, work: Callable[..., T]) -> T:
        target = self._target(within)
        return work() if target is None else _through(target, work)

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
        return await self._awaited(partial(self.enqueue, message, key=key), within)

    async def enqueue_many_async(
        self, messages: Iterable[Message], *, within: Within | WithinAsync | None = None
    ) -> list[str]:
        """Store many messages, as `enqueue_async` stores one.

        ``messages`` is read where the database is used, often in another thread: pass a list.
        """
        return await self._awaited(partial(self.enqueue_many, messages), within)

    async def _awaited(self, call: Callable[..., T], within: Within | WithinAsync | None) -> T:
        """Make a call with a session or connection that may be asynchronous, for a coroutine."""
        target = within if within is not None else self._joined()
        if isinstance(target, scoped_session | async_scoped_session):
            target = target()  # the session of this thread or task
        if isinstance(target, AsyncSession | AsyncConnection):
            return await target.run_sync(lambda sync: call(within=sync))
        return await in_thread(partial(call, within=target))

    @contextmanager
    def joined(self, within: Within | WithinAsync) -> Iterator[None]:
        """Make all messages in the block join a transaction, for code that cannot pass a session.

        The block covers its thread or task, and the tasks that it starts, until it ends. With an
        `AsyncSession`, a synchronous `enqueue` in the block must run within
        ``await session.run_sync(...)``.

        Args:
            within: session or connection whose transaction the messages join.

        Raises:
            ConfigurationError: the block ended in a different context from the one it began in, for
                instance because each step of a generator runs on a borrowed thread. Messages
                enqueued in between may not have joined the transaction.
        """
        block, joined = _Block(within), _JOINED.get({})
        token = _JOINED.set({**joined, self._name: (*joined.get(self._name, ()), block)})
        try:
            yield
        finally:
            block.has_ended = True
            try:
                _JOINED.reset(token)
            except ValueError as error:
                raise ConfigurationError(
                    "a `joined` block ended in another context than it began in, so messages may "
                    "not have joined its transaction: make the generator that contains the block "
                    "`async def`, or pass the session as `within`"
                ) from error

    @property
    def is_joined(self) -> bool:
        """Whether a block of `joined` is active, so that a message joins its transaction."""
        return self._joined() is not None

    def _joined(self) -> Within | WithinAsync | None:
        blocks = _JOINED.get({}).get(self._name, ())
        return next((block.within for block in reversed(blocks) if not block.has_ended), None)

    def create(self, connection: Connection) -> None:
        """Add the outbox to the database, if it is not there yet, in a migration.

        Args:
            connection: the connection, such as ``op.get_bind()`` of Alembic.

        Raises:
            ConfigurationError: the connection is to another SQLite file.
            OutboxError: the outbox was not added (`Outbox.create`).
        """
        _through(connection, self.outbox.create)

    def _target(self, within: Within | None) -> Within | None:
        target = within if within is not None else self._joined()
        if isinstance(target, async_scoped_session):
            target = target()
        if isinstance(target, AsyncSession):
            return target.sync_session
        if isinstance(target, AsyncConnection):
            if target.sync_connection is None:
                msg = "the connection has not started: await engine.connect(), or enter it"
                raise ConfigurationError(msg)
            return target.sync_connection
        return target


def immediate_transactions(engine: Engine | AsyncEngine) -> None:
    """Begin each transaction of a SQLite engine with ``BEGIN IMMEDIATE``.

    Savepoints are then rolled back with their transaction, and transactions that write wait for
    each other instead of failing with *database is locked*. In ``AUTOCOMMIT`` nothing is begun.

    Args:
        engine: an engine for SQLite, without ``autocommit`` in its ``connect_args``.
    """
    engine = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
    event.listen(engine, "begin", begin_immediate)  # once, however often this is called


def include_name(name: str | None, type_: str, _parents: object) -> bool:
    """Exclude the outbox from Alembic's comparison: ``context.configure(include_name=...)``.

    Without it, ``alembic revision --autogenerate`` would drop the tables of the outbox.

    Args:
        name: name of a schema, table or part of a table.
        type_: kind of the object, such as ``table``.
    """
    return type_ not in {"schema", "table"} or not (name or "").startswith(_PREFIX)


def _through(target: Within, work: Callable[..., T]) -> T:
    """Call ``work(connection=...)`` with the connection that an `Outbox` accepts.

    For SQLite that is the driver's own connection, below aiosqlite and SQLAlchemy.
    """
    connection = target if isinstance(target, Connection) else target.connection()
    if not connection.in_transaction():
        connection.begin()  # as its first statement would; a statement of the driver would not
    if connection.dialect.name != "sqlite":
        return work(connection=connection)
    driver = connection.connection.driver_connection
    is_async = connection.dialect.is_async
    own = driver._conn if is_async else driver  # type: ignore[union-attr]  # noqa: SLF001
    if not isinstance(own, sqlite3.Connection):
        msg = f"the driver {connection.dialect.driver} is not supported: use pysqlite or aiosqlite"
        raise ConfigurationError(msg)
    check_control(connection, own)
    if not is_async:
        return work(connection=own)
    # aiosqlite has no public way to run a function on its thread. Hooks need the caller's context.
    adapted: Any = connection.connection.dbapi_connection
    there = partial(copy_context().run, work, connection=own)
    done: T = adapted.run_async(lambda aio: aio._execute(there))  # noqa: SLF001
    return done
