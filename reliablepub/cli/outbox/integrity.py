"""``reliablepub outbox audit | salvage``: finds damage, and rescues what is intact.

Knows: `Outbox.audit`, `Outbox.salvage`, and how their results are printed. Must never know: SQL, or
a broker.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from reliablepub.cli.commands import Exit, command
from reliablepub.cli.options import inspected_option, json_option
from reliablepub.cli.output import (
    ago,
    count_of,
    passed_over_words,
    print_error,
    print_json,
    print_note,
    print_result,
    quoted,
)
from reliablepub.cli.progress import patiently
from reliablepub.errors import OutboxError
from reliablepub.outbox.database import Database
from reliablepub.outbox.outbox import Outbox
from reliablepub.printable import one_line


@command(
    exits={0: "everything adds up", 4: "something does not add up, or the outbox cannot be used"},
)
@inspected_option
@json_option
def audit(database: Database, as_json: bool) -> int:
    """Recount the ledger, and compare each message with its checksum.

    Always: stored = open + confirmed + parked + expired + discarded. The command reads every
    message, and does not disturb the relay.

    \b
    Example:
      reliablepub outbox audit --outbox outbox.db
    """
    with patiently("comparing every message with its checksum"):
        found = Outbox(database).audit()
    code = Exit.CONFIRMED if found.is_right else Exit.OUTBOX
    if as_json:
        print_json(asdict(found) | {"outbox": database.name, "is_right": found.is_right})
        return code
    for line in found.structure:
        print_error(f"the file is damaged: {one_line(line)}")
    if found.structure:
        name = quoted(database.name)
        print_error(f"rescue its messages: reliablepub outbox salvage {name} NEW")
    for name, by in found.differences.items():
        print_error(f"the ledger counts {by:+} {name} against the rows; was a table edited?")
    for id_, reason in found.damaged.items():
        print_error(f"message {id_}: {reason}; a relay parks it, and never sends it")
    if found.passed_over:
        print_error(passed_over_words(found.passed_over))
    for lost in found.lost:
        print_note(f"run {lost.run} began anew {ago(lost.at)}: {one_line(lost.reason)}")
    if found.is_right:
        print_result(f"everything adds up; {count_of(found.rows, 'message')} compared")
    return code


@command(
    exits={
        0: "done; no damaged message was found",
        1: "some messages are damaged, or the disk cannot read them; what was not copied is listed",
        4: "one of the files cannot be used, or DAMAGED is no outbox",
    },
)
@click.argument("damaged", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@json_option
def salvage(damaged: Path, new: Path, as_json: bool) -> int:
    """Copy every intact message of the outbox DAMAGED into the outbox NEW.

    First stop all processes that use DAMAGED, which is not changed; NEW must not exist. Afterwards
    start the relay with NEW. A message that was confirmed before may be published again, under the
    same message id.

    \b
    Example:
      reliablepub outbox salvage damaged.db new.db
    """
    was_there = new.exists()
    try:
        found = Outbox(new).salvage(damaged)
    except (KeyboardInterrupt, OutboxError):
        if new.exists() and not was_there:
            print_note(f"{new} is incomplete: delete it, and try again")
        raise
    is_whole = not (found.broken or found.unreadable)
    if as_json:
        print_json(asdict(found))
        return Exit.CONFIRMED if is_whole else Exit.PARKED
    for part in found.unreadable:
        print_error(f"{part} cannot be read from the disk: messages in it may be missing")
    for row in found.broken:
        print_error(f"message {row.id} ({row.message_id}): {row.reason}")
    if not found.has_sources:
        print_error(
            "the progress of `reliablepub publish` with its files, or the keys of Outbox.enqueue, "
            "could not be read: its next run begins at the first record, and a message that is "
            "enqueued again under its key is stored again"
        )
    print_result(
        f"{count_of(found.open, 'open message')} and "
        f"{count_of(found.parked, 'parked message')} copied to {new}"
    )
    return Exit.CONFIRMED if is_whole else Exit.PARKED
