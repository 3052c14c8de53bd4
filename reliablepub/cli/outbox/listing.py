"""``reliablepub outbox list | schedule | in-flight | duplicates | keys``: lists of messages.

Knows: how messages are found, the columns of each table, and how a held key is let go. Must never
know: SQL, or a broker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from operator import itemgetter
from typing import Any, Final

import click

from reliablepub.cli.choosing import selection_options, selection_options_of_waiting
from reliablepub.cli.commands import Command, Exit
from reliablepub.cli.options import Duration, form_option, inspected_option, limit_option
from reliablepub.cli.output import (
    ago,
    answer_words,
    count_of,
    print_error,
    print_json,
    print_result,
    print_rows,
    size_of,
)
from reliablepub.cli.progress import patiently
from reliablepub.outbox.admin.inspection import HeldKey, read_ambiguous, read_in_flight
from reliablepub.outbox.admin.scheduling import due
from reliablepub.outbox.admin.selection import (
    NAMES,
    SORTS,
    SUMMED,
    Selection,
    find,
    summed,
    with_tasks,
)
from reliablepub.outbox.database import Database
from reliablepub.outbox.outbox import Outbox


def answer_of(row: Mapping[str, Any]) -> str:
    """The outcome of a message's last attempt, and whether any attempt may have delivered it."""
    if row.get("confirmed_at") is not None:
        return f"confirmed {ago(row['confirmed_at'])}"
    if row["outcome"] is None:
        return ""
    doubt = "; may have arrived" if row.get("may_have_arrived") else ""
    return f"{answer_words(row)}{doubt}"


def as_listed(row: Mapping[str, Any]) -> dict[str, Any]:
    """A message's row as a list has it; a damaged one may hold other values than numbers."""
    counts = (row[name] for name in ("nacked", "returned", "refused", "uncertain"))
    return {**row, "attempts": sum(count for count in counts if isinstance(count, int))}


_CELLS: Final[dict[str, Callable[[Mapping[str, Any]], object]]] = {
    "answer": lambda row: answer_words(row) if row["outcome"] else "",
    "bytes": lambda row: size_of(row["bytes"]),
    "confirmed": lambda row: "yes" if row["is_confirmed"] else "no",
    "due": lambda row: ago(row["due_at"]),
    "epoch": itemgetter("epoch"),
    "exchange": lambda row: row["exchange"] or "(default)",
    "first": lambda row: ago(row["first_at"]),
    "holds back": itemgetter("held_back"),
    "id": itemgetter("id"),
    "key": itemgetter("ordering_key"),
    "last": lambda row: ago(row["last_at"]),
    "message id": itemgetter("message_id"),
    "messages": itemgetter("messages"),
    "newest": lambda row: ago(row["newest_at"]),
    "of routing key": lambda row: "(several)" if row["is_several"] else row["routing_key"],
    "oldest": lambda row: ago(row["oldest_at"]),
    "routing key": itemgetter("routing_key"),
    "said": answer_of,
    "sent": lambda row: ago(row["sent_at"]),
    "since": lambda row: ago(row["parked_at"]),
    "size": lambda row: size_of(row["size"]),
    "state": itemgetter("state"),
    "stored": lambda row: ago(row["stored_at"]),
    "tag": itemgetter("tag"),
    "task": itemgetter("task"),
    "tries": itemgetter("attempts"),
    "uncertain": itemgetter("unsure"),
}
"""The cell of each column, by its title."""


def _columns(*titles: str) -> dict[str, Callable[[Mapping[str, Any]], object]]:
    return {title: _CELLS[title] for title in titles}


COLUMNS: Final = _columns(
    *("id", "state", "stored", "due", "tries"),
    *("exchange", "routing key", "size", "message id", "said"),
)
"""Columns of a table of messages."""
LESSER: Final = ("message id", "size", "due", "stored", "exchange", "tries")
"""Columns that a narrow terminal does not show; the first ones are left out first."""


@click.command("list", cls=Command, exits={0: "done, also if there are none"})
@inspected_option
@selection_options
@click.option(
    "--sort", type=click.Choice(list(SORTS)), default="id", show_default=True, help="Sort order."
)
@limit_option
@form_option
def list_messages(
    database: Database, chosen: Selection, sort: str, limit: int, form: str | None
) -> int:
    """List open, parked and expired messages, with the answer to the last attempt; never a body.

    --state confirmed lists the confirmed messages that a relay with --keep-confirmed keeps.

    \b
    Examples:
      reliablepub outbox list --state parked --outbox outbox.db
      reliablepub outbox list --exchange 'orders*' --older-than 10m \\
        --outbox outbox.db
      reliablepub outbox list --reason 404 --sort attempts --outbox outbox.db
    """
    with patiently("looking through the outbox"):
        found = with_tasks(database, find(database, chosen, sort=sort, limit=limit))
    columns = dict(COLUMNS)
    if any(row["task"] for row in found):
        said = columns.pop("said")
        columns |= _columns("task") | {"said": said}
    print_rows(
        found,
        form,
        columns,
        nothing="no message matches",
        names=(*NAMES, "task"),
        lesser=LESSER,
        limit=limit,
    )
    return Exit.CONFIRMED


@click.command(cls=Command, exits={0: "done, also if there are none"})
@inspected_option
@selection_options
@limit_option
@form_option
def summary(database: Database, chosen: Selection, limit: int, form: str | None) -> int:
    """Count messages by state, destination and last answer: what is stuck, why, and since when.

    A destination is an exchange, and a queue in the default exchange. The same filters select the
    messages of a line for `outbox list`, `retry`, `reroute` and `discard`.

    \b
    Examples:
      reliablepub outbox summary --outbox outbox.db
      reliablepub outbox summary --state parked --outbox outbox.db
    """
    with patiently("counting"):
        found = summed(database, chosen)[:limit]
    columns = _columns(
        "messages", "state", "exchange", "of routing key", "oldest", "newest", "bytes", "answer"
    )
    print_rows(
        found,
        form,
        columns,
        nothing="no message matches",
        names=SUMMED,
        lesser=("bytes", "newest"),
        limit=limit,
    )
    return Exit.CONFIRMED


@click.command(cls=Command, exits={0: "done, also if there are none"})
@inspected_option
@selection_options_of_waiting
@click.option(
    "--within",
    type=Duration(),
    help="Only if due within this time from now, such as 90s, 5m, 2h or 7d.",
)
@limit_option
@form_option
def schedule(
    database: Database, chosen: Selection, within: float | None, limit: int, form: str | None
) -> int:
    """List messages that wait for their time, the next one first; retries are among them.

    Messages that wait for a paused destination are not listed; `outbox list --state waiting` shows
    them.

    \b
    Examples:
      reliablepub outbox schedule --outbox outbox.db
      reliablepub outbox schedule --within 10m --exchange 'reminders*' \\
        --outbox outbox.db
    """
    due_before = None if within is None else time.time() + within
    with patiently("looking through the outbox"):
        found = due(database, chosen, due_before=due_before, limit=limit)
    columns = _columns(
        "due", "id", "tries", "exchange", "routing key", "size", "message id", "said", "stored"
    )
    lesser = [name for name in LESSER if name != "due"]
    print_rows(
        found, form, columns, nothing="no message waits", names=NAMES, lesser=lesser, limit=limit
    )
    return Exit.CONFIRMED


@click.command("in-flight", cls=Command, exits={0: "done, also if there are none"})
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
    """
    found = read_in_flight(database, limit=limit)
    columns = _columns("epoch", "tag", "sent", "id", "exchange", "routing key", "message id")
    names = ("epoch", "tag", "id", "message_id", "exchange", "routing_key", "sent_at")
    nothing, lesser = "nothing is in flight", ("routing key", "exchange")
    print_rows(found, form, columns, nothing=nothing, names=names, lesser=lesser, limit=limit)
    return Exit.CONFIRMED


@click.command(cls=Command, exits={0: "done, also if there are none"})
@inspected_option
@limit_option
@form_option
def duplicates(database: Database, limit: int, form: str | None) -> int:
    """List messages with an attempt of uncertain outcome: a queue may or may not have them.

    Consumers may have seen such a message twice, under the same message id; or once, although no
    attempt was confirmed and it is open or was given up. Newest first, as far as the history goes.

    \b
    Example:
      reliablepub outbox duplicates --csv --outbox outbox.db
    """
    with patiently("reading the history"):
        found = read_ambiguous(database, limit=limit)
    columns = _columns("id", "message id", "uncertain", "confirmed", "first", "last")
    names = ("id", "message_id", "unsure", "is_confirmed", "first_at", "last_at")
    nothing, lesser = "no attempt had an uncertain outcome", ("first", "message id")
    print_rows(found, form, columns, nothing=nothing, names=names, lesser=lesser, limit=limit)
    return Exit.CONFIRMED


@click.command(
    cls=Command,
    exits={
        0: "done, also if none is held",
        2: "bad usage, or no parked message holds the key to resume or to skip",
    },
)
@click.option("--resume", metavar="KEY", help="Send the message that holds this key again.")
@click.option(
    "--skip",
    metavar="KEY",
    help="Send the messages behind the one that holds this key, which stays parked.",
)
@limit_option
@inspected_option
@form_option
def keys(
    resume: str | None, skip: str | None, limit: int, database: Database, form: str | None
) -> int:
    """List the ordering keys held by a parked message, and how many messages wait behind it.

    \b
    Examples:
      reliablepub outbox keys --outbox outbox.db
      reliablepub outbox keys --resume order-17 --outbox outbox.db
      reliablepub outbox keys --skip order-17 --outbox outbox.db
    """
    if resume is not None and skip is not None:
        raise click.UsageError("give --resume or --skip, not both")
    with Outbox(database) as opened:
        if resume is not None or skip is not None:
            return _let_go(opened, resume, skip, as_json=form == "json")
        found = opened.held_keys(limit)
    columns = _columns(
        "key", "holds back", "id", "since", "exchange", "routing key", "message id", "said"
    )
    rows = [asdict(key) for key in found]
    lesser = ("message id", "exchange", "routing key", "since")
    names = [field.name for field in fields(HeldKey)]
    print_rows(
        rows, form, columns, nothing="no key is held", names=names, lesser=lesser, limit=limit
    )
    return Exit.CONFIRMED


def _let_go(outbox: Outbox, resume: str | None, skip: str | None, *, as_json: bool) -> int:
    if resume is not None:
        moved, what = outbox.resume_key(resume), "put back"
    else:
        moved, what = outbox.skip_key(skip or ""), "skipped"
    if as_json:
        print_json({"action": "skip" if resume is None else "resume", "changed": moved})
    else:
        print_result(f"{count_of(moved, 'message')} {what}")
    if not moved:
        print_error("no parked message holds this key")
        return Exit.BAD_INPUT
    return Exit.CONFIRMED
