"""Streams on real RabbitMQ: each trigger with each failure, and what is refused.

A failure falls while rows are in flight: writes are slowed down, and the queue says when. Each cell
prints how many duplicates it saw; a kill that never makes any comes too early.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.streaming.query import StreamingQuery

from spark_sink import SinkListener
from tests.amqp_probe import AmqpProbe
from tests.chaos.proxy import Proxy
from tests.rabbitmq import RabbitMQNode
from tests.spark.drained import arrived, assert_once_by_id, drained
from tests.spark.processes import connected, kill, python_workers
from tests.waiting import until

pytestmark = [pytest.mark.rabbit, pytest.mark.timeout(300)]

LINES = 200
IN_FLIGHT_AT = 60
MANY_LINES = 20_000
CLOSED_AT = range(3_000, 18_000, 3_000)
"""So many times that rows are in flight at one of them, however slow the machine."""
SLOW = {"maxRowsPerSecond": "400", "returnedAttempts": "1"}
TRIGGERS: dict[str, dict[str, Any]] = {
    "availableNow": {"availableNow": True},
    "once": {"once": True},
    "processingTime": {"processingTime": "100 milliseconds"},
}


@pytest.fixture
def lines(spark: SparkSession, tmp_path: Path) -> DataFrame:
    return written(spark, tmp_path / "source", LINES)


def written(spark: SparkSession, source: Path, count: int) -> DataFrame:
    """One file, so one batch, whichever trigger takes it."""
    source.mkdir()
    (source / "1.txt").write_text("\n".join(str(n) for n in range(count)))
    return spark.readStream.format("text").load(str(source))


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
    assert struck[0] != 0, "no process was there to be killed"


FAILURES = ("nothing", "worker", "commit", "row")
SHORT = {("processingTime", "worker"), ("once", "nothing")}
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
def test_every_row_is_there_once_by_id(  # noqa: PLR0917
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
            with Proxy(rabbitmq_node.amqp_port) as proxy:

                def strike() -> int:
                    # Only the sender has this port. Idle workers keep connections too, and Spark
                    # gives tasks to them although they are dead.
                    return kill(connected(python_workers(os.getpid()), proxy.port))

                with in_flight(rabbitmq.url, queue, strike):
                    run(df, checkpoint, trigger, **{**options, "url": proxy.url})
        case "commit":
            troubled = {**options, "format": "troubled", "trouble": "uncommitted"}
            with pytest.raises(StreamingQueryException, match="the driver dies here"):
                run(df, checkpoint, trigger, **troubled)
            run(df, checkpoint, trigger, **options)
        case "row":
            late = f"{queue}-late"
            key = F.when(F.col("value") == "77", late).otherwise(queue)
            with pytest.raises(StreamingQueryException, match=r"\(message \w+\) was not confirmed"):
                run(df.withColumn("routing_key", key), checkpoint, trigger, **options)
            run(df, checkpoint, trigger, **options)  # corrected
        case _:
            run(df, checkpoint, trigger, **options)
    found = drained(rabbitmq.url, queue)
    duplicates = len(found) - LINES
    print(f"{trigger}, {failure}: {duplicates} duplicates")
    assert_once_by_id(found, Counter(str(n).encode() for n in range(LINES)))
    assert len({message_id for message_id, _ in found}) == LINES
    assert (duplicates > 0) == (failure != "nothing")


@pytest.mark.parametrize(
    "trigger",
    [
        pytest.param(trigger, marks=() if trigger == "availableNow" else pytest.mark.soak)
        for trigger in TRIGGERS
    ],
)
def test_every_row_is_there_once_by_id_when_the_broker_closes_the_connection(  # noqa: PLR0917
    spark: SparkSession,
    rabbitmq: AmqpProbe,
    rabbitmq_node: RabbitMQNode,
    report: Path,
    tmp_path: Path,
    trigger: str,
) -> None:
    """At full speed, so that there are always rows in flight: held by the queue, not confirmed."""
    queue = rabbitmq.declare_queue()
    df = written(spark, tmp_path / "source", MANY_LINES)
    options = {"url": rabbitmq.url, "routing_key": queue, "idColumns": "value", "report": report}
    close_connections_at(rabbitmq_node, queue, CLOSED_AT)
    run(df, tmp_path / "checkpoint", trigger, **options)
    found = drained(rabbitmq.url, queue)
    duplicates = len(found) - MANY_LINES
    [counts] = spark.read.json(f"{report}/writes").collect()
    print(f"{trigger}: {duplicates} duplicates, {counts.duplicates_risked} risked")
    assert_once_by_id(found, Counter(str(n).encode() for n in range(MANY_LINES)))
    assert 0 < duplicates <= counts.duplicates_risked


def close_connections_at(node: RabbitMQNode, queue: str, counts: Iterable[int]) -> None:
    """By a process of the broker's own that counts: from outside it takes a second to be heard."""
    wait = f"""
        fun Wait([]) -> ok; Wait([Count | Later]) ->
            {{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"{queue}">>)),
            case rabbit_amqqueue:info(Q, [messages]) of
                [{{messages, N}}] when N >= Count ->
                    [rabbit_networking:close_connection(P, "x")
                     || P <- rabbit_networking:connections()],
                    Wait(Later);
                _ -> timer:sleep(1), Wait([Count | Later])
            end
        end
    """
    node.eval(f"spawn(fun() -> ({wait})({list(counts)}) end), ok.")


CONTINUOUS = {"continuous": "300 milliseconds"}


@pytest.fixture
def rate(spark: SparkSession) -> DataFrame:
    df = spark.readStream.format("rate").option("rowsPerSecond", 100).load()
    return df.selectExpr("string(value) value")


@pytest.fixture
def unseen(spark: SparkSession, tmp_path: Path) -> Iterator[Path]:
    """Where checkpoints are that the sink is not told of, because the session names the folder."""
    spark.conf.set("spark.sql.streaming.checkpointLocation", str(tmp_path / "unseen"))
    yield tmp_path / "unseen"
    spark.conf.unset("spark.sql.streaming.checkpointLocation")


@pytest.mark.parametrize("has_run", [False, True])
def test_a_continuous_trigger_is_refused(
    rate: DataFrame, rabbitmq: AmqpProbe, tmp_path: Path, *, has_run: bool
) -> None:
    """Spark never calls a sink in Python there: committed, all of it would be lost.

    So it is with a checkpoint that micro-batches have left, too.
    """
    queue = rabbitmq.declare_queue()
    options = {"url": rabbitmq.url, "routing_key": queue}
    checkpoint = tmp_path / "checkpoint"
    if has_run:
        query = start(rate, checkpoint, "processingTime", **options)
        try:
            until(lambda: query.exception() or len(epochs(checkpoint / "commits")) >= 2)
        finally:
            query.stop()
        offsets_as_continuous(checkpoint)
    committed = epochs(checkpoint / "commits")
    query = start(rate, checkpoint, CONTINUOUS, **options)
    try:
        with pytest.raises(StreamingQueryException, match="a continuous trigger never calls"):
            query.awaitTermination(60)
    finally:
        query.stop()
    assert not query.isActive
    assert epochs(checkpoint / "commits") == committed
    if not has_run:  # tasks of a query that was stopped may still be sending
        assert rabbitmq.count(queue) == 0


def test_where_it_is_not_seen_a_continuous_trigger_commits_nothing(
    rate: DataFrame, rabbitmq: AmqpProbe, unseen: Path
) -> None:
    queue = rabbitmq.declare_queue()
    query = start_unseen(rate, queryName="unheard", url=rabbitmq.url, routing_key=queue)
    try:
        until(lambda: query.exception() or len(epochs(unseen / "unheard" / "offsets")) >= 3)
        time.sleep(2.0)
    finally:
        query.stop()
    assert rabbitmq.count(queue) == 0
    assert epochs(unseen / "unheard" / "commits") == []


def test_where_it_is_not_seen_the_query_fails_when_spark_has_too_many_epochs_open(
    spark: SparkSession, rate: DataFrame, rabbitmq: AmqpProbe, unseen: Path
) -> None:
    queue = rabbitmq.declare_queue()
    backlog = "spark.sql.streaming.continuous.epochBacklogQueueSize"
    spark.conf.set(backlog, "4")
    try:
        query = start_unseen(rate, queryName="backlog", url=rabbitmq.url, routing_key=queue)
        with pytest.raises(StreamingQueryException, match="exceeded its maximum"):
            query.awaitTermination(60)
    finally:
        spark.conf.unset(backlog)
        query.stop()
    assert epochs(unseen / "backlog" / "commits") == []


def test_the_listener_stops_a_query_with_a_continuous_trigger(
    spark: SparkSession,
    rate: DataFrame,
    rabbitmq: AmqpProbe,
    unseen: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = rabbitmq.declare_queue()
    listener = SinkListener(str(unseen.parent / "report"))
    spark.streams.addListener(listener)
    try:
        other = rate.writeStream.format("noop").trigger(**CONTINUOUS).start()
        query = start_unseen(rate, queryName="stopped", url=rabbitmq.url, routing_key=queue)
        assert query.awaitTermination(60)
        assert other.isActive
    finally:
        other.stop()
        query.stop()
        spark.streams.removeListener(listener)
    assert not query.isActive
    assert rabbitmq.count(queue) == 0
    [record] = [record for record in caplog.records if record.name == "reliablepub.spark"]
    assert record.message.startswith("query stopped is stopped: a continuous trigger never calls")


def offsets_as_continuous(checkpoint: Path) -> None:
    """The source `rate` has offsets of another form there; those of Kafka have one form."""
    each = '{"value":0,"runTimeMs":1700000000000}'
    for path in checkpoint.glob("offsets/[0-9]*"):
        if not (checkpoint / "commits" / path.name).exists():
            path.unlink()  # as of a query that has come to its end
            continue
        version, metadata, _ = path.read_text().splitlines()
        path.write_text(f'{version}\n{metadata}\n{{"0":{each},"1":{each}}}')
        (path.parent / f".{path.name}.crc").unlink(missing_ok=True)


def start_unseen(df: DataFrame, **options: Any) -> StreamingQuery:
    writer = df.writeStream.format("rabbitmq").queryName(options.pop("queryName"))
    return writer.options(**options).trigger(**CONTINUOUS).start()


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
