"""The transport on an aio-pika connection of the application, for a relay on a thread.

Knows: the relay's thread and the thread of the connection's event loop; aio-pika's connections,
plain and robust. Must never know: what a frame holds, what is in the outbox, or what an outcome
leads to.

Requests are posted to the event loop and carried out there by `Guest`. Events are collected there,
and the relay is woken once for all events of one iteration of the loop. Messages are encoded on the
relay's thread, so the event loop only forwards encoded frames.

The application connects, reconnects and closes the connection. A timer checks the connection's
state every 20 ms: aio-pika has no callback for a blocked connection, and a task of reliablepub's
could be cancelled by the application together with its own tasks.
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
from aiormq.abc import AbstractConnection

from reliablepub._core.events import (
    Blocked,
    ChannelClosed,
    ChannelEvent,
    Connected,
    ConnectionClose,
    ConnectionLost,
    Event,
    NoChannel,
    Unblocked,
)
from reliablepub.errors import ConfigurationError
from reliablepub.message import Message
from reliablepub.transport.aiormq_hooks import (
    GuestChannel,
    GuestChannels,
    contained,
    failure,
    problem,
    read_any_reply_text,
    untested,
)
from reliablepub.transport.base import host_and_port, says_expired
from reliablepub.transport.departures import LOOK_S
from reliablepub.transport.frames import encode_batch

_LOOK_S: Final = 0.02
_CLOSING_S: Final = 1.0
"""How long aiormq may close a connection that has ended; it knows the reason only then."""
_RESTORE_S: Final = 1.0
"""How long the application's channels come first on a new connection. Then ours are opened anyway:
a reconnect callback, which aio-pika waits for, may wait for one of our confirms."""
_NOT_ALLOWED: Final = 530
_ALARM: Final = "an alarm of the broker, such as memory or disk; aiormq does not tell which"


class Guest:
    """reliablepub's channels on the application's connection.

    All methods must be called on the connection's event loop.
    """

    def __init__(self, host: Connection, *, run: int, tell: Callable[[Event], None]) -> None:
        self._host = host
        self._run = run
        self._tell = tell
        self._is_wanted = False
        self._is_connected = False
        self._is_blocked = False
        self._look_at = 0.0
        self._open_at = 0.0  # when a connection was last seen open; 0 before the first one
        self._seen: AbstractConnection | None = None
        self._attempts = self._attempts_before = 0
        self._restored_by = 0.0
        self._home: GuestChannels | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._when_gone: Callable[[], None] | None = None
        self.channels: dict[int, GuestChannel] = {}  # open ones, by epoch

    def connect(self) -> None:
        """Wait for the application's connection; `Connected` follows when it is open."""
        self._is_wanted = True
        if self._timer is None:
            self._look()
        if self._is_wanted and not self._open_at:  # later, the end of a connection has told why
            self._tell(ConnectionLost("the application's connection is not open"))

    def disconnect(self, reason: str) -> None:
        """Close all channels, but not the connection; `ConnectionLost` follows."""
        for channel in self.channels.values():
            channel.close()
        self._lose(reason)

    def open_channel(self, epoch: int) -> None:
        """Open a channel in confirm mode.

        `NoChannel` follows if no channel number is free, or `ConnectionLost` if there is no other
        channel either.
        """
        if self._home is None or not self._is_connected:
            return
        channel = self._home.open(epoch)
        if channel is not None:
            self.channels[epoch] = channel
        elif self.channels:
            self._tell(NoChannel(epoch))
        else:
            self._lose("the application's connection has no free channel number; close some there")

    def close_channel(self, epoch: int) -> None:
        """Close the channel of an epoch, if there is one."""
        channel = self.channels.pop(epoch, None)
        if channel is not None:
            channel.close()

    def leave(self, when_gone: Callable[[], None]) -> None:
        """Close all channels; call `when_gone` when the broker has answered or the link is lost."""
        self._is_wanted = False
        self._when_gone = when_gone
        for channel in self.channels.values():
            channel.close()
        if self._timer is None:
            self._look()

    # ------------------------------------------------------------------ inside

    def _look(self) -> None:
        """Check the connection, and schedule the next check."""
        self._timer = self._host.loop.call_later(_LOOK_S, self._look)
        if not failure():
            with contained("looking"):
                self._look_around(self._timer)
        elif self._is_wanted or self._is_connected:
            # As if connected, so that `_lose` also tells a relay that waits for the connection.
            self._is_wanted, self._is_connected, self._home = False, True, None
            self._lose(failure())
        if failure() and self._when_gone is not None:
            self._timer.cancel()
            self._when_gone()

    def _look_around(self, timer: asyncio.TimerHandle) -> None:
        connection = self._open_connection()
        is_restored = self._is_restored(connection)
        if self._home is not None and self._has_ended(self._home.connection):
            self._lose(*_why_closed(self._home.connection))
            self._home = None
        if self._is_connected:
            if connection is not None:
                self._look_whether_blocked()
                self._look_what_left()
        elif self._is_wanted and connection is not None:
            if is_restored:
                self._arrive(connection)
        elif self._is_wanted and self._host.is_closed:
            self._is_wanted = False
            self._tell(ConnectionLost("the application has closed its connection"))
        if self._when_gone is not None and (self._home is None or self._home.is_empty):
            if self._home is not None:
                self._home.leave()
            timer.cancel()
            self._when_gone()

    def _has_ended(self, connection: AbstractConnection) -> bool:
        """Whether a connection has ended, and aiormq knows why or does not close it either."""
        now = self._host.loop.time()
        if connection.is_opened:
            self._open_at = now
        return connection.is_closed or now >= self._open_at + _CLOSING_S

    def _open_connection(self) -> AbstractConnection | None:
        """The aiormq connection in use; each reconnection of aio-pika's makes a new one."""
        transport = self._host.transport
        if transport is None or not transport.connection.is_opened:
            return None
        return transport.connection

    def _is_restored(self, connection: AbstractConnection | None) -> bool:
        """Whether a robust connection has opened the application's channels again, or is late.

        The application may have given them numbers (``connection.channel(7)``). If one of these is
        taken, aio-pika closes the connection and reconnects. It counts an attempt at the end.
        """
        attempts: int | None = getattr(self._host, "connection_attempt", None)
        now = self._host.loop.time()
        if connection is not self._seen:
            self._seen, self._attempts_before = connection, self._attempts
            self._restored_by = now + _RESTORE_S
        self._attempts = attempts or 0
        return attempts is None or attempts > self._attempts_before or now >= self._restored_by

    def _arrive(self, connection: AbstractConnection) -> None:
        self._is_wanted = self._is_blocked = False
        what = problem(connection)
        if what is not None:
            self._tell(ConnectionLost(what))
            return
        if self._home is None:
            self._home = GuestChannels(connection, run=self._run, tell=self._hear)
        self._is_connected = True
        self._open_at = self._host.loop.time()
        self._tell(Connected(_where(connection)))

    def _hear(self, event: ChannelEvent) -> None:
        """Pass an event on, unless it says that the application's token has expired.

        Then no message is to blame, and only the application can renew the token.
        """
        if isinstance(event, ChannelClosed):
            self.channels.pop(event.epoch, None)
            if says_expired(event.reply_code, event.reply_text):
                self._host.loop.call_soon(_do, self.disconnect, event.reply_text)
                return
        self._tell(event)

    def _look_what_left(self) -> None:
        assert self._home is not None
        now = self._host.loop.time()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._home.look_what_left()

    def _look_whether_blocked(self) -> None:
        assert self._home is not None
        if self._home.is_blocked != self._is_blocked:
            self._is_blocked = not self._is_blocked
            self._tell(Blocked(_ALARM) if self._is_blocked else Unblocked())

    def _lose(self, reason: str, close: ConnectionClose | None = None) -> None:
        self.channels.clear()
        if self._is_connected:
            self._is_connected = False
            self._tell(ConnectionLost(reason, close))


def _where(connection: AbstractConnection) -> str:
    """Host and port of the broker; empty if aiormq does not tell."""
    url = getattr(connection, "url", None)
    return "" if url is None else host_and_port(url.host, url.port)


def _why_closed(connection: AbstractConnection) -> tuple[str, ConnectionClose | None]:
    """Why aiormq's connection was closed, without secrets; what the broker said of a channel."""
    where = _where(connection)
    why = f"{where}{': ' if where else ''}the application's connection is lost"
    closing = connection.closing
    error = closing.exception() if closing.done() and not closing.cancelled() else None
    if error is None or isinstance(error, asyncio.CancelledError):
        # aiormq has ended its own tasks, because the broker was silent or the application closed it
        is_silent = getattr(connection, "is_connection_was_stuck", False)
        return f"{why}: no heartbeats arrived" if is_silent else why, None
    text = str(error) or type(error).__name__
    is_channel = "number of channels opened" in text
    close = ConnectionClose(_NOT_ALLOWED, text) if is_channel else None
    return f"{why}: {text}", close


_CLOSE_TIMEOUT_S: Final = 2.0


class AioPikaTransport:
    """A `Transport` on the application's aio-pika connection, which it never closes."""

    def __init__(self, connection: Connection, *, run: int) -> None:
        self._loop: asyncio.AbstractEventLoop = connection.loop
        self._run = run
        self._heard: deque[Event] = deque()
        self._woken: SimpleQueue[None] = SimpleQueue()  # reentrant, for wake-ups in signal handlers
        self._is_woken = False
        self._is_ring_due = False
        self._guest = Guest(connection, run=run, tell=self._hear)

    # ------------------------------------------------------------------ on the relay's thread

    @property
    def hooks_off(self) -> str:
        """Always empty: without the hooks there is no access to confirms with delivery tags."""
        return ""

    @property
    def certificate_ends_at(self) -> None:
        """Unknown: the application makes the connection."""
        return

    @property
    def trying(self) -> str:
        """Always empty: the application makes the connection."""
        return ""

    def connect(self) -> None:
        """Wait for the application's connection to be open."""
        self._post(self._guest.connect)

    def disconnect(self, reason: str) -> None:
        """Close all channels; the connection stays open for the application."""
        self._post(self._guest.disconnect, reason)

    def open_channel(self, epoch: int) -> None:
        """Open a channel in confirm mode."""
        self._post(self._guest.open_channel, epoch)

    def close_channel(self, epoch: int) -> None:
        """Close a channel. Its number is free again once the broker has answered."""
        self._post(self._guest.close_channel, epoch)

    def send(self, epoch: int, first_tag: int, messages: Sequence[Message]) -> None:
        """Encode publishes on this thread, and have the event loop write them."""
        channel = self._guest.channels.get(epoch)
        if channel is None:
            return
        encoder = channel.encoder
        properties = encode_batch(messages, self._run, epoch, first_tag, encoder.frame_max)
        self._post(channel.publish, first_tag, encoder.encode(messages, properties))

    def listen(self, timeout_s: float) -> list[Event]:
        """Wait for events from the event loop."""
        with suppress(Empty):
            self._woken.get(block=not self._heard, timeout=timeout_s)
        self._is_woken = False
        return [self._heard.popleft() for _ in range(len(self._heard))]

    def watch(self, fd: int) -> bool:  # noqa: ARG002 - of the contract
        """Return False: `listen` waits for a queue, and not for descriptors."""
        return False

    def wake(self) -> None:
        """Make `listen` return, from any thread."""
        if not self._is_woken:
            self._is_woken = True
            self._woken.put(None)

    def close(self) -> None:
        """Close all channels; waits at most 2 s for the broker's answer."""
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
    """Check that reliablepub can open its own channels on a connection; return the connection."""
    if isinstance(connection, Connection):
        below = connection.transport.connection if connection.transport is not None else None
        why = untested() if below is None else problem(below)
        if why:
            raise ConfigurationError(why)
        read_any_reply_text()
        return connection
    raise ConfigurationError(
        f"connection is of type {type(connection).__name__}; expected one of aio-pika's, as "
        "`await aio_pika.connect_robust(url)` returns it"
    )
