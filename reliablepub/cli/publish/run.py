"""One run of ``reliablepub publish``: publishes lines, counts outcomes, and decides when to stop.

Knows: the publisher, the order of the steps, and every reason to end early. Must never know: where
lines come from, or how the result is shown.

Messages are published in groups; the publisher stores each group in one transaction. The first
message forms a group alone, and the run waits up to 1 s for its outcome: a misspelt exchange then
parks one message and not the whole file. Groups are published one at a time, so the stored records
are always a prefix of the input; a resumed run relies on that.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

from reliablepub.cli.link import LinkNotes
from reliablepub.cli.progress import Bar
from reliablepub.cli.publish.records import BadRecord, Line
from reliablepub.cli.signals import Stop
from reliablepub.errors import (
    Damaged,
    Expired,
    InvalidMessage,
    Nacked,
    OutboxError,
    PublisherClosed,
    PublishError,
    Refused,
    RelayHeldUp,
    Unroutable,
    Withdrawn,
)
from reliablepub.front.publisher import Publisher
from reliablepub.front.receipt import BatchReceipt
from reliablepub.message import Message
from reliablepub.relay.handover import CHUNK_BYTES_MAX, CHUNK_MESSAGES_MAX
from reliablepub.relay.status import Link, Status

FAILURES_SHOWN: Final = 10
ENDS: Final[dict[type[PublishError], str]] = {
    Unroutable: "returned",
    Nacked: "nacked",
    Refused: "refused",
    Expired: "expired",
    Withdrawn: "withdrawn",
    Damaged: "damaged",
}
"""How a message can end without a confirm, as the result names it."""


@dataclass(slots=True)
class Tally:
    """Counts over the receipts of a run, one for each group."""

    stored: int = 0  # accepted, without an outbox
    confirmed: int = 0
    given_up: Counter[str] = field(default_factory=Counter)  # by one of `ENDS`
    failures: list[tuple[str, PublishError]] = field(default_factory=list)  # the first ten given up
    _open: list[BatchReceipt] = field(default_factory=list)
    _confirmed_before: int = 0  # by receipts that are settled

    @property
    def parked(self) -> int:
        """Number of messages given up, for any reason."""
        return self.given_up.total()

    @property
    def open(self) -> int:
        """Number of messages without a final outcome."""
        return self.stored - self.confirmed - self.parked

    def add(self, receipt: BatchReceipt) -> None:
        """Add the messages of a receipt."""
        self.stored += receipt.stored
        self._open.append(receipt)

    def gather(self) -> None:
        """Count the messages settled since the last call, and drop receipts that are settled."""
        still_open: list[BatchReceipt] = []
        for receipt in self._open:
            is_settled = receipt.is_settled  # first: a settled receipt gets no more failures
            while receipt.failures:  # counted ones are dropped: a million need no memory
                failure = receipt.failures.pop(0)
                end = ENDS[type(failure)]
                self.given_up[end] += 1
                if len(self.failures) < FAILURES_SHOWN:
                    self.failures.append((end, failure))
            if is_settled:
                self._confirmed_before += receipt.confirmed
            else:
                still_open.append(receipt)
        self._open = still_open
        self.confirmed = self._confirmed_before + sum(one.confirmed for one in still_open)


CONNECT_S: Final = 10.0
"""Longest wait for a first connection; a shorter ``--timeout`` applies to it too."""


class Patience:
    """A timeout that restarts whenever a message is settled."""

    def __init__(self, timeout_s: float, now: float) -> None:
        self._timeout_s = timeout_s
        self._settled = 0
        self._since = now  # the wait for the first connection begins here

    def renew(self, now: float) -> None:
        """Restart the timeout: the wait begins now."""
        self._since = now

    def is_over(self, status: Status, now: float) -> bool:
        """Whether the timeout has passed."""
        counters = status.counters
        settled = counters.stored - counters.open
        if settled != self._settled:
            self._settled = settled
            self._since = now
        is_unreached = status.connects == 0
        limit_s = min(self._timeout_s, CONNECT_S) if is_unreached else self._timeout_s
        return now - self._since >= limit_s


LOOK_S: Final = 0.1
FIRST_OUTCOME_S: Final = 1.0
MEMORY_BYTES_MAX: Final = 64 * 1024 * 1024
"""Limit of open messages without an outbox; a single larger message is still accepted."""


RELAY_GONE: Final = (PublisherClosed, RelayHeldUp)
"""Errors of a publisher whose relay has failed, or waits for a hook that does not return."""


class Stopped(StrEnum):
    """Why a run ended before every message was settled."""

    BAD_INPUT = "bad input"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    NOT_DUE = "not due"
    INTERRUPTED = "interrupted"
    OUTBOX = "outbox"


class _Ended(Exception):
    """The run stores nothing more, and waits for nothing more."""

    def __init__(self, stopped: Stopped) -> None:
        super().__init__()
        self.stopped = stopped


_ERRORS: Final = (_Ended, BadRecord, InvalidMessage, OutboxError, *RELAY_GONE, OSError)


def _reason(error: BaseException) -> tuple[Stopped, str]:
    """Why a run ended that ended with this error, and the error in one line."""
    match error:
        case _Ended():
            return error.stopped, ""
        case BadRecord() | InvalidMessage():  # the second one: of the publisher's outbox
            return Stopped.BAD_INPUT, str(error)
        case OSError():
            return Stopped.BAD_INPUT, f"the input cannot be read: {error.strerror}"
        case _:
            return Stopped.OUTBOX, str(error)


@dataclass(slots=True)
class Run:
    """Publishes one input."""

    publisher: Publisher
    source: str | None  # under this name, the outbox counts the stored records
    resumes: bool  # also waits for the messages of an earlier run
    open_messages_max: int | None  # without an outbox; None with one
    stop: Stop
    bar: Bar
    patience: Patience  # the timeout of every wait
    not_before: datetime | None = None  # no message is sent before; not waited for
    count_waiting: Callable[[], int] = lambda: 0  # messages in the outbox that wait for a time
    tally: Tally = field(default_factory=Tally)
    stopped: Stopped | None = None  # why the run ended early
    error: str = ""  # that ended the run, in one line
    last_link: Status = field(default_factory=Status)  # before the publisher was closed
    is_all_read: bool = False  # and stored
    _notes: LinkNotes = field(init=False)

    def __post_init__(self) -> None:
        """Print changes of the connection above the progress bars."""
        self._notes = LinkNotes(self.bar.say, is_eager=False)

    @property
    def has_open(self) -> bool:
        """Whether messages of this run, or of the earlier run that it resumes, are open."""
        return self.tally.open > 0 or (self.resumes and self.publisher.status.open > 0)

    def run(self, lines: Iterable[Line | None], message: Callable[[Line], Message]) -> None:
        """Publish, and wait for the outcomes."""
        with self.recording():
            self._store(lines, message)
            self.is_all_read = True
        if self.stopped in (None, Stopped.BAD_INPUT, Stopped.OUTBOX):
            with self.recording():
                self._await_outcomes()
        self.last_link = self.publisher.status
        # close() still waits up to 1 s for confirms of messages in flight. The others stay in the
        # outbox, if there is one.
        with self.recording():
            self.publisher.close(timeout_s=0)
        self._look()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Contain an error that ends the block; the first one is the reason of the run's end."""
        try:
            yield
        except _ERRORS as error:
            if self.stopped is None:
                self.stopped, self.error = _reason(error)

    # ------------------------------------------------------------------ storing

    def _store(self, lines: Iterable[Line | None], message: Callable[[Line], Message]) -> None:
        look_at = 0.0
        for group in _groups(lines, message):
            self._await_room(group)
            self.tally.add(self.publisher.publish_many(group, source=self.source))
            if self.tally.stored == len(group):
                self._await_first_outcome()
            if time.monotonic() >= look_at:  # a look costs time for each open group
                self._look()
                look_at = time.monotonic() + LOOK_S
            self._check_refused()
            self._pause(0)
        self._pause(0)  # a signal ends the lines too

    def _await_first_outcome(self) -> None:
        if self._is_early():
            return  # nothing is sent before `not_before`
        give_up_at = time.monotonic() + FIRST_OUTCOME_S
        while time.monotonic() < give_up_at and self.tally.open:
            self._pause(0.005)
            self._look()
            status = self.publisher.status
            if status.link is Link.BLOCKED or (status.link is not Link.CONNECTED and status.reason):
                return  # no outcome can come; storing goes on without it

    def _check_refused(self) -> None:
        """End if the broker refused a message and confirmed none: it would refuse the rest too."""
        if not self.tally.confirmed and self.tally.given_up[ENDS[Refused]]:
            raise _Ended(Stopped.REFUSED)

    def _await_room(self, group: list[Message]) -> None:
        """Without an outbox: wait until a group fits into memory."""
        if self.open_messages_max is None:
            return
        size = sum(message.size for message in group)
        self.patience.renew(time.monotonic())
        while self.tally.open and (
            self.tally.open + len(group) > self.open_messages_max
            or self.publisher.status.counters.open_bytes + size > MEMORY_BYTES_MAX
        ):
            self._look()
            self._check_refused()
            if self._has_failed():
                return  # storing the group raises the failure
            self._check_patience()
            self._pause(0.005)

    # ------------------------------------------------------------------ waiting

    def _await_outcomes(self) -> None:
        if self.publisher.status.connects:  # the wait for a first connection began with the run
            self.patience.renew(time.monotonic())
        while True:
            self._look()
            if not self.has_open or self._has_failed():  # closing the publisher raises the failure
                return
            if self._is_early():
                raise _Ended(Stopped.NOT_DUE)
            if not self.tally.open and self._has_sent_all():
                return
            self._check_patience()
            self._pause(0.02)

    def _has_sent_all(self) -> bool:
        """Whether the outbox holds nothing but messages whose time has not come.

        The messages of the earlier run cannot be told from others, such as an application's
        reminders for next month. Those that wait for an ordering key count as open.
        """
        status = self.publisher.flush(timeout_s=LOOK_S)
        try:
            return status.is_flushed and status.open <= self.count_waiting()
        except OutboxError:  # for now: the relay rides it out, and the timeout bounds the wait
            return False

    def _has_failed(self) -> bool:
        return self.publisher.status.link is Link.FAILED

    def _is_early(self) -> bool:
        return self.not_before is not None and datetime.now(UTC) < self.not_before

    def _check_patience(self) -> None:
        if self.patience.is_over(self.publisher.status, time.monotonic()):
            raise _Ended(Stopped.TIMEOUT)

    def _pause(self, seconds: float) -> None:
        """Wait this long; end the run at a signal."""
        if self.stop.is_set or (seconds and self.stop.wait(seconds)):
            raise _Ended(Stopped.INTERRUPTED)

    def _look(self) -> None:
        self.tally.gather()
        self._notes.look(self.publisher.status)
        self.bar.show("stored", self.tally.stored)
        self.bar.show("confirmed", self.tally.confirmed + self.tally.parked)


def _groups(
    lines: Iterable[Line | None], message: Callable[[Line], Message]
) -> Iterator[list[Message]]:
    """Groups of messages that are stored together: one message, then full chunks.

    A group ends early where reading would wait. The messages before a bad record are yielded before
    its error is raised.
    """
    group: list[Message] = []
    size = 0
    most = 1
    bad: BadRecord | None = None
    try:
        for line in lines:
            if line is not None:
                made = message(line)
                if group and size + made.size > CHUNK_BYTES_MAX:
                    yield group
                    group, size = [], 0
                group.append(made)
                size += made.size
            if group and (line is None or len(group) >= most):
                yield group
                group, size, most = [], 0, CHUNK_MESSAGES_MAX
    except BadRecord as error:
        bad = error
    if group:
        yield group
    if bad is not None:
        raise bad
