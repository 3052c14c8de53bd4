"""The Spark DataSources of reliablepub: `df.write.format("rabbitmq")`, and a reader of outboxes.

It enters through the public names of `reliablepub`, like any other application, and must never know
the rooms behind them: no core, no outbox, no transport, no client library.

Spark imports this package whenever somebody looks for a data source, so importing it must not fail:
pyarrow, which may be missing there, is loaded only where rows are written.
"""

from typing import TYPE_CHECKING

from spark_sink.datasource import RabbitMQDataSource
from spark_sink.failures import (
    BrokerRefused,
    PartitionStalled,
    RowsNotConfirmed,
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
    "RowsNotConfirmed",
    "SchemaError",
    "SinkListener",
    "SparkSinkWarning",
    "TasksNotHeard",
    "validate",
    "with_metrics",
]


def __getattr__(name: str) -> object:
    """What needs pyarrow is loaded when it is asked for."""
    if name in ("SinkListener", "with_metrics"):
        from spark_sink import listener  # noqa: PLC0415

        return getattr(listener, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
