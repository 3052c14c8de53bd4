"""The core's inputs and outputs: events of a connection, commands to it, ended attempts.

Knows: what happens on an AMQP connection. Must never know: which client library reports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from reliablepub.outcome import CONFIRMED, Outcome

K = TypeVar("K")
"""The caller's key of a message. The core never looks into it."""


@dataclass(slots=True)
class Connected:
    """The connection is open; channels can be opened on it.

    Attributes:
        server: host and port of the broker, such as ``rabbitmq.example.com:5672``; may be empty.
            Ignored when events are compared.
    """

    server: str = field(default="", compare=False)


@dataclass(slots=True)
class ConnectionClose:
    """The broker's ``connection.close``.

    Attributes:
        reply_code: reply code, such as 320 or 540.
        reply_text: reply text.
    """

    reply_code: int
    reply_text: str


@dataclass(slots=True)
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


@dataclass(slots=True)
class ChannelOpened:
    """The channel is open and in confirm mode (``confirm.select-ok``); its tags start at 1."""

    epoch: int


@dataclass(slots=True)
class NoChannel:
    """The channel was not opened: no channel number is free on the connection."""

    epoch: int


@dataclass(slots=True)
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


@dataclass(slots=True)
class Acked:
    """``basic.ack`` of this tag, or with ``multiple`` of all outstanding tags up to this one."""

    epoch: int
    tag: int
    multiple: bool


@dataclass(slots=True)
class AckedEach:
    """Several ``basic.ack`` in a row without ``multiple``, in place of one `Acked` for each tag."""

    epoch: int
    tags: Sequence[int]


@dataclass(slots=True)
class Nacked:
    """``basic.nack`` of this tag, or with ``multiple`` of all outstanding tags up to this one."""

    epoch: int
    tag: int
    multiple: bool


@dataclass(slots=True)
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


@dataclass(slots=True)
class Blocked:
    """``connection.blocked``: the broker accepts no publishes for now."""

    reason: str


@dataclass(slots=True)
class Unblocked:
    """``connection.unblocked``: the broker accepts publishes again."""


@dataclass(slots=True)
class Leaving:
    """Bytes have left this host recently, and at least one publish has not left it entirely.

    A transport repeats this event several times per second while both are true. A publish that no
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


@dataclass(slots=True)
class OpenChannel:
    """Open a channel in confirm mode; the transport answers with `ChannelOpened` of this epoch."""

    epoch: int


@dataclass(slots=True)
class CloseChannel:
    """Close the channel of this epoch; later events of the channel are ignored."""

    epoch: int
    reason: str


@dataclass(slots=True)
class Disconnect:
    """Drop the connection, because only a new one can help.

    The broker does not answer, its confirms do not match what was sent, or it closed a channel for
    another reason than a publish.
    """

    reason: str


Command: TypeAlias = OpenChannel | CloseChannel | Disconnect


@dataclass(slots=True, eq=False)
class Batch(Generic[K]):
    """Messages that are written together on one channel, from the write to their last confirm.

    Attributes:
        epoch: number of the channel epoch.
        first_tag: delivery tag of the first message; ``keys[i]`` has tag ``first_tag + i``.
        keys: the caller's keys of the messages.
        outstanding: how many of the messages have not been reported as ended. The caller, who is
            told of ended attempts with their batch, counts it down.
        taken_at: when the caller took the batch, on the session's active clock.
        written_at: when the caller wrote the batch, by a clock of the caller's own. The core does
            not read it.
        confirmed: keys of confirmed messages that the caller has not dealt with yet. The core does
            not read it.
    """

    epoch: int
    first_tag: int
    keys: Sequence[K]
    outstanding: int = 0
    taken_at: float = 0.0
    written_at: float = 0.0
    confirmed: list[K] = field(default_factory=list)


class Settlement(NamedTuple, Generic[K]):
    """One attempt has ended. The session reports confirmed attempts by `ConfirmedEach` instead.

    The session itself sends an uncertain message again. For any other outcome the caller decides.

    Attributes:
        key: the caller's key of the message.
        epoch: number of the channel epoch.
        tag: delivery tag of the attempt.
        outcome: how the attempt ended.
        batch: the batch with which the message was written; None if it was not written.
    """

    key: K
    epoch: int
    tag: int
    outcome: Outcome
    batch: Batch[K] | None


@dataclass(slots=True)
class ConfirmedEach(Generic[K]):
    """Attempts of one epoch that were confirmed in a row. Grows until it is polled.

    Attributes:
        epoch: number of the channel epoch.
        tags: delivery tags of the attempts.
        keys: the caller's keys of the messages.
        batches: the batches with which the messages were written, each with the number of
            consecutive attempts in ``tags`` that belong to it.
    """

    epoch: int
    tags: list[int]
    keys: list[K]
    batches: list[tuple[Batch[K], int]]

    def each(self) -> Iterator[Settlement[K]]:
        """One `Settlement` for each attempt."""
        batches = (batch for batch, count in self.batches for _ in range(count))
        for tag, key, batch in zip(self.tags, self.keys, batches, strict=True):
            yield Settlement(key, self.epoch, tag, CONFIRMED, batch)


Ended: TypeAlias = Settlement[K] | ConfirmedEach[K]
