"""The front door for threads: `Publisher`.

Knows: arguments, receipts and how to wait. Must never know: pika, SQL, what a turn of the relay
does.
"""

from __future__ import annotations

import math
import os
import ssl
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import Self

from reliablepub.errors import PublisherFailed
from reliablepub.front.receipt import BatchReceipt, Issued, IssuedBatch, Receipt
from reliablepub.front.relay_client import CHUNKS_UNDER_WAY, LOOK_S, RelayClient, put_together
from reliablepub.headers import FieldValue
from reliablepub.message import Message
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import new_id
from reliablepub.policy import RetryPolicy
from reliablepub.relay.handover import (
    WINDOW_BYTES_MAX,
    WINDOW_MAX,
    WINDOW_MIN,
    Chunk,
    Latch,
    Stream,
    cut,
)
from reliablepub.relay.status import Status
from reliablepub.topology import Topology


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
        outbox_keys: encrypt bodies and properties in the outbox.
        keep_confirmed_s: how long the outbox keeps what is confirmed, for people to see; 0 not.
        window_min: most messages in flight at first; the window adapts, unless both are the same.
        window_max: most messages in flight ever.
        window_bytes_max: most bytes in flight; a larger message goes alone.
        confirm_timeout_s: how long the broker may owe the oldest confirm, once that message has
            left this host; then the channel is ended and its messages are sent again.
        heartbeat_s: AMQP heartbeat; a dead broker is noticed within twice that.
        retry: what to do with messages the broker refuses.
        hooks: objects that are told what happens (`reliablepub.hooks`), on the relay's thread.
        topology: declared or checked on each connection, before anything is sent on it. While the
            broker is not so, nothing is sent, and ``status.reason`` tells every problem.
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
        outbox_keys: OutboxKeys | None = None,
        keep_confirmed_s: float = 0.0,
        window_min: int = WINDOW_MIN,
        window_max: int = WINDOW_MAX,
        window_bytes_max: int = WINDOW_BYTES_MAX,
        confirm_timeout_s: float = 30.0,
        heartbeat_s: int = 10,
        retry: RetryPolicy | None = None,
        hooks: Sequence[object] = (),
        topology: Topology | None = None,
        open_messages_max: int | None = None,
        open_bytes_max: int | None = None,
        full_timeout_s: float | None = None,
        close_timeout_s: float = 10.0,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        parts = put_together(
            url,
            outbox=outbox,
            outbox_keys=outbox_keys,
            keep_confirmed_s=keep_confirmed_s,
            window_min=window_min,
            window_max=window_max,
            window_bytes_max=window_bytes_max,
            confirm_timeout_s=confirm_timeout_s,
            heartbeat_s=heartbeat_s,
            retry=retry,
            hooks=hooks,
            topology=topology,
            open_messages_max=open_messages_max,
            open_bytes_max=open_bytes_max,
            ssl_context=ssl_context,
        )
        self._client = RelayClient(
            parts, full_timeout_s=full_timeout_s, close_timeout_s=close_timeout_s
        )
        self._client.open()
        self._client.wait_started()

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
        expires_in_s: float | None = None,
        not_before: datetime | None = None,
        ordering_key: str | None = None,
    ) -> Receipt:
        """Store a message, to be published; it is on disk when this returns.

        The arguments are those of `Message`.

        Returns:
            a receipt; its ``result`` waits for the broker's confirm. That may take as long as the
            message waits for its ``not_before``, or for its turn in its ``ordering_key``.

        Raises:
            InvalidMessage: the broker would punish it; nothing was stored or sent.
            OutboxFull: no room was made in time; it was not accepted.
            OutboxDiskFull: the disk is full; it was not accepted.
            PublisherClosed: the publisher is closed or has failed; it was not accepted.
            PublisherForked: this process is not the one that opened the publisher.
            WrongThread: this is the relay's own thread: a hook, say.
            RelayHeldUp: a callback of the application's does not return; it was not accepted.
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
            expires_in_s=expires_in_s,
            not_before=not_before,
            ordering_key=ordering_key,
        )
        assert message.message_id is not None
        receipt = Issued(message.message_id, self._client.relay)
        self._wait_stored(self._client.hand_over_one(message, receipt, Latch()))
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
        client, receipt = self._client, IssuedBatch(self._client.relay)
        under_way: deque[Chunk[Latch]] = deque()
        stream = Stream()
        try:
            for piece in cut(messages, client.cutter()):
                done = Latch()
                under_way.append(
                    client.hand_over(
                        piece,
                        receipt,
                        done,
                        source=source,
                        on_stored=receipt.accepted,
                        stream=stream,
                    )
                )
                if len(under_way) > CHUNKS_UNDER_WAY:
                    self._wait_stored(under_way.popleft())
            while under_way:
                self._wait_stored(under_way.popleft())
        except BaseException as error:
            if under_way:
                under_way[-1].done.wait(1.0)
            stream.error = stream.error or error  # what the relay has not taken, it leaves alone
            for chunk in under_way:  # so that the note tells the truth about them too
                if not chunk.withdraw():
                    while not (chunk.done.wait(LOOK_S) or client.relay.is_ended):
                        pass
            error.add_note(f"{receipt.stored} messages before it are stored")
            raise
        return receipt

    # ------------------------------------------------------------------ waiting and ending

    @property
    def status(self) -> Status:
        """The connection, what is open and in flight, the ledger: as of the relay's last turn."""
        return self._client.status

    def flush(self, timeout: float | None = None) -> Status:
        """Wait until nothing is open of all that the outbox holds now and may be sent now.

        It does not wait for messages whose ``not_before`` has not come, nor does `close`.

        Args:
            timeout: seconds, or None to wait as long as it takes.

        Returns:
            where things stand: ``is_flushed`` tells whether it came true, ``open`` what is open.

        Raises:
            PublisherFailed: the publisher has failed.
            WrongThread: this is the relay's own thread: a hook, say.
            RelayHeldUp: a callback of the application's does not return.
        """
        self._client.check_process()
        is_flushed = self._client.relay.flush(timeout)
        self._client.check_alive()
        return replace(self._client.status, is_flushed=is_flushed)

    def close(self, timeout: float | None = None) -> Status:
        """Accept nothing more, publish what is open until the time is up, and let go of everything.

        What is still open then stays in the outbox, and is published by whoever opens it next.

        Args:
            timeout: seconds; ``close_timeout_s`` where it is left out.

        Returns:
            where things stand; ``open`` is what was left.

        Raises:
            PublisherFailed: the publisher had failed; what is open stays in the outbox.
            PublisherForked: this process is not the one that opened the publisher.
            WrongThread: this is the relay's own thread: a hook, say.
            RelayHeldUp: a callback of the application's does not return; it ends when that does.
        """
        self._client.begin_close(timeout)
        self._client.end_close()
        return self._client.status

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
        try:
            self.close()
        except PublisherFailed:
            if error is None:  # otherwise the block's own error goes on, and may be the same
                raise

    def __repr__(self) -> str:
        """Tell the state without addresses or credentials."""
        status = self._client.status
        return f"<Publisher {status.link}, {status.open} open, {status.in_flight} in flight>"

    # ------------------------------------------------------------------ inside

    def _wait_stored(self, chunk: Chunk[Latch]) -> None:
        """Wait for the commit; for room too, if the outbox is full, but not longer than asked."""
        client, since = self._client, time.monotonic()
        patience_s = left_s = math.inf if client.full_timeout_s is None else client.full_timeout_s
        while True:
            if left_s <= 0:
                client.withdraw_if_full(chunk)
            if chunk.done.wait(min(left_s, LOOK_S) if left_s > 0 else LOOK_S):
                break
            if client.relay.is_ended and not chunk.done.is_set():
                client.check_alive()
            client.withdraw_if_held_up(chunk)
            left_s = patience_s - (time.monotonic() - since)
        client.check_stored(chunk)
