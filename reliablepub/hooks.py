"""Hooks: callbacks for events of messages and of the connection.

Knows: the events, and the callback for each. Must never know: which hooks exist, or what they do
(metrics, traces, logs).

A hook is any object with one or more of the methods of `EventCallbacks`. The relay calls each
method at most once per turn, with all events of that turn, in order::

    class Slow:
        def on_confirmed(self, events: Sequence[AttemptEnded]) -> None:
            for event in events:
                if event.latency_s > 1:
                    ...

    Publisher(url, outbox="outbox.db", hooks=[Slow()])

Hooks run on the relay's thread, even with asyncio, so they must be quick and not ``async def``. An
exception from a hook does not stop the relay: it is counted (``Status.callback_errors``), and the
first one of each method is logged. Events without listeners are not collected.

Three methods are not event callbacks. `Rejections.rejected` is called when a message is not
accepted, and `Stamps.stamp` with each message before it is stored: both in the caller's context
(``contextvars``), which holds its trace. They run on the caller's thread, or on a thread that
stores the message for a coroutine. `Watches.watch` receives the publisher when it is opened, so
that the hook can read its status at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from reliablepub.headers import FieldValue
from reliablepub.message import Message
from reliablepub.outcome import Outcome


@dataclass(slots=True)
class MessageEvent:
    """An event of one message. It does not hold the body.

    Attributes:
        message_id: AMQP ``message_id``, identical on every attempt.
        exchange: exchange it is published to.
        routing_key: routing key it is published with.
        headers: headers as the application set them, including trace context. Not in the `repr`.
        size: bytes that count against limits (`Message.size`).
    """

    message_id: str
    exchange: str
    routing_key: str
    headers: Mapping[str, FieldValue] | None = field(repr=False)
    size: int


@dataclass(slots=True)
class MessageStored(MessageEvent):
    """A message was accepted and committed: to disk if there is an outbox, otherwise to memory."""


@dataclass(slots=True)
class AttemptBegun(MessageEvent):
    """An attempt has begun: a message was given to the client library to be written.

    Attributes:
        epoch: name of the channel epoch, unique in this outbox.
        tag: delivery tag on that channel.
        attempt: number of the attempt, from 1.
    """

    epoch: str
    tag: int
    attempt: int


@dataclass(slots=True)
class AttemptEnded(MessageEvent):
    """An attempt has ended: confirmed, returned, nacked, refused or uncertain.

    Attributes:
        epoch: name of the channel epoch.
        tag: delivery tag on that channel; 0 if the message could not be written.
        outcome: outcome of the attempt, with the broker's reply code and text if it sent any.
        attempts: number of attempts that have ended without a confirm so far.
        latency_s: seconds since the attempt began; 0 if the message could not be written.
        stored_at: when the message was stored; wall clock, seconds since 1970.
        may_have_arrived: whether a queue may hold the message because of this attempt or an earlier
            one that ended without a confirm.
    """

    epoch: str
    tag: int
    outcome: Outcome
    attempts: int
    latency_s: float
    stored_at: float
    may_have_arrived: bool = False


@dataclass(slots=True)
class MessageGivenUp(MessageEvent):
    """A message will not be sent again: parked, expired or discarded.

    Attributes:
        outcome: the reason, with the broker's reply code and text if it sent any. If the message's
            row on disk is damaged, the outcome is *uncertain* and its text names the damage;
            ``headers`` is then None and ``size`` is 0.
        attempts: number of attempts that have ended without a confirm.
        may_have_arrived: whether a queue may hold the message because of one of these attempts.
            Always True if the row is damaged: its attempts are not known.
    """

    outcome: Outcome
    attempts: int
    may_have_arrived: bool = False


@dataclass(slots=True)
class MessagesRejected:
    """Messages were not accepted: the call that was to store them raises.

    Attributes:
        count: number of messages.
        error: the exception that the caller gets.
    """

    count: int
    error: Exception


@dataclass(slots=True)
class LinkChanged:
    """The connection was made, lost, blocked or unblocked.

    Attributes:
        reason: why the connection was lost or blocked; may be empty.
        connects: connections made so far; more than 1 after a reconnect.
        open: messages accepted and not yet settled.
    """

    reason: str
    connects: int
    open: int


@dataclass(slots=True)
class DestinationChanged:
    """A destination was paused because it kept refusing messages, or was resumed (`Breaker`).

    Attributes:
        exchange: exchange of the destination.
        routing_key: routing key of the destination; None if it is a whole exchange.
        refusals: consecutive refusals so far.
        outcome: the last refusal, with the broker's reply code and text.
        user_id: the ``user_id`` whose messages wait, whatever their exchange; None if the
            destination is an exchange.
    """

    exchange: str
    routing_key: str | None
    refusals: int
    outcome: Outcome
    user_id: str | None = None


class EventCallbacks(Protocol):
    """The callbacks for events. A hook may have any of them.

    Do not inherit from this class: a hook would then listen to every event.
    """

    def on_stored(self, events: Sequence[MessageStored]) -> None:
        """Messages were accepted. Called after the commit that stored them."""

    def on_sent(self, events: Sequence[AttemptBegun]) -> None:
        """Messages were given to the client library, which may still hold some of them."""

    def on_confirmed(self, events: Sequence[AttemptEnded]) -> None:
        """The broker has taken responsibility for messages (ack, no return).

        The rows may still be on disk. A message that `RetryPolicy.decide` settles as
        `GiveUp.ARRIVED` is included; its outcome has the broker's answer to the duplicate.
        """

    def on_returned(self, events: Sequence[AttemptEnded]) -> None:
        """The broker returned messages as unroutable (``basic.return``).

        Called when the confirms that follow the returns arrive.
        """

    def on_nacked(self, events: Sequence[AttemptEnded]) -> None:
        """The broker refused responsibility for messages (``basic.nack``)."""

    def on_refused(self, events: Sequence[AttemptEnded]) -> None:
        """Messages made the broker close a channel or the connection, or cannot be encoded.

        Called once each message has been proven to be the cause.
        """

    def on_uncertain(self, events: Sequence[AttemptEnded]) -> None:
        """Attempts ended without a confirm: messages may have arrived, and are sent again.

        Causes are a lost channel or connection, and a confirm that is overdue.
        """

    def on_parked(self, events: Sequence[MessageGivenUp]) -> None:
        """Messages were given up, and kept for an operator. Called after the commit."""

    def on_expired(self, events: Sequence[MessageGivenUp]) -> None:
        """Deadlines of messages passed before they were confirmed. Called after the commit."""

    def on_discarded(self, events: Sequence[MessageGivenUp]) -> None:
        """Messages were given up and deleted (`GiveUp.DISCARD`). Called after the commit."""

    def on_connected(self, events: Sequence[LinkChanged]) -> None:
        """The connection was made, or made again."""

    def on_disconnected(self, events: Sequence[LinkChanged]) -> None:
        """The connection was lost, or could not be made.

        Called once for each reason, not for each failed attempt to reconnect.
        """

    def on_blocked(self, events: Sequence[LinkChanged]) -> None:
        """The broker accepts no publishes for now (``connection.blocked``)."""

    def on_unblocked(self, events: Sequence[LinkChanged]) -> None:
        """The broker accepts publishes again (``connection.unblocked``)."""

    def on_paused(self, events: Sequence[DestinationChanged]) -> None:
        """Destinations were paused because they kept refusing messages.

        Not called again when a paused destination refuses a probe.
        """

    def on_resumed(self, events: Sequence[DestinationChanged]) -> None:
        """Paused destinations accept messages again.

        Called for an exchange before the messages that wait for it are sent, and for a routing key
        once the last messages that wait for it may be sent.
        """


EVENTS: Final = tuple(
    name.removeprefix("on_") for name in vars(EventCallbacks) if name.startswith("on_")
)
"""Names of the events."""


class Rejections(Protocol):
    """A hook that is notified of messages that a publisher or an `Outbox` did not accept."""

    def rejected(self, event: MessagesRejected) -> None:
        """Called in the caller's context, before the exception is raised.

        Several threads may call it at once. An exception that it raises is suppressed.
        """


class Watched(Protocol):
    """What `Watches.watch` receives: a publisher whose status any thread can read."""

    @property
    def status(self) -> Any:  # noqa: ANN401 - `reliablepub.Status`; this floor must not import it
        """The `reliablepub.Status` of the relay's last turn."""

    @property
    def is_ended(self) -> bool:
        """Whether the relay has ended, so that the status will not change any more."""

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the relay; None while it runs or after a regular close."""

    @property
    def limits(self) -> Any:  # noqa: ANN401 - `reliablepub.relay.handover.Limits`
        """Most open messages (``messages_max``) and bytes of them (``bytes_max``)."""


class Watches(Protocol):
    """A hook that reads the publisher's status; it may have event callbacks too."""

    def watch(self, publisher: Watched) -> None:
        """Called once, when the publisher is opened, on the thread that opens it."""


class Stamps(Protocol):
    """A hook that adds the caller's context to messages."""

    def stamp(self, message: Message) -> Message:
        """Return the message to store. Called in the caller's context.

        If the message already has a ``message_id``, that is kept. An exception propagates to the
        caller, and the message is not stored.
        """


def tell_rejected(
    hooks: Sequence[Callable[[MessagesRejected], None]], count: int, error: Exception
) -> None:
    """Tell hooks that messages were not accepted; exceptions raised by hooks are suppressed."""
    for hook in hooks:
        with suppress(Exception):
            hook(MessagesRejected(count, error))
