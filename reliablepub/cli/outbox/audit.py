"""``reliablepub outbox audit``: verifies the ledger and every checksum of an outbox.

Knows: `Outbox.audit`. Must never know: SQL, or a broker.
"""

from __future__ import annotations

from dataclasses import asdict

import click

from reliablepub.cli.exits import Exit
from reliablepub.cli.options import inspected_option, json_option
from reliablepub.cli.output import count_of, print_error, print_json, print_result
from reliablepub.cli.progress import patiently
from reliablepub.outbox.database import Database
from reliablepub.outbox.outbox import Outbox
from reliablepub.printable import one_line


@click.command()
@inspected_option
@json_option
def audit(database: Database, as_json: bool) -> int:  # noqa: FBT001 - click passes flags as arguments
    """Recount the ledger, and compare each message with its checksum.

    Always: stored = open + confirmed + parked + expired + discarded. The command reads every
    message, and does not disturb the relay.

    \b
    Example:
      reliablepub outbox audit --outbox outbox.db

    \b
    Exit codes:
      0  everything adds up
      2  bad usage
      3  interrupted
      4  something does not add up, or the outbox cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    with patiently("comparing every message with its checksum"):
        found = Outbox(database).audit()
    code = Exit.CONFIRMED if found.is_right else Exit.OUTBOX
    if as_json:
        print_json(asdict(found) | {"outbox": database.name, "is_right": found.is_right})
        return code
    for line in found.structure:
        print_error(f"the file is damaged: {one_line(line)}")
    if found.structure:
        print_error(f"rescue its messages: reliablepub outbox salvage {database.name} NEW")
    for name, by in found.differences.items():
        print_error(f"the ledger counts {by:+d} {name} against the rows; was a table edited?")
    for id_, reason in found.damaged.items():
        print_error(f"message {id_}: {reason}; a relay parks it, and never sends it")
    if found.is_right:
        print_result(f"everything adds up; {count_of(found.rows, 'message')} compared")
    return code
