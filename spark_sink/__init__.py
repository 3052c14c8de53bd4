"""The Spark DataSources of reliablepub: `df.write.format("rabbitmq")`, and a reader of outboxes.

It enters through the public names of `reliablepub`, like any other application, and must never know
the rooms behind them: no core, no outbox, no transport, no client library.

Spark imports this package whenever somebody looks for a data source, so importing it must not fail:
pyarrow, which may be missing there, is loaded only where rows are written.
"""

from spark_sink.datasource import RabbitMQDataSource
from spark_sink.failures import PartitionStalled, RowsNotConfirmed, SchemaError
from spark_sink.outboxes import OutboxDataSource
from spark_sink.validation import SparkSinkWarning, validate

__all__ = [
    "OutboxDataSource",
    "PartitionStalled",
    "RabbitMQDataSource",
    "RowsNotConfirmed",
    "SchemaError",
    "SparkSinkWarning",
    "validate",
]
