"""Creates the outbox in each database of the setting ``DATABASES``.

Knows: Django's migrations. Must never know: the tables; the outbox upgrades them itself.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from django.db import migrations, models

from reliablepub.integrations.django import DjangoOutbox, accepted, aliases

# The outbox has a schema of its own, which a model cannot name, and its times are text.
_VIEW: Final = """
    CREATE OR REPLACE VIEW reliablepub_parked_messages AS SELECT
        id, message_id, exchange, routing_key, ordering_key, state, outcome, reply_code, reply_text,
        attempts, (stored_at || '+00')::timestamptz AS stored_at,
        (parked_at || '+00')::timestamptz AS parked_at, size
    FROM reliablepub.parked_messages
"""


def create(_apps: object, editor: Any) -> None:  # noqa: ANN401 - the schema editor
    """Add the outbox, as part of the migration's transaction."""
    connection = editor.connection
    if connection.alias not in aliases():
        return
    DjangoOutbox(connection.alias).outbox.create(connection=accepted(connection))
    if connection.vendor != "sqlite":
        editor.execute(_VIEW)


class Migration(migrations.Migration):
    """Adds the outbox. Reversing the migration keeps the outbox and its messages."""

    initial = True
    dependencies: ClassVar[list[Any]] = []
    operations: ClassVar[list[Any]] = [
        migrations.RunPython(create, migrations.RunPython.noop),
        migrations.CreateModel(
            name="ParkedMessage",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("message_id", models.CharField(max_length=255)),
                ("exchange", models.CharField(max_length=255)),
                ("routing_key", models.CharField(max_length=255)),
                ("ordering_key", models.CharField(max_length=255, null=True)),
                ("state", models.CharField(max_length=10)),
                ("outcome", models.CharField(max_length=20)),
                ("reply_code", models.IntegerField()),
                ("reply_text", models.TextField()),
                ("attempts", models.IntegerField()),
                ("stored_at", models.DateTimeField()),
                ("parked_at", models.DateTimeField()),
                ("size", models.IntegerField(help_text="bytes")),
            ],
            options={
                "verbose_name": "parked message",
                "db_table": "reliablepub_parked_messages",
                "ordering": ("id",),
                "managed": False,
            },
        ),
    ]
