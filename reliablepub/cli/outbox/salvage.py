"""``reliablepub outbox salvage``: copies the intact messages of a damaged outbox into a new one.

Knows: `Outbox.salvage`. Must never know: SQL, or a broker.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from reliablepub.cli.exits import Exit
from reliablepub.cli.options import json_option
from reliablepub.cli.output import count_of, print_error, print_json, print_result
from reliablepub.outbox.outbox import Outbox


@click.command()
@click.argument("damaged", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@json_option
def salvage(damaged: Path, new: Path, as_json: bool) -> int:  # noqa: FBT001 - click passes flags as arguments
    """Copy every intact message of the outbox DAMAGED into the outbox NEW.

    First stop all processes that use DAMAGED, which is not changed; NEW must not exist. Afterwards
    start the relay with NEW. A message that was confirmed before may be published again, under the
    same message id.

    \b
    Example:
      reliablepub outbox salvage damaged.db new.db

    \b
    Exit codes:
      0  done; no damaged message was found
      1  some messages are damaged; they are listed, and were not copied
      2  bad usage
      3  interrupted
      4  one of the files cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    found = Outbox(new).salvage(damaged)
    if as_json:
        print_json(asdict(found))
        return Exit.PARKED if found.broken else Exit.CONFIRMED
    for row in found.broken:
        print_error(f"message {row.id} ({row.message_id}): {row.reason}")
    if not found.has_sources:
        print_error(
            "the progress of `reliablepub publish` with its files could not be read; "
            "its next run begins at the first record"
        )
    print_result(
        f"{count_of(found.open, 'open message')} and "
        f"{count_of(found.parked, 'parked message')} copied to {new}"
    )
    return Exit.PARKED if found.broken else Exit.CONFIRMED
