"""Choosing messages: filter options that several commands share, lookup by ID, and confirmation.

Knows: options, which messages they select, and whether stdin is a terminal. Must never know: what a
command does with the messages.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import click

from reliablepub.cli.commands import Exit, Failure
from reliablepub.cli.options import Duration, alike, together
from reliablepub.cli.output import count_of
from reliablepub.outbox.admin.selection import CONFIRMED, STATES, Selection
from reliablepub.outbox.admin.story import resolve, tell
from reliablepub.outbox.database import Database
from reliablepub.printable import printable

_NAMED_MAX: Final = 5
"""Messages that are named: more do not fit on a line."""


_ANY: Final = "* stands for any characters, ? for one."
_AGES: Final = "such as 90s, 5m, 2h or 7d."
_state_option: Final = click.option(
    "--state",
    type=click.Choice((*STATES, CONFIRMED)),
    multiple=True,
    help="Only messages in this state; may be repeated. Confirmed messages are there only if the "
    "relay keeps them.",
)
_other_options: Final = together(
    alike(
        {
            "--exchange": f"Only to this exchange; {_ANY}",
            "--routing-key": f"Only with this routing key; {_ANY}",
            "--key": f"Only with this ordering key; {_ANY}",
        },
        metavar="PATTERN",
    ),
    click.option(
        "--reason",
        metavar="TEXT",
        help="Only if the answer to an attempt contains this text, such as 404 or no_route.",
    ),
    alike(
        {
            "--older-than": f"Only if stored longer ago than this, {_AGES}",
            "--newer-than": f"Only if stored more recently than this, {_AGES}",
        },
        type=Duration(),
    ),
)


def selection_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the filter options; the function receives them as ``chosen``, a `Selection`."""
    return _state_option(selection_options_of_waiting(function))


def selection_options_of_waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the filter options of a command for waiting messages; see `selection_options`."""

    @functools.wraps(function)
    def with_selection(**values: Any) -> Any:  # noqa: ANN401 - click's
        now = time.time()
        older_than, newer_than = values.pop("older_than"), values.pop("newer_than")
        chosen = Selection(
            states=values.pop("state", ()) or STATES,
            exchange=values.pop("exchange"),
            routing_key=values.pop("routing_key"),
            ordering_key=values.pop("key"),
            reason=values.pop("reason"),
            stored_before=None if older_than is None else now - older_than,
            stored_after=None if newer_than is None else now - newer_than,
        )
        return function(chosen=chosen, **values)

    return _other_options(with_selection)


def rows_named(database: Database, names: tuple[str, ...], *, said: str = "") -> list[int]:
    """The row ids for the given IDs: row numbers, message ids or keys of `Outbox.enqueue`.

    The error for an unknown ID, which may be a typing error, begins with what is said.
    """
    found: list[int] = []
    for name in names:
        rows = resolve(database, name)
        if not rows:
            raise unknown(database, name, said=said)
        found += rows
    return list(dict.fromkeys(found))  # two IDs may name one message


def named(ids: list[int]) -> str:
    """Messages by their row ids, or how many they are."""
    return _named(ids, [str(id_) for id_ in ids])


def identified(database: Database, ids: list[int]) -> str:
    """Messages by their row ids and message ids, for a question; or how many they are.

    A number that the operator meant as a message id is taken as that of a row.
    """
    stories = [tell(database, id_) for id_ in ids[:_NAMED_MAX]]
    names = ["not in the outbox" if one.message_id is None else one.message_id for one in stories]
    known = zip(stories, names, strict=True)
    return _named(ids, [printable(f"{one.id} ({name})") for one, name in known])


def _named(ids: list[int], names: list[str]) -> str:
    if len(ids) > _NAMED_MAX:
        return count_of(len(ids), "message")
    return f"message{'' if len(ids) == 1 else 's'} {', '.join(names)}"


def unknown(database: Database, name: str, *, said: str = "") -> Failure:
    """The error for an ID that the outbox does not know.

    It does not prove that the message was never stored: a message that was confirmed at the first
    attempt leaves no history.
    """
    return Failure(
        f"{said}{database.name} has no record of message {name!r}: it was never stored here, or it "
        "was confirmed at the first attempt, which leaves no trace (look for it in the queue), or "
        "its record was pruned, or its key cancelled",
        Exit.BAD_INPUT,
    )


def ask(question: str) -> None:
    """Ask a question; return only if the answer is yes."""
    if not can_be_answered():
        raise Failure(f"{question} There is no terminal to ask on; give --yes", Exit.BAD_INPUT)
    if not click.confirm(question, err=True):
        raise Failure("nothing was changed", Exit.BAD_INPUT)


def can_be_answered() -> bool:
    """Whether stdin is a terminal."""
    return sys.stdin.isatty()
