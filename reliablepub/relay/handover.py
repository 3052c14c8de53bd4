"""How messages pass from the callers' side to the relay: in chunks, through a bounded inbox.

Knows: threads, and nothing of what the relay does with a chunk. Must never know: SQL, AMQP.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from reliablepub.errors import OutboxFull, PublisherClosed
from reliablepub.message import Message
from reliablepub.outbox.entry import Waiter


class Stored(Protocol):
    """Who waits for a chunk to be on disk."""

    def stored(self) -> None:
        """Every message of the chunk is stored."""

    def failed(self, error: BaseException) -> None:
        """No message of the chunk is stored."""


@dataclass(slots=True, eq=False)
class Stream:
    """Chunks that are stored in their order: once one has failed, none behind it is stored.

    The position of a source is a count; with a hole in it, what to go on with would be unknown.

    Attributes:
        error: why the first of them failed.
    """

    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class Chunk:
    """Messages handed over together, and stored together or not at all.

    Attributes:
        messages: each with a ``message_id``.
        on_stored: who waits for it, until they are told; then it is None.
        waiter: told of each message's final outcome.
        source: named source whose position they advance, or None.
        stream: what it is a part of, or None.
        size: bytes, summed.
    """

    messages: Sequence[Message]
    on_stored: Stored | None
    waiter: Waiter | None = None
    source: str | None = None
    stream: Stream | None = None
    size: int = field(init=False)

    def __post_init__(self) -> None:
        """Add up the sizes once."""
        self.size = sum(message.size for message in self.messages)

    @property
    def void_because(self) -> BaseException | None:
        """Why it must not be stored any more."""
        return self.stream.error if self.stream is not None else None

    def stored(self) -> None:
        """It is in the store: tell who waits for that."""
        self._told().stored()

    def failed(self, error: BaseException) -> None:
        """Nothing of it is: tell who waits for it why."""
        self._told().failed(error)

    def refused(self) -> None:
        """It is not taken; whoever handed it over learns that from an error."""
        self.on_stored = None

    def _told(self) -> Stored:
        """They know the chunk, and the chunk knows them: unless one lets go, both stay in memory.

        And all messages with them, until Python looks for cycles, which is seldom.
        """
        on_stored, self.on_stored = self.on_stored, None
        assert on_stored is not None, "a chunk is told of once"
        return on_stored


class Inbox:
    """Chunks on their way to the relay. `put` from any thread, `take` from the relay's.

    It holds at most what its callers wait for: each of them blocks until its chunk is stored.

    Args:
        wake: ends the relay's current wait; thread-safe.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._chunks: deque[Chunk] = deque()
        self._closed: BaseException | None = None

    def put(self, chunk: Chunk) -> None:
        """Hand a chunk over.

        Raises:
            PublisherClosed: the relay takes no more.
        """
        with self._lock:
            if self._closed is not None:
                chunk.refused()
                raise PublisherClosed(str(self._closed)) from self._closed
            was_empty = not self._chunks
            self._chunks.append(chunk)
        if was_empty:
            self._wake()

    def take(self, fits: Callable[[Chunk], bool]) -> list[Chunk]:
        """Take chunks, oldest first, until one does not fit."""
        taken = []
        with self._lock:
            while self._chunks:
                chunk = self._chunks[0]
                if chunk.void_because is not None:
                    chunk.failed(chunk.void_because)
                elif fits(chunk):
                    taken.append(chunk)
                else:
                    break
                self._chunks.popleft()
        return taken

    def is_ready(self, fits: Callable[[Chunk], bool]) -> bool:
        """Whether `take` would give something."""
        with self._lock:
            head = self._chunks[0] if self._chunks else None
            return head is not None and (head.void_because is not None or fits(head))

    def withdraw(self, chunk: Chunk) -> None:
        """Take a chunk back that its caller no longer wants to wait for, if it is still here.

        Raises:
            OutboxFull: it was; nothing of it is stored.
        """
        with self._lock:
            if chunk not in self._chunks:
                return
            self._chunks.remove(chunk)
            chunk.refused()
            msg = "the outbox is full and no room was made in time; the message was not accepted"
            error = OutboxFull(msg)
            if chunk.stream is not None:
                chunk.stream.error = error
        raise error

    def close(self, error: BaseException) -> None:
        """Take no more; what is still here was never stored, and its callers are told so."""
        with self._lock:
            self._closed = self._closed or error
            chunks, self._chunks = self._chunks, deque()
        for chunk in chunks:
            chunk.failed(error)

    def __bool__(self) -> bool:
        """Whether anything waits to be taken."""
        return bool(self._chunks)
