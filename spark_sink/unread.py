"""The refusal of `readStream`, in words of ours.

Knows: Spark's protocol for streaming sources. Must never know: brokers, outboxes.

If `DataSource.streamReader` raises, PySpark shows an `UnboundLocalError` of its own instead of that
error. So both sources give a reader, which refuses when Spark asks for its first offset.
"""

from __future__ import annotations

from typing import NoReturn

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from reliablepub import ConfigurationError
from spark_sink.failures import in_one_line


class UnreadStream(DataSourceStreamReader):
    """A streaming source that refuses to begin.

    Args:
        words: the text of the refusal.
    """

    def __init__(self, words: str) -> None:
        self._words = words

    def initialOffset(self) -> NoReturn:  # noqa: N802 - Spark's name
        """Refuse; Spark 4.1 and later call `latestOffset` first."""
        with in_one_line():
            raise ConfigurationError(self._words)

    def latestOffset(self, *_: object, **__: object) -> NoReturn:  # noqa: N802 - Spark's name
        """Refuse."""
        self.initialOffset()

    def read(self, partition: InputPartition) -> NoReturn:
        """Never called: the stream does not begin."""
        raise NotImplementedError
