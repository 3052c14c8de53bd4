"""`spark.read.format("reliablepub_outbox")`: many outboxes as one DataFrame, undisturbed."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from reliablepub import ConfigurationError, Message, Outbox, Publisher, RetryPolicy
from reliablepub.cli import main
from reliablepub.testing import FakeBroker
from spark_sink import OutboxDataSource
from spark_sink.outboxes import COLUMNS
from tests.policies import ONCE

pytestmark = pytest.mark.timeout(300)

HOSTS = 3


@pytest.fixture
def hosts(tmp_path: Path, fake: FakeBroker) -> Path:
    """Outboxes of several hosts: each with n parked messages, and one that no relay has opened."""
    for n in range(HOSTS):
        path = tmp_path / f"host{n}.db"
        with Publisher(fake.url, outbox=path, retry=RetryPolicy(returned=ONCE)) as publisher:
            publisher.publish(b"secret", routing_key="q").result(10)
            messages = (Message(b"secret", routing_key="nobody") for _ in range(n))
            publisher.publish_many(messages).wait(10)
        with Outbox(path) as outbox:
            outbox.enqueue(Message(b"secret", exchange="orders", message_id=f"open-{n}"))
    return tmp_path


def rows(spark: SparkSession, path: object, view: str) -> list[Row]:
    reader = spark.read.format("reliablepub_outbox").option("view", view)
    return reader.load(str(path)).orderBy("outbox").collect()


def step_in(path: Path, *arguments: str) -> None:
    command = ["outbox", *arguments, f"--outbox={path}"]
    assert CliRunner().invoke(main, command).exit_code == 0


def test_open_messages_of_all_hosts(spark: SparkSession, hosts: Path) -> None:
    df = spark.read.format("reliablepub_outbox").load(f"{hosts}/*.db")
    assert df.rdd.getNumPartitions() == HOSTS
    found = df.orderBy("outbox").collect()
    assert [row.outbox for row in found] == [str(hosts / f"host{n}.db") for n in range(HOSTS)]
    assert [row.message_id for row in found] == [f"open-{n}" for n in range(HOSTS)]
    assert {row.exchange for row in found} == {"orders"}
    assert "secret" not in str(found)
    age = df.select((F.unix_timestamp() - F.unix_timestamp("stored_at")).alias("s")).collect()
    assert all(0 <= row.s < 300 for row in age)


def test_what_is_parked_and_why(spark: SparkSession, hosts: Path) -> None:
    found = rows(spark, f"{hosts}/*.db", "parked")
    assert len(found) == sum(range(HOSTS))
    assert {(row.state, row.outcome, row.reply_code) for row in found} == {
        ("parked", "returned", 312)
    }


def test_every_attempt_that_was_no_confirm(spark: SparkSession, hosts: Path) -> None:
    parked = {row.message_id for row in rows(spark, f"{hosts}/*.db", "parked")}
    found = rows(spark, f"{hosts}/*.db", "history")
    assert {row.message_id for row in found} == parked
    assert len({(row.outbox, row.attempt) for row in found}) == len(found) == sum(range(HOSTS))
    assert {(row.outcome, row.reply_code, row.persistence) for row in found} == {
        ("returned", 312, "not written")
    }
    with Outbox(hosts / "host1.db") as outbox:
        [stored] = outbox.rows("history")
    [row] = [row for row in found if row.outbox.endswith("host1.db")]
    assert f"{row['at']:%Y-%m-%d %H:%M:%S}" == stored["at"]


def test_what_people_did(spark: SparkSession, hosts: Path) -> None:
    path = hosts / "host2.db"
    first, second = (str(row["message_id"]) for row in Outbox(path).rows("parked"))
    step_in(path, "retry", first)
    step_in(path, "discard", second, "--note=a test order", "--yes")
    found = rows(spark, f"{hosts}/*.db", "interventions")
    assert [(row.message_id, row.action, row.note) for row in found] == [
        (first, "retry", ""),
        (second, "discard", "a test order"),
    ]
    assert {(row.outbox, row.routing_key) for row in found} == {(str(path), "nobody")}


def test_the_books_of_all_hosts_add_up(spark: SparkSession, hosts: Path) -> None:
    for n, row in enumerate(rows(spark, f"{hosts}/*.db", "audit")):
        assert (row.stored, row.confirmed, row.parked, row.open) == (n + 2, 1, n, 1)
        assert row.open_difference == row.parked_difference == row.bytes_difference == 0


def test_more_rows_than_a_piece(spark: SparkSession, tmp_path: Path) -> None:
    with Outbox(tmp_path / "a.db") as outbox:
        outbox.enqueue(Message(b""))
    with Publisher("amqp://127.0.0.1:1/", outbox=tmp_path / "b.db", close_timeout_s=0) as publisher:
        publisher.publish_many(Message(b"", routing_key="q") for _ in range(4_500))
    df = spark.read.format("reliablepub_outbox").load(f"{tmp_path}/*.db")
    counts = {Path(row.outbox).name: row["count"] for row in df.groupBy("outbox").count().collect()}
    assert counts == {"a.db": 1, "b.db": 4_500}
    assert df.select("id").distinct().count() == 4_500


def test_a_relay_goes_on_meanwhile(spark: SparkSession, tmp_path: Path, fake: FakeBroker) -> None:
    path = tmp_path / "busy.db"
    with Publisher(fake.url, outbox=path) as publisher:
        publisher.publish(b"", routing_key="q").result(10)
        before = set(os.listdir(tmp_path))  # noqa: PTH208 - names
        assert len(rows(spark, path, "audit")) == 1
        assert set(os.listdir(tmp_path)) == before  # noqa: PTH208
        publisher.publish(b"", routing_key="q").result(10)
    [audit] = rows(spark, path, "audit")
    assert (audit.stored, audit.confirmed) == (2, 2)


@pytest.mark.parametrize(
    ("path", "view", "words"),
    [
        ("{}/none-*.db", "open", "no file matches"),
        ("none.db", "open", "by an absolute path"),
        ("{}/{{a,b}}.db", "open", "no file matches"),
        ("{}/*.db", "closed", "option 'view' must be open or parked or confirmed or history or"),
    ],
)
def test_mistakes_are_named(
    spark: SparkSession, tmp_path: Path, path: str, view: str, words: str
) -> None:
    with pytest.raises(AnalysisException, match=words):
        rows(spark, path.format(tmp_path), view)


def test_a_misspelt_option_is_not_ignored(spark: SparkSession, hosts: Path) -> None:
    """It would give the open messages, whatever was asked for."""
    reader = spark.read.format("reliablepub_outbox").option("viw", "parked")
    with pytest.raises(AnalysisException, match="no option 'viw'") as caught:
        reader.load(f"{hosts}/*.db")
    assert "Traceback" not in str(caught.value)


def test_a_schema_of_the_users_is_refused_before_any_task(spark: SparkSession, hosts: Path) -> None:
    """Spark takes it for the reader's, and names the values by their position."""
    reader = spark.read.format("reliablepub_outbox").option("view", "confirmed")
    names = [name for name in COLUMNS["confirmed"] if name != "message_id"]
    swapped = ", ".join(f"{name} string" for name in ("message_id", *names))
    with pytest.raises(AnalysisException, match="give no schema"):
        reader.schema(swapped).load(f"{hosts}/*.db").collect()


def test_options_of_a_table_are_lost_and_the_error_says_what_to_do(
    spark: SparkSession, hosts: Path
) -> None:
    using = f"USING reliablepub_outbox OPTIONS (path '{hosts}/*.db', view 'parked')"
    spark.sql(f"CREATE TABLE outboxes {using}")
    try:
        with pytest.raises(AnalysisException, match="create a TEMPORARY VIEW"):
            spark.table("outboxes").count()
    finally:
        spark.sql("DROP TABLE outboxes")
    spark.sql(f"CREATE TEMPORARY VIEW outboxes {using}")
    try:
        assert spark.table("outboxes").count() == sum(range(HOSTS))
    finally:
        spark.catalog.dropTempView("outboxes")


def test_several_paths(spark: SparkSession, hosts: Path) -> None:
    reader = spark.read.format("reliablepub_outbox")
    df = reader.load([f"{hosts}/host0.db", f"{hosts}/host[01].db"])
    assert sorted(row.message_id for row in df.collect()) == ["open-0", "open-1"]


@pytest.mark.parametrize(
    "paths", ["/var/x.db", "1", "null", '"/var/x.db"', '{"/var/x.db": 1}', "[1]", '["x.db"]']
)
def test_paths_that_are_no_list_are_told_as_such(paths: str) -> None:
    """Spark has this option of its own, for `load` with a list."""
    source = OutboxDataSource({"paths": paths})
    with pytest.raises(ConfigurationError, match="name the outboxes by an absolute path"):
        source.reader(source.schema())


def test_a_file_that_is_no_outbox_is_named(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("no database")
    with pytest.raises(PythonException, match=r"notes\.db") as caught:
        rows(spark, tmp_path / "notes.db", "open")
    assert "Traceback" not in str(caught.value)


def test_files_that_are_no_outbox_are_rows(spark: SparkSession, hosts: Path) -> None:
    (hosts / "empty.db").touch()
    (hosts / "notes.db").write_text("no database")
    (hosts / "folder.db").mkdir()
    damaged = (hosts / "host2.db").read_bytes()
    (hosts / "host2.db").write_bytes(damaged[: len(damaged) // 3])
    bad = {"empty.db", "notes.db", "folder.db", "host2.db"}
    for view in COLUMNS:
        reader = spark.read.format("reliablepub_outbox").option("view", view)
        df = reader.option("unreadable", "collect").load(f"{hosts}/*.db")
        assert df.columns == [*COLUMNS[view], "_error"]
        failed = df.where("_error IS NOT NULL").collect()
        assert {Path(row.outbox).name for row in failed} == bad
        assert all(row.outbox in row["_error"] for row in failed)
        good = df.where("_error IS NULL").collect()
        assert {Path(row.outbox).name for row in good} <= {"host0.db", "host1.db"}
        if view in ("open", "audit"):
            assert len(good) == 2


def test_braces_and_uris(spark: SparkSession, hosts: Path) -> None:
    reader = spark.read.format("reliablepub_outbox")
    for path in (f"{hosts}/host{{0,2}}.db", f"{hosts.as_uri()}/{{host0,ho{{st2,nothing}}}}.db"):
        assert sorted(row.message_id for row in reader.load(path).collect()) == ["open-0", "open-2"]
    with pytest.raises(AnalysisException, match="by an absolute path"):
        reader.load("hdfs://host/x/*.db").collect()


def test_the_columns_are_those_of_the_views(tmp_path: Path, fake: FakeBroker) -> None:
    path = tmp_path / "a.db"
    keeping = Publisher(
        fake.url, outbox=path, keep_confirmed_s=60, retry=RetryPolicy(returned=ONCE)
    )
    with keeping as publisher:
        publisher.publish(b"", routing_key="q").result(10)
        publisher.publish_many(Message(b"", routing_key="nobody") for _ in range(2)).wait(10)
    with Outbox(path) as outbox:
        outbox.retry([outbox.parked()[0].id])
        for view in COLUMNS:
            row = next(outbox.rows(view))
            source = OutboxDataSource({"path": "x", "view": view})
            assert set(source.schema().names) == {"outbox", *row}, view
