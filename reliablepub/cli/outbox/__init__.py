"""``reliablepub outbox``: the group of commands that inspect and change an outbox.

Knows: the name and the module of each command. Must never know: what a command does. A new command
is a module in this package, and a line in the table.
"""

from __future__ import annotations

from typing import Final

import click

from reliablepub.cli.commands import LazyGroup
from reliablepub.cli.exits import ask_for_command

_COMMANDS: Final = {
    "audit": "reliablepub.cli.outbox.audit:audit",
    "cancel": "reliablepub.cli.outbox.schedule:cancel",
    "check": "reliablepub.cli.outbox.check:check",
    "create": "reliablepub.cli.outbox.create:create",
    "discard": "reliablepub.cli.outbox.stepping_in:discard",
    "duplicates": "reliablepub.cli.outbox.duplicates:duplicates",
    "explain": "reliablepub.cli.outbox.explain:explain",
    "export": "reliablepub.cli.outbox.transfer:export_messages",
    "import": "reliablepub.cli.outbox.transfer:import_messages",
    "in-flight": "reliablepub.cli.outbox.in_flight:in_flight",
    "keys": "reliablepub.cli.outbox.keys:keys",
    "list": "reliablepub.cli.outbox.listing:list_messages",
    "metrics": "reliablepub.cli.outbox.metrics:metrics",
    "park": "reliablepub.cli.outbox.stepping_in:park",
    "prune": "reliablepub.cli.outbox.prune:prune",
    "rekey": "reliablepub.cli.outbox.rekey:rekey",
    "reroute": "reliablepub.cli.outbox.stepping_in:reroute",
    "reschedule": "reliablepub.cli.outbox.schedule:reschedule",
    "retry": "reliablepub.cli.outbox.stepping_in:retry",
    "salvage": "reliablepub.cli.outbox.salvage:salvage",
    "schedule": "reliablepub.cli.outbox.schedule:schedule",
    "show": "reliablepub.cli.outbox.show:show",
    "stats": "reliablepub.cli.outbox.stats:stats",
    "status": "reliablepub.cli.outbox.status:status",
}


@click.command(cls=LazyGroup, table=_COMMANDS, invoke_without_command=True)
@click.pass_context
def outbox(ctx: click.Context) -> int:
    """Inspect an outbox, change its messages, rescue a damaged one.

    Inspection never creates a file, and does not disturb a relay. Changes work while a relay runs.

    \b
    Examples:
      reliablepub outbox status --outbox outbox.db
      reliablepub outbox list --state parked --outbox outbox.db
      reliablepub outbox explain 17 --outbox outbox.db
      reliablepub outbox retry 17 18 --outbox outbox.db
      reliablepub outbox audit --outbox outbox.db
      reliablepub outbox salvage damaged.db new.db
    """  # noqa: D301 - click: keep these lines as they are
    return ask_for_command(ctx)
