"""The connection, as the relay keeps it: made, lost, made again, and told of.

Knows: the transport and the session, and what passes between them. Must never know: the store, what
a message is.
"""

from __future__ import annotations

from collections.abc import Iterable

from reliablepub._core.blame import blames_a_publish
from reliablepub._core.events import (
    CloseChannel,
    Connected,
    ConnectionLost,
    Disconnect,
    Event,
    OpenChannel,
)
from reliablepub._core.session import Session
from reliablepub.outbox.entry import Entry
from reliablepub.relay.reconnect import Reconnect
from reliablepub.relay.status import Link
from reliablepub.transport.base import Transport


class Wire:
    """Between the transport and the session.

    Args:
        transport: makes connections and channels.
        session: decides on channels.
        now: monotonic seconds.

    Attributes:
        connects: connections made so far.
        is_refused: whether the last connection was refused as it is.
    """

    def __init__(self, transport: Transport, session: Session[Entry], now: float) -> None:
        self._transport = transport
        self._session = session
        self._reconnect = Reconnect(now)
        self._lost_reason = ""
        self.connects = 0
        self.is_refused = False

    @property
    def due_at(self) -> float | None:
        """When `keep` has to be called (monotonic), or None."""
        return self._reconnect.due_at

    def keep(self, now: float) -> None:
        """Connect, if it is time to; and do with channels what the session wants."""
        if self._reconnect.due_at is not None and now >= self._reconnect.due_at:
            self._reconnect.started()
            self._transport.connect()
        self._session.handle_timeout(now)
        for command in self._session.poll_commands():
            match command:
                case OpenChannel(epoch):
                    self._transport.open_channel(epoch)
                case CloseChannel(epoch):
                    self._transport.close_channel(epoch)
                case Disconnect(reason):
                    self._transport.disconnect(reason)

    def handle(self, events: Iterable[Event], now: float) -> None:
        """Take in what the transport heard."""
        for event in events:
            match event:
                case Connected():
                    self.connects += 1
                    self._lost_reason = ""
                    self.is_refused = False
                    self._reconnect.connected(now)
                case ConnectionLost(reason, close, is_refusal):
                    self._lost_reason = reason
                    self.is_refused = is_refusal
                    if blames_a_publish(close):
                        self._reconnect.closed_by_publish(now)
                    else:
                        self._reconnect.lost(now)
            self._session.handle(event, now)

    def proved(self) -> None:
        """The broker confirmed something."""
        self._reconnect.proved()

    @property
    def link(self) -> tuple[Link, str]:
        """Where the connection stands, and why."""
        session = self._session
        if session.blocked_reason is not None:
            return Link.BLOCKED, session.blocked_reason
        if session.is_connected:
            return Link.CONNECTED, ""
        if self._reconnect.due_at is None:
            return Link.CONNECTING, self._lost_reason
        return Link.DISCONNECTED, self._lost_reason
