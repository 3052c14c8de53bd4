"""``reliablepub outbox in-flight``: the delivery tags that await the broker's answer.

Knows: the record of delivery tags in the outbox. Must never know: SQL, or a broker.
"""

from __future__ import annotations

import click

from reliablepub.cli.exits import Exit
from reliablepub.cli.options import as_form, form_option, inspected_option, limit_option
from reliablepub.cli.output import ago, note_limit, print_rows
from reliablepub.outbox.admin.inspection import read_in_flight
from reliablepub.outbox.database import Database


@click.command("in-flight")
@inspected_option
@limit_option
@form_option
def in_flight(database: Database, limit: int, form: str | None) -> int:
    """List the delivery tags that the running relay has sent and the broker has not answered.

    An epoch identifies one channel: the number of the relay's run, and of the channel in that run.
    Tags count from 1 on each channel.

    \b
    Example:
      reliablepub outbox in-flight --outbox outbox.db

    \b
    Exit codes:
      0  done, also if there are none
      2  bad usage
      3  interrupted
      4  the outbox cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    found = read_in_flight(database, limit=limit)
    columns = {
        "epoch": lambda row: row["epoch"],
        "tag": lambda row: row["tag"],
        "sent": lambda row: ago(row["sent_at"]),
        "id": lambda row: row["id"],
        "exchange": lambda row: row["exchange"] or "(default)",
        "routing key": lambda row: row["routing_key"],
        "message id": lambda row: row["message_id"],
    }
    lesser = ("routing key", "exchange")
    print_rows(found, as_form(form), columns, nothing="nothing is in flight", lesser=lesser)
    note_limit(found, limit)
    return Exit.CONFIRMED
