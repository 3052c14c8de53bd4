"""Creates the outbox in each database of the setting ``DATABASES``.

Knows: Django's migrations. Must never know: the tables.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models

from reliablepub.integrations.django.creation import create


def _create(_apps: object, editor: Any) -> None:  # noqa: ANN401 - the schema editor
    create(editor.connection)


class _CreateOutbox(migrations.RunPython):
    """Creates the outbox; ``sqlmigrate`` names the command that prints the SQL."""

    def describe(self) -> str:
        return "Create the outbox; its SQL: reliablepub outbox create --sql"


class Migration(migrations.Migration):
    """Adds the outbox. Reversing the migration keeps the outbox and its messages."""

    initial = True
    dependencies: ClassVar[list[Any]] = []
    operations: ClassVar[list[Any]] = [
        _CreateOutbox(_create, migrations.RunPython.noop),
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
