"""`df.writeStream.format("rabbitmq")`: micro-batches, checkpoints, and what a restart replays."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from reliablepub.testing import FakeBroker
from tests.amqp_probe import AmqpProbe
from tests.spark.drained import assert_once_by_id, drained

pytestmark = pytest.mark.timeout(300)

QUICK = {"nackedAttempts": "1", "returnedAttempts": "1"}


class Source:
    """A folder of text files, one or more read by each micro-batch."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._folder = folder
        self._files = 0
        self.lines: Counter[bytes] = Counter()
        folder.mkdir()

    def add(self, *lines: str) -> None:
        self._files += 1
        (self._folder / f"{self._files}.txt").write_text("\n".join(lines))
        self.lines += Counter(line.encode() for line in lines)

    def stream(self, files_a_batch: int = 1) -> DataFrame:
        reader = self._spark.readStream.format("text")
        return reader.option("maxFilesPerTrigger", files_a_batch).load(str(self._folder))


@pytest.fixture
def source(spark: SparkSession, tmp_path: Path) -> Source:
    return Source(spark, tmp_path / "source")


def run(df: DataFrame, url: str, checkpoint: Path, **options: Any) -> None:
    """Until everything that is there has been written."""
    query = (
        df.writeStream.format(options.pop("format", "rabbitmq"))
        .options(url=url, checkpointLocation=str(checkpoint), **QUICK, **options)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


@pytest.mark.rabbit
def test_every_micro_batch_arrives(rabbitmq: AmqpProbe, source: Source, tmp_path: Path) -> None:
    queue = rabbitmq.declare_queue()
    for n in range(3):
        source.add(*(f"{n}-{line}" for line in range(200)))
    run(source.stream(), rabbitmq.url, tmp_path / "checkpoint", routing_key=queue)
    source.add("later")
    run(source.stream(), rabbitmq.url, tmp_path / "checkpoint", routing_key=queue)
    found = drained(rabbitmq.url, queue)
    assert Counter(body for _, body in found) == source.lines
    assert len({message_id for message_id, _ in found}) == len(found)


def test_a_batch_that_was_sent_and_not_committed_is_replayed_under_its_ids(
    fake: FakeBroker, source: Source, tmp_path: Path
) -> None:
    source.add(*"abcdef")
    source.add(*"ghij")
    trouble = {"format": "troubled", "trouble": "uncommitted", "routing_key": "q"}
    with pytest.raises(StreamingQueryException, match="the driver dies here"):
        run(source.stream(), fake.url, tmp_path / "checkpoint", **trouble)
    run(source.stream(), fake.url, tmp_path / "checkpoint", routing_key="q")
    found = [(str(m.properties.message_id), m.body) for m in fake.messages("q")]
    assert len(found) == 16
    assert_once_by_id(found, source.lines)


@pytest.mark.rabbit
def test_a_worker_killed_in_a_micro_batch(
    small_batches: None, rabbitmq: AmqpProbe, source: Source, tmp_path: Path
) -> None:
    queue = rabbitmq.declare_queue()
    source.add(*(str(line) for line in range(400)))
    trouble = {"format": "troubled", "trouble": "die reverse", "routing_key": queue}
    run(source.stream(), rabbitmq.url, tmp_path / "checkpoint", **trouble)
    found = drained(rabbitmq.url, queue)
    assert len(found) > 400
    assert_once_by_id(found, source.lines)


def test_a_wrong_option_stops_the_query_at_its_first_batch(
    fake: FakeBroker, source: Source, tmp_path: Path
) -> None:
    source.add("a")
    with pytest.raises(StreamingQueryException, match="there is no option 'rootingkey'"):
        run(source.stream(), fake.url, tmp_path / "checkpoint", rootingKey="q")
    with pytest.raises(StreamingQueryException, match="'writeId' is for batch writes"):
        run(source.stream(), fake.url, tmp_path / "other", routing_key="q", writeId="w")


def test_a_restart_commits_its_report_once(
    spark: SparkSession, fake: FakeBroker, source: Source, report: Path, tmp_path: Path
) -> None:
    source.add("a", "b", "c")
    df = source.stream().withColumn(
        "routing_key", F.when(F.col("value") == "b", "nowhere").otherwise("q")
    )
    options = {"unroutable": "collect", "report": report}
    trouble = {"format": "troubled", "trouble": "uncommitted"}
    with pytest.raises(StreamingQueryException):
        run(df, fake.url, tmp_path / "checkpoint", **trouble, **options)
    run(df, fake.url, tmp_path / "checkpoint", **options)
    [failed] = spark.read.parquet(f"{report}/failed").collect()
    assert (failed.value, failed._outcome) == ("b", "unroutable")
    [counts] = spark.read.json(f"{report}/writes").collect()
    assert (counts.rows, counts.confirmed, counts.unroutable) == (3, 2, 1)


def for_each_batch(source: Source, tmp_path: Path, write: Callable[[DataFrame, int], None]) -> None:
    """Until everything that is there has been through `write`."""
    query = (
        source.stream()
        .writeStream.foreachBatch(write)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def test_for_each_batch_with_names_for_its_writes(
    fake: FakeBroker, source: Source, tmp_path: Path
) -> None:
    """Each batch has rows like the other's, and writes them twice: eight messages, not fewer."""
    source.add("a", "b")
    source.add("a", "b")
    attempts = []

    def write(batch: DataFrame, batch_id: int) -> None:
        for name in ("first", "second"):
            options = {"url": fake.url, "routing_key": "q", "writeId": name}
            batch.write.format("rabbitmq").options(**options).mode("append").save()
        attempts.append(batch_id)
        if len(attempts) == 1:
            raise RuntimeError("the driver dies here")

    with pytest.raises(StreamingQueryException):
        for_each_batch(source, tmp_path, write)
    for_each_batch(source, tmp_path, write)
    found = [(str(m.properties.message_id), m.body) for m in fake.messages("q")]
    assert attempts == [0, 0, 1]
    assert len(found) == 12
    assert_once_by_id(found, source.lines + source.lines)


def test_for_each_batch_without_a_name_is_refused(
    fake: FakeBroker, source: Source, tmp_path: Path
) -> None:
    source.add("a")
    options = {"url": fake.url, "routing_key": "q"}

    def write(batch: DataFrame, batch_id: int) -> None:
        with_ids = batch.withColumn("message_id", F.concat(F.lit(f"{batch_id}-"), "value"))
        for df in (with_ids, batch):
            df.write.format("rabbitmq").options(**options).mode("append").save()

    with pytest.raises(StreamingQueryException, match="foreachBatch needs the same name"):
        for_each_batch(source, tmp_path, write)
    assert [m.properties.message_id for m in fake.messages("q")] == ["0-a"]


@pytest.mark.parametrize("group", ["nightly", None])
def test_for_each_batch_with_a_job_group_of_its_own_collects_nothing(
    spark: SparkSession,
    fake: FakeBroker,
    source: Source,
    report: Path,
    tmp_path: Path,
    *,
    group: str | None,
) -> None:
    """A report would take the replay for a second write, and keep the rows of both."""
    source.add("a")
    options = {"url": fake.url, "routing_key": "q", "writeId": "w"}
    collecting = {**options, "unroutable": "collect", "report": str(report)}

    def write(batch: DataFrame, _: int) -> None:
        if group is None:
            spark.sparkContext._jsc.sc().clearJobGroup()
        else:
            spark.sparkContext.setJobGroup(group, "")
        for more in (options, collecting):
            batch.write.format("rabbitmq").options(**more).mode("append").save()

    with pytest.raises(StreamingQueryException, match="has set or cleared Spark's job group"):
        for_each_batch(source, tmp_path, write)
    assert len(fake.messages("q")) == 1


def test_a_replay_that_finds_the_queue_forgets_the_rows_that_failed_before(
    spark: SparkSession, fake: FakeBroker, source: Source, report: Path, tmp_path: Path
) -> None:
    source.add("a", "b")
    options = {"routing_key": "later", "unroutable": "collect", "report": report}
    trouble = {"format": "troubled", "trouble": "uncommitted"}
    with pytest.raises(StreamingQueryException):
        run(source.stream(), fake.url, tmp_path / "checkpoint", **trouble, **options)
    assert spark.read.parquet(f"{report}/failed").count() == 2
    fake.declare_queue("later")
    run(source.stream(), fake.url, tmp_path / "checkpoint", **options)
    assert len(fake.messages("later")) == 2
    assert list((report / "failed").iterdir()) == []
    [counts] = spark.read.json(f"{report}/writes").collect()
    assert (counts.rows, counts.confirmed, counts.unroutable) == (2, 2, 0)


def test_a_replay_in_for_each_batch_forgets_them_too(
    fake: FakeBroker, source: Source, report: Path, tmp_path: Path
) -> None:
    """Corrected and written again, they would arrive a second time, under other ids."""
    source.add("a", "b")
    options = {"url": fake.url, "routing_key": "later", "unroutable": "collect"}
    attempts = []

    def write(batch: DataFrame, batch_id: int) -> None:
        named = {**options, **QUICK, "report": str(report), "writeId": f"orders-{batch_id}"}
        batch.write.format("rabbitmq").options(**named).mode("append").save()
        attempts.append(batch_id)
        if len(attempts) == 1:
            raise RuntimeError("the driver dies here")

    with pytest.raises(StreamingQueryException):
        for_each_batch(source, tmp_path, write)
    assert len(list((report / "failed").iterdir())) == 1
    fake.declare_queue("later")
    for_each_batch(source, tmp_path, write)
    assert attempts == [0, 0]
    assert len(fake.messages("later")) == 2
    assert list((report / "failed").iterdir()) == []
