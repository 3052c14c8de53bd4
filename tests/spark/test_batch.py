"""`df.write.format("rabbitmq")` in a local Spark, at RabbitMQ or at the fake broker."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import DataFrame, DataFrameWriter, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from reliablepub.testing import FakeBroker
from tests.amqp_probe import AmqpProbe
from tests.spark.drained import assert_once_by_id, drained

pytestmark = pytest.mark.timeout(300)

QUICK = {"nackedAttempts": "1", "returnedAttempts": "1"}


def numbers(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    return spark.range(0, count, 1, partitions).select(F.col("id").cast("string").alias("value"))


def writer(df: DataFrame, url: str, **options: Any) -> DataFrameWriter:
    return df.write.format("rabbitmq").options(url=url, **QUICK, **options).mode("append")


def bodies(count: int) -> Counter[bytes]:
    return Counter(b"%d" % n for n in range(count))


@pytest.mark.rabbit
def test_every_row_arrives(spark: SparkSession, rabbitmq: AmqpProbe) -> None:
    queue = rabbitmq.declare_queue()
    writer(numbers(spark, 2_000), rabbitmq.url, routing_key=queue).save()
    found = drained(rabbitmq.url, queue)
    assert Counter(body for _, body in found) == bodies(2_000)
    assert len({message_id for message_id, _ in found}) == 2_000


@pytest.mark.rabbit
def test_every_column_arrives(spark: SparkSession, rabbitmq: AmqpProbe) -> None:
    queue = rabbitmq.declare_queue()
    df = spark.sql(
        f"""SELECT binary('body') value, '' exchange, '{queue}' routing_key,
            map('b', 'x', 'a', 'y') headers, 'id-1' message_id, 'text/plain' content_type,
            'gzip' content_encoding, 'c' correlation_id, 'r' reply_to, 't' type, 'app' app_id,
            cast(7 as tinyint) priority, 60000L expiration,
            timestamp'2026-01-02 03:04:05' timestamp"""
    )
    writer(df, rabbitmq.url).save()
    [(body, properties)] = rabbitmq.drain(queue, 1)
    assert body == b"body"
    headers = dict(properties.headers or {})
    headers.pop("rp-attempt")
    assert headers == {"a": "y", "b": "x"}
    assert properties.delivery_mode == 2
    seen = {name: getattr(properties, name) for name in df.columns if hasattr(properties, name)}
    assert seen == {
        "headers": properties.headers,
        "message_id": "id-1",
        "content_type": "text/plain",
        "content_encoding": "gzip",
        "correlation_id": "c",
        "reply_to": "r",
        "type": "t",
        "app_id": "app",
        "priority": 7,
        "expiration": "60000",
        "timestamp": 1767323045,
    }


def test_a_struct_as_json_and_headers_as_pairs(spark: SparkSession, fake: FakeBroker) -> None:
    df = spark.sql(
        """SELECT struct(id, cast(null as string) name, map('k', decimal(1.5)) m) value,
           array(struct('n' as key, id as value)) headers FROM range(1)"""
    )
    writer(df, fake.url, routing_key="q", valueFormat="json").save()
    [message] = fake.messages("q")
    assert message.body == b'{"id":0,"m":{"k":2}}'
    assert (message.properties.headers or {})["n"] == 0


def test_more_than_one_arrow_batch_and_none(
    spark: SparkSession, fake: FakeBroker, small_batches: None
) -> None:
    writer(numbers(spark, 450), fake.url, routing_key="q").save()
    writer(numbers(spark, 0), fake.url, routing_key="q").save()
    assert Counter(message.body for message in fake.messages("q")) == bodies(450)


def test_large_bodies(spark: SparkSession, fake: FakeBroker) -> None:
    df = numbers(spark, 6).select(F.rpad("value", 1_000_000, "x").alias("value"))
    writer(df, fake.url, routing_key="q").save()
    assert [len(message.body) for message in fake.messages("q")] == [1_000_000] * 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rootingkey": "q"}, "there is no option 'rootingkey'"),
        ({}, "neither an exchange nor a routing key"),
        ({"routing_key": "q", "unroutable": "collect"}, "'collect' needs the option 'report'"),
    ],
)
def test_a_mistake_is_found_before_any_task(
    spark: SparkSession, fake: FakeBroker, options: dict[str, str], words: str
) -> None:
    with pytest.raises(AnalysisException) as caught:
        writer(numbers(spark, 1), fake.url, **options).save()
    assert words in str(caught.value)
    assert fake.published_count == 0


def test_only_append(spark: SparkSession, fake: FakeBroker) -> None:
    with pytest.raises(AnalysisException, match="messages can only be added"):
        writer(numbers(spark, 1), fake.url, routing_key="q").mode("overwrite").save()
    with pytest.raises(AnalysisException, match="UNSUPPORTED_DATA_SOURCE_SAVE_MODE"):
        numbers(spark, 1).write.format("rabbitmq").options(url=fake.url, routing_key="q").save()


@pytest.mark.rabbit
def test_a_row_that_is_not_confirmed_fails_the_write(
    spark: SparkSession, rabbitmq: AmqpProbe
) -> None:
    queue = rabbitmq.declare_queue()
    df = numbers(spark, 20).withColumn(
        "routing_key", F.when(F.col("value") == "13", "nowhere").otherwise(queue)
    )
    with pytest.raises(PythonException) as caught:
        writer(df, rabbitmq.url).save()
    assert "row 3 of partition 1" in str(caught.value)
    assert "unroutable: 312 NO_ROUTE" in str(caught.value)
    assert "spark_sink.failures.RowsNotConfirmed: row 3" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    found = drained(rabbitmq.url, queue)
    assert_once_by_id(found, bodies(20) - Counter([b"13"]))


@pytest.mark.rabbit
def test_what_is_collected_can_be_looked_at_corrected_and_written(
    spark: SparkSession, rabbitmq: AmqpProbe, report: Path
) -> None:
    queue = rabbitmq.declare_queue()
    key = (
        F.when(F.col("value") == "13", "nowhere")
        .when(F.col("value") == "14", F.repeat(F.lit("k"), F.lit(256)))
        .otherwise(queue)
    )
    exchange = F.when(F.col("value") == "3", "absent").otherwise("")
    df = numbers(spark, 20).withColumns({"routing_key": key, "exchange": exchange})
    collect = dict.fromkeys(("unroutable", "refused", "invalid"), "collect")
    writer(df, rabbitmq.url, report=report, writeId="w", **collect).save()

    [counts] = spark.read.json(f"{report}/writes").collect()
    assert counts.write == "w"
    assert (counts.rows, counts.confirmed, counts.partitions) == (20, 17, 2)
    assert (counts.unroutable, counts.refused, counts.invalid, counts.nacked) == (1, 1, 1, 0)
    failed = spark.read.parquet(f"{report}/failed")
    seen = {row.value: (row._outcome, row._reply_code) for row in failed.collect()}
    assert seen == {"13": ("unroutable", 312), "3": ("refused", 404), "14": ("invalid", 0)}

    corrected = failed.select("value", F.lit(queue).alias("routing_key"))
    writer(corrected, rabbitmq.url).save()
    found = drained(rabbitmq.url, queue)
    assert_once_by_id(found, bodies(20))


def test_the_report_of_a_failed_write_has_its_fatal_rows_alone(
    spark: SparkSession, fake: FakeBroker, report: Path
) -> None:
    df = numbers(spark, 20).withColumn(
        "routing_key", F.when(F.col("value") < "2", "nowhere").otherwise("q")
    )
    wrong = df.withColumn("exchange", F.when(F.col("value") == "7", "absent").otherwise(""))
    named = wrong.withColumn("message_id", F.concat(F.lit("order-"), "value"))
    with pytest.raises(PythonException, match="404 NOT_FOUND") as caught:
        writer(named, fake.url, report=report, unroutable="collect", writeId="w").save()
    assert "(message order-7)" in str(caught.value)
    # A task that Spark kills at its end leaves a file whose name begins with a dot.
    [path] = [path for path in report.rglob("[!.]*") if path.is_file()]
    assert str(path) in str(caught.value)
    [fatal] = spark.read.parquet(f"{report}/fatal").collect()
    assert (fatal.value, fatal._outcome, fatal._reply_code) == ("7", "refused", 404)

    corrected = named.withColumn("exchange", F.lit(""))
    writer(corrected, fake.url, report=report, unroutable="collect", writeId="w").save()
    assert list((report / "fatal").iterdir()) == []


def test_a_failed_write_keeps_all_rows_that_are_known_to_have_failed(
    spark: SparkSession, fake: FakeBroker, report: Path
) -> None:
    key = F.when(F.col("value").isin("4", "7", "9"), "nowhere").otherwise("q")
    wrong = numbers(spark, 20).coalesce(1).withColumn("routing_key", key)
    with pytest.raises(PythonException, match="2 more rows of this task are known to have failed"):
        writer(wrong, fake.url, report=report, writeId="w").save()
    fatal = spark.read.parquet(f"{report}/fatal").collect()
    assert [(row.value, row._outcome) for row in fatal] == [
        (value, "unroutable") for value in ("4", "7", "9")
    ]


def test_counts_of_a_write_without_failures(
    spark: SparkSession, fake: FakeBroker, report: Path
) -> None:
    writer(numbers(spark, 5), fake.url, routing_key="q", report=report, writeId="w").save()
    counts = json.loads((report / "writes" / "w.json").read_text())
    assert counts["rows"] == counts["confirmed"] == counts["bytes"] == 5
    assert counts["duplicates_risked"] == 0 <= counts["waited_s"]
    assert not (report / "failed").exists()


def test_a_write_with_a_name_can_be_repeated(spark: SparkSession, fake: FakeBroker) -> None:
    for _ in range(2):
        writer(numbers(spark, 50), fake.url, routing_key="q", writeId="nightly-1").save()
    found = [(str(m.properties.message_id), m.body) for m in fake.messages("q")]
    assert len(found) == 100
    assert_once_by_id(found, bodies(50))
    writer(numbers(spark, 50), fake.url, routing_key="q").save()
    assert len({message.properties.message_id for message in fake.messages("q")}) == 100


def test_equal_rows_stay_as_many_as_they_are(spark: SparkSession, fake: FakeBroker) -> None:
    df = spark.range(0, 40, 1, 2).select((F.col("id") % 3).cast("string").alias("value"))
    writer(df, fake.url, routing_key="q").save()
    assert len({message.properties.message_id for message in fake.messages("q")}) == 40


def test_fewer_connections_than_tasks_at_once_are_refused_before_anything_is_published(
    spark: SparkSession, fake: FakeBroker
) -> None:
    one = numbers(spark, 300, partitions=1)
    with pytest.raises(PythonException, match="2 tasks may write at once, and maxConnections is 1"):
        writer(one, fake.url, routing_key="q", maxConnections=1).save()
    assert fake.published_count == 0
    options = {"maxConnections": 2, "maxRowsPerSecond": 10_000}
    writer(numbers(spark, 300, partitions=3), fake.url, routing_key="q", **options).save()
    assert len(fake.messages("q")) == 300


def test_a_rate_for_the_whole_write_needs_nothing_else(
    spark: SparkSession, fake: FakeBroker
) -> None:
    """Two tasks at once: each takes a hundred a second."""
    since = time.monotonic()
    writer(numbers(spark, 200), fake.url, routing_key="q", maxRowsPerSecond=200).save()
    assert time.monotonic() - since >= 0.8
    assert len(fake.messages("q")) == 200


def test_workers_keep_their_connections(spark: SparkSession, fake: FakeBroker) -> None:
    for _ in range(4):
        writer(numbers(spark, 10), fake.url, routing_key="q").save()
    assert len({published.connection for published in fake.published}) <= 2


def troubled(df: DataFrame, url: str, trouble: str, **options: Any) -> DataFrameWriter:
    return writer(df, url, trouble=trouble, **options).format("troubled")


@pytest.mark.rabbit
def test_workers_killed_half_way_cost_duplicates_under_one_id(
    spark: SparkSession, rabbitmq: AmqpProbe, small_batches: None
) -> None:
    """Whatever the order in which the next attempt gets its rows."""
    queue = rabbitmq.declare_queue()
    troubled(numbers(spark, 2_000), rabbitmq.url, "die reverse", routing_key=queue).save()
    found = drained(rabbitmq.url, queue)
    assert len(found) > 2_000
    assert_once_by_id(found, bodies(2_000))


def test_ids_by_position_lose_rows_when_the_order_changes(
    spark: SparkSession, fake: FakeBroker, small_batches: None
) -> None:
    """Why they are not the default: who keeps one message for each id misses rows."""
    df = numbers(spark, 2_000)
    troubled(df, fake.url, "die reverse", routing_key="q", identity="position").save()
    first_by_id: dict[str, bytes] = {}
    for message in fake.messages("q"):
        first_by_id.setdefault(str(message.properties.message_id), message.body)
    assert len(first_by_id) == 2_000
    missed = len(bodies(2_000) - Counter(first_by_id.values()))
    assert missed > 100, "how many depends on how far the first attempt came"


def test_ids_by_position_hold_when_the_order_does(
    spark: SparkSession, fake: FakeBroker, small_batches: None
) -> None:
    df = numbers(spark, 500)
    troubled(df, fake.url, "die", routing_key="q", identity="position").save()
    found = [(str(m.properties.message_id), m.body) for m in fake.messages("q")]
    assert len(found) > 500
    assert_once_by_id(found, bodies(500))


def test_the_installed_sink_is_found_by_its_name(spark: SparkSession, fake: FakeBroker) -> None:
    session = spark.newSession()  # where no data source is registered
    writer(numbers(session, 5), fake.url, routing_key="q").save()
    assert len(fake.messages("q")) == 5
