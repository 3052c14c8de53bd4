"""Channels on an aio-pika connection that the application has, for a relay on a thread.

Knows: two threads, the relay's and that of the connection's event loop. Must never know: what is in
the outbox, or what an outcome leads to.

What is asked for is posted to the loop, and done there by `Guest`; what is heard there is noted,
and the relay is woken once for all that one iteration of the loop has heard. Messages are encoded
on the relay's thread, so that the loop only passes finished frames on.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final

from aio_pika import Connection

from reliablepub._core.events import ConnectionLost, Event
from reliablepub.errors import ConfigurationError
from reliablepub.message import Message
from reliablepub.transport.aiormq_hooks import contained, problem, untested
from reliablepub.transport.encoding import encode_batch
from reliablepub.transport.guest import Guest
from reliablepub.transport.pamqp_texts import read_any_reply_text

_CLOSE_TIMEOUT_S: Final = 2.0


class AioPikaTransport:
    """A `Transport` on a connection that is lent to it. It never closes the connection.

    Args:
        connection: the application's.
        run: number of the relay's run; with epoch and tag it names an attempt.
    """

    def __init__(self, connection: Connection, *, run: int) -> None:
        self._loop: asyncio.AbstractEventLoop = connection.loop
        self._run = run
        self._heard: deque[Event] = deque()
        self._woken: SimpleQueue[None] = SimpleQueue()  # reentrant: signal handlers wake us too
        self._is_woken = False
        self._is_ring_due = False
        self._guest = Guest(connection, run=run, tell=self._hear)

    # ------------------------------------------------------------------ on the relay's thread

    @property
    def hooks_off(self) -> str:
        """Empty: without the hooks there is no way to confirms with tags."""
        return ""

    def connect(self) -> None:
        """Wait for the application to be connected."""
        self._post(self._guest.connect)

    def disconnect(self, reason: str) -> None:
        """Leave the connection to the application, and begin anew on it."""
        self._post(self._guest.disconnect, reason)

    def open_channel(self, epoch: int) -> None:
        """Open a channel, and select confirm mode on it."""
        self._post(self._guest.open_channel, epoch)

    def close_channel(self, epoch: int) -> None:
        """Close a channel; its number is free again when the broker has answered."""
        self._post(self._guest.close_channel, epoch)

    def send(self, epoch: int, first_tag: int, messages: Sequence[Message]) -> None:
        """Encode publishes here, and have them written there."""
        channel = self._guest.channels.get(epoch)
        if channel is None:
            return
        encoder = channel.encoder
        properties = encode_batch(messages, self._run, epoch, first_tag, encoder.frame_max)
        self._post(channel.publish, first_tag, encoder.encode(messages, properties))

    def listen(self, timeout_s: float | None) -> list[Event]:
        """Wait for the loop to hear something."""
        with suppress(Empty):
            self._woken.get(block=not self._heard, timeout=timeout_s)
        self._is_woken = False
        return [self._heard.popleft() for _ in range(len(self._heard))]

    def wake(self) -> None:
        """End a `listen` from another thread."""
        if not self._is_woken:
            self._is_woken = True
            self._woken.put(None)

    def close(self) -> None:
        """Close our channels, and wait a moment for the broker's answer."""
        gone = threading.Event()
        self._post(self._guest.leave, gone.set)
        if self._loop.is_running():
            gone.wait(_CLOSE_TIMEOUT_S)

    def _post(self, call: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401 - the call's
        try:
            self._loop.call_soon_threadsafe(_do, call, *arguments)
        except RuntimeError:
            self._heard.append(ConnectionLost("the application's event loop is closed"))

    # ------------------------------------------------------------------ on the event loop

    def _hear(self, event: Event) -> None:
        self._heard.append(event)
        if not self._is_ring_due:
            self._is_ring_due = True
            self._loop.call_soon(self._ring)

    def _ring(self) -> None:
        self._is_ring_due = False
        self.wake()


def _do(call: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401 - the call's
    with contained("being asked"):
        call(*arguments)


def lent(connection: object) -> Connection:
    """The connection, if it is one that channels of ours can be opened on.

    Raises:
        ConfigurationError: it is something else, or of an aiormq that was never tested.
    """
    if isinstance(connection, Connection):
        below = connection.transport.connection if connection.transport is not None else None
        why = untested() if below is None else problem(below)
        if why:
            raise ConfigurationError(why)
        read_any_reply_text()
        return connection
    raise ConfigurationError(
        f"connection is a {type(connection).__name__}; expected one of aio-pika's, as "
        "`await aio_pika.connect_robust(url)` returns it"
    )
