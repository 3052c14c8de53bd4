"""A sink whose tasks meet with trouble, always the same: imported by Spark's Python workers.

Knows: the writer's protocol. Must never know: what the tests expect.

Its options are the real sink's and `trouble`, some of these words:

- ``die``: the first attempt of each task is killed (SIGKILL) when half of its batches are sent;
- ``reverse``: attempts after the first get their rows in reverse, as after a shuffle;
- ``uncommitted``: the commit of the first micro-batch fails;
- ``count``: nothing is published, rows are only counted;
- ``build``: nothing is published, but messages are made of the rows.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from spark_sink import RabbitMQDataSource
from spark_sink.identity import ByContent
from spark_sink.report import Counts, Written
from spark_sink.rows import Rows, slices
from spark_sink.writer import RabbitMQWriter

_FLIGHT_S = 0.2


class TroubledDataSource(RabbitMQDataSource):
    """`format("troubled")`."""

    def __init__(self, options: Any) -> None:
        self._trouble = options.pop("trouble").split()
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        return "troubled"

    def writer(self, schema: StructType, overwrite: bool) -> RabbitMQWriter:  # noqa: FBT001
        return self._troubled(super().writer(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> RabbitMQWriter:  # noqa: FBT001, N802
        return self._troubled(super().streamWriter(schema, overwrite))

    def _troubled(self, writer: RabbitMQWriter) -> RabbitMQWriter:
        writer.__class__ = _TroubledWriter
        vars(writer)["trouble"] = self._trouble
        return writer


class _TroubledWriter(RabbitMQWriter):
    trouble: list[str]

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        context = TaskContext.get()
        assert context is not None
        if {"count", "build"} & set(self.trouble):
            return self._unpublished(iterator)
        is_first = context.attemptNumber() == 0
        batches = list(iterator)
        if "reverse" in self.trouble and not is_first:
            batches = [_reversed(batch) for batch in reversed(batches)]
        dies = "die" in self.trouble and is_first
        return super().write(_half(batches) if dies else iter(batches))

    def _unpublished(self, batches: Iterator[pa.RecordBatch]) -> Written:
        counts = Counts()
        rows = Rows(self._columns, ByContent("w", 0))
        for batch in batches:
            if "build" in self.trouble:
                for piece in slices(batch):
                    counts.rows += len(rows.messages(piece))
            else:
                counts.rows += batch.num_rows
        return Written("w", 0, counts, None)

    def commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int | None = None,  # noqa: N803
    ) -> None:
        super().commit(messages, batchId)
        if "uncommitted" in self.trouble and batchId == 0:
            raise RuntimeError("the driver dies here")


def _half(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches[: len(batches) // 2]
    time.sleep(_FLIGHT_S)  # the broker has them, and has answered some
    os.kill(os.getpid(), signal.SIGKILL)


def _reversed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.take(pa.array(range(batch.num_rows - 1, -1, -1)))
