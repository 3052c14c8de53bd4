"""Frames of AMQP 0-9-1: splits a byte stream into frames, and encodes one.

This module knows the shape of a frame and its size limits, which are checked before anything is
allocated. It must never know the content of a frame (`decoding`, `encoding`), or any state of a
connection but its frame size.
"""

from __future__ import annotations

import struct
from typing import Final

from reliablepub.testing.replies import frame_error

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

_FRAME = struct.Struct(">BHI")


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
        """Exactly `size` bytes that are not a frame (the protocol header); None if too few."""
        if len(self._data) - self._at < size:
            return None
        self._at += size
        return self._data[self._at - size : self._at]

    def next_frame(self) -> tuple[int, int, bytes] | None:
        """The next whole frame as (type, channel, payload), or None if more bytes are needed.

        Raises:
            AmqpError: 501 FRAME_ERROR for a wrong size or end marker, as rabbit_reader does.
        """
        data, at = self._data, self._at
        if len(data) - at < _FRAME.size:
            return None
        kind, channel, size = _FRAME.unpack_from(data, at)
        if size > self.frame_max:  # RabbitMQ too does not count the overhead (FRAME_SIZE_FUDGE)
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
