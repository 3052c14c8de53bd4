"""Channels on an aio-pika connection that the application has, for a relay on a thread.

Knows: two threads, the relay's and that of the connection's event loop; aio-pika's connections,
plain and robust. Must never know: frames, what is in the outbox, what an outcome leads to.

Requests are posted to the loop and carried out there by `Guest`; events are noted there, and the
relay is woken once for all that one iteration of the loop has heard. Messages are encoded on the
relay's thread, so that the loop only passes finished frames on.

The connection is the application's: it connects, reconnects and closes. A look every few
milliseconds sees what has become of it. It takes no task of ours, which the application might
cancel with its own; and aio-pika has no callback for when the broker blocks the connection.
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
from reliablepub.transport.departures import LOOK_S
from reliablepub.transport.frames import encode_batch

_LOOK_S: Final = 0.02
_NOT_ALLOWED: Final = 530
_CHANNEL_OPEN: Final = (20, 10)


class Guest:
    """Our channels on whatever connection the application has. All of it on its event loop.

    Args:
        host: the application's connection.
        run: number of the relay's run.
        tell: told what happens.

    Attributes:
        channels: by epoch.
    """

    def __init__(self, host: Connection, *, run: int, tell: Callable[[Event], None]) -> None:
        self._host = host
        self._run = run
        self._tell = tell
        self._is_wanted = False
        self._is_connected = False
        self._is_blocked = False
        self._look_at = 0.0
        self._home: GuestChannels | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._when_gone: Callable[[], None] | None = None
        self.channels: dict[int, GuestChannel] = {}

    def connect(self) -> None:
        """Wait for the application's connection: `Connected` follows as soon as it is open."""
        self._is_wanted = True
        if self._timer is None:
            self._look()

    def disconnect(self, reason: str) -> None:
        """Close our channels and leave the connection as it is; `ConnectionLost` follows."""
        for channel in self.channels.values():
            channel.close()
        self._lose(reason)

    def open_channel(self, epoch: int) -> None:
        """Open a channel in confirm mode, if there is still a connection and a number for it."""
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
        """Close a channel."""
        channel = self.channels.pop(epoch, None)
        if channel is not None:
            channel.close()

    def leave(self, when_gone: Callable[[], None]) -> None:
        """Close our channels, and be told when the broker has answered, or cannot any more."""
        self._is_wanted = False
        self._when_gone = when_gone
        for channel in self.channels.values():
            channel.close()
        if self._timer is None:
            self._look()

    # ------------------------------------------------------------------ inside

    def _look(self) -> None:
        """What has become of the connection since the last look."""
        self._timer = self._host.loop.call_later(_LOOK_S, self._look)
        if not failure():
            with contained("looking"):
                self._look_around(self._timer)
        elif self._is_wanted or self._is_connected:
            self._is_wanted, self._is_connected, self._home = False, True, None
            self._lose(failure())
        if failure() and self._when_gone is not None:
            self._timer.cancel()
            self._when_gone()

    def _look_around(self, timer: asyncio.TimerHandle) -> None:
        connection = self._open_connection()
        if self._home is not None and connection is not self._home.connection:
            self._lose(*_why_closed(self._home.connection))
            self._home = None
        if self._is_connected:
            self._look_whether_blocked()
            self._look_what_left()
        elif self._is_wanted and connection is not None:
            self._arrive(connection)
        elif self._is_wanted and self._host.is_closed:
            self._is_wanted = False
            self._tell(ConnectionLost("the application has closed its connection"))
        if self._when_gone is not None and (self._home is None or self._home.is_empty):
            if self._home is not None:
                self._home.leave()
            timer.cancel()
            self._when_gone()

    def _open_connection(self) -> AbstractConnection | None:
        """The connection below aio-pika's, which has another one after each reconnection."""
        transport = self._host.transport
        if transport is None or not transport.connection.is_opened:
            return None
        return transport.connection

    def _arrive(self, connection: AbstractConnection) -> None:
        self._is_wanted = self._is_blocked = False
        what = problem(connection)
        if what is not None:
            self._tell(ConnectionLost(what))
            return
        if self._home is None:
            self._home = GuestChannels(connection, run=self._run, tell=self._tell)
        self._is_connected = True
        self._tell(Connected())

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
            self._tell(Blocked("the broker blocks it") if self._is_blocked else Unblocked())

    def _lose(self, reason: str, close: ConnectionClose | None = None) -> None:
        self.channels.clear()
        if self._is_connected:
            self._is_connected = False
            self._tell(ConnectionLost(reason, close))


def _why_closed(connection: AbstractConnection) -> tuple[str, ConnectionClose | None]:
    """What aiormq says of it; nothing secret.

    It says nothing of the method at fault; but where the broker refuses one more channel, no
    publish is to blame.
    """
    url = getattr(connection, "url", None)
    where = f"{url.host}:{url.port}: " if url is not None else ""
    why = f"{where}the application's connection is lost"
    if not connection.is_closed or connection.closing.cancelled():
        return why, None
    error = connection.closing.exception()
    text = str(error) or type(error).__name__
    is_channel = "number of channels opened" in text
    close = ConnectionClose(_NOT_ALLOWED, text, _CHANNEL_OPEN) if is_channel else None
    return f"{why}: {text}", close


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
