"""Stores messages, also within a transaction of the application.

Knows: the columns that an enqueuer fills, deduplication keys, limits, the kinds of connections that
applications have. Must never know: the relay.

An enqueuer inserts a row, and changes no row that another enqueuer changes. A connection of the
application is psycopg's, psycopg2's, Django's or SQLAlchemy's, and raises the errors of its
library, which the application may handle.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, TypeAlias

import psycopg
from psycopg.rows import tuple_row

from reliablepub.errors import (
    ConfigurationError,
    InvalidMessage,
    OutboxError,
    OutboxLocked,
    OutboxUnsure,
)
from reliablepub.outbox.database import KEYS_KEPT_S, unfit_connection
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import Counters, Entry, OpenLimits, named_of, size_of
from reliablepub.outbox.postgres.columns import ENQUEUED, arrays, texts_of
from reliablepub.outbox.postgres.server import (
    Link,
    Pool,
    Row,
    Server,
    Step,
    Values,
    check_texts,
    emptied,
    reaction_to,
)
from reliablepub.outbox.postgres.sql import for_dbapi, for_psycopg, named
from reliablepub.outbox.rows import plain_row_of

LIMITS_S: Final = 0.2
"""Maximum age of the counts that limits are compared with."""
KEY_BYTES_MAX: Final = 2_600
"""Maximum size of a deduplication key. A row of an index has room for some bytes more."""
_TRIES: Final = 3


class Enqueuing:
    """Stores messages in one outbox, from any number of threads."""

    def __init__(self, server: Server, pool: Pool) -> None:
        self._server = server
        self._pool = pool
        self._counted = Counters()
        self._counted_at = float("-inf")

    def enqueue(
        self,
        new: Sequence[Entry],
        keys: OutboxKeys | None,
        limits: OpenLimits,
        connection: Any,  # noqa: ANN401 - of a library that the application chose, or None
    ) -> None:
        """Store messages by one statement, in the transaction of `connection` or in its own.

        After an `OutboxError` other than `OutboxUnsure`, none is stored.
        """
        with self._ready(new, limits, connection) as (link, run):
            statement = _statement(new, keys, run)
            if link is None:
                run(statement)
            else:
                self._store(link, new, statement)

    def enqueue_once(
        self,
        entry: Entry,
        key: str,
        keys: OutboxKeys | None,
        limits: OpenLimits,
        connection: Any,  # noqa: ANN401 - of a library that the application chose, or None
    ) -> str:
        """Store a message, as `enqueue`, unless its key is known; return the id that has the key.

        That of this message if it was stored.
        """
        with self._ready([entry], limits, connection) as (link, run):
            statement = _statement_once(entry, key, keys, run)
            first: Step = ("first_with_key", {"key": key})
            for _ in range(_TRIES):
                if link is None:
                    is_stored, is_unsure = bool(run(statement)), False
                else:
                    is_stored, is_unsure = self._store(link, [entry], statement)
                if is_stored:  # else another message has the key
                    return str(entry.message.message_id)
                try:
                    found = run(first)
                except OutboxError as error:
                    if not is_unsure:
                        raise
                    # The key may be the one that this message was stored with.
                    raise self._unsure([entry], error) from error
                if found:  # else the key was forgotten meanwhile: the message must be stored
                    (known,) = found
                    return known.decode() if isinstance(known, bytes) else str(known)
        raise OutboxLocked(
            f"message {entry.message.message_id} was not stored: other processes keep storing and "
            "cancelling messages with its key; try again"
        )

    @contextmanager
    def _ready(
        self,
        new: Sequence[Entry],
        limits: OpenLimits,
        connection: Any,  # noqa: ANN401 - of a library that the application chose, or None
    ) -> Iterator[tuple[Link | None, Run]]:
        """Check the limits. Give what runs a statement, and the link unless it is `connection`."""
        with self._pool.link() as link:
            self._check_limits(link, new, limits)
            if connection is None:
                yield link, lambda step: next(iter(link.rows(*step)), ())
                return
        texts = named(self._server.schema)
        # On the application's connection even ids are drawn: it may be to another database.
        yield None, lambda step: execute(connection, texts[step[0]], step[1])

    def _store(self, link: Link, new: Sequence[Entry], statement: Step) -> tuple[bool, bool]:
        """Return whether a statement stored messages, and whether that an earlier try did."""
        is_unsure = False  # an earlier try may have stored them
        for _ in range(_TRIES):
            try:
                return bool(link.store(statement)), is_unsure
            except (psycopg.Error, OutboxError) as error:
                is_taken = isinstance(error, psycopg.errors.UniqueViolation)
                if is_taken and is_unsure and self._is_there(link, new[0]):
                    return True, is_unsure
                failure, may_be_stored, is_passing = reaction_to(self._server, error)
                # If they were stored, they are now stored again under the same message ids, unless
                # their numbers were drawn before.
                is_unsure |= may_be_stored
                if not is_passing:
                    break
        if is_unsure:
            raise self._unsure(new, failure) from failure
        raise failure

    def _unsure(self, new: Sequence[Entry], failure: OutboxError) -> OutboxUnsure:
        return OutboxUnsure(
            f"{named_of(new)}: the connection to outbox {self._server} was lost, so it is unknown "
            "whether this is stored; enqueuing it again under the same id costs a duplicate at "
            f"most ({failure})"
        )

    def _is_there(self, link: Link, entry: Entry) -> bool:
        """Whether the row with the number that was drawn for an entry is its own.

        After a fail-over to a replica that lagged, another message may have got the number.
        """
        try:
            found = link.read("message_id_of", {"id": entry.id}) if entry.id else []
            link.flush()
        except (psycopg.Error, OutboxError):  # an enqueuer may not read it
            return False
        return [name.decode() for (name,) in found] == [entry.message.message_id]

    def _check_limits(self, link: Link, new: Sequence[Entry], limits: OpenLimits) -> None:
        """Compare the limits with counts of at most `LIMITS_S` ago plus this object's messages."""
        if limits.are_none:
            return
        if time.monotonic() - self._counted_at > LIMITS_S:
            [counts] = link.read("ledger", {})
            if None in counts:  # sums over no turns
                raise emptied(self._server)
            self._counted, self._counted_at = Counters(*counts), time.monotonic()
        limits.check(self._counted, new, str(self._server))
        stored = self._counted.stored + len(new)
        size = self._counted.open_bytes + sum(map(size_of, new))
        self._counted = replace(self._counted, stored=stored, open_bytes=size)


Run: TypeAlias = Callable[[Step], Row]
"""Runs a statement; returns its first row, or an empty one."""


def _statement(new: Sequence[Entry], keys: OutboxKeys | None, run: Run) -> Step:
    """Return the statement that stores messages, and its values."""
    for entry in new:
        check_texts(texts_of(entry.message))
    if keys is not None:  # the encryption binds the id
        (drawn,) = run(("draw_ids", {"count": len(new)}))
        for entry, id_ in zip(new, drawn, strict=True):
            entry.id = id_
    # The connection may be the application's, whose settings stay.
    settings = {"is_own": False, "allows_loss": False}
    found = [_columns_of(entry, keys) for entry in new]
    if len(found) == 1:
        return "enqueue", settings | dict(zip(_COLUMNS, found[0], strict=True))
    return "enqueue_many", settings | arrays(ENQUEUED, found)


def _statement_once(entry: Entry, key: str, keys: OutboxKeys | None, run: Run) -> Step:
    """Return the statement that stores a message unless its key is known, and its values."""
    check_texts({"key": key})
    if (size := len(key.encode())) > KEY_BYTES_MAX:
        limit = f"and PostgreSQL can index at most {KEY_BYTES_MAX}"
        raise InvalidMessage("key", f"has {size} bytes, {limit}; use a hash of it")
    _, values = _statement([entry], keys, run)
    return "enqueue_once", {**values, "key": key, "kept_until": entry.stored_at + KEYS_KEPT_S}


def _columns_of(entry: Entry, keys: OutboxKeys | None) -> tuple[Any, ...]:
    """Return the values that an enqueuer stores."""
    times = entry.due_at, entry.expires_at
    return *plain_row_of(entry, keys), *times, entry.message.ordering_key


_COLUMNS: Final = (
    *("id", "message_id", "exchange", "routing_key", "properties", "stored_at"),
    *("size", "checksum", "body", "due_at", "expires_at", "ordering_key"),
)


_ASYNC: Final = ("asyncpg.", "sqlalchemy.ext.asyncio.")
"""Modules of asynchronous connections, some of which cannot be entered."""
_AT_ONCE: Final = {"stream_results": False, "yield_per": None}
"""Overrides options of the application's connection: a cursor of the server changes no table."""


@contextmanager
def _hinting() -> Iterator[None]:
    """Note on an error of the application's own library what a missing privilege needs."""
    try:
        yield
    except Exception as error:
        if "permission denied for" in str(error):
            error.add_note(
                "to enqueue, this user needs the role <schema of the outbox>_enqueuer, which "
                "`reliablepub outbox create --roles` makes"
            )
        raise


@_hinting()
def execute(
    connection: Any,  # noqa: ANN401 - of a library that the application chose
    text: str,
    values: Values | None = None,
) -> tuple[Any, ...]:
    """Run a statement on the application's connection; return its first row, or an empty one."""
    connection, is_sqlalchemy = _known(connection)
    if is_sqlalchemy:
        if values is None:
            _run_script(connection, text)
            return ()
        return _run_statement(connection, text, values)
    with _cursor(connection) as cursor:
        if values is None:
            if _is_pipelined(connection):
                raise ConfigurationError(
                    "the connection is in pipeline mode, which runs no script; create the outbox "
                    "before or after the pipeline"
                )
            cursor.execute(text)
            return ()
        # Bodies as text would be twice as long, and cost four times as much.
        form = for_psycopg if isinstance(cursor, psycopg.Cursor) else for_dbapi
        cursor.execute(form(text), values)
        row = cursor.fetchone() or ()
        return tuple(row.values()) if isinstance(row, dict) else tuple(row)


def execute_text(
    connection: Any,  # noqa: ANN401 - of a library that the application chose
    text: str,
) -> list[tuple[Any, ...]]:
    """Run a statement with literal values on the application's connection; return its rows."""
    connection, is_sqlalchemy = _known(connection)
    if is_sqlalchemy:  # without parameters, or a driver would take each % for a placeholder
        options = {"no_parameters": True, **_AT_ONCE}
        found = connection.exec_driver_sql(text, execution_options=options)
        return [tuple(row) for row in found] if found.returns_rows else []
    with _cursor(connection) as cursor:
        if _is_pipelined(connection):
            # Only after a sync does psycopg know whether there are rows.
            with connection.pipeline() as pipeline:
                cursor.execute(text)
                pipeline.sync()
        else:
            cursor.execute(text)
        rows = cursor.fetchall() if cursor.description else []
        return [tuple(row.values() if isinstance(row, dict) else row) for row in rows]


def _is_pipelined(connection: Any) -> bool:  # noqa: ANN401 - of any library
    """Whether it is a connection of psycopg within ``with connection.pipeline()``."""
    return (
        isinstance(connection, psycopg.Connection)
        and connection.pgconn.pipeline_status != psycopg.pq.PipelineStatus.OFF
    )


def _cursor(connection: Any) -> Any:  # noqa: ANN401 - of any library
    """Return a cursor that returns rows as tuples, as far as the library lets its caller choose."""
    if isinstance(connection, psycopg.Connection):
        if issubclass(connection.cursor_factory, psycopg.RawCursor):  # has no values by name
            return psycopg.Cursor(connection, row_factory=tuple_row)
        return connection.cursor(row_factory=tuple_row)
    return connection.cursor()


def _known(connection: Any) -> tuple[Any, bool]:  # noqa: ANN401 - of any library
    """Return the connection to use, and whether it is SQLAlchemy's."""
    module = type(connection).__module__
    is_async = hasattr(connection, "__aenter__") or module.startswith(_ASYNC)
    if not is_async and hasattr(connection, "get_bind"):  # SQLAlchemy's Session
        connection = connection.connection()
    if not is_async and hasattr(connection, "exec_driver_sql"):  # SQLAlchemy's Connection
        return connection, True
    if is_async or isinstance(connection, sqlite3.Connection) or not hasattr(connection, "cursor"):
        needed = "the outbox needs a connection of psycopg, psycopg2, Django or SQLAlchemy"
        raise unfit_connection(connection, needed)
    return connection, False


def _run_statement(connection: Any, text: str, values: Values) -> tuple[Any, ...]:  # noqa: ANN401
    """Run a statement on a `Connection` of SQLAlchemy; return its first row, or an empty one."""
    from sqlalchemy import text as of  # noqa: PLC0415 - the application has it
    from sqlalchemy.exc import StatementError  # noqa: PLC0415

    try:
        found = connection.execute(of(text), values, execution_options=_AT_ONCE)
        return tuple(found.first() or ())
    except StatementError as error:
        error.hide_parameters = True  # its text would show the body and the headers
        raise


def _run_script(connection: Any, text: str) -> None:  # noqa: ANN401 - SQLAlchemy's
    """Run several statements on a `Connection` of SQLAlchemy, in its transaction."""
    if connection.dialect.driver != "asyncpg":
        # With parameters, even none, a driver would take each % for a placeholder.
        connection.exec_driver_sql(text, execution_options={"no_parameters": True})
        return
    # SQLAlchemy has asyncpg prepare each text, and PostgreSQL prepares single statements only.
    connection.exec_driver_sql("SELECT 1")  # makes SQLAlchemy begin asyncpg's transaction
    connection.connection.dbapi_connection.run_async(lambda own: own.execute(text))
