"""What Spark finds under the name ``rabbitmq``.

Knows: Spark's DataSource protocol. Must never know: how rows are written.

Everything is checked where Spark asks for a writer: on the driver, before any task starts. For a
batch that is when ``save()`` is called; a stream asks only at its first batch (see `validate`).
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from reliablepub import ConfigurationError
from spark_sink.existence import check
from spark_sink.options import parse
from spark_sink.schema import Columns, match
from spark_sink.settings import Settings

if TYPE_CHECKING:
    from spark_sink.writer import RabbitMQWriter


class RabbitMQDataSource(DataSource):
    """A sink for DataFrames, batch and streaming.

    Example:
        It must be registered where it is not installed on the driver::

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
            TopologyError: the broker does not have what the options name.
        """
        settings, columns = self._checked(schema, overwrite=overwrite)
        if settings.check_topology:
            check(settings, columns)
        return _writer(settings, columns, settings.write_id or uuid.uuid4().hex)

    def streamWriter(  # noqa: N802 - Spark's name
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001
    ) -> RabbitMQWriter:
        """A writer for a micro-batch of a stream.

        Raises:
            ConfigurationError: an option is wrong.
            SchemaError: a column is wrong.
        """
        settings, columns = self._checked(schema, overwrite=overwrite)
        if settings.write_id is not None:
            raise ConfigurationError(
                "option 'writeId' is for batch writes; a stream is known by its checkpoint"
            )
        return _writer(settings, columns, None)

    def _checked(self, schema: StructType, *, overwrite: bool) -> tuple[Settings, Columns]:
        if overwrite:
            raise ConfigurationError(
                "messages can only be added: mode 'append', in a batch and in a stream"
            )
        settings = parse(self.options)
        return settings, match(schema, settings)


def _writer(settings: Settings, columns: Columns, write_id: str | None) -> RabbitMQWriter:
    # Only now, because it needs pyarrow: whoever looks for another data source imports this module
    # too, and may not have it.
    from spark_sink.writer import RabbitMQWriter  # noqa: PLC0415

    return RabbitMQWriter(settings, columns, write_id)
