"""The writer that Spark carries to its tasks, and its commit; one class for batch and streaming.

Knows: Spark's writer protocol, and what a task may know of its query. Must never know: how a row
becomes a message.

The writer is made on the driver, pickled, and used in three kinds of processes: `write` in the
Python workers of executors, `commit` and `abort` in one beside the driver. Nothing it is told in
one of them is known in another, but what commit messages carry.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)

from reliablepub import ConfigurationError
from spark_sink import report
from spark_sink.connection import publisher
from spark_sink.counts import Counts, Written
from spark_sink.identity import ByContent, ByPosition, Identity
from spark_sink.rows import Rows, slices
from spark_sink.schema import Columns
from spark_sink.settings import Settings
from spark_sink.task import Failure, Sending, outcome_columns, slice_rows

LOGGER: Final = logging.getLogger("reliablepub.spark")


@dataclass(frozen=True)
class _Attempt:
    """One attempt of a task.

    Attributes:
        write: identity of the write: the same for every attempt, and for a replay.
        partition: number of the partition.
        number: of the attempt, from 0.
        name: different from all other attempts.
    """

    write: str
    partition: int
    number: int
    name: str


# Spark 4.0 has no Arrow writer for streams of its own; with these two bases, all versions from 4.0
# on hand Arrow batches to both.
class RabbitMQWriter(DataSourceArrowWriter, DataSourceStreamWriter):
    """Publishes the rows of a DataFrame.

    Args:
        settings: the options.
        columns: where each property comes from.
        write_id: identity of a batch write; None for a stream, whose query and batch have one.
    """

    def __init__(self, settings: Settings, columns: Columns, write_id: str | None) -> None:
        self._settings = settings
        self._columns = columns
        self._write_id = write_id

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Publish a partition; returns when every row is settled (on an executor).

        Raises:
            RowsNotConfirmed: a row was not confirmed, and is not to be collected.
            PartitionStalled: nothing moves; Spark tries again.
            ConfigurationError: this host does not have what the options name.
        """
        since = time.monotonic()
        attempt = self._attempt()
        settings = self._settings
        if settings.max_connections is not None and attempt.partition >= settings.max_connections:
            raise ConfigurationError(
                f"there are more partitions than maxConnections={settings.max_connections}; "
                f"write df.coalesce({settings.max_connections})"
            )
        kept = report.FailedRows(settings.report, attempt.name) if settings.report else None
        try:
            with publisher(settings) as lent:
                sending = Sending(lent, settings, attempt.partition)
                self._publish(iterator, sending, attempt, kept)
        except BaseException:
            if kept is not None:
                kept.discard()
            raise
        return Written(
            write=attempt.write,
            partition=attempt.partition,
            attempt=attempt.number,
            counts=sending.counts,
            failed_file=kept.close() if kept is not None else None,
            seconds=time.monotonic() - since,
        )

    def commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int | None = None,  # noqa: N803 - Spark's name
    ) -> None:
        """Every row of every partition is settled (beside the driver)."""
        del batchId  # the messages know it
        written = _written(messages)
        if self._settings.report is not None and written:
            report.commit(self._settings.report, written)

    def abort(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int | None = None,  # noqa: N803 - Spark's name
    ) -> None:
        """Some task has failed for good: say what may have been sent, and never raise.

        An error from here would take the place of the one that explains the failure.
        """
        try:
            written = _written(messages)
            total = Counts.total(message.counts for message in written)
            LOGGER.error(
                "write %s aborted: %d of %d partitions are finished, %d of their rows confirmed; "
                "rows of the others may have been sent, and some tasks may still be sending. "
                "Replayed, they come with the same ids",
                self._write_id or f"of batch {batchId}",
                len(written),
                len(messages),
                total.confirmed,
            )
            if self._settings.report is not None:
                report.abort(self._settings.report, written)
        except Exception:
            LOGGER.exception("abort: the report could not be cleaned up")

    # ------------------------------------------------------------------ inside

    def _publish(
        self,
        batches: Iterator[pa.RecordBatch],
        sending: Sending,
        attempt: _Attempt,
        kept: report.FailedRows | None,
    ) -> None:
        rows = Rows(self._columns, self._identity(attempt))
        pieces = _Pieces()
        rows_max = slice_rows(self._settings)
        for batch in batches:
            for piece in slices(batch, rows_max):
                first = sending.counts.rows
                pieces.add(first, piece)
                for failure in sending.send(rows.messages(piece), first):
                    pieces.keep(failure, attempt.partition, kept)
                pieces.forget(sending.oldest_open_row)
        for failure in sending.finish():
            pieces.keep(failure, attempt.partition, kept)

    def _identity(self, attempt: _Attempt) -> Identity:
        kind = ByPosition if self._settings.identity == "position" else ByContent
        constant = (sorted(self._columns.fixed.items()), sorted(self._columns.positions))
        return kind(attempt.write, attempt.partition, constant)

    def _write_of(self, micro_batch: str | None) -> str:
        """The identity of the write; of one in `foreachBatch`, with that of the micro-batch."""
        if self._write_id is None:
            assert micro_batch, "Spark tells a task of a stream its query and its batch"
            return micro_batch
        if micro_batch is None:
            return self._write_id
        if self._settings.write_id is None and "message_id" not in self._columns.positions:
            # Two writes of one micro-batch may hold equal rows, and nothing but a name tells them
            # apart; with a name made at random, a replay would not be recognized.
            raise ConfigurationError(
                "a write in foreachBatch needs a name that it has again when its batch is "
                "replayed: give each such write a 'writeId' of its own, such as "
                "f'orders-{batch_id}', or its rows a column 'message_id'"
            )
        return f"{micro_batch}-{self._write_id}"

    def _attempt(self) -> _Attempt:
        context = TaskContext.get()
        assert context is not None, "Spark calls write() in a task"
        write = self._write_of(_micro_batch(context))
        partition = context.partitionId()
        name = f"{write}-{partition}-{context.taskAttemptId()}"
        return _Attempt(write, partition, context.attemptNumber(), name)


def _micro_batch(context: TaskContext) -> str | None:
    """Which query and batch a task works for: the same when they are replayed; None for neither."""
    query = context.getLocalProperty("sql.streaming.queryId")
    batch = context.getLocalProperty("streaming.sql.batchId")
    return f"{query}-{batch}" if query and batch else None


class _Pieces:
    """Pieces of batches whose rows may still be reported as failed."""

    def __init__(self) -> None:
        self._pieces: dict[int, pa.RecordBatch] = {}

    def add(self, first_row: int, piece: pa.RecordBatch) -> None:
        self._pieces[first_row] = piece

    def forget(self, before: int) -> None:
        """Let go of pieces that end before this row."""
        for first, piece in list(self._pieces.items()):
            if first + piece.num_rows > before:
                return
            del self._pieces[first]

    def keep(self, failure: Failure, partition: int, kept: report.FailedRows | None) -> None:
        assert kept is not None, "'collect' needs 'report'"
        for first, piece in self._pieces.items():
            if first <= failure.row < first + piece.num_rows:
                row = piece.slice(failure.row - first, 1)
                kept.add(row, outcome_columns(failure, partition))
                return
        raise AssertionError(f"row {failure.row} is not under way")


def _written(messages: Sequence[WriterCommitMessage | None]) -> list[Written]:
    return [message for message in messages if isinstance(message, Written)]
