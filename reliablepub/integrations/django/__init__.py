"""A Django application: messages that belong to ``transaction.atomic``, on SQLite and PostgreSQL.

Knows: Django's connections and settings. Must never know: the tables of the outbox.

Settings::

    INSTALLED_APPS = ["reliablepub.integrations.django", ...]
    RELIABLEPUB = {"URL": "amqp://...", "DATABASES": ["default"]}

``URL`` is for the command ``relay_outbox``. ``DATABASES`` names the databases that have an outbox:
without it, the default one.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections, transaction

from reliablepub import Message, Outbox, ScheduleChange
from reliablepub.integrations.django.databases import where_of

_OUTBOXES: Final[dict[tuple[str, str], Outbox]] = {}
"""By alias and name of the database, which Django's test runner replaces.

For messages only, which go through Django's connections: these outboxes open none to a server.
Django's test runner cannot drop a database while it has connections."""


class DjangoOutbox:
    """The outbox in one of Django's databases.

    Args:
        using: alias of the database.

    Example:
        The message exists if, and only if, the order does::

            with transaction.atomic():
                order = Order.objects.create(amount=250)
                DjangoOutbox().enqueue(Message(b"...", exchange="orders"))
    """

    def __init__(self, using: str = DEFAULT_DB_ALIAS) -> None:
        self.using: Final = using

    @property
    def where(self) -> str:
        """Path of the file, or URL of the database with its password: for a `Publisher`.

        Raises:
            ImproperlyConfigured: the database cannot hold an outbox.
        """
        return where_of(connections[self.using])

    @property
    def outbox(self) -> Outbox:
        """The outbox itself, to look at it or to intervene. It has connections of its own.

        Raises:
            ImproperlyConfigured: the database cannot hold an outbox.
        """
        return Outbox(self.where)

    def enqueue(self, message: Message, *, key: str | None = None) -> str:
        """Store one message, as part of the transaction of Django's connection.

        Within ``transaction.atomic`` the message is stored by the commit, and goes with the
        rollback, also with that of an inner block. Elsewhere it is stored at once.

        Args:
            message: the message. It gets a ``message_id`` if it has none.
            key: deduplication key (`Outbox.enqueue`).

        Returns:
            The ``message_id``, or that of the first message with this key.

        Raises:
            TransactionManagementError: the block has failed, and can only be rolled back.
            ImproperlyConfigured: the database cannot hold an outbox.
            OutboxError: the message was not stored (`Outbox.enqueue`).
            DatabaseError: PostgreSQL did not store the message, such as Django's `ProgrammingError`
                if there is no outbox: run ``migrate``.
        """
        outbox, connection = self._through()
        return outbox.enqueue(message, key=key, connection=connection)

    def cancel(self, key: str, *, note: str = "") -> ScheduleChange:
        """Cancel the message of a key, unless it was sent, as part of the transaction.

        Args:
            key: the key that was given to `enqueue`.
            note: the reason, for ``reliablepub outbox explain``.

        Returns:
            Whether the message was cancelled, it was too late, or the key is not known.

        Raises:
            TransactionManagementError: the block has failed, and can only be rolled back.
            ImproperlyConfigured: the database cannot hold an outbox.
            OutboxError: nothing was changed (`Outbox.cancel`).
        """
        with transaction.atomic(self.using):
            outbox, connection = self._through()
            return outbox.cancel(key, note=note, connection=connection)

    def reschedule(self, key: str, not_before: datetime, *, note: str = "") -> ScheduleChange:
        """Send the message of a key at another time, unless it was sent; part of the transaction.

        Args:
            key: the key that was given to `enqueue`.
            not_before: the new time, with a time zone; one in the past sends the message now.
            note: the reason, for ``reliablepub outbox explain``.

        Returns:
            Whether the message has its new time, it was too late, or the key is not known.

        Raises:
            TransactionManagementError: the block has failed, and can only be rolled back.
            ImproperlyConfigured: the database cannot hold an outbox.
            OutboxError: nothing was changed (`Outbox.reschedule`).
        """
        with transaction.atomic(self.using):
            outbox, connection = self._through()
            return outbox.reschedule(key, not_before, note=note, connection=connection)

    def _through(self) -> tuple[Outbox, Any]:
        """Return the outbox, and what it takes for Django's connection."""
        connection = connections[self.using]
        at = (self.using, str(connection.settings_dict["NAME"]))
        if at not in _OUTBOXES:
            _OUTBOXES[at] = self.outbox
        connection.ensure_connection()
        connection.validate_no_broken_transaction()
        is_file = connection.vendor == "sqlite"
        through = connection.connection if is_file else connection
        return _OUTBOXES[at], through

    def __repr__(self) -> str:
        """Name the database."""
        return f"DjangoOutbox({self.using!r})"


def aliases() -> list[str]:
    """Return the aliases of the databases that have an outbox."""
    return list(option("DATABASES", [DEFAULT_DB_ALIAS]))


def option(name: str, default: Any) -> Any:  # noqa: ANN401 - whatever the settings hold
    """Return a value of the setting ``RELIABLEPUB``."""
    return getattr(settings, "RELIABLEPUB", {}).get(name, default)
