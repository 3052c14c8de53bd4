"""Counts of each micro-batch in the progress of its query, for dashboards and alerts.

Knows: Spark's listeners, the report, queries. Must never know: how rows are written.

Spark takes no metrics from a sink in Python, so ``sink.metrics`` of a `StreamingQueryProgress` is
empty. This module fills it with the counts of the micro-batch from the report.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from spark_sink import report
from spark_sink.datasource import RabbitMQDataSource
from spark_sink.trigger import is_continuous

LOGGER: Final = logging.getLogger("reliablepub.spark")
METRICS: Final = (
    *("rows", "confirmed", "unroutable", "nacked", "refused", "invalid", "collected"),
    *("duplicates_risked", "waited_s", "bytes"),
)
"""Names of the metrics in ``sink.metrics``; their values are text, as Spark's are."""


def with_metrics(progress: StreamingQueryProgress, report_folder: str) -> StreamingQueryProgress:
    """Return the progress, with the counts of its micro-batch in ``sink.metrics``.

    Args:
        progress: such as ``query.lastProgress``; unchanged if its trigger found no data.
        report_folder: the option ``report`` of the query, as a path that this process can open.
    """
    counts = report.counts_of(report_folder, f"{progress.id}-{progress.batchId}")
    if counts is not None:
        counts["collected"] = sum(
            counts[name] for name in ("unroutable", "nacked", "refused", "invalid")
        )
        progress.sink.metrics.update({name: str(counts.get(name, 0)) for name in METRICS})
    return progress


class SinkListener(StreamingQueryListener):
    """Logs the counts of each micro-batch, and passes its progress to a callback.

    A micro-batch that collected rows or risked duplicates is logged as a warning. A query with a
    continuous trigger, which would publish nothing, is stopped and logged as an error.

    Example:
        ::

            spark.streams.addListener(SinkListener("/shared/report", gauges.update))

    Args:
        report_folder: the option ``report`` of the queries.
        told: called with the progress of each micro-batch, with its counts in ``sink.metrics``.
    """

    def __init__(
        self, report_folder: str, told: Callable[[StreamingQueryProgress], None] | None = None
    ) -> None:
        self._report = report_folder
        self._told = told

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        """Stop the query if its trigger is continuous (not through Spark Connect)."""
        query = SparkSession.active().streams.get(str(event.id))
        if query is None or not is_continuous(query, RabbitMQDataSource.name()):
            return
        LOGGER.error(
            "query %s is stopped: a continuous trigger never calls a sink in Python, and would "
            "publish nothing",
            event.name or event.id,
        )
        # In a thread: the query waits for this call, and `stop` waits for the query.
        threading.Thread(target=query.stop, name="reliablepub-stop", daemon=True).start()

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        """Log the counts of a committed micro-batch, and call `told`."""
        progress = with_metrics(event.progress, self._report)
        metrics = progress.sink.metrics
        if "confirmed" not in metrics:
            return  # another sink's query, or no data
        is_odd = metrics["collected"] != "0" or metrics["duplicates_risked"] != "0"
        LOGGER.log(
            logging.WARNING if is_odd else logging.INFO,
            "query %s, batch %d: %s rows, %s confirmed, %s collected, %s may have been sent twice; "
            "tasks waited %s s for confirms",
            progress.name or progress.id,
            progress.batchId,
            metrics["rows"],
            metrics["confirmed"],
            metrics["collected"],
            metrics["duplicates_risked"],
            metrics["waited_s"],
        )
        if self._told is not None:
            self._told(progress)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name
        """Do nothing."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        """Do nothing."""
