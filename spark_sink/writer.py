"""The writer that Spark sends to its tasks, and its commit; one class for batch and streaming.

Knows: Spark's writer protocol, and a task's view of its query. Must never know: how a row becomes a
message.

The writer is made on the driver, pickled, and used in several processes: `write` in the Python
workers of executors, `commit` and `abort` in a process beside the driver, where a stream makes
another writer. These share no state except the commit messages.
"""

from __future__ import annotations

import logging
import re
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
from spark_sink.cluster import check_connections, rate_of_task, slots, spread_s
from spark_sink.connection import publisher
from spark_sink.failures import SAME_IDS, RowsNotConfirmed, TasksNotHeard, in_one_line
from spark_sink.identity import ByColumns, ByContent, ByPosition, Identity
from spark_sink.pieces import Pieces
from spark_sink.report import Counts, Written
from spark_sink.rows import Rows, slices
from spark_sink.schema import Columns
from spark_sink.settings import Settings
from spark_sink.task import Sending, slice_rows

_RUN: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""Spark gives a streaming query its run id, a UUID, as job group."""
LOGGER: Final = logging.getLogger("reliablepub.spark")
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SPARKS_TIME: Final = "%y/%m/%d %H:%M:%S"
"""As in the other lines of the driver's log."""


@dataclass(frozen=True)
class _Attempt:
    """One attempt of a task.

    Attributes:
        write: identity of the write, equal in every attempt and replay.
        partition: number of the partition.
        number: number of the attempt, from 0.
        slots: most tasks that may run at once; None if unknown.
        run: the run of the streaming query; None outside of one.
    """

    write: str
    partition: int
    number: int
    slots: int | None
    run: str | None


# Spark 4.0 has no separate Arrow writer for streams. With these two bases, every version since 4.0
# passes Arrow batches to batch and streaming writes.
class RabbitMQWriter(DataSourceArrowWriter, DataSourceStreamWriter):
    """Publishes the rows of a DataFrame.

    Args:
        settings: the options.
        columns: the source of each message property.
        write_id: identity of a batch write; None for a stream, where query and batch identify it.
    """

    def __init__(self, settings: Settings, columns: Columns, write_id: str | None) -> None:
        self._settings = settings
        self._columns = columns
        self._write_id = write_id

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Publish a partition; returns when every row is settled (on an executor).

        Raises:
            RowsNotConfirmed: a row was not confirmed, and its outcome is not collected.
            PartitionStalled: no row was settled within ``deliveryTimeout``; Spark retries the task.
            BrokerRefused: the broker or TLS refuses the connection.
            RowsNotKept: rows that were not confirmed cannot be written to the report.
            ConfigurationError: this host lacks a file, variable or folder that the options name; or
                the function of `foreachBatch` has set a job group.
        """
        with in_one_line():
            attempt = self._attempt()
            kept = self._failed_rows(attempt)
            try:
                counts = self._publish(iterator, attempt, kept)
                failed_file = kept.close() if kept is not None else None
            except BaseException:
                if kept is not None:
                    kept.discard()
                raise
        return Written(
            write=attempt.write,
            partition=attempt.partition,
            counts=counts,
            failed_file=failed_file,
            run=attempt.run,
        )

    def commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int | None = None,  # noqa: N803 - Spark's name
    ) -> None:
        """Log the counts once every row of every partition is settled, and write the report.

        Runs beside the driver.

        Raises:
            TasksNotHeard: the commit message of a task is missing.
            ConfigurationError: the driver does not see the failed rows that a task has kept.
            ReportNotWritten: the folder of the report cannot be written.
        """
        written = _written(messages)
        with in_one_line():
            if len(written) < len(messages):
                missing = len(messages) - len(written)
                raise TasksNotHeard(missing=missing, tasks=len(messages), batch=batchId)
            settings = self._settings
            if settings.report is not None and written:
                keep, keep_days = settings.report_keep, settings.report_keep_days
                report.commit(settings.report, written, keep, keep_days)
        _tell(written[0].write if written else self._name(batchId), written)

    def abort(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int | None = None,  # noqa: N803 - Spark's name
    ) -> None:
        """Log what may have been sent after a task has failed for good; never raise.

        An error raised here would replace the one that explains the failure.
        """
        try:
            written = _written(messages)
            total = Counts.total(message.counts for message in written)
            LOGGER.error(
                "write %s aborted: %d of %d partitions are finished, %d of their rows confirmed; "
                "rows of the others may have been sent, and some tasks may still be sending; "
                "%s",
                self._name(batchId),
                len(written),
                len(messages),
                total.confirmed,
                SAME_IDS,
            )
            if self._settings.report is not None:
                report.abort(self._settings.report, written)
        except Exception:
            LOGGER.exception("abort: the report could not be cleaned up")

    # ------------------------------------------------------------------ inside

    def _name(self, batch: int | None) -> str:
        return self._write_id or f"of batch {batch}"

    def _failed_rows(self, attempt: _Attempt) -> report.FailedRows | None:
        settings = self._settings
        if settings.report is None or not settings.collects:
            return None
        return report.FailedRows(settings.report, attempt.write, attempt.partition, attempt.run)

    def _publish(
        self, batches: Iterator[pa.RecordBatch], attempt: _Attempt, kept: report.FailedRows | None
    ) -> Counts:
        settings, partition = self._settings, attempt.partition
        check_connections(settings, attempt.slots, partition)
        rate = rate_of_task(settings, attempt.slots)
        with publisher(settings, spread_s(partition, attempt.slots)) as lent:
            sending = Sending(lent, settings, partition, rate)
            pieces = Pieces(partition, kept)
            try:
                self._send(batches, Rows(self._columns, self._identity(attempt)), sending, pieces)
            except RowsNotConfirmed as error:
                raise pieces.named(
                    error, self._columns, settings.report, attempt.write, sending.fatal()
                ) from None
        counts = sending.counts
        if attempt.number > 0:
            counts.duplicates_risked = counts.rows
        return counts

    def _send(
        self, batches: Iterator[pa.RecordBatch], rows: Rows, sending: Sending, pieces: Pieces
    ) -> None:
        rows_max = slice_rows(sending.rate)
        for batch in batches:
            for piece in slices(batch, rows_max):
                first = sending.counts.rows
                pieces.add(first, piece)
                for failure in sending.send(rows.messages(piece), first):
                    pieces.keep(failure)
                pieces.forget(sending.oldest_open_row)
        for failure in sending.finish():
            pieces.keep(failure)

    def _identity(self, attempt: _Attempt) -> Identity | ByColumns:
        if self._columns.keys:
            return ByColumns([(key.name, key.kind) for key in self._columns.keys])
        kind = ByPosition if self._settings.identity == "position" else ByContent
        constant = (sorted(self._columns.fixed.items()), sorted(self._columns.positions))
        return kind(attempt.write, attempt.partition, constant)

    def _write_of(self, micro_batch: str | None) -> str:
        """The identity of the write; in `foreachBatch`, joined with that of the micro-batch."""
        if self._write_id is None:
            assert micro_batch, "Spark tells a task of a stream its query and its batch"
            return micro_batch
        if micro_batch is None:
            return self._write_id
        settings = self._settings
        if settings.write_id is None and (settings.collects or not self._columns.have_ids):
            # Two writes of one micro-batch may hold equal rows, and only a name tells them apart.
            # With a random name, a consumer could not recognize a replay, nor could the report.
            raise ConfigurationError(
                "a write in foreachBatch needs the same name when its batch is replayed: give each "
                "such write a 'writeId' of its own, such as f'orders-{batch_id}'. A write that "
                "does not collect rows may have ids of its rows instead (idColumns, or a column "
                "'message_id')"
            )
        return f"{micro_batch}-{self._write_id}"

    def _attempt(self) -> _Attempt:
        context = TaskContext.get()
        assert context is not None, "Spark calls write() in a task"
        micro_batch = _micro_batch(context)
        write = self._write_of(micro_batch)
        partition = context.partitionId()
        at_once = slots(context.getLocalProperty)
        run = context.getLocalProperty("spark.jobGroup.id") if micro_batch else None
        if run is not None and not _RUN.fullmatch(run):
            run = None
        if micro_batch and run is None and self._settings.collects:
            raise ConfigurationError(
                "the function of foreachBatch has set or cleared Spark's job group, by which a "
                "report tells a replay from a second write: call setJobGroup and clearJobGroup "
                "outside of the function, or use setJobDescription"
            )
        return _Attempt(write, partition, context.attemptNumber(), at_once, run)


def _micro_batch(context: TaskContext) -> str | None:
    """Query and batch of a task, equal in a replay; None outside of a streaming query."""
    query = context.getLocalProperty("sql.streaming.queryId")
    batch = context.getLocalProperty("streaming.sql.batchId")
    return f"{query}-{batch}" if query and batch else None


def _tell(write: str, written: Sequence[Written]) -> None:
    """Log the counts of a write in one line.

    A commit has a process of its own, whose stderr is the driver's log; nothing else can set up
    logging there.
    """
    if not LOGGER.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT, _SPARKS_TIME))
        LOGGER.addHandler(handler)
        LOGGER.setLevel(logging.INFO)
    total = Counts.total(message.counts for message in written)
    failed = {name: getattr(total, name) for name in ("unroutable", "nacked", "refused", "invalid")}
    LOGGER.log(
        logging.WARNING if total.failed or total.duplicates_risked else logging.INFO,
        "write %s: %d rows in %d partitions, %d confirmed%s, %d may have been sent twice; tasks "
        "waited %.1f s for confirms",
        write,
        total.rows,
        len(written),
        total.confirmed,
        "".join(f", {count} {name}" for name, count in failed.items() if count),
        total.duplicates_risked,
        total.waited_s,
    )


def _written(messages: Sequence[WriterCommitMessage | None]) -> list[Written]:
    return [message for message in messages if isinstance(message, Written)]
