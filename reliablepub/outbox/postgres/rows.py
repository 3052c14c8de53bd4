"""Converts what a turn changes to the arrays of its statements, and rows back to entries.

Knows: the names of the values in ``queries.sql``. Must never know: connections, turns.

One statement takes any number of rows, as one array for each column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from reliablepub.message import Message
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import Attempt, Entry, Sent
from reliablepub.outbox.rows import (
    attempt_of,
    given_up_of,
    in_flight_of,
    plain_row_of,
    row_of,
    schedule_of,
    tags_of,
)

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
_GIVEN_UP: Final = ("ats", "states", "outcomes", "reply_codes", "reply_texts", *_COUNTS, "ids")
_TAGS: Final = ("epochs", "first_tags")
_TIMES: Final = {"stored_ats", "due_ats", "expires_ats", "refused_ats", "ats"}


def _arrays(names: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> Arrays:
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    for name in _TIMES & columns.keys():  # psycopg wants all numbers of an array to be of one type
        columns[name] = [None if at is None else float(at) for at in columns[name]]
    if texts := columns.get("reply_texts"):  # the broker's words, which PostgreSQL has to store
        columns["reply_texts"] = [text.replace("\0", "\ufffd") for text in texts]
    return columns


def texts_of(message: Message) -> dict[str, object]:
    """Return the texts of a message that are columns of their own, by column."""
    return {
        "message_id": message.message_id,
        "exchange": message.exchange,
        "routing_key": message.routing_key,
        "ordering_key": message.ordering_key,
    }


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
    return _arrays(_GIVEN_UP, map(given_up_of, attempts))


def sent_arrays(batches: Iterable[Sent], run: int) -> Arrays:
    """Return the values of ``insert_in_flight``."""
    return _arrays((*_TAGS, "counts", "ids"), (in_flight_of(sent, run) for sent in batches))


def finished_arrays(batches: Iterable[Sent], run: int) -> Arrays:
    """Return the values of ``delete_in_flight``."""
    return _arrays(_TAGS, (tags_of(sent, run) for sent in batches))
