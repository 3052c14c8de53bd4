"""The publisher for threads: `Publisher`.

Knows: arguments, receipts, and how a thread waits. Must never know: pika, SQL, what a turn of the
relay does.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self, Unpack

from reliablepub.errors import ReliablePubError
from reliablepub.front.environment import (
    options_of_environment,
    outbox_of_environment,
    urls_of_environment,
)
from reliablepub.front.options import PublisherOptions, check_names, new_client
from reliablepub.front.receipt import BatchReceipt, Issued, IssuedBatch, Receipt
from reliablepub.front.relay_client import LOOK_S
from reliablepub.front.waits import seconds_of
from reliablepub.message import Message, MessageFields
from reliablepub.outbox.chunks import cut
from reliablepub.outbox.entry import identified
from reliablepub.outbox.opening import Where
from reliablepub.relay.handover import Chunk, Latch, Stream
from reliablepub.relay.status import Status


class Publisher:
    """A reliable publisher for RabbitMQ.

    When `publish` returns, the message is on disk. From then on, the relay sends it until the
    broker confirms it without returning it, or until the relay gives it up: it is then parked in
    the outbox with a reason, as expired if its deadline has passed. It is deleted without a confirm
    only if the application or an operator asks for that. It may arrive more than once, always under
    the same ``message_id``.

    Publisher confirms and ``mandatory`` are always on. A publisher is thread-safe. It must not be
    used in a child process after a fork. In an asyncio event loop, use `AsyncPublisher`: a
    `Publisher` blocks the loop while it waits for the disk, and warns about this once.

    `PublisherOptions` lists the other options.

    Args:
        url: ``amqp://user:password@host:port/vhost`` or ``amqps://...``, or several for failover.
        outbox: path of the outbox, created if missing, or URL of an outbox in PostgreSQL. None
            keeps messages in memory only: those not confirmed when the process ends are lost.

    Raises:
        ConfigurationError: an argument is invalid.
        NotAnOutbox: the file is not an outbox.
        OutboxInUse: another process relays this outbox; use `Outbox.enqueue` instead.
        OutboxError: the outbox cannot be opened for another reason.
        TypeError: an option is unknown.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        outbox: Where | None,
        **options: Unpack[PublisherOptions],
    ) -> None:
        check_names(options)
        self._has_waited = False
        self._client = new_client(url, None, outbox=outbox, **options)
        with self._client.opening():
            self._client.open()
            self._client.wait_started()

    @classmethod
    def from_env(cls, **options: Unpack[PublisherOptions]) -> Self:
        """Make a publisher from the environment variables that the command line also reads.

        ``RELIABLEPUB_URL`` (one URL, or several separated by spaces) and ``RELIABLEPUB_OUTBOX``
        must be set; ``RELIABLEPUB_PASSWORD_FILE`` and ``RELIABLEPUB_OUTBOX_KEYS`` are optional.

        Args:
            options: all other options, as in `PublisherOptions`.

        Raises:
            ConfigurationError: a variable is missing or unusable, or an option is invalid.
            NotAnOutbox: the file is not an outbox.
            OutboxInUse: another process relays this outbox; use `Outbox.enqueue` instead.
            OutboxError: the outbox cannot be opened for another reason.
            TypeError: an option is unknown.
        """
        check_names(options)
        return cls(
            urls_of_environment(),
            outbox=outbox_of_environment(),
            **options_of_environment(options),
        )

    # ------------------------------------------------------------------ publishing

    def publish(self, message: bytes | Message, **fields: Unpack[MessageFields]) -> Receipt:
        """Store a message to be published. It is on disk when this returns.

        Args:
            message: the body as bytes, or a `Message`.
            fields: the other fields of the `Message`, if ``message`` is a body.

        Returns:
            a receipt, whose ``result`` waits for the broker's confirm. This includes the time until
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
            WrongThread: called on the relay's thread, for instance by a hook.
            RelayHeldUp: an application callback is blocking the relay. The message was not
                accepted.
        """
        message = identified(message, fields)
        assert message.message_id is not None
        receipt = Issued(message.message_id, self._client.relay)
        if not self._has_waited:
            self._warn_in_event_loop()
        chunk = self._client.hand_over_one(message, receipt, Latch())
        try:
            self._wait_stored(chunk)
        except BaseException as error:  # also what a signal handler of the caller's raises
            chunk.withdraw()  # otherwise it would stay in the inbox while the outbox has no room
            self._client.not_stored([chunk], error)
            raise
        return receipt

    def publish_many(
        self, messages: Iterable[Message], *, source: str | None = None
    ) -> BatchReceipt:
        """Store many messages to be published, in chunks. All are on disk when this returns.

        An exception carries a note that says how many of the messages were stored before it.

        Args:
            messages: an iterable, read one by one so that memory use stays bounded.
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
            WrongThread: called on the relay's thread, for instance by a hook.
            RelayHeldUp: an application callback is blocking the relay.
        """
        client, receipt = self._client, IssuedBatch(self._client.relay)
        if not self._has_waited:
            self._warn_in_event_loop()
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
                while client.must_wait(under_way):
                    self._wait_stored(under_way[0])
                    under_way.popleft()
            while under_way:
                self._wait_stored(under_way[0])
                under_way.popleft()
        except BaseException as error:
            left = [chunk for chunk in under_way if not chunk.is_withdrawn]
            try:
                if left:
                    left[-1].done.wait(1.0)
            finally:  # also after another Ctrl-C
                stream.error = stream.error or error  # the relay stores no later chunk of it
                taken = [chunk for chunk in left if not chunk.withdraw()]
            for chunk in taken:  # wait, so that the note counts chunks that the relay has taken
                while not (chunk.done.wait(LOOK_S) or client.relay.is_ended):
                    pass
            client.not_stored(under_way, error)
            error.add_note(f"{receipt.stored} messages before it are stored")
            raise
        return receipt

    # ------------------------------------------------------------------ waiting and ending

    @property
    def status(self) -> Status:
        """Connection, messages open and in flight, and the ledger, as of the relay's last turn."""
        return self._client.status

    def flush(self, timeout_s: float | None = None) -> Status:
        """Wait until each message that is stored now and may be sent now is settled.

        Neither `flush` nor `close` waits for messages whose ``not_before`` is still to come, or for
        those behind such a message, or behind a parked one, with the same ordering key.

        Args:
            timeout_s: seconds, or None to wait without limit; a negative value counts as 0.

        Returns:
            the status: ``is_flushed`` says whether all of these messages are settled, and ``open``
            how many messages are still open.

        Raises:
            ConfigurationError: ``timeout_s`` is not a number.
            PublisherClosed: the publisher is closed or has failed.
            PublisherForked: another process opened the publisher.
            WrongThread: called on the relay's thread, for instance by a hook.
            RelayHeldUp: an application callback is blocking the relay.
        """
        self._client.check_process()
        is_flushed = self._client.relay.flush(seconds_of(timeout_s))
        self._client.check_alive()
        return replace(self._client.status, is_flushed=is_flushed)

    def close(self, timeout_s: float | None = None) -> Status:
        """Close the publisher: accept no more messages, and publish open ones until the time is up.

        Messages still open stay in the outbox for the next publisher or relay that opens it.

        Args:
            timeout_s: seconds; None for ``close_timeout_s``.

        Returns:
            the last status; ``open`` is the number of messages left.

        Raises:
            ConfigurationError: ``timeout_s`` is not a number.
            PublisherFailed: the publisher has failed. Open messages stay in the outbox.
            PublisherForked: another process opened the publisher.
            WrongThread: called on the relay's thread, for instance by a hook.
            RelayHeldUp: an application callback is blocking the relay. The publisher ends once the
                callback returns.
        """
        self._client.begin_close(timeout_s)
        self._client.end_close()
        return self._client.status

    def __enter__(self) -> Self:
        """Enter a ``with`` block, at whose end the publisher is closed."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the publisher. Messages still open stay in the outbox."""
        try:
            self.close()
        except ReliablePubError:
            if error is None:  # otherwise the block's own error propagates; it may be the same one
                raise

    def __repr__(self) -> str:
        """Show the state, without addresses or credentials."""
        status = self._client.status
        return f"<Publisher {status.link}, {status.open} open, {status.in_flight} in flight>"

    # ------------------------------------------------------------------ inside

    def _wait_stored(self, chunk: Chunk[Latch]) -> None:
        """Wait for the commit; while the outbox is full, at most ``full_timeout_s`` for room."""
        client, since = self._client, time.monotonic()
        patience_s = left_s = math.inf if client.full_timeout_s is None else client.full_timeout_s
        while True:
            if left_s <= 0:
                client.withdraw_if_full(chunk)
            if chunk.done.wait(min(left_s, LOOK_S) if left_s > 0 else LOOK_S):
                break
            if client.relay.is_ended and not chunk.done.is_set():
                client.check_process()  # a signal handler may have forked
                client.check_alive()
            client.withdraw_if_held_up(chunk)
            left_s = patience_s - (time.monotonic() - since)
        client.check_stored(chunk)

    def _warn_in_event_loop(self) -> None:
        """Warn once if this thread runs an event loop, which stands still while `publish` waits.

        Called before anything is handed over: a filter may make an exception of the warning.
        """
        self._has_waited = True
        asyncio = sys.modules.get("asyncio")  # a program without it has no event loop
        if asyncio is None or asyncio._get_running_loop() is None:  # noqa: SLF001 - the public form raises
            return
        if "ipykernel" in sys.modules:
            return  # in a notebook, a person waits anyway
        warnings.warn(
            "Publisher blocks this event loop until each message is on disk; use AsyncPublisher, "
            "or publish from another thread",
            RuntimeWarning,
            stacklevel=3,
        )
