"""``reliablepub outbox migrate``: an outbox of an older version becomes one of this version.

Knows: versions. Must never know: SQL.
"""

from __future__ import annotations

from pathlib import Path

import click

from reliablepub.cli.exits import Exit
from reliablepub.cli.options import inspected_option, json_option
from reliablepub.cli.output import print_json, print_result
from reliablepub.errors import NotAnOutbox
from reliablepub.outbox.sqlite.database import MIGRATIONS, looking, open_writer


@click.command()
@inspected_option
@json_option
def migrate(outbox_path: Path, as_json: bool) -> int:  # noqa: FBT001 - click passes flags as arguments
    """Bring an outbox to this version. Whoever enqueues or relays does it too, without being asked.

    \b
    Example:
      reliablepub outbox migrate --outbox outbox.db

    \b
    Exit codes:
      0  done, also if there was nothing to do
      4  it cannot be used, or is of a newer version
    """  # noqa: D301 - click: keep these lines as they are
    with looking(outbox_path) as (_, before):
        if not before:
            raise NotAnOutbox(
                f"the database {outbox_path} holds no outbox; its first message adds one"
            )
    open_writer(outbox_path, is_relay=False).close()
    after = len(MIGRATIONS)
    if as_json:
        print_json({"from": before, "to": after})
    elif before == after:
        print_result(f"{outbox_path} is of version {after}, the newest")
    else:
        print_result(f"{outbox_path} was of version {before}, and is of version {after} now")
    return Exit.CONFIRMED
