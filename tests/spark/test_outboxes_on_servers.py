"""`spark.read.format("reliablepub_outbox")`: outboxes in PostgreSQL, as those in files."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import DataFrame, SparkSession

from reliablepub import (
    ConfigurationError,
    Message,
    Outbox,
    OutboxKeys,
    OutboxUnreachable,
    Publisher,
    RetryPolicy,
)
from reliablepub.testing import FakeBroker
from spark_sink import OutboxDataSource
from spark_sink.outboxes import COLUMNS
from tests.policies import ONCE
from tests.rabbitmq import free_ports
from tests.spark.session import CANARY
from tests.spark.test_secrets import shown

pytestmark = pytest.mark.timeout(300)


def read(spark: SparkSession, *places: object, **options: object) -> DataFrame:
    reader = spark.read.format("reliablepub_outbox").options(**options)  # type: ignore[arg-type]
    return reader.load([str(place) for place in places] if places else None)


def filled(where: object, fake: FakeBroker) -> None:
    """An outbox with rows in each view: open, parked, confirmed, attempts, an intervention."""
    outbox = Outbox(str(where))
    outbox.create()
    keeping = Publisher(
        fake.url, outbox=str(where), keep_confirmed_s=60, retry=RetryPolicy(returned=ONCE)
    )
    with keeping as publisher:
        publisher.publish_many(Message(b"secret", routing_key="q") for _ in range(5)).wait(10)
        publisher.publish_many(Message(b"secret", routing_key="nobody") for _ in range(7)).wait(10)
    outbox.retry([outbox.parked()[0].id])
    outbox.enqueue_many(Message(b"secret", "orders", message_id=f"open-{n}") for n in range(9))
    outbox.close()


def test_a_server_gives_the_rows_that_a_file_gives(
    spark: SparkSession, postgres_outbox: str, fake: FakeBroker, path: Path
) -> None:
    for where in (path, postgres_outbox):
        filled(where, fake)
    name = Outbox(postgres_outbox).name
    assert name == postgres_outbox.replace("postgres@", "")
    counts = {"open": 10, "parked": 6, "confirmed": 5, "history": 7, "interventions": 1, "audit": 1}
    for view in COLUMNS:
        df = read(spark, path, postgres_outbox, view=view)
        assert df.rdd.getNumPartitions() == 2
        of = {place: df.where(df.outbox == place).collect() for place in (str(path), name)}
        assert [len(rows) for rows in of.values()] == [counts[view]] * 2, view
        assert "secret" not in str(of)
        for rows in of.values():
            assert [row.asDict().keys() for row in rows[:1]] == [dict.fromkeys(df.columns).keys()]
        # What neither clocks, ids nor the database decide is equal.
        alike = {"state", "outcome", "reply_code", "reply_text", "attempts", "size", "stored"}
        alike &= {*df.columns}
        file, server = (sorted(tuple(row[c] for c in sorted(alike)) for row in of[p]) for p in of)
        assert file == server, view


@pytest.mark.parametrize("kind", ["file", "server"])
def test_ranges_add_up_to_the_rows_of_the_whole(
    spark: SparkSession, request: pytest.FixtureRequest, fake: FakeBroker, path: Path, kind: str
) -> None:
    where = path if kind == "file" else request.getfixturevalue("postgres_outbox")
    filled(where, fake)
    for view, partitions in (("open", 2), ("open", 100), ("history", 3), ("audit", 3)):
        df = read(spark, where, view=view, numPartitions=partitions)
        assert Counter(df.collect()) == Counter(read(spark, where, view=view).collect()), view
    assert read(spark, where, numPartitions=4).rdd.getNumPartitions() == 4
    assert read(spark, where, view="audit", numPartitions=4).rdd.getNumPartitions() == 1
    assert 1 < read(spark, where, numPartitions=100).rdd.getNumPartitions() <= 22


def test_encrypted_messages_in_another_schema(spark: SparkSession, postgres_url: str) -> None:
    outbox = Outbox(f"{postgres_url}?schema=orders", keys=OutboxKeys({"k": bytes(32)}))
    outbox.create()
    outbox.enqueue(Message(b"secret", "orders", "new", message_id="m-1"))
    outbox.close()
    [row] = read(spark, f"{postgres_url}?schema=orders").collect()
    assert (row.outbox, row.message_id, row.routing_key) == (outbox.name, "m-1", "new")
    assert row.outbox.endswith("?schema=orders")
    assert "secret" not in str(row)


def test_reading_writes_nothing(
    spark: SparkSession, postgres_outbox: str, fake: FakeBroker
) -> None:
    filled(postgres_outbox, fake)
    read_only = f"{postgres_outbox}?options=-c%20default_transaction_read_only%3Don"
    with pytest.raises(OutboxUnreachable, match="read-only transaction"):
        Outbox(read_only).enqueue(Message(b"", "orders"))
    for view in COLUMNS:
        assert read(spark, read_only, view=view, numPartitions=2).collect(), view


def test_what_cannot_be_reached_or_is_no_outbox_is_a_row(
    spark: SparkSession, postgres_url: str, new_postgres_outbox: Callable[[], str]
) -> None:
    [port] = free_ports(1)
    away = f"postgresql://app:{CANARY}@127.0.0.1:{port}/shop"
    good = new_postgres_outbox()
    Outbox(good).enqueue(Message(b"", "orders"))
    for partitions in (1, 3):
        options = {"url": f"{away}, {postgres_url},{good}", "numPartitions": partitions}
        rows = read(spark, unreadable="collect", **options).collect()
        reasons = {row.outbox: row["_error"] for row in rows}
        assert len(rows) == len(reasons) == 3
        assert "cannot be reached" in reasons.pop(f"postgresql://127.0.0.1:{port}/shop")
        assert "there is no outbox" in reasons.pop(Outbox(postgres_url).name)
        assert reasons == {Outbox(good).name: None}
        assert CANARY not in str(rows)
    with pytest.raises(PythonException, match="cannot be reached") as caught:
        read(spark, url=away, numPartitions=2).collect()
    assert CANARY not in str(caught.value)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": f"postgresql://app:{CANARY}@h/shop"}, "give the URL as option 'url'"),
        ({"path": f"postgres://h/shop?user=app&pass%77ord={CANARY}"}, "give the URL as option"),
        ({"paths": f'["/a.db", "postgresql://app:{CANARY}@h/shop"]'}, "give the URL as option"),
        ({"url": f"postgresql://app:{CANARY}/@h/shop"}, "the URL of the outbox cannot be"),
        ({"url": f"amqp://app:{CANARY}@h/"}, "option 'url' takes postgresql://"),
        ({"url": f"app:{CANARY}@h/shop"}, "option 'url' takes postgresql://"),
        ({"path": f"postgresql+psycopg://app:{CANARY}@h/shop"}, "by an absolute path, load"),
        ({"path": "/a.db", "numPartitions": "0"}, "'numPartitions' must be a whole number from 1"),
        ({"path": "/a.db", "numPartitions": "many"}, "'numPartitions' must be a whole number"),
    ],
)
def test_mistakes_are_named_without_the_password(options: dict[str, str], words: str) -> None:
    source = OutboxDataSource(options)
    with pytest.raises(ConfigurationError, match=words) as caught:
        source.reader(source.schema()).partitions()
    assert CANARY not in str(caught.value)


def test_without_psycopg_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name.startswith("reliablepub.outbox.postgres"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    source = OutboxDataSource({"path": "postgresql://h/shop"})
    with pytest.raises(ConfigurationError, match=r"install reliablepub with the extra postgres"):
        source.reader(source.schema())


def test_the_password_of_a_url_is_nowhere(
    spark: SparkSession, postgres_outbox: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Outbox(postgres_outbox).enqueue(Message(b"", "orders"))
    url = postgres_outbox.replace("postgres@", f"postgres:{CANARY}@")
    spark.sparkContext.setLogLevel("INFO")
    try:
        df = read(spark, url=url, numPartitions=2)
        assert [row.exchange for row in df.collect()] == ["orders"]
        df.explain(extended=True)
        df.createOrReplaceTempView("outboxes")
        assert spark.table("outboxes").groupBy("outbox").count().collect()
        spark.table("outboxes").explain("formatted")
        with pytest.raises(AnalysisException, match="give the URL as option 'url'") as caught:
            read(spark, url)
    finally:
        spark.sparkContext.setLogLevel("OFF")
        spark.catalog.dropTempView("outboxes")
    assert CANARY not in str(caught.value)
    assert CANARY not in shown(spark)
    assert CANARY not in "".join(capfd.readouterr())
