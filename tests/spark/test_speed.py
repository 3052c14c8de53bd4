"""What Spark costs beside a bare `Publisher`, and what a hand-written `foreachPartition` costs.

``-m bench -s`` prints the figures, what is to be reached and whether it was; it fails where it was
not. All in one run on one RabbitMQ, in turns, because the machine is shared; queues are emptied in
between, so that their growth does not count. Rows are of 1 KiB, and lie in Spark's memory when the
clock starts.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pika
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from reliablepub import Message, Publisher
from tests.amqp_probe import AmqpProbe
from tests.spark.processes import descendants
from tests.spark.silent import SilentDataSource
from tests.speed.measuring import Goal, check

pytestmark = [pytest.mark.bench, pytest.mark.rabbit, pytest.mark.timeout(900)]

ROWS = 100_000
"""A write takes Java a quarter of a second of CPU time, however few they are."""
ONE_BY_ONE_ROWS = 2_000
BODY_BYTES = 1024
ROUNDS = 5
MICRO_BATCHES = 8
MICRO_BATCH_TURNS = 6
SHARE_OF_PUBLISHER = 0.9
TIMES_ONE_BY_ONE = 20
TIMES_ONE_BY_ONE_HELD = 10
"""On a noisy machine the ratio has been 15 to 20."""
CPU_US_MAX = 10.0
MICRO_BATCH_MS_MAX = 100
"""How much longer than Java's sink that does nothing a micro-batch may take, on a quiet machine."""
MICRO_BATCH_MAX = 0.25
"""How much more of it than Python's sink that does nothing."""
QUEUES = 8
"""One queue alone is a process of RabbitMQ's that is slower than a publisher."""


@pytest.fixture
def queue(rabbitmq: AmqpProbe) -> str:
    return rabbitmq.declare_queue(arguments={"x-max-length": 1_000})


@pytest.fixture(params=["classic", "quorum"])
def queues(rabbitmq: AmqpProbe, request: pytest.FixtureRequest) -> list[str]:
    arguments = {"x-queue-type": request.param}
    return [rabbitmq.declare_queue(arguments=arguments) for _ in range(QUEUES)]


@pytest.fixture
def rows(spark: SparkSession) -> Iterator[DataFrame]:
    df = spark.range(0, ROWS, 1, 1)
    df = df.select(
        F.rpad(F.col("id").cast("string"), BODY_BYTES, "x").cast("binary").alias("value")
    )
    df.cache().count()
    yield df
    df.unpersist()


def per_second(work: Callable[[], None], count: int) -> float:
    since = time.monotonic()
    work()
    return count / (time.monotonic() - since)


def cpu_s(pids: list[int]) -> float:
    """Processor time of these processes, and of their children that have ended."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue
        ticks += sum(int(field) for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def one_by_one(url: str) -> Callable[[Any], None]:
    """What people write by hand: one publish, one confirm."""

    def publish(found: Any) -> None:
        connection = pika.BlockingConnection(pika.URLParameters(url))
        channel = connection.channel()
        channel.confirm_delivery()
        properties = pika.BasicProperties(delivery_mode=2)
        for row in found:
            channel.basic_publish("", row.routing_key, bytes(row.value), properties, mandatory=True)
        connection.close()

    return publish


def test_throughput_beside_a_bare_publisher_and_one_by_one(
    spark: SparkSession, rows: DataFrame, rabbitmq: AmqpProbe, queues: list[str]
) -> None:
    url = rabbitmq.url
    number = F.pmod(F.hash("value"), F.lit(QUEUES)) + 1
    routed = rows.withColumn("routing_key", F.element_at(F.array(*map(F.lit, queues)), number))
    routed.cache().count()
    few = spark.createDataFrame(routed.limit(ONE_BY_ONE_ROWS).collect()).coalesce(1)
    few.cache().count()
    sample = [(bytes(row.value), row.routing_key) for row in routed.limit(1_000).collect()]
    sample *= ROWS // 1_000
    publisher = Publisher(url, outbox=None)  # kept from round to round, as a worker keeps its own

    def bare() -> None:
        messages = (Message(body, routing_key=key) for body, key in sample)
        assert publisher.publish_many(messages).wait(300).confirmed == ROWS

    def ours(**options: str) -> None:
        routed.write.format("rabbitmq").options(url=url, **options).mode("append").save()

    def by_hand() -> None:
        few.foreachPartition(one_by_one(url))

    kinds: dict[str, tuple[Callable[[], None], int]] = {
        "Publisher(outbox=None)": (bare, ROWS),
        "df.write": (ours, ROWS),
        "df.write, ids by position": (lambda: ours(identity="position"), ROWS),
        "foreachPartition, BlockingConnection": (by_hand, ONE_BY_ONE_ROWS),
    }
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    with publisher:
        for work, _ in kinds.values():
            work()  # the Java machine has compiled what it needs, and there are connections
            rabbitmq.purge(*queues)
        for _ in range(ROUNDS):
            for name, (work, count) in kinds.items():
                rates[name].append(per_second(work, count))
                rabbitmq.purge(*queues)
    picked = {name: statistics.median(found) for name, found in rates.items()}
    base = picked["Publisher(outbox=None)"]
    print()
    for name, rate in picked.items():
        print(f"{name:40} {rate:8.0f}/s  {rate / base:.2f} of Publisher")

    def ratio(other: str) -> float:
        """Round by round, since the machine's mood changes between rounds."""
        pairs = zip(rates["df.write"], rates[other], strict=True)
        return statistics.median(one / two for one, two in pairs)

    check(
        [
            Goal(f"df.write / {other}", ratio(other), wanted, held=held)
            for other, wanted, held in (
                ("Publisher(outbox=None)", SHARE_OF_PUBLISHER, SHARE_OF_PUBLISHER),
                ("foreachPartition, BlockingConnection", TIMES_ONE_BY_ONE, TIMES_ONE_BY_ONE_HELD),
            )
        ]
    )


def test_spark_itself_costs_little(spark: SparkSession, rows: DataFrame) -> None:
    """Everything but our own code: a sink of the same kind that only counts."""

    def cost(trouble: str) -> float:
        pids = [*descendants(os.getpid())]
        before = cpu_s(pids)
        for _ in range(4):
            options = {"trouble": trouble, "url": "amqp://nobody/", "exchange": "x"}
            rows.write.format("troubled").options(**options).mode("append").save()
        pids = [*descendants(os.getpid())]
        return (cpu_s(pids) - before) / (4 * ROWS) * 1e6

    cost("count")
    counted, built = cost("count"), cost("build")
    print(
        f"\nSpark's own share {counted:.1f} us CPU a row; messages and ids {built - counted:.1f} us"
    )
    assert counted <= CPU_US_MAX


def test_a_micro_batch_costs_little(
    spark: SparkSession, rabbitmq: AmqpProbe, queue: str, tmp_path: Path
) -> None:
    """Beside a sink in Java and one in Python that do nothing, a few batches of each in turns."""
    spark.dataSource.register(SilentDataSource)
    source = tmp_path / "source"
    source.mkdir()
    sinks = {"noop": {}, "silent": {}, "rabbitmq": {"url": rabbitmq.url, "routing_key": queue}}
    wall_ms: dict[str, list[float]] = {sink: [] for sink in sinks}
    cpu_ms: dict[str, list[float]] = {sink: [] for sink in sinks}
    for turn in range(MICRO_BATCH_TURNS):
        for n in range(MICRO_BATCHES):
            (source / f"{turn}-{n}.txt").write_text("a\nb")
        for sink, options in sinks.items():
            before = cpu_s([*descendants(os.getpid())])
            query = (
                spark.readStream.format("text")
                .option("maxFilesPerTrigger", 1)
                .load(str(source))
                .writeStream.format(sink)
                .options(checkpointLocation=str(tmp_path / sink), **options)
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
            took = [progress.durationMs["addBatch"] for progress in query.recentProgress]
            assert len(took) >= MICRO_BATCHES
            spent = cpu_s([*descendants(os.getpid())]) - before
            if turn > 0:  # by then processes are there, and Java has compiled what it needs
                wall_ms[sink].append(statistics.median(took))
                cpu_ms[sink].append(spent / len(took) * 1e3)
    print()
    for sink in sinks:
        wall, cpu = statistics.median(wall_ms[sink]), statistics.median(cpu_ms[sink])
        print(f"a micro-batch of 2 rows to {sink:8} {wall:5.0f} ms, {cpu:5.0f} ms CPU in all")
    ours, java, python = wall_ms["rabbitmq"], wall_ms["noop"], wall_ms["silent"]
    more_ms = [one - other for one, other in zip(ours, java, strict=True)]
    assert statistics.median(more_ms) <= MICRO_BATCH_MS_MAX
    share = [one / other - 1 for one, other in zip(ours, python, strict=True)]
    assert statistics.median(share) <= MICRO_BATCH_MAX
