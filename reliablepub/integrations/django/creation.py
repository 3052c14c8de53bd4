"""Adds the outbox to a database in the migration; after ``migrate``, adds or upgrades it.

Knows: Django's signals, and the view that the model `ParkedMessage` reads. Must never know: the
tables of the outbox.
"""

from __future__ import annotations

from typing import Any, Final

from django.core.management import CommandError
from django.db import DatabaseError, connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from reliablepub import OutboxError
from reliablepub.integrations.django import DjangoOutbox, accepted, aliases

_NAME: Final = "reliablepub_parked_messages"
# The outbox has a schema of its own, which a model cannot name, and its times are text.
_VIEW: Final = """
    CREATE OR REPLACE VIEW reliablepub_parked_messages AS SELECT
        id, message_id, exchange, routing_key, ordering_key, state, outcome, reply_code, reply_text,
        attempts, (stored_at || '+00')::timestamptz AS stored_at,
        (parked_at || '+00')::timestamptz AS parked_at, size
    FROM reliablepub.parked_messages
"""


def create(connection: BaseDatabaseWrapper) -> None:
    """Add the outbox, as part of the transaction, if the setting ``DATABASES`` names the database.

    An outbox that is there is kept.
    """
    if connection.alias not in aliases():
        return
    try:
        DjangoOutbox(connection.alias).outbox.create(connection=accepted(connection))
        if not _is_seen(connection):
            with connection.cursor() as cursor:
                cursor.execute(_VIEW)
    except (DatabaseError, OutboxError) as error:
        if "permission denied" not in str(error):
            raise
        raise CommandError(
            f"the user of database {connection.alias!r} may not create the outbox ({error}). Its "
            "owner runs `reliablepub outbox create --sql` and `--roles` through psql, and grants "
            "this user reliablepub_relay, and CREATE on the schema of its tables; then migrate"
        ) from error


def _is_seen(connection: BaseDatabaseWrapper) -> bool:
    """Whether the view of parked messages is there, which SQLite's outbox has itself."""
    return _NAME in connection.introspection.table_names(include_views=True)


def complete(*, using: str, **_: Any) -> None:  # noqa: ANN401 - a signal's
    """Add the outbox to a PostgreSQL database whose migration did not; upgrade one that is there.

    It was applied before the setting ``DATABASES`` named the database, or the setting
    ``MIGRATION_MODULES`` leaves it out. In SQLite, the first message adds the outbox.

    Args:
        using: alias of the database.
    """
    connection = connections[using]
    if using not in aliases() or not router.allow_migrate(using, "reliablepub"):
        return
    if _is_seen(connection):
        DjangoOutbox(using).outbox.upgrade()  # of an earlier version
    elif connection.vendor == "postgresql":
        with transaction.atomic(using):
            create(connection)
