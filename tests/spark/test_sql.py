"""What users of SQL and of tables can do, and what an error tells them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import (
    AnalysisException,
    IllegalArgumentException,
    PySparkException,
    StreamingQueryException,
)
from pyspark.sql import SparkSession

from reliablepub.testing import FakeBroker
from tests.amqp_probe import AmqpProbe
from tests.spark.session import ENVIRONMENT_PORT

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def table(spark: SparkSession) -> Iterator[str]:
    spark.sql("CREATE TABLE orders (value STRING, routing_key STRING) USING rabbitmq")
    yield "orders"
    spark.sql("DROP TABLE orders")


@pytest.mark.rabbit
def test_insert_takes_options_of_its_own(
    spark: SparkSession, rabbitmq: AmqpProbe, table: str
) -> None:
    queue = rabbitmq.declare_queue()
    spark.sql(f"INSERT INTO {table} WITH (`url` = '{rabbitmq.url}') VALUES ('a', '{queue}')")
    row = spark.createDataFrame([("b", queue)], "value string, routing_key string")
    row.writeTo(table).option("url", rabbitmq.url).append()
    row.write.format("rabbitmq").option("url", rabbitmq.url).mode("append").saveAsTable(table)
    assert sorted(body for body, _ in rabbitmq.drain(queue, 3)) == [b"a", b"b", b"b"]


@pytest.mark.rabbit
def test_tables_that_are_made_of_rows(spark: SparkSession, rabbitmq: AmqpProbe) -> None:
    queue = rabbitmq.declare_queue()
    row = spark.createDataFrame([("b", queue)], "value string, routing_key string")
    try:
        row.writeTo("made").using("rabbitmq").option("url", rabbitmq.url).create()
        assert rabbitmq.drain(queue, 1)[0][0] == b"b"
    finally:
        spark.sql("DROP TABLE IF EXISTS made")


def test_the_url_may_come_from_the_environment(spark: SparkSession, table: str) -> None:
    with FakeBroker(port=int(spark.conf.get(ENVIRONMENT_PORT) or 0)) as broker:
        broker.declare_queue("q")
        spark.sql(f"INSERT INTO {table} VALUES ('a', 'q'), ('b', 'q')")
        select = "SELECT 'c' AS value, 'q' AS routing_key"
        spark.sql(f"CREATE TABLE made USING rabbitmq AS {select}")
        spark.sql("DROP TABLE made")
        assert sorted(message.body for message in broker.messages("q")) == [b"a", b"b", b"c"]


def one_line(caught: pytest.ExceptionInfo[PySparkException]) -> str:
    """What a person reads first: all of it, or up to the plan that Spark shows."""
    text = str(caught.value)
    assert "Traceback" not in text
    return text.splitlines()[0]


def test_a_stream_into_a_table_takes_options_of_its_own(
    spark: SparkSession, fake: FakeBroker, table: str, tmp_path: Path
) -> None:
    """Into one that is there, and into one that it makes."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "1.txt").write_text("a\n")
    lines = spark.readStream.format("text").load(str(tmp_path / "source"))
    rows = lines.selectExpr("value", "'q' AS routing_key")
    try:
        for name in (table, "made_by_a_stream"):
            writer = rows.writeStream.format("rabbitmq").option("url", fake.url)
            writer = writer.option("checkpointLocation", str(tmp_path / name))
            writer.trigger(availableNow=True).toTable(name).awaitTermination()
        assert [message.body for message in fake.messages("q")] == [b"a", b"a"]
    finally:
        spark.sql("DROP TABLE IF EXISTS made_by_a_stream")


def test_a_table_without_columns_is_refused_where_it_is_made(spark: SparkSession) -> None:
    with pytest.raises(AnalysisException) as caught:
        spark.sql("CREATE TABLE t USING rabbitmq OPTIONS (url 'amqp://host/')")
    assert "a table USING rabbitmq needs its columns" in one_line(caught)
    assert "give options to each INSERT INTO t WITH" in one_line(caught)


def test_nothing_can_be_read(spark: SparkSession, table: str) -> None:
    with pytest.raises(AnalysisException) as caught:
        spark.sql(f"SELECT * FROM {table}").collect()
    assert "rabbitmq is a sink: nothing can be read from it" in one_line(caught)
    with pytest.raises(AnalysisException) as caught:
        spark.read.format("rabbitmq").option("url", "amqp://host/").load()
    assert "rabbitmq is a sink: nothing can be read from it" in one_line(caught)


@pytest.mark.parametrize("is_available_now", [True, False])
@pytest.mark.parametrize(
    ("name", "schema", "words"),
    [
        ("rabbitmq", "value string", "rabbitmq is a sink: nothing can be read from it"),
        ("reliablepub_outbox", None, "outboxes are read as a batch: use spark.read"),
    ],
)
def test_no_stream_can_be_read(
    spark: SparkSession,
    tmp_path: Path,
    name: str,
    schema: str | None,
    words: str,
    *,
    is_available_now: bool,
) -> None:
    """PySpark's own error is an `UnboundLocalError`."""
    reader = spark.readStream.format(name)
    rows = (reader if schema is None else reader.schema(schema)).load("/nowhere/*.db")
    writer = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path))
    query = (writer.trigger(availableNow=True) if is_available_now else writer).start()
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination()
    assert words in one_line(caught)


def test_partitions_by_columns_are_refused(spark: SparkSession) -> None:
    """By Spark, before it asks the sink."""
    rows = spark.sql("SELECT 'a' value, 'q' routing_key")
    writer = rows.write.format("rabbitmq").option("url", "amqp://127.0.0.1:1/").mode("append")
    with pytest.raises(IllegalArgumentException):
        writer.partitionBy("routing_key").save()


def test_an_insert_that_lacks_options_says_how_to_give_them(spark: SparkSession) -> None:
    spark.sql("CREATE TABLE bare (value STRING) USING rabbitmq OPTIONS (exchange 'x')")
    try:
        with pytest.raises(AnalysisException) as caught:
            spark.sql("INSERT INTO bare VALUES ('a')")
    finally:
        spark.sql("DROP TABLE bare")
    assert "neither an exchange nor a routing key" in one_line(caught)
    assert "Spark does not pass the OPTIONS of a table to a Python sink" in one_line(caught)


@pytest.mark.rabbit
def test_options_of_a_table_are_not_looked_at_and_an_insert_says_so(
    spark: SparkSession, rabbitmq: AmqpProbe
) -> None:
    """Spark asks no sink about a table that has columns, so any OPTIONS are taken."""
    queue = rabbitmq.declare_queue()
    columns = "(value STRING, routing_key STRING)"
    options = f"(url '{rabbitmq.url}', rootingKey 'nonsense')"
    spark.sql(f"CREATE TABLE optioned {columns} USING rabbitmq OPTIONS {options}")
    values = f"VALUES ('a', '{queue}')"
    try:
        with pytest.raises(PySparkException) as caught:
            spark.sql(f"INSERT INTO optioned WITH (`urlEnv` = 'NOT_SET') {values}")
        assert "Traceback" not in str(caught.value)
        lines = str(caught.value).splitlines()
        ours = next(line for line in lines if "ConfigurationError" in line)
        assert "no broker: give the option 'url'" in ours
        assert "Spark does not pass the OPTIONS of a table to a sink" in ours
        assert rabbitmq.count(queue) == 0
        spark.sql(f"INSERT INTO optioned WITH (`url` = '{rabbitmq.url}') {values}")
    finally:
        spark.sql("DROP TABLE optioned")
    assert rabbitmq.drain(queue, 1)[0][0] == b"a"


def test_a_path_says_what_to_write_instead(spark: SparkSession, fake: FakeBroker) -> None:
    df = spark.range(1).selectExpr("string(id) value")
    with pytest.raises(AnalysisException) as caught:
        df.write.format("rabbitmq").option("url", fake.url).mode("append").save("q1")
    assert "for a queue write .option('routing_key', its name).save()" in one_line(caught)
