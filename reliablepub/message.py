"""`Message`: an immutable message, validated when it is created.

Knows: the limits of AMQP 0-9-1 (short strings, field tables, header frames) and RabbitMQ's own.
Must never know: how a message is stored, encoded or sent.

A message that breaks a protocol limit makes the broker close the channel, and every other message
on that channel loses its confirm. So the constructor rejects it, at the caller's own line.

It rejects lazy proxies too, such as Django's `SimpleLazyObject`. For `isinstance` and ``__class__``
a proxy is of the type of its object; but SQLite does not store it, and evaluating it may raise, on
the relay's thread. So the checks use `type`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, TypedDict, Unpack

from reliablepub.errors import InvalidMessage
from reliablepub.headers import (
    SHORT_STRING_MAX,
    FieldValue,
    checked_datetime,
    checked_headers,
    utf8,
)
from reliablepub.printable import printable

HEADER_BYTES_MAX: Final = 131_072 - 8 - 128
"""RabbitMQ's default frame_max, less the frame's own 8 bytes and 128 for fields of fixed size and
`ATTEMPT_HEADER`. A content header frame larger than frame_max closes the connection (501)."""
BODY_BYTES_MAX: Final = 512 * 1024 * 1024
"""RabbitMQ's hard limit. A broker's ``max_message_size`` is usually lower (16 MiB since 4.0)."""
EXPIRATION_MS_MAX: Final = 315_360_000_000
"""Ten years, as RabbitMQ allows (rabbit_misc:check_expiry)."""
PRIORITY_MAX: Final = 255
EXPIRES_IN_S_MAX: Final = 1e9
"""About 30 years."""

_FIXED_BYTES: Final = 128
_type: Final = type  # in `Message.__init__`, `type` is a parameter
_DIRECT_REPLY_TO = "amq.rabbitmq.reply-to"
_RARE_SHORT_STRINGS = (
    "content_encoding",
    "correlation_id",
    "reply_to",
    "type",
    "user_id",
    "app_id",
)
_RARE = (*_RARE_SHORT_STRINGS, "priority", "expiration", "timestamp", "expires_in_s", "not_before")


class MessageFields(TypedDict, total=False):
    """The fields of `Message` except ``body``, as keyword arguments of ``publish``."""

    exchange: str
    routing_key: str
    headers: Mapping[str, FieldValue] | None
    message_id: str | None
    persistent: bool
    priority: int | None
    expiration: int | None
    timestamp: datetime | None
    content_type: str | None
    content_encoding: str | None
    correlation_id: str | None
    reply_to: str | None
    type: str | None
    user_id: str | None
    app_id: str | None
    expires_in_s: float | None
    not_before: datetime | None
    ordering_key: str | None


@dataclass(frozen=True, init=False)
class Message:
    """A message: body, destination and properties (AMQP class ``basic``).

    Attributes:
        body: payload. Encode text to bytes, and name the format in ``content_type``.
        exchange: exchange name, at most 255 bytes of UTF-8; empty for the default exchange.
        routing_key: routing key, at most 255 bytes of UTF-8.
        headers: AMQP field table, kept as an immutable copy. The name ``rp-attempt`` is reserved.
        message_id: message identifier (AMQP ``message_id``), identical on every attempt, so that
            consumers can deduplicate. Generated on publish if it is None.
        persistent: delivery mode 2. A transient message is lost when the broker restarts, even if
            it was confirmed.
        priority: message priority, 0 to 255.
        expiration: time to live in a queue, in milliseconds, at most ten years; the broker enforces
            it.
        timestamp: application-defined time, with a time zone. AMQP keeps whole seconds.
        content_type: MIME type, such as ``application/json``.
        content_encoding: MIME content encoding, such as ``gzip``.
        correlation_id: application-defined correlation identifier (AMQP ``correlation_id``).
        reply_to: application-defined reply address (AMQP ``reply_to``).
        type: application-defined message type (AMQP ``type``).
        user_id: name of the publishing user. RabbitMQ refuses the message if this is not the user
            of the connection.
        app_id: identifier of the publishing application (AMQP ``app_id``).
        expires_in_s: publishing deadline, in seconds after the message is accepted. A message that
            has not been confirmed by then expires: it is not sent again. (``expiration`` limits the
            time in a queue.)
        not_before: earliest time to publish, with a time zone. The message waits in the outbox.
        ordering_key: messages with the same key are sent one at a time, in the order in which they
            were stored. At most 255 bytes of UTF-8. Not sent to the broker.
        size: bytes that count against window and outbox limits: body, exchange, routing key,
            properties, and 128 for frames and row.
        is_plain: whether only ``body``, ``exchange``, ``routing_key``, ``headers``, ``message_id``,
            ``persistent``, ``content_type`` and ``ordering_key`` are set. Such messages take a
            faster path.

    Raises:
        InvalidMessage: the broker would answer this message with an error (RabbitMQ rabbit_channel,
            rabbit_basic). The exception names the field.
    """

    body: bytes
    exchange: str = ""
    routing_key: str = ""
    headers: Mapping[str, FieldValue] | None = None
    message_id: str | None = None
    persistent: bool = True
    priority: int | None = None
    expiration: int | None = None
    timestamp: datetime | None = None
    content_type: str | None = None
    content_encoding: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    type: str | None = None
    user_id: str | None = None
    app_id: str | None = None
    expires_in_s: float | None = None
    not_before: datetime | None = None
    ordering_key: str | None = None
    size: int = field(init=False, repr=False, compare=False)
    is_plain: bool = field(default=True, init=False, repr=False, compare=False)

    def __init__(  # noqa: PLR0917 - in the order of the fields
        self,
        body: bytes,
        exchange: str = "",
        routing_key: str = "",
        headers: Mapping[str, FieldValue] | None = None,
        message_id: str | None = None,
        persistent: bool = True,  # noqa: FBT001, FBT002 - in the order of the fields
        priority: int | None = None,
        expiration: int | None = None,
        timestamp: datetime | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        type: str | None = None,  # noqa: A002 - AMQP's own name for it
        user_id: str | None = None,
        app_id: str | None = None,
        expires_in_s: float | None = None,
        not_before: datetime | None = None,
        ordering_key: str | None = None,
    ) -> None:
        """Validate and copy. A generated ``__init__`` would take three times as long."""
        if _type(body) is not bytes or len(body) > BODY_BYTES_MAX:
            raise _invalid_body(body)
        is_plain = _type(exchange) is str and _type(routing_key) is str
        if not (is_plain and (message_id is None or _type(message_id) is str)):
            exchange, routing_key = _plain("exchange", exchange), _plain("routing_key", routing_key)
            message_id = None if message_id is None else _plain("message_id", message_id)
        fields = self.__dict__
        fields["body"], fields["exchange"], fields["routing_key"] = body, exchange, routing_key
        size = _FIXED_BYTES + len(body) + _address_bytes(exchange, routing_key)
        if message_id is not None:
            size, fields["message_id"] = size + _message_id_bytes(message_id), message_id
        if persistent is not True:
            fields["persistent"] = _checked_persistent(persistent)
        if content_type is not None:
            is_plain = _type(content_type) is str
            content_type = content_type if is_plain else _plain("content_type", content_type)
            size += _short_string_bytes("content_type", content_type)
            fields["content_type"] = content_type
        if not (
            priority is None
            and expiration is None
            and timestamp is None
            and content_encoding is None
            and correlation_id is None
            and reply_to is None
            and type is None
            and user_id is None
            and app_id is None
            and expires_in_s is None
            and not_before is None
        ):
            texts = (content_encoding, correlation_id, reply_to, type, user_id, app_id)
            others = (priority, expiration, timestamp, expires_in_s, not_before)
            rare: dict[str, object] = dict(zip(_RARE, (*texts, *others), strict=True))
            size += _rare_bytes(rare)
            fields.update(rare, is_plain=False)
        if headers is not None:
            room = HEADER_BYTES_MAX + _FIXED_BYTES + len(body) - size
            fields["headers"], header_bytes = checked_headers(headers, room)
            size += header_bytes
        if ordering_key is not None:
            ordering_key = _plain("ordering_key", ordering_key)
            size += _ordering_key_bytes(ordering_key)
            fields["ordering_key"] = ordering_key
        fields["size"] = size

    @classmethod
    def json(cls, value: object, **fields: Unpack[MessageFields]) -> Message:
        """Return a message whose body is JSON in UTF-8, and whose ``content_type`` says so.

        Args:
            value: what JSON can express: dictionaries with str keys, lists, tuples, strings, finite
                numbers, booleans, None; and dataclasses, as objects of their fields.
            fields: the other fields of the message; ``content_type`` is ``application/json`` unless
                given.

        Raises:
            InvalidMessage: JSON cannot express the value, or another field is invalid.
        """
        check_fields(fields)
        fields.setdefault("content_type", "application/json")
        return cls(_json_bytes(value), **fields)

    @classmethod
    def received(
        cls,
        body: bytes | bytearray | memoryview | str,
        properties: object,
        **fields: Unpack[MessageFields],
    ) -> Message:
        """Make a message from a consumed one, to publish it again.

        Args:
            body: the payload.
            properties: those of pika's callback, ``message.properties`` of aio-pika or kombu, or a
                mapping. The header ``rp-attempt`` and ``user_id`` are left out: they belong to the
                earlier publish, and RabbitMQ would refuse the ``user_id`` of another user. A time
                without a time zone is in UTC. Only delivery mode 1 makes the message transient.
            fields: the destination, and fields that replace those of ``properties``.

        Raises:
            InvalidMessage: a property or field is invalid.
        """
        from reliablepub import received  # noqa: PLC0415 - few need it

        check_fields(fields)
        given = received.received_fields(properties)
        return cls(received.received_body(body, given), **{**given, **fields})

    def with_message_id(self, message_id: str) -> Message:
        """Return a copy of this message with the given ``message_id``."""
        if type(message_id) is not str:
            message_id = _plain("message_id", message_id)
        given = self.__dict__
        size = self.size + _message_id_bytes(message_id)
        # The id shares a frame with the headers.
        is_tight = "headers" in given and size - len(self.body) > HEADER_BYTES_MAX + _FIXED_BYTES
        if "message_id" in given or is_tight:
            return replace(self, message_id=message_id)
        # Less than a fifth of the time of `replace`: every other field has been validated already.
        twin = object.__new__(Message)
        twin.__dict__.update(given, message_id=message_id, size=size)
        return twin

    def __repr__(self) -> str:
        """Show id, destination and size, but neither body nor headers."""
        return (
            f"<Message {printable(self.message_id or '(no id yet)')} to {self.exchange!r} "
            f"{self.routing_key!r}, {len(self.body)} bytes>"
        )


_ELSEWHERE: Final = {
    "queue": "to reach one queue, leave out the exchange and give its name as routing_key",
    "delivery_mode": "give persistent=False for 1; messages are persistent (2) by default",
    "mandatory": "it is always on",
    "properties": "each property is an argument of its own, such as content_type",
    "ttl": "give expiration (milliseconds in a queue) or expires_in_s (seconds until published)",
    "delay": "give not_before, a datetime with a time zone",
    "key": "Outbox.enqueue takes it; publish has ordering_key and routing_key",
    **dict.fromkeys(("connection", "conn", "session"), "only Outbox.enqueue takes a connection"),
}
"""What other clients call it, and what it is called here."""


def check_fields(given: Iterable[str]) -> None:
    """Check that names are names of fields.

    Raises:
        TypeError: one is not; the text names the nearest one.
    """
    known = MessageFields.__annotations__
    for name in given:
        if name not in known:
            if name in _ELSEWHERE:
                hint = _ELSEWHERE[name]
            else:
                from difflib import get_close_matches  # noqa: PLC0415 - a mistake pays for it

                near = get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"fields are {', '.join(known)}"
            raise TypeError(f"unexpected keyword argument {name!r}: {hint}")


def _invalid_body(body: object) -> InvalidMessage:
    if type(body) is bytes:
        problem = f"has {len(body)} bytes; RabbitMQ takes at most {BODY_BYTES_MAX}"
        return InvalidMessage("body", problem)
    kind, hint = type(body).__name__, ""
    if body is None:
        kind, hint = "None", "; an empty body is b''"
    elif isinstance(body, str):
        hint = "; encode it, for example body.encode()"
    elif isinstance(body, bytearray | memoryview):
        hint = "; copy it: bytes(body)"
    elif isinstance(body, dict | list | tuple) or dataclasses.is_dataclass(body):
        hint = "; Message.json(value, routing_key=...) makes a message of it"
    elif kind == Message.__name__:
        kind = f"{type(body).__module__}.{kind}"
        hint = " or a reliablepub.Message"
    return InvalidMessage("body", f"is {kind}, not bytes{hint}")


def _json_bytes(value: object) -> bytes:
    try:
        text = json.dumps(
            value,
            default=_fields_of,
            ensure_ascii=False,
            allow_nan=False,
            separators=(",", ":"),
        )
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:  # nan, a cycle, a lone surrogate
        problem = f"cannot be written as JSON: {error}"
        if isinstance(error, UnicodeEncodeError):  # its text would quote the body
            problem = "cannot be written as JSON: a text in it is not valid Unicode"
        raise InvalidMessage("body", problem) from None


def _fields_of(value: object) -> dict[str, object]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} is not a type that JSON has")


def _plain(name: str, value: Any) -> str:  # noqa: ANN401 - whatever the caller gave
    """Return a text as a plain `str`: subclasses, such as `StrEnum`, have methods of their own."""
    if not issubclass(type(value), str):
        raise InvalidMessage(name, f"is {type(value).__name__}, not str")
    return str.__str__(value)


def _address_bytes(exchange: str, routing_key: str) -> int:
    both = exchange + routing_key
    if len(both) <= SHORT_STRING_MAX and both.isascii():  # the common case, in one check
        return len(both)
    return _short_string_bytes("exchange", exchange) + _short_string_bytes(
        "routing_key", routing_key
    )


def _message_id_bytes(value: str) -> int:
    if value.isascii() and 0 < len(value) <= SHORT_STRING_MAX:
        return len(value)  # the common case, in one check
    if value == "":
        raise InvalidMessage("message_id", "is empty; leave it out to have one generated")
    return _short_string_bytes("message_id", value)


def _checked_persistent(value: object) -> bool:
    if type(value) is not bool:
        raise InvalidMessage("persistent", f"is {value!r}, not True or False")
    return value


def _rare_bytes(fields: dict[str, object]) -> int:
    """Validate the fields that most messages leave out; return their size in bytes.

    Values of subclasses become plain ones.
    """
    for name, most in (("priority", PRIORITY_MAX), ("expiration", EXPIRATION_MS_MAX)):
        if fields[name] is not None:
            fields[name] = _in_range(name, fields[name], most)
    for name in ("timestamp", "not_before"):
        if fields[name] is not None:
            fields[name] = _checked_time(name, fields[name])
    if fields["expires_in_s"] is not None:
        fields["expires_in_s"] = _checked_expires_in(fields["expires_in_s"])
    size = 0
    for name in _RARE_SHORT_STRINGS:
        if (value := fields[name]) is not None:
            fields[name] = text = _plain(name, value)
            size += _short_string_bytes(name, text)
    if fields["reply_to"] == _DIRECT_REPLY_TO:
        raise InvalidMessage("reply_to", "direct reply-to needs a consumer on the same channel")
    return size


def _short_string_bytes(name: str, value: str) -> int:
    if value.isascii() and len(value) <= SHORT_STRING_MAX:  # the common case, without encoding
        return len(value)
    length = len(utf8(name, value))
    if length > SHORT_STRING_MAX:
        problem = f"has {length} bytes of UTF-8; AMQP takes at most {SHORT_STRING_MAX}"
        raise InvalidMessage(name, problem)
    return length


def _in_range(name: str, value: Any, most: int) -> int:  # noqa: ANN401 - whatever was given
    is_int = issubclass(type(value), int) and type(value) is not bool
    if not is_int or not 0 <= value <= most:
        raise InvalidMessage(name, f"is not a whole number from 0 to {most}")
    return int(value)  # an IntEnum becomes a plain int


def _checked_time(name: str, value: Any) -> datetime:  # noqa: ANN401 - whatever was given
    if not issubclass(type(value), datetime):
        raise InvalidMessage(name, f"is {type(value).__name__}, not a datetime")
    return checked_datetime(name, value)  # in UTC: a time zone of the caller's may change, or raise


def _checked_expires_in(value: Any) -> float:  # noqa: ANN401 - whatever was given
    is_number = issubclass(type(value), int | float) and type(value) is not bool
    if is_number and 0 < value <= EXPIRES_IN_S_MAX:
        return value if type(value) in (int, float) else float(value)
    problem = f"is {value!r}; a number of seconds, more than 0 and at most {EXPIRES_IN_S_MAX:g}"
    raise InvalidMessage("expires_in_s", problem)


def _ordering_key_bytes(value: str) -> int:
    length = len(utf8("ordering_key", value))
    if not 0 < length <= SHORT_STRING_MAX:
        problem = f"has {length} bytes of UTF-8; at least 1, at most {SHORT_STRING_MAX}"
        raise InvalidMessage("ordering_key", problem)
    return length
