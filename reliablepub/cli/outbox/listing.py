"""``reliablepub outbox list``: lists messages, each with the answer to its last attempt.

Knows: how messages are found and listed. Must never know: SQL, or a broker.
"""

from __future__ import annotations

from typing import Any

import click

from reliablepub.cli.choosing import selection_options
from reliablepub.cli.exits import Exit
from reliablepub.cli.options import as_form, form_option, inspected_option, limit_option
from reliablepub.cli.output import ago, note_limit, print_rows, size_of
from reliablepub.cli.progress import patiently
from reliablepub.outbox.admin.selection import SORTS, Selection, find
from reliablepub.outbox.database import Database


@click.command("list")
@inspected_option
@selection_options
@click.option(
    "--sort", type=click.Choice(list(SORTS)), default="id", show_default=True, help="Sort order."
)
@limit_option
@form_option
def list_messages(
    database: Database, chosen: Selection, sort: str, limit: int, form: str | None
) -> int:
    """List open, parked and expired messages, with the answer to the last attempt; never a body.

    \b
    Examples:
      reliablepub outbox list --state parked --outbox outbox.db
      reliablepub outbox list --exchange 'orders*' --older-than 10m \\
        --outbox outbox.db
      reliablepub outbox list --reason 404 --sort attempts --outbox outbox.db

    \b
    Exit codes:
      0  done, also if there are none
      2  bad usage
      3  interrupted
      4  the outbox cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    with patiently("looking through the outbox"):
        found = find(database, chosen, sort=sort, limit=limit)
    print_rows(found, as_form(form), COLUMNS, nothing="no message matches", lesser=LESSER)
    note_limit(found, limit)
    return Exit.CONFIRMED


def said(row: dict[str, Any]) -> str:
    """The outcome of a message's last attempt, with the broker's code and text."""
    if row["outcome"] is None:
        return ""
    return f"{row['outcome']}: {row['reply_code'] or ''} {row['reply_text']}"


COLUMNS = {
    "id": lambda row: row["id"],
    "state": lambda row: row["state"],
    "stored": lambda row: ago(row["stored_at"]),
    "due": lambda row: ago(row["due_at"]),
    "tries": lambda row: row["attempts"],
    "exchange": lambda row: row["exchange"] or "(default)",
    "routing key": lambda row: row["routing_key"],
    "size": lambda row: size_of(row["size"]),
    "message id": lambda row: row["message_id"],
    "said": said,
}
"""Columns of a table of messages."""
LESSER = ("message id", "size", "due", "stored", "exchange", "tries")
"""Columns that a narrow terminal does not show; the first ones are left out first."""
