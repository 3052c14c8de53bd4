"""Frames of AMQP 0-9-1: splits the input into frames, encodes the output.

Knows: the shape of a frame, its size limits, the encoding of methods and content. Must never know:
what a method means, when something is sent, any state of a connection but its frame size.

Sizes are checked before anything is allocated. pamqp refuses to encode names outside its own
alphabet, and RabbitMQ accepts any UTF-8 name. So this module encodes the methods that carry a
client's names, and confirms for speed.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from reliablepub.testing.fields import short_string
from reliablepub.testing.replies import frame_error

if TYPE_CHECKING:
    from pamqp.base import Frame

METHOD: Final = 1
HEADER: Final = 2
BODY: Final = 3
HEARTBEAT: Final = 8
FRAME_END: Final = 0xCE
FRAME_OVERHEAD: Final = 8
FRAME_MIN_SIZE: Final = 4096
"""The largest frame either side may send before connection.tune-ok."""

PROTOCOL_HEADER: Final = b"AMQP\x00\x00\x09\x01"
PROTOCOL_HEADERS: Final = frozenset({PROTOCOL_HEADER, b"AMQP\x01\x01\x00\x09"})
"""Protocol headers that a client may send: that of 0-9-1, and the older form of 0-9."""
HEARTBEAT_FRAME: Final = b"\x08\x00\x00\x00\x00\x00\x00\xce"
CHANNEL_OPEN_OK: Final = b"\x00\x14\x00\x0b\x00\x00\x00\x00"
"""The payload of channel.open-ok with an empty channel id, as RabbitMQ sends it; pamqp omits it."""

_REQUEUE_BIT: Final = 2
_FRAME = struct.Struct(">BHI")
_CONFIRM = struct.Struct(">BHIHHQBB")
_DELIVER_FIXED = struct.Struct(">QB")
_CLOSE_HEAD = struct.Struct(">IHB")
_CLOSE_IDS = struct.Struct(">HH")


class FrameBuffer:
    """Splits the byte stream of one peer into frames no larger than `frame_max`."""

    def __init__(self) -> None:
        self.frame_max = FRAME_MIN_SIZE
        self._data = b""
        self._at = 0

    def feed(self, data: bytes) -> None:
        """Append bytes, and drop those that earlier frames consumed."""
        self._data = self._data[self._at :] + data
        self._at = 0

    def take(self, size: int) -> bytes | None:
        """Return `size` bytes that are not a frame (the protocol header); None if too few."""
        if len(self._data) - self._at < size:
            return None
        self._at += size
        return self._data[self._at - size : self._at]

    def next_frame(self) -> tuple[int, int, bytes] | None:
        """Return the next whole frame as (type, channel, payload); None if more bytes are needed.

        Raises:
            AmqpError: 501 FRAME_ERROR for a wrong size or end marker, as rabbit_reader does.
        """
        data, at = self._data, self._at
        if len(data) - at < _FRAME.size:
            return None
        kind, channel, size = _FRAME.unpack_from(data, at)
        if size > self.frame_max:  # RabbitMQ does not count the overhead either (FRAME_SIZE_FUDGE)
            reason = f"{{frame_too_large,{size},{self.frame_max - FRAME_OVERHEAD}}}"
            raise frame_error(kind, b"", reason)
        start = at + _FRAME.size
        end = start + size
        if len(data) <= end:
            return None
        if data[end] != FRAME_END:
            reason = f"{{invalid_frame_end_marker,{data[end]}}}"
            raise frame_error(kind, data[start:end], reason)
        self._at = end + 1
        return kind, channel, data[start:end]


def encode_frame(kind: int, channel: int, payload: bytes) -> bytes:
    """Encode a frame."""
    return b"%b%b\xce" % (_FRAME.pack(kind, channel, len(payload)), payload)


def encode_method(channel: int, method: Frame) -> bytes:
    """Encode the frame of a method whose arguments contain no name that a client chose."""
    return encode_frame(METHOD, channel, method.index.to_bytes(4, "big") + method.marshal())


def encode_confirm(channel: int, delivery_tag: int, *, multiple: bool, nack: bool) -> bytes:
    """Encode the frame of a basic.ack (60, 80) or basic.nack (60, 120) of publisher confirms."""
    method_id = 120 if nack else 80
    bits = multiple | (_REQUEUE_BIT if nack else 0)  # RabbitMQ sends nacks with requeue=true
    return _CONFIRM.pack(METHOD, channel, 13, 60, method_id, delivery_tag, bits, FRAME_END)


def encode_close(method: type[Frame], code: int, reply_text: str, ids: tuple[int, int]) -> bytes:
    """Encode connection.close or channel.close; the text may have been cut inside a character."""
    text = reply_text.encode(errors="surrogateescape")
    return _CLOSE_HEAD.pack(method.index, code, len(text)) + text + _CLOSE_IDS.pack(*ids)


def encode_return(exchange: str, routing_key: str) -> bytes:
    """Encode a basic.return with 312 NO_ROUTE."""
    return b"\x00\x3c\x00\x32\x01\x38" + _short_strings("NO_ROUTE", exchange, routing_key)


def encode_deliver(
    consumer_tag: str, delivery_tag: int, *, redelivered: bool, exchange: str, routing_key: str
) -> bytes:
    """Encode a basic.deliver."""
    fixed = _DELIVER_FIXED.pack(delivery_tag, redelivered)
    tag, names = _short_strings(consumer_tag), _short_strings(exchange, routing_key)
    return b"\x00\x3c\x00\x3c" + tag + fixed + names


def encode_get_ok(
    delivery_tag: int, *, redelivered: bool, exchange: str, routing_key: str, message_count: int
) -> bytes:
    """Encode a basic.get-ok."""
    fixed = _DELIVER_FIXED.pack(delivery_tag, redelivered)
    names = _short_strings(exchange, routing_key)
    return b"\x00\x3c\x00\x47" + fixed + names + message_count.to_bytes(4, "big")


def encode_declare_ok(queue: str, message_count: int, consumer_count: int) -> bytes:
    """Encode a queue.declare-ok."""
    counts = struct.pack(">II", message_count, consumer_count)
    return b"\x00\x32\x00\x0b" + _short_strings(queue) + counts


def _short_strings(*texts: str) -> bytes:
    return b"".join(map(short_string, texts))


def encode_content(
    channel: int, method: bytes, header: bytes, body: bytes, frame_max: int
) -> bytes:
    """Encode the frames of a method with content; the body is split into parts of `frame_max`."""
    step = frame_max - FRAME_OVERHEAD
    frames = [encode_frame(METHOD, channel, method), encode_frame(HEADER, channel, header)]
    frames += [
        encode_frame(BODY, channel, body[at : at + step]) for at in range(0, len(body), step)
    ]
    return b"".join(frames)
