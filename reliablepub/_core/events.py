"""The core's inputs and outputs: events of a connection, commands to it, ended attempts.

Knows: what happens on an AMQP connection. Must never know: which client library reports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from reliablepub.outcome import CONFIRMED, Outcome

K = TypeVar("K")
"""The caller's key of a message. The core never looks into it."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The connection is open; channels can be opened on it."""


@dataclass(frozen=True, slots=True)
class ConnectionClose:
    """The broker's ``connection.close``.

    Attributes:
        reply_code: reply code, such as 320 or 540.
        reply_text: reply text.
        method: class and method that failed: (60, 40) is ``basic.publish``, (0, 0) is none.
    """

    reply_code: int
    reply_text: str
    method: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The connection, with all its channels, is gone, or could not be made.

    Attributes:
        reason: text for operators.
        close: the broker's ``connection.close``, if it sent one.
        is_refusal: whether the broker or TLS refuses the connection for its configuration, so that
            a retry cannot succeed until one side is reconfigured.
    """

    reason: str
    close: ConnectionClose | None = None
    is_refusal: bool = False


@dataclass(frozen=True, slots=True)
class ChannelOpened:
    """The channel is open and in confirm mode (``confirm.select-ok``); its tags start at 1."""

    epoch: int


@dataclass(frozen=True, slots=True)
class NoChannel:
    """The channel was not opened: no channel number is free on the connection."""

    epoch: int


@dataclass(frozen=True, slots=True)
class ChannelClosed:
    """The broker closed one channel (``channel.close``).

    Attributes:
        epoch: epoch of the channel.
        reply_code: reply code, such as 404.
        reply_text: reply text.
        by_publish: whether the failed method is ``basic.publish`` (class 60, method 40).
    """

    epoch: int
    reply_code: int
    reply_text: str
    by_publish: bool


@dataclass(frozen=True, slots=True)
class Acked:
    """``basic.ack`` of this tag, or with ``multiple`` of all outstanding tags up to this one."""

    epoch: int
    tag: int
    multiple: bool


@dataclass(frozen=True, slots=True)
class AckedEach:
    """Several ``basic.ack`` in a row without ``multiple``, in place of one `Acked` for each tag."""

    epoch: int
    tags: Sequence[int]


@dataclass(frozen=True, slots=True)
class Nacked:
    """``basic.nack`` of this tag, or with ``multiple`` of all outstanding tags up to this one."""

    epoch: int
    tag: int
    multiple: bool


@dataclass(frozen=True, slots=True)
class Returned:
    """``basic.return``.

    Attributes:
        epoch: epoch of the channel.
        tag: delivery tag of the returned publish, read from the attempt header; 0 if the header
            could not be read.
        reply_code: reply code, such as 312.
        reply_text: reply text.
        body_bytes: body size according to the returned content header.
    """

    epoch: int
    tag: int
    reply_code: int
    reply_text: str
    body_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Blocked:
    """``connection.blocked``: the broker accepts no publishes for now."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unblocked:
    """``connection.unblocked``: the broker accepts publishes again."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """Bytes have left this host recently, and at least one publish has not left it entirely.

    A transport repeats this event several times a second while both are true. A publish that no
    event reports has left.

    Attributes:
        epoch: epoch of the channel.
        tag: the first publish that has not left entirely; 0 stands for the opening of the channel.
            Never decreases from one event to the next.
    """

    epoch: int
    tag: int


ChannelEvent: TypeAlias = (
    Acked | AckedEach | Nacked | Returned | ChannelOpened | NoChannel | ChannelClosed | Leaving
)
Event: TypeAlias = ChannelEvent | Connected | ConnectionLost | Blocked | Unblocked


@dataclass(frozen=True, slots=True)
class OpenChannel:
    """Open a channel in confirm mode; the transport answers with `ChannelOpened` of this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class CloseChannel:
    """Close the channel of this epoch; later events of the channel are ignored."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Drop the connection, because only a new one can help.

    The broker does not answer, its confirms do not match what was sent, or it closed a channel for
    another reason than a publish.
    """

    reason: str


Command: TypeAlias = OpenChannel | CloseChannel | Disconnect


@dataclass(frozen=True, slots=True)
class Batch(Generic[K]):
    """Messages to write on one channel; ``keys[i]`` has delivery tag ``first_tag + i``."""

    epoch: int
    first_tag: int
    keys: Sequence[K]


class Settlement(NamedTuple, Generic[K]):
    """One attempt has ended. Confirmed attempts are usually reported by `ConfirmedEach` instead.

    The session itself sends an uncertain message again. For any other outcome the caller decides.
    """

    key: K
    epoch: int
    tag: int
    outcome: Outcome


@dataclass(slots=True)
class ConfirmedEach(Generic[K]):
    """Attempts of one epoch that were confirmed in a row. Grows until it is polled."""

    epoch: int
    tags: list[int]
    keys: list[K]

    def each(self) -> Iterator[Settlement[K]]:
        """One `Settlement` for each attempt."""
        for tag, key in zip(self.tags, self.keys, strict=True):
            yield Settlement(key, self.epoch, tag, CONFIRMED)


Ended: TypeAlias = Settlement[K] | ConfirmedEach[K]
