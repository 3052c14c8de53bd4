"""Publishes as AMQP frames, ready to be written: the bytes that a client library would make.

Knows: method, header and body frames (AMQP 0-9-1, 4.2.3 and 4.2.6). Must never know: connections,
what a tag means.

Three frames make one publish. The method frame is the same for every message to one destination, so
it is made once; of the header frame only sizes and properties differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Final, NamedTuple

from reliablepub.message import Message

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
            properties: of each of them, encoded (`reliablepub.transport.encoding`).
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
