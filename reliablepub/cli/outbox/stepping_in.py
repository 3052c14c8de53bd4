"""``reliablepub outbox retry | park | discard | reroute``: changes messages in an outbox.

Knows: how messages are selected and shown, and the question before a change. Must never know: SQL,
or how a relay learns of the change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import click

from reliablepub.cli.choosing import ask, named, rows_named_or_nothing, selection_options
from reliablepub.cli.exits import Exit
from reliablepub.cli.options import inspected_option, json_option, keys_option
from reliablepub.cli.outbox.listing import COLUMNS, LESSER
from reliablepub.cli.output import (
    Form,
    count_of,
    print_change,
    print_error,
    print_json,
    print_note,
    print_rows,
)
from reliablepub.cli.progress import counting, patiently
from reliablepub.errors import InvalidMessage
from reliablepub.outbox.admin.interventions import FIT, Action, Effect, Intervention, intervene
from reliablepub.outbox.admin.selection import GIVEN_UP_STATES, STATES, Selection, find, find_ids
from reliablepub.outbox.admin.story import tell
from reliablepub.outbox.database import Database
from reliablepub.outbox.encryption import OutboxKeys

_PREVIEW: Final = 10
"""Number of messages that ``--dry-run`` lists."""

_DONE: Final = {
    Action.RETRY: "put back",
    Action.PARK: "parked",
    Action.DISCARD: "discarded",
    Action.REROUTE: "rerouted",
}


def _intervention(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments and options that the four commands have in common."""

    @functools.wraps(function)
    def with_common(**values: Any) -> Any:  # noqa: ANN401 - click's
        return function(**values)

    options: list[Callable[[Callable[..., Any]], Callable[..., Any]]] = [
        click.argument("names", metavar="[ID...]", nargs=-1),
        inspected_option,
        selection_options,
        click.option(
            "--all", "is_all", is_flag=True, help="Select all messages that the command can change."
        ),
        click.option("--note", default="", help="Reason, shown by explain."),
        click.option("--dry-run", is_flag=True, help="Only show which messages would be changed."),
        click.option("--yes", is_flag=True, help="Do not ask."),
        json_option,
    ]
    for option in reversed(options):
        with_common = option(with_common)
    return with_common


@click.command()
@_intervention
def retry(**common: Any) -> int:  # noqa: ANN401 - see `_step_in`
    """Send messages again now: parked and expired ones are put back, waiting ones become due.

    Their earlier refusals no longer count. Messages are selected by ID (row number, message id or
    key), or by a filter, which selects parked and expired ones unless --state is given.

    \b
    Examples:
      reliablepub outbox retry 17 18 --outbox outbox.db
      reliablepub outbox retry --reason NO_ROUTE --exchange orders \\
        --outbox outbox.db
      reliablepub outbox retry --all --yes --outbox outbox.db

    \b
    Exit codes:
      0  done
      2  bad usage, an unknown ID, or the question was not answered with yes:
         nothing was changed; or a message was left alone because of its state or
         damage: the others were changed
      3  some messages are in flight and were left alone, or interrupted
      4  the outbox cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    return _step_in(Action.RETRY, GIVEN_UP_STATES, **common)


@click.command()
@_intervention
def park(**common: Any) -> int:  # noqa: ANN401
    """Park open messages: they are kept, and not sent until an operator retries them.

    Messages are selected by ID (row number, message id or key), or by a filter. A running relay
    no longer sends them. Messages in flight are left alone, because the broker may have them.

    \b
    Examples:
      reliablepub outbox park 17 --note 'wrong price' --outbox outbox.db
      reliablepub outbox park --exchange orders --dry-run --outbox outbox.db

    \b
    Exit codes:
      0  done
      2  bad usage, an unknown ID, or the question was not answered with yes:
         nothing was changed; or a message was left alone because of its state or
         damage: the others were changed
      3  some messages are in flight and were left alone, or interrupted
      4  the outbox cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    return _step_in(Action.PARK, FIT[Action.PARK], **common)


@click.command()
@_intervention
def discard(**common: Any) -> int:  # noqa: ANN401
    """Delete messages for good; they are counted as discarded, and cannot be restored.

    Messages are selected by ID (row number, message id or key), or by a filter, which selects
    parked and expired ones unless --state is given. The command asks first. `outbox export` keeps a
    copy.

    \b
    Examples:
      reliablepub outbox discard 17 --outbox outbox.db
      reliablepub outbox discard --state expired --older-than 7d --yes \\
        --outbox outbox.db

    \b
    Exit codes:
      0  done
      2  bad usage, an unknown ID, or the question was not answered with yes:
         nothing was changed; or a message was left alone because of its state or
         damage: the others were changed
      3  some messages are in flight and were left alone, or interrupted
      4  the outbox cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    return _step_in(Action.DISCARD, GIVEN_UP_STATES, **common)


@click.command()
@_intervention
@click.option("--to-exchange", metavar="NAME", help="New exchange; unchanged unless given.")
@click.option("--to-routing-key", metavar="KEY", help="New routing key; unchanged unless given.")
@keys_option
def reroute(
    to_exchange: str | None,
    to_routing_key: str | None,
    outbox_keys: OutboxKeys | None,
    **common: Any,  # noqa: ANN401
) -> int:
    """Send messages now, to another exchange or with another routing key.

    Messages are selected by ID (row number, message id or key), or by a filter. Parked ones are put
    back. The message id does not change. An encrypted message is bound to its address, so changing
    the address needs its key (--outbox-keys).

    \b
    Examples:
      reliablepub outbox reroute 17 --to-exchange orders --outbox outbox.db
      reliablepub outbox reroute --exchange ordres --to-exchange orders \\
        --outbox outbox.db

    \b
    Exit codes:
      0  done
      2  bad usage, an unknown ID, or the question was not answered with yes:
         nothing was changed; or a message was left alone because of its state or
         damage: the others were changed
      3  some messages are in flight and were left alone, or interrupted
      4  the outbox cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    if to_exchange is None and to_routing_key is None:
        raise click.UsageError("give --to-exchange or --to-routing-key")
    return _step_in(
        Action.REROUTE,
        STATES,
        exchange=to_exchange,
        routing_key=to_routing_key,
        keys=outbox_keys,
        **common,
    )


def _step_in(
    action: Action,
    states: tuple[str, ...],
    *,
    names: tuple[str, ...],
    database: Database,
    chosen: Selection,
    is_all: bool,
    note: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    exchange: str | None = None,
    routing_key: str | None = None,
    keys: OutboxKeys | None = None,
) -> int:
    """Select the messages, ask, change them, and report."""
    is_filter = chosen != Selection()
    if bool(names) + is_filter + is_all != 1:
        raise click.UsageError("give IDs, or a filter, or --all: one of the three")
    try:
        what = Intervention(action, exchange, routing_key, note)
    except InvalidMessage as error:
        raise click.UsageError(str(error)) from error
    chosen = chosen.within(states)
    if is_filter and (unfit := [one for one in chosen.states if one not in FIT[action]]):
        takes = " or ".join(FIT[action])
        raise click.UsageError(f"{action.value} takes messages that are {takes}, not {unfit[0]}")
    with patiently("looking through the outbox"):
        ids = rows_named_or_nothing(database, names) if names else find_ids(database, chosen)
    effect = Effect()
    if dry_run:
        if names:
            rows, effect = _foreseen(database, ids, action)
        else:
            rows = find(database, chosen, limit=_PREVIEW)
        if not as_json:
            print_rows(
                rows[:_PREVIEW], Form.TABLE, COLUMNS, nothing="no message matches", lesser=LESSER
            )
    else:
        if ids and not yes and (not names or action is Action.DISCARD):
            ask(_question(what, ids, database.name, is_named=bool(names)))
        with counting(len(ids)) as progress:
            effect = intervene(database, ids, what, keys=keys, progress=progress)
    return _report(action, ids, effect, dry_run=dry_run, as_json=as_json, is_named=bool(names))


def _foreseen(
    database: Database, ids: list[int], action: Action
) -> tuple[list[dict[str, Any]], Effect]:
    """The rows of messages, and those of them that the action would leave alone."""
    rows, effect = [], Effect()
    for id_ in ids:
        story = tell(database, id_)
        message = dict(story.message)
        if message:
            tries = sum(message[name] for name in ("nacked", "returned", "refused", "uncertain"))
            rows.append(message | {"attempts": tries})
        if story.state == "in flight":
            effect.in_flight.append(id_)
        elif story.state not in FIT[action]:
            effect.unfit.append(id_)
    return rows, effect


def _question(what: Intervention, ids: list[int], outbox: str, *, is_named: bool) -> str:
    for_good = " for good" if what.action is Action.DISCARD else ""
    to = [f"exchange {what.exchange!r}"] if what.exchange is not None else []
    to += [f"routing key {what.routing_key!r}"] if what.routing_key is not None else []
    where = f" to {', '.join(to)}" if to else ""
    which = named(ids) if is_named else count_of(len(ids), "message")
    return f"{what.action.value} {which} of {outbox}{where}{for_good}?"


def _report(
    action: Action, ids: list[int], effect: Effect, *, dry_run: bool, as_json: bool, is_named: bool
) -> int:
    if as_json:
        result = {
            "action": action.value,
            "dry_run": dry_run,
            "chosen": len(ids),
            "changed": effect.changed,
            "in_flight": effect.in_flight,
            "unfit": effect.unfit,
            "damaged": effect.damaged,
            "possibly_persisted": effect.possible,
        }
        print_json(result)
    else:
        fit = len(ids) - len(effect.in_flight) - len(effect.unfit)
        print_change(fit, effect.changed, _DONE[action], dry_run=dry_run)
    left_alone = "would be left alone" if dry_run else "left alone"
    if effect.possible:
        print_note(
            f"a queue may still have {named(effect.possible)}: an attempt had no answer, "
            "or was nacked; do not publish them again under another message id"
        )
    if effect.damaged:
        print_error(f"{named(effect.damaged)} {left_alone}: damaged, or unfit for the new address")
    if effect.in_flight:
        print_note(
            f"{named(effect.in_flight)} {left_alone}: in flight, so the broker may have it; wait "
            "for its answer, or stop the relay first"
        )
    if effect.unfit and is_named:
        allowed = " or ".join(FIT[action])
        print_error(f"{named(effect.unfit)} {left_alone}: gone, or not {allowed}")
    if effect.damaged or (effect.unfit and is_named):
        return Exit.BAD_INPUT
    return Exit.OPEN if effect.in_flight else Exit.CONFIRMED
