"""Streams on real RabbitMQ: each trigger with each failure, and what is refused.

A failure falls while rows are in flight: writes are slowed down, and the queue says when. Each cell
prints how many duplicates it saw; a kill that never makes any comes too early.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it
from pyspark.sql.streaming.query import StreamingQuery

from tests.amqp_probe import AmqpProbe
from tests.rabbitmq import RabbitMQNode
from tests.spark.drained import arrived, assert_once_by_id, drained
from tests.spark.processes import kill, python_workers

pytestmark = [pytest.mark.rabbit, pytest.mark.timeout(300)]

LINES = 200
IN_FLIGHT_AT = 60
SLOW = {"maxRowsPerSecond": "400", "returnedAttempts": "1"}
TRIGGERS: dict[str, dict[str, Any]] = {
    "availableNow": {"availableNow": True},
    "once": {"once": True},
    "processingTime": {"processingTime": "100 milliseconds"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One file, so one batch, whichever trigger takes it."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "1.txt").write_text("\n".join(str(n) for n in range(LINES)))
    return source


@pytest.fixture
def lines(spark: SparkSession, folder: Path) -> DataFrame:
    return spark.readStream.format("text").load(str(folder))


def start(
    df: DataFrame, checkpoint: Path, trigger: str | dict[str, Any], **options: Any
) -> StreamingQuery:
    given = TRIGGERS[trigger] if isinstance(trigger, str) else trigger
    return (
        df.writeStream.format(options.pop("format", "rabbitmq"))
        .outputMode(options.pop("output_mode", "append"))
        .options(checkpointLocation=str(checkpoint), **options)
        .trigger(**given)
        .start()
    )


def run(df: DataFrame, checkpoint: Path, trigger: str, **options: Any) -> None:
    """Until all that is there has been written."""
    query = start(df, checkpoint, trigger, **options)
    try:
        if "processingTime" in TRIGGERS[trigger]:
            query.processAllAvailable()
        else:
            query.awaitTermination()
    finally:
        query.stop()


@contextmanager
def in_flight(url: str, queue: str, strike: Callable[[], object]) -> Iterator[None]:
    """Strike once, when some rows are in the queue and others are not."""
    struck = []

    def wait() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if IN_FLIGHT_AT <= arrived(url, queue) < LINES:
                struck.append(strike())
                return
            time.sleep(0.02)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert struck, "rows were not met in flight"


FAILURES = ("nothing", "worker", "connection", "commit", "row")
SHORT = {("processingTime", "nothing"), ("processingTime", "worker"), ("once", "nothing")}
"""Cells of the short form, besides all failures of the first trigger."""
CELLS = [
    pytest.param(
        *(trigger, failure),
        marks=() if trigger == "availableNow" or (trigger, failure) in SHORT else pytest.mark.soak,
    )
    for trigger in TRIGGERS
    for failure in FAILURES
]


@pytest.mark.parametrize(("trigger", "failure"), CELLS)
def test_every_row_is_there_once_by_id(  # noqa: PLR0917 - fixtures
    lines: DataFrame,
    rabbitmq: AmqpProbe,
    rabbitmq_node: RabbitMQNode,
    tmp_path: Path,
    trigger: str,
    failure: str,
) -> None:
    queue = rabbitmq.declare_queue()
    options = {"url": rabbitmq.url, "idColumns": "value", **SLOW}
    df = lines.withColumn("routing_key", F.lit(queue))
    checkpoint = tmp_path / "checkpoint"
    match failure:
        case "worker":
            with in_flight(rabbitmq.url, queue, lambda: kill(python_workers(os.getpid()))):
                run(df, checkpoint, trigger, **options)
        case "connection":
            with in_flight(rabbitmq.url, queue, lambda: rabbitmq_node.close_all_connections("x")):
                run(df, checkpoint, trigger, **options)
        case "commit":
            troubled = {**options, "format": "troubled", "trouble": "uncommitted"}
            with pytest.raises(StreamingQueryException, match="the driver dies here"):
                run(df, checkpoint, trigger, **troubled)
            run(df, checkpoint, trigger, **options)
        case "row":
            late = f"{queue}-late"
            key = F.when(F.col("value") == "77", late).otherwise(queue)
            with pytest.raises(StreamingQueryException, match="value='77', message"):
                run(df.withColumn("routing_key", key), checkpoint, trigger, **options)
            run(df, checkpoint, trigger, **options)  # corrected
        case _:
            run(df, checkpoint, trigger, **options)
    found = drained(rabbitmq.url, queue)
    duplicates = len(found) - LINES
    print(f"{trigger}, {failure}: {duplicates} duplicates")
    assert_once_by_id(found, Counter(str(n).encode() for n in range(LINES)))
    assert len({message_id for message_id, _ in found}) == LINES
    if failure in ("worker", "commit", "row"):
        assert duplicates > 0
    if failure == "nothing":
        assert duplicates == 0


def test_a_continuous_trigger_commits_nothing(
    spark: SparkSession, rabbitmq: AmqpProbe, tmp_path: Path
) -> None:
    """Spark never calls a sink in Python there: committed, all of it would be lost."""
    queue = rabbitmq.declare_queue()
    df = spark.readStream.format("rate").option("rowsPerSecond", 100).load()
    df = df.selectExpr("string(value) value")
    checkpoint = tmp_path / "checkpoint"
    every = {"continuous": "300 milliseconds"}
    query = start(df, checkpoint, every, url=rabbitmq.url, routing_key=queue)
    try:
        deadline = time.monotonic() + 120
        while len(epochs(checkpoint / "offsets")) < 3:
            assert time.monotonic() < deadline, query.exception()
            time.sleep(0.2)
        time.sleep(2.0)
    finally:
        query.stop()
    assert rabbitmq.count(queue) == 0
    assert epochs(checkpoint / "commits") == []


def epochs(log: Path) -> list[str]:
    return [path.name for path in log.glob("*") if path.name.isdecimal()]


@pytest.mark.parametrize(
    ("mode", "words"),
    [("complete", "messages can only be added"), ("update", "does not support Update mode")],
)
def test_other_output_modes_are_refused(
    lines: DataFrame, rabbitmq: AmqpProbe, tmp_path: Path, mode: str, words: str
) -> None:
    queue = rabbitmq.declare_queue()
    counted = lines.groupBy("value").count().selectExpr("value", "string(count) message_id")
    options = {"url": rabbitmq.url, "routing_key": queue, "output_mode": mode}
    with pytest.raises(Exception, match=words):  # of Spark's, of one kind here and another there
        run(counted, tmp_path / "checkpoint", "availableNow", **options)
    assert rabbitmq.count(queue) == 0


@pytest.mark.parametrize(("identity", "twice"), [({"idColumns": "value"}, 0), ({}, 1)])
def test_rows_that_are_split_otherwise_in_a_replay_keep_the_ids_that_their_columns_give(
    lines: DataFrame, rabbitmq: AmqpProbe, tmp_path: Path, identity: dict[str, str], twice: int
) -> None:
    """A restart with other cores: by content an id depends on the partition, by columns not."""
    queue = rabbitmq.declare_queue()
    options = {"url": rabbitmq.url, "routing_key": queue, **identity}
    troubled = {**options, "format": "troubled", "trouble": "uncommitted"}
    checkpoint = tmp_path / "checkpoint"
    with pytest.raises(StreamingQueryException, match="the driver dies here"):
        run(lines.repartition(2), checkpoint, "availableNow", **troubled)
    run(lines.repartition(3), checkpoint, "availableNow", **options)
    found = drained(rabbitmq.url, queue)
    ids: dict[bytes, set[str]] = {}
    for message_id, body in found:
        ids.setdefault(body, set()).add(message_id)
    of_two = sum(len(each) > 1 for each in ids.values())
    print(f"{len(found) - LINES} duplicates, {of_two} rows with two ids")
    assert len(ids) == LINES
    assert len(found) == 2 * LINES
    assert (of_two > 0) == bool(twice)
