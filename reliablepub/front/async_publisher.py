"""The front door for asyncio: `AsyncPublisher`.

Knows: arguments, tasks and how they wait. Must never know: pika, SQL, what a turn does.

The relay runs on a thread of its own, as behind `Publisher`: SQLite, DNS and sockets never hold up
the event loop. A task hands its message over and waits for a future (`reliablepub.front.bridge`).
So to cancel a task can only end its wait: what it handed over is the relay's.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import Final, Self

from reliablepub.errors import PublisherClosed, PublisherFailed, RelayHeldUp, WrongEventLoop
from reliablepub.front.async_receipt import AsyncBatchReceipt, AsyncReceipt, Issued, IssuedBatch
from reliablepub.front.bridge import Bridge, Signal
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
    Cutter,
    Stream,
)
from reliablepub.relay.status import Status
from reliablepub.topology import Topology
from reliablepub.transport.base import LentConnection

_BREATH_S: Final = 0.002
"""How long `AsyncPublisher.publish_many` works before the loop's other tasks get their turn."""


class AsyncPublisher:
    """Publishes to RabbitMQ from asyncio, and keeps its word.

    When `publish` returns, the message is on disk. From then on it is published until the broker
    has confirmed it without returning it, or it is parked in the outbox with a reason. It may
    arrive more than once, always under the same ``message_id``.

    Use it as ``async with AsyncPublisher(url, outbox=path) as publisher``, or call `open` and
    `aclose`. It belongs to the event loop that opens it, and is not for use after a fork. The loop
    is never blocked: disk and network are a thread's.

    With ``connection`` it opens channels of its own on an aio-pika connection that the application
    has, instead of connecting itself. It never closes that connection, and waits for it while it is
    down: a robust one comes back by itself.

    Any ``await`` may be cancelled at any time. That ends the wait and nothing else: no message is
    lost, sent twice or given another's outcome. Only whether a cancelled `publish` has stored its
    message is not known; give it a ``message_id`` of your own if you mean to try again.

    Args:
        url: ``amqp://user:password@host:port/vhost`` or ``amqps://...``, or several for failover.
        connection: of aio-pika's, instead of a URL; opened by the event loop that opens this.
        outbox: path of the outbox, made where there is none; None keeps messages in memory only.
        outbox_keys: encrypt bodies and properties in the outbox.
        keep_confirmed_s: how long the outbox keeps what is confirmed, for people to see; 0 not.
        window_min: most messages in flight at first; the window adapts, unless both are the same.
        window_max: most messages in flight ever.
        window_bytes_max: most bytes in flight; a larger message goes alone.
        confirm_timeout_s: how long the broker may owe the oldest confirm, once that message has
            left this host; then the channel is ended and its messages are sent again.
        heartbeat_s: noticing a dead broker takes twice that; a ``connection`` has its own.
        retry: what to do with messages the broker refuses.
        hooks: objects that are told what happens (`reliablepub.hooks`), on the relay's thread.
        topology: declared or checked on each connection, before anything is sent on it.
        open_messages_max: most open messages in the outbox.
        open_bytes_max: most bytes of open messages in the outbox.
        full_timeout_s: how long `publish` waits for room before it raises `OutboxFull`; None waits
            as long as it takes, 0 raises at once.
        close_timeout_s: how long leaving an ``async with`` block waits for open messages.
        ssl_context: for ``amqps``; without it certificates and host names are verified against the
            system's authorities.

    Raises:
        ConfigurationError: an argument cannot be used.
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        connection: LentConnection | None = None,
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
            connection=connection,
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
        self._host = connection
        self._bridge: Bridge | None = None

    async def open(self) -> Self:
        """Open the outbox, and begin to connect. Cancelled, it closes again.

        Raises:
            NotAnOutbox: the file is something else.
            OutboxInUse: another process relays this outbox; use `Outbox.enqueue` beside it.
            WrongEventLoop: another event loop has opened it, or its ``connection``; or none of
                asyncio's is running, as in trio.
        """
        self._client.check_process()
        if self._bridge is None:
            loop, relay = _running_loop(), self._client.relay
            if getattr(self._host, "loop", loop) is not loop:
                raise WrongEventLoop("the connection belongs to another event loop; open one here")
            self._bridge = Bridge(loop, relay.check_held_up, lambda: relay.status)
            self._client.open(self._bridge)
        try:
            await self._bridge.until_started()
        except asyncio.CancelledError:
            self._client.begin_close(0)
            raise
        self._client.wait_started()
        return self

    # ------------------------------------------------------------------ publishing

    async def publish(
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
    ) -> AsyncReceipt:
        """Store a message, to be published; it is on disk when this returns.

        The arguments are those of `Message`.

        Returns:
            a receipt; ``await`` it for the broker's confirm.

        Raises:
            InvalidMessage: the broker would punish it; nothing was stored or sent.
            OutboxFull: no room was made in time; it was not accepted.
            OutboxDiskFull: the disk is full; it was not accepted.
            PublisherClosed: the publisher is closed or has failed; it was not accepted.
            PublisherForked: this process is not the one that opened the publisher.
            RelayHeldUp: a callback of the application's does not return; it was not accepted.
            WrongEventLoop: this event loop is not the one that opened the publisher.
        """
        bridge = self._check()
        await bridge.admission()
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
        receipt = Issued(message.message_id, bridge)
        await self._until_stored(self._client.hand_over_one(message, receipt, Signal(bridge)))
        return receipt

    async def publish_many(
        self, messages: Iterable[Message] | AsyncIterable[Message], *, source: str | None = None
    ) -> AsyncBatchReceipt:
        """Store many messages, in chunks; all are on disk when this returns.

        Args:
            messages: taken one by one, so that memory stays bounded however many there are. What
                blocks in a plain iterable blocks the loop; an asynchronous one may wait.
            source: a name under which the outbox counts how many it has stored, in the same
                transactions; after a crash `position` says where to go on.

        Returns:
            a receipt that counts their outcomes.

        Raises:
            OutboxFull: as `publish`; a note says how many were stored before.
            OutboxDiskFull: likewise.
            PublisherClosed: likewise.
        """
        bridge, client = self._check(), self._client
        receipt = IssuedBatch(bridge)
        under_way: deque[Chunk[Signal]] = deque()
        stream = Stream()
        try:
            async with aclosing(_cut(messages, client.cutter())) as pieces:
                async for piece in pieces:
                    under_way.append(
                        client.hand_over(
                            piece,
                            receipt,
                            Signal(bridge),
                            source=source,
                            on_stored=receipt.accepted,
                            stream=stream,
                        )
                    )
                    if len(under_way) > CHUNKS_UNDER_WAY:
                        await self._until_stored(under_way.popleft())
            while under_way:
                await self._until_stored(under_way.popleft())
        except Exception as error:
            try:
                if under_way:
                    await under_way[-1].done.wait(1.0)
            finally:
                stream.error = stream.error or error
            for chunk in under_way:  # so that the note tells the truth about them too
                if not chunk.withdraw():
                    await chunk.done.wait()
            error.add_note(f"{receipt.stored} messages before it are stored")
            raise
        except BaseException as error:  # cancelled: nobody waits any more
            stream.error = stream.error or error  # what the relay has not taken, it leaves alone
            raise
        return receipt

    # ------------------------------------------------------------------ waiting and ending

    @property
    def status(self) -> Status:
        """The connection, what is open and in flight, and the ledger, as of the last turn."""
        return self._client.status

    async def flush(self, timeout: float | None = None) -> Status:  # noqa: ASYNC109 - as `Publisher`
        """Wait until nothing is open of all that the outbox holds now and may be sent now.

        It does not wait for messages whose ``not_before`` has not come, nor does `aclose`.

        Args:
            timeout: seconds, or None to wait as long as it takes.

        Returns:
            where things stand: ``is_flushed`` tells whether it came true, ``open`` what is open.

        Raises:
            PublisherFailed: the publisher has failed.
            WrongEventLoop: this event loop is not the one that opened the publisher.
        """
        done = Signal(self._check())
        flush = self._client.relay.begin_flush(done)
        try:
            is_flushed = await done.wait(timeout)
        finally:
            self._client.relay.end_flush(flush)
        self._client.check_alive()
        return replace(self._client.status, is_flushed=is_flushed)

    async def aclose(self, timeout: float | None = None) -> Status:  # noqa: ASYNC109 - as `Publisher`
        """Accept nothing more, publish what is open until the time is up, and let go of everything.

        What is still open then stays in the outbox, and is published by whoever opens it next.
        Cancelled, it goes on closing.

        Args:
            timeout: seconds; ``close_timeout_s`` where it is left out.

        Returns:
            where things stand; ``open`` is what was left.

        Raises:
            PublisherFailed: the publisher had failed; what is open stays in the outbox.
            WrongEventLoop: this event loop is not the one that opened the publisher.
        """
        self._client.check_process()
        if self._bridge is not None:
            self._bridge.check()
        self._client.begin_close(timeout)
        if self._bridge is not None:
            await self._bridge.until_ended()
            self._client.end_close()
        return self._client.status

    async def __aenter__(self) -> Self:
        """Open it, to be closed at the end of the block."""
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; an outbox keeps what could not be published."""
        try:
            await self.aclose()
        except PublisherFailed:
            if error is None:  # otherwise the block's own error goes on, and may be the same
                raise

    def __repr__(self) -> str:
        """Tell the state without addresses or credentials."""
        status = self._client.status
        return f"<AsyncPublisher {status.link}, {status.open} open, {status.in_flight} in flight>"

    # ------------------------------------------------------------------ inside

    def _check(self) -> Bridge:
        """Whether it may be used here and now."""
        self._client.check_process()
        if self._bridge is None:
            msg = "the publisher is not open: use `async with`, or `await publisher.open()` first"
            raise PublisherClosed(msg)
        self._bridge.check()
        return self._bridge

    async def _until_stored(self, chunk: Chunk[Signal]) -> None:
        """Wait for the commit; for room too, if the outbox is full, but not longer than asked."""
        client, done = self._client, chunk.done
        wait_s, is_stored = client.full_timeout_s, False
        while not is_stored:
            try:
                is_stored = await done.wait(wait_s)
            except RelayHeldUp as error:
                client.relay.inbox.withdraw_because(chunk, error)
                continue
            if not is_stored:
                client.check_alive()
                client.withdraw_if_full(chunk)
                wait_s = LOOK_S
        client.check_stored(chunk)


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise WrongEventLoop(
            "no asyncio event loop runs here; in trio, use `Publisher` from threads: "
            "await trio.to_thread.run_sync(...)"
        ) from None


async def _cut(
    messages: Iterable[Message] | AsyncIterable[Message], cutter: Cutter
) -> AsyncGenerator[list[Message], None]:
    """Cut a stream into chunks, and let other tasks of the loop have their turn meanwhile."""
    if isinstance(messages, AsyncIterable):
        async for message in messages:
            if chunk := cutter.add(message):
                yield chunk
    else:
        time = asyncio.get_running_loop().time
        since = time()
        for message in messages:
            if chunk := cutter.add(message):
                yield chunk
            if time() - since > _BREATH_S:
                await asyncio.sleep(0)
                since = time()
    if chunk := cutter.rest():
        yield chunk
