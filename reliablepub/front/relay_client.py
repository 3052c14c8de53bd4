"""The part that both publishers share: starts the relay, hands chunks over, checks, closes.

Knows: processes, chunks, the relay's thread. Must never know: how a caller waits, which store and
which transport the relay has.

`Publisher` and `AsyncPublisher` differ only in how a caller waits.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from typing import Any, Final

from reliablepub.errors import (
    ConfigurationError,
    InvalidMessage,
    OutboxFull,
    PublisherClosed,
    PublisherFailed,
    PublisherForked,
    RelayHeldUp,
    ReliablePubError,
)
from reliablepub.front.waits import seconds_of
from reliablepub.headers import utf8
from reliablepub.hooks import tell_rejected
from reliablepub.message import Message
from reliablepub.outbox.chunks import Cutter
from reliablepub.outbox.entry import Waiter, never_fits, stamped
from reliablepub.relay.handover import (
    CHUNK_BYTES_MAX,
    CHUNK_MESSAGES_MAX,
    Chunk,
    FlagT,
    Stream,
)
from reliablepub.relay.intake import TURN_MESSAGES_MAX
from reliablepub.relay.status import Status, described
from reliablepub.relay.thread import Observer, Parts, RelayThread

CHUNKS_UNDER_WAY: Final = 2 * TURN_MESSAGES_MAX // CHUNK_MESSAGES_MAX - 1
"""Chunks that ``publish_many`` hands over ahead of the one whose commit it awaits.

With that one, they are as many as two turns take in: while a turn's commit waits for the disk, the
caller makes the messages of the next turn.
"""
_BYTES_UNDER_WAY_MAX: Final = (CHUNKS_UNDER_WAY + 1) * CHUNK_BYTES_MAX
LOOK_S: Final = 0.05
"""Interval at which a caller that waits for a commit checks whether to give up."""
SOURCE_BYTES_MAX: Final = 2_600
"""Maximum size of the name of a source, which PostgreSQL must be able to index."""


class RelayClient:
    """A publisher's side of its relay: starts it, hands messages over to it, and closes it."""

    def __init__(
        self,
        parts: Parts,
        hooks: Sequence[Any],
        *,
        full_timeout_s: float | None,  # a caller waits so long for room; None for no limit
        close_timeout_s: float,  # the default of `begin_close`
    ) -> None:
        self.relay: Final = RelayThread(parts)
        self.limits: Final = parts.limits
        self._watchers = [hook.watch for hook in hooks if hasattr(hook, "watch")]
        self._stamps = [hook.stamp for hook in hooks if hasattr(hook, "stamp")]
        self._rejections = [hook.rejected for hook in hooks if hasattr(hook, "rejected")]
        self.full_timeout_s = full_timeout_s
        self.is_closed: bool = False
        self._close_timeout_s = close_timeout_s
        self._pid = os.getpid()

    @property
    def status(self) -> Status:
        """The status after the relay's last turn."""
        return self.relay.status

    def open(self, observer: Observer | None = None) -> None:
        """Start the relay's thread; `wait_started` reports whether the relay comes up."""
        for watch in self._watchers:
            watch(self.relay)
        for other in [one for one in list(_not_closed) if one.relay.is_gone]:
            _not_closed.pop(other, None)  # it failed, or the wait for its start was given up
        _not_closed[self] = None  # first: an interrupted start may leave a relay that runs
        try:
            self.relay.start(observer)
        except ConfigurationError:  # no thread can be started
            _not_closed.pop(self, None)
            raise

    def wait_started(self) -> None:
        """Wait until the relay has started; if this raises, all resources are released."""
        self.relay.wait_started()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """End the relay if the block, which calls `open` and `wait_started`, is interrupted."""
        try:
            yield
        except BaseException:  # the publisher's constructor raises, so nobody can close it
            self.begin_close(0)
            if self.relay.is_ended:
                _not_closed.pop(self, None)
            raise

    def cutter(self) -> Cutter:
        """A `Cutter` for one stream of messages, with the stamps of the hooks."""
        limits = self.limits
        return Cutter(
            min(CHUNK_MESSAGES_MAX, limits.messages_max),
            min(CHUNK_BYTES_MAX, limits.bytes_max),
            self._stamps,
        )

    def hand_over_one(self, message: Message, waiter: Waiter, done: FlagT) -> Chunk[FlagT]:
        """Apply the stamps of the hooks to one message, and `hand_over` it."""
        if self._stamps:
            message = stamped(message, self._stamps)
        return self.hand_over([message], waiter, done)

    def hand_over(
        self,
        messages: Sequence[Message],  # each with a message id
        waiter: Waiter,
        done: FlagT,  # set when they are stored, or could not be
        *,
        source: str | None = None,  # whose position they advance
        on_stored: Callable[[int], None] | None = None,
        stream: Stream | None = None,
    ) -> Chunk[FlagT]:
        """Put messages into the relay's inbox as one `Chunk`."""
        try:
            self.check_process()
            self.relay.check_thread()
            self.check_alive()
            # Checked here, because the store would fail the whole turn.
            if source is not None:
                _check_source(source)
            if (check := self.relay.check) is not None:
                for message in messages:
                    check(message)
            chunk = Chunk(messages, done, waiter, source=source, stream=stream, on_stored=on_stored)
            if chunk.size > self.limits.bytes_max:
                chunk.refuse()
                msg = f"{chunk.size} bytes never fit: open_bytes_max is {self.limits.bytes_max}"
                raise never_fits(OutboxFull(msg))
            self.relay.inbox.put(chunk)
        except ReliablePubError as error:
            self.rejected(len(messages), error)
            raise
        return chunk

    def not_stored(self, chunks: Iterable[Chunk[FlagT]], error: BaseException) -> None:
        """Tell the hooks how many messages are not stored, if it is for a reason of ours."""
        count = sum(chunk.count for chunk in chunks if chunk.is_lost)
        if count and isinstance(error, ReliablePubError):
            self.rejected(count, error)

    def rejected(self, count: int, error: ReliablePubError) -> None:
        """Tell the hooks that messages were not accepted, before the caller gets the error."""
        tell_rejected(self._rejections, count, error)

    def must_wait(self, under_way: Sequence[Chunk[FlagT]]) -> bool:
        """Whether the first of the chunks under way is to be waited for before the next one."""
        if not under_way:
            return False
        # One that is told may have an error, which the caller should hear soon.
        is_many = len(under_way) > CHUNKS_UNDER_WAY or under_way[0].is_told
        # The number does not bound the memory for chunks of a single large message.
        return is_many or (
            len(under_way) > 1 and sum(chunk.size for chunk in under_way) > _BYTES_UNDER_WAY_MAX
        )

    def withdraw_if_full(self, chunk: Chunk[FlagT]) -> None:
        """Withdraw a chunk if the outbox has no room for it; if this raises, nothing is stored."""
        if self.limits.is_full(self.relay.status.counters, chunk):
            msg = "the outbox is full, and no room became free in time; the message was not stored"
            chunk.withdraw_because(OutboxFull(msg))

    def withdraw_if_held_up(self, chunk: Chunk[FlagT]) -> None:
        """Withdraw a chunk if a callback holds the relay up; if this raises, nothing is stored."""
        try:
            self.relay.check_held_up()
        except RelayHeldUp as error:
            chunk.withdraw_because(error)

    def check_stored(self, chunk: Chunk[FlagT]) -> None:
        """Check how the wait for a commit ended: raise the error if the messages are not stored."""
        if chunk.error is not None:
            raise copy(chunk.error) from chunk.error  # a copy: other chunks share the error

    def check_process(self) -> None:
        """Refuse to work in a forked child."""
        if not self.is_ours:
            msg = (
                f"this publisher belongs to process {self._pid}; open one in this process "
                f"({os.getpid()}), after the fork"
            )
            raise PublisherForked(msg)

    @property
    def is_ours(self) -> bool:
        """Whether this process opened the publisher."""
        return os.getpid() == self._pid

    def check_alive(self) -> None:
        """Check that the publisher accepts messages."""
        self.check_failure()
        if self.is_closed:
            msg = "the publisher is closed, and accepts nothing more; open a new one"
            raise PublisherClosed(msg)

    def check_failure(self) -> None:
        """Check that the relay has not failed."""
        failure = self.relay.failure
        if failure is not None:
            raise PublisherFailed(
                f"nothing more is accepted or published: {described(failure)}; open messages stay "
                "in the outbox, if there is one, for the next publisher that opens it"
            ) from failure

    def begin_close(self, timeout_s: float | None) -> None:
        """Accept no more messages; have the relay end when none is open or the time is up."""
        self.check_process()
        self.relay.check_thread()
        wait_s = seconds_of(timeout_s)
        self.is_closed = True
        self.relay.begin_close(self._close_timeout_s if wait_s is None else wait_s)

    def end_close(self) -> None:
        """Wait until the relay's thread has ended; raise if the relay has failed."""
        self.relay.join()
        _not_closed.pop(self, None)
        self.check_failure()


def _check_source(source: str) -> None:
    """Check that every store can count messages under the name of a source."""
    name = utf8("source", source)
    if b"\0" in name:
        raise InvalidMessage("source", "has the character U+0000")
    if len(name) > SOURCE_BYTES_MAX:
        reason = f"has {len(name)} bytes, and a name may have {SOURCE_BYTES_MAX}"
        raise InvalidMessage("source", reason)


_not_closed: Final[dict[RelayClient, None]] = {}
"""Open clients, kept alive until closed, even if the application drops its publisher."""


@atexit.register
def _close_at_exit() -> None:
    """Close open publishers when the interpreter exits: open messages get a last chance."""
    ours = [client for client in list(_not_closed) if client.is_ours]
    for client in ours:
        client.begin_close(None)
    for client in ours:
        with suppress(PublisherFailed, RelayHeldUp):  # at exit there is no caller to raise to
            client.end_close()
