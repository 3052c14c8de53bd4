"""Converts entries to rows of ``reliablepub_messages`` and back, under a checksum.

Knows: the order of the columns in ``queries.sql``, properties as JSON, the range of each value
that this library writes. Must never know: connections, transactions, AMQP's own encoding.

A bit that flips on the disk inside a row passes SQLite's own integrity check. A message must reach
the broker as it was accepted, or be parked. The checksum covers the message as it was accepted. The
other columns change, so each value is checked against its range: a size of 2^63-1, for instance,
would make every sum of sizes fail.

Properties and headers are readable JSON text. Only properties that are set are written, so an
ordinary message has ``{}``. JSON has no bytes, decimals or times: they become objects with one key,
``{"$bytes": "..."}``. A header table of the application that looks like such an object is wrapped,
as ``{"$table": {...}}``, so that no value is ambiguous.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from functools import lru_cache, partial
from itertools import filterfalse
from json import JSONDecodeError, JSONEncoder
from typing import Any, Final, NamedTuple
from zlib import crc32

from reliablepub.errors import OutboxSealed
from reliablepub.headers import FieldValue
from reliablepub.message import BODY_BYTES_MAX, HEADER_BYTES_MAX, Message
from reliablepub.outbox.encryption import Forged, OutboxKeys, is_sealed, opened, sealed
from reliablepub.outbox.entry import Attempt, Entry, Sent, epoch_name, id_of, is_plain
from reliablepub.outcome import OutcomeKind
from reliablepub.printable import printable

TIME_MAX: Final = 3e11
"""Highest time, in seconds since 1970: later than the year 9999, in which `datetime` ends."""
COUNT_MAX: Final = 2**31 - 1
ID_MAX: Final = 2**62
SIZE_MAX: Final = BODY_BYTES_MAX + HEADER_BYTES_MAX + 4_096
REPLY_TEXT_MAX: Final = 10_000
_WHY_MAX: Final = 1_000
_REPLY_CODE_MAX: Final = 65_535
_CHECKSUM_MAX: Final = 2**32 - 1
UNCHECKED: Final = -1
"""Checksum of a row that plain SQL has stored, which has no CRC-32."""
_OUTCOMES: Final = frozenset({*(kind.value for kind in OutcomeKind), "withdrawn"})


def misfits(row: Mapping[str, object]) -> Iterator[str]:
    """Yield the columns of a row whose values this library never writes. Columns may be missing."""
    for name, fits in _FITS.items():
        if name in row and not fits(row[name]):
            yield name


def are_counts(nacked: int, returned: int, refused: int, uncertain: int) -> bool:
    """Whether these are valid numbers of attempts."""
    # One comparison for all: in `COUNT_MAX` every bit is set.
    return 0 <= nacked | returned | refused | uncertain <= COUNT_MAX


def are_times(
    stored_at: float, due_at: float | None, expires_at: float | None, refused_at: float | None
) -> bool:
    """Whether these are valid times of a message."""
    return (
        is_time(stored_at)
        and (due_at is None or is_due_time(due_at))
        and (expires_at is None or is_time(expires_at))
        and (refused_at is None or is_time(refused_at))
    )


def is_due_time(value: object) -> bool:
    """Whether it is a valid due time. An infinite one means that the destination is paused."""
    return is_time(value) or value == math.inf


def is_size(value: int) -> bool:
    """Whether it is a valid `Message.size`."""
    return 0 <= value <= SIZE_MAX


def misfit_words(row: Mapping[str, object]) -> str:
    """Say which values of a row this library never writes."""
    found = ", ".join(f"{name} {row[name]!r:.40}" for name in misfits(row))
    return f"{found}: not a value that this library writes; the file was damaged or edited"


def is_time(value: object) -> bool:
    """Whether it is a valid wall clock time, in seconds since 1970."""
    return type(value) in (int, float) and 0 <= value <= TIME_MAX  # type: ignore[operator]


def _whole(most: int, least: int = 0) -> Callable[[object], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _or_none(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or fits(value)


def _is_reply_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= REPLY_TEXT_MAX and _is_encodable(value)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_FITS: Final[dict[str, Callable[[object], bool]]] = {
    "id": _whole(ID_MAX, 1),
    "stored_at": is_time,
    "due_at": _or_none(is_due_time),
    "expires_at": _or_none(is_time),
    "refused_at": _or_none(is_time),
    "parked_at": _or_none(is_time),
    "nacked": _whole(COUNT_MAX),
    "returned": _whole(COUNT_MAX),
    "refused": _whole(COUNT_MAX),
    "uncertain": _whole(COUNT_MAX),
    "size": _whole(SIZE_MAX),
    "checksum": _whole(_CHECKSUM_MAX, UNCHECKED),
    "outcome": _or_none(lambda value: isinstance(value, str) and value in _OUTCOMES),
    "reply_code": _or_none(_whole(_REPLY_CODE_MAX)),
    "reply_text": _or_none(_is_reply_text),
    "is_skipped": _whole(1),
}


_PLAIN: Final = (
    "priority",
    "expiration",
    "content_type",
    "content_encoding",
    "correlation_id",
    "reply_to",
    "type",
    "user_id",
    "app_id",
)
_TAGGED: Final = '{"$'
"""Occurs only for a table whose first name begins with ``$``: quotes in strings are escaped."""
_encode: Final = JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode


def to_text(message: Message) -> str:
    """Return all properties except ``message_id``, as JSON."""
    m = message
    if m.is_plain and m.headers is None and m.persistent:
        return "{}" if m.content_type is None else _content_type_alone(m.content_type)
    found: dict[str, Any] = {
        name: value for name in _PLAIN if (value := getattr(m, name)) is not None
    }
    if not m.persistent:
        found["persistent"] = False
    if m.timestamp is not None:
        found["timestamp"] = m.timestamp.isoformat()
    if m.headers is None:
        return _encode(found)
    return _with_headers(found, m.headers)


def correlation(correlation_id: str) -> str:
    """What `to_text` writes of a ``correlation_id``, to search for."""
    return f'"correlation_id":{_encode(correlation_id)}'


@lru_cache(maxsize=128)
def _content_type_alone(content_type: str) -> str:
    """Return the text for a message whose only property is its content type; most share a few."""
    return _encode({"content_type": content_type})


def from_text(text: str) -> dict[str, Any]:
    """Return keyword arguments for `Message`."""
    if text == "{}":
        return {}
    try:
        found = json.loads(text)
    except (JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the properties are not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("the properties are not a JSON object")  # noqa: TRY004 - the data's fault
    if "timestamp" in found:
        found["timestamp"] = datetime.fromisoformat(found["timestamp"])
    if "headers" in found and _TAGGED in text:
        # The outermost table is AMQP's header table, and never a tagged value.
        found["headers"] = _untagged_table(found["headers"])
    return found


def _with_headers(found: dict[str, Any], headers: Mapping[str, FieldValue]) -> str:
    """Encode the headers without tags, which suits nearly all; tag each value if that fails."""
    try:
        found["headers"] = headers
        text = _encode(found)
        if _TAGGED not in text:
            return text
    except TypeError:  # bytes, Decimal or datetime among the values
        pass
    found["headers"] = {name: _tagged(value) for name, value in headers.items()}
    return _encode(found)


def _tagged(value: FieldValue) -> Any:  # noqa: ANN401 - whatever JSON has
    """Return the value in terms of JSON; bytes, decimals and times as an object with one key."""
    result: Any = value
    match value:
        case bytes():
            result = {"$bytes": b64encode(value).decode()}
        case Decimal():
            result = {"$decimal": str(value)}
        case datetime():
            result = {"$datetime": value.isoformat()}
        case Mapping():
            result = {name: _tagged(inner) for name, inner in value.items()}
            if len(result) == 1 and _UNTAG.keys() >= result.keys():
                result = {"$table": result}
        case list() | tuple():
            result = [_tagged(inner) for inner in value]
    return result


def _untagged(value: Any) -> Any:  # noqa: ANN401 - the inverse of `_tagged`
    if isinstance(value, list):
        return [_untagged(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, inner),) = value.items()
        if tag in _UNTAG:
            return _UNTAG[tag](inner)
    return _untagged_table(value)


def _untagged_table(table: dict[str, Any]) -> dict[str, Any]:
    return {name: _untagged(inner) for name, inner in table.items()}


_UNTAG: Final[dict[str, Callable[[Any], Any]]] = {
    "$bytes": partial(b64decode, validate=True),
    "$decimal": Decimal,
    "$datetime": datetime.fromisoformat,
    "$table": _untagged_table,
}


_DAMAGE: Final = (ValueError, TypeError, ArithmeticError, AttributeError, KeyError, RecursionError)
"""Errors raised for content that this library has not written."""


class MessageRow(NamedTuple):
    """The columns of one message, in the order in which each statement selects them.

    Those statements are ``any_message`` and ``confirmed_message``; ``ready``, ``message`` and
    ``first_of_key`` of SQLite; ``ready``, ``messages`` and ``firsts_of_keys`` of PostgreSQL. The
    types are those that this library writes; those of a damaged row may differ. PostgreSQL's never
    do: it gives each value the type of its column.
    """

    id: int
    message_id: bytes
    exchange: bytes
    routing_key: bytes
    properties: bytes
    stored_at: float
    due_at: float | None
    nacked: int
    returned: int
    refused: int
    uncertain: int
    checksum: int
    body: bytes
    expires_at: float | None
    ordering_key: bytes | None
    refused_at: float | None
    size: int

    def check(self) -> None:
        """Raise `Unreadable` if the checksum shows that the row is not what was stored."""
        texts = (self.message_id, self.exchange, self.routing_key, self.properties)
        check((*texts, self.ordering_key), self.body, self.checksum)

    def where(self) -> tuple[str, str, str, str | None]:
        """Return what encryption binds: message id, exchange, routing key and ordering key."""
        key = self.ordering_key
        return (
            self.message_id.decode(),
            self.exchange.decode(),
            self.routing_key.decode(),
            None if key is None else key.decode(),
        )


class Unreadable(Exception):
    """The row is damaged; the text says how."""


MISTYPED: Final = (
    "a column has a value of another type than this library writes; the file was damaged or edited"
)
"""What is wrong with a row of SQLite in which a bit flipped that tells the type of a value."""


def divided(entries: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Return the entries for ``insert_plain_message``, and those for ``insert_message``."""
    return list(filter(is_plain, entries)), list(filterfalse(is_plain, entries))


def row_of(entry: Entry, keys: OutboxKeys | None = None) -> tuple[Any, ...]:
    """Return the parameters of ``insert_message``. With keys, the entry must have its id."""
    counts = (entry.nacked, entry.returned, entry.refused, entry.uncertain)
    times = (entry.due_at, *counts, entry.expires_at)
    return *plain_row_of(entry, keys), *times, entry.message.ordering_key, entry.refused_at


def plain_row_of(entry: Entry, keys: OutboxKeys | None = None) -> tuple[Any, ...]:
    """Return the parameters of ``insert_plain_message``. With keys, the entry must have its id."""
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
    """Raise `Unreadable` if the checksum shows that a row is not what was stored."""
    try:
        found = checksum_of(texts, body)
    except TypeError:
        raise Unreadable(MISTYPED) from None
    if checksum not in {found, UNCHECKED}:
        if type(checksum) is not int:
            raise Unreadable(MISTYPED)
        raise Unreadable(
            f"the checksum is {found:08x} and was {checksum:08x} when it was stored: the file "
            "was damaged or edited, and the message may not be what was accepted"
        )


def checksum_of(texts: tuple[bytes, bytes, bytes, bytes, bytes | None], body: bytes) -> int:
    """Return the CRC-32 over texts and body, as stored."""
    message_id, exchange, routing_key, properties, ordering_key = texts
    head = b"%b\0%b\0%b\0%b\0" % (message_id, exchange, routing_key, properties)
    if ordering_key is not None:
        head += b"%b\0" % ordering_key
    return crc32(body, crc32(head))


def entry_of(row: MessageRow, keys: OutboxKeys | None = None) -> Entry:
    """The entry in a row, whose texts are still bytes."""
    # The hot path: to unpack the row once takes less time than to read each attribute.
    # fmt: off
    (id_, message_id, exchange, routing_key, properties, stored_at, due_at, nacked, returned,
     refused, uncertain, checksum, body, expires_at, ordering_key, refused_at, size) = row
    # fmt: on
    check((message_id, exchange, routing_key, properties, ordering_key), body, checksum)
    try:
        are_right = are_counts(nacked, returned, refused, uncertain) and is_size(size)
    except TypeError:  # NULL or bytes
        are_right = False
    if not (are_right and are_times(stored_at, due_at, expires_at, refused_at)):
        raise Unreadable(misfit_words(row._asdict()))
    try:
        where = id_text, exchange_text, routing_key_text, key_text = (
            message_id.decode(),
            exchange.decode(),
            routing_key.decode(),
            None if ordering_key is None else ordering_key.decode(),
        )
        text, body = opened(keys, id_, where, properties.decode(), body)
        message = Message(
            body,
            exchange_text,
            routing_key_text,
            message_id=id_text,
            ordering_key=key_text,
            **from_text(text),
        )
    except Forged as error:
        raise Unreadable(str(error)) from error
    except _DAMAGE as error:  # InvalidMessage among them
        # The text may quote the row, with characters that no database can store as the reason.
        why = printable(str(error))[:_WHY_MAX]
        raise Unreadable(f"the message cannot be rebuilt from its row: {why}") from error
    counts = (nacked, returned, refused, uncertain)
    return Entry(
        message, stored_at, id_, due_at, *counts, expires_at=expires_at, refused_at=refused_at
    )


def content_of(row: MessageRow, keys: OutboxKeys | None) -> tuple[str, bytes]:
    """The properties of a row, as JSON text, and its body; decrypted if they are encrypted."""
    row.check()
    try:
        return opened(keys, row.id, row.where(), row.properties.decode(), row.body)
    except _DAMAGE as error:  # Forged among them
        raise Unreadable(str(error)) from error


def revised(
    row: MessageRow, keys: OutboxKeys | None, change: Callable[[Message], Message]
) -> dict[str, Any]:
    """The columns of a row whose message is changed, with their new checksum and size.

    An encrypted row is encrypted afresh, under the first key.
    """
    if not is_sealed(row.properties.decode(errors="replace")):
        keys = None  # which would refuse the row
    entry = entry_of(row, keys)
    entry.message = change(entry.message)
    _, _, exchange, routing_key, properties, _, size, checksum, body = plain_row_of(entry, keys)
    return {
        "id": row.id,
        "exchange": exchange,
        "routing_key": routing_key,
        "properties": properties,
        "size": size,
        "checksum": checksum,
        "body": body,
    }


def rekeyed(row: MessageRow, keys: OutboxKeys) -> dict[str, Any]:
    """The columns of a row that is encrypted afresh, under the first key."""
    content = content_of(row, keys)
    properties, body = sealed(keys, row.id, row.where(), *content)
    texts = (row.message_id, row.exchange, row.routing_key, properties.encode())
    checksum = checksum_of((*texts, row.ordering_key), body)
    return {"id": row.id, "properties": properties, "body": body, "checksum": checksum}


UNOPENED_MAX: Final = 100
"""Rows that a relay parks because it lacks their key; with one more it ends."""
PASSED_MAX: Final = 5_000
"""Rows that one page skips because they are not next of their ordering key; 20 ms in SQLite."""
SCANNED_MAX: Final = 10_000
"""Ids that one read of ready rows covers: millions of rows may wait for a later time."""


def is_mistyped(row: MessageRow) -> bool:
    """Whether a value of the row has another type than this library writes, or is out of range."""
    return row.body is None or any(misfits(row._asdict()))


class Page:
    """Entries of one read, limited in number and bytes; at least one, if there is any."""

    def __init__(self, limit: int, bytes_max: int, keys: OutboxKeys | None) -> None:
        self.limit = limit
        self.bytes_max = bytes_max  # of `Message.size`, summed up
        self._keys = keys
        self._bytes = 0
        self.entries: list[Entry] = []
        self.damaged: dict[int, str] = {}  # what is wrong with a row, by its id
        self.sealed: dict[int, OutboxSealed] = {}  # rows whose encryption key is missing
        self.not_next: list[int] = []  # ids of rows that are due, and not next of their key

    def take(self, row: MessageRow) -> bool:
        """Add the entry of a row; return False if it does not fit."""
        if len(self.entries) >= self.limit:
            return False
        try:
            entry = entry_of(row, self._keys)
        except Unreadable as error:
            self.damaged[row.id] = str(error)
            return True
        except OutboxSealed as error:
            if self._keys is None:
                raise
            self.sealed[row.id] = error
            return True
        self._bytes += entry.message.size
        if self.entries and self._bytes > self.bytes_max:
            return False
        self.entries.append(entry)
        return True


class Unopened:
    """Decides about rows whose encryption key was not given: whose fault is it?

    If other rows can be read, and these are few, they are parked, so that they hold up no others.
    Otherwise the relay has the wrong keys: it ends, and all messages stay open.
    """

    def __init__(self) -> None:
        self._others_read = False
        self._parked = 0

    def judge(self, page: Page) -> None:
        """Have the sealed rows of a page parked, or raise the error of the first."""
        self._others_read = self._others_read or bool(page.entries)
        self._parked += len(page.sealed)
        if page.sealed and not (self._others_read and self._parked <= UNOPENED_MAX):
            raise next(iter(page.sealed.values()))
        for id_, error in page.sealed.items():
            page.damaged[id_] = f"{error}, and retry it"


def id_runs(ids: list[int]) -> list[list[int]]:
    """Return ids as ``[first, count]``, one for each run of consecutive ids."""
    if ids and ids == [*range(ids[0], ids[0] + len(ids))]:
        return [[ids[0], len(ids)]]  # as most are
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
    """Return the parameters of ``reschedule``."""
    counts = (entry.nacked, entry.returned, entry.refused, entry.uncertain)
    return entry.due_at, *counts, entry.refused_at, entry.id


def given_up_of(attempt: Attempt) -> tuple[Any, ...]:
    """Return the parameters of ``park``: time, state, outcome, counts and id."""
    entry, outcome = attempt.entry, attempt.outcome
    state = "expired" if outcome.kind is OutcomeKind.EXPIRED else "parked"
    reply = (outcome.kind.value, outcome.reply_code, outcome.reply_text)
    counts = (entry.nacked, entry.returned, entry.refused, entry.uncertain)
    return attempt.at, state, *reply, *counts, entry.id


def tags_of(sent: Sent, run: int) -> tuple[str, int]:
    """Return the parameters of ``delete_in_flight``: the epoch and the first tag of a batch."""
    return epoch_name(run, sent.epoch), sent.first_tag


def in_flight_of(sent: Sent, run: int) -> tuple[str, int, int, str]:
    """Return the parameters of ``insert_in_flight``, without the time."""
    ids = _encode(id_runs(list(map(id_of, sent.keys))))
    return *tags_of(sent, run), len(sent.keys), ids


LEFT_IN_FLIGHT: Final = "the publisher ended before the broker answered"
"""Reply text of an attempt that an ended relay has left in flight."""
ATTEMPTS_RETENTION_S: Final = 7 * 86_400.0
"""Retention of the attempts of a message that has left the outbox: 7 days."""


def attempt_of(attempt: Attempt) -> tuple[int, str | None, float, str, int, str, int, str, str]:
    """Return the parameters of ``insert_attempt``."""
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
