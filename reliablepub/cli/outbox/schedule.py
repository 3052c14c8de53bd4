"""``reliablepub outbox schedule | cancel | reschedule``: what is sent later, and when.

Knows: how waiting messages are listed, and the question before one is deleted. Must never know:
SQL, or how a relay learns of a change.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import click

from reliablepub.cli.choosing import (
    Duration,
    ask,
    named,
    rows_named_or_nothing,
    selection_options_of_waiting,
)
from reliablepub.cli.exits import Exit
from reliablepub.cli.options import (
    as_form,
    form_option,
    inspected_option,
    json_option,
    limit_option,
    moment,
)
from reliablepub.cli.outbox.listing import COLUMNS, LESSER
from reliablepub.cli.output import (
    count_of,
    note_limit,
    print_change,
    print_error,
    print_json,
    print_note,
    print_rows,
)
from reliablepub.cli.progress import counting, patiently
from reliablepub.outbox.admin.interventions import Effect, Intervention, intervene
from reliablepub.outbox.admin.scheduling import cancelling, due, rescheduling
from reliablepub.outbox.admin.selection import Selection
from reliablepub.outbox.database import Database


@click.command()
@inspected_option
@selection_options_of_waiting
@click.option(
    "--within",
    metavar="TIME",
    type=Duration(),
    help="Only if due within this time from now, such as 90s, 5m, 2h or 7d.",
)
@limit_option
@form_option
def schedule(
    database: Database, chosen: Selection, within: float | None, limit: int, form: str | None
) -> int:
    """List messages that wait for their time, the next one first; retries are among them.

    Messages that wait for a paused destination are not: `outbox list --state waiting` has them.

    \b
    Examples:
      reliablepub outbox schedule --outbox outbox.db
      reliablepub outbox schedule --within 10m --exchange 'reminders*' --outbox outbox.db

    \b
    Exit codes:
      0  done, also if there are none
      2  bad usage
      3  interrupted
      4  the outbox cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    due_before = None if within is None else time.time() + within
    with patiently("looking through the outbox"):
        found = due(database, chosen, due_before=due_before, limit=limit)
    columns = {name: COLUMNS[name] for name in _COLUMNS}
    print_rows(found, as_form(form), columns, nothing="no message waits", lesser=_LESSER)
    note_limit(found, limit)
    return Exit.CONFIRMED


_COLUMNS = ("due", "id", "tries", "exchange", "routing key", "size", "message id", "said", "stored")
_LESSER = tuple(name for name in LESSER if name != "due")


@click.command()
@click.argument("names", metavar="ID...", nargs=-1, required=True)
@inspected_option
@click.option("--note", default="", help="Reason, shown by explain.")
@click.option("--dry-run", is_flag=True, help="Only show how many messages would be cancelled.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def cancel(
    *,
    names: tuple[str, ...],
    database: Database,
    note: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Delete messages that were not sent, such as scheduled ones; their keys can be used again.

    Messages are selected by ID (row number, message id or key). A message is cancelled or sent,
    never both, also while a relay runs. Cancelled ones count as discarded. The command asks first.

    \b
    Examples:
      reliablepub outbox cancel 'order 17 created' --outbox outbox.db
      reliablepub outbox cancel 17 18 --yes --note 'customer has left' --outbox outbox.db

    \b
    Exit codes:
      0  done
      2  bad usage, an unknown ID, or the question was not answered with yes: nothing was changed;
         or a message has left the outbox or is damaged: the others were cancelled
      3  it was too late for some messages, which a queue may have, or interrupted
      4  the outbox cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    what = cancelling(note or "cancelled")
    ids = rows_named_or_nothing(database, names)
    if not (dry_run or yes):
        ask(f"cancel {count_of(len(ids), 'message')} for good?")
    return _change(database, ids, what, "cancelled", dry_run=dry_run, as_json=as_json)


@click.command()
@click.argument("names", metavar="ID...", nargs=-1, required=True)
@click.option(
    "--not-before",
    callback=moment,
    required=True,
    metavar="WHEN",
    help="The new time, such as 2026-12-24T18:00:00+01:00; one in the past sends the message now.",
)
@inspected_option
@click.option("--note", default="", help="Reason, shown by explain.")
@click.option("--dry-run", is_flag=True, help="Only show how many messages would be rescheduled.")
@json_option
def reschedule(
    *,
    names: tuple[str, ...],
    not_before: datetime,
    database: Database,
    note: str,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Send open messages that were not sent at another time.

    Messages are selected by ID (row number, message id or key). Earlier refusals no longer count; a
    deadline stays. A relay may run.

    \b
    Examples:
      reliablepub outbox reschedule 17 --not-before 2026-12-24T18:00:00+01:00 --outbox outbox.db

    \b
    Exit codes:
      0  done
      2  bad usage, or an unknown ID: nothing was changed; or a message is no longer open or is
         damaged: the others were rescheduled
      3  it was too late for some messages, which a queue may have, or interrupted
      4  the outbox cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    what = rescheduling(not_before, note)
    ids = rows_named_or_nothing(database, names)
    return _change(database, ids, what, "rescheduled", dry_run=dry_run, as_json=as_json)


def _change(
    database: Database,
    ids: list[int],
    what: Intervention,
    done: str,
    *,
    dry_run: bool,
    as_json: bool,
) -> int:
    effect = Effect()
    if not dry_run:
        with counting(len(ids)) as progress:
            effect = intervene(database, ids, what, progress=progress)
    left = effect.unfit + effect.damaged
    if as_json:
        result: dict[str, Any] = {
            "action": "cancel" if done == "cancelled" else "reschedule",
            "dry_run": dry_run,
            "chosen": len(ids),
            "changed": effect.changed,
            "too_late": effect.in_flight,
            "unfit": effect.unfit,
            "damaged": effect.damaged,
        }
        print_json(result)
    else:
        print_change(len(ids), effect.changed, done, dry_run=dry_run)
    if effect.in_flight:
        print_note(
            f"{named(effect.in_flight)} left alone: in flight, or an attempt had no answer or was "
            "nacked, so a queue may have it"
        )
    if left:
        print_error(f"{named(left)} left alone: gone, given up, or damaged")
        return Exit.BAD_INPUT
    return Exit.OPEN if effect.in_flight else Exit.CONFIRMED
