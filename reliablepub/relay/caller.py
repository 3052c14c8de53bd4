"""The caller's side of a handover: cutting a stream into chunks, and waiting for one to be stored.

Knows: messages, limits, threads that wait. Must never know: what the relay does with a chunk.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from reliablepub.errors import InvalidMessage
from reliablepub.message import Message
from reliablepub.outbox.entry import Waiter
from reliablepub.relay.handover import Chunk, Stream
from reliablepub.relay.limits import Limits

CHUNK_MESSAGES_MAX: Final = 500
CHUNK_BYTES_MAX: Final = 1024 * 1024


class Handover:
    """A chunk on its way into the store, and whoever waits for it.

    Args:
        messages: each with a ``message_id``.
        waiter: told of each message's outcome.
        source: as in `Chunk`.
        stream: likewise.
        on_stored: called with the number of messages once they are stored, on the relay's thread,
            before any of them can be settled.

    Attributes:
        chunk: what is handed over.
        done: set when it is stored, or has failed.
        error: why it failed.
    """

    __slots__ = ("_on_stored", "chunk", "done", "error")

    def __init__(
        self,
        messages: Sequence[Message],
        waiter: Waiter,
        source: str | None = None,
        on_stored: Callable[[int], None] | None = None,
        stream: Stream | None = None,
    ) -> None:
        self.chunk = Chunk(messages, self, waiter, source, stream)
        self.done = threading.Event()
        self.error: BaseException | None = None
        self._on_stored = on_stored

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


def minted(message: Message) -> Message:
    """The message, with an id of its own if it had none."""
    return message if message.message_id is not None else message.with_message_id(new_id())


def new_id() -> str:
    """A ``message_id`` that nobody else has."""
    return str(uuid.uuid4())


def cut(messages: Iterable[Message], limits: Limits) -> Iterator[list[Message]]:
    """Cut a stream into pieces that are handed over and stored together, and that the limits allow.

    Raises:
        InvalidMessage: the stream holds something else.
    """
    messages_max = min(CHUNK_MESSAGES_MAX, limits.messages_max)
    bytes_max = min(CHUNK_BYTES_MAX, limits.bytes_max)
    chunk: list[Message] = []
    size = 0
    for message in messages:
        if not isinstance(message, Message):
            raise InvalidMessage("messages", f"hold a {type(message).__name__}, not a Message")
        ready = minted(message)  # first: its id counts, too
        if chunk and (len(chunk) >= messages_max or size + ready.size > bytes_max):
            yield chunk
            chunk, size = [], 0
        chunk.append(ready)
        size += ready.size
    if chunk:
        yield chunk
