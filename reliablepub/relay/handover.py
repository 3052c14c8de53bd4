"""How messages pass from callers to the relay: cut into chunks, through a bounded inbox.

Knows: messages, limits, and that callers are threads, which a signal handler may interrupt
anywhere. Must never know: SQL, AMQP, what the relay does with a chunk.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from reliablepub.errors import InvalidMessage, OutboxFull, PublisherClosed, ReliablePubError
from reliablepub.message import Message
from reliablepub.outbox.entry import Counters, Entry, OpenLimits, Waiter, new_id


class Latch:
    """An event that happens once, for threads to wait for: every `publish` waits for one.

    `threading.Event` is written in Python and has a lock of its own for each wait: to make one,
    wait for it and set it takes 9 microseconds, and this takes 1. It also holds a lock while it
    looks, which the setting side needs: a signal handler that interrupts a wait there, and itself
    waits for the setting side, would wait for ever. Setting a latch needs no lock.
    """

    __slots__ = ("_is_set", "_lock")

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()  # until it is set

    def set(self) -> None:
        """Let whoever waits go on; from one thread only."""
        if not self._is_set:
            self._is_set = True
            self._lock.release()

    def is_set(self) -> bool:
        """Whether it is."""
        return self._is_set

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait, but not longer than so many seconds, if any are given; whether it is set."""
        if not self._is_set and self._lock.acquire(timeout=timeout_s):
            self._lock.release()  # for others who wait
        return self._is_set


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

    def is_full(self, counters: Counters, chunk: Chunk[Any]) -> bool:
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

    def __call__(self, chunk: Chunk[Any]) -> bool:
        """Whether the chunk fits beside those that did before."""
        if len(chunk.messages) > self._messages or chunk.size > self._bytes:
            return False
        self._messages -= len(chunk.messages)
        self._bytes -= chunk.size
        return True


class Flag(Protocol):
    """Something that is set once, and that somebody waits for, in a way of their own."""

    def set(self) -> None:
        """Set it, on the relay's thread."""


FlagT = TypeVar("FlagT", bound=Flag)


@dataclass(slots=True, eq=False)
class Stream:
    """Chunks that are stored in their order: once one has failed, none behind it is stored.

    The position of a source is a count; with a hole in it, what to go on with would be unknown.

    Attributes:
        error: why the first of them failed.
    """

    error: BaseException | None = None


class Chunk(Generic[FlagT]):
    """Messages handed over together, and stored together or not at all.

    Args:
        messages: each with a ``message_id``.
        done: set when they are stored, or have failed.
        waiter: told of each message's final outcome.
        source: named source whose position they advance, or None.
        stream: the stream that they are a part of, or None.
        on_stored: called with the number of messages once they are stored, on the relay's thread,
            before any of them can be settled.

    Attributes:
        messages: as given; empty once the relay cannot take them any more.
        done: as given.
        waiter: as given.
        source: as given.
        stream: as given.
        size: bytes, summed.
        error: why they failed, or None.
        entries: what the relay made of them when it took them in.
        loaded: those of the entries that may be sent at once, from memory.
        is_loaded: whether every other entry waits for something.
    """

    __slots__ = (
        "_claims",
        "_on_stored",
        "done",
        "entries",
        "error",
        "is_loaded",
        "loaded",
        "messages",
        "size",
        "source",
        "stream",
        "waiter",
    )

    def __init__(
        self,
        messages: Sequence[Message],
        done: FlagT,
        waiter: Waiter | None = None,
        *,
        source: str | None = None,
        stream: Stream | None = None,
        on_stored: Callable[[int], None] | None = None,
    ) -> None:
        self.messages = messages
        self.done = done
        self.waiter = waiter
        self.source = source
        self.stream = stream
        self.size = sum([message.size for message in messages])
        self.error: BaseException | None = None
        self.entries: Sequence[Entry] = ()
        self.loaded: Sequence[Entry] = ()
        self.is_loaded = False
        self._on_stored = on_stored
        self._claims: list[None] = [None]

    def claim(self) -> bool:
        """Whether to decide on it is up to the caller: True once, in one thread."""
        try:
            self._claims.pop()
        except IndexError:
            return False
        return True

    @property
    def is_claimed(self) -> bool:
        """Whether one thread has decided on it, or does so now."""
        return not self._claims

    @property
    def void_because(self) -> BaseException | None:
        """Why it must not be stored any more."""
        return self.stream.error if self.stream is not None else None

    def withdraw(self) -> bool:
        """Whether it is never stored, because the relay has not taken it yet."""
        if not self.claim():
            return False
        self.refuse()
        return True

    def refuse(self) -> None:
        """Drop the messages, which are not stored; an error tells the caller."""
        self.messages = ()

    def stored(self) -> None:
        """Tell the caller that every message is stored."""
        if self._on_stored is not None:
            self._on_stored(len(self.messages))
        self.done.set()

    def failed(self, error: BaseException) -> None:
        """Tell the caller that no message is stored; what follows in the stream fails too."""
        if self.stream is not None:
            self.stream.error = error
        self.error = error
        self.done.set()


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
        self._chunks: deque[Chunk[Any]] = deque()
        self._closed: BaseException | None = None

    def put(self, chunk: Chunk[Any]) -> None:
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
        chunk.refuse()
        kind = type(self._closed) if isinstance(self._closed, PublisherClosed) else PublisherClosed
        raise kind(str(self._closed)) from self._closed

    def take(self, fits: Callable[[Chunk[Any]], bool]) -> list[Chunk[Any]]:
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

    def is_ready(self, fits: Callable[[Chunk[Any]], bool]) -> bool:
        """Whether `take` would give something."""
        head = self._head()
        return head is not None and (head.void_because is not None or fits(head))

    def withdraw(self, chunk: Chunk[Any]) -> None:
        """Take a chunk back that its caller no longer wants to wait for, if it is still here.

        Raises:
            OutboxFull: it was; nothing of it is stored.
        """
        msg = "the outbox is full and no room was made in time; the message was not accepted"
        self.withdraw_because(chunk, OutboxFull(msg))

    def withdraw_because(self, chunk: Chunk[Any], error: ReliablePubError) -> None:
        """Take a chunk back, and raise the error; or leave it, if the relay has it already."""
        if not chunk.claim():
            return
        chunk.refuse()
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

    def _head(self) -> Chunk[Any] | None:
        """The oldest chunk that nobody has withdrawn."""
        while self._chunks:
            if not self._chunks[0].is_claimed:
                return self._chunks[0]
            self._chunks.popleft()
        return None

    def _is_first(self, chunk: Chunk[Any]) -> bool:
        """Whether the relay may not know of any: it knows of the others, or is about to."""
        try:
            return self._chunks[0] is chunk
        except IndexError:  # it has taken them all
            return False


CHUNK_MESSAGES_MAX: Final = 500
CHUNK_BYTES_MAX: Final = 1024 * 1024


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
