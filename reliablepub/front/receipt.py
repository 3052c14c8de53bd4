"""Receipts for threads: a caller holds one until its messages are settled, and can wait on it.

Knows: outcomes, errors, waiting threads. Must never know: how outcomes come about, event loops.

The outcome of one message (`SingleOutcome`) and of many (`Counts`) does not depend on how a caller
waits. Threads wait on the receipts of this module, asyncio tasks on those of
`reliablepub.front.async_receipt`. Callers see the public classes; publishers make instances of
subclasses (`Issued`, `IssuedBatch`), which also have the methods by which the relay settles them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, ClassVar, Final, Protocol

from reliablepub.errors import (
    Damaged,
    Expired,
    Nacked,
    PublisherClosed,
    PublisherFailed,
    PublishError,
    Refused,
    StillOpen,
    Unroutable,
    Withdrawn,
)
from reliablepub.front.waits import seconds_of
from reliablepub.outbox.entry import Entry
from reliablepub.outcome import Confirmed, Outcome, OutcomeKind
from reliablepub.relay.handover import Latch
from reliablepub.relay.status import Status, described, waits_for

_ERRORS: Final[dict[OutcomeKind, type[PublishError]]] = {
    OutcomeKind.RETURNED: Unroutable,
    OutcomeKind.NACKED: Nacked,
    OutcomeKind.REFUSED: Refused,
    OutcomeKind.EXPIRED: Expired,
}
FAILURES_KEPT: Final = 1_000
"""Most failures that a `BatchReceipt` keeps. All are counted, and recorded in the outbox."""


class _Relay(Protocol):
    """The relay, as far as a waiting receipt needs it."""

    @property
    def is_ended(self) -> bool:
        """Whether the relay has ended, so that it settles no more messages."""

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the relay; None after a regular close."""

    @property
    def status(self) -> Status:
        """The status after the relay's last turn."""

    def check_thread(self) -> None:
        """Raise `WrongThread` on the relay's own thread."""

    def check_held_up(self) -> None:
        """Raise `RelayHeldUp` while the relay waits for a callback that does not return."""

    def keep(self, receipt: object) -> None:
        """Keep a receipt in memory until `call`, even if the application drops it."""

    def call(self, callback: Callable[[Any], object], receipt: object) -> None:
        """Call back with a settled receipt."""


def publish_error(entry: Entry, outcome: Outcome) -> PublishError:
    """The error for a final outcome other than confirmed."""
    message = entry.message
    return _ERRORS[outcome.kind](
        message_id=message.message_id or "",
        exchange=message.exchange,
        routing_key=message.routing_key,
        reply_code=outcome.reply_code,
        reply_text=outcome.reply_text,
        attempts=entry.attempts,
        may_have_arrived=entry.may_have_arrived,
        is_kept=not entry.is_discarded,
    )


def ended_first(what: str, failure: BaseException | None) -> PublisherClosed:
    """The error for a wait that the end of the relay has ended.

    Args:
        what: the message or messages waited for.
        failure: the exception that ended the relay; None after a regular close.
    """
    if failure is None:
        return PublisherClosed(
            f"the publisher ended before the outcome of {what} was known; unconfirmed messages "
            "stay in the outbox, if there is one, for the next publisher or relay that opens it"
        )
    error = PublisherFailed(f"the outcome of {what} is not known: {described(failure)}")
    error.__cause__ = failure
    return error


def still_open(what: str, timeout_s: float | None, status: Status) -> StillOpen:
    """The error for a wait whose time is up. Its text says what the publisher waits for.

    Args:
        what: the message or messages waited for.
        timeout_s: the time waited, seconds.
        status: the publisher's status.
    """
    waited_s = max(0.0, timeout_s or 0.0)
    told = f"{what} is still open after {waited_s:g} s; the publisher continues to send it"
    return StillOpen("; ".join([told, *waits_for(status)]))


_first_to_wait = threading.RLock()
"""Held while a waiting thread makes a latch; never taken on the relay's thread. It is reentrant, so
a signal handler that interrupts its holder, and itself waits, blocks neither itself nor the relay.
"""


def _forked() -> None:
    """Replace the lock in a forked child: the thread that held it may not exist there."""
    global _first_to_wait  # noqa: PLW0603
    _first_to_wait = threading.RLock()


os.register_at_fork(after_in_child=_forked)


class Waiting(Protocol):
    """Threads or tasks that wait on a receipt."""

    def ring(self) -> None:
        """Wake them. Called on the relay's thread, after the change."""


class _Waiting:
    """A latch that is made by the first wait: most receipts are settled without one."""

    __slots__ = ("_calls", "_latch", "_relay")

    def __init__(self, relay: _Relay) -> None:
        self._relay = relay
        self._latch: Latch | None = None
        self._calls: list[Callable[[], None]] = []  # appended to and popped from: both are atomic

    def ring(self) -> None:
        if self._latch is not None:
            self._latch.set()
        self._call_back()

    def then_call(self, callback: Callable[[Any], object], receipt: SingleOutcome) -> None:
        """Call back once the receipt is settled; at once, on this thread, if it is."""
        if receipt.is_settled:  # the relay may still ring, and must not find this call
            self._relay.call(callback, receipt)
            return
        self._relay.keep(receipt)
        self._calls.append(partial(self._relay.call, callback, receipt))
        if receipt.is_settled:  # the relay may have rung before the call was in the list
            self._call_back()

    def _call_back(self) -> None:
        """Make each call once: by the thread that takes it from the list."""
        while self._calls:
            try:
                call = self._calls.pop(0)
            except IndexError:  # another thread was quicker
                return
            call()

    def until_settled(
        self, receipt: SingleOutcome | Counts, what: str, timeout_s: float | None
    ) -> None:
        """Wait until a receipt for ``what`` is settled.

        Raises:
            StillOpen: the time is up.
            PublisherClosed: the relay ended first.
            RelayHeldUp: an application callback is blocking the relay.
            WrongThread: this is the relay's own thread.
        """
        if receipt.is_settled:
            return
        timeout_s = seconds_of(timeout_s)
        self._relay.check_thread()
        with _first_to_wait:
            latch = self._latch = self._latch or Latch()  # from here on, `ring` sets it
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not receipt.is_settled:
            # in this order: the last turn of the relay may settle it
            if self._relay.is_ended and not receipt.is_settled:
                raise ended_first(what, self._relay.failure)
            left = 0.5 if deadline is None else min(0.5, deadline - time.monotonic())
            if left <= 0:
                raise still_open(what, timeout_s, self._relay.status)
            latch.wait(left)
            self._relay.check_held_up()


class SingleOutcome:
    """The outcome of one message, once it is known."""

    __slots__ = ("__weakref__", "_result", "_waiting", "message_id")
    _shown_as: ClassVar[str]

    def __init__(self, message_id: str, waiting: Waiting) -> None:
        self.message_id: str = message_id
        self._waiting = waiting
        self._result: Confirmed | PublishError | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the outcome is known."""
        return self._result is not None

    def _known(self) -> Confirmed:
        """Return or raise the outcome, which is known."""
        if isinstance(self._result, Confirmed):
            return self._result
        assert self._result is not None
        raise copy(self._result)  # else each caller's frames would stay with the one error

    def __repr__(self) -> str:
        """Show the message id and the outcome, or that it is open."""
        state = "open" if self._result is None else type(self._result).__name__.lower()
        return f"<{self._shown_as} {self.message_id} {state}>"


class SettledOne(SingleOutcome):
    """The methods by which the relay settles the receipt of one message."""

    __slots__ = ()

    def all_confirmed(self, _entries: Sequence[Entry]) -> None:
        """The message is confirmed."""
        self._result = Confirmed(self.message_id)
        self._waiting.ring()

    def given_up(self, entry: Entry, outcome: Outcome) -> None:
        """The message was parked or discarded, because of this outcome."""
        self._result = publish_error(entry, outcome)
        self._waiting.ring()

    def withdrawn(self, error: Withdrawn | Damaged) -> None:
        """The message was parked or discarded by an operator, or its row is damaged."""
        self._result = error
        self._waiting.ring()


class Counts:
    """The outcomes of many messages, in constant memory."""

    _shown_as: ClassVar[str]

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self.stored: int = 0
        self.confirmed: int = 0
        self.failed: int = 0
        self.failures: list[PublishError] = []

    @property
    def open(self) -> int:
        """Number of stored messages whose outcome is not known yet."""
        return self.stored - self.confirmed - self.failed

    @property
    def is_settled(self) -> bool:
        """Whether the outcomes of all stored messages are known."""
        return self.open == 0

    def __repr__(self) -> str:
        """Show the counts."""
        return (
            f"<{self._shown_as} {self.stored} stored, {self.confirmed} confirmed, "
            f"{self.failed} failed, {self.open} open>"
        )


class SettledMany(Counts):
    """The methods by which the relay settles the receipt of many messages."""

    # Pyright does not look in the base class for the type of what `+=` changes
    stored: int
    confirmed: int
    failed: int

    def accepted(self, messages: int) -> None:
        """Count messages that are stored now. Called before any of them is settled."""
        self.stored += messages

    def all_confirmed(self, entries: Sequence[Entry]) -> None:
        """Messages are confirmed."""
        self.confirmed += len(entries)
        self._tell_if_settled()

    def given_up(self, entry: Entry, outcome: Outcome) -> None:
        """A message was parked or discarded, because of this outcome."""
        self._failed(publish_error(entry, outcome))

    def withdrawn(self, error: Withdrawn | Damaged) -> None:
        """A message was parked or discarded by an operator, or its row is damaged."""
        self._failed(error)

    def _failed(self, error: PublishError) -> None:
        if len(self.failures) < FAILURES_KEPT:
            self.failures.append(error)
        self.failed += 1  # last: a thread that finds the receipt settled reads the failures
        self._tell_if_settled()

    def _tell_if_settled(self) -> None:
        if self.is_settled:
            self._waiting.ring()


class Receipt(SingleOutcome):
    """The receipt of one stored message; `result` waits for its outcome.

    Attributes:
        message_id: the AMQP ``message_id`` that consumers see on every attempt.
        is_settled: whether the outcome is known.
    """

    __slots__ = ()
    _shown_as = "Receipt"
    _waiting: _Waiting

    def __init__(self, message_id: str, relay: _Relay) -> None:
        super().__init__(message_id, _Waiting(relay))

    def result(self, timeout_s: float | None = None) -> Confirmed:
        """Wait for the outcome.

        Args:
            timeout_s: seconds, or None to wait without limit; a negative value counts as 0.

        Returns:
            the confirm.

        Raises:
            Unroutable: the broker returned the message; no queue is bound for it.
            Nacked: the broker nacked the message as often as the policy allows.
            Refused: the message made the broker close a channel or the connection, or cannot be
                encoded.
            Expired: the message's own deadline passed.
            Withdrawn: an operator parked or discarded the message.
            Damaged: the message's row in the outbox is damaged; it was parked.
            ConfigurationError: ``timeout_s`` is not a number.
            StillOpen: the wait timed out. The publisher keeps trying to publish the message.
            PublisherClosed: the publisher ended first. The message is in the outbox, if there is
                one.
            RelayHeldUp: an application callback is blocking the relay.
            WrongThread: called on the relay's thread, for instance by a hook.
        """
        self._waiting.until_settled(self, f"message {self.message_id}", timeout_s)
        return self._known()

    def add_done_callback(self, callback: Callable[[Receipt], object]) -> None:
        """Call a function with this receipt once the outcome is known and `result` no longer waits.

        The callback runs on the relay's thread, which publishes nothing until it returns. If the
        outcome is known already, it runs on the calling thread, before this call returns. Its
        exceptions are suppressed: on the relay's thread they are counted
        (``Status.callback_errors``), and the first one is logged; on the calling thread each is
        logged. It is never called if the publisher ends before the outcome is known.

        Args:
            callback: a function that takes the receipt.
        """
        self._waiting.then_call(callback, self)


class Issued(SettledOne, Receipt):
    """A `Receipt` that the relay can settle."""

    __slots__ = ()


class BatchReceipt(Counts):
    """The receipt of many stored messages, in constant memory.

    Attributes:
        stored: number of messages stored so far.
        confirmed: number of stored messages that are confirmed.
        failed: number of stored messages that were given up.
        open: number of stored messages whose outcome is not known yet.
        is_settled: whether the outcomes of all stored messages are known.
        failures: the errors of the first 1 000 messages that were given up.
    """

    _shown_as = "BatchReceipt"
    _waiting: _Waiting

    def __init__(self, relay: _Relay) -> None:
        super().__init__(_Waiting(relay))

    def wait(self, timeout_s: float | None = None) -> BatchReceipt:
        """Wait until every message has its outcome.

        Afterwards, ``failures`` holds the errors of the first 1 000 messages that were given up.

        Args:
            timeout_s: seconds, or None to wait without limit; a negative value counts as 0.

        Returns:
            this receipt.

        Raises:
            ConfigurationError: ``timeout_s`` is not a number.
            StillOpen: the wait timed out. The publisher keeps trying to publish the messages.
            PublisherClosed: the publisher ended first. Open messages are in the outbox, if there is
                one.
            RelayHeldUp: an application callback is blocking the relay.
            WrongThread: called on the relay's thread, for instance by a hook.
        """
        self._waiting.until_settled(self, "a batch", timeout_s)
        return self


class IssuedBatch(SettledMany, BatchReceipt):
    """A `BatchReceipt` that the relay can settle."""
