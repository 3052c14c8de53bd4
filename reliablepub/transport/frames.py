"""Encodes publishes as AMQP frames.

Knows: method, header and body frames, content headers and field tables (AMQP 0-9-1, 4.2.3, 4.2.5.5
and 4.2.6, with the type letters of RabbitMQ's rabbit_binary_generator). Must never know:
connections, or what a tag means.

A publish consists of a method frame, a header frame and body frames. The method frame is identical
for all messages to one destination, so it is cached. The encoder is reliablepub's own because pika
1.4 refuses a float in a field table and pamqp 4.0 encodes it with 32 bits.
"""

from __future__ import annotations

import calendar
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from struct import Struct
from typing import Final, NamedTuple

from reliablepub.headers import ATTEMPT_HEADER, EXACT, FieldValue
from reliablepub.message import Message
from reliablepub.transport.base import CannotEncode

_OCTET = Struct(">B")
_FLAGS = Struct(">H")
_LENGTH = Struct(">I")
_TYPED_LENGTH = Struct(">cI")
_TYPED_OCTET = Struct(">cB")
_TYPED_INT32 = Struct(">ci")
_TYPED_INT64 = Struct(">cq")
_TYPED_DOUBLE = Struct(">cd")
_TYPED_DECIMAL = Struct(">cBi")
_TYPED_TIMESTAMP = Struct(">cQ")
_TIMESTAMP = Struct(">Q")

_INT32 = range(-(2**31), 2**31)
_HEADERS_AND_DELIVERY_MODE = 1 << 13 | 1 << 12
_CONTENT_TYPE = 1 << 15
_MESSAGE_ID = 1 << 7
_PLAIN_FLAGS = _HEADERS_AND_DELIVERY_MODE | _MESSAGE_ID
_ATTEMPT = _OCTET.pack(len(ATTEMPT_HEADER)) + ATTEMPT_HEADER.encode()
_OURS_BYTES = len(_ATTEMPT) + _TYPED_INT64.size
_TRANSIENT, _PERSISTENT = 1, 2
_PLAIN_HEAD = _FLAGS.pack(_PLAIN_FLAGS)
"""First bytes of the properties of a plain message without a content type."""
_HEAD_WITH_TYPE = _FLAGS.pack(_PLAIN_FLAGS | _CONTENT_TYPE)
"""First bytes of the properties of a plain message with one, which comes next."""
_PLAIN_TABLE = _LENGTH.pack(_OURS_BYTES) + _ATTEMPT + b"l"
"""First bytes of the header table of a message without headers of the application."""
_PLAIN_START = _PLAIN_HEAD + _PLAIN_TABLE
_ATTEMPT_MODE_AND_ID = Struct(">qBB")
"""The bytes after `_PLAIN_TABLE`: attempt number, delivery mode, length of the ``message_id``."""
_MODE_AND_ID = Struct(">BB")
"""The bytes after a header table: delivery mode, length of the ``message_id``."""

_EPOCH_TAGS = 10**11
_RUN_TAGS = 100 * _EPOCH_TAGS
_RUNS = 900


def encode_properties(message: Message, attempt: int) -> bytes:
    """Encode the property flags and property list of a ``basic`` content header."""
    mode = _PERSISTENT if message.persistent else _TRANSIENT
    # The fields that most messages have, without a look at each of the others.
    if message.is_plain and message.message_id is not None:
        id_ = message.message_id.encode()
        if message.content_type is None:
            if not message.headers:
                return _PLAIN_START + _ATTEMPT_MODE_AND_ID.pack(attempt, mode, len(id_)) + id_
            head = _PLAIN_HEAD
        else:
            content_type = message.content_type.encode()
            head = _HEAD_WITH_TYPE + _OCTET.pack(len(content_type)) + content_type
            if not message.headers:
                rest = _ATTEMPT_MODE_AND_ID.pack(attempt, mode, len(id_))
                return b"".join((head, _PLAIN_TABLE, rest, id_))
        table = _headers(message.headers, attempt)
        return b"".join((head, table, _MODE_AND_ID.pack(mode, len(id_)), id_))
    flags = _HEADERS_AND_DELIVERY_MODE
    out: list[bytes] = [b""]
    flags |= _add_short_string(out, message.content_type, _CONTENT_TYPE)
    flags |= _add_short_string(out, message.content_encoding, 1 << 14)
    out.append(_headers(message.headers, attempt))
    out.append(_OCTET.pack(mode))
    if message.priority is not None:
        flags |= 1 << 11
        out.append(_OCTET.pack(message.priority))
    flags |= _add_short_string(out, message.correlation_id, 1 << 10)
    flags |= _add_short_string(out, message.reply_to, 1 << 9)
    expiration = None if message.expiration is None else str(message.expiration)
    flags |= _add_short_string(out, expiration, 1 << 8)
    flags |= _add_short_string(out, message.message_id, _MESSAGE_ID)
    if message.timestamp is not None:
        flags |= 1 << 6
        out.append(_TIMESTAMP.pack(_seconds(message.timestamp)))
    flags |= _add_short_string(out, message.type, 1 << 5)
    flags |= _add_short_string(out, message.user_id, 1 << 4)
    flags |= _add_short_string(out, message.app_id, 1 << 3)
    out[0] = _FLAGS.pack(flags)
    return b"".join(out)


def encode_batch(
    messages: Sequence[Message], run: int, epoch: int, first_tag: int, frame_max: int
) -> list[bytes]:
    """Encode the properties of a batch, before any byte of the batch is written."""
    attempt = attempt_number(run, epoch, first_tag)
    try:
        encoded = [
            encode_properties(message, number) for number, message in enumerate(messages, attempt)
        ]
    except Exception:  # noqa: BLE001 - one message is to blame, and the others are not
        encoded = _encode_each(messages, attempt)
    room = frame_max - HEADER_OVERHEAD
    sizes = list(map(len, encoded))
    if max(sizes, default=0) > room:
        index = next(index for index, size in enumerate(sizes) if size > room)
        problem = (
            f"its properties take {sizes[index]} bytes, but this broker's frames hold {frame_max}"
        )
        raise CannotEncode(index, problem)
    return encoded


def _encode_each(messages: Sequence[Message], attempt: int) -> list[bytes]:
    """Encode the properties of a batch, and name the message that cannot be encoded."""
    encoded = []
    for index, message in enumerate(messages):
        try:
            encoded.append(encode_properties(message, attempt + index))
        except Exception as error:
            kind = type(error).__name__
            problem = f"its headers were changed since, and cannot be encoded: {kind}"
            raise CannotEncode(index, problem) from error
    return encoded


def attempt_number(run: int, epoch: int, tag: int) -> int:
    """The value of `ATTEMPT_HEADER`: 12_03_00000004567 is run 12, epoch 3, tag 4567.

    An integer costs the broker less than a string. It stays below 2^53, so that consumers in
    JavaScript can pass it on. It repeats after 900 runs, or after 100 epochs of one run. That does
    no harm: messages in flight on one channel differ in the tag, and a return arrives on the
    channel of its publish.
    """
    return run % _RUNS * _RUN_TAGS + epoch % 100 * _EPOCH_TAGS + tag


def attempt_tag(headers: object, run: int, epoch: int) -> int:
    """The delivery tag of a returned message; 0 if its headers name no attempt of this epoch."""
    value = headers.get(ATTEMPT_HEADER) if isinstance(headers, dict) else None
    if not isinstance(value, int):
        return 0
    tag = value - attempt_number(run, epoch, 0)
    return tag if 0 < tag < _EPOCH_TAGS else 0


def _add_short_string(out: list[bytes], value: str | None, flag: int) -> int:
    if value is None:
        return 0
    encoded = value.encode()
    out.append(_OCTET.pack(len(encoded)) + encoded)
    return flag


def _headers(headers: Mapping[str, FieldValue] | None, attempt: int) -> bytes:
    """The encoded header table, with the attempt header at its end."""
    body = _entries(headers or {}) + _ATTEMPT + _TYPED_INT64.pack(b"l", attempt)
    return _LENGTH.pack(len(body)) + body


def _table(table: Mapping[str, FieldValue]) -> bytes:
    body = _entries(table)
    return _LENGTH.pack(len(body)) + body


def _entries(table: Mapping[str, FieldValue]) -> bytes:
    pieces: list[bytes] = []
    for name, value in table.items():
        encoded = name.encode()
        pieces.append(_OCTET.pack(len(encoded)) + encoded)
        _add_value(pieces, value)
    return b"".join(pieces)


def _add_value(out: list[bytes], value: FieldValue) -> None:
    match value:
        case str() | bytes() | None | bool() | int() | float() | Decimal() | datetime():
            out.append(_scalar(value))
        case Mapping():
            out.append(b"F" + _table(value))
        case _:
            items: list[bytes] = []
            for item in value:
                _add_value(items, item)
            body = b"".join(items)
            out.append(_TYPED_LENGTH.pack(b"A", len(body)) + body)


def _scalar(value: str | bytes | float | Decimal | datetime | None) -> bytes:  # noqa: PLR0911
    match value:
        case str():
            encoded = value.encode()
            return _TYPED_LENGTH.pack(b"S", len(encoded)) + encoded
        case None:
            return b"V"
        case bool():
            return _TYPED_OCTET.pack(b"t", value)
        case int():
            is_small = value in _INT32
            return _TYPED_INT32.pack(b"I", value) if is_small else _TYPED_INT64.pack(b"l", value)
        case float():
            return _TYPED_DOUBLE.pack(b"d", value)
        case bytes():
            return _TYPED_LENGTH.pack(b"x", len(value)) + value
        case Decimal():
            places = max(0, -int(value.as_tuple().exponent))
            return _TYPED_DECIMAL.pack(b"D", places, int(value.scaleb(places, EXACT)))
        case datetime():
            return _TYPED_TIMESTAMP.pack(b"T", _seconds(value))


def _seconds(moment: datetime) -> int:
    return calendar.timegm(moment.utctimetuple())


_FRAME: Final = Struct(">BHI")
_METHOD: Final = Struct(">HHH")
_CONTENT: Final = Struct(">HHQ")
_HEADER: Final = Struct(">BHIHHQ")  # a header frame up to its properties
_NEXT_FRAME: Final = Struct(">cBHI")  # end of a frame, and header of the next frame
_FRAME_END: Final = b"\xce"
_METHOD_FRAME, _HEADER_FRAME, _BODY_FRAME = 1, 2, 3
_BASIC, _PUBLISH = 60, 40
_MANDATORY: Final = b"\x01"
_DESTINATIONS_MAX: Final = 4_096
_PIECE_BYTES: Final = 64 * 1024

FRAME_OVERHEAD: Final = _FRAME.size + len(_FRAME_END)
"""Bytes of a frame besides its payload; they count against ``frame_max``."""
HEADER_OVERHEAD: Final = FRAME_OVERHEAD + _CONTENT.size
"""Bytes of a header frame besides its properties."""


class Piece(NamedTuple):
    """Complete frames that are written together: of several publishes, or a part of a large one."""

    first: int  # index in the batch of the first publish
    data: bytes
    is_rest: bool = False  # continues a large publish, and contains no other


class PublishFrames:
    """Encoder of publishes on one channel, with ``mandatory`` set."""

    def __init__(self, channel: int, frame_max: int) -> None:
        self.frame_max = frame_max  # negotiated, in bytes
        self._channel = channel
        self._body_max = frame_max - FRAME_OVERHEAD
        self._methods: dict[tuple[str, str], bytes] = {}

    def encode(self, messages: Sequence[Message], properties: Sequence[bytes]) -> list[Piece]:
        """Encode a batch in few pieces of about 64 KiB.

        Few pieces save system calls. Larger pieces would copy more bytes after each partial write.
        """
        written: list[Piece] = []
        parts: list[bytes] = []
        first = size = 0
        for index, (message, encoded) in enumerate(zip(messages, properties, strict=True)):
            destination = (message.exchange, message.routing_key)
            body = message.body
            length, content = len(body), _CONTENT.size + len(encoded)
            parts += (
                self._methods.get(destination) or self._method(destination),
                _HEADER.pack(_HEADER_FRAME, self._channel, content, _BASIC, 0, length),
                encoded,
            )
            if 0 < length <= self._body_max:
                frame = _NEXT_FRAME.pack(_FRAME_END, _BODY_FRAME, self._channel, length)
                parts += (frame, body, _FRAME_END)
                size += length + content
            else:  # no body frame for an empty body; several pieces for a large one
                rest = self._body_frames(body)
                written.append(Piece(first, b"".join((*parts, _FRAME_END, next(rest, b"")))))
                written += [Piece(index, frame, is_rest=True) for frame in rest]
                parts, size, first = [], 0, index + 1
            if size >= _PIECE_BYTES:
                written.append(Piece(first, b"".join(parts)))
                parts, size, first = [], 0, index + 1
        if parts:
            written.append(Piece(first, b"".join(parts)))
        return written

    def _body_frames(self, body: bytes) -> Iterator[bytes]:
        """The body frames of a body; none for an empty body."""
        for start in range(0, len(body), self._body_max):
            part = body[start : start + self._body_max]
            frame = _FRAME.pack(_BODY_FRAME, self._channel, len(part))
            yield b"".join((frame, part, _FRAME_END))

    def _method(self, destination: tuple[str, str]) -> bytes:
        """Encode the ``basic.publish`` frame of a destination, and cache it."""
        if len(self._methods) >= _DESTINATIONS_MAX:  # bounded, for applications with many keys
            self._methods.clear()
        exchange, routing_key = (name.encode() for name in destination)
        payload = b"".join(
            (
                _METHOD.pack(_BASIC, _PUBLISH, 0),
                bytes((len(exchange),)),
                exchange,
                bytes((len(routing_key),)),
                routing_key,
                _MANDATORY,
            )
        )
        frame = _FRAME.pack(_METHOD_FRAME, self._channel, len(payload)) + payload + _FRAME_END
        self._methods[destination] = frame
        return frame
