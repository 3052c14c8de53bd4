"""Splits the broker's bytes into frames and enforces limits, before a client library reads them.

Knows: frame headers, and the order of the frames of a message. Must never know: client libraries,
or what is in a message.

A client library buffers a whole frame and a whole message of the announced size: up to 4 GiB and
2^64 bytes. So a frame larger than the negotiated ``frame_max`` is rejected at its header, and so is
every message that is not a returned one. Each violation ends the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum, auto
from struct import Struct
from typing import Final

FRAME_HEAD: Final = Struct(">BHI")
METHOD: Final = 1
_HEADER, _BODY, _PROTOCOL = 2, 3, ord("A")
_FRAME_OVERHEAD: Final = FRAME_HEAD.size + 1
_PROTOCOL_HEADER_BYTES: Final = 8
_RETURN: Final = bytes((0, 60, 0, 50))
_CHANNEL_OPEN_OK: Final = bytes((0, 20, 0, 11))
_BODY_SIZE: Final = Struct(">Q")
_BODY_SIZE_AT: Final = FRAME_HEAD.size + 4
_HEADER_NEXT: Final = -1
NOT_WAITED_FOR: Final = "the broker sent an unexpected message or part of a message"


class BadFrame(Exception):
    """The broker sent a frame that it must not send; the connection must end."""


class Part(Enum):
    """Which part of a returned message a frame is."""

    NO_MESSAGE = auto()
    RETURN = auto()
    HEADER = auto()
    BODY = auto()


class Incoming:
    """The received bytes of one connection, split into frames."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most  # bytes of a frame at most, as negotiated so far
        self.partial: bytes = b""  # the beginning of an incomplete frame

    def frames(
        self, data_in: bytes, take: Callable[[memoryview], int] = lambda _: 0
    ) -> Iterator[bytes]:
        """Yield the complete frames, in order."""
        data = self.partial + data_in if self.partial else data_in
        self.partial = b""
        at, view = 0, memoryview(data)
        while at < len(data):
            at += take(view[at:])  # what it has consumed itself, in complete frames
            whole = _frame_size(view[at:], self._most())
            if whole is None:
                self.partial = data[at:]
                return
            one = data[at : at + whole]
            at += whole
            yield one


class Contents:
    """Checks that the broker sends only returned messages, on open channels, of announced size."""

    def __init__(self) -> None:
        self._expected: dict[int, int] = {}  # by open channel: `_HEADER_NEXT`, or bytes of a body

    def open(self, channel: int) -> None:
        """Allow returned messages on a channel. A received ``channel.open-ok`` does this too."""
        self._expected[channel] = 0

    def part(self, one: bytes) -> Part:
        """Classify the next frame."""
        kind, channel, size = FRAME_HEAD.unpack_from(one)
        is_return = kind == METHOD and one.startswith(_RETURN, FRAME_HEAD.size)
        if not is_return and kind not in {_HEADER, _BODY}:
            if kind == METHOD and one.startswith(_CHANNEL_OPEN_OK, FRAME_HEAD.size):
                self.open(channel)
            return Part.NO_MESSAGE
        before = self._expected.get(channel)
        if is_return and before == 0:
            self._expected[channel] = _HEADER_NEXT
            return Part.RETURN
        if kind == _HEADER and before == _HEADER_NEXT:
            self._expected[channel] = body_bytes(one)
            return Part.HEADER
        if kind == _BODY and before and size <= before:
            self._expected[channel] = before - size
            return Part.BODY
        raise BadFrame(NOT_WAITED_FOR)


def body_bytes(header: bytes) -> int:
    """The body size in bytes that a header frame announces."""
    if len(header) <= _BODY_SIZE_AT + _BODY_SIZE.size:
        raise BadFrame("the broker sent a return that cannot be read")
    return int(_BODY_SIZE.unpack_from(header, _BODY_SIZE_AT)[0])


def without_body(header: bytes) -> bytes:
    """A copy of the header frame that announces an empty body."""
    end = _BODY_SIZE_AT + _BODY_SIZE.size
    return header[:_BODY_SIZE_AT] + bytes(_BODY_SIZE.size) + header[end:]


def _frame_size(data: memoryview, most: int) -> int | None:
    """Size of the first frame; None if it is incomplete."""
    if len(data) < FRAME_HEAD.size:
        return None
    kind, _, size = FRAME_HEAD.unpack_from(data)
    whole = int(size) + _FRAME_OVERHEAD
    # A broker that rejects the protocol version answers with its own protocol header.
    if kind == _PROTOCOL and bytes(data[:4]) == b"AMQP":
        whole = _PROTOCOL_HEADER_BYTES
    if whole > most:
        if bytes(data[:5]) == b"HTTP/":
            msg = "the port answers in HTTP, not in AMQP: RabbitMQ's is 5672, with TLS 5671"
            raise BadFrame(msg)
        raise BadFrame(f"the broker began a frame of {whole} bytes, and {most} are allowed")
    return whole if whole <= len(data) else None
