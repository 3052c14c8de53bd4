"""The front door for threads: `Publisher`.

Knows: arguments, receipts and how to wait. Must never know: pika, SQL, what a turn of the relay
does.
"""

from __future__ import annotations

import atexit
import os
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from reliablepub._core.session import Session
from reliablepub.errors import (
    ConfigurationError,
    OutboxFull,
    PublisherClosed,
    PublisherForked,
)
from reliablepub.message import FieldValue, Message
from reliablepub.outbox.entry import Entry, Store, Waiter
from reliablepub.outbox.memory import MemoryStore
from reliablepub.outbox.store import SqliteStore
from reliablepub.policy import RetryPolicy
from reliablepub.receipt import BatchReceipt, Receipt
from reliablepub.relay.caller import Handover, cut, new_id
from reliablepub.relay.handover import Stream
from reliablepub.relay.limits import limits
from reliablepub.relay.status import Status
from reliablepub.relay.thread import Parts, RelayThread
from reliablepub.transport.address import parse_addresses
from reliablepub.transport.pika import PikaTransport

CHUNKS_UNDER_WAY: Final = 3
"""Chunks of `Publisher.publish_many` handed over ahead of the one it waits for."""
MIB: Final = 1024 * 1024
_LOOK_S: Final = 0.05
"""How often a caller who waits for its commit looks whether the outbox is full."""


class Publisher:
    """Publishes to RabbitMQ, and keeps its word.

    When `publish` returns, the message is on disk. From then on it is published until the broker
    has confirmed it without returning it, or it is parked in the outbox with a reason. It may
    arrive more than once, always under the same ``message_id``.

    Publisher confirms and ``mandatory`` are always on. Thread-safe; not for use after a fork.

    Args:
        url: ``amqp://user:password@host:port/vhost`` or ``amqps://...``, or several for failover.
        outbox: path of the outbox, made where there is none; None keeps messages in memory only,
            so that what is not confirmed when the process ends is lost.
        window_max: most messages in flight.
        window_bytes_max: most bytes in flight; a larger message goes alone.
        confirm_timeout_s: how long a confirm may take before the channel is given up and the
            messages on it are sent again.
        heartbeat_s: AMQP heartbeat; a dead broker is noticed within twice that.
        retry: what to do with messages the broker refuses.
        open_messages_max: most open messages in the outbox.
        open_bytes_max: most bytes of open messages in the outbox.
        full_timeout_s: how long `publish` waits for room before it raises `OutboxFull`; None waits
            as long as it takes, 0 raises at once.
        close_timeout_s: how long leaving a ``with`` block waits for open messages.
        ssl_context: for ``amqps``; without it certificates and host names are verified against the
            system's authorities.

    Raises:
        ConfigurationError: an argument cannot be used.
        NotAnOutbox: the file is something else.
        OutboxInUse: another process relays this outbox; use `Outbox.enqueue` beside it.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        outbox: str | os.PathLike[str] | None,
        window_max: int = 1_000,
        window_bytes_max: int = 16 * MIB,
        confirm_timeout_s: float = 30.0,
        heartbeat_s: int = 10,
        retry: RetryPolicy | None = None,
        open_messages_max: int | None = None,
        open_bytes_max: int | None = None,
        full_timeout_s: float | None = None,
        close_timeout_s: float = 10.0,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        addresses = parse_addresses(url)
        for name, value in (
            ("window_max", window_max),
            ("window_bytes_max", window_bytes_max),
            ("confirm_timeout_s", confirm_timeout_s),
            ("heartbeat_s", heartbeat_s),
        ):
            if value <= 0:
                msg = f"{name} is {value}; it must be more than 0"
                raise ConfigurationError(msg)
        self._limits = limits(
            open_messages_max,
            open_bytes_max,
            window_max=window_max,
            window_bytes_max=window_bytes_max,
            is_durable=outbox is not None,
        )
        self._full_timeout_s = full_timeout_s
        self._close_timeout_s = close_timeout_s
        self._closing = threading.Lock()
        self._is_closed = False
        self._pid = os.getpid()
        self._relay = RelayThread(
            Parts(
                open_store=lambda: _open_store(outbox),
                open_transport=lambda run: PikaTransport(
                    addresses, run=run, heartbeat_s=heartbeat_s, ssl_context=ssl_context
                ),
                open_session=lambda: Session[Entry](
                    window_max=window_max,
                    window_bytes_max=window_bytes_max,
                    confirm_timeout_s=confirm_timeout_s,
                ),
                policy=retry or RetryPolicy(),
                limits=self._limits,
            )
        )
        _not_closed.add(self)

    # ------------------------------------------------------------------ publishing

    def publish(
        self,
        body: bytes,
        *,
        exchange: str = "",
        routing_key: str = "",
        headers: Mapping[str, FieldValue] | None = None,
        message_id: str | None = None,
        persistent: bool = True,
        priority: int | None = None,
        expiration: int | None = None,
        timestamp: datetime | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        type: str | None = None,  # noqa: A002 - AMQP's own name for it
        user_id: str | None = None,
        app_id: str | None = None,
    ) -> Receipt:
        """Store a message, to be published; it is on disk when this returns.

        The arguments are those of `Message`.

        Returns:
            a receipt; its ``result`` waits for the broker's confirm.

        Raises:
            InvalidMessage: the broker would punish it; nothing was stored or sent.
            OutboxFull: no room was made in time; it was not accepted.
            OutboxDiskFull: the disk is full; it was not accepted.
            PublisherClosed: the publisher is closed or has failed; it was not accepted.
            PublisherForked: this process is not the one that opened the publisher.
        """
        message = Message(
            body=body,
            exchange=exchange,
            routing_key=routing_key,
            headers=headers,
            message_id=message_id if message_id is not None else new_id(),
            persistent=persistent,
            priority=priority,
            expiration=expiration,
            timestamp=timestamp,
            content_type=content_type,
            content_encoding=content_encoding,
            correlation_id=correlation_id,
            reply_to=reply_to,
            type=type,
            user_id=user_id,
            app_id=app_id,
        )
        assert message.message_id is not None
        receipt = Receipt(message.message_id, self._relay)
        self._wait_stored(self._hand_over([message], receipt, None))
        return receipt

    def publish_many(
        self, messages: Iterable[Message], *, source: str | None = None
    ) -> BatchReceipt:
        """Store many messages, in chunks; all are on disk when this returns.

        Args:
            messages: taken one by one, so that memory stays bounded however many there are.
            source: a name under which the outbox counts how many it has stored, in the same
                transactions; after a crash `position` says where to go on.

        Returns:
            a receipt that counts their outcomes.

        Raises:
            OutboxFull: as `publish`; a note says how many were stored before.
            OutboxDiskFull: likewise.
            PublisherClosed: likewise.
        """
        receipt = BatchReceipt(self._relay)
        under_way: deque[Handover] = deque()
        stream = Stream()
        try:
            for chunk in cut(messages, self._limits):
                under_way.append(self._hand_over(chunk, receipt, source, receipt.accepted, stream))
                if len(under_way) > CHUNKS_UNDER_WAY:
                    self._wait_stored(under_way.popleft())
            while under_way:
                self._wait_stored(under_way.popleft())
        except BaseException as error:
            if under_way:
                under_way[-1].done.wait(1.0)
            stream.error = stream.error or error  # what the relay has not taken, it leaves alone
            for handover in under_way:  # so that the note tells the truth about them too
                while not (handover.done.wait(_LOOK_S) or self._relay.is_ended):
                    pass
            error.add_note(f"{receipt.stored} messages before it are stored")
            raise
        return receipt

    # ------------------------------------------------------------------ waiting and ending

    @property
    def status(self) -> Status:
        """The connection, what is open and in flight, the ledger: as of the relay's last turn."""
        return self._relay.status

    def flush(self, timeout: float | None = None) -> Status:
        """Wait until nothing is open of all that the outbox holds now.

        Args:
            timeout: seconds, or None to wait as long as it takes.

        Returns:
            where things stand; ``open`` is what is still on its way.

        Raises:
            PublisherClosed: the publisher has failed.
        """
        self._check_process()
        self._relay.flush(timeout)
        self._check_alive()
        return self._relay.status

    def close(self, timeout: float | None = None) -> Status:
        """Accept nothing more, publish what is open until the time is up, and let go of everything.

        What is still open then stays in the outbox, and is published by whoever opens it next.

        Args:
            timeout: seconds; ``close_timeout_s`` where it is left out.

        Returns:
            where things stand; ``open`` is what was left.
        """
        self._check_process()
        with self._closing:
            self._is_closed = True
            self._relay.close(self._close_timeout_s if timeout is None else timeout)
            _not_closed.discard(self)
        return self._relay.status

    def __enter__(self) -> Self:
        """Use it in a ``with`` block, to be closed at its end."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; an outbox keeps what could not be published."""
        self.close()

    def __repr__(self) -> str:
        """Tell the state without addresses or credentials."""
        status = self._relay.status
        return f"<Publisher {status.link}, {status.open} open, {status.in_flight} in flight>"

    # ------------------------------------------------------------------ inside

    def _hand_over(
        self,
        messages: Sequence[Message],
        waiter: Waiter,
        source: str | None,
        on_stored: Callable[[int], None] | None = None,
        stream: Stream | None = None,
    ) -> Handover:
        self._check_process()
        self._check_alive()
        handover = Handover(messages, waiter, source, on_stored, stream)
        if handover.chunk.size > self._limits.bytes_max:
            msg = f"{handover.chunk.size} bytes never fit into {self._limits.bytes_max}"
            raise OutboxFull(msg)
        self._relay.inbox.put(handover.chunk)
        return handover

    def _wait_stored(self, handover: Handover) -> None:
        """Wait for the commit; for room too, if the outbox is full, but only as long as asked."""
        since = time.monotonic()
        while not handover.done.wait(_LOOK_S):
            if self._relay.is_ended and not handover.done.is_set():
                self._check_alive()
            waited_s = time.monotonic() - since
            is_late = self._full_timeout_s is not None and waited_s >= self._full_timeout_s
            if is_late and self._limits.is_full(self._relay.status.counters, handover.chunk):
                self._relay.inbox.withdraw(handover.chunk)
        if handover.error is not None:
            raise copy(handover.error) from handover.error  # others of its turn raise it too

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            msg = (
                f"this publisher belongs to process {self._pid}; open one in this process "
                f"({os.getpid()}), after the fork"
            )
            raise PublisherForked(msg)

    def _check_alive(self) -> None:
        failure = self._relay.failure
        if failure is not None:
            msg = f"the publisher has failed and takes no more messages: {failure}"
            raise PublisherClosed(msg) from failure
        if self._is_closed:
            msg = "the publisher is closed"
            raise PublisherClosed(msg)


def _open_store(outbox: str | os.PathLike[str] | None) -> Store:
    return MemoryStore() if outbox is None else SqliteStore(Path(outbox))


_not_closed: Final[weakref.WeakSet[Publisher]] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    """The interpreter ends: give open messages their last chance; the outbox keeps the rest."""
    for publisher in list(_not_closed):
        if os.getpid() == publisher._pid:  # noqa: SLF001 - our own
            publisher.close()
