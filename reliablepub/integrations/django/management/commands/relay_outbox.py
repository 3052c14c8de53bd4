"""``manage.py relay_outbox``: publishes the messages in the outbox of a database.

Knows: settings, and the command ``reliablepub relay``. Must never know: the relay.
"""

from __future__ import annotations

import os
import sys
from argparse import REMAINDER
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from reliablepub.integrations.django import DjangoOutbox, aliases, option


class Command(BaseCommand):
    """Becomes the process ``reliablepub relay``, with its signals, exit codes and options."""

    help = (
        "Publish the messages in the outbox of a database, and all that are put into it later. "
        "Options of `reliablepub relay` follow after --, such as: relay_outbox -- --drain"
    )
    requires_system_checks: list[str] = []  # noqa: RUF012 - as Django has it

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the database, and the options that are passed on."""
        parser.add_argument("--database", default=aliases()[0], choices=aliases())
        parser.add_argument("options", nargs=REMAINDER, help="options of `reliablepub relay`")

    def handle(self, *_: object, **options: Any) -> None:  # noqa: ANN401 - as argparse has them
        """Replace this process by ``reliablepub relay``."""
        url = option("URL", os.environ.get("RELIABLEPUB_URL"))
        if not url:
            msg = 'no broker: set RELIABLEPUB = {"URL": "amqp://..."} or RELIABLEPUB_URL'
            raise CommandError(msg)
        # Not arguments: other users could read the passwords in the list of processes.
        os.environ["RELIABLEPUB_URL"] = url
        os.environ["RELIABLEPUB_OUTBOX"] = DjangoOutbox(options["database"]).where
        sys.stdout.flush()
        command = [sys.executable, "-m", "reliablepub", "relay"]
        given = options["options"]
        if given[:1] == ["--"]:  # Python 3.11 and 3.12 keep it
            given = given[1:]
        os.execv(sys.executable, [*command, *given])  # noqa: S606 - our own command
