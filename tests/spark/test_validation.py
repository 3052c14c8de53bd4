"""`validate`: what it finds before a query is started, and what it only warns of."""

import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from reliablepub import ConfigurationError
from spark_sink import SchemaError, SparkSinkWarning, validate
from spark_sink.options import parse
from spark_sink.validation import doubts

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "spark.md"


def test_a_stream_is_checked_before_it_starts(spark: SparkSession) -> None:
    df = spark.readStream.format("rate").load().selectExpr("string(value) value")
    options = {"url": "amqp://localhost:1/", "exchange": "x", "persistent": False, "window": 10}
    with pytest.warns(SparkSinkWarning, match="Name the key columns of the rows in idColumns"):
        validate(df, **options)
    validate(df.selectExpr("value", "value key"), idColumns="key", **options)
    validate(df.selectExpr("value", "value message_id"), **options)
    with pytest.raises(ConfigurationError, match="a continuous trigger never calls a sink"):
        validate(df, trigger={"continuous": "1 second"}, **options)
    with pytest.raises(ConfigurationError, match="output mode 'complete'"):
        validate(df, output_mode="complete", **options)
    with pytest.raises(ConfigurationError, match="no option 'rootingKey'"):
        validate(df, rootingKey="q")
    with pytest.raises(ConfigurationError, match="'writeId' is for batch writes"):
        validate(df, exchange="x", writeId="w")
    with pytest.raises(SchemaError, match="neither an exchange nor a routing key"):
        validate(df)


def test_an_option_that_is_none_is_not_given(spark: SparkSession) -> None:
    """As for Spark, whose `options(writeId=None)` gives the sink no such option."""
    df = spark.readStream.format("rate").load().selectExpr("string(value) value")
    options = {"url": "amqp://localhost:1/", "exchange": "x", "idColumns": "value"}
    validate(df, writeId=None, maxRowsPerSecond=None, **options)


def test_ids_by_position_are_warned_of(spark: SparkSession) -> None:
    with pytest.warns(SparkSinkWarning, match="drops rows it never received"):
        validate(spark.sql("SELECT 'a' value"), exchange="x", identity="position")


@pytest.mark.parametrize("master", ["local", "local[2]", "local[*]"])
def test_a_master_that_never_retries_is_warned_of(master: str) -> None:
    [doubt] = doubts(parse({}), master=master, is_speculating=False)
    assert "use local[N,4]" in doubt


def test_the_master_of_the_page_is_not_warned_of() -> None:
    [master] = re.findall(r'\.master\("(.+?)"\)', DOCUMENT.read_text())
    assert doubts(parse({}), master=master, is_speculating=False) == []


@pytest.mark.parametrize("master", ["local[2,4]", "spark://host:7077", "yarn", ""])
def test_others_are_not(master: str) -> None:
    assert doubts(parse({}), master=master, is_speculating=False) == []


def test_doubles_in_headers_are_warned_of(spark: SparkSession) -> None:
    df = spark.sql("SELECT 'a' value, map('price', 0.1D) headers")
    with pytest.warns(SparkSinkWarning, match=r"read as a whole number, 0\.1 as 0"):
        validate(df, url="amqp://localhost:1/", exchange="x")


def test_speculation_is_warned_of() -> None:
    [doubt] = doubts(parse({}), master="yarn", is_speculating=True)
    assert "spark.speculation is on" in doubt


@pytest.mark.parametrize(
    ("options", "is_doubtful"),
    [
        ({"url": "amqp://user:canary@host/"}, True),
        ({"url": "amqp://host/,amqp://user:canary@host/"}, True),
        ({"url": "amqp://user@host/", "passwordfile": "broker.password"}, False),
        ({}, False),
    ],
)
def test_a_password_that_spark_connect_shows_is_warned_of(
    options: dict[str, str], *, is_doubtful: bool
) -> None:
    settings = parse(options)
    assert doubts(settings, master="yarn", is_speculating=False) == []
    found = doubts(settings, master="yarn", is_speculating=False, shows_url=True)
    assert ["canary" not in doubt and "passwordFile" in doubt for doubt in found] == (
        [True] * is_doubtful
    )
