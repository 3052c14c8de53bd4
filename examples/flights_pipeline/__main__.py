"""A Spark pipeline from CSV to RabbitMQ, as a batch and as a stream, with a check of the result.

Run it with ``python examples/flights_pipeline`` (``make flights`` installs its dependencies). It
reads the flights that left New York City in 2013, joins weather and planes, counts departures by
hour, routes by carrier and delay, and publishes: first as a batch, then as a stream. The bundled
broker drops the connection from time to time, with messages and confirms in flight. After each run
a Spark job compares the messages in the queues with the source: none is missing, and duplicates
have the id of the first delivery.

``--url`` publishes to a broker of yours, into an exchange and queues that are deleted afterwards.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from messages import FLIGHT, as_messages, hourly, joined, read_csv, read_csv_stream
from pyspark.sql import DataFrame, SparkSession
from queues import EXCHANGE, Queues
from reconciliation import Reconciled, reconcile
from table import FILES, unpack

from reliablepub.testing import FakeBroker
from reliablepub.testing.faults import DropConnection
from spark_sink import validate

ROWS = 20_000
PROGRESS_S = 2.0
DROPS = 0.0005
"""Share of the messages after which the broker drops the connection."""
_BAR = 40


def main() -> None:
    """Run the pipeline; exits with code 1 if a row is missing."""
    parser = argparse.ArgumentParser(description="flights to RabbitMQ on Spark")
    parser.add_argument("--url", help="a broker of yours; the bundled one otherwise")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"flights to publish ({ROWS})")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, _broker(arguments.url) as url:
        pipeline = Pipeline(url, Path(folder), arguments.rows)
        with pipeline:
            results = [
                pipeline.run("batch", pipeline.batch),
                pipeline.run("stream", pipeline.stream),
            ]
            pipeline.plot()
    if not all(result.is_whole for result in results):
        sys.exit("rows are missing")


class Pipeline:
    """The steps of the pipeline; each prints a line.

    Args:
        url: URL of the broker.
        folder: working directory.
        rows: number of flights to read.
    """

    def __init__(self, url: str, folder: Path, rows: int) -> None:
        self._since = time.monotonic()
        self._url = url
        self._folder = folder
        unpack(folder, rows)
        self._say(f"{rows:,} flights unpacked in {FILES} files")
        self._spark = _session()
        self._queues = Queues(url)
        flights = joined(read_csv(self._spark, folder), self._spark, folder)
        self._expected = as_messages(flights).union(as_messages(hourly(flights))).cache()
        self._say(f"Spark {self._spark.version}: {self._expected.count():,} messages to come")

    def __enter__(self) -> None:
        self._queues.declare()

    def __exit__(self, *_: object) -> None:
        self._queues.delete()
        self._spark.stop()

    def run(self, name: str, write: Callable[[], None]) -> Reconciled:
        """Publish, empty the queues, and compare."""
        with self._watched(name):
            write()
        dump = self._folder / f"{name}.ndjson"
        deliveries = self._queues.dump(dump)
        self._say(f"{name}: {deliveries:,} messages taken out of the queues")
        result = reconcile(self._expected, self._spark.read.schema(Queues.DUMP).json(str(dump)))
        self._say(f"{name}: {result}")
        return result

    def batch(self) -> None:
        """Publish in one batch write."""
        self._expected.write.format("rabbitmq").options(**self._options).mode("append").save()

    def stream(self) -> None:
        """Publish by two queries: flights as they are read, and hours once complete."""
        stream = read_csv_stream(self._spark, self._folder)
        flights = joined(stream, self._spark, self._folder)
        for name, rows in (("flights", flights), ("hours", hourly(flights))):
            messages = as_messages(rows)
            validate(messages, **self._options)
            query = (
                messages.writeStream.format("rabbitmq")
                .options(**self._options)
                .option("checkpointLocation", str(self._folder / f"checkpoint-{name}"))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()

    def plot(self) -> None:
        """Print the share of late flights of each carrier, from the messages that arrived."""
        arrived: DataFrame = self._spark.read.schema(Queues.DUMP).json(
            str(self._folder / "stream.ndjson")
        )
        carriers = (
            arrived.dropDuplicates(["message_id"])
            .where("routing_key NOT LIKE 'hour.%'")
            .selectExpr(f"from_json(value, '{FLIGHT}') flight", "routing_key")
            .selectExpr("flight.carrier", "int(routing_key LIKE '%.late') late")
            .groupBy("carrier")
            .agg({"late": "avg", "*": "count"})
            .orderBy("carrier")
            .collect()
        )
        print("\nflights more than 15 minutes late, by carrier")
        for carrier, share, flights in ((r[0], r["avg(late)"], r["count(1)"]) for r in carriers):
            print(f"  {carrier}  {'█' * round(share * _BAR):{_BAR}} {share:4.0%} of {flights:,}")

    @property
    def _options(self) -> dict[str, str]:
        return {
            "url": self._url,
            "exchange": EXCHANGE,
            "content_type": "application/json",
            "idColumns": "routing_key,value",  # unique: no two flights and no two hours are equal
        }

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        """Print the number of messages in the queues from time to time while the block runs."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(PROGRESS_S):
                self._say(f"{name}: {self._queues.count():,} messages are in the queues")

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._since:6.1f} s  {text}", flush=True)


@contextmanager
def _broker(url: str | None) -> Iterator[str]:
    """The URL of the given broker, or of a fake broker that drops connections."""
    if url is not None:
        yield url
        return
    with FakeBroker() as broker:
        broker.inject(DropConnection(share=DROPS, accepted=True))
        yield broker.url


def _session() -> SparkSession:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local[2,4]")
        .appName("flights")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


if __name__ == "__main__":
    main()
