"""What a caller holds while a message is on its way: something to wait on that ends in an outcome.

Knows: outcomes, errors, waiting threads. Must never know: how outcomes come about, event loops.

The outcome of one message (`SingleOutcome`) and of many (`Counts`) does not depend on how a caller
waits: threads wait on the receipts of this module, asyncio tasks on those of
`reliablepub.front.async_receipt`. A caller sees the public part; how a receipt is settled is added
in a subclass, which publishers make and the relay holds (`Issued` is the waiter of one entry, and a
`Receipt`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, Protocol

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
from reliablepub.outbox.entry import Entry
from reliablepub.outcome import Confirmed, Outcome, OutcomeKind, Persistence
from reliablepub.relay.handover import Latch
from reliablepub.relay.status import Status, described, waits_for

_ERRORS: Final[dict[OutcomeKind, type[PublishError]]] = {
    OutcomeKind.RETURNED: Unroutable,
    OutcomeKind.NACKED: Nacked,
    OutcomeKind.REFUSED: Refused,
    OutcomeKind.EXPIRED: Expired,
}
FAILURES_KEPT: Final = 1_000
"""How many failures a `BatchReceipt` keeps; all are counted, and all are in the outbox."""


class _Relay(Protocol):
    """Tells whether anybody will still settle anything."""

    @property
    def is_ended(self) -> bool:
        """True when the relay takes no more turns."""

    @property
    def failure(self) -> BaseException | None:
        """Why, if it ended on its own."""

    @property
    def status(self) -> Status:
        """How it is doing."""

    def check_thread(self) -> None:
        """Raises `WrongThread` on the relay's own."""

    def check_held_up(self) -> None:
        """Raises `HeldUp` while a callback does not let the relay go on."""


def publish_error(entry: Entry, outcome: Outcome) -> PublishError:
    """The error that a final outcome other than confirmed is raised as."""
    message = entry.message
    refusals = max(1, entry.nacked + entry.returned + entry.refused)
    return _ERRORS[outcome.kind](
        message_id=message.message_id or "",
        exchange=message.exchange,
        routing_key=message.routing_key,
        reply_code=outcome.reply_code,
        reply_text=outcome.reply_text,
        attempts=entry.attempts if outcome.kind is OutcomeKind.EXPIRED else refusals,
        may_have_arrived=entry.persistence is not Persistence.NOT_WRITTEN,
        is_kept=not entry.is_discarded,
    )


def ended_first(what: str, failure: BaseException | None) -> PublisherClosed:
    """Nobody is left to tell the outcome."""
    if failure is None:
        return PublisherClosed(f"the publisher ended before the outcome of {what} was known")
    error = PublisherFailed(f"the outcome of {what} is not known: {described(failure)}")
    error.__cause__ = failure
    return error


def still_open(what: str, timeout_s: float | None, status: Status) -> StillOpen:
    """The wait is over, and the outcome not known; says what the publisher waits for."""
    told = f"{what} is still open after {timeout_s or 0:g} s; it goes on being published"
    return StillOpen("; ".join([told, *waits_for(status)]))


_first_to_wait: Final = threading.RLock()
"""Taken by those who wait alone, and not by the relay: so a signal handler that interrupts one of
them, and waits in turn, keeps nobody from ending both waits."""


class _Waiting:
    """A lazy latch: most receipts are settled without anybody waiting on them."""

    __slots__ = ("_latch", "_relay", "_what")

    def __init__(self, relay: _Relay, what: str) -> None:
        self._relay = relay
        self._what = what
        self._latch: Latch | None = None

    def notify(self) -> None:
        if self._latch is not None:
            self._latch.set()

    def until(self, is_done: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait; raises `StillOpen` when time is up, `PublisherClosed` when nobody can tell."""
        if is_done():
            return
        self._relay.check_thread()
        with _first_to_wait:
            latch = self._latch = self._latch or Latch()  # and from here on `notify` finds it
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_done():
            if self._relay.is_ended and not is_done():  # asked in this order: it may just have been
                raise ended_first(self._what, self._relay.failure)
            left = 0.5 if deadline is None else min(0.5, deadline - time.monotonic())
            if left <= 0:
                raise still_open(self._what, timeout_s, self._relay.status)
            latch.wait(left)
            self._relay.check_held_up()


class SingleOutcome:
    """The outcome of one message, once it is known."""

    __slots__ = ("_result", "message_id")
    _shown_as: ClassVar[str]

    def __init__(self, message_id: str) -> None:
        self.message_id: str = message_id
        self._result: Confirmed | PublishError | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the outcome is known."""
        return self._result is not None

    def _tell(self) -> None:
        """Wake whoever waits for it."""
        raise NotImplementedError

    def _known(self) -> Confirmed:
        """The outcome, which is known."""
        if isinstance(self._result, Confirmed):
            return self._result
        assert self._result is not None
        raise self._result

    def __repr__(self) -> str:
        """Name the message and where it stands."""
        state = "open" if self._result is None else type(self._result).__name__.lower()
        return f"<{self._shown_as} {self.message_id} {state}>"


class SettledOne(SingleOutcome):
    """How the relay tells the outcome of one message."""

    __slots__ = ()

    def all_confirmed(self, _entries: Sequence[Entry]) -> None:
        """It is confirmed."""
        self._result = Confirmed(self.message_id)
        self._tell()

    def given_up(self, entry: Entry, outcome: Outcome) -> None:
        """It was parked or discarded, because of this outcome."""
        self._result = publish_error(entry, outcome)
        self._tell()

    def withdrawn(self, error: Withdrawn | Damaged) -> None:
        """It was parked or discarded by a person, or for damage."""
        self._result = error
        self._tell()


class Counts:
    """The outcomes of many messages, in constant memory."""

    _shown_as: ClassVar[str]

    def __init__(self) -> None:
        self.stored: int = 0
        self.confirmed: int = 0
        self.failed: int = 0
        self.failures: list[PublishError] = []

    @property
    def open(self) -> int:
        """Messages whose outcome is not known yet."""
        return self.stored - self.confirmed - self.failed

    @property
    def is_settled(self) -> bool:
        """Whether all outcomes are known."""
        return self.open == 0

    def _tell(self) -> None:
        """Wake whoever waits for the last of them."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """Count, without naming messages."""
        return (
            f"<{self._shown_as} {self.stored} stored, {self.confirmed} confirmed, "
            f"{self.failed} failed, {self.open} open>"
        )


class SettledMany(Counts):
    """How the relay tells the outcomes of many messages."""

    def accepted(self, messages: int) -> None:
        """So many more are stored (told before any of them is settled)."""
        self.stored += messages

    def all_confirmed(self, entries: Sequence[Entry]) -> None:
        """These are confirmed."""
        self.confirmed += len(entries)
        self._tell_if_settled()

    def given_up(self, entry: Entry, outcome: Outcome) -> None:
        """One of them was parked or discarded, because of this outcome."""
        self._failed(publish_error(entry, outcome))

    def withdrawn(self, error: Withdrawn | Damaged) -> None:
        """One of them was, by a person or for damage."""
        self._failed(error)

    def _failed(self, error: PublishError) -> None:
        self.failed += 1
        if len(self.failures) < FAILURES_KEPT:
            self.failures.append(error)
        self._tell_if_settled()

    def _tell_if_settled(self) -> None:
        if self.is_settled:
            self._tell()


class Receipt(SingleOutcome):
    """The promise of one message: it is stored, and its outcome will be known.

    Attributes:
        message_id: the AMQP ``message_id`` under which consumers see it, on every attempt.
        is_settled: whether the outcome is known.
    """

    __slots__ = ("_waiting",)
    _shown_as = "Receipt"

    def __init__(self, message_id: str, relay: _Relay) -> None:
        super().__init__(message_id)
        self._waiting = _Waiting(relay, f"message {message_id}")

    def result(self, timeout: float | None = None) -> Confirmed:
        """Wait for the outcome.

        Args:
            timeout: seconds, or None to wait as long as it takes.

        Returns:
            that it is confirmed.

        Raises:
            Unroutable: the broker returned it; no queue is bound.
            Nacked: the broker refused it, as often as the policy allows.
            Refused: the broker closed a channel because of it.
            Expired: its own deadline passed first.
            Withdrawn: a person parked or discarded it first.
            Damaged: its row in the outbox is not what was stored; it is parked.
            StillOpen: the wait ended first; it goes on being published.
            PublisherClosed: the publisher ended first; it is in the outbox, if there is one.
        """
        self._waiting.until(lambda: self.is_settled, timeout)
        return self._known()

    def _tell(self) -> None:
        self._waiting.notify()


class Issued(SettledOne, Receipt):
    """A receipt as a publisher makes it, and hands it to the relay."""

    __slots__ = ()


class BatchReceipt(Counts):
    """The promise of many messages, in constant memory.

    Attributes:
        stored: messages accepted so far.
        confirmed: of those, confirmed.
        failed: of those, given up.
        open: of those, without an outcome yet.
        is_settled: whether none is open.
        failures: the errors of the first 1 000 that were given up.
    """

    _shown_as = "BatchReceipt"

    def __init__(self, relay: _Relay) -> None:
        super().__init__()
        self._waiting = _Waiting(relay, "a batch")

    def wait(self, timeout: float | None = None) -> BatchReceipt:
        """Wait until every message has its outcome; look at ``failures`` afterwards.

        Args:
            timeout: seconds, or None to wait as long as it takes.

        Raises:
            StillOpen: the wait ended first; they go on being published.
            PublisherClosed: the publisher ended first.
        """
        self._waiting.until(lambda: self.is_settled, timeout)
        return self

    def _tell(self) -> None:
        self._waiting.notify()


class IssuedBatch(SettledMany, BatchReceipt):
    """A receipt as a publisher makes it, and hands it to the relay."""
