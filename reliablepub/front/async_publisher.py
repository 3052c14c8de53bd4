"""The publisher for asyncio: `AsyncPublisher`.

Knows: arguments, tasks and how they wait. Must never know: pika, SQL, what a turn of the relay
does.

The relay runs on a thread of its own, so that disk, DNS and sockets never block the event loop. A
task hands its message over and waits for a future (`reliablepub.front.bridge`). Cancelling the task
therefore only ends its wait: the relay keeps the message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from types import TracebackType
from typing import Final, Self, Unpack

from reliablepub.errors import (
    PublisherClosed,
    RelayHeldUp,
    ReliablePubError,
    WrongEventLoop,
)
from reliablepub.front.async_receipt import AsyncBatchReceipt, AsyncReceipt, Issued, IssuedBatch
from reliablepub.front.bridge import Bridge, Signal
from reliablepub.front.environment import (
    options_of_environment,
    outbox_of_environment,
    urls_of_environment,
)
from reliablepub.front.options import PublisherOptions, check_names, new_client
from reliablepub.front.relay_client import LOOK_S
from reliablepub.message import Message, MessageFields
from reliablepub.outbox.chunks import Cutter
from reliablepub.outbox.entry import identified
from reliablepub.outbox.opening import Where
from reliablepub.relay.handover import Chunk, Stream
from reliablepub.relay.status import Status
from reliablepub.transport.base import LentConnection

_BREATH_S: Final = 0.002
"""How long `AsyncPublisher.publish_many` works before it yields to other tasks of the loop."""


class AsyncPublisher:
    """A reliable publisher for RabbitMQ, for asyncio.

    When `publish` returns, the message is on disk. From then on, the relay sends it until the
    broker confirms it without returning it, or until it is parked in the outbox with a reason. It
    may arrive more than once, always under the same ``message_id``.

    Use it as ``async with AsyncPublisher(url, outbox=path) as publisher``, or call `open` and
    `aclose`. It belongs to the event loop that opens it, and must not be used in a child process
    after a fork. It never blocks the loop: a thread does the disk and network I/O.

    With ``connection``, it opens its own channels on the application's aio-pika connection instead
    of connecting itself. It never closes that connection. While the connection is down, the
    publisher waits: a robust connection reconnects by itself.

    Any ``await`` may be cancelled at any time. This only ends the wait: no message is lost, sent
    twice, or given the outcome of another one. But a cancelled `publish` may or may not have stored
    its message; pass your own ``message_id`` if you intend to retry it.

    `PublisherOptions` lists the other options.

    Args:
        url: ``amqp://user:password@host:port/vhost`` or ``amqps://...``, or several for failover.
        connection: an aio-pika connection, instead of a URL; opened in the same event loop as the
            publisher.
        outbox: path of the outbox, created if missing, or URL of an outbox in PostgreSQL. None
            keeps messages in memory only: those not confirmed when the process ends are lost.

    Raises:
        ConfigurationError: an argument is invalid.
        TypeError: an option is unknown.
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        connection: LentConnection | None = None,
        outbox: Where | None,
        **options: Unpack[PublisherOptions],
    ) -> None:
        check_names(options)
        self._client = new_client(url, connection, outbox=outbox, **options)
        self._host = connection
        self._bridge: Bridge | None = None

    async def open(self) -> Self:
        """Open the outbox, and start connecting. If this is cancelled, the publisher closes again.

        Raises:
            NotAnOutbox: the file is not an outbox.
            OutboxInUse: another process relays this outbox; use `Outbox.enqueue` instead.
            OutboxError: the outbox cannot be opened for another reason.
            PublisherForked: another process made the publisher.
            WrongEventLoop: another event loop opened the publisher or its ``connection``, or no
                asyncio event loop is running (for instance under trio).
        """
        self._client.check_process()
        if self._bridge is None:
            loop, relay = _running_loop(), self._client.relay
            if getattr(self._host, "loop", loop) is not loop:
                raise WrongEventLoop("the connection belongs to another event loop; open one here")
            bridge = Bridge(loop, relay.check_held_up, lambda: relay.status)
            self._client.open(bridge)  # raises if a hook does, or no thread can be started
            self._bridge = bridge
        with self._client.opening():
            await self._bridge.until_started()
            self._client.wait_started()
        return self

    @classmethod
    def from_env(cls, **options: Unpack[PublisherOptions]) -> Self:
        """Make a publisher from the environment variables that the command line also reads.

        ``RELIABLEPUB_URL`` (one URL, or several separated by spaces) and ``RELIABLEPUB_OUTBOX``
        must be set; ``RELIABLEPUB_PASSWORD_FILE`` and ``RELIABLEPUB_OUTBOX_KEYS`` are optional.

        Args:
            options: all other options, as in `PublisherOptions`.

        Raises:
            ConfigurationError: a variable is missing or unusable, or an option is invalid.
            TypeError: an option is unknown.
        """
        check_names(options)
        return cls(
            urls_of_environment(),
            outbox=outbox_of_environment(),
            **options_of_environment(options),
        )

    # ------------------------------------------------------------------ publishing

    async def publish(
        self, message: bytes | Message, **fields: Unpack[MessageFields]
    ) -> AsyncReceipt:
        """Store a message to be published. It is on disk when this returns.

        Args:
            message: the body as bytes, or a `Message`.
            fields: the other fields of the `Message`, if ``message`` is a body.

        Returns:
            a receipt; ``await`` it for the broker's confirm. This includes the time until
            ``not_before``, and until earlier messages with this ``ordering_key`` are confirmed.

        Raises:
            InvalidMessage: the broker would refuse the message, or close the channel because of it.
                Nothing was stored or sent.
            TypeError: a field is unknown.
            OutboxFull: no room became free in the outbox in time. The message was not accepted.
            OutboxDiskFull: the disk is full. The message was not accepted.
            OutboxUnsure: the disk, the network or the relay failed during the commit. The message
                may or may not be stored.
            OutboxMoved: the file was moved. The copy that the error names may hold the message.
            OutboxError: another problem with the outbox. The message was not accepted.
            PublisherClosed: the publisher is closed or has failed. The message was not accepted.
            PublisherForked: another process opened the publisher.
            RelayHeldUp: an application callback is blocking the relay. The message was not
                accepted.
            WrongEventLoop: another event loop opened the publisher.
        """
        bridge = self._check()
        await bridge.admission()
        message = identified(message, fields)
        assert message.message_id is not None
        receipt = Issued(message.message_id, bridge)
        chunk = self._client.hand_over_one(message, receipt, Signal(bridge))
        try:
            await self._until_stored(chunk)
        except BaseException as error:  # also cancelled
            chunk.withdraw()  # otherwise it would stay in the inbox while the outbox has no room
            self._client.not_stored([chunk], error)
            raise
        return receipt

    async def publish_many(
        self, messages: Iterable[Message] | AsyncIterable[Message], *, source: str | None = None
    ) -> AsyncBatchReceipt:
        """Store many messages to be published, in chunks. All are on disk when this returns.

        An exception carries a note that says how many of the messages were stored before it.

        Args:
            messages: an iterable, read one by one so that memory use stays bounded. A plain
                iterable that blocks also blocks the event loop; an asynchronous one may wait.
            source: a name under which the outbox counts the messages, in the transactions that
                store them. After a crash, `Outbox.position` says where to resume.

        Returns:
            a receipt that counts the outcomes of these messages.

        Raises:
            InvalidMessage: an item is not a `Message`, or ``source`` is longer than 2 600 bytes.
            OutboxFull: no room became free in the outbox in time.
            OutboxDiskFull: the disk is full.
            OutboxUnsure: the disk, the network or the relay failed during a commit. The messages of
                that commit may or may not be stored.
            OutboxError: another problem with the outbox.
            PublisherClosed: the publisher is closed or has failed.
            PublisherForked: another process opened the publisher.
            RelayHeldUp: an application callback is blocking the relay.
            WrongEventLoop: another event loop opened the publisher.
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
                    while client.must_wait(under_way):
                        await self._until_stored(under_way[0])
                        under_way.popleft()
            while under_way:
                await self._until_stored(under_way[0])
                under_way.popleft()
        except Exception as error:
            left = [chunk for chunk in under_way if not chunk.is_withdrawn]
            try:
                with suppress(RelayHeldUp):
                    if left:
                        await left[-1].done.wait(1.0)
            finally:  # also if it is cancelled meanwhile
                stream.error = stream.error or error
                taken = _withdraw(left)
            for chunk in taken:  # wait, so that the note counts chunks that the relay has taken
                with suppress(RelayHeldUp):
                    await chunk.done.wait()
            client.not_stored(under_way, error)
            error.add_note(f"{receipt.stored} messages before it are stored")
            raise
        except BaseException as error:  # cancelled: no caller waits for the other chunks
            stream.error = stream.error or error  # the relay stores no later chunk of the stream
            _withdraw(under_way)
            raise
        return receipt

    # ------------------------------------------------------------------ waiting and ending

    @property
    def status(self) -> Status:
        """Connection, messages open and in flight, and the ledger, as of the relay's last turn."""
        return self._client.status

    async def flush(self, timeout_s: float | None = None) -> Status:
        """Wait until each message that is stored now and may be sent now is settled.

        Neither `flush` nor `aclose` waits for messages whose ``not_before`` is still to come, or
        for those behind such a message, or behind a parked one, with the same ordering key.

        Args:
            timeout_s: seconds, or None to wait without limit; a negative value counts as 0.

        Returns:
            the status: ``is_flushed`` says whether all of these messages are settled, and ``open``
            how many messages are still open.

        Raises:
            ConfigurationError: ``timeout_s`` is not a number.
            PublisherClosed: the publisher is closed or has failed.
            PublisherForked: another process opened the publisher.
            RelayHeldUp: an application callback is blocking the relay.
            WrongEventLoop: another event loop opened the publisher.
        """
        done = Signal(self._check())
        flush = self._client.relay.begin_flush(done)
        try:
            is_flushed = await done.wait(timeout_s)
        finally:
            self._client.relay.end_flush(flush)
        self._client.check_alive()
        return replace(self._client.status, is_flushed=is_flushed)

    async def aclose(self, timeout_s: float | None = None) -> Status:
        """Close the publisher: accept no more messages, and publish open ones until the time is up.

        Messages still open stay in the outbox for the next publisher or relay that opens it. If
        this call is cancelled, the publisher still closes. Once its event loop is closed, for
        instance at the end of ``asyncio.run``, any other loop can close the publisher.

        Args:
            timeout_s: seconds; None for ``close_timeout_s``.

        Returns:
            the last status; ``open`` is the number of messages left.

        Raises:
            ConfigurationError: ``timeout_s`` is not a number.
            PublisherFailed: the publisher has failed. Open messages stay in the outbox.
            PublisherForked: another process opened the publisher.
            RelayHeldUp: an application callback is blocking the relay. The publisher ends once the
                callback returns.
            WrongEventLoop: another event loop opened the publisher.
        """
        self._client.check_process()
        bridge = self._bridge
        is_orphaned = bridge is not None and bridge.loop.is_closed()
        if bridge is not None and not is_orphaned:
            bridge.check()
        self._client.begin_close(timeout_s)
        if is_orphaned:
            await asyncio.to_thread(self._client.end_close)
        elif bridge is not None:
            await bridge.until_ended()
            self._client.end_close()
        return self._client.status

    async def __aenter__(self) -> Self:
        """Open the publisher; the end of the block closes it."""
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the publisher. Messages still open stay in the outbox."""
        try:
            await self.aclose()
        except ReliablePubError:
            if error is None:  # otherwise the block's own error propagates; it may be the same one
                raise

    def __repr__(self) -> str:
        """Show the state, without addresses or credentials."""
        status = self._client.status
        return f"<AsyncPublisher {status.link}, {status.open} open, {status.in_flight} in flight>"

    # ------------------------------------------------------------------ inside

    def _check(self) -> Bridge:
        """Check that the publisher is open and may be used in this process and event loop.

        Returns:
            its bridge.
        """
        self._client.check_process()
        if self._bridge is None:
            msg = "the publisher is not open: use `async with`, or `await publisher.open()` first"
            raise PublisherClosed(msg)
        self._bridge.check()
        return self._bridge

    async def _until_stored(self, chunk: Chunk[Signal]) -> None:
        """Wait for the commit; while the outbox is full, at most ``full_timeout_s`` for room."""
        client, done = self._client, chunk.done
        wait_s, is_stored = client.full_timeout_s, False
        while not is_stored:
            try:
                is_stored = await done.until(done.is_set, wait_s)
            except RelayHeldUp as error:
                chunk.withdraw_because(error)
                continue
            if not is_stored:
                if client.relay.is_ended and not done.is_set():
                    client.check_process()
                    client.check_alive()
                client.withdraw_if_full(chunk)
                wait_s = LOOK_S
        client.check_stored(chunk)


def _withdraw(chunks: Iterable[Chunk[Signal]]) -> list[Chunk[Signal]]:
    """Withdraw chunks, which would stay in the inbox; return those that the relay has taken."""
    return [chunk for chunk in chunks if not chunk.withdraw()]


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
    """Cut a stream into chunks; yield to other tasks of the loop every `_BREATH_S` seconds."""
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
