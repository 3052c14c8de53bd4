"""The part that both publishers share: arguments checked, a relay put together, chunks handed in.

Knows: arguments, processes, the relay's thread. Must never know: how a caller waits, pika, SQL.

`Publisher` and `AsyncPublisher` differ only in how a caller waits.
"""

from __future__ import annotations

import atexit
import os
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from math import inf
from pathlib import Path
from typing import Final

from reliablepub._core.session import Session
from reliablepub.errors import (
    ConfigurationError,
    OutboxFull,
    PublisherClosed,
    PublisherFailed,
    PublisherForked,
    RelayHeldUp,
)
from reliablepub.headers import utf8
from reliablepub.message import Message
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import Entry, Store, Waiter
from reliablepub.outbox.memory import MemoryStore
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.policy import RetryPolicy
from reliablepub.relay.callbacks import calls_of
from reliablepub.relay.handover import Chunk, Cutter, FlagT, Stream, limits
from reliablepub.relay.status import Status, described
from reliablepub.relay.thread import Observer, Parts, RelayThread
from reliablepub.relay.wire import names
from reliablepub.topology import Topology
from reliablepub.transport.address import parse_addresses, warn_of_exposed
from reliablepub.transport.base import Transport
from reliablepub.transport.pika import PikaTransport

CHUNKS_UNDER_WAY: Final = 3
"""Chunks of ``publish_many`` handed over ahead of the one it waits for."""
HEARTBEAT_S_MAX: Final = 65_535
"""AMQP has 16 bits for it."""
LOOK_S: Final = 0.05
"""How often a caller who waits for its commit looks whether it should rather not."""


def put_together(
    url: str | Sequence[str] | None,
    *,
    connection: object = None,
    outbox: str | os.PathLike[str] | None,
    outbox_keys: OutboxKeys | None,
    keep_confirmed_s: float,
    window_min: int,
    window_max: int,
    window_bytes_max: int,
    confirm_timeout_s: float,
    heartbeat_s: int,
    retry: RetryPolicy | None,
    hooks: Sequence[object],
    topology: Topology | None,
    open_messages_max: int | None,
    open_bytes_max: int | None,
    ssl_context: ssl.SSLContext | None,
) -> Parts:
    """The parts of a relay. The arguments are `Publisher`'s and `AsyncPublisher`'s.

    Raises:
        ConfigurationError: an argument cannot be used.
    """
    open_transport = _transport(
        url,
        connection=connection,
        heartbeat_s=heartbeat_s,
        ssl_context=ssl_context,
        topology=topology,
    )
    for name, value in (
        ("window_min", window_min),
        ("window_max", window_max),
        ("window_bytes_max", window_bytes_max),
        ("confirm_timeout_s", confirm_timeout_s),
        ("heartbeat_s", heartbeat_s),
    ):
        if not 0 < value < inf:  # nan compares false, and is refused as well
            msg = f"{name} is {value}; it must be more than 0, and finite"
            raise ConfigurationError(msg)
    if type(heartbeat_s) is not int or heartbeat_s > HEARTBEAT_S_MAX:
        msg = f"heartbeat_s is {heartbeat_s!r}; it must be a whole number up to {HEARTBEAT_S_MAX}"
        raise ConfigurationError(msg)
    return Parts(
        open_store=lambda: _open_store(outbox, keep_confirmed_s, outbox_keys),
        open_transport=open_transport,
        open_session=lambda: Session[Entry](
            window_min=window_min,
            window_max=window_max,
            window_bytes_max=window_bytes_max,
            confirm_timeout_s=confirm_timeout_s,
            is_named=names,
        ),
        policy=retry or RetryPolicy(),
        hooks=calls_of(hooks),
        watchers=[hook.watch for hook in hooks if hasattr(hook, "watch")],
        stamps=[hook.stamp for hook in hooks if hasattr(hook, "stamp")],
        limits=limits(
            open_messages_max,
            open_bytes_max,
            window_max=window_max,
            window_bytes_max=window_bytes_max,
            is_durable=outbox is not None,
        ),
    )


class RelayClient:
    """Lets messages in to a relay on a thread of its own.

    Args:
        parts: what the relay is made of.
        full_timeout_s: how long a caller waits for room; None as long as it takes.
        close_timeout_s: how long `close` lets the relay go on, unless told otherwise.

    Attributes:
        relay: runs from `open` on.
        limits: what it may hold.
        full_timeout_s: as given.
        is_closed: whether it lets nothing in any more.
    """

    def __init__(
        self, parts: Parts, *, full_timeout_s: float | None, close_timeout_s: float
    ) -> None:
        self.relay = RelayThread(parts)
        self.limits = parts.limits
        self._watchers = parts.watchers
        self._stamps = parts.stamps
        self.full_timeout_s = full_timeout_s
        self.is_closed = False
        self._close_timeout_s = close_timeout_s
        self._pid = os.getpid()

    @property
    def status(self) -> Status:
        """The picture the relay made in its last turn."""
        return self.relay.status

    def open(self, observer: Observer | None = None) -> None:
        """Start the relay; whether it comes up, `RelayThread.wait_started` tells."""
        for watch in self._watchers:
            watch(self.relay)
        self.relay.start(observer)
        _not_closed[self] = None

    def wait_started(self) -> None:
        """Wait until the relay takes turns.

        Raises:
            ReliablePubError: the outbox cannot be opened; nothing is left behind.
        """
        try:
            self.relay.wait_started()
        except BaseException:
            self.begin_close(0)  # or, of an interrupted wait, nobody ever would
            if self.relay.is_ended:
                _not_closed.pop(self, None)
            raise

    def cutter(self) -> Cutter:
        """Cuts a stream of messages into what is handed over together."""
        return Cutter(self.limits, self._stamps)

    def hand_over_one(self, message: Message, waiter: Waiter, done: FlagT) -> Chunk[FlagT]:
        """As `hand_over`, a message that is not cut from a stream."""
        for stamp in self._stamps:
            message = stamp(message)
        return self.hand_over([message], waiter, done)

    def hand_over(
        self,
        messages: Sequence[Message],
        waiter: Waiter,
        done: FlagT,
        *,
        source: str | None = None,
        on_stored: Callable[[int], None] | None = None,
        stream: Stream | None = None,
    ) -> Chunk[FlagT]:
        """Put messages into the relay's inbox; the arguments are `Chunk`'s.

        Raises:
            InvalidMessage: the source is no text that can be stored.
            OutboxFull: they never fit.
            PublisherClosed: nothing is let in any more.
            PublisherForked: this process did not open the publisher.
            WrongThread: this is the relay's own thread.
        """
        self.check_process()
        self.relay.check_thread()
        self.check_alive()
        if source is not None:
            utf8("source", source)  # or the store would fail, and everybody's messages with it
        chunk = Chunk(messages, done, waiter, source=source, stream=stream, on_stored=on_stored)
        if chunk.size > self.limits.bytes_max:
            chunk.refuse()
            msg = f"{chunk.size} bytes never fit into {self.limits.bytes_max}"
            raise OutboxFull(msg)
        self.relay.inbox.put(chunk)
        return chunk

    def withdraw_if_full(self, chunk: Chunk[FlagT]) -> None:
        """The caller has waited long enough for room.

        Raises:
            OutboxFull: the outbox is full, and the relay has not taken the messages: it never will.
        """
        if self.limits.is_full(self.relay.status.counters, chunk):
            self.relay.inbox.withdraw(chunk)

    def withdraw_if_held_up(self, chunk: Chunk[FlagT]) -> None:
        """The caller goes on waiting, unless the relay waits for a callback that does not return.

        Raises:
            RelayHeldUp: it does, and has not taken the messages: it never will.
        """
        try:
            self.relay.check_held_up()
        except RelayHeldUp as error:
            self.relay.inbox.withdraw_because(chunk, error)

    def check_stored(self, chunk: Chunk[FlagT]) -> None:
        """The wait for a commit is over.

        Raises:
            OutboxError: why the messages were not stored.
            PublisherClosed: likewise.
        """
        if chunk.error is not None:
            raise copy(chunk.error) from chunk.error  # others of its turn raise it too

    def check_process(self) -> None:
        """A forked child touches nothing of its parent's.

        Raises:
            PublisherForked: this process did not open the publisher.
        """
        if not self.is_ours:
            msg = (
                f"this publisher belongs to process {self._pid}; open one in this process "
                f"({os.getpid()}), after the fork"
            )
            raise PublisherForked(msg)

    @property
    def is_ours(self) -> bool:
        """Whether this process opened it."""
        return os.getpid() == self._pid

    def check_alive(self) -> None:
        """Messages are let in as long as somebody takes them.

        Raises:
            PublisherFailed: the relay has failed.
            PublisherClosed: nobody does, or will.
        """
        self.check_failure()
        if self.is_closed:
            msg = "the publisher is closed"
            raise PublisherClosed(msg)

    def check_failure(self) -> None:
        """No call returns as if all were well, once the relay has failed.

        Raises:
            PublisherFailed: it has.
        """
        failure = self.relay.failure
        if failure is not None:
            raise PublisherFailed(
                f"nothing more is taken or published: {described(failure)}; what is open stays in "
                "the outbox, if there is one, for the next publisher that opens it"
            ) from failure

    def begin_close(self, timeout_s: float | None) -> None:
        """Let nothing in, and have the relay end when nothing is open or the time is up.

        Raises:
            PublisherForked: this process did not open the publisher.
            WrongThread: this is the relay's own thread.
        """
        self.check_process()
        self.relay.check_thread()
        self.is_closed = True
        self.relay.begin_close(self._close_timeout_s if timeout_s is None else timeout_s)

    def end_close(self) -> None:
        """Wait until the relay's thread is gone.

        Raises:
            PublisherFailed: it has not ended well.
            RelayHeldUp: it waits for a callback that does not return.
        """
        self.relay.join()
        _not_closed.pop(self, None)
        self.check_failure()


def _transport(
    url: str | Sequence[str] | None,
    *,
    connection: object,
    heartbeat_s: int,
    ssl_context: ssl.SSLContext | None,
    topology: Topology | None,
) -> Callable[[int], Transport]:
    """What opens the transport, given the number of the run."""
    if connection is None and url is not None:
        addresses = parse_addresses(url, ssl_context=ssl_context)
        warn_of_exposed(addresses)
        return lambda run: PikaTransport(
            addresses,
            run=run,
            heartbeat_s=heartbeat_s,
            ssl_context=ssl_context,
            topology=topology,
        )
    if connection is None or url is not None or ssl_context is not None:
        raise ConfigurationError("give either a URL or a connection, which has its own TLS")
    if topology is not None:
        raise ConfigurationError("declare the topology on the connection, which is yours")
    from reliablepub.transport.aio_pika import AioPikaTransport, lent  # noqa: PLC0415 - optional

    host = lent(connection)
    return lambda run: AioPikaTransport(host, run=run)


def _open_store(
    outbox: str | os.PathLike[str] | None, keep_confirmed_s: float, keys: OutboxKeys | None
) -> Store:
    if outbox is None:
        return MemoryStore()
    return SqliteStore(Path(outbox), keep_confirmed_s=keep_confirmed_s, keys=keys)


_not_closed: Final[dict[RelayClient, None]] = {}
"""Each lives until it is closed, also one whose publisher nobody has kept."""


@atexit.register
def _close_at_exit() -> None:
    """The interpreter ends: give open messages their last chance; the outbox keeps the rest."""
    ours = [client for client in list(_not_closed) if client.is_ours]
    for client in ours:
        client.begin_close(None)
    for client in ours:
        with suppress(PublisherFailed, RelayHeldUp):  # which has been logged; there is no caller
            client.end_close()
