"""A sink that takes rows and does nothing: what Spark itself costs a Python sink.

Knows: the writer's protocol. Must never know: messages, brokers.
"""

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType


class SilentDataSource(DataSource):
    """`format("silent")`."""

    @classmethod
    def name(cls) -> str:
        return "silent"

    def streamWriter(self, schema: StructType, overwrite: bool) -> "_SilentWriter":  # noqa: FBT001, N802
        return _SilentWriter()


class _SilentWriter(DataSourceArrowWriter, DataSourceStreamWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int | None = None,  # noqa: N803
    ) -> None:
        pass

    abort = commit
