"""``reliablepub outbox create``: creates an outbox, or prints the SQL that does.

Knows: the options of a new outbox, and which scripts there are. Must never know: what is in a
script.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import click

from reliablepub.cli.exits import Exit
from reliablepub.cli.options import inspected_option
from reliablepub.cli.output import print_note, print_text
from reliablepub.outbox.database import Database

_SHARDS_MAX: Final = 64


@click.command()
@inspected_option
@click.option(
    "--shards",
    metavar="COUNT",
    type=click.IntRange(1, _SHARDS_MAX),
    default=1,
    show_default=True,
    help="PostgreSQL: relays that can share the work. It cannot be changed later.",
)
@click.option(
    "--allow-loss",
    "allows_loss",
    is_flag=True,
    help="PostgreSQL: leave synchronous_commit off where it is off. A crash of the server then "
    "loses messages that were accepted.",
)
@click.option(
    "--sql", "wanted", flag_value="sql", help="PostgreSQL: only print the SQL that creates it."
)
@click.option(
    "--roles",
    "wanted",
    flag_value="roles",
    help="PostgreSQL: only print the SQL for roles with the least privileges.",
)
def create(database: Database, shards: int, allows_loss: bool, wanted: str | None) -> int:  # noqa: FBT001 - click passes flags as arguments
    """Create an outbox, unless it exists.

    A file is also created by its first message. In PostgreSQL the user needs the right to create a
    schema. --sql and --roles make no connection.

    \b
    Examples:
      reliablepub outbox create --outbox outbox.db
      reliablepub outbox create --outbox postgresql://app@db/shop
      reliablepub outbox create --outbox postgresql://app@db/shop --sql | psql -1 shop

    \b
    Exit codes:
      0  done, or it existed
      2  bad usage
      3  interrupted
      4  the outbox cannot be created
    """  # noqa: D301 - click: keep these lines as they are
    if database.file is not None:
        if wanted or allows_loss or shards > 1:
            raise click.UsageError("these options are for an outbox in PostgreSQL, not for a file")
        return _create(database, lambda: database.create(None))
    # Here, because they need psycopg.
    from reliablepub.outbox.postgres import sessions, sql  # noqa: PLC0415

    assert isinstance(database, sessions.PostgresDatabase)
    if wanted == "roles":
        print_text(sql.roles(database.server.schema))
    elif wanted == "sql":
        schema = database.server.schema
        print_text(sql.creation(schema, shards=shards, allows_loss=allows_loss))
    else:
        server = database.server
        work = partial(sessions.create, server, shards=shards, allows_loss=allows_loss)
        return _create(database, work)
    return Exit.CONFIRMED


def _create(database: Database, work: Callable[[], None]) -> int:
    """Create the outbox, unless it exists, and say which it was."""
    if database.exists():
        print_note(f"outbox {database.name} exists already; nothing was changed")
    else:
        work()
        print_note(f"outbox {database.name} is created")
    return Exit.CONFIRMED
