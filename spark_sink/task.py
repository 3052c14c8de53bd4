"""One attempt of a task: publishes its rows, and returns when every one of them is settled.

Knows: `Publisher` and its receipts, outcomes, patience. Must never know: Spark, Arrow's types.

Rows go out in slices, each with a receipt of its own. A slice is small enough for its receipt to
name every failure, and never holds one ``message_id`` twice, so that a failure names its row.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from reliablepub import (
    BatchReceipt,
    Link,
    Message,
    Nacked,
    OutboxFull,
    Publisher,
    PublishError,
    StillOpen,
    Unroutable,
)
from spark_sink.counts import Counts
from spark_sink.failures import PartitionStalled, RowsNotConfirmed
from spark_sink.rows import SLICE_ROWS_MAX, Invalid
from spark_sink.settings import Settings

SLICES_UNDER_WAY_MAX: Final = 16
"""Slices whose rows are kept until they are settled."""
_PACES_A_SECOND: Final = 10


@dataclass(frozen=True)
class _Slice:
    """Messages under way, and which rows they were.

    Attributes:
        receipt: counts their outcomes.
        messages: in order.
        rows: their numbers within the attempt.
    """

    receipt: BatchReceipt
    messages: list[Message]
    rows: list[int]


@dataclass(frozen=True)
class Failure:
    """A row that was not confirmed.

    Attributes:
        row: its number within the attempt.
        message_id: empty where it is no message.
        outcome: ``unroutable``, ``nacked``, ``refused`` or ``invalid``.
        reply_code: the broker's, or 0.
        reply_text: the broker's words, or ours.
    """

    row: int
    message_id: str
    outcome: str
    reply_code: int
    reply_text: str


class Sending:
    """Publishes the rows of one attempt.

    Args:
        publisher: lent for this attempt.
        settings: the options.
        partition: number of the partition, for errors.

    Attributes:
        counts: so far.
    """

    def __init__(self, publisher: Publisher, settings: Settings, partition: int) -> None:
        self.counts = Counts()
        self._publisher = publisher
        self._settings = settings
        self._partition = partition
        self._under_way: deque[_Slice] = deque()
        self._pace = _Pace(settings)

    def send(self, rows: Iterable[Message | Invalid], first_row: int) -> Iterator[Failure]:
        """Hand rows over, and report earlier ones that were not confirmed.

        Args:
            rows: of one piece of a batch.
            first_row: number of the first of them within the attempt.

        Raises:
            RowsNotConfirmed: one was not, and is not to be collected.
            PartitionStalled: nothing moves.
        """
        messages: list[Message] = []
        numbers: list[int] = []
        ids: set[str | None] = set()
        for row, item in enumerate(rows, first_row):
            self.counts.rows += 1
            if isinstance(item, Invalid):
                yield self._failed(Failure(row, "", "invalid", 0, item.problem))
                continue
            if item.message_id in ids:
                yield from self._hand_over(messages, numbers)
                messages, numbers, ids = [], [], set()
            messages.append(item)
            numbers.append(row)
            ids.add(item.message_id)
        yield from self._hand_over(messages, numbers)

    def finish(self) -> Iterator[Failure]:
        """Wait for the rest; then nothing is under way.

        Raises:
            RowsNotConfirmed: as `send`.
            PartitionStalled: as `send`.
        """
        while self._under_way:
            yield from self._settle()

    @property
    def oldest_open_row(self) -> int:
        """Rows before this one will not be reported any more."""
        return self._under_way[0].rows[0] if self._under_way else self.counts.rows

    # ------------------------------------------------------------------ inside

    def _hand_over(self, messages: list[Message], rows: list[int]) -> Iterator[Failure]:
        if not messages:
            return
        self._pace.wait(len(messages))
        try:
            receipt = self._publisher.publish_many(messages)
        except OutboxFull:  # which is the publisher's memory here
            raise self._stalled() from None
        self._under_way.append(_Slice(receipt, messages, rows))
        while self._under_way and (
            self._under_way[0].receipt.is_settled or len(self._under_way) > SLICES_UNDER_WAY_MAX
        ):
            yield from self._settle()

    def _settle(self) -> Iterator[Failure]:
        """Wait for the oldest slice."""
        oldest = self._under_way[0]
        try:
            oldest.receipt.wait(self._settings.delivery_timeout_s)
        except StillOpen:
            raise self._stalled() from None
        self._under_way.popleft()
        self.counts.confirmed += oldest.receipt.confirmed
        self.counts.bytes += sum(len(message.body) for message in oldest.messages)
        failures = oldest.receipt.failures
        assert len(failures) == oldest.receipt.failed, "a receipt keeps the failures of a slice"
        if failures:
            rows = {m.message_id: row for m, row in zip(oldest.messages, oldest.rows, strict=True)}
            for failure in failures:
                yield self._failed(_failure(failure, rows[failure.message_id]))

    def _failed(self, failure: Failure) -> Failure:
        """Count it, or fail the task."""
        asked = {
            "unroutable": self._settings.unroutable,
            "nacked": self._settings.refused,
            "refused": self._settings.refused,
            "invalid": self._settings.invalid,
        }
        if asked[failure.outcome] == "fail":
            raise RowsNotConfirmed(
                partition=self._partition,
                row=failure.row,
                message_id=failure.message_id,
                outcome=failure.outcome,
                reply_text=failure.reply_text,
            )
        self.counts.count(failure.outcome)
        return failure

    def _stalled(self) -> PartitionStalled:
        status = self._publisher.status
        reason = "the broker is connected and does not confirm"
        if status.link is not Link.CONNECTED:
            reason = f"{status.link}: {status.reason}" if status.reason else str(status.link)
        return PartitionStalled(
            partition=self._partition,
            confirmed=self.counts.confirmed,
            timeout_s=self._settings.delivery_timeout_s,
            reason=reason,
        )


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

    def __init__(self, settings: Settings) -> None:
        self._rate = 0.0
        if settings.max_rows_per_second is not None and settings.max_connections is not None:
            self._rate = settings.max_rows_per_second / settings.max_connections
        self._due = time.monotonic()

    def wait(self, rows: int) -> None:
        """Wait until so many more rows may go."""
        if not self._rate:
            return
        now = time.monotonic()
        self._due = max(self._due, now)
        time.sleep(self._due - now)
        self._due += rows / self._rate


def slice_rows(settings: Settings) -> int:
    """Rows of a slice: fewer where a rate is to be kept, so that it is kept every moment."""
    if settings.max_rows_per_second is None or settings.max_connections is None:
        return SLICE_ROWS_MAX
    share = settings.max_rows_per_second / settings.max_connections
    return max(1, min(SLICE_ROWS_MAX, int(share / _PACES_A_SECOND)))


def outcome_columns(failure: Failure, partition: int) -> dict[str, Any]:
    """A failure as the report keeps it."""
    return {
        "_outcome": failure.outcome,
        "_reply_code": failure.reply_code,
        "_reply_text": failure.reply_text,
        "_message_id": failure.message_id or None,
        "_partition": partition,
        "_row": failure.row,
    }
