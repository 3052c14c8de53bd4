"""``reliablepub outbox salvage``: what is intact in a damaged outbox is put into a new one.

Knows: what `Outbox` offers. Must never know: SQL, or a broker.
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

    Stop whatever uses DAMAGED first. It stays as it is; NEW must not exist. Then let the relay use
    NEW. A message may be published that was confirmed before, under the same message id.

    \b
    Example:
      reliablepub outbox salvage damaged.db new.db

    \b
    Exit codes:
      0  no message was found that is damaged
      1  some are; they are listed, and were not copied
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
            "how far `publish --source` had come with each source could not be read; "
            "its next run begins at the beginning"
        )
    print_result(
        f"{count_of(found.open, 'open message')} and "
        f"{count_of(found.parked, 'parked message')} copied to {new}"
    )
    return Exit.PARKED if found.broken else Exit.CONFIRMED
