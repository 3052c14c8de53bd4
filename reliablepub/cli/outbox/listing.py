"""``reliablepub outbox list | schedule | in-flight | duplicates | keys``: lists of messages.

Knows: how messages are found, the columns of each table, and how a held key is let go. Must never
know: SQL, or a broker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial, wraps
from operator import itemgetter
from typing import Any, Final

import click

from reliablepub.cli.choosing import selection_options, selection_options_of_waiting
from reliablepub.cli.commands import Exit, command
from reliablepub.cli.options import Duration, form_option, inspected_option, limit_option
from reliablepub.cli.output import (
    Cells,
    ago,
    answer_words,
    count_of,
    print_either,
    print_error,
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


def _ago(row: Mapping[str, Any], title: str) -> str:
    return ago(row[f"{title}_at"])


def as_listed(row: Mapping[str, Any]) -> dict[str, Any]:
    """A message's row as a list has it; a damaged one may hold other values than numbers."""
    counts = (row[name] for name in ("nacked", "returned", "refused", "uncertain"))
    return {**row, "attempts": sum(count for count in counts if isinstance(count, int))}


_TIMES: Final = ("due", "first", "last", "newest", "oldest", "sent", "stored")
CELLS: Final[Cells] = {
    **{title: partial(_ago, title=title) for title in _TIMES},
    "answer": lambda row: answer_words(row) if row["outcome"] else "",
    "bytes": lambda row: size_of(row["bytes"]),
    "confirmed": lambda row: "yes" if row["is_confirmed"] else "no",
    "exchange": lambda row: row["exchange"] or "(default)",
    "holds back": itemgetter("held_back"),
    "key": itemgetter("ordering_key"),
    "of routing key": lambda row: "(several)" if row["is_several"] else row["routing_key"],
    "said": answer_of,
    "since": lambda row: ago(row["parked_at"]),
    "size": lambda row: size_of(row["size"]),
    "tries": itemgetter("attempts"),
    "uncertain": itemgetter("unsure"),
}
"""The cells that are more than a value of the same name."""
_TITLES: Final = ("id", "state", "stored", "due", "tries", "exchange", "routing key", "size")
COLUMNS: Final = (*_TITLES, "message id", "said")
"""Columns of a table of messages."""
LESSER: Final = ("message id", "size", "due", "stored", "exchange", "tries")
"""Columns that a narrow terminal does not show; the first ones are left out first."""
_EXITS: Final = {0: "done, also if there are none"}
_Rows = list[dict[str, Any]]


def _listing(
    *titles: str,  # "task" is left out if no row has one
    nothing: str,  # printed instead of a table without rows
    names: Sequence[str],  # the header line of CSV without rows
    lesser: Sequence[str] = LESSER,
) -> Callable[[Callable[..., _Rows | Exit]], Callable[..., Exit | None]]:
    """Add --limit, --json and --csv to a command whose function finds rows, and print the rows.

    If the function returns an exit code, it has printed something else.
    """
    show = partial(print_rows, cells=CELLS, nothing=nothing, names=names, lesser=lesser)

    def add(find_rows: Callable[..., _Rows | Exit]) -> Callable[..., Exit | None]:
        @limit_option
        @form_option
        @wraps(find_rows)
        def printed(limit: int, form: str | None, **values: Any) -> Exit | None:  # noqa: ANN401
            with patiently("looking through the outbox"):
                rows = find_rows(limit=limit, **values)
            if isinstance(rows, Exit):
                return rows
            has_tasks = any(row.get("task") for row in rows)
            shown = [one for one in titles if one != "task" or has_tasks]
            show(rows, form, shown, limit=limit)
            return None

        return printed

    return add


@command("list", exits=_EXITS)
@inspected_option
@selection_options
@click.option(
    "--sort", type=click.Choice(list(SORTS)), default="id", show_default=True, help="Sort order."
)
@_listing(
    *(*_TITLES, "message id", "task", "said"), nothing="no message matches", names=(*NAMES, "task")
)
def list_messages(database: Database, chosen: Selection, sort: str, limit: int) -> _Rows:
    """List open, parked and expired messages, with the answer to the last attempt; never a body.

    --state confirmed lists the confirmed messages that a relay with --keep-confirmed keeps.

    \b
    Examples:
      reliablepub outbox list --state parked --outbox outbox.db
      reliablepub outbox list --exchange 'orders*' --older-than 10m \\
        --outbox outbox.db
      reliablepub outbox list --reason 404 --sort attempts --outbox outbox.db
    """
    return with_tasks(database, find(database, chosen, sort=sort, limit=limit))


@command(exits=_EXITS)
@inspected_option
@selection_options
@_listing(
    *("messages", "state", "exchange", "of routing key", "oldest", "newest", "bytes", "answer"),
    nothing="no message matches",
    names=SUMMED,
    lesser=("bytes", "newest"),
)
def summary(database: Database, chosen: Selection, limit: int) -> _Rows:
    """Count messages by state, destination and last answer: what is stuck, why, and since when.

    A destination is an exchange, and a queue in the default exchange. The same filters select the
    messages of a line for `outbox list`, `retry`, `reroute` and `discard`.

    \b
    Examples:
      reliablepub outbox summary --outbox outbox.db
      reliablepub outbox summary --state parked --outbox outbox.db
    """
    return summed(database, chosen)[:limit]


@command(exits=_EXITS)
@inspected_option
@selection_options_of_waiting
@click.option(
    "--within",
    type=Duration(),
    help="Only if due within this time from now, such as 90s, 5m, 2h or 7d.",
)
@_listing(
    *("due", "id", "tries", "exchange", "routing key", "size", "message id", "said", "stored"),
    nothing="no message waits",
    names=NAMES,
    lesser=[name for name in LESSER if name != "due"],
)
def schedule(database: Database, chosen: Selection, within: float | None, limit: int) -> _Rows:
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
    return due(database, chosen, due_before=due_before, limit=limit)


@command("in-flight", exits=_EXITS)
@inspected_option
@_listing(
    *("epoch", "tag", "sent", "id", "exchange", "routing key", "message id"),
    nothing="nothing is in flight",
    names=("epoch", "tag", "id", "message_id", "exchange", "routing_key", "sent_at"),
    lesser=("routing key", "exchange"),
)
def in_flight(database: Database, limit: int) -> _Rows:
    """List the delivery tags that the running relay has sent and the broker has not answered.

    An epoch identifies one channel: the number of the relay's run, and of the channel in that run.
    Tags count from 1 on each channel.

    \b
    Example:
      reliablepub outbox in-flight --outbox outbox.db
    """
    return read_in_flight(database, limit=limit)


@command(exits=_EXITS)
@inspected_option
@_listing(
    *("id", "message id", "uncertain", "confirmed", "first", "last"),
    nothing="no attempt had an uncertain outcome",
    names=("id", "message_id", "unsure", "is_confirmed", "first_at", "last_at"),
    lesser=("first", "message id"),
)
def duplicates(database: Database, limit: int) -> _Rows:
    """List messages with an attempt of uncertain outcome: a queue may or may not have them.

    Consumers may have seen such a message twice, under the same message id; or once, although no
    attempt was confirmed and it is open or was given up. Newest first, as far as the history goes.

    \b
    Example:
      reliablepub outbox duplicates --csv --outbox outbox.db
    """
    return read_ambiguous(database, limit=limit)


@command(
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
@inspected_option
@_listing(
    *("key", "holds back", "id", "since", "exchange", "routing key", "message id", "said"),
    nothing="no key is held",
    names=[field.name for field in fields(HeldKey)],
    lesser=("message id", "exchange", "routing key", "since"),
)
def keys(database: Database, resume: str | None, skip: str | None, limit: int) -> _Rows | Exit:
    """List the ordering keys held by a parked message, and how many messages wait behind it.

    \b
    Examples:
      reliablepub outbox keys --outbox outbox.db
      reliablepub outbox keys --resume order-17 --outbox outbox.db
      reliablepub outbox keys --skip order-17 --outbox outbox.db
    """
    if resume is not None and skip is not None:
        raise click.UsageError("give --resume or --skip, not both")
    with Outbox(database) as outbox:
        if resume is not None:
            return _let_go("resume", outbox.resume_key(resume), "put back")
        if skip is not None:
            return _let_go("skip", outbox.skip_key(skip), "skipped")
        return [asdict(key) for key in outbox.held_keys(limit)]


def _let_go(action: str, moved: int, what: str) -> Exit:
    is_json = click.get_current_context().params["form"] == "json"
    text = f"{count_of(moved, 'message')} {what}"
    print_either({"action": action, "changed": moved}, text, as_json=is_json)
    if moved:
        return Exit.CONFIRMED
    print_error("no parked message holds this key")
    return Exit.BAD_INPUT
