"""The `Transport` contract between the relay and a client library.

Knows: the core's events, messages, and that RabbitMQ truncates a reply text to 252 bytes plus
``...``, possibly within a UTF-8 character. Must never know: SQL, outcomes, or which message is
which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from reliablepub._core.events import Event
from reliablepub.message import Message

if TYPE_CHECKING:
    import asyncio


def text(words: str | bytes | None) -> str:
    """Decode a reply text. A truncated UTF-8 character becomes U+FFFD; None becomes empty."""
    if words is None:
        return ""
    return words.decode(errors="replace") if isinstance(words, bytes) else words


def host_and_port(host: str, port: int) -> str:
    """``host:port``, with an IPv6 address in brackets as in a URL (RFC 3986, section 3.2.2)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_ACCESS_REFUSED: Final = 403
_EXPIRED: Final = 'returned an error: "Provided JWT token has expired'


def says_expired(code: int, words: str) -> bool:
    """Whether a broker closes a channel because the token of the connection has expired.

    Before 4.3, RabbitMQ's OAuth 2 backend keeps the connection open, and refuses operations that
    need a permission: "403 ACCESS_REFUSED - access to exchange ... refused for user ..., backend
    rabbit_auth_backend_oauth2 returned an error: "Provided JWT token has expired at timestamp
    ...". These words follow names, so a long name may cut them off; then the refusal counts as one
    for lack of permission, and the message is retried as that allows.

    Since 4.3, it closes the connection instead: 320 "CONNECTION_FORCED - credential expired".
    """
    return code == _ACCESS_REFUSED and _EXPIRED in words


class CannotEncode(Exception):
    """A message exceeds what this broker allows; nothing of its batch was written.

    Attributes:
        index: position of the message in the batch.
        problem: which limit the message exceeds.
    """

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(problem)
        self.index = index
        self.problem = problem


class Transport(Protocol):
    """One connection at a time, with channels that are named by epoch.

    All methods but `wake` must be called from one thread. The results of requests are events that
    `listen` returns; only `send` raises. A request on a lost connection has no event of its own:
    the `ConnectionLost` is already queued.
    """

    @property
    def hooks_off(self) -> str:
        """Why only the client library's public interface is used; empty if the hooks are used."""

    @property
    def certificate_ends_at(self) -> float | None:
        """When the client certificate expires (seconds since 1970); None if that is not known."""

    @property
    def trying(self) -> str:
        """Host and port of the broker that `connect` tries; empty if that is not known."""

    def connect(self) -> None:
        """Start connecting; `Connected` or `ConnectionLost` follows."""

    def disconnect(self, reason: str) -> None:
        """Drop the connection without waiting for the broker; `ConnectionLost` follows."""

    def open_channel(self, epoch: int) -> None:
        """Open a channel in confirm mode; `ChannelOpened` follows, or `NoChannel`."""

    def close_channel(self, epoch: int) -> None:
        """Close a channel; no event follows."""

    def send(self, epoch: int, first_tag: int, messages: Sequence[Message]) -> None:
        """Write publishes in order, with ``mandatory``: ``messages[i]`` has tag ``first_tag + i``.

        Raises:
            CannotEncode: a message exceeds a limit of the broker; nothing was written.
        """

    def listen(self, timeout_s: float) -> list[Event]:
        """Wait for events, for `wake`, or for the timeout; return all events so far."""

    def watch(self, fd: int) -> bool:
        """Have `listen` return whenever this descriptor is readable, too.

        Returns:
            False if this transport cannot watch a descriptor.
        """

    def wake(self) -> None:
        """Make the current or next `listen` return at once. May be called from any thread."""

    def close(self) -> None:
        """Close the connection and release all resources; waits briefly for the broker's answer."""


class LentConnection(Protocol):
    """The parts of an aio-pika connection that are used without importing aio-pika."""

    connected: asyncio.Event

    @property
    def is_closed(self) -> bool:
        """Whether the application has closed the connection."""
