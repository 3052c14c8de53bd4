"""A Django application: messages that belong to ``transaction.atomic``.

Knows: Django's connections and settings. Must never know: the tables of the outbox.

Settings::

    INSTALLED_APPS = ["reliablepub.integrations.django", ...]
    RELIABLEPUB = {"URL": "amqp://...", "DATABASES": ["default"]}

``URL`` is for the command ``relay_outbox``. ``DATABASES`` names the databases that have an outbox:
without it, the default one.
"""

from __future__ import annotations

from typing import Any, Final

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from reliablepub import Message, Outbox

_OUTBOXES: Final[dict[str, Outbox]] = {}


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
    def outbox(self) -> Outbox:
        """The outbox itself, to look at it or to intervene.

        Raises:
            ImproperlyConfigured: the database cannot hold an outbox.
        """
        return outbox_of(connections[self.using])

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
        """
        connection = connections[self.using]
        outbox = outbox_of(connection)
        connection.ensure_connection()
        connection.validate_no_broken_transaction()
        return outbox.enqueue(message, key=key, connection=connection.connection)

    def __repr__(self) -> str:
        """Name the database."""
        return f"DjangoOutbox({self.using!r})"


def aliases() -> list[str]:
    """Return the aliases of the databases that have an outbox."""
    return list(option("DATABASES", [DEFAULT_DB_ALIAS]))


def option(name: str, default: Any) -> Any:  # noqa: ANN401 - whatever the settings hold
    """Return a value of the setting ``RELIABLEPUB``."""
    return getattr(settings, "RELIABLEPUB", {}).get(name, default)


def outbox_of(connection: BaseDatabaseWrapper) -> Outbox:
    """Return the outbox in the database of a connection.

    The test runner replaces the name of a database, so it is looked up each time.

    Raises:
        ImproperlyConfigured: the database cannot hold an outbox.
    """
    name = str(connection.settings_dict["NAME"])
    if connection.vendor != "sqlite":
        msg = f"database {connection.alias!r} is of {connection.vendor}; an outbox needs SQLite"
        raise ImproperlyConfigured(msg)
    if name == ":memory:" or "mode=memory" in name:
        raise ImproperlyConfigured(
            f"database {connection.alias!r} is in memory, where no outbox can be; for tests, give "
            'it a file: DATABASES = {"default": {..., "TEST": {"NAME": "test.db"}}}'
        )
    if name not in _OUTBOXES:
        _OUTBOXES[name] = Outbox(name)
    return _OUTBOXES[name]
