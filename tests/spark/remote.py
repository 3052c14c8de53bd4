"""A client of a Spark Connect server: does what the sink can do, and tells what it has seen.

Knows: Spark Connect. Must never know: how the server was made.

``batch`` ships the package itself, and registers its data sources; ``stream`` needs a server that
has it, and finds them by their names.
"""

import argparse
import json
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from tenacity import retry, retry_if_exception_message, stop_after_attempt

from reliablepub import Message, Outbox
from spark_sink import OutboxDataSource, RabbitMQDataSource, validate
from tests.spark.job import BODY_BYTES

ROWS = 2_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["batch", "stream"])
    for name in ("address", "package", "url", "queue", "folder"):
        parser.add_argument(f"--{name}", required=True)
    arguments = parser.parse_args()
    spark = SparkSession.builder.remote(arguments.address).getOrCreate()
    if arguments.what == "batch":
        spark.addArtifacts(arguments.package, pyfile=True)
        spark.dataSource.register(RabbitMQDataSource)
        spark.dataSource.register(OutboxDataSource)
    options = {"url": arguments.url, "routing_key": arguments.queue}
    work = run_batch if arguments.what == "batch" else run_streams
    print(json.dumps(work(spark, Path(arguments.folder), options)))
    spark.stop()


def write(rows: DataFrame, **options: str) -> None:
    rows.write.format("rabbitmq").options(**options).mode("append").save()


def run_batch(spark: SparkSession, folder: Path, options: dict[str, str]) -> dict[str, object]:
    """A write, a mistake, and an outbox."""
    rows = spark.range(0, ROWS, 1, 4).select(
        F.rpad(F.col("id").cast("string"), BODY_BYTES, " ").alias("value")
    )
    validate(rows, **options)
    write(rows, **options)
    mistake = ""
    try:
        write(rows, rootingKey="q", **options)
    except PySparkException as error:
        mistake = str(error)
    with Outbox(folder / "app.db") as outbox:
        outbox.enqueue(Message(b"", routing_key="q", message_id="of the outbox"))
    found = spark.read.format("reliablepub_outbox").load(f"{folder}/*.db").collect()
    return {"mistake": mistake, "open": [row.message_id for row in found]}


def run_streams(spark: SparkSession, folder: Path, options: dict[str, str]) -> dict[str, object]:
    """Once into the sink and once by `foreachBatch`; equal lines come in two batches of each."""
    source = folder / "source"
    source.mkdir()
    (source / "1.txt").write_text("a\nb\n")
    (source / "2.txt").write_text("a\nb\nc\n")
    lines = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(source))

    def write_batch(rows: DataFrame, batch_id: int) -> None:
        named = {**options, "writeId": f"orders-{batch_id}"}
        rows.write.format("rabbitmq").options(**named).mode("append").save()

    writers = {
        "sink": lines.writeStream.format("rabbitmq").options(**options),
        "each": lines.writeStream.foreachBatch(write_batch),
    }
    for name, writer in writers.items():
        checkpoint = str(folder / f"checkpoint-{name}")
        query = start(writer.option("checkpointLocation", checkpoint).trigger(availableNow=True))
        query.awaitTermination()
    return {}


@retry(
    retry=retry_if_exception_message(match=".*failed to connect back"),
    stop=stop_after_attempt(30),
    reraise=True,
)
def start(writer: DataStreamWriter) -> StreamingQuery:
    """Spark gives its process for `foreachBatch` ten seconds to start: few on a busy machine."""
    return writer.start()


if __name__ == "__main__":
    main()
