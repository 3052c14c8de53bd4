"""Converts what a turn changes to the arrays of its statements, and rows back to entries.

Knows: the names of the values in ``queries.sql``. Must never know: connections, turns.

One statement takes any number of rows, as one array for each column.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from reliablepub.message import Message
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import Attempt, Entry, Sent, epoch_name
from reliablepub.outbox.rows import (
    attempt_of,
    id_runs,
    plain_row_of,
    row_of,
    schedule_of,
)
from reliablepub.outcome import OutcomeKind

Arrays = dict[str, list[Any]]

_PLAIN: Final = (
    "ids",
    "message_ids",
    "exchanges",
    "routing_keys",
    "properties",
    "stored_ats",
    "sizes",
    "checksums",
    "bodies",
)
_COUNTS: Final = ("nackeds", "returneds", "refuseds", "uncertains")
_OTHERS: Final = ("due_ats", *_COUNTS, "expires_ats", "ordering_keys", "refused_ats")
_ATTEMPT: Final = (
    "ids",
    "message_ids",
    "ats",
    "epochs",
    "tags",
    "outcomes",
    "reply_codes",
    "reply_texts",
    "persistences",
)
_SCHEDULE: Final = ("due_ats", *_COUNTS, "refused_ats", "ids")
_GIVEN_UP: Final = ("ids", "ats", "states", "outcomes", "reply_codes", "reply_texts", *_COUNTS)


_TIMES: Final = {"stored_ats", "due_ats", "expires_ats", "refused_ats", "ats"}


def _arrays(names: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> Arrays:
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    for name in _TIMES & columns.keys():  # psycopg wants all numbers of an array to be of one type
        columns[name] = [None if at is None else float(at) for at in columns[name]]
    return columns


def texts_of(message: Message) -> tuple[str, str, str, str]:
    """Return the texts of a message that are columns of their own."""
    key = message.ordering_key or ""
    return message.message_id or "", message.exchange, message.routing_key, key


def plain_arrays(entries: Iterable[Entry], keys: OutboxKeys | None) -> Arrays:
    """Return the values of ``insert_plain_messages``."""
    return _arrays(_PLAIN, (plain_row_of(entry, keys) for entry in entries))


def arrays(entries: Iterable[Entry], keys: OutboxKeys | None) -> Arrays:
    """Return the values of ``insert_messages``."""
    return _arrays(_PLAIN + _OTHERS, (row_of(entry, keys) for entry in entries))


def attempt_arrays(attempts: Iterable[Attempt]) -> Arrays:
    """Return the values of ``insert_attempts``."""
    return _arrays(_ATTEMPT, map(attempt_of, attempts))


def schedule_arrays(entries: Iterable[Entry]) -> Arrays:
    """Return the values of ``reschedule``."""
    return _arrays(_SCHEDULE, map(schedule_of, entries))


def given_up_arrays(attempts: Iterable[Attempt]) -> Arrays:
    """Return the values of ``park_messages``."""
    return _arrays(_GIVEN_UP, map(_given_up, attempts))


def _given_up(attempt: Attempt) -> tuple[Any, ...]:
    entry, outcome = attempt.entry, attempt.outcome
    state = "expired" if outcome.kind is OutcomeKind.EXPIRED else "parked"
    reply = outcome.kind.value, outcome.reply_code, outcome.reply_text
    counts = entry.nacked, entry.returned, entry.refused, entry.uncertain
    return entry.id, attempt.at, state, *reply, *counts


def sent_arrays(batches: Iterable[Sent], run: int) -> Arrays:
    """Return the values of ``insert_in_flight``."""
    names = ("epochs", "first_tags", "counts", "ids")
    rows = ((epoch_name(run, s.epoch), s.first_tag, len(s.keys), _runs(s)) for s in batches)
    return _arrays(names, rows)


def _runs(sent: Sent) -> str:
    return json.dumps(id_runs([entry.id for entry in sent.keys]), separators=(",", ":"))


def finished_arrays(batches: Iterable[Sent], run: int) -> Arrays:
    """Return the values of ``delete_in_flight``."""
    rows = ((epoch_name(run, sent.epoch), sent.first_tag) for sent in batches)
    return _arrays(("epochs", "first_tags"), rows)
