"""``reliablepub outbox keys``: lists ordering keys that are held, resumes or skips one.

Knows: the methods of `Outbox` for keys. Must never know: SQL, or a broker.
"""

from __future__ import annotations

from dataclasses import asdict

import click

from reliablepub.cli.exits import Exit
from reliablepub.cli.options import as_form, form_option, inspected_option, limit_option
from reliablepub.cli.outbox.listing import said
from reliablepub.cli.output import (
    Form,
    ago,
    count_of,
    note_limit,
    print_error,
    print_json,
    print_result,
    print_rows,
)
from reliablepub.outbox.database import Database
from reliablepub.outbox.outbox import Outbox


@click.command()
@click.option("--resume", metavar="KEY", help="Send the message that holds this key again.")
@click.option(
    "--skip",
    metavar="KEY",
    help="Send the messages behind the one that holds this key, which stays parked.",
)
@limit_option
@inspected_option
@form_option
def keys(
    resume: str | None,
    skip: str | None,
    limit: int,
    database: Database,
    form: str | None,
) -> int:
    """List the ordering keys held by a parked message, and how many messages wait behind it.

    \b
    Examples:
      reliablepub outbox keys --outbox outbox.db
      reliablepub outbox keys --resume order-17 --outbox outbox.db
      reliablepub outbox keys --skip order-17 --outbox outbox.db

    \b
    Exit codes:
      0  done, also if none is held
      2  bad usage, or no parked message holds the key to resume or to skip
      3  interrupted
      4  the outbox cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    if resume is not None and skip is not None:
        raise click.UsageError("give --resume or --skip, not both")
    with Outbox(database) as opened:
        if resume is not None or skip is not None:
            return _let_go(opened, resume, skip, as_form(form))
        found = opened.held_keys(limit)
    columns = {
        "key": lambda row: row["ordering_key"],
        "holds back": lambda row: row["held_back"],
        "id": lambda row: row["id"],
        "since": lambda row: ago(row["parked_at"]),
        "exchange": lambda row: row["exchange"] or "(default)",
        "routing key": lambda row: row["routing_key"],
        "message id": lambda row: row["message_id"],
        "said": said,
    }
    rows = [asdict(key) for key in found]
    lesser = ("message id", "exchange", "routing key", "since")
    print_rows(rows, as_form(form), columns, nothing="no key is held", lesser=lesser)
    note_limit(found, limit)
    return Exit.CONFIRMED


def _let_go(outbox: Outbox, resume: str | None, skip: str | None, form: Form) -> int:
    if resume is not None:
        moved, what = outbox.resume_key(resume), "put back"
    else:
        moved, what = outbox.skip_key(skip or ""), "skipped"
    if form is Form.JSON:
        print_json({"action": "skip" if resume is None else "resume", "changed": moved})
    else:
        print_result(f"{count_of(moved, 'message')} {what}")
    if not moved:
        print_error("no parked message holds this key")
        return Exit.BAD_INPUT
    return Exit.CONFIRMED
