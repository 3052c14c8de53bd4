"""What a connection has to say and nobody has taken yet.

PURE: this module knows how much it is, and where a fault cuts it off. It must never know sockets,
nor what the bytes mean.
"""

from __future__ import annotations


class Output:
    """Bytes for one client."""

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[bytes] = []
        self._left: int | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the last byte that may leave has left."""
        return self._left == 0

    def add(self, data: bytes) -> None:
        """Say something."""
        self._parts.append(data)
        self.size += len(data)

    def cut_after(self, size: int) -> None:
        """Let only so many more bytes leave."""
        self._left = size

    def take(self) -> bytes:
        """Everything, in one piece."""
        data = b"".join(self._parts)
        self.clear()
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
        return data

    def clear(self) -> None:
        """Say nothing of it."""
        self._parts.clear()
        self.size = 0
