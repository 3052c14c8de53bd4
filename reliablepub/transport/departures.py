"""Tracks which publishes have left this host, by their position in the output stream.

Knows: stream positions, epochs and tags, and how to ask the kernel for unacknowledged output. Must
never know: client libraries, or deadlines.

A publish is first in the client library's buffer, then in the kernel's, which holds megabytes on a
slow link. It has left when the peer's TCP has acknowledged it.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
import termios
from collections import deque
from typing import Final

from reliablepub._core.events import Leaving

LOOK_S: Final = 0.1
"""Seconds between two checks of what has left."""
_TCP_INFO: Final[int] = getattr(socket, "TCP_INFO", 0)
_BYTES_ACKED: Final = struct.Struct("=120xQ")  # struct tcp_info of linux/tcp.h up to that field


class Departures:
    """Publishes that were handed to the client library and are not known to have left."""

    __slots__ = ("left", "under_way")

    def __init__(self) -> None:
        self.under_way: deque[tuple[int, int, int]] = deque()  # end in the stream, epoch, tag
        self.left: int = 0  # bytes of the stream that had left at the last check

    def add(self, end: int, epoch: int, tag: int) -> None:
        """Add bytes that were handed to the client library, and end at `end` in the stream."""
        # The tag is that of the first publish among them; 0 for the opening of the channel.
        self.under_way.append((end, epoch, tag))

    def look(self, left: int) -> list[Leaving]:
        """Return an event for each channel whose bytes wait; none if the stream has not moved."""
        under_way = self.under_way
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
        """Start over with a new stream."""
        self.under_way.clear()
        self.left = 0


def held_by_kernel(fd: int) -> int:
    """Bytes of a TCP socket's output that the peer has not acknowledged; 0 if unknown."""
    held = array.array("i", [0])
    try:
        fcntl.ioctl(fd, termios.TIOCOUTQ, held)  # SIOCOUTQ of sockets has this number too
    except OSError:
        return 0
    return held[0]


def acknowledged(fd: int) -> int:
    """Bytes that a TCP socket's peer has acknowledged so far; 0 if unknown."""
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:  # it closes its descriptor at the end
            info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_ACKED.size)
            (count,) = _BYTES_ACKED.unpack(info)
    except (OSError, struct.error):
        return 0
    return int(count)
