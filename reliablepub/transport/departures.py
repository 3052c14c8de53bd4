"""Publishes on their way out of this host, by their place in the stream of bytes.

Knows: places in a stream, epochs and tags, and how the kernel is asked what it still holds of a
socket's output. Must never know: client libraries, what a deadline is.

What was handed to a client library is in its buffer, then in the kernel's, which holds megabytes on
a slow link. It has left when the peer's TCP has acknowledged it.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque
from typing import Final

from reliablepub._core.events import Leaving

try:
    import fcntl
    import termios
except ImportError:  # pragma: no cover - Windows
    pass

LOOK_S: Final = 0.1
"""How often it is worth a look what has left."""
_TCP_INFO: Final[int] = getattr(socket, "TCP_INFO", 0)
_BYTES_ACKED: Final = struct.Struct("=120xQ")  # struct tcp_info of linux/tcp.h up to that field


class Departures:
    """What was handed over, and has not left yet as far as is known.

    Attributes:
        left: how many bytes of the stream had left at the last look.
    """

    __slots__ = ("_under_way", "left")

    def __init__(self) -> None:
        self._under_way: deque[tuple[int, int, int]] = deque()
        self.left = 0

    def __bool__(self) -> bool:
        """Whether there is anything to look at."""
        return bool(self._under_way)

    def add(self, end: int, epoch: int, tag: int) -> None:
        """Bytes are handed over.

        Args:
            end: their place in the stream: how many were handed over up to there.
            epoch: of the channel they are for.
            tag: of the first publish among them; 0 for the opening of the channel.
        """
        self._under_way.append((end, epoch, tag))

    def look(self, left: int) -> list[Leaving]:
        """What is to be reported, when so many bytes of the stream have left."""
        under_way = self._under_way
        while under_way and under_way[0][0] <= left:
            under_way.popleft()
        is_moving, self.left = left > self.left, left
        if not is_moving:
            return []
        first: dict[int, int] = {}
        for _, epoch, tag in under_way:
            first.setdefault(epoch, tag)
        return [Leaving(epoch, tag) for epoch, tag in first.items()]

    def clear(self) -> None:
        """The stream has ended."""
        self._under_way.clear()
        self.left = 0


def held_by_kernel(fd: int) -> int:
    """Bytes of a TCP socket's output that its peer has not acknowledged; 0 where none can tell."""
    held = array.array("i", [0])
    try:
        fcntl.ioctl(fd, termios.TIOCOUTQ, held)  # of a socket: SIOCOUTQ, the same number
    except (OSError, NameError):
        return 0
    return held[0]


def acknowledged(fd: int) -> int:
    """Bytes that a TCP socket's peer has acknowledged so far; 0 where none can tell."""
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_ACKED.size)
            (count,) = _BYTES_ACKED.unpack(info)
    except (OSError, struct.error):
        return 0
    return int(count)
