"""Frames of AMQP 0-9-1: a byte stream cut into them, and one frame as bytes.

This module knows the shape of a frame and its size limits, which are checked before anything is
allocated. It must never know what is inside a frame (`decoding`, `encoding`), nor any state of a
connection beyond its frame size.
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
"""What a client may begin with: 0-9-1, or 0-9 as it was once written."""
HEARTBEAT_FRAME: Final = b"\x08\x00\x00\x00\x00\x00\x00\xce"

_FRAME = struct.Struct(">BHI")


class FrameBuffer:
    """Cuts the byte stream of one peer into frames no larger than `frame_max`."""

    def __init__(self) -> None:
        self.frame_max = FRAME_MIN_SIZE
        self._data = b""
        self._at = 0

    def feed(self, data: bytes) -> None:
        """Append what was read; what earlier frames used is dropped here."""
        self._data = self._data[self._at :] + data
        self._at = 0

    def take(self, size: int) -> bytes | None:
        """Exactly `size` bytes that are not a frame (the protocol header), or None yet."""
        if len(self._data) - self._at < size:
            return None
        self._at += size
        return self._data[self._at - size : self._at]

    def next_frame(self) -> tuple[int, int, bytes] | None:
        """The next whole frame as (type, channel, payload), or None when more bytes are needed.

        Raises:
            AmqpError: 501 FRAME_ERROR, as rabbit_reader does for a size or an end that is wrong.
        """
        data, at = self._data, self._at
        if len(data) - at < _FRAME.size:
            return None
        kind, channel, size = _FRAME.unpack_from(data, at)
        if size > self.frame_max:  # RabbitMQ forgives the 8 bytes around it (FRAME_SIZE_FUDGE)
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
    """One frame around a payload."""
    return b"%b%b\xce" % (_FRAME.pack(kind, channel, len(payload)), payload)
