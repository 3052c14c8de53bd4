"""The path of messages from callers to the relay: chunks, handed over through an inbox.

Knows: messages, limits, and that callers are threads, which a signal handler may interrupt at any
instruction. Must never know: SQL, AMQP, what the relay does with a chunk.

`Limits` says how much the store and memory may hold; the defaults of the window are here too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from reliablepub.errors import PublisherClosed, ReliablePubError
from reliablepub.message import Message
from reliablepub.outbox.entry import Counters, Entry, OpenLimits, Waiter


class Latch:
    """A one-shot event for threads. Every `publish` waits for one.

    It replaces `threading.Event` for two reasons. Making, setting and waiting for an event takes
    about ten times as long as for a latch (CPython 3.11). And `Event.wait` holds, while it checks
    the flag, a lock that `Event.set` needs: a signal handler that interrupts it there, and itself
    waits for the thread that is to call `set`, would wait for ever. Setting a latch takes no lock.
    """

    __slots__ = ("_is_set", "_lock")

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()  # held until the latch is set

    def set(self) -> None:
        """Set the latch and wake the threads that wait for it. Called from one thread only."""
        if not self._is_set:
            self._is_set = True
            self._lock.release()

    def is_set(self) -> bool:
        """Whether the latch is set."""
        return self._is_set

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait until the latch is set or time is up (-1: no limit); return whether it is set."""
        if not self._is_set and self._lock.acquire(timeout=timeout_s):
            self._lock.release()  # for the next thread that waits
        return self._is_set


_MIB: Final = 1024 * 1024
WINDOW_MIN: Final = 32
"""Default of ``window_min``: most messages in flight on a new connection."""
WINDOW_MAX: Final = 4_096
"""Default of ``window_max``: most messages in flight, however far the broker is."""
WINDOW_BYTES_MAX: Final = 16 * _MIB
"""Default of ``window_bytes_max``: most bytes in flight."""
_LOADED_MESSAGES_MIN: Final = 2_000
_LOADED_BYTES_MIN: Final = 32 * _MIB
_DURABLE_MESSAGES_MAX: Final = 10_000_000
_DURABLE_BYTES_MAX: Final = 8 * 1024 * _MIB


@dataclass(slots=True)
class Limits:
    """Limits on open messages in the store, and on messages in memory."""

    messages_max: int  # open ones in the store
    bytes_max: int
    loaded_max: int  # in memory
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
    """Make limits, with defaults: millions of messages for a disk, a few windows for memory."""
    loaded_max = max(4 * window_max, _LOADED_MESSAGES_MIN)
    loaded_bytes_max = max(2 * window_bytes_max, _LOADED_BYTES_MIN)
    if messages_max is None:
        messages_max = _DURABLE_MESSAGES_MAX if is_durable else loaded_max
    if bytes_max is None:
        bytes_max = _DURABLE_BYTES_MAX if is_durable else loaded_bytes_max
    OpenLimits(messages_max, bytes_max)  # raises if a limit is below 1
    return Limits(messages_max, bytes_max, loaded_max, loaded_bytes_max)


class Room:
    """Room for so many messages and bytes. Each chunk that fits takes up its share."""

    def __init__(self, messages: int, bytes_: int) -> None:
        self._messages = messages
        self._bytes = bytes_

    def __call__(self, chunk: Chunk[Any]) -> bool:
        """Whether the chunk fits beside the chunks before it; if so, count it."""
        if len(chunk.messages) > self._messages or chunk.size > self._bytes:
            return False
        self._messages -= len(chunk.messages)
        self._bytes -= chunk.size
        return True


class Flag(Protocol):
    """A one-shot event that a caller waits for: a `Latch` for threads, a ``Signal`` for tasks."""

    def set(self) -> None:
        """Set the flag. Called on the relay's thread."""


FlagT = TypeVar("FlagT", bound=Flag)


@dataclass(slots=True, eq=False)
class Stream:
    """Chunks that are stored in order: once one has failed, no later one is stored.

    The position of a source is a count of stored messages. With a gap in the order, it would not
    tell where to resume.
    """

    error: BaseException | None = None  # why a chunk failed


class Chunk(Generic[FlagT]):
    """Messages handed over together, and stored together or not at all."""

    __slots__ = (
        "_claims",
        "_on_stored",
        "count",
        "done",
        "entries",
        "error",
        "is_loaded",
        "is_told",
        "loaded",
        "messages",
        "size",
        "source",
        "stream",
        "waiter",
    )

    def __init__(
        self,
        messages: Sequence[Message],  # each with a ``message_id``
        done: FlagT,  # set when the messages are stored, or could not be
        waiter: Waiter | None = None,
        *,
        source: str | None = None,  # the messages advance its position
        stream: Stream | None = None,
        on_stored: Callable[[int], None] | None = None,  # on the relay's thread, with their number
    ) -> None:
        self.messages: Sequence[Message] = messages  # empty once the chunk was withdrawn or refused
        self.done: Final = done
        self.waiter: Final = waiter
        self.source: Final = source
        self.stream: Final = stream
        self.count: Final = len(messages)  # also after they were dropped
        self.size: Final = sum([message.size for message in messages])
        self.error: BaseException | None = None
        self.entries: Sequence[Entry] = ()  # made when the relay takes the chunk in
        self.loaded: Sequence[Entry] = ()  # entries sent from memory, without being read back
        # If memory had room for the chunk (`is_loaded`), entries that are not in `loaded` wait for
        # a due time, an earlier message of their key, or a paused destination.
        self.is_loaded: bool = False
        self.is_told: bool = False
        self._on_stored = on_stored
        self._claims: list[None] = [None]

    def claim(self) -> bool:
        """Claim the right to decide on the chunk. True for exactly one claim, in one thread."""
        try:
            self._claims.pop()  # atomic: needs no lock
        except IndexError:
            return False
        return True

    @property
    def is_claimed(self) -> bool:
        """Whether a thread has claimed the chunk."""
        return not self._claims

    @property
    def is_withdrawn(self) -> bool:
        """Whether the messages were dropped; then `done` is never set."""
        return not self.messages

    @property
    def is_lost(self) -> bool:
        """Whether the messages were dropped, or could not be stored."""
        return self.is_withdrawn or self.error is not None

    @property
    def void_because(self) -> BaseException | None:
        """Why the chunk must not be stored: an earlier one of its stream failed; else None."""
        return self.stream.error if self.stream is not None else None

    def withdraw(self) -> bool:
        """Withdraw the chunk, unless the relay has taken it. If True, it will never be stored."""
        if not self.claim():
            return False
        self.refuse()
        return True

    def withdraw_because(self, error: ReliablePubError) -> None:
        """Withdraw the chunk and raise the error; do nothing if the relay has taken the chunk."""
        if self.is_claimed:
            return
        # Before the claim: once the chunk is claimed, the relay takes the next one of its stream.
        # If the relay claims this chunk now, later ones fail all the same, which leaves no gap.
        if self.stream is not None:
            self.stream.error = error
        if self.withdraw():
            raise error

    def refuse(self) -> None:
        """Drop the messages. The thread that calls this raises an error afterwards."""
        self.messages = ()

    def stored(self) -> None:
        """Tell the caller that every message is stored."""
        if self._on_stored is not None:
            self._on_stored(len(self.messages))  # before any message can be settled
        self.is_told = True
        self.done.set()

    def failed(self, error: BaseException) -> None:
        """Tell the caller that the messages are not stored, or may not be."""
        if self.stream is not None:
            self.stream.error = error  # later chunks of the stream fail too
        self.error = error
        self.is_told = True
        self.done.set()


WITHDRAWN_MAX: Final = 1_000
"""Withdrawn chunks that may stay in the inbox, besides as many as there are others."""


class Inbox:
    """A queue of chunks from callers to the relay. Callers put and withdraw from any thread.

    Each caller waits until its chunks are stored, so the number of callers bounds the queue. A
    caller that gives up leaves its chunk behind; `take` sweeps these out before they are many.

    It uses no lock. A signal handler or a ``__del__`` can interrupt a caller at any instruction and
    wait for the relay; a lock held by that caller and wanted by the relay would be a deadlock.
    Instead, each step is atomic in the interpreter, and the side that claims a chunk
    (`Chunk.claim`) decides on it: the relay takes it, or the caller withdraws it.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake  # thread-safe
        self.chunks: deque[Chunk[Any]] = deque()  # with withdrawn ones that are not dropped yet
        self._many = WITHDRAWN_MAX
        self._closed: BaseException | None = None

    def put(self, chunk: Chunk[Any]) -> None:
        """Add a chunk, and wake the relay if it may be waiting."""
        if self._closed is None:
            self.chunks.append(chunk)
            # If `close` has run since, one side claims the chunk: this one raises, or `close` has
            # told its caller.
            if self._closed is None or not chunk.claim():
                if self._is_first(chunk):
                    self._wake()
                return
        chunk.refuse()
        kind = type(self._closed) if isinstance(self._closed, PublisherClosed) else PublisherClosed
        raise kind(str(self._closed)) from self._closed

    def take(self, fits: Callable[[Chunk[Any]], bool]) -> list[Chunk[Any]]:
        """Take chunks, oldest first, until one does not fit. Chunks of a failed stream fail."""
        taken = []
        while (chunk := self.head) is not None:
            void_because = chunk.void_because
            if void_because is None and not fits(chunk):
                break
            self.chunks.popleft()
            if not chunk.claim():
                continue  # its caller has withdrawn it
            if void_because is not None:
                chunk.failed(void_because)
            else:
                taken.append(chunk)
        if len(self.chunks) > self._many:
            self._sweep()
        return taken

    def is_ready(self, fits: Callable[[Chunk[Any]], bool]) -> bool:
        """Whether `take` would take a chunk, or fail one."""
        head = self.head
        return head is not None and (head.void_because is not None or fits(head))

    def close(self, error: BaseException) -> None:
        """Close the inbox. Chunks in it fail with the error: they were never stored."""
        self._closed = self._closed or error
        self.reject(error)

    def reject(self, error: BaseException) -> None:
        """Fail the chunks that are in the inbox now."""
        for chunk in self.take(lambda _: True):
            chunk.failed(error)

    @property
    def head(self) -> Chunk[Any] | None:
        """The oldest chunk that was not withdrawn, or None. Read on the relay's thread."""
        while self.chunks:
            if not self.chunks[0].is_claimed:
                return self.chunks[0]
            self.chunks.popleft()
        return None

    def _sweep(self) -> None:
        """Drop withdrawn chunks, also those behind one that waits. On the relay's thread."""
        found = [self.chunks.popleft() for _ in range(len(self.chunks))]
        waiting = [chunk for chunk in found if not chunk.is_claimed]
        self.chunks.extendleft(reversed(waiting))  # before those that callers have put meanwhile
        self._many = 2 * len(waiting) + WITHDRAWN_MAX

    def _is_first(self, chunk: Chunk[Any]) -> bool:
        """Whether the chunk is the oldest. If not, the caller of an older one wakes the relay."""
        try:
            # The caller of a withdrawn chunk does not wake the relay.
            return self.chunks[0] is chunk or self.chunks[0].is_claimed
        except IndexError:  # the relay has taken all chunks
            return False


CHUNK_MESSAGES_MAX: Final = 500
CHUNK_BYTES_MAX: Final = 1024 * 1024
"""Of one chunk, unless a single message is larger."""
