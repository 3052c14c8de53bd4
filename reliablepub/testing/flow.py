"""One direction of a connection with faults of the network: bandwidth, latency, small pieces.

PURE: this module knows how many bytes may pass at a time. Time is an argument.
It must never know sockets, or what the bytes mean.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from reliablepub.testing.faults import Bandwidth, ConnectionFault, Latency, SliceOutput

if TYPE_CHECKING:
    from collections.abc import Iterable

READ_MAX_BYTES = 256 * 1024
"""Most bytes read from a socket at a time."""
_PACKET_S = 0.01
"""Size of a packet on a limited connection, as the seconds that it takes at the given rate."""


class Flow:
    """Limits on passing bytes; without limits all bytes pass at once.

    Args:
        per_s: Bytes a second; None for no limit.
        delay_s: Latency in seconds.
        size: Largest piece in bytes; None for no limit.
    """

    def __init__(
        self, *, per_s: float | None = None, delay_s: float = 0.0, size: int | None = None
    ) -> None:
        self.backlog_bytes = 0
        self._per_s = per_s
        self._delay_s = delay_s
        self._size = size
        self._free_at = 0.0
        self._packets: deque[tuple[float, bytes]] = deque()

    @classmethod
    def outward(cls, faults: Iterable[ConnectionFault]) -> Flow | None:
        """The flow from the broker to the client; None if no fault concerns it."""
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
        """The flow from the client to the broker; None if no fault concerns it."""
        rates = [fault.received_per_s for fault in faults if isinstance(fault, Bandwidth)]
        return cls(per_s=rates[-1]) if rates and rates[-1] is not None else None

    @property
    def deadline(self) -> float | None:
        """When the next kept packet may pass; None if none is kept."""
        return max(self._packets[0][0], self._free_at) if self._packets else None

    @property
    def free_at(self) -> float:
        """When the next byte may pass."""
        return self._free_at

    def room(self, now: float) -> int | None:
        """How many bytes may pass now; None for no limit."""
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
