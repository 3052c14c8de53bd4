"""An entry as a row of ``reliablepub_messages``, and back, with a checksum over what was accepted.

Knows: the order of the columns in ``queries.sql``. Must never know: connections and transactions.

A bit that flips on the disk inside a row passes SQLite's own integrity check. What reaches the
broker must be what was accepted, or be parked for a person to see.
"""

from __future__ import annotations

from typing import Any, Final
from zlib import crc32

from reliablepub.message import Message
from reliablepub.outbox.bookkeeping import are_counts, are_times, is_size, misfit_words
from reliablepub.outbox.encryption import Forged, OutboxKeys, is_sealed, opened, sealed
from reliablepub.outbox.entry import Attempt, Entry
from reliablepub.outbox.properties import from_text, to_text

_BESIDE: Final = (
    *("stored_at", "due_at", "nacked", "returned", "refused", "uncertain"),
    *("checksum", "body", "expires_at", "ordering_key", "refused_at", "size"),
)
_DAMAGE: Final = (ValueError, TypeError, ArithmeticError, AttributeError, KeyError, RecursionError)
"""What is raised by contents that this library has not written."""


class Unreadable(Exception):
    """A row that is not what was stored; the text says what is wrong with it."""


def row_of(entry: Entry, keys: OutboxKeys | None = None) -> tuple[Any, ...]:
    """Parameters of ``insert_message``; with keys, the entry has its id already."""
    counts = (entry.nacked, entry.returned, entry.refused, entry.uncertain)
    times = (entry.due_at, *counts, entry.expires_at)
    return *plain_row_of(entry, keys), *times, entry.message.ordering_key, entry.refused_at


def is_plain(entry: Entry) -> bool:
    """Whether its row is what ``insert_plain_message`` stores."""
    return entry.is_for_now and entry.expires_at is None and not entry.attempts


def plain_row_of(entry: Entry, keys: OutboxKeys | None = None) -> tuple[Any, ...]:
    """Parameters of ``insert_plain_message``, likewise."""
    message = entry.message
    properties, body = to_text(message), message.body
    if keys is not None:
        assert message.message_id is not None
        where = message.message_id, message.exchange, message.routing_key, message.ordering_key
        properties, body = sealed(keys, entry.id, where, properties, body)
    head = f"{message.message_id}\0{message.exchange}\0{message.routing_key}\0{properties}\0"
    if message.ordering_key is not None:
        head += f"{message.ordering_key}\0"
    return (
        entry.id or None,
        message.message_id,
        message.exchange,
        message.routing_key,
        properties,
        entry.stored_at,
        message.size,
        crc32(body, crc32(head.encode())),
        body,
    )


def check(
    texts: tuple[bytes, bytes, bytes, bytes, bytes | None], body: bytes, checksum: int
) -> None:
    """Compare a row with its checksum.

    Args:
        texts: message id, exchange, routing key, properties and ordering key, as they are stored.
        body: likewise.
        checksum: as it was stored.

    Raises:
        Unreadable: the row is not what was stored.
    """
    found = checksum_of(texts, body)
    if found != checksum:
        raise Unreadable(
            f"the checksum is {found:08x} and was {checksum:08x} when it was stored: the file "
            "was damaged or edited, and what is left may not be what was accepted"
        )


def checksum_of(texts: tuple[bytes, bytes, bytes, bytes, bytes | None], body: bytes) -> int:
    """CRC-32 over what is stored (see `check`)."""
    message_id, exchange, routing_key, properties, ordering_key = texts
    head = b"%b\0%b\0%b\0%b\0" % (message_id, exchange, routing_key, properties)
    if ordering_key is not None:
        head += b"%b\0" % ordering_key
    return crc32(body, crc32(head))


def entry_of(row: tuple[Any, ...], keys: OutboxKeys | None = None) -> Entry:
    """The entry in a row of ``ready`` or ``message``, whose texts are still bytes.

    Raises:
        Unreadable: the row is not what was stored.
        OutboxSealed: it is encrypted, and its key was not given.
    """
    id_, message_id, exchange, routing_key, properties = row[:5]
    stored_at, due_at, nacked, returned, refused, uncertain, checksum, body = row[5:13]
    expires_at, ordering_key, refused_at, size = row[13:17]
    check((message_id, exchange, routing_key, properties, ordering_key), body, checksum)
    are_right = are_counts(nacked, returned, refused, uncertain) and is_size(size)
    if not (are_right and are_times(stored_at, due_at, expires_at, refused_at)):
        raise Unreadable(misfit_words(dict(zip(_BESIDE, row[5:], strict=False))))
    try:
        where = (
            message_id.decode(),
            exchange.decode(),
            routing_key.decode(),
            None if ordering_key is None else ordering_key.decode(),
        )
        text, body = opened(keys, id_, where, properties.decode(), body)
        message = Message(
            body,
            where[1],
            where[2],
            message_id=where[0],
            ordering_key=where[3],
            **from_text(text),
        )
    except Forged as error:
        raise Unreadable(str(error)) from error
    except _DAMAGE as error:  # InvalidMessage among them
        raise Unreadable(f"the message cannot be rebuilt from its row: {error}") from error
    counts = (nacked, returned, refused, uncertain)
    times = {"expires_at": expires_at, "refused_at": refused_at}
    return Entry(message, stored_at, id_, due_at, *counts, **times)


def content_of(row: tuple[Any, ...], keys: OutboxKeys | None) -> tuple[str, bytes]:
    """Properties, as they are stored, and body of such a row; decrypted if they are encrypted.

    Raises:
        Unreadable: the row is not what was stored.
        OutboxSealed: it is encrypted, and its key was not given.
    """
    key = row[14]
    check((row[1], row[2], row[3], row[4], key), row[12], row[11])
    try:
        message_id, exchange, routing_key, properties = (text.decode() for text in row[1:5])
        where = message_id, exchange, routing_key, None if key is None else key.decode()
        return opened(keys, row[0], where, properties, row[12])
    except _DAMAGE as error:  # Forged among them
        raise Unreadable(str(error)) from error


def rewritten(
    row: tuple[Any, ...],
    keys: OutboxKeys | None,
    *,
    exchange: str | None = None,
    routing_key: str | None = None,
    seals: bool = False,
) -> dict[str, Any]:
    """The columns of a row at another address, or under another key, with their new checksum.

    Args:
        row: of ``any_message`` or ``confirmed_message``, whose texts are still bytes.
        keys: of the outbox; a row that is encrypted is encrypted afresh, under the first key.
        exchange: the new one; None keeps it.
        routing_key: the new one; None keeps it.
        seals: encrypt the row also if it is not encrypted.

    Raises:
        Unreadable: the row is not what was stored.
        OutboxSealed: it is encrypted, and its key was not given.
    """
    id_, *texts = row[:5]
    checksum, body, key = row[11], row[12], row[14]
    check((texts[0], texts[1], texts[2], texts[3], key), body, checksum)
    try:
        message_id, old_exchange, old_routing_key, properties = (t.decode() for t in texts)
        ordering_key = None if key is None else key.decode()
        before = message_id, old_exchange, old_routing_key, ordering_key
        exchange = old_exchange if exchange is None else exchange
        routing_key = old_routing_key if routing_key is None else routing_key
        if seals or is_sealed(properties):
            content = opened(keys, id_, before, properties, body)
            assert keys is not None
            where = message_id, exchange, routing_key, ordering_key
            properties, body = sealed(keys, id_, where, *content)
    except _DAMAGE as error:
        raise Unreadable(str(error)) from error
    address = exchange.encode(), routing_key.encode()
    return {
        "id": id_,
        "exchange": exchange,
        "routing_key": routing_key,
        "properties": properties,
        "body": body,
        "checksum": checksum_of((texts[0], *address, properties.encode(), key), body),
    }


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


def schedule_of(entry: Entry) -> tuple[float | None, int, int, int, int, float | None, int]:
    """What changes when an entry is postponed or uncertain."""
    counts = (entry.nacked, entry.returned, entry.refused, entry.uncertain)
    return entry.due_at, *counts, entry.refused_at, entry.id


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
