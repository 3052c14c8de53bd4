"""The part that both publishers share: checks arguments, assembles a relay, hands chunks over.

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
"""Chunks that ``publish_many`` hands over ahead of the one whose commit it awaits."""
HEARTBEAT_S_MAX: Final = 65_535
"""AMQP transmits the heartbeat as 16 bits."""
LOOK_S: Final = 0.05
"""Interval at which a caller that waits for a commit checks whether to give up."""


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
    """Check the arguments of a publisher, and make the parts of its relay from them.

    The arguments are those of `Publisher` and `AsyncPublisher`.

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
        if not 0 < value < inf:  # also false for nan
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
    """A publisher's side of its relay: starts it, hands messages over to it, and closes it.

    Args:
        parts: the parts of the relay.
        full_timeout_s: seconds that a caller waits for room in the outbox; None for no limit.
        close_timeout_s: seconds for which `begin_close` lets the relay go on by default.

    Attributes:
        relay: the relay's thread, which `open` starts.
        limits: most messages and bytes in the store and in memory.
        full_timeout_s: seconds that a caller waits for room in the outbox; None for no limit.
        is_closed: whether the publisher was closed, so that it accepts no messages.
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
        """The status after the relay's last turn."""
        return self.relay.status

    def open(self, observer: Observer | None = None) -> None:
        """Start the relay's thread. `wait_started` reports whether the relay comes up.

        Args:
            observer: gets the lifecycle callbacks of the relay; None for the default ones.
        """
        for watch in self._watchers:
            watch(self.relay)
        self.relay.start(observer)
        _not_closed[self] = None

    def wait_started(self) -> None:
        """Wait until the relay has started.

        Raises:
            ReliablePubError: the outbox cannot be opened. All resources are released.
        """
        try:
            self.relay.wait_started()
        except BaseException:
            self.begin_close(0)  # an interrupted wait must not leave a running relay behind
            if self.relay.is_ended:
                _not_closed.pop(self, None)
            raise

    def cutter(self) -> Cutter:
        """A `Cutter` for one stream of messages, with the stamps of the hooks."""
        return Cutter(self.limits, self._stamps)

    def hand_over_one(self, message: Message, waiter: Waiter, done: FlagT) -> Chunk[FlagT]:
        """Apply the stamps of the hooks to one message, and `hand_over` it.

        Args:
            message: with a ``message_id``.
            waiter: told of the message's final outcome.
            done: set when the message is stored, or could not be.

        Raises:
            OutboxFull: the message is larger than the outbox may ever be.
            PublisherClosed: the publisher is closed or has failed.
            PublisherForked: this process is not the one that opened the publisher.
            WrongThread: this is the relay's own thread.
        """
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
        """Put messages into the relay's inbox as a `Chunk`, whose arguments this takes.

        Raises:
            InvalidMessage: the source name cannot be encoded as UTF-8.
            OutboxFull: the messages are larger than the outbox may ever be.
            PublisherClosed: the publisher is closed or has failed.
            PublisherForked: this process is not the one that opened the publisher.
            WrongThread: this is the relay's own thread.
        """
        self.check_process()
        self.relay.check_thread()
        self.check_alive()
        if source is not None:
            utf8("source", source)  # checked here, because the store would fail the whole turn
        chunk = Chunk(messages, done, waiter, source=source, stream=stream, on_stored=on_stored)
        if chunk.size > self.limits.bytes_max:
            chunk.refuse()
            msg = f"{chunk.size} bytes never fit: open_bytes_max is {self.limits.bytes_max}"
            raise OutboxFull(msg)
        self.relay.inbox.put(chunk)
        return chunk

    def withdraw_if_full(self, chunk: Chunk[FlagT]) -> None:
        """Withdraw a chunk whose caller has waited long enough, if the outbox has no room for it.

        Raises:
            OutboxFull: the chunk was withdrawn; none of its messages is stored.
        """
        if self.limits.is_full(self.relay.status.counters, chunk):
            self.relay.inbox.withdraw(chunk)

    def withdraw_if_held_up(self, chunk: Chunk[FlagT]) -> None:
        """Withdraw a chunk if the relay waits for a callback that does not return.

        Raises:
            RelayHeldUp: the chunk was withdrawn; none of its messages is stored.
        """
        try:
            self.relay.check_held_up()
        except RelayHeldUp as error:
            self.relay.inbox.withdraw_because(chunk, error)

    def check_stored(self, chunk: Chunk[FlagT]) -> None:
        """Check how the wait for a commit ended.

        Raises:
            OutboxError: the messages could not be stored.
            PublisherClosed: the publisher ended before the messages were stored.
        """
        if chunk.error is not None:
            raise copy(chunk.error) from chunk.error  # a copy: other chunks share the error

    def check_process(self) -> None:
        """Refuse to work in a forked child.

        Raises:
            PublisherForked: this process is not the one that opened the publisher.
        """
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
        """Check that the publisher accepts messages.

        Raises:
            PublisherFailed: the relay has failed.
            PublisherClosed: the publisher is closed.
        """
        self.check_failure()
        if self.is_closed:
            msg = "the publisher is closed"
            raise PublisherClosed(msg)

    def check_failure(self) -> None:
        """Check that the relay has not failed.

        Raises:
            PublisherFailed: the relay has failed.
        """
        failure = self.relay.failure
        if failure is not None:
            raise PublisherFailed(
                f"nothing more is accepted or published: {described(failure)}; open messages stay "
                "in the outbox, if there is one, for the next publisher that opens it"
            ) from failure

    def begin_close(self, timeout_s: float | None) -> None:
        """Accept no more messages; have the relay end when none is open or the time is up.

        Args:
            timeout_s: seconds; None for the default.

        Raises:
            PublisherForked: this process is not the one that opened the publisher.
            WrongThread: this is the relay's own thread.
        """
        self.check_process()
        self.relay.check_thread()
        self.is_closed = True
        self.relay.begin_close(self._close_timeout_s if timeout_s is None else timeout_s)

    def end_close(self) -> None:
        """Wait until the relay's thread has ended.

        Raises:
            PublisherFailed: the relay has failed.
            RelayHeldUp: a callback of the application does not return.
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
    """A function that opens the transport, given the number of the store's run."""
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
