"""Encodes methods, confirms and content.

pamqp refuses to encode names outside its own alphabet; RabbitMQ accepts any UTF-8 name. So this
module itself encodes the methods that carry names from a client, and confirms for speed.
It must never know when something is sent.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from pamqp import encode

from reliablepub.testing.wire import BODY, FRAME_END, FRAME_OVERHEAD, HEADER, METHOD, encode_frame

if TYPE_CHECKING:
    from pamqp.base import Frame

CHANNEL_OPEN_OK: Final = b"\x00\x14\x00\x0b\x00\x00\x00\x00"
"""The payload of channel.open-ok with an empty channel id, as RabbitMQ sends; pamqp omits it."""

_REQUEUE_BIT: Final = 2

_CONFIRM = struct.Struct(">BHIHHQBB")
_DELIVER_FIXED = struct.Struct(">QB")
_CLOSE_HEAD = struct.Struct(">IHB")
_CLOSE_IDS = struct.Struct(">HH")


def encode_method(channel: int, method: Frame) -> bytes:
    """The frame of a method whose arguments contain no name that a client chose."""
    return encode_frame(METHOD, channel, method.index.to_bytes(4, "big") + method.marshal())


def encode_confirm(channel: int, delivery_tag: int, *, multiple: bool, nack: bool) -> bytes:
    """A basic.ack (60, 80) or basic.nack (60, 120) of publisher confirms."""
    method_id = 120 if nack else 80
    bits = multiple | (_REQUEUE_BIT if nack else 0)  # RabbitMQ sends nacks with requeue=true
    return _CONFIRM.pack(METHOD, channel, 13, 60, method_id, delivery_tag, bits, FRAME_END)


def encode_close(method: type[Frame], code: int, reply_text: str, ids: tuple[int, int]) -> bytes:
    """The payload of connection.close or channel.close; its text may be cut inside a character."""
    said = reply_text.encode(errors="surrogateescape")
    return _CLOSE_HEAD.pack(method.index, code, len(said)) + said + _CLOSE_IDS.pack(*ids)


def encode_return(exchange: str, routing_key: str) -> bytes:
    """The payload of a basic.return with 312 NO_ROUTE."""
    return b"".join(
        (
            b"\x00\x3c\x00\x32\x01\x38",
            encode.short_string("NO_ROUTE"),
            encode.short_string(exchange),
            encode.short_string(routing_key),
        )
    )


def encode_deliver(
    consumer_tag: str, delivery_tag: int, *, redelivered: bool, exchange: str, routing_key: str
) -> bytes:
    """The payload of a basic.deliver."""
    return b"".join(
        (
            b"\x00\x3c\x00\x3c",
            encode.short_string(consumer_tag),
            _DELIVER_FIXED.pack(delivery_tag, redelivered),
            encode.short_string(exchange),
            encode.short_string(routing_key),
        )
    )


def encode_get_ok(
    delivery_tag: int, *, redelivered: bool, exchange: str, routing_key: str, message_count: int
) -> bytes:
    """The payload of a basic.get-ok."""
    return b"".join(
        (
            b"\x00\x3c\x00\x47",
            _DELIVER_FIXED.pack(delivery_tag, redelivered),
            encode.short_string(exchange),
            encode.short_string(routing_key),
            message_count.to_bytes(4, "big"),
        )
    )


def encode_declare_ok(queue: str, message_count: int, consumer_count: int) -> bytes:
    """The payload of a queue.declare-ok."""
    counts = struct.pack(">II", message_count, consumer_count)
    return b"\x00\x32\x00\x0b" + encode.short_string(queue) + counts


def encode_content(
    channel: int, method: bytes, header: bytes, body: bytes, frame_max: int
) -> bytes:
    """The frames of a method with content: method, header, and body in parts of `frame_max`."""
    step = frame_max - FRAME_OVERHEAD
    frames = [encode_frame(METHOD, channel, method), encode_frame(HEADER, channel, header)]
    frames += [
        encode_frame(BODY, channel, body[at : at + step]) for at in range(0, len(body), step)
    ]
    return b"".join(frames)
