"""What happens to messages and to the connection, told to the application as it happens.

Knows: what is told, and to whom: one small protocol per event. Must never know: who listens, and
what for (metrics, traces, logs).

A hook is any object with one or more of these methods. Each is called at most once a turn of the
relay, with everything that has happened in it, in order::

    class Slow:
        def on_confirmed(self, events: Sequence[AttemptEnded]) -> None:
            for event in events:
                if event.latency_s > 1:
                    ...

    Publisher(url, outbox="outbox.db", hooks=[Slow()])

It is called on the relay's thread, so it must be quick; with asyncio too. One that raises harms
nobody: that is logged once for each event, and counted (``Status.callback_errors``). What nobody
listens to costs nothing.

Some things are states rather than events: whoever has a method `Watches.watch` is given the
publisher to look at, whenever it likes. And what only the caller knows, such as the trace it is in,
is gone on the relay's thread: a method `Stamps.stamp` is called where a message is accepted, by
whoever publishes or enqueues it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from reliablepub.headers import FieldValue
from reliablepub.message import Message
from reliablepub.outcome import Outcome


@dataclass(frozen=True, slots=True)
class MessageEvent:
    """Something that happened to one message; its body is not told.

    Attributes:
        message_id: the AMQP ``message_id``, the same on every attempt.
        exchange: where it goes.
        routing_key: with which routing key.
        headers: as the application set them, where a trace may have left its context.
        size: bytes that it counts for in limits.
    """

    message_id: str
    exchange: str
    routing_key: str
    headers: Mapping[str, FieldValue] | None
    size: int


@dataclass(frozen=True, slots=True)
class MessageStored(MessageEvent):
    """A message was accepted: it is in the store, on disk where there is an outbox."""


@dataclass(frozen=True, slots=True)
class AttemptBegun(MessageEvent):
    """A message was written to the wire.

    Attributes:
        epoch: the channel's name, unique in this outbox.
        tag: its delivery tag there.
        attempt: which attempt that is, from 1.
    """

    epoch: str
    tag: int
    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptEnded(MessageEvent):
    """An attempt has ended: confirmed, returned, nacked, refused or uncertain.

    Attributes:
        epoch: the channel's name.
        tag: the delivery tag there; 0 where it could not be written.
        outcome: how, in the broker's words where it gave any.
        attempts: how many attempts of it have ended without a confirm until now.
        latency_s: seconds since it was written; 0 where it was not.
    """

    epoch: str
    tag: int
    outcome: Outcome
    attempts: int
    latency_s: float


@dataclass(frozen=True, slots=True)
class MessageGivenUp(MessageEvent):
    """A message will not be sent again: parked, expired or discarded.

    Attributes:
        outcome: why, in the broker's words where it gave any. Uncertain, with what is wrong, where
            the message's row on the disk is damaged; then headers and size are not told.
        attempts: how many attempts of it have ended without a confirm.
    """

    outcome: Outcome
    attempts: int


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """The connection: made, lost, blocked or unblocked.

    Attributes:
        reason: why it was lost or is blocked; empty where there is nothing to say.
        connects: connections made so far; more than 1 means that it was made again.
        open: messages that are accepted and not settled.
    """

    reason: str
    connects: int
    open: int


@dataclass(frozen=True, slots=True)
class DestinationChanged:
    """A destination was paused because it kept refusing, or goes on (`Breaker`).

    Attributes:
        exchange: of the destination.
        routing_key: likewise; None where it is the whole exchange.
        refusals: in a row, until now.
        outcome: the last refusal, with the broker's words.
    """

    exchange: str
    routing_key: str | None
    refusals: int
    outcome: Outcome


class OnStored(Protocol):
    """Messages were accepted."""

    def on_stored(self, events: Sequence[MessageStored]) -> None:
        """Called after their commit."""


class OnSent(Protocol):
    """Messages were written to the wire."""

    def on_sent(self, events: Sequence[AttemptBegun]) -> None:
        """Called after they were written."""


class OnConfirmed(Protocol):
    """The broker has taken responsibility."""

    def on_confirmed(self, events: Sequence[AttemptEnded]) -> None:
        """Called when the confirm is known; the row is deleted a moment later."""


class OnReturned(Protocol):
    """Messages were unroutable."""

    def on_returned(self, events: Sequence[AttemptEnded]) -> None:
        """Called when their confirm is known."""


class OnNacked(Protocol):
    """Queues refused messages."""

    def on_nacked(self, events: Sequence[AttemptEnded]) -> None:
        """Called when that is known."""


class OnRefused(Protocol):
    """The broker closed a channel or the connection because of messages."""

    def on_refused(self, events: Sequence[AttemptEnded]) -> None:
        """Called when the guilty one is known."""


class OnUncertain(Protocol):
    """The fate of attempts is unknowable; the messages are sent again."""

    def on_uncertain(self, events: Sequence[AttemptEnded]) -> None:
        """Called when their channel is gone."""


class OnParked(Protocol):
    """Messages were given up, and kept for a person."""

    def on_parked(self, events: Sequence[MessageGivenUp]) -> None:
        """Called after the commit."""


class OnExpired(Protocol):
    """Deadlines of messages passed before they were confirmed."""

    def on_expired(self, events: Sequence[MessageGivenUp]) -> None:
        """Called after the commit."""


class OnDiscarded(Protocol):
    """Messages were given up and deleted, as the policy says."""

    def on_discarded(self, events: Sequence[MessageGivenUp]) -> None:
        """Called after the commit."""


class OnConnected(Protocol):
    """The connection was made, or made again."""

    def on_connected(self, events: Sequence[LinkChanged]) -> None:
        """Called when it may carry channels."""


class OnDisconnected(Protocol):
    """The connection was lost, or could not be made."""

    def on_disconnected(self, events: Sequence[LinkChanged]) -> None:
        """Called once for each reason, not for each attempt to connect again."""


class OnBlocked(Protocol):
    """The broker takes no publishes for now."""

    def on_blocked(self, events: Sequence[LinkChanged]) -> None:
        """Called when it says so."""


class OnUnblocked(Protocol):
    """It takes them again."""

    def on_unblocked(self, events: Sequence[LinkChanged]) -> None:
        """Called when it says so."""


class OnPaused(Protocol):
    """Destinations that kept refusing were paused."""

    def on_paused(self, events: Sequence[DestinationChanged]) -> None:
        """Called for each pause, also after a probe that was refused."""


class OnResumed(Protocol):
    """Destinations that were paused have confirmed something."""

    def on_resumed(self, events: Sequence[DestinationChanged]) -> None:
        """Called before what waits for them is sent."""


class Watched(Protocol):
    """A publisher, to be looked at from any thread."""

    @property
    def status(self) -> Any:  # noqa: ANN401 - `reliablepub.Status`, which is made of what is not known here
        """The `reliablepub.Status` of its relay's last turn."""

    @property
    def is_ended(self) -> bool:
        """Whether there will be no other."""


class Watches(Protocol):
    """Somebody who looks at the publisher, besides being told of events or instead."""

    def watch(self, publisher: Watched) -> None:
        """Called once, when the publisher is opened, by whoever opens it."""


class Stamps(Protocol):
    """Somebody who adds to messages what their caller knows."""

    def stamp(self, message: Message) -> Message:
        """The message as it shall be stored; called on the caller's thread, or in its task.

        What this raises the caller gets, and the message is not stored.
        """


EVENTS: Final = (
    *("stored", "sent", "confirmed", "returned", "nacked", "refused", "uncertain"),
    *("parked", "expired", "discarded"),
    *("connected", "disconnected", "blocked", "unblocked", "paused", "resumed"),
)
"""The events; a hook's method is called ``on_`` and one of these."""
