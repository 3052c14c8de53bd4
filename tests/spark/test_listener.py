"""What became of the rows, in the progress of a query."""

import logging
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.streaming.listener import StreamingQueryProgress

from spark_sink import SinkListener, with_metrics
from tests.amqp_probe import AmqpProbe

pytestmark = [pytest.mark.rabbit, pytest.mark.timeout(300)]


def test_counts_are_in_the_progress_and_in_the_log(
    spark: SparkSession,
    rabbitmq: AmqpProbe,
    report: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = rabbitmq.declare_queue()
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "1.txt").write_text("\n".join("abcdefghij"))
    lines = spark.readStream.format("text").load(str(tmp_path / "source"))
    key = F.when(F.col("value") == "c", "nobody").otherwise(queue)
    options: dict[str, Any] = {"unroutable": "collect", "returnedAttempts": 1, "report": report}
    told: list[StreamingQueryProgress] = []
    listener = SinkListener(str(report), told.append)
    spark.streams.addListener(listener)
    caplog.set_level(logging.INFO, "reliablepub.spark")
    try:
        query = (
            lines.withColumn("routing_key", key)
            .writeStream.format("rabbitmq")
            .options(url=rabbitmq.url, idColumns="value", **options)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
    finally:
        spark.streams.removeListener(listener)
    metrics = with_metrics(query.recentProgress[0], str(report)).sink.metrics
    assert [progress.sink.metrics for progress in told] == [metrics]
    wanted = {"rows": "10", "confirmed": "9", "unroutable": "1", "collected": "1", "refused": "0"}
    assert wanted.items() <= metrics.items()
    assert metrics["duplicates_risked"] == "0"
    assert float(metrics["waited_s"]) >= 0
    [record] = [record for record in caplog.records if record.name == "reliablepub.spark"]
    assert record.levelno == logging.WARNING
    assert "batch 0: 10 rows, 9 confirmed, 1 collected" in record.message


def test_a_progress_of_another_sink_is_left_as_it_is(
    spark: SparkSession, report: Path, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "1.txt").write_text("a")
    lines = spark.readStream.format("text").load(str(tmp_path / "source"))
    told: list[StreamingQueryProgress] = []
    listener = SinkListener(str(report), told.append)
    spark.streams.addListener(listener)
    try:
        query = (
            lines.writeStream.format("noop")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
    finally:
        spark.streams.removeListener(listener)
    assert told == []
