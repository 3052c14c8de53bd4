"""What a form asks for: which messages, and which intervention.

Knows: the fields of the forms, and the interventions that there are. Must never know: HTTP, HTML.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import click

from reliablepub.cli.options import Duration
from reliablepub.cli.outbox.editing import correcting, headers_of, names_of, properties_of
from reliablepub.errors import InvalidMessage
from reliablepub.outbox.admin.interventions import (
    FIT,
    Action,
    Effect,
    Intervention,
    foresee,
    intervene,
)
from reliablepub.outbox.admin.scheduling import cancelling
from reliablepub.outbox.admin.selection import (
    CONFIRMED,
    GIVEN_UP_STATES,
    STATES,
    Selection,
    find_ids,
)
from reliablepub.outbox.database import Database
from reliablepub.outbox.encryption import OutboxKeys

Fields = Mapping[str, Sequence[str]]
"""The values of a form or a query, by name."""


class BadForm(Exception):
    """A field cannot be used; the text says which, and why."""


@dataclass(frozen=True)
class Verb:
    """One change that the page offers."""

    label: str
    help: str
    states: tuple[str, ...]  # of the messages that a filter selects without a state
    is_addressed: bool = False  # takes an exchange and a routing key
    is_editing: bool = False  # takes properties, headers and a body


VERBS: Final = {
    "retry": Verb("Retry", "Send them again now.", GIVEN_UP_STATES),
    "park": Verb("Park", "Keep them, and send them no more.", FIT[Action.PARK]),
    "reroute": Verb("Reroute", "Send them to another address.", GIVEN_UP_STATES, is_addressed=True),
    "edit": Verb(
        "Edit",
        "Correct them, and send them; the originals are kept.",
        GIVEN_UP_STATES,
        is_addressed=True,
        is_editing=True,
    ),
    "replay": Verb("Replay", "Send confirmed messages once more.", (CONFIRMED,)),
    "skip": Verb(
        "Skip", "Leave them parked, and send the later messages of their keys.", ("parked",)
    ),
    "cancel": Verb("Cancel", "Delete those that no queue can have.", FIT[Action.DISCARD]),
    "discard": Verb("Discard", "Delete them for good.", GIVEN_UP_STATES),
}

FILTERS: Final = {
    "exchange": "Exchange",
    "routing_key": "Routing key",
    "ordering_key": "Ordering key",
    "reason": "Answer contains",
    "older_than": "Older than",
    "newer_than": "Newer than",
}
"""Fields that select messages, beside their states, and their labels."""


def selection_of(fields: Fields) -> Selection:
    """The messages that a form or a query selects."""
    states = tuple(fields.get("state", ()))
    if unknown := set(states) - {*STATES, CONFIRMED}:
        raise BadForm(f"there is no state {min(unknown)!r}")
    texts = {name: _text(fields, name) or None for name in FILTERS}
    now = time.time()
    spans = {}
    for name, field in (("older_than", "stored_before"), ("newer_than", "stored_after")):
        if (text := texts.pop(name)) is not None:
            spans[field] = now - _duration(text)
    return Selection(states=states or STATES, **texts, **spans)  # type: ignore[arg-type]


def _duration(text: str) -> float:
    try:
        return Duration().convert(text, None, None)
    except click.BadParameter as error:
        raise BadForm(error.message) from error


def _text(fields: Fields, name: str) -> str:
    return next(iter(fields.get(name, ())), "").strip()


@dataclass(frozen=True)
class Change:
    """An intervention, and the messages that it is for."""

    verb: str
    what: Intervention
    ids: tuple[int, ...]  # chosen one by one; empty: those of the selection
    selection: Selection

    @classmethod
    def of(cls, fields: Fields, person: str) -> Change:
        """The change that a form asks for; `BadForm` if a field cannot be used."""
        verb = _text(fields, "verb")
        if verb not in VERBS:
            raise BadForm("choose what to do")
        try:
            ids = tuple(map(int, fields.get("id", ())))
        except ValueError:
            raise BadForm("an id is not a number") from None
        who: dict[str, Any] = {"person": person} if person else {}
        try:
            what = _intervention(verb, fields, who)
        except (InvalidMessage, click.BadParameter) as error:
            raise BadForm(getattr(error, "message", str(error))) from error
        return cls(verb, what, ids, selection_of(fields).within(VERBS[verb].states))

    def chosen(self, database: Database) -> list[int]:
        """The ids of the messages."""
        return list(self.ids) or find_ids(database, self.selection)

    def foreseen(self, database: Database, keys: OutboxKeys | None) -> tuple[int, Effect]:
        """How many messages are chosen, and what would happen to them now."""
        ids = self.chosen(database)
        return len(ids), foresee(database, ids, self.what, keys=keys)

    def made(self, database: Database, keys: OutboxKeys | None) -> Effect:
        """Make the change; what no longer matches the selection is left alone."""
        selection = None if self.ids else self.selection
        return intervene(database, self.chosen(database), self.what, selection=selection, keys=keys)


def _intervention(verb: str, fields: Fields, who: Mapping[str, Any]) -> Intervention:
    note = _text(fields, "note")
    if verb == "cancel":
        return replace(cancelling(note or "cancelled"), **who)
    to: dict[str, Any] = {}
    if VERBS[verb].is_addressed:
        for name in ("exchange", "routing_key"):
            if "yes" in fields.get(f"has_{name}", ()):
                to[name] = _text(fields, f"to_{name}")
    if not VERBS[verb].is_editing:
        if VERBS[verb].is_addressed and not to:
            raise BadForm("give a new exchange or routing key")
        return Intervention(Action(verb), note=note, **to, **who)
    changes, headers = properties_of(_lines(fields, "set")), headers_of(_lines(fields, "header"))
    unset = names_of(_lines(fields, "unset"))
    if "yes" in fields.get("has_body", ()):
        changes["body"] = next(iter(fields.get("body", ())), "").encode()
    if not (changes or headers or any(unset) or to):
        raise BadForm("give what to change")
    return correcting(changes, headers, unset, note=note, **to, **who)


def _lines(fields: Fields, name: str) -> tuple[str, ...]:
    return tuple(filter(None, (line.strip() for line in _text(fields, name).splitlines())))
