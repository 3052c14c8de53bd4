"""The output buffer of a connection.

PURE: this module knows the size of the output, and where a fault cuts it off. It must never know
sockets, or what the bytes mean.
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
        """Whether `cut_after` has taken effect: its last byte was taken."""
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
