"""One task attempt: publishes its rows, and waits until each of them is settled.

Knows: `Publisher` and its receipts, outcomes, timeouts. Must never know: Spark, Arrow's types.

Rows are published in slices, each with its own receipt. A slice is small enough for its receipt to
list every failure, and never holds a ``message_id`` twice, so that a failure identifies its row.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from reliablepub import BatchReceipt, Link, Message, Nacked, PublishError, StillOpen, Unroutable
from spark_sink.connection import OPEN_BYTES_MAX, Lent
from spark_sink.contact import Refusals
from spark_sink.failures import PartitionStalled, RowsNotConfirmed
from spark_sink.report import Counts
from spark_sink.rows import SLICE_ROWS_MAX, Invalid
from spark_sink.settings import Settings

SLICES_UNDER_WAY_MAX: Final = 16
"""Most slices under way: their rows are kept until they are settled."""
_ROWS_UNDER_WAY_MIN: Final = 2_000
_BYTES_UNDER_WAY_MIN: Final = 32 * 1024 * 1024
"""Rows and bytes that may be under way in any case, also with small windows."""
_LOOK_S: Final = 0.5
"""Seconds between two checks for progress by a waiting task."""
_PACES_A_SECOND: Final = 10


@dataclass(frozen=True)
class _Slice:
    """Messages under way, and the rows they were made of.

    Attributes:
        receipt: counts their outcomes.
        messages: the messages, in order.
        rows: numbers of the rows within the attempt.
        size: bytes of the messages in memory.
    """

    receipt: BatchReceipt
    messages: list[Message]
    rows: Sequence[int]
    size: int

    @property
    def settled(self) -> int:
        """Messages whose outcome is known."""
        return self.receipt.confirmed + self.receipt.failed

    def failures(self) -> list[Failure]:
        """The messages given up so far."""
        errors = self.receipt.failures
        if not errors:
            return []
        rows = {m.message_id: row for m, row in zip(self.messages, self.rows, strict=True)}
        return [_failure(error, rows[error.message_id]) for error in errors]


@dataclass(frozen=True)
class Failure:
    """A row that was not confirmed.

    Attributes:
        row: its number within the attempt.
        message_id: id of its message; empty if the row cannot be a message.
        outcome: ``unroutable``, ``nacked``, ``refused`` or ``invalid``.
        reply_code: the broker's reply code, or 0.
        reply_text: the broker's reply text, or the sink's explanation if the broker sent none.
    """

    row: int
    message_id: str
    outcome: str
    reply_code: int
    reply_text: str


class Sending:
    """Publishes the rows of one attempt.

    Args:
        lent: the publisher, for this attempt.
        settings: the options.
        partition: number of the partition, for errors.
        rate: most rows per second of this task; None for no limit.

    Attributes:
        counts: rows so far, by outcome.
        rate: most rows per second of this task; None for no limit.
    """

    def __init__(
        self, lent: Lent, settings: Settings, partition: int, rate: float | None = None
    ) -> None:
        self.counts: Final = Counts()
        self._lent = lent
        self._resent_before = lent.resent
        self._settings = settings
        self._partition = partition
        self.rate = rate
        self._under_way: deque[_Slice] = deque()
        self._invalid: list[Failure] = []
        self._rows_under_way = self._size_under_way = 0
        self._rows_max = max(4 * settings.window, _ROWS_UNDER_WAY_MIN)
        bytes_max = max(2 * settings.window_bytes, _BYTES_UNDER_WAY_MIN)
        self._size_max = min(bytes_max, OPEN_BYTES_MAX // 2)
        self._pace = _Pace(rate)

    def send(self, rows: Iterable[Message | Invalid], first_row: int) -> Iterator[Failure]:
        """Publish rows, and yield failures of rows published before.

        Args:
            rows: the rows of one piece of a batch.
            first_row: number of the first of them within the attempt.

        Raises:
            RowsNotConfirmed: a row was not confirmed, and its outcome is not collected.
            PartitionStalled: the broker answered nothing within ``deliveryTimeout``.
            BrokerRefused: the broker or TLS refuses the connection.
        """
        rows = list(rows)
        messages = [item for item in rows if not isinstance(item, Invalid)]
        if len({message.message_id for message in messages}) == len(rows):
            self.counts.rows += len(rows)
            yield from self._hand_over(messages, range(first_row, first_row + len(rows)))
        else:
            yield from self._send_apart(rows, first_row)

    def _send_apart(self, rows: list[Message | Invalid], first_row: int) -> Iterator[Failure]:
        """Publish rows of which some are invalid, or share an id."""
        messages: list[Message] = []
        numbers: list[int] = []
        ids: set[str | None] = set()
        numbered = enumerate(rows, first_row)
        for row, item in numbered:
            self.counts.rows += 1
            if isinstance(item, Invalid):
                failure = _invalid(row, item)
                if self._is_fatal(failure):
                    more = [
                        _invalid(n, other) for n, other in numbered if isinstance(other, Invalid)
                    ]
                    self._invalid = [failure, *more]
                yield self._failed(failure)
                continue
            if item.message_id in ids:
                yield from self._hand_over(messages, numbers)
                messages, numbers, ids = [], [], set()
            messages.append(item)
            numbers.append(row)
            ids.add(item.message_id)
        yield from self._hand_over(messages, numbers)

    def finish(self) -> Iterator[Failure]:
        """Wait until every row is settled, and yield the remaining failures.

        Raises:
            RowsNotConfirmed: a row was not confirmed, and its outcome is not collected.
            PartitionStalled: the broker answered nothing within ``deliveryTimeout``.
            BrokerRefused: the broker or TLS refuses the connection.
        """
        while self._under_way:
            yield from self._settle()
        self._pace.wait(0)
        resent = self._lent.resent - self._resent_before  # a row may lose its confirm twice
        self.counts.duplicates_risked = min(resent, self.counts.rows)

    def fatal(self) -> list[Failure]:
        """All rows known so far that fail the task, in the order of their numbers.

        `RowsNotConfirmed` needs only one; the report keeps all of them for correction.
        """
        found = [failure for slice_ in self._under_way for failure in slice_.failures()]
        found = [*self._invalid, *(failure for failure in found if self._is_fatal(failure))]
        return sorted(found, key=lambda failure: failure.row)

    @property
    def oldest_open_row(self) -> int:
        """Number of the oldest row that may still fail; all rows before it are settled."""
        return self._under_way[0].rows[0] if self._under_way else self.counts.rows

    # ------------------------------------------------------------------ inside

    def _hand_over(self, messages: list[Message], rows: Sequence[int]) -> Iterator[Failure]:
        if not messages:
            return
        size = sum([message.size for message in messages])
        while self._under_way and not self._has_room(len(messages), size):
            yield from self._settle()
        self._pace.wait(len(messages))
        receipt = self._lent.publisher.publish_many(messages)
        self._under_way.append(_Slice(receipt, messages, rows, size))
        self._rows_under_way += len(messages)
        self._size_under_way += size
        while self._under_way and self._under_way[0].receipt.is_settled:
            yield from self._settle()

    def _has_room(self, rows: int, size: int) -> bool:
        """Whether this much more may be under way.

        Checked here because the publisher would block without a look at the timeout.
        """
        return (
            len(self._under_way) < SLICES_UNDER_WAY_MAX
            and self._rows_under_way + rows <= self._rows_max
            and self._size_under_way + size <= self._size_max
        )

    def _settle(self) -> Iterator[Failure]:
        """Wait for the oldest slice, and yield its failures."""
        oldest = self._under_way[0]
        if not oldest.receipt.is_settled:
            self._wait_for(oldest.receipt)
        failures = oldest.failures()
        assert len(failures) == oldest.receipt.failed, "a receipt keeps the failures of a slice"
        for failure in failures:
            yield self._failed(failure)
        self._under_way.popleft()
        self._rows_under_way -= len(oldest.messages)
        self._size_under_way -= oldest.size
        self.counts.confirmed += oldest.receipt.confirmed
        self.counts.bytes += sum([len(message.body) for message in oldest.messages])

    def _wait_for(self, receipt: BatchReceipt) -> None:
        """Wait for a receipt; each answer of the broker restarts ``deliveryTimeout``."""
        began = moved = time.monotonic()
        patience_s = self._settings.delivery_timeout_s
        answers = self._answers()
        refusals = Refusals()
        while True:
            try:
                receipt.wait(min(_LOOK_S, patience_s))
            except StillOpen:
                now = time.monotonic()
                if self._answers() != answers:
                    moved, answers = now, self._answers()
                elif now - moved >= patience_s:
                    raise self._stalled() from None
                refusals.look(self._lent.publisher.status, now)
            else:
                break
        self.counts.waited_s += time.monotonic() - began

    def _answers(self) -> tuple[int, int]:
        """Rows under way whose outcome is known; and refusals, after which rows may be retried."""
        return sum(slice_.settled for slice_ in self._under_way), self._lent.refusals

    def _is_fatal(self, failure: Failure) -> bool:
        asked = {
            "unroutable": self._settings.unroutable,
            "nacked": self._settings.refused,
            "refused": self._settings.refused,
            "invalid": self._settings.invalid,
        }
        return asked[failure.outcome] == "fail"

    def _failed(self, failure: Failure) -> Failure:
        """Count a collected failure, or fail the task."""
        if self._is_fatal(failure):
            raise RowsNotConfirmed(partition=self._partition, **asdict(failure))
        self.counts.count(failure.outcome)
        return failure

    def _stalled(self) -> PartitionStalled:
        status = self._lent.publisher.status
        reason = "the broker is connected and does not confirm"
        if status.link is not Link.CONNECTED:
            reason = f"{status.link}: {status.reason}" if status.reason else str(status.link)
        under_way = sum(slice_.receipt.confirmed for slice_ in self._under_way)
        return PartitionStalled(
            partition=self._partition,
            confirmed=self.counts.confirmed + under_way,
            open_=sum(slice_.receipt.open for slice_ in self._under_way),
            timeout_s=self._settings.delivery_timeout_s,
            reason=reason,
        )


def _invalid(row: int, item: Invalid) -> Failure:
    return Failure(row, "", "invalid", 0, item.problem)


def _failure(error: PublishError, row: int) -> Failure:
    if isinstance(error, Unroutable):
        outcome = "unroutable"
    else:
        outcome = "nacked" if isinstance(error, Nacked) else "refused"
    words = f"{error.reply_code} {error.reply_text}" if error.reply_code else error.reply_text
    text = (
        f"{words} (exchange {error.exchange!r}, routing key {error.routing_key!r}, "
        f"{error.attempts} attempts)"
    )
    return Failure(row, error.message_id, outcome, error.reply_code, text)


class _Pace:
    """Keeps a task to its share of ``maxRowsPerSecond``."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._due = time.monotonic()

    def wait(self, rows: int) -> None:
        """Wait until this many more rows may be published.

        At the end of a task, wait with none: its slot goes to the next task, which starts at once.
        """
        if self._rate is None:
            return
        now = time.monotonic()
        self._due = max(self._due, now)
        time.sleep(self._due - now)
        self._due += rows / self._rate


def slice_rows(rate: float | None) -> int:
    """Most rows of a slice: with a rate, a tenth of a second's rows, so that the flow is even."""
    if rate is None:
        return SLICE_ROWS_MAX
    return max(1, min(SLICE_ROWS_MAX, int(rate / _PACES_A_SECOND)))
