"""``reliablepub outbox``: how an outbox is doing, what was given up, and putting it back.

Knows: the questions a person asks an `Outbox`. Must never know: SQL, or a broker.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import click

from reliablepub.cli.exits import Exit, ask_for_command
from reliablepub.cli.options import json_option, outbox_option
from reliablepub.cli.output import (
    age,
    count_of,
    one_line,
    print_error,
    print_json,
    print_result,
    print_table,
)
from reliablepub.outbox import Outbox

_outbox = outbox_option(required=True, text="The outbox.")


@click.group(invoke_without_command=True)
@click.pass_context
def outbox(ctx: click.Context) -> int:
    """Look into an outbox, and put parked messages back.

    Looking never creates a file, and disturbs no relay.

    \b
    Examples:
      reliablepub outbox status --outbox outbox.db
      reliablepub outbox parked --outbox outbox.db
      reliablepub outbox retry 17 18 --outbox outbox.db
    """  # noqa: D301 - click: keep these lines as they are
    return ask_for_command(ctx)


@outbox.command()
@_outbox
@json_option
def status(outbox_path: Path, as_json: bool) -> int:  # noqa: FBT001 - click passes flags as arguments
    """Count the messages of an outbox.

    Always: stored = open + confirmed + parked + expired + discarded.

    \b
    Example:
      reliablepub outbox status --outbox outbox.db --json

    \b
    Exit codes:
      0  done
      4  it cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    found = Outbox(outbox_path).status()
    oldest = found.oldest_open_at
    oldest_age_s = None if oldest is None else round(max(0.0, time.time() - oldest), 1)
    values = {
        "stored": found.stored,
        "open": found.open,
        "in_flight": found.in_flight,
        "waiting": found.waiting,
        "confirmed": found.confirmed,
        "parked": found.parked,
        "expired": found.expired,
        "discarded": found.discarded,
    }
    if as_json:
        more = {
            "outbox": str(outbox_path),
            "oldest_open_age_s": oldest_age_s,
            "relay_pid": found.relay,
            "bytes_on_disk": found.bytes_on_disk,
        }
        print_json(values | more)
    else:
        print_table(
            values
            | {
                "oldest open": "none" if oldest_age_s is None else f"{age(oldest_age_s)} old",
                "relay": "none" if found.relay is None else f"process {found.relay}",
                "on disk": f"{found.bytes_on_disk / 1024:.0f} KiB",
            }
        )
    return Exit.CONFIRMED


@outbox.command()
@_outbox
@click.option(
    "--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Most to list."
)
@json_option
def parked(outbox_path: Path, limit: int, as_json: bool) -> int:  # noqa: FBT001
    """List messages that were given up, oldest first, with the reason.

    \b
    Example:
      reliablepub outbox parked --outbox outbox.db --limit 10

    \b
    Exit codes:
      0  done, also if there are none
      4  it cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    found = Outbox(outbox_path).parked(limit)
    if as_json:
        print_json([asdict(message) for message in found])
        return Exit.CONFIRMED
    for message in found:
        said = one_line(f"{message.reply_code or ''} {message.reply_text}")
        print_result(
            f"{message.id}  {message.outcome} after {count_of(message.attempts, 'attempt')}: "
            f"{said}; message {message.message_id} to exchange {message.exchange!r} with "
            f"routing key {message.routing_key!r}, {message.size} bytes"
        )
    if not found:
        print_result("no message is parked")
    return Exit.CONFIRMED


@outbox.command()
@click.argument("ids", metavar="[ID...]", type=int, nargs=-1)
@click.option("--all", "is_all", is_flag=True, help="Put all parked messages back.")
@_outbox
def retry(ids: tuple[int, ...], is_all: bool, outbox_path: Path) -> int:  # noqa: FBT001
    """Put parked messages back; a relay publishes them as if they were new.

    An ID is the first number in a line of `reliablepub outbox parked`.

    \b
    Examples:
      reliablepub outbox retry 17 18 --outbox outbox.db
      reliablepub outbox retry --all --outbox outbox.db

    \b
    Exit codes:
      0  they are put back
      2  an ID is not that of a parked message; the others are put back
      4  it cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    if is_all == bool(ids):
        raise click.UsageError("give the IDs of parked messages, or --all")
    with Outbox(outbox_path) as opened:
        moved = opened.retry(None if is_all else set(ids))
    print_result(f"{count_of(moved, 'message')} put back")
    missing = 0 if is_all else len(set(ids)) - moved
    if missing:
        print_error(f"{count_of(missing, 'ID')} of no parked message")
        return Exit.BAD_INPUT
    return Exit.CONFIRMED
