"""``reliablepub outbox edit``: corrects properties, headers, body or address of messages.

Knows: the properties that an operator may change, and how each is written. Must never know: how
messages are selected, or how a row is changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, BinaryIO, Final

import click

from reliablepub.cli.commands import command
from reliablepub.cli.options import keys_option
from reliablepub.cli.outbox.changing import EXITS, change_options, step_in, to_options
from reliablepub.outbox.admin.interventions import Action, Intervention
from reliablepub.outbox.encryption import OutboxKeys

_BOOLS: Final = {"true": True, "false": False}
_PROPERTIES: Final[dict[str, Callable[[str], object]]] = {
    "content_type": str,
    "content_encoding": str,
    "correlation_id": str,
    "reply_to": str,
    "type": str,
    "user_id": str,
    "app_id": str,
    "priority": int,
    "expiration": int,
    "timestamp": datetime.fromisoformat,
    "persistent": _BOOLS.__getitem__,
}
"""What makes the value of each property from its text."""
_FORMS: Final = {
    "priority": "a whole number",
    "expiration": "a whole number of milliseconds",
    "timestamp": "a time such as 2026-12-24T18:00:00+01:00",
    "persistent": "true or false",
}
_HEADER: Final = "header."


def properties_of(given: Sequence[str]) -> dict[str, Any]:
    """The values of ``--set NAME=VALUE``, by name."""
    found = {}
    for one in given:
        name, is_pair, text = one.partition("=")
        if not is_pair:
            raise click.BadParameter(f"{one!r} is not NAME=VALUE")
        make = _PROPERTIES[_known(name)]
        try:
            found[name] = make(text)
        except (ValueError, KeyError) as error:
            raise click.BadParameter(f"{name} is {_FORMS[name]}, and not {text!r}") from error
    return found


def headers_of(given: Sequence[str]) -> dict[str, Any]:
    """The values of ``--header NAME=TEXT`` and ``--header NAME:=JSON``, by name."""
    found: dict[str, Any] = {}
    for one in given:
        name, is_pair, text = one.partition("=")
        if not is_pair or name in ("", ":"):
            raise click.BadParameter(f"{one!r} is neither NAME=TEXT nor NAME:=JSON")
        if not name.endswith(":"):
            found[name] = text
            continue
        try:
            found[name[:-1]] = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise click.BadParameter(f"{one!r}: {text!r} is not JSON") from error
    return found


def names_of(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """The properties and the headers that ``--unset`` names."""
    headers = [name.removeprefix(_HEADER) for name in given if name.startswith(_HEADER)]
    properties = [_known(name) for name in given if not name.startswith(_HEADER)]
    if "persistent" in properties:
        raise click.BadParameter("persistent is always true or false: use --set")
    return properties, headers


def _known(name: str) -> str:
    if name not in _PROPERTIES:
        known = ", ".join(_PROPERTIES)
        raise click.BadParameter(f"{name!r} is not a property that can be changed: {known}")
    return name


def correcting(
    changes: dict[str, Any],
    headers: dict[str, Any],
    unset: tuple[list[str], list[str]],
    *,
    note: str,
    **settings: Any,  # noqa: ANN401 - of the intervention
) -> Intervention:
    """The intervention that makes these changes, and removes these properties and headers."""
    changes |= dict.fromkeys(unset[0])
    # Names alone: values may be secrets, and the note of an intervention is not encrypted.
    names = [*changes, *(f"header {name}" for name in (*headers, *unset[1]))]
    return Intervention(
        Action.EDIT,
        changes=changes,
        headers=headers,
        dropped=frozenset(unset[1]),
        note=": ".join(filter(None, (", ".join(names), note))),
        **settings,
    )


@command(exits=EXITS)
@change_options
@click.option(
    "--set",
    "properties",
    callback=lambda _context, _option, given: properties_of(given),
    multiple=True,
    metavar="NAME=VALUE",
    help="Set a property, such as user_id, priority or content_type; may be repeated.",
)
@click.option(
    "--header",
    "headers",
    callback=lambda _context, _option, given: headers_of(given),
    multiple=True,
    metavar="NAME=TEXT",
    help="Set a header to a text, or with NAME:=JSON to another value; may be repeated.",
)
@click.option(
    "--unset",
    callback=lambda _context, _option, given: names_of(given),
    multiple=True,
    metavar="NAME",
    help="Remove a property, or as header.NAME a header; may be repeated.",
)
@click.option(
    "--body-file",
    "body",
    type=click.File("rb"),
    metavar="FILE",
    help="Replace the body by the content of this file; - is stdin.",
)
@to_options
@keys_option
def edit(
    *,
    properties: dict[str, Any],
    headers: dict[str, Any],
    unset: tuple[list[str], list[str]],
    body: BinaryIO | None,
    to_exchange: str | None,
    to_routing_key: str | None,
    outbox_keys: OutboxKeys | None,
    **common: Any,  # noqa: ANN401 - see `step_in`
) -> int:
    """Correct messages, and send them now: properties, headers, body or address.

    The message id does not change. `outbox show --original` shows the message as it was; it is kept
    as long as the history. Messages are selected by ID (row number, message id, key or correlation
    id), or by a filter. Parked ones are put back. An encrypted message needs its key
    (--outbox-keys).

    \b
    Examples:
      reliablepub outbox edit 17 --unset user_id --outbox outbox.db
      reliablepub outbox edit --reason 406 --header tenant=acme \\
        --set priority=5 --outbox outbox.db
    """
    if body is not None:
        properties["body"] = body.read()
    to = (to_exchange, to_routing_key)
    if not (properties or headers or any(unset)) and to == (None, None):
        options = "--set, --header, --unset, --body-file, --to-exchange or --to-routing-key"
        raise click.UsageError(f"give what to change: {options}")
    make = partial(
        correcting, properties, headers, unset, exchange=to_exchange, routing_key=to_routing_key
    )
    return step_in(make, keys=outbox_keys, **common)
