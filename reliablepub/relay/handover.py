"""How messages pass from the callers' side to the relay: in chunks, through a bounded inbox.

Knows: that callers are threads, which may be interrupted anywhere; nothing of what the relay does
with a chunk. Must never know: SQL, AMQP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from reliablepub.errors import OutboxFull, PublisherClosed, ReliablePubError
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
    _claims: list[None] = field(init=False)

    def __post_init__(self) -> None:
        """Add up the sizes once."""
        self.size = sum(message.size for message in self.messages)
        self._claims = [None]

    def claim(self) -> bool:
        """Whether to decide on it is up to whoever asks: True once, in one thread."""
        try:
            self._claims.pop()
        except IndexError:
            return False
        return True

    @property
    def is_claimed(self) -> bool:
        """Whether somebody has decided on it, or does so now."""
        return not self._claims

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
        self.on_stored, self.messages = None, ()

    def _told(self) -> Stored:
        """They know the chunk, and the chunk knows them: unless one lets go, both stay in memory.

        And all messages with them, until Python looks for cycles, which is seldom.
        """
        on_stored, self.on_stored = self.on_stored, None
        assert on_stored is not None, "a chunk is told of once"
        return on_stored


class Inbox:
    """Chunks on their way to the relay. Callers put and withdraw, from any thread.

    It holds at most what its callers wait for: each of them blocks until its chunk is stored.

    A caller holds no lock in here, ever. A signal handler, or a ``__del__``, may interrupt it
    anywhere and wait for the relay, and a lock of the caller's that the relay wants would be a
    deadlock. So each step is one that the interpreter does not divide, and a chunk is decided on by
    whoever `claims <Chunk.claim>` it: the relay that takes it, or the caller that withdraws it.

    Args:
        wake: ends the relay's current wait; thread-safe.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._chunks: deque[Chunk] = deque()
        self._closed: BaseException | None = None

    def put(self, chunk: Chunk) -> None:
        """Hand a chunk over.

        Raises:
            PublisherClosed: the relay takes no more.
        """
        if self._closed is None:
            self._chunks.append(chunk)
            if self._closed is None or not chunk.claim():  # not ours: it has been told by `close`
                if self._is_first(chunk):
                    self._wake()
                return
        chunk.refused()
        kind = type(self._closed) if isinstance(self._closed, PublisherClosed) else PublisherClosed
        raise kind(str(self._closed)) from self._closed

    def take(self, fits: Callable[[Chunk], bool]) -> list[Chunk]:
        """Take chunks, oldest first, until one does not fit."""
        taken = []
        while (chunk := self._head()) is not None:
            void_because = chunk.void_because
            if void_because is None and not fits(chunk):
                break
            self._chunks.popleft()
            if not chunk.claim():
                continue  # withdrawn in between
            if void_because is not None:
                chunk.failed(void_because)
            else:
                taken.append(chunk)
        return taken

    def is_ready(self, fits: Callable[[Chunk], bool]) -> bool:
        """Whether `take` would give something."""
        head = self._head()
        return head is not None and (head.void_because is not None or fits(head))

    def withdraw(self, chunk: Chunk) -> None:
        """Take a chunk back that its caller no longer wants to wait for, if it is still here.

        Raises:
            OutboxFull: it was; nothing of it is stored.
        """
        msg = "the outbox is full and no room was made in time; the message was not accepted"
        self.withdraw_because(chunk, OutboxFull(msg))

    def withdraw_because(self, chunk: Chunk, error: ReliablePubError) -> None:
        """Take a chunk back, and raise the error; or leave it, if the relay has it already."""
        if not chunk.claim():
            return
        chunk.refused()
        if chunk.stream is not None:
            chunk.stream.error = error
        raise error

    def close(self, error: BaseException) -> None:
        """Take no more; what is still here was never stored, and its callers are told so."""
        self._closed = self._closed or error
        while self._chunks:
            chunk = self._chunks.popleft()
            if chunk.claim():
                chunk.failed(error)

    def __bool__(self) -> bool:
        """Whether anything waits to be taken. On the relay's thread."""
        return self._head() is not None

    def _head(self) -> Chunk | None:
        """The oldest chunk that nobody has withdrawn."""
        while self._chunks:
            if not self._chunks[0].is_claimed:
                return self._chunks[0]
            self._chunks.popleft()
        return None

    def _is_first(self, chunk: Chunk) -> bool:
        """Whether the relay may not know of any: it knows of the others, or is about to."""
        try:
            return self._chunks[0] is chunk
        except IndexError:  # it has taken them all
            return False
