"""What may be held, in messages and bytes: in the store, and in memory.

Knows: numbers. Must never know: what is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from reliablepub.outbox.enqueuing import OpenLimits
from reliablepub.outbox.entry import Counters
from reliablepub.relay.handover import Chunk

_MIB: Final = 1024 * 1024
WINDOW_MIN: Final = 32
"""Messages in flight on a new connection, unless it is said otherwise."""
WINDOW_MAX: Final = 4_096
"""Most messages in flight, however far the broker is, likewise."""
WINDOW_BYTES_MAX: Final = 16 * _MIB
"""Most bytes in flight, likewise."""
_LOADED_MESSAGES_MIN: Final = 2_000
_LOADED_BYTES_MIN: Final = 32 * _MIB
_DURABLE_MESSAGES_MAX: Final = 10_000_000
_DURABLE_BYTES_MAX: Final = 8 * 1024 * _MIB


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be held.

    Attributes:
        messages_max: open messages in the store.
        bytes_max: their bytes.
        loaded_max: messages in memory.
        loaded_bytes_max: their bytes.
    """

    messages_max: int
    bytes_max: int
    loaded_max: int
    loaded_bytes_max: int

    def is_full(self, counters: Counters, chunk: Chunk) -> bool:
        """Whether a store with these counters has no room for the chunk."""
        return (
            counters.open + len(chunk.messages) > self.messages_max
            or counters.open_bytes + chunk.size > self.bytes_max
        )


def limits(
    messages_max: int | None,
    bytes_max: int | None,
    *,
    window_max: int,
    window_bytes_max: int,
    is_durable: bool,
) -> Limits:
    """Limits with their defaults: a disk takes millions of messages, memory a few windows.

    Args:
        messages_max: as given by the user.
        bytes_max: as given by the user.
        window_max: messages in flight.
        window_bytes_max: bytes in flight.
        is_durable: whether the store is on disk.

    Raises:
        ConfigurationError: nothing would ever fit.
    """
    loaded_max = max(4 * window_max, _LOADED_MESSAGES_MIN)
    loaded_bytes_max = max(2 * window_bytes_max, _LOADED_BYTES_MIN)
    if messages_max is None:
        messages_max = _DURABLE_MESSAGES_MAX if is_durable else loaded_max
    if bytes_max is None:
        bytes_max = _DURABLE_BYTES_MAX if is_durable else loaded_bytes_max
    OpenLimits(messages_max, bytes_max)  # refuses what can only be a mistake
    return Limits(messages_max, bytes_max, loaded_max, loaded_bytes_max)


class Room:
    """Takes the measure of chunk after chunk: what fits is counted.

    Args:
        messages: how many there is room for.
        bytes_: likewise.
    """

    def __init__(self, messages: int, bytes_: int) -> None:
        self._messages = messages
        self._bytes = bytes_

    def __call__(self, chunk: Chunk) -> bool:
        """Whether the chunk fits beside those that did before."""
        if len(chunk.messages) > self._messages or chunk.size > self._bytes:
            return False
        self._messages -= len(chunk.messages)
        self._bytes -= chunk.size
        return True
