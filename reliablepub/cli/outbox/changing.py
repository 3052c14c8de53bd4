"""``reliablepub outbox retry | park | discard | reroute | replay | cancel | reschedule``.

Knows: how messages are selected and shown, and the question before a change. Must never know: SQL,
or how a relay learns of a change.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, Final

import click

from reliablepub.cli.choosing import ask, identified, named, rows_named, selection_options
from reliablepub.cli.commands import Exit, command
from reliablepub.cli.options import inspected_option, json_option, keys_option, moment, together
from reliablepub.cli.outbox.listing import CELLS, COLUMNS, LESSER, as_listed
from reliablepub.cli.output import count_of, print_either, print_error, print_note, print_rows
from reliablepub.cli.progress import changing, patiently
from reliablepub.errors import InvalidMessage
from reliablepub.outbox.admin.interventions import Action, Effect, Intervention, foresee, intervene
from reliablepub.outbox.admin.scheduling import cancelling, rescheduling
from reliablepub.outbox.admin.selection import GIVEN_UP_STATES, Selection, find, find_ids
from reliablepub.outbox.admin.story import tell
from reliablepub.outbox.database import Database
from reliablepub.outbox.encryption import OutboxKeys

_PREVIEW: Final = 10
"""Number of messages that ``--dry-run`` lists."""

_SELECTED: Final = dict.fromkeys((Action.RETRY, Action.DISCARD), GIVEN_UP_STATES)
"""The states that a filter selects, unless they are all that fit the action."""
_DONE: Final = {
    "retry": "put back",
    "park": "parked",
    "discard": "discarded",
    "reroute": "rerouted",
    "edit": "edited",
    "replay": "put back",
    "cancel": "cancelled",
    "reschedule": "rescheduled",
}
_UNFIT: Final = {
    Action.REROUTE: "damaged, or unfit for the new address",
    Action.EDIT: "damaged, or unfit for the change",
}
_REFUSED: Final = (
    "bad usage, an unknown ID, or the question was not answered with yes: nothing was changed; or a"
)
EXITS: Final = {
    2: f"{_REFUSED} message was left alone because of its state or damage: the others were changed",
    3: "some messages are in flight and were left alone, or interrupted",
}
_TOO_LATE: Final = "it was too late for some messages, which a queue may have, or interrupted"
_UNCHANGED: Final = "nothing was changed: "
_note_option: Final = click.option("--note", default="", help="Reason, shown by explain.")
_yes_option: Final = click.option("--yes", is_flag=True, help="Do not ask.")
to_options: Final = together(
    click.option("--to-exchange", metavar="NAME", help="New exchange; unchanged unless given."),
    click.option(
        "--to-routing-key", metavar="KEY", help="New routing key; unchanged unless given."
    ),
)
change_options: Final = together(
    click.argument("names", metavar="[ID...]", nargs=-1),
    inspected_option,
    selection_options,
    click.option(
        "--all",
        "is_all",
        is_flag=True,
        help="Select every message that a filter without --state would select.",
    ),
    _note_option,
    click.option("--dry-run", is_flag=True, help="Only show which messages would be changed."),
    _yes_option,
    json_option,
)
"""What the commands that select messages by ID or by filter have in common."""


@command(exits=EXITS)
@change_options
def retry(**common: Any) -> int:  # noqa: ANN401 - see `step_in`
    """Send messages again now: parked and expired ones are put back, waiting ones become due.

    Their earlier refusals no longer count. Messages are selected by ID (row number, message id or
    key), or by a filter, which selects parked and expired ones unless --state is given.

    \b
    Examples:
      reliablepub outbox retry 17 18 --outbox outbox.db
      reliablepub outbox retry --reason NO_ROUTE --exchange orders \\
        --outbox outbox.db
      reliablepub outbox retry --all --yes --outbox outbox.db
    """
    return step_in(partial(Intervention, Action.RETRY), **common)


@command(exits=EXITS)
@change_options
def park(**common: Any) -> int:  # noqa: ANN401
    """Park open messages: they are kept, and not sent until an operator retries them.

    Messages are selected by ID (row number, message id, key or correlation id), or by a filter. A
    running relay no longer sends them. Messages in flight are left alone, because the broker may
    have them.

    \b
    Examples:
      reliablepub outbox park 17 --note 'wrong price' --outbox outbox.db
      reliablepub outbox park --exchange orders --dry-run --outbox outbox.db
    """
    return step_in(partial(Intervention, Action.PARK), **common)


@command(exits=EXITS)
@change_options
def discard(**common: Any) -> int:  # noqa: ANN401
    """Delete messages for good; they are counted as discarded, and cannot be restored.

    Messages are selected by ID (row number, message id, key or correlation id), or by a filter,
    which selects parked and expired ones unless --state is given. The command asks first. `outbox
    export` keeps a copy.

    \b
    Examples:
      reliablepub outbox discard 17 --outbox outbox.db
      reliablepub outbox discard --state expired --older-than 7d --yes \\
        --outbox outbox.db
    """
    return step_in(partial(Intervention, Action.DISCARD), **common)


@command(exits=EXITS)
@change_options
@to_options
@keys_option
def reroute(
    to_exchange: str | None,
    to_routing_key: str | None,
    outbox_keys: OutboxKeys | None,
    **common: Any,  # noqa: ANN401
) -> int:
    """Send messages now, to another exchange or with another routing key.

    Messages are selected by ID (row number, message id, key or correlation id), or by a filter.
    Parked ones are put back. The message id does not change. An encrypted message is bound to its
    address, so changing the address needs its key (--outbox-keys).

    \b
    Examples:
      reliablepub outbox reroute 17 --to-exchange orders --outbox outbox.db
      reliablepub outbox reroute --exchange ordres --to-exchange orders \\
        --outbox outbox.db
    """
    if to_exchange is None and to_routing_key is None:
        raise click.UsageError("give --to-exchange or --to-routing-key")
    what = partial(Intervention, Action.REROUTE, exchange=to_exchange, routing_key=to_routing_key)
    return step_in(what, keys=outbox_keys, **common)


@command(exits=EXITS)
@change_options
def replay(**common: Any) -> int:  # noqa: ANN401
    """Send confirmed messages again, such as those of a queue that was deleted.

    A relay with --keep-confirmed keeps each message for that time after its confirm; `outbox list
    --state confirmed` lists them. They are sent under the same message id, so a consumer that
    remembers ids leaves out those that it has. Messages are selected by ID (row number, message
    id, key or correlation id), or by a filter.

    \b
    Examples:
      reliablepub outbox replay --exchange '' --routing-key invoices \\
        --newer-than 2h --dry-run --outbox outbox.db
      reliablepub outbox replay --exchange orders --note 'queue was deleted' \\
        --outbox outbox.db
    """
    return step_in(partial(Intervention, Action.REPLAY), **common)


def step_in(
    make: Callable[..., Intervention],  # gets the note
    *,
    names: tuple[str, ...],
    database: Database,
    chosen: Selection,
    is_all: bool,
    note: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    keys: OutboxKeys | None = None,
) -> int:
    """Select the messages, ask, change them, and report."""
    is_filter = chosen != Selection()
    if bool(names) + is_filter + is_all != 1:
        raise click.UsageError("give IDs, or a filter, or --all: one of the three")
    try:
        what = make(note=note)
    except InvalidMessage as error:
        raise click.UsageError(str(error)) from error
    chosen = chosen.within(_SELECTED.get(what.action, what.states))
    if is_filter and (unfit := [one for one in chosen.states if one not in what.states]):
        takes = _any_of(what.states)
        raise click.UsageError(f"{_verb()} takes messages that are {takes}, not {unfit[0]}")
    with patiently("looking through the outbox"):
        ids = rows_named(database, names, said=_UNCHANGED) if names else find_ids(database, chosen)
    if ids and not (dry_run or yes) and (not names or what.action is Action.DISCARD):
        which = identified(database, ids) if names else count_of(len(ids), "message")
        ask(_question(what, which, database.name))
    selection = None if names else chosen
    effect = _carried_out(database, ids, what, dry_run=dry_run, selection=selection, keys=keys)
    if dry_run and not as_json:
        rows = _rows(database, ids) if names else find(database, chosen, limit=_PREVIEW)
        nothing = "no message matches"
        print_rows(rows, None, COLUMNS, cells=CELLS, nothing=nothing, lesser=LESSER)
    return _report(what, ids, effect, dry_run=dry_run, as_json=as_json, is_named=bool(names))


def _carried_out(
    database: Database,
    ids: list[int],
    what: Intervention,
    *,
    dry_run: bool,
    selection: Selection | None = None,
    keys: OutboxKeys | None = None,
) -> Effect:
    """What the change has done, or would do."""
    if dry_run:
        with patiently("looking at the messages"):
            return foresee(database, ids, what, keys=keys)
    with changing(len(ids)) as show:
        progress = partial(show, "done")
        return intervene(database, ids, what, selection=selection, keys=keys, progress=progress)


def _verb() -> str:
    """The name of the command, such as ``retry``."""
    return click.get_current_context().info_name or ""


def _rows(database: Database, ids: list[int]) -> list[dict[str, Any]]:
    """The first of these messages, as rows of a list."""
    messages = (dict(tell(database, id_).message) for id_ in ids)
    return [as_listed(message) for message in islice(filter(None, messages), _PREVIEW)]


def _any_of(states: tuple[str, ...]) -> str:
    """States in words: ``waiting, parked or expired``."""
    *others, last = states
    return f"{', '.join(others)} or {last}" if others else last


def _question(what: Intervention, which: str, outbox: str) -> str:
    for_good = " for good" if what.action is Action.DISCARD else ""
    to = [f"exchange {what.exchange!r}"] if what.exchange is not None else []
    to += [f"routing key {what.routing_key!r}"] if what.routing_key is not None else []
    where = f" to {', '.join(to)}" if to else ""
    return f"{_verb()} {which} of {outbox}{where}{for_good}?"


def _report(
    what: Intervention,
    ids: list[int],
    effect: Effect,
    *,
    dry_run: bool,
    as_json: bool,
    is_named: bool,
) -> int:
    left_alone = _print(
        ids, effect, dry_run=dry_run, as_json=as_json, possibly_persisted=effect.possible
    )
    if effect.possible:
        print_note(
            f"a queue may still have {named(effect.possible)}: an attempt had no answer, "
            "or was nacked; do not publish them again under another message id"
        )
    if effect.damaged:
        why = _UNFIT.get(what.action, "damaged")
        print_error(f"{named(effect.damaged)} {left_alone}: {why}")
    if effect.in_flight:
        print_note(
            f"{named(effect.in_flight)} {left_alone}: in flight, so the broker may have it; wait "
            "for its answer, or stop the relay first"
        )
    if effect.unfit and is_named:
        states = _any_of(what.states)
        print_error(f"{named(effect.unfit)} {left_alone}: gone, or in a state other than {states}")
    elif effect.unfit:
        print_note(f"{named(effect.unfit)} left alone: gone or changed since they were selected")
    if effect.damaged or (effect.unfit and is_named):
        return Exit.BAD_INPUT
    return Exit.OPEN if effect.in_flight else Exit.CONFIRMED


@command(
    exits={
        2: f"{_REFUSED} message has left the outbox or is damaged: the others were cancelled",
        3: _TOO_LATE,
    },
)
@click.argument("names", metavar="ID...", nargs=-1, required=True)
@inspected_option
@_note_option
@click.option("--dry-run", is_flag=True, help="Only show how many messages would be cancelled.")
@_yes_option
@json_option
def cancel(*, note: str, yes: bool, **common: Any) -> int:  # noqa: ANN401 - see `_change`
    """Delete messages that were not sent, such as scheduled ones; their keys can be used again.

    Messages are selected by ID (row number, message id, key or correlation id). A message is
    cancelled or sent, never both, even while a relay runs. Cancelled messages count as discarded.
    The command asks first.

    \b
    Examples:
      reliablepub outbox cancel 'order 17 created' --outbox outbox.db
      reliablepub outbox cancel 17 18 --yes --note 'customer has left' \\
        --outbox outbox.db
    """
    return _change(cancelling(note or "cancelled"), asks=not yes, **common)


@command(
    exits={
        2: "bad usage, or an unknown ID: nothing was changed; or a message is no longer open or is "
        "damaged: the others were rescheduled",
        3: _TOO_LATE,
    },
)
@click.argument("names", metavar="ID...", nargs=-1, required=True)
@click.option(
    "--not-before",
    callback=moment,
    required=True,
    metavar="WHEN",
    help="The new time, such as 2026-12-24T18:00:00+01:00; one in the past sends the message now.",
)
@inspected_option
@_note_option
@click.option("--dry-run", is_flag=True, help="Only show how many messages would be rescheduled.")
@json_option
def reschedule(*, not_before: datetime, note: str, **common: Any) -> int:  # noqa: ANN401
    """Change the time at which open messages are sent, unless a queue may have them already.

    Messages are selected by ID (row number, message id, key or correlation id). Earlier refusals no
    longer count; a deadline stays. The command works beside a relay.

    \b
    Examples:
      reliablepub outbox reschedule 17 \\
        --not-before 2026-12-24T18:00:00+01:00 --outbox outbox.db
    """
    return _change(rescheduling(not_before, note), **common)


def _change(
    what: Intervention,
    *,
    names: tuple[str, ...],
    database: Database,
    dry_run: bool,
    as_json: bool,
    asks: bool = False,
) -> int:
    """Change messages that were not sent, and report."""
    ids = rows_named(database, names, said=_UNCHANGED)
    if asks and not dry_run:
        ask(f"{_verb()} {identified(database, ids)} of {database.name} for good?")
    effect = _carried_out(database, ids, what, dry_run=dry_run)
    left_alone = _print(ids, effect, dry_run=dry_run, as_json=as_json, in_flight="too_late")
    left = effect.unfit + effect.damaged
    if effect.in_flight:
        print_note(
            f"{named(effect.in_flight)} {left_alone}: in flight, or an attempt had no answer or "
            "was nacked, so a queue may have it"
        )
    if left:
        print_error(f"{named(left)} {left_alone}: gone, given up, or damaged")
        return Exit.BAD_INPUT
    return Exit.OPEN if effect.in_flight else Exit.CONFIRMED


def _print(
    ids: list[int],
    effect: Effect,
    *,
    dry_run: bool,
    as_json: bool,
    in_flight: str = "in_flight",  # how JSON names the messages that are
    **more: object,  # for JSON
) -> str:
    """Print how many messages were changed, or would be; return what to say of the others."""
    others = {in_flight: effect.in_flight, "unfit": effect.unfit, "damaged": effect.damaged}
    changed = 0 if dry_run else effect.changed
    head = {"action": _verb(), "dry_run": dry_run, "chosen": len(ids), "changed": changed}
    count = len(ids) - sum(map(len, others.values())) if dry_run else changed
    done = f"{'would be ' if dry_run else ''}{_DONE[_verb()]}"
    text = f"{count_of(count, 'message')} {done}"
    print_either({**head, **others, **more}, text, as_json=as_json)
    return "would be left alone" if dry_run else "left alone"
