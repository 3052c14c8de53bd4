"""Publishes as AMQP frames, ready to be written: the bytes that a client library would make.

Knows: method, header and body frames, content headers and field tables (AMQP 0-9-1, 4.2.3, 4.2.5.5
and 4.2.6, with the type letters of RabbitMQ's rabbit_binary_generator). Must never know:
connections, what a tag means.

Three frames make one publish. The method frame is the same for every message to one destination, so
it is made once; of the header frame only sizes and properties differ, and the header that tells one
attempt from another. Written here because neither library at hand is faithful: pika 1.4 refuses a
float in a field table, and pamqp 4.0 writes it with 32 bits.
"""

from __future__ import annotations

import calendar
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from struct import Struct
from typing import Final, NamedTuple

from reliablepub.headers import ATTEMPT_HEADER, FieldValue
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
_MESSAGE_ID = 1 << 7
_PLAIN_FLAGS = _HEADERS_AND_DELIVERY_MODE | _MESSAGE_ID
_ATTEMPT = _OCTET.pack(len(ATTEMPT_HEADER)) + ATTEMPT_HEADER.encode()
_OURS_BYTES = len(_ATTEMPT) + _TYPED_INT64.size
_TRANSIENT, _PERSISTENT = 1, 2
_PLAIN_HEAD = _FLAGS.pack(_PLAIN_FLAGS) + _LENGTH.pack(_OURS_BYTES) + _ATTEMPT + b"l"
"""How the properties of a message begin that has no headers but ours."""
_ATTEMPT_MODE_AND_ID = Struct(">qBB")
"""What follows there, up to the ``message_id``."""
_MODE_AND_ID = Struct(">BB")
"""What is between the headers and the ``message_id``."""

_EPOCH_TAGS = 10**11
_RUN_TAGS = 100 * _EPOCH_TAGS
_RUNS = 900


def encode_properties(message: Message, attempt: int) -> bytes:
    """The property flags and list of a ``basic`` content header.

    Args:
        message: whose properties.
        attempt: the value of `ATTEMPT_HEADER` for this attempt.

    Raises:
        ValueError: a header cannot be read back when the broker returns the message.
    """
    mode = _PERSISTENT if message.persistent else _TRANSIENT
    if message.is_plain and message.message_id is not None:
        id_ = message.message_id.encode()
        if not message.headers:
            return _PLAIN_HEAD + _ATTEMPT_MODE_AND_ID.pack(attempt, mode, len(id_)) + id_
        return b"".join(
            (
                _FLAGS.pack(_PLAIN_FLAGS),
                _headers(message.headers, attempt),
                _MODE_AND_ID.pack(mode, len(id_)),
                id_,
            )
        )
    flags = _HEADERS_AND_DELIVERY_MODE
    out: list[bytes] = [b""]
    flags |= _add_short_string(out, message.content_type, 1 << 15)
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
    """The properties of a batch, before any byte of it is written.

    Args:
        messages: ``messages[i]`` has delivery tag ``first_tag + i``.
        run: number of the relay's run.
        epoch: of the channel.
        first_tag: as said.
        frame_max: the largest frame that was negotiated, in bytes.

    Raises:
        CannotEncode: properties do not fit into a frame.
    """
    attempt = attempt_number(run, epoch, first_tag)
    encoded = [
        encode_properties(message, number) for number, message in enumerate(messages, attempt)
    ]
    room = frame_max - HEADER_OVERHEAD
    sizes = list(map(len, encoded))
    if max(sizes, default=0) > room:
        index = next(index for index, size in enumerate(sizes) if size > room)
        problem = (
            f"its properties take {sizes[index]} bytes, and this broker's frames hold {frame_max}"
        )
        raise CannotEncode(index, problem)
    return encoded


def attempt_number(run: int, epoch: int, tag: int) -> int:
    """What `ATTEMPT_HEADER` holds: ``12_03_00000004567`` is run 12, epoch 3, tag 4567.

    A number, since it costs the broker less than a text. It stays below 2^53, so that consumers in
    JavaScript can pass it on, and repeats after 900 runs, or after 100 epochs of one run: what is
    in flight on one channel differs in the tag, and a return comes on the channel of its publish.
    """
    return run % _RUNS * _RUN_TAGS + epoch % 100 * _EPOCH_TAGS + tag


def attempt_tag(headers: object, run: int, epoch: int) -> int:
    """The delivery tag of a returned message; 0 if it is not an attempt of this epoch."""
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
    """The header table, the attempt at its end."""
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
            return _TYPED_DECIMAL.pack(b"D", places, int(value.scaleb(places)))
        case datetime():
            return _TYPED_TIMESTAMP.pack(b"T", _seconds(value))


def _seconds(moment: datetime) -> int:
    return calendar.timegm(moment.utctimetuple())


_FRAME: Final = Struct(">BHI")
_METHOD: Final = Struct(">HHH")
_CONTENT: Final = Struct(">HHQ")
_HEADER: Final = Struct(">BHIHHQ")  # a header frame up to its properties, in one go
_NEXT_FRAME: Final = Struct(">cBHI")  # the end of a frame, and the head of the next one
_FRAME_END: Final = b"\xce"
_METHOD_FRAME, _HEADER_FRAME, _BODY_FRAME = 1, 2, 3
_BASIC, _PUBLISH = 60, 40
_MANDATORY: Final = b"\x01"
_DESTINATIONS_MAX: Final = 4_096
_PIECE_BYTES: Final = 64 * 1024

FRAME_OVERHEAD: Final = _FRAME.size + len(_FRAME_END)
"""Bytes of a frame around its payload; ``frame_max`` counts them."""
HEADER_OVERHEAD: Final = FRAME_OVERHEAD + _CONTENT.size
"""Bytes of a header frame around its properties."""


class Piece(NamedTuple):
    """Whole frames that are written together: of some publishes, or a part of a large one.

    Attributes:
        first: which of its batch is the first publish in it.
        data: the frames.
        is_rest: whether it begins within a publish, and ends with that or before.
    """

    first: int
    data: bytes
    is_rest: bool = False


class PublishFrames:
    """Makes the frames of publishes on one channel, with ``mandatory`` set.

    Args:
        channel: its number.
        frame_max: the largest frame that was negotiated, in bytes.

    Attributes:
        frame_max: as given.
    """

    def __init__(self, channel: int, frame_max: int) -> None:
        self.frame_max = frame_max
        self._channel = channel
        self._body_max = frame_max - FRAME_OVERHEAD
        self._methods: dict[tuple[str, str], bytes] = {}

    def encode(self, messages: Sequence[Message], properties: Sequence[bytes]) -> list[Piece]:
        """The frames of a batch, in few pieces: large, but not so large that sending copies much.

        Args:
            messages: routing and bodies.
            properties: of each of them, encoded (`reliablepub.transport.frames`).
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
            else:
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
        """A body of several frames, or of none."""
        for start in range(0, len(body), self._body_max):
            part = body[start : start + self._body_max]
            frame = _FRAME.pack(_BODY_FRAME, self._channel, len(part))
            yield b"".join((frame, part, _FRAME_END))

    def _method(self, destination: tuple[str, str]) -> bytes:
        """``basic.publish``, remembered; ever new destinations make it start over at times."""
        if len(self._methods) >= _DESTINATIONS_MAX:
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
