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
    """Counts over all receipts of a run."""

    stored: int = 0  # accepted, without an outbox
    confirmed: int = 0
    given_up: Counter[str] = field(default_factory=Counter)  # by one of `ENDS`
    failures: list[tuple[str, PublishError]] = field(default_factory=list)  # the first ten given up
    _open: list[tuple[BatchReceipt, int]] = field(default_factory=list)
    _confirmed_before: int = 0

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
        self._open.append((receipt, 0))

    def gather(self) -> None:
        """Count the messages settled since the last call, and drop receipts that are complete.

        Counted failures are removed from their receipt, so a million failures need no memory.
        """
        still_open: list[tuple[BatchReceipt, int]] = []
        confirmed = 0
        for receipt, taken in self._open:
            seen = taken
            while receipt.failures:
                self._count(receipt.failures.pop(0))
                seen += 1
            # `confirmed` is read once: the relay's thread goes on counting.
            receipt_confirmed = receipt.confirmed
            if receipt_confirmed + seen == receipt.stored:
                self._confirmed_before += receipt_confirmed
            else:
                confirmed += receipt_confirmed
                still_open.append((receipt, seen))
        self._open = still_open
        self.confirmed = self._confirmed_before + confirmed

    def _count(self, failure: PublishError) -> None:
        end = ENDS[type(failure)]
        self.given_up[end] += 1
        if len(self.failures) < FAILURES_SHOWN:
            self.failures.append((end, failure))


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
ALIVE_S: Final = 1.0
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
    _look_at: float = 0.0
    _alive_at: float = 0.0

    def __post_init__(self) -> None:
        """Print changes of the connection above the progress bars."""
        self._notes = LinkNotes(self.bar.say, is_eager=False)

    @property
    def has_open(self) -> bool:
        """Whether messages of this run, or of the earlier run that it resumes, are open."""
        return self.tally.open > 0 or (self.resumes and self.publisher.status.open > 0)

    def run(self, lines: Iterable[Line | None], message: Callable[[Line], Message]) -> None:
        """Publish, and wait for the outcomes."""
        try:
            self._store(lines, message)
        except (BadRecord, InvalidMessage) as error:  # the second one: of the publisher's outbox
            self._end(Stopped.BAD_INPUT, str(error))
        except (OutboxError, *RELAY_GONE) as error:
            self._end(Stopped.OUTBOX, str(error))
        except OSError as error:
            self._end(Stopped.BAD_INPUT, f"the input cannot be read: {error.strerror}")
        try:
            self._await_outcomes()
        except RELAY_GONE as error:
            self._end(Stopped.OUTBOX, str(error))
        self.last_link = self.publisher.status
        # close() still waits up to 1 s for confirms of messages in flight. The others stay in the
        # outbox, if there is one.
        try:
            self.publisher.close(timeout_s=0)
        except RELAY_GONE as error:
            self._end(Stopped.OUTBOX, str(error))
        self._look()

    def end_for_outbox(self, error: OutboxError) -> None:
        """Record an error of the outbox that occurred after the run."""
        self._end(Stopped.OUTBOX, str(error))

    def _end(self, stopped: Stopped, error: str = "") -> None:
        if self.stopped is None:
            self.stopped, self.error = stopped, error

    # ------------------------------------------------------------------ storing

    def _store(self, lines: Iterable[Line | None], message: Callable[[Line], Message]) -> None:
        for group in _groups(lines, message):
            if not self._await_room(group):
                return
            self.tally.add(self.publisher.publish_many(group, source=self.source))
            if self.tally.stored == len(group):
                self._await_first_outcome()
            self._look_sometimes()
            if self._is_refused():
                self._end(Stopped.REFUSED)
                return
            if self.stop.is_set:
                break
        if self.stop.is_set:
            self._end(Stopped.INTERRUPTED)
        else:
            self.is_all_read = True

    def _await_first_outcome(self) -> None:
        if self._is_early():
            return  # nothing is sent before `not_before`
        give_up_at = time.monotonic() + FIRST_OUTCOME_S
        while time.monotonic() < give_up_at and self.tally.open and not self.stop.wait(0.005):
            self._look()
            status = self.publisher.status
            if status.link is Link.BLOCKED or (status.link is not Link.CONNECTED and status.reason):
                return  # no outcome can come; storing goes on without it

    def _is_refused(self) -> bool:
        """Whether the broker refused a message and confirmed none; it would refuse the rest too."""
        return not self.tally.confirmed and self.tally.given_up[ENDS[Refused]] > 0

    def _await_room(self, group: list[Message]) -> bool:
        """Without an outbox: wait until a group fits into memory; False if the run has to end."""
        if self.open_messages_max is None:
            return True
        size = sum(message.size for message in group)
        self.patience.renew(time.monotonic())
        while self.tally.open and (
            self.tally.open + len(group) > self.open_messages_max
            or self.publisher.status.counters.open_bytes + size > MEMORY_BYTES_MAX
        ):
            self._look_sometimes()
            self.tally.gather()
            if self._is_refused():
                self._end(Stopped.REFUSED)
                return False
            if self._is_wait_over():
                return False
            if self.stop.wait(0.005):
                self._end(Stopped.INTERRUPTED)
                return False
        return True

    # ------------------------------------------------------------------ waiting

    def _await_outcomes(self) -> None:
        if self.stopped in (Stopped.REFUSED, Stopped.INTERRUPTED):
            return
        if self.publisher.status.connects:  # the wait for a first connection began with the run
            self.patience.renew(time.monotonic())
        while True:
            self._look()
            if not self.has_open:
                return
            if self._is_early():
                self._end(Stopped.NOT_DUE)
                return
            if not self.tally.open and self._has_sent_all():
                return
            if self._is_wait_over():
                return
            if self.stop.wait(0.02):
                self._end(Stopped.INTERRUPTED)
                return

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

    def _is_wait_over(self) -> bool:
        now = time.monotonic()
        if now >= self._alive_at:
            self._alive_at = now + ALIVE_S
            self.publisher.flush(timeout_s=0)  # raises if the publisher has failed
        if self.patience.is_over(self.publisher.status, now):
            self._end(Stopped.TIMEOUT)
            return True
        return False

    def _is_early(self) -> bool:
        return self.not_before is not None and datetime.now(UTC) < self.not_before

    # ------------------------------------------------------------------ looking

    def _look_sometimes(self) -> None:
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._look()

    def _look(self) -> None:
        self.tally.gather()
        self._notes.look(self.publisher.status)
        tally = self.tally
        self.bar.show(stored=tally.stored, settled=tally.confirmed + tally.parked)


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
