"""``reliablepub outbox create | upgrade | prune | rekey | audit | salvage``: the whole outbox.

Knows: how an outbox is made, kept in shape and rescued, the question before messages are deleted,
and which SQL scripts there are. Must never know: what is in a script, or ciphers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from click.core import ParameterSource

from reliablepub.cli.choosing import ask
from reliablepub.cli.commands import Exit, command
from reliablepub.cli.doctor.server import of_privileges
from reliablepub.cli.options import (
    Duration,
    alike,
    inspected_option,
    json_option,
    relay_keys_options,
)
from reliablepub.cli.output import (
    ago,
    count_of,
    passed_over_words,
    print_either,
    print_error,
    print_json,
    print_note,
    print_result,
    print_text,
    quoted,
    size_of,
)
from reliablepub.cli.progress import changing, patiently
from reliablepub.errors import OutboxError
from reliablepub.outbox.admin.pruning import Pruned, Times, foresee
from reliablepub.outbox.admin.pruning import prune as prune_outbox
from reliablepub.outbox.database import Database
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.outbox import Outbox
from reliablepub.printable import one_line

if TYPE_CHECKING:
    from reliablepub.outbox.postgres.database import PostgresDatabase

_SHARDS_MAX: Final = 64
_LISTED_MAX: Final = 10
"""Messages that `rekey` names in text."""


@command(exits={0: "done, or it existed", 4: "the outbox cannot be created"})
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
    help="PostgreSQL: do not turn synchronous_commit on where it is off. A crash of the server "
    "then loses accepted messages.",
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
def create(database: Database, shards: int, allows_loss: bool, wanted: str | None) -> None:
    """Create an outbox, unless it exists.

    A file is also created by its first message. In PostgreSQL the user needs the right to create a
    schema. --sql and --roles need no connection.

    \b
    Examples:
      reliablepub outbox create --outbox outbox.db
      reliablepub outbox create --outbox postgresql://app@db/shop
      reliablepub outbox create --outbox postgresql://app@db/shop --sql | \\
        psql -1 shop
    """
    if database.file is not None:
        if wanted or allows_loss or shards > 1:
            raise click.UsageError("these options are for an outbox in PostgreSQL, not for a file")
        _create(database, partial(database.create, None))
        return
    # Here, because they need psycopg.
    from reliablepub.outbox.postgres import sql  # noqa: PLC0415
    from reliablepub.outbox.postgres.database import PostgresDatabase, create_outbox  # noqa: PLC0415
    from reliablepub.outbox.postgres.environment import read_privileges  # noqa: PLC0415

    assert isinstance(database, PostgresDatabase)
    server = database.server
    if wanted == "roles":
        print_text(sql.roles(server.schema))
    elif wanted == "sql":
        print_text(sql.creation(server.schema, shards=shards, allows_loss=allows_loss))
    else:
        work = partial(create_outbox, server, shards=shards, allows_loss=allows_loss)
        _create(database, work)
        _check_made_with(database, shards, allows_loss=allows_loss)
        # The relay may have another role.
        privileges = of_privileges(read_privileges(database))
        if privileges.remedy:
            print_note(f"warning: {privileges.found}; {privileges.remedy}")


@command(exits={0: "done, or there was nothing to do", 4: "the outbox was not upgraded"})
@inspected_option
@click.option(
    "--sql", "is_sql", is_flag=True, help="PostgreSQL: only print the SQL that upgrades it."
)
def upgrade(database: Database, is_sql: bool) -> None:
    """Bring an outbox that an earlier version has created to this version.

    First install this version in every process that uses the file, and stop its relay. In
    PostgreSQL, processes that enqueue may have either version, and relays run: install this version
    and restart them afterwards. --sql prints what the owner of the schema has to run.

    \b
    Examples:
      reliablepub outbox upgrade --outbox outbox.db
      reliablepub outbox upgrade --outbox postgresql://app@db/shop --sql | \\
        psql -1 shop
    """
    if is_sql:
        if database.file is not None:
            raise click.UsageError("--sql is for an outbox in PostgreSQL, not for a file")
        from reliablepub.outbox.postgres.database import PostgresDatabase  # noqa: PLC0415
        from reliablepub.outbox.postgres.upgrade import upgrade_sql  # noqa: PLC0415

        assert isinstance(database, PostgresDatabase)
        if text := upgrade_sql(database.server):
            print_text(text)
        return
    done = database.upgrade()
    for words in done:
        print_note(words)
    if not done:
        print_note(f"outbox {database.name} is of this version; nothing was changed")


def _check_made_with(database: PostgresDatabase, shards: int, *, allows_loss: bool) -> None:
    """Refuse options that an outbox was not created with."""
    has_shards, has_loss = database.made_with()
    source = click.get_current_context().get_parameter_source("shards")
    if source is not ParameterSource.DEFAULT and shards != has_shards:
        made = f"{count_of(has_shards, 'shard')}, and not {shards}"
    elif allows_loss and not has_loss:
        made = "no --allow-loss"
    else:
        return
    raise click.UsageError(
        f"outbox {database.name} exists, and was created with {made}; this cannot be changed: "
        "export its messages, and import them into a new one"
    )


def _create(database: Database, work: Callable[[], None]) -> None:
    """Create the outbox, unless it exists, and say which it was."""
    if database.exists():
        print_note(f"outbox {database.name} exists already; nothing was changed")
    else:
        work()
        print_note(f"outbox {database.name} is created")


@command(
    exits={
        0: "done, also if there was nothing to do",
        2: "bad usage, or the question was not answered with yes",
    },
)
@inspected_option
@alike(
    {
        "--confirmed": "Delete messages that were confirmed longer ago than this, such as 2h or "
        "7d.",
        "--parked": "Discard messages that were parked longer ago than this.",
        "--expired": "Discard messages that expired longer ago than this.",
    },
    type=Duration(),
)
@click.option(
    "--history",
    "history_s",
    type=Duration(),
    default="7d",
    show_default=True,
    help="Delete history older than this of messages that are gone.",
)
@click.option("--note", default="pruned", show_default=True, help="Reason, shown by explain.")
@click.option("--dry-run", is_flag=True, help="Only count what would be deleted.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def prune(
    database: Database,
    history_s: float,
    *,
    note: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **limits_s: float | None,
) -> None:
    """Delete old messages and history, and return their space to the disk.

    Messages are deleted only if an option names their state, and after a question. History of
    messages that are gone, and expired keys of Outbox.enqueue, are always deleted. The command
    works in small steps beside a relay; after an interruption the next run does the rest.

    \b
    Examples:
      reliablepub outbox prune --dry-run --parked 30d --outbox outbox.db
      reliablepub outbox prune --expired 7d --confirmed 1d --yes \\
        --outbox outbox.db
    """
    now = time.time()
    ages_s = limits_s | {"history": history_s}
    before = {f"{what}_before": now - old_s for what, old_s in ages_s.items() if old_s is not None}
    times = Times(**before, now=now)
    with patiently("looking through the outbox"):
        found = foresee(database, times)
    if not dry_run:
        if found.messages and not yes:
            ask(f"delete {_of_messages(found)} of {database.name} for good?")
        with changing() as progress:
            found = prune_outbox(database, times, note=note, progress=progress)
    if as_json:
        print_json({"dry_run": dry_run, **asdict(found)})
    else:
        _report(found, is_foreseen=dry_run)


def _of_messages(found: Pruned) -> str:
    kinds = {"confirmed": found.confirmed, "parked": found.parked, "expired": found.expired}
    words = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    return f"{count_of(found.messages, 'message')}{f' ({words})' if words else ''}"


def _report(found: Pruned, *, is_foreseen: bool) -> None:
    would_be = "would be " if is_foreseen else ""
    lines = found.attempts + found.interventions
    print_result(f"{_of_messages(found)} {would_be}deleted")
    print_result(f"{count_of(lines, 'line')} of history {would_be}forgotten")
    print_result(f"{count_of(found.keys, 'key')} {would_be}forgotten")
    if is_foreseen:
        return
    print_result(f"{size_of(found.bytes_given_back)} returned to the disk")
    if found.bytes_unused:
        print_note(
            f"{size_of(found.bytes_unused)} stay in the file, free for new messages: a database "
            "that reliablepub did not create can be shrunk by its owner, with VACUUM"
        )


@command(
    exits={
        2: "bad usage, or some messages were left as they are",
        4: "the outbox cannot be used, or a key is missing here or in the relay",
    },
)
@inspected_option
@relay_keys_options
@json_option
def rekey(database: Database, outbox_keys: OutboxKeys | None, as_json: bool, **_: object) -> int:
    """Encrypt every message under the first key, so that older keys can be dropped.

    The command works in small steps, beside a relay that has the same keys. To rotate keys without
    downtime: add the new key at the end of every key file, and restart (or SIGHUP) every process;
    move it to the first line everywhere; run this command; remove the old key.

    \b
    Examples:
      reliablepub outbox rekey --outbox-keys keys --outbox outbox.db
      reliablepub outbox rekey --outbox-keys keys --accept-plaintext \\
        --outbox outbox.db
    """
    if outbox_keys is None:
        raise click.UsageError("give --outbox-keys")
    with patiently("encrypting messages"), Outbox(database, keys=outbox_keys) as outbox:
        result = outbox.rekey()
    text = f"{count_of(result.changed, 'message')} encrypted under the first key"
    print_either({"changed": result.changed, "left": result.left}, text, as_json=as_json)
    for id_, reason in list(result.left.items())[:_LISTED_MAX]:
        print_error(f"message {id_} left as it is: {reason}")
    if len(result.left) > _LISTED_MAX:
        print_error(f"{len(result.left) - _LISTED_MAX} more left as they are; --json lists them")
    return Exit.BAD_INPUT if result.left else Exit.CONFIRMED


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
        print_note(f"run {lost.run} started over {ago(lost.at)}: {one_line(lost.reason)}")
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
    code = Exit.PARKED if found.broken or found.unreadable else Exit.CONFIRMED
    if as_json:
        print_json(asdict(found))
        return code
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
    return code
