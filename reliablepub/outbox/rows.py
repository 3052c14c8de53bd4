"""An entry as a row of ``reliablepub_messages``, and back, with a checksum over what was accepted.

Knows: the order of the columns in ``queries.sql``. Must never know: connections and transactions.

A bit that flips on the disk inside a row passes SQLite's own integrity check. What reaches the
broker must be what was accepted, or be parked for a person to see.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

from reliablepub.message import Message
from reliablepub.outbox.entry import Attempt, Entry
from reliablepub.outbox.properties import from_text, to_text


class Unreadable(Exception):
    """A row that is not what was stored; the text says what is wrong with it."""


def row_of(entry: Entry) -> tuple[Any, ...]:
    """Parameters of ``insert_message``."""
    message = entry.message
    properties = to_text(message)
    head = f"{message.message_id}\0{message.exchange}\0{message.routing_key}\0{properties}\0"
    return (
        entry.id or None,
        message.message_id,
        message.exchange,
        message.routing_key,
        properties,
        entry.stored_at,
        entry.due_at,
        entry.nacked,
        entry.returned,
        entry.refused,
        entry.uncertain,
        message.size,
        crc32(message.body, crc32(head.encode())),
        message.body,
    )


def entry_of(row: tuple[Any, ...]) -> Entry:
    """The entry in a row of ``ready`` or ``message``, whose texts are still bytes.

    Raises:
        Unreadable: the row is not what was stored.
    """
    id_, message_id, exchange, routing_key, properties = row[:5]
    stored_at, due_at, nacked, returned, refused, uncertain, checksum, body = row[5:]
    head = b"%b\0%b\0%b\0%b\0" % (message_id, exchange, routing_key, properties)
    found = crc32(body, crc32(head))
    if found != checksum:
        raise Unreadable(
            f"the checksum is {found:08x} and was {checksum:08x} when it was stored: the file "
            "was damaged or edited, and what is left may not be what was accepted"
        )
    try:
        message = Message(
            body,
            exchange.decode(),
            routing_key.decode(),
            message_id=message_id.decode(),
            **from_text(properties.decode()),
        )
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:  # or InvalidMessage
        raise Unreadable(f"the message cannot be rebuilt from its row: {error}") from error
    return Entry(message, stored_at, id_, due_at, nacked, returned, refused, uncertain)


def id_runs(ids: list[int]) -> list[list[int]]:
    """Ids as ``[first, how many]``, one for each stretch in which they follow each other."""
    runs: list[list[int]] = []
    next_id = None
    for id_ in ids:
        if id_ == next_id:
            runs[-1][1] += 1
        else:
            runs.append([id_, 1])
        next_id = id_ + 1
    return runs


def schedule_of(entry: Entry) -> tuple[float | None, int, int, int, int, int]:
    """What changes when an entry is postponed or uncertain."""
    return entry.due_at, entry.nacked, entry.returned, entry.refused, entry.uncertain, entry.id


def attempt_of(attempt: Attempt) -> tuple[int, str | None, float, str, int, str, int, str, str]:
    """One line of an entry's history."""
    entry, outcome = attempt.entry, attempt.outcome
    return (
        entry.id,
        entry.message.message_id,
        attempt.at,
        attempt.epoch,
        attempt.tag,
        outcome.kind.value,
        outcome.reply_code,
        outcome.reply_text,
        outcome.persistence.value,
    )
