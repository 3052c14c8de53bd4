"""The relay's connection: connects and reconnects, and passes events and commands.

Knows: the transport and the session, the events and commands between them, and tenacity's waits.
Must never know: the store, SQL.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tenacity import wait_random_exponential

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
from reliablepub.policy import wait_s
from reliablepub.relay.status import Link
from reliablepub.transport.base import Transport


def names(entry: Entry, words: str) -> bool:
    """Whether a reply text contains "exchange 'x' in vhost", where x is the entry's exchange.

    RabbitMQ's texts for 404 (no such exchange) and 403 (no permission, or an internal exchange)
    have this form; see ``rabbit_misc:rs`` in its source. A text that was cut at 255 bytes may lack
    the name. Permissions on the default exchange are those on ``amq.default``. The result is a hint
    and no proof: it tells with which message in flight the quarantine begins.
    """
    return f"exchange '{entry.message.exchange or 'amq.default'}' in vhost" in words


_WAITS: Final = wait_random_exponential(multiplier=0.1, max=15)
_STABLE_S: Final = 10.0


class Reconnect:
    """The backoff between attempts to connect.

    It grows while attempts fail, and while connections open and are soon lost. A connection that
    delivered a confirm, or lasted `_STABLE_S` seconds, resets it.
    """

    def __init__(self, now: float) -> None:
        self._failures = 0
        self._connected_at: float | None = None
        self.due_at: float | None = now  # the first attempt is due at once

    def started(self) -> None:
        """An attempt is under way."""
        self.due_at = None

    def connected(self, now: float) -> None:
        """The attempt succeeded."""
        self._connected_at = now

    def proved(self) -> None:
        """The broker has confirmed a message: reset the backoff."""
        self._failures = 0

    def lost(self, now: float) -> None:
        """The attempt failed, or the connection was lost."""
        if self._connected_at is not None and now - self._connected_at > _STABLE_S:
            self._failures = 0
        self._connected_at = None
        self._failures += 1
        self.due_at = now + wait_s(_WAITS, self._failures)


class Connection:
    """Passes events from the transport to the session, and commands back; reconnects."""

    def __init__(self, transport: Transport, session: Session[Entry], now: float) -> None:
        self._transport = transport
        self._session = session
        self._reconnect = Reconnect(now)
        self._lost_reason = ""
        self.connects: int = 0
        self.server: str = ""  # host and port of the last connection's broker
        self.refusals: int = 0  # attempts in a row that failed by credentials, vhost or TLS

    def poll_timeout(self) -> float | None:
        """When to call `keep` next (monotonic), or None."""
        due_at, connect_at = self._session.poll_timeout(), self._reconnect.due_at
        if due_at is None or connect_at is None:
            return connect_at if due_at is None else due_at
        return min(due_at, connect_at)

    def keep(self, now: float) -> None:
        """Connect, and handle timeouts, if it is time to; carry out the session's commands."""
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

    def handle(self, events: Iterable[Event], now: float) -> bool:
        """Pass events from the transport to the session; return whether there were any."""
        has_heard = False
        for event in events:
            has_heard = True
            match event:
                case Connected(server):
                    self.connects += 1
                    self.server = server
                    self._lost_reason = ""
                    self.refusals = 0
                    self._reconnect.connected(now)
                case ConnectionLost(reason, _, is_refusal):
                    self._lost_reason = reason
                    self.refusals = self.refusals + 1 if is_refusal else 0
                    self._reconnect.lost(now)
            self._session.handle(event, now)
        return has_heard

    def proved(self) -> None:
        """The broker has confirmed a message: reset the backoff between connections."""
        self._reconnect.proved()

    @property
    def is_connecting(self) -> bool:
        """Whether a connection is being made at this moment."""
        return self._reconnect.due_at is None and not self._session.is_connected

    @property
    def trying(self) -> str:
        """Host and port of the broker to which a connection is being made; else empty."""
        return self._transport.trying if self.is_connecting else ""

    @property
    def link(self) -> tuple[Link, str]:
        """The state of the connection, and the reason for it."""
        session = self._session
        if session.blocked_reason is not None:
            return Link.BLOCKED, session.blocked_reason
        if session.is_connected and session.refuses_all:
            return Link.BLOCKED, session.refuses_all
        if session.is_connected:
            return Link.CONNECTED, ""
        if self.is_connecting:
            return Link.CONNECTING, self._lost_reason
        return Link.DISCONNECTED, self._lost_reason
