"""What a broker sends, cut into frames before a client library reads it; too much is refused.

Knows: heads of frames, and in which order the frames of a message come. Must never know: client
libraries, what is in a message.

A client library waits for all of a frame, and all of a message, that a broker announces: 4 GiB and
2^64 bytes at most. So a frame that is larger than agreed on is refused by its head, and so is every
message that is not a returned one. Where the broker is at fault, the connection ends.
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
NOT_WAITED_FOR: Final = "the broker sent a message, or a part of one, that nobody waits for"


class BadFrame(Exception):
    """The broker sent what it must not send; this connection is over."""


class Part(Enum):
    """What a frame is a part of."""

    NO_MESSAGE = auto()
    RETURN = auto()
    HEADER = auto()
    BODY = auto()


class Incoming:
    """The bytes of one connection.

    Args:
        most: bytes of the largest frame that was agreed on, so far.

    Attributes:
        partial: the beginning of a frame; never more than one.
    """

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self.partial = b""

    def frames(
        self, data_in: bytes, take: Callable[[memoryview], int] = lambda _: 0
    ) -> Iterator[bytes]:
        """Frames that are whole, in order.

        Args:
            data_in: what came.
            take: given the data before each frame; how many bytes of it, in whole frames, are
                taken otherwise.

        Raises:
            BadFrame: a frame is too large.
        """
        data = self.partial + data_in if self.partial else data_in
        self.partial = b""
        at, view = 0, memoryview(data)
        while at < len(data):
            at += take(view[at:])
            whole = _frame_size(view[at:], self._most())
            if whole is None:
                self.partial = data[at:]
                return
            one = data[at : at + whole]
            at += whole
            yield one


class Contents:
    """Which messages are on their way, by channel: only returned ones, as long as announced."""

    def __init__(self) -> None:
        self._expected: dict[int, int] = {}  # by open channel: a header, or bytes of a body

    def open(self, channel: int) -> None:
        """Messages may be returned on a channel from now on; ``channel.open-ok`` does this too."""
        self._expected[channel] = 0

    def part(self, one: bytes) -> Part:
        """What the next frame is a part of.

        Raises:
            BadFrame: of a message that nobody waits for.
        """
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
    """How long the body will be that a header frame announces.

    Raises:
        BadFrame: the frame ends too early.
    """
    if len(header) <= _BODY_SIZE_AT + _BODY_SIZE.size:
        raise BadFrame("the broker sent a return that cannot be read")
    return int(_BODY_SIZE.unpack_from(header, _BODY_SIZE_AT)[0])


def without_body(header: bytes) -> bytes:
    """A header frame that announces no body."""
    end = _BODY_SIZE_AT + _BODY_SIZE.size
    return header[:_BODY_SIZE_AT] + bytes(_BODY_SIZE.size) + header[end:]


def _frame_size(data: memoryview, most: int) -> int | None:
    """How long the first frame is; None where the rest of it has not come yet."""
    if len(data) < FRAME_HEAD.size:
        return None
    kind, _, size = FRAME_HEAD.unpack_from(data)
    whole = int(size) + _FRAME_OVERHEAD
    if kind == _PROTOCOL and bytes(data[:4]) == b"AMQP":  # another version, in place of an answer
        whole = _PROTOCOL_HEADER_BYTES
    if whole > most:
        raise BadFrame(f"the broker began a frame of {whole} bytes, and {most} are allowed")
    return whole if whole <= len(data) else None
