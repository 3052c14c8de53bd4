"""The data source ``rabbitmq``.

Knows: Spark's DataSource protocol. Must never know: how rows are written.

Options and columns are checked when Spark asks for a writer: on the driver, before any task starts.
A batch asks when ``save()`` is called, a stream only at its first micro-batch (see `validate`). A
stream asks again, in another process, for a writer that commits or aborts a micro-batch.
"""

from __future__ import annotations

import sys
import uuid
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.types import StructType

from reliablepub import ConfigurationError
from spark_sink.contact import ask, check
from spark_sink.failures import in_one_line
from spark_sink.options import check_stream, parse
from spark_sink.schema import Columns, match
from spark_sink.settings import Settings
from spark_sink.trigger import check_checkpoint
from spark_sink.unread import UnreadStream

if TYPE_CHECKING:
    from spark_sink.writer import RabbitMQWriter


_SQL: Final = (
    "Spark does not pass the OPTIONS of a table to a Python sink: give options to each INSERT INTO "
    "t WITH (`url` = '...', `exchange` = '...'); only the URL may also come from the environment "
    "variable RELIABLEPUB_URL"
)
_UNREAD: Final = "rabbitmq is a sink: nothing can be read from it"
_reports: Final[set[tuple[str, bool]]] = set()
"""Reports already checked by this process, and whether for collected rows.

A stream asks for a writer with each micro-batch.
"""
_COMMITTER: Final = "pyspark.sql.worker.python_streaming_sink_runner"
"""The module with which Spark commits or aborts a micro-batch, in a process for nothing else."""


class RabbitMQDataSource(DataSource):
    """A sink for DataFrames, batch and streaming.

    Example:
        If the package is not installed on the driver, register the class first::

            spark.dataSource.register(RabbitMQDataSource)
            df.write.format("rabbitmq").option("exchange", "orders").mode("append").save()
    """

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "rabbitmq"

    def writer(self, schema: StructType, overwrite: bool) -> RabbitMQWriter:  # noqa: FBT001
        """A writer for a batch.

        Raises:
            ConfigurationError: an option is wrong.
            SchemaError: a column is wrong.
            TopologyError: the exchange or queue that the options name does not exist.
            BrokerRefused: the broker or TLS refuses the connection.
        """
        with in_one_line():
            settings, columns = self._checked(schema, overwrite=overwrite)
            ask(settings)
            if settings.report is not None:
                _check_report(settings.report, collects=settings.collects)
            if settings.check_topology:
                check(settings, columns)
            return _writer(settings, columns, settings.write_id or uuid.uuid4().hex)

    def streamWriter(  # noqa: N802 - Spark's name
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001
    ) -> RabbitMQWriter:
        """A writer for a micro-batch of a stream, or for its commit or abort.

        Raises:
            ConfigurationError: an option is wrong, or the trigger is continuous.
            SchemaError: a column is wrong.
            BrokerRefused: the broker or TLS refuses the connection.
        """
        with in_one_line():
            # All rows are settled when Spark commits, and nothing that has changed since, such as a
            # password, may keep it from that.
            is_new = not _is_commit()
            if is_new:
                check_checkpoint(self.options.get("checkpointLocation"))
            settings, columns = self._checked(schema, overwrite=overwrite)
            check_stream(settings)
            if is_new:
                ask(settings)
            if is_new and settings.report is not None:
                key = settings.report, settings.collects
                if key not in _reports:
                    _check_report(settings.report, collects=settings.collects)
                    _reports.add(key)
            return _writer(settings, columns, None)

    def schema(self) -> StructType:
        """Refuse to read, and to create a table without columns: Spark asks here for both.

        Raises:
            ConfigurationError: always.
        """
        with in_one_line():
            raise ConfigurationError(
                f"{_UNREAD}, and a table USING rabbitmq needs "
                "its columns: CREATE TABLE t (value STRING, routing_key STRING) USING rabbitmq. "
                f"{_SQL}"
            )

    def reader(self, schema: StructType) -> DataSourceReader:
        """Refuse to read: messages are read by consumers.

        Raises:
            ConfigurationError: always.
        """
        del schema
        with in_one_line():
            raise ConfigurationError(_UNREAD)

    def streamReader(self, schema: StructType) -> UnreadStream:  # noqa: N802 - Spark's name
        """A reader that refuses to begin: messages are read by consumers."""
        del schema
        return UnreadStream(_UNREAD)

    def _checked(self, schema: StructType, *, overwrite: bool) -> tuple[Settings, Columns]:
        if overwrite:
            raise ConfigurationError(
                "messages can only be added: mode 'append', in a batch and in a stream"
            )
        try:
            settings = parse(self.options)
            columns = match(schema, settings)
        except ConfigurationError as error:
            if self.options:
                raise
            raise type(error)(f"{error}. {_SQL}") from None
        return settings, columns


def _is_commit() -> bool:
    """Whether Spark asks for a writer to commit or abort with it."""
    # Spark's daemon imports the module; without a daemon, Python runs it.
    run = getattr(sys.modules["__main__"], "__spec__", None)
    return _COMMITTER in sys.modules or (run is not None and run.name == _COMMITTER)


def _check_report(folder: str, *, collects: bool) -> None:
    from spark_sink import report  # noqa: PLC0415 - as in `_writer`

    report.check(folder, collects=collects)


def _writer(settings: Settings, columns: Columns, write_id: str | None) -> RabbitMQWriter:
    # Imported late because it needs pyarrow: Spark imports this module whenever it looks up any
    # Python data source, also where pyarrow is not installed.
    from spark_sink.writer import RabbitMQWriter  # noqa: PLC0415

    return RabbitMQWriter(settings, columns, write_id)
