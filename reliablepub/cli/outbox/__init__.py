"""``reliablepub outbox``: the group of commands that inspect and change an outbox.

Knows: the name and the module of each command. Must never know: what a command does.

A new command joins the module of its kind, and the table.
"""

from __future__ import annotations

from typing import Final

import click

from reliablepub.cli.commands import LazyGroup

_COMMANDS: Final = {
    "audit": "reliablepub.cli.outbox.upkeep:audit",
    "cancel": "reliablepub.cli.outbox.changing:cancel",
    "check": "reliablepub.cli.doctor.command:check",
    "create": "reliablepub.cli.outbox.upkeep:create",
    "discard": "reliablepub.cli.outbox.changing:discard",
    "duplicates": "reliablepub.cli.outbox.listing:duplicates",
    "edit": "reliablepub.cli.outbox.editing:edit",
    "explain": "reliablepub.cli.outbox.explain:explain",
    "export": "reliablepub.cli.outbox.transfer:export_messages",
    "import": "reliablepub.cli.outbox.transfer:import_messages",
    "in-flight": "reliablepub.cli.outbox.listing:in_flight",
    "keys": "reliablepub.cli.outbox.listing:keys",
    "list": "reliablepub.cli.outbox.listing:list_messages",
    "metrics": "reliablepub.cli.outbox.figures:metrics",
    "park": "reliablepub.cli.outbox.changing:park",
    "prune": "reliablepub.cli.outbox.upkeep:prune",
    "rekey": "reliablepub.cli.outbox.upkeep:rekey",
    "replay": "reliablepub.cli.outbox.changing:replay",
    "reroute": "reliablepub.cli.outbox.changing:reroute",
    "reschedule": "reliablepub.cli.outbox.changing:reschedule",
    "retry": "reliablepub.cli.outbox.changing:retry",
    "salvage": "reliablepub.cli.outbox.upkeep:salvage",
    "schedule": "reliablepub.cli.outbox.listing:schedule",
    "show": "reliablepub.cli.outbox.show:show",
    "stats": "reliablepub.cli.outbox.figures:stats",
    "status": "reliablepub.cli.outbox.figures:status",
    "summary": "reliablepub.cli.outbox.listing:summary",
    "upgrade": "reliablepub.cli.outbox.upkeep:upgrade",
}


@click.command(cls=LazyGroup, table=_COMMANDS)
def outbox() -> None:
    """Inspect an outbox, change its messages, rescue a damaged one.

    Inspection never creates a file, and does not disturb a relay. Changes work while a relay runs.

    \b
    Examples:
      reliablepub outbox status --outbox outbox.db
      reliablepub outbox summary --outbox outbox.db
      reliablepub outbox explain 17 --outbox outbox.db
      reliablepub outbox retry 17 18 --outbox outbox.db
      reliablepub outbox audit --outbox outbox.db
      reliablepub outbox salvage damaged.db new.db
    """
