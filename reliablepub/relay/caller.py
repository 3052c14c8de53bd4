"""The caller's side of a handover: cutting a stream into chunks, and learning that one is stored.

Knows: messages, limits. Must never know: how a caller waits, what the relay does with a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Generic, Protocol, TypeVar

from reliablepub.errors import InvalidMessage
from reliablepub.message import Message
from reliablepub.outbox.entry import Waiter
from reliablepub.outbox.ids import new_id
from reliablepub.relay.handover import Chunk, Stream
from reliablepub.relay.limits import Limits

CHUNK_MESSAGES_MAX: Final = 500
CHUNK_BYTES_MAX: Final = 1024 * 1024


class Flag(Protocol):
    """Something that is set once, and that somebody waits for, in a way of their own."""

    def set(self) -> None:
        """Set it, on the relay's thread."""


FlagT = TypeVar("FlagT", bound=Flag)


class Handover(Generic[FlagT]):
    """A chunk on its way into the store, and whoever waits for it.

    Args:
        messages: each with a ``message_id``.
        done: set when they are stored, or have failed.
        waiter: told of each message's outcome.
        source: as in `Chunk`.
        stream: likewise.
        on_stored: called with the number of messages once they are stored, on the relay's thread,
            before any of them can be settled.

    Attributes:
        chunk: what is handed over.
        done: as given.
        error: why it failed.
    """

    __slots__ = ("_on_stored", "chunk", "done", "error")

    def __init__(
        self,
        messages: Sequence[Message],
        done: FlagT,
        waiter: Waiter,
        *,
        source: str | None = None,
        on_stored: Callable[[int], None] | None = None,
        stream: Stream | None = None,
    ) -> None:
        self.chunk = Chunk(messages, self, waiter, source, stream)
        self.done = done
        self.error: BaseException | None = None
        self._on_stored = on_stored

    def withdrawn(self) -> bool:
        """Whether it is never stored, because the relay has not taken it yet."""
        if not self.chunk.claim():
            return False
        self.chunk.refused()
        return True

    def stored(self) -> None:
        """Every message of the chunk is stored."""
        if self._on_stored is not None:
            self._on_stored(len(self.chunk.messages))
        self.done.set()

    def failed(self, error: BaseException) -> None:
        """No message of the chunk is stored, nor of what follows it in its stream."""
        if self.chunk.stream is not None:
            self.chunk.stream.error = error
        self.error = error
        self.done.set()


class Cutter:
    """Cuts a stream into pieces that are handed over and stored together, and that limits allow.

    Args:
        limits: of a piece.
        stamps: what is added to each message, before it is measured.
    """

    def __init__(self, limits: Limits, stamps: Sequence[Callable[[Message], Message]] = ()) -> None:
        self._stamps = stamps
        self._messages_max = min(CHUNK_MESSAGES_MAX, limits.messages_max)
        self._bytes_max = min(CHUNK_BYTES_MAX, limits.bytes_max)
        self._chunk: list[Message] = []
        self._size = 0

    def add(self, message: Message) -> list[Message] | None:
        """Add the next message of the stream.

        Returns:
            the piece before it, where it is the first of another one.

        Raises:
            InvalidMessage: it is something else.
        """
        if not isinstance(message, Message):
            raise InvalidMessage("messages", f"hold a {type(message).__name__}, not a Message")
        for stamp in self._stamps:
            message = stamp(message)
        if message.message_id is None:
            message = message.with_message_id(new_id())  # before it is measured: the id counts too
        size = self._size + message.size
        if self._chunk and (len(self._chunk) >= self._messages_max or size > self._bytes_max):
            chunk, self._chunk, self._size = self._chunk, [message], message.size
            return chunk
        self._chunk.append(message)
        self._size = size
        return None

    def rest(self) -> list[Message]:
        """The last piece, which may be empty."""
        return self._chunk


def cut(messages: Iterable[Message], cutter: Cutter) -> Iterator[list[Message]]:
    """Cut a whole stream.

    Raises:
        InvalidMessage: the stream holds something else.
    """
    for message in messages:
        chunk = cutter.add(message)
        if chunk is not None:
            yield chunk
    if cutter.rest():
        yield cutter.rest()
