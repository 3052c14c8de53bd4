"""``reliablepub outbox duplicates``: messages with an attempt of uncertain outcome.

Knows: the history of attempts. Must never know: SQL, or a broker.
"""

from __future__ import annotations

import click

from reliablepub.cli.exits import Exit
from reliablepub.cli.options import as_form, form_option, inspected_option, limit_option
from reliablepub.cli.output import ago, note_limit, print_rows
from reliablepub.cli.progress import patiently
from reliablepub.outbox.admin.inspection import read_ambiguous
from reliablepub.outbox.database import Database


@click.command()
@inspected_option
@limit_option
@form_option
def duplicates(database: Database, limit: int, form: str | None) -> int:
    """List messages with an attempt of uncertain outcome: a queue may or may not have them.

    Consumers may have seen such a message twice, under the same message id; or once, although no
    attempt was confirmed and it is open or was given up. Newest first, as far as the history goes.

    \b
    Example:
      reliablepub outbox duplicates --csv --outbox outbox.db

    \b
    Exit codes:
      0  done, also if there are none
      2  bad usage
      3  interrupted
      4  the outbox cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    with patiently("reading the history"):
        found = read_ambiguous(database, limit=limit)
    columns = {
        "id": lambda row: row["id"],
        "message id": lambda row: row["message_id"],
        "uncertain": lambda row: row["unsure"],
        "confirmed": lambda row: "yes" if row["is_confirmed"] else "no",
        "first": lambda row: ago(row["first_at"]),
        "last": lambda row: ago(row["last_at"]),
    }
    nothing = "no attempt had an uncertain outcome"
    print_rows(found, as_form(form), columns, nothing=nothing, lesser=("first", "message id"))
    note_limit(found, limit)
    return Exit.CONFIRMED
