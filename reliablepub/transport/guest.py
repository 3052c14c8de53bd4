"""A guest on the application's aio-pika connection: follows it through loss and reconnection.

Knows: aio-pika's connections, plain and robust, and their event loop. Must never know: frames, the
relay's thread, what is published.

The connection is the application's: it connects, reconnects and closes. A look every few
milliseconds sees what has become of it. It takes no task of ours, which the application might
cancel with its own; and aio-pika tells nobody when the broker blocks the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

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
from reliablepub.transport.aiormq_hooks import (
    GuestChannel,
    GuestChannels,
    contained,
    failure,
    problem,
)
from reliablepub.transport.departures import LOOK_S

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
