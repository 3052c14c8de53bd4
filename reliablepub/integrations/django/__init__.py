"""Stores messages as part of Django's ``transaction.atomic``, on SQLite and PostgreSQL.

Knows: Django's connections, settings and database backends. Must never know: the tables of the
outbox.

Settings::

    INSTALLED_APPS = ["reliablepub.integrations.django", ...]
    RELIABLEPUB = {"URL": "amqp://...", "DATABASES": ["default"]}

``URL`` is used by the command ``relay_outbox``. ``DATABASES`` names the databases that have an
outbox; by default, the default database.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote, unquote, urlencode, urlsplit

from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from reliablepub import Message, Outbox, ScheduleChange

_HOST: Final = re.compile(r"[\w.-]+")
"""A name or an IPv4 address. Sockets, IPv6 addresses and lists are parameters of the URL."""
_OUTBOXES: Final[dict[tuple[str, str], Outbox]] = {}
"""By alias and name of the database, which Django's test runner changes.

They only enqueue through Django's connections, and open none of their own to a server: Django's
test runner cannot drop a database that has connections."""


_WARNED: Final[set[str]] = set()
_LOGGER: Final = logging.getLogger("reliablepub.outbox")


class DjangoOutbox:
    """The outbox in one of Django's databases.

    Args:
        using: alias of the database, from the setting ``DATABASES``; by default the first.

    Example:
        The message exists if, and only if, the order does::

            with transaction.atomic():
                order = Order.objects.create(amount=250)
                DjangoOutbox().enqueue(Message(b"...", exchange="orders"))
    """

    def __init__(self, using: str | None = None) -> None:
        self._using = using

    @property
    def using(self) -> str:
        """Alias of the database.

        Raises:
            ImproperlyConfigured: the setting ``DATABASES`` does not name it, so no relay serves it.
        """
        known = aliases()
        using = known[0] if self._using is None else self._using
        if using not in known:
            raise ImproperlyConfigured(
                f"database {using!r} has no outbox that `relay_outbox` relays: name it in the "
                'setting RELIABLEPUB = {"DATABASES": [...]}, which has '
                f"{', '.join(map(repr, known))}"
            )
        return using

    @property
    def where(self) -> str:
        """Path of the file, or URL of the database with its password: for a `Publisher`.

        Raises:
            ImproperlyConfigured: the database cannot hold an outbox.
        """
        return where_of(connections[self.using])

    @property
    def outbox(self) -> Outbox:
        """The `Outbox`, to inspect it or to intervene. It uses its own connections.

        Raises:
            ImproperlyConfigured: the database cannot hold an outbox.
        """
        return Outbox(self.where)

    @property
    def is_joined(self) -> bool:
        """Whether messages join an open transaction, such as that of an atomic block."""
        connection = connections[self.using]
        is_connected = connection.connection is not None
        return connection.in_atomic_block or (is_connected and not connection.autocommit)

    def enqueue(self, message: Message, *, key: str | None = None) -> str:
        """Store one message, as part of the transaction of Django's connection.

        Within ``transaction.atomic``, the commit stores the message, and a rollback, even of an
        inner block, removes it. Outside a transaction, it is stored at once.

        Args:
            message: the message. It gets a ``message_id`` if it has none.
            key: deduplication key (`Outbox.enqueue`).

        Returns:
            The ``message_id``, or that of the first message with this key.

        Raises:
            TransactionManagementError: the block has failed, and can only be rolled back.
            ImproperlyConfigured: the database cannot hold an outbox.
            OutboxError: the message was not stored (`Outbox.enqueue`).
            DatabaseError: PostgreSQL did not store the message. Django raises its
                `ProgrammingError` if there is no outbox (run ``migrate``), or if this user may not
                use it (a note on the error names the role).
        """
        outbox, connection = self._through()
        return outbox.enqueue(message, key=key, connection=connection)

    async def enqueue_async(self, message: Message, *, key: str | None = None) -> str:
        """Store one message from a coroutine, on the thread that asgiref keeps for Django.

        Within ``async_to_sync``, this is the caller's thread, so the message joins the caller's
        ``transaction.atomic``. The arguments, results and errors are those of `enqueue`.
        """
        return await sync_to_async(self.enqueue)(message, key=key)

    def enqueue_many(self, messages: Iterable[Message]) -> list[str]:
        """Store many messages, as part of the transaction; outside one, all or none.

        Args:
            messages: read in chunks (`Outbox.enqueue_many`).

        Returns:
            The ``message_id`` of each, in order.

        Raises:
            TransactionManagementError: the block has failed, and can only be rolled back.
            ImproperlyConfigured: the database cannot hold an outbox.
            OutboxError: nothing was stored (`Outbox.enqueue_many`).
            DatabaseError: as in `enqueue`.
        """
        with transaction.atomic(self.using):
            outbox, connection = self._through()
            return outbox.enqueue_many(messages, connection=connection)

    async def enqueue_many_async(self, messages: Iterable[Message]) -> list[str]:
        """Store many messages from a coroutine, as `enqueue_async` stores one."""
        return await sync_to_async(self.enqueue_many)(messages)

    def cancel(self, key: str, *, note: str = "") -> ScheduleChange:
        """Cancel the message with a key, unless it was sent, as part of the transaction.

        Args:
            key: the key that was given to `enqueue`.
            note: the reason, for ``reliablepub outbox explain``.

        Returns:
            Whether the message was cancelled, it was already too late, or the key is unknown.

        Raises:
            TransactionManagementError: the block has failed, and can only be rolled back.
            ImproperlyConfigured: the database cannot hold an outbox.
            OutboxError: nothing was changed (`Outbox.cancel`).
        """
        with transaction.atomic(self.using):
            outbox, connection = self._through()
            return outbox.cancel(key, note=note, connection=connection)

    def reschedule(self, key: str, not_before: datetime, *, note: str = "") -> ScheduleChange:
        """Reschedule the message with a key, unless it was sent, as part of the transaction.

        Args:
            key: the key that was given to `enqueue`.
            not_before: the new time, with a time zone; a time in the past sends the message now.
            note: the reason, for ``reliablepub outbox explain``.

        Returns:
            Whether the message was rescheduled, it was already too late, or the key is unknown.

        Raises:
            TransactionManagementError: the block has failed, and can only be rolled back.
            ImproperlyConfigured: the database cannot hold an outbox.
            OutboxError: nothing was changed (`Outbox.reschedule`).
        """
        with transaction.atomic(self.using):
            outbox, connection = self._through()
            return outbox.reschedule(key, not_before, note=note, connection=connection)

    def _through(self) -> tuple[Outbox, Any]:
        """Return the outbox, and Django's connection in the form that it accepts."""
        connection = connections[self.using]
        if not connection.in_atomic_block:
            _warn_of_others(self.using)
        at = (self.using, str(connection.settings_dict["NAME"]))
        if at not in _OUTBOXES:
            _OUTBOXES[at] = self.outbox
        connection.ensure_connection()
        connection.validate_no_broken_transaction()
        return _OUTBOXES[at], accepted(connection)

    def __repr__(self) -> str:
        """Name the database."""
        return f"DjangoOutbox({'' if self._using is None else repr(self._using)})"


def _warn_of_others(using: str) -> None:
    """Warn once if the only open transactions are of databases that the message does not join."""
    others = {one.alias for one in connections.all(initialized_only=True) if one.in_atomic_block}
    if others and using not in _WARNED:
        _WARNED.add(using)
        _LOGGER.warning(
            "a message is stored at once in database %r, while a transaction of %s is open, whose "
            "rollback does not remove it: name that database, DjangoOutbox(using=...), or use "
            "transaction.atomic(using=%r)",
            using,
            ", ".join(map(repr, sorted(others))),
            using,
            extra={"event": "outside_of_transaction"},
        )


def accepted(connection: BaseDatabaseWrapper) -> Any:  # noqa: ANN401 - a connection of any driver
    """Return Django's connection in the form that an `Outbox` accepts: for SQLite, the driver's."""
    return connection.connection if connection.vendor == "sqlite" else connection


def where_of(connection: BaseDatabaseWrapper) -> str:
    """Return the path or URL, with its password, by which an `Outbox` opens a Django database.

    Django's test runner changes the names of databases, so do not keep the result.

    Raises:
        ImproperlyConfigured: the database cannot hold an outbox.
    """
    if connection.vendor == "postgresql":
        return _url(connection)
    if connection.vendor != "sqlite":
        raise ImproperlyConfigured(
            f"database {connection.alias!r} is of {connection.vendor}; an outbox needs SQLite or "
            "PostgreSQL"
        )
    name = str(connection.settings_dict["NAME"])
    path = unquote(urlsplit(name).path) if name.startswith("file:") else name
    if path == ":memory:" or "mode=memory" in name:
        raise ImproperlyConfigured(
            f"database {connection.alias!r} is in memory, which cannot hold an outbox; for tests, "
            'give it a file: DATABASES = {"default": {..., "TEST": {"NAME": "test.db"}}}'
        )
    return path


def _url(connection: BaseDatabaseWrapper) -> str:
    from psycopg import pq  # noqa: PLC0415 - only an outbox on PostgreSQL needs it

    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    given: dict[str, Any] = connection.get_connection_params()  # Django's own options are in it too
    options = {
        name: str(value) for name, value in given.items() if name in known and value is not None
    }
    host = ""
    if _HOST.fullmatch(options.get("host", "")):
        host = options.pop("host")
        if options.get("port", "").isdecimal():
            host += ":" + options.pop("port")
    database = quote(options.pop("dbname", ""), "")
    return f"postgresql://{host}/{database}?{urlencode(options, quote_via=quote)}"


def aliases() -> list[str]:
    """Return the aliases of the databases that have an outbox."""
    return list(option("DATABASES", [DEFAULT_DB_ALIAS]))


def option(name: str, default: Any) -> Any:  # noqa: ANN401 - whatever the settings hold
    """Return a value of the setting ``RELIABLEPUB``."""
    return getattr(settings, "RELIABLEPUB", {}).get(name, default)
