"""The Spark DataSources of reliablepub: `df.write.format("rabbitmq")`, and a reader of outboxes.

Knows: the public names of `reliablepub`, as any application does. Must never know: the packages
behind them (core, outbox, transports) or a client library.

Spark imports this package for every lookup of a data source, so the import must not fail: pyarrow,
which the driver may lack, is loaded only where rows are written.
"""

from typing import TYPE_CHECKING

from spark_sink.datasource import RabbitMQDataSource
from spark_sink.failures import (
    BrokerRefused,
    PartitionStalled,
    ReportNotWritten,
    RowsNotConfirmed,
    RowsNotKept,
    SchemaError,
    TasksNotHeard,
)
from spark_sink.outboxes import OutboxDataSource
from spark_sink.validation import SparkSinkWarning, validate

if TYPE_CHECKING:
    from spark_sink.listener import SinkListener, with_metrics

__all__ = [
    "BrokerRefused",
    "OutboxDataSource",
    "PartitionStalled",
    "RabbitMQDataSource",
    "ReportNotWritten",
    "RowsNotConfirmed",
    "RowsNotKept",
    "SchemaError",
    "SinkListener",
    "SparkSinkWarning",
    "TasksNotHeard",
    "validate",
    "with_metrics",
]


def __getattr__(name: str) -> object:
    """Load the names that need pyarrow on first access."""
    if name in ("SinkListener", "with_metrics"):
        from spark_sink import listener  # noqa: PLC0415

        return getattr(listener, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
