"""Bytes on their way: the output buffer of a connection, and the faults of the network.

Knows: where a fault cuts the output, and how many bytes may pass at a time (bandwidth, latency,
small pieces). Time is an argument. Must never know: sockets, what the bytes mean.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from reliablepub.testing.faults import Bandwidth, ConnectionFault, Latency, SliceOutput

if TYPE_CHECKING:
    from collections.abc import Iterable

READ_MAX_BYTES = 256 * 1024
"""Maximum number of bytes read from a socket at a time."""
_PACKET_S = 0.01
"""Size of a packet on a limited connection, as the seconds that it takes at the given rate."""


class Output:
    """Bytes to be written to one client."""

    def __init__(self) -> None:
        self.size: int = 0
        self._parts: list[bytes] = []
        self._left: int | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the last byte that `cut_after` allows was taken."""
        return self._left == 0

    def add(self, data: bytes) -> None:
        """Append bytes."""
        self._parts.append(data)
        self.size += len(data)

    def cut_after(self, size: int) -> None:
        """Drop all output after `size` more bytes."""
        self._left = size

    def take(self) -> bytes:
        """Remove and return all bytes."""
        data = b"".join(self._parts)
        self.clear()
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
        return data

    def clear(self) -> None:
        """Drop all bytes."""
        self._parts.clear()
        self.size = 0


class Flow:
    """One direction of a connection with limits; without limits all bytes pass at once.

    Args:
        per_s: Bytes per second; None for no limit.
        delay_s: Latency in seconds.
        size: Largest piece in bytes; None for no limit.
    """

    def __init__(
        self, *, per_s: float | None = None, delay_s: float = 0.0, size: int | None = None
    ) -> None:
        self.backlog_bytes: int = 0
        self._per_s = per_s
        self._delay_s = delay_s
        self._size = size
        self._free_at = 0.0
        self._packets: deque[tuple[float, bytes]] = deque()

    @classmethod
    def outward(cls, faults: Iterable[ConnectionFault]) -> Flow | None:
        """Make the flow from the broker to the client; None if no fault concerns it."""
        per_s, delay_s, size = None, 0.0, None
        for fault in faults:
            if isinstance(fault, Bandwidth):
                per_s = fault.sent_per_s
            elif isinstance(fault, Latency):
                delay_s = fault.delay_s
            elif isinstance(fault, SliceOutput):
                size = fault.size
        if per_s is None and not delay_s and size is None:
            return None
        return cls(per_s=per_s, delay_s=delay_s, size=size)

    @classmethod
    def inward(cls, faults: Iterable[ConnectionFault]) -> Flow | None:
        """Make the flow from the client to the broker; None if no fault concerns it."""
        rates = [fault.received_per_s for fault in faults if isinstance(fault, Bandwidth)]
        return cls(per_s=rates[-1]) if rates and rates[-1] is not None else None

    @property
    def deadline(self) -> float | None:
        """When the next packet may pass; None if there is none."""
        return max(self._packets[0][0], self._free_at) if self._packets else None

    @property
    def free_at(self) -> float:
        """When the next byte may pass."""
        return self._free_at

    def room(self, now: float) -> int | None:
        """Return how many bytes may pass now; None for no limit."""
        if now < self._free_at:
            return 0
        if self._per_s is None:
            return self._size
        return min(max(1, int(self._per_s * _PACKET_S)), self._size or READ_MAX_BYTES)

    def passed(self, count: int, now: float) -> None:
        """Record that `count` bytes have passed."""
        if self._per_s is not None:
            self._free_at = now + count / self._per_s

    def push(self, data: bytes, now: float) -> None:
        """Add bytes, which pass after the latency."""
        if data:
            self._packets.append((now + self._delay_s, data))
            self.backlog_bytes += len(data)

    def poll(self, now: float) -> bytes:
        """Remove and return the bytes that pass now."""
        room = self.room(now)
        if room == 0 or not self._packets or now < self._packets[0][0]:
            return b""
        due, data = self._packets.popleft()
        piece = data if room is None else data[:room]
        if len(piece) < len(data):
            self._packets.appendleft((due, data[len(piece) :]))
        self.backlog_bytes -= len(piece)
        self.passed(len(piece), now)
        return piece
