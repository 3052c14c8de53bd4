"""``reliablepub outbox prune``: deletes old messages and history, and shrinks the file.

Knows: the age limits, and the question before messages are deleted. Must never know: SQL, or a
broker.
"""

from __future__ import annotations

import time
from dataclasses import asdict

import click

from reliablepub.cli.choosing import Duration, ask
from reliablepub.cli.exits import Exit
from reliablepub.cli.options import inspected_option, json_option
from reliablepub.cli.output import count_of, print_json, print_note, print_result, size_of
from reliablepub.cli.progress import following, patiently
from reliablepub.outbox.admin.pruning import Pruned, Times, foresee
from reliablepub.outbox.admin.pruning import prune as prune_outbox
from reliablepub.outbox.database import Database


def _kept_for(seconds: float | None, now: float) -> float | None:
    return None if seconds is None else now - seconds


@click.command()
@inspected_option
@click.option(
    "--confirmed",
    "confirmed_s",
    metavar="TIME",
    type=Duration(),
    help="Delete messages that were confirmed longer ago than this, such as 2h or 7d.",
)
@click.option(
    "--parked",
    "parked_s",
    metavar="TIME",
    type=Duration(),
    help="Discard messages that were parked longer ago than this.",
)
@click.option(
    "--expired",
    "expired_s",
    metavar="TIME",
    type=Duration(),
    help="Discard messages that expired longer ago than this.",
)
@click.option(
    "--history",
    "history_s",
    metavar="TIME",
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
    confirmed_s: float | None,
    parked_s: float | None,
    expired_s: float | None,
    history_s: float,
    *,
    note: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Delete old messages and history, and return their space to the disk.

    Messages are deleted only if an option names their state, and after a question. History of
    messages that are gone, and expired keys of Outbox.enqueue, are always deleted. The command
    works in small steps beside a relay; after an interruption the next run does the rest.

    \b
    Examples:
      reliablepub outbox prune --dry-run --parked 30d --outbox outbox.db
      reliablepub outbox prune --expired 7d --confirmed 1d --yes \\
        --outbox outbox.db

    \b
    Exit codes:
      0  done, also if there was nothing to do
      2  bad usage, or the question was not answered with yes
      3  interrupted
      4  the outbox cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    now = time.time()
    times = Times(
        confirmed_before=_kept_for(confirmed_s, now),
        parked_before=_kept_for(parked_s, now),
        expired_before=_kept_for(expired_s, now),
        history_before=now - history_s,
        now=now,
    )
    with patiently("looking through the outbox"):
        found = foresee(database, times)
    if not dry_run:
        if found.messages and not yes:
            ask(f"delete {_of_messages(found)} of {database.name} for good?")
        with following() as progress:
            found = prune_outbox(database, times, note=note, progress=progress)
    if as_json:
        print_json({"dry_run": dry_run, **asdict(found)})
        return Exit.CONFIRMED
    _report(found, is_foreseen=dry_run)
    return Exit.CONFIRMED


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
