"""Values that Spark has and Python has not, and JSON as Spark writes it: on real RabbitMQ."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PySparkException, PythonException
from pyspark.sql import DataFrame, DataFrameWriter, SparkSession

from tests.amqp_probe import AmqpProbe

pytestmark = [pytest.mark.rabbit, pytest.mark.timeout(300)]

NO_UTF8 = "cast(X'61FF' AS STRING)"
FAR = "timestamp_micros(300000000000000000)"
ANCIENT = "timestamp_micros(-62200000000000000)"


def writer(df: DataFrame, url: str, **options: Any) -> DataFrameWriter:
    return df.write.format("rabbitmq").options(url=url, **options).mode("append")


FAULTS = {
    "type: holds text that is not UTF-8": f"if(id = 1, {NO_UTF8}, 'x') AS type",
    "timestamp: holds a time outside of the years": (
        f"CASE WHEN id = 2 THEN {FAR} WHEN id = 3 THEN {ANCIENT} ELSE now() END AS timestamp"
    ),
    "headers: holds text that is not UTF-8": (
        f"map(if(id = 4, {NO_UTF8}, 'x'), 'y', 'z', if(id = 5, {NO_UTF8}, 'x')) AS headers"
    ),
}
NO_MESSAGES = range(1, 6)


@pytest.fixture
def faulty(spark: SparkSession) -> DataFrame:
    columns = ["string(id) value", "id AS order_id", *FAULTS.values()]
    return spark.range(0, 10, 1, 1).selectExpr(*columns)


def test_one_value_costs_one_row(
    spark: SparkSession, faulty: DataFrame, rabbitmq: AmqpProbe, report: Path
) -> None:
    queue = rabbitmq.declare_queue()
    options = {"routing_key": queue, "idColumns": "order_id", "report": report}
    writer(faulty, rabbitmq.url, invalid="collect", **options).save()
    assert rabbitmq.count(queue) == 10 - len(NO_MESSAGES)
    failed = spark.read.parquet(f"{report}/failed").select("order_id", "_outcome", "_reply_text")
    found = {row.order_id: row for row in failed.collect()}
    assert sorted(found) == list(NO_MESSAGES)
    for problem, expression in FAULTS.items():
        for row in NO_MESSAGES:
            if f"id = {row} " in expression or f"id = {row}," in expression:
                assert found[row]._outcome == "invalid"
                assert found[row]._reply_text.startswith(problem)


def test_each_row_has_its_properties_and_its_copies(
    spark: SparkSession, rabbitmq: AmqpProbe
) -> None:
    """RabbitMQ routes by `CC` and `BCC`, and takes the latter out."""
    queue, copy, blind = (rabbitmq.declare_queue() for _ in range(3))
    df = spark.range(0, 2, 1, 1).selectExpr(
        "struct(id AS order_id, 'x' AS text) AS value",
        "id = 0 AS persistent",
        "if(id = 0, 'guest', NULL) AS user_id",
        f"struct(if(id = 0, array('{copy}'), NULL) AS CC,"
        f" if(id = 1, array('{blind}'), NULL) AS BCC,"
        " date'2026-01-31' AS day, timestamp_ntz'2026-01-31 10:00:00.5' AS at,"
        " array(1.5, 2.50) AS rates) AS headers",
    )
    options = {"routing_key": queue, "valueFormat": "json", "idColumns": "value.order_id"}
    writer(df, rabbitmq.url, **options).save()
    found = rabbitmq.drain(queue, 2)
    assert [p.delivery_mode for _, p in found] == [2, 1]
    assert [p.user_id for _, p in found] == ["guest", None]
    others = {"day": "2026-01-31", "at": "2026-01-31T10:00:00.500000"}
    for _, properties in found:
        assert properties.headers is not None
        assert properties.headers.items() >= others.items()
        assert properties.headers["rates"] == [Decimal("1.5"), Decimal("2.5")]
        assert "BCC" not in properties.headers
    ids = [p.message_id for _, p in found]
    assert [p.message_id for _, p in rabbitmq.drain(copy, 1)] == ids[:1]
    assert [p.message_id for _, p in rabbitmq.drain(blind, 1)] == ids[1:]
    df = spark.sql("SELECT 0L AS order_id, 'x' AS value")
    with pytest.raises(PySparkException, match=r"value\.order_id"):
        writer(df, rabbitmq.url, **options).save()


def test_a_user_that_is_another(spark: SparkSession, rabbitmq: AmqpProbe, report: Path) -> None:
    queue = rabbitmq.declare_queue()
    df = spark.sql("SELECT string(id) value, if(id = 1, 'other', 'guest') user_id FROM range(4)")
    options = {"routing_key": queue, "refused": "collect", "report": report}
    writer(df, rabbitmq.url, **options).save()
    [failed] = spark.read.parquet(f"{report}/failed").collect()
    assert (failed.value, failed._outcome, failed._reply_code) == ("1", "refused", 406)
    # Rows of its channel are sent again.
    assert {body for body, _ in rabbitmq.drain(queue, 3)} == {b"0", b"2", b"3"}


def test_the_row_that_fails_a_write_is_named(
    faulty: DataFrame, rabbitmq: AmqpProbe, report: Path
) -> None:
    options = {"routing_key": rabbitmq.declare_queue(), "idColumns": "order_id", "report": report}
    with pytest.raises(PythonException) as caught:
        writer(faulty.where("id <> 1"), rabbitmq.url, **options).save()
    assert "row 1 of partition 0 (order_id=2) was not confirmed but invalid: timestamp: " in str(
        caught.value
    )
    assert f"These rows are in {report}/fatal/part-" in str(caught.value)


JSON = """
    named_struct(
        'text', concat('a"\\\\\\\\ä€😀/', char(7)), 'none', cast(null AS STRING), 'yes', id = 0,
        'tiny', cast(-5 AS TINYINT), 'long', 9223372036854775807L - id,
        'single', cast(0.1 AS FLOAT) * (id + 1), 'large', cast(1e30 AS FLOAT),
        'double', 0.1D * id, 'huge', 1.7976931348623157e308D, 'small', 5e-324D, 'whole', 1e7D,
        'nan', double('NaN'), 'inf', float('-Infinity'),
        'exact', cast(1.50 AS DECIMAL(9, 2)), 'zero', cast(0 AS DECIMAL(38, 18)),
        'wide', cast('-12345678901234567890.123456789012345678' AS DECIMAL(38, 18)),
        'data', X'00FF10', 'empty', X'', 'day', date'2026-01-02', 'first', date'0001-01-01',
        'at', timestamp_micros(1767323045123999L + id), 'back', timestamp'1883-11-18 11:00:00',
        'local', timestamp_ntz'2026-07-02 03:04:05.000001',
        'list', array(1, null, 3), 'nothing', array(), 'of', array(named_struct('x', null, 'y', 1)),
        'map', map('k', 1, 'n', null), 'numbers', map(1, 'a'), 'flags', map(true, 1.5D)
    )
"""


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata", "America/New_York"])
def test_json_is_what_to_json_gives(spark: SparkSession, rabbitmq: AmqpProbe, zone: str) -> None:
    queue = rabbitmq.declare_queue()
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        df = spark.range(0, 50, 1, 1).selectExpr(f"{JSON} AS value")
        expected = [row.value for row in df.selectExpr("to_json(value) value").collect()]
        writer(df, rabbitmq.url, routing_key=queue, valueFormat="json").save()
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    found = [body.decode() for body, _ in rabbitmq.drain(queue, 50)]
    for one, other in zip(found, expected, strict=True):
        assert parsed(one) == parsed(other)


def parsed(text: str) -> Any:
    """With the digits of numbers that are not doubles; Java writes some of those with one more."""
    exact = json.loads(text, parse_float=Decimal)
    assert isinstance(exact, dict)
    doubles = json.loads(text)
    return exact | {name: doubles[name] for name in ("double", "huge", "small", "whole")}


def test_a_time_of_day_is_no_json_here_and_is_named_before_any_task(
    spark: SparkSession, rabbitmq: AmqpProbe
) -> None:
    queue = rabbitmq.declare_queue()
    try:
        df = spark.range(1).selectExpr("named_struct('id', id, 'opens', TIME'08:30:00') AS value")
        _ = df.schema
    except PySparkException as error:
        pytest.skip(f"this Spark has no TIME: {type(error).__name__}")
    with pytest.raises(PySparkException) as caught:
        writer(df, rabbitmq.url, routing_key=queue, valueFormat="json").save()
    print(caught.value)
    assert "'value.opens' is time" in str(caught.value)
    assert "use Spark's to_json" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert rabbitmq.count(queue) == 0


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("struct(parse_json('1') AS v)", "'value.v' is variant"),
        ("struct(INTERVAL '1' MONTH AS i)", "'value.i' is interval month"),
        ("array(INTERVAL '1' DAY)", "'value[]' is interval day"),
        ("struct(map(struct(1), 2) AS m)", "'value.m' has keys of type struct"),
        ("map('a', map(1.5, 2))", "'value[]' has keys of type decimal"),
    ],
)
def test_what_is_no_json_here_is_named_before_any_task(
    spark: SparkSession, rabbitmq: AmqpProbe, value: str, words: str
) -> None:
    df = spark.range(1).selectExpr(f"{value} AS value")
    with pytest.raises(AnalysisException) as caught:
        writer(df, rabbitmq.url, routing_key="q", valueFormat="json").save()
    assert words in str(caught.value)
    assert "use Spark's to_json" in str(caught.value)
    assert "Traceback" not in str(caught.value)
