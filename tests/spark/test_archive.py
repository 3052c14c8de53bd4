"""The archive for clusters: it is small, and a Python that has nothing else can publish with it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from reliablepub import Message, Outbox
from reliablepub.testing import FakeBroker
from spark_sink import archive
from tests.spark.shipping import bare_python, shipped

BYTES_MAX = 2_000_000
PROGRAM = """
import sys
import pyarrow as pa
from pyspark.sql.types import StringType, StructField, StructType

from reliablepub import Outbox
from spark_sink import OutboxDataSource, RabbitMQDataSource, SinkListener, connection
from spark_sink.identity import ByContent
from spark_sink.rows import Rows
from spark_sink.task import Sending

url, outbox = sys.argv[1:]
source = RabbitMQDataSource({"url": url, "routing_key": "q", "valueformat": "json"})
writer = source.writer(StructType([StructField("value", StringType())]), overwrite=False)
with connection.publisher(writer._settings) as lent:
    sending = Sending(lent, writer._settings, 0)
    batch = pa.RecordBatch.from_pydict({"value": ["a", "b"]})
    rows = Rows(writer._columns, ByContent("w", 0))
    assert not list(sending.send(rows.messages(batch), 0))
    assert not list(sending.finish())
connection.close_idle()
for view in ("open", "parked", "confirmed", "history", "interventions", "audit"):
    list(Outbox(outbox).rows(view))
print(sending.counts.confirmed, "spark_sink" in sys.modules["spark_sink"].__file__)
"""
BY_NAME = """
import sys
from pyspark.sql import SparkSession

url, outbox = sys.argv[1:]
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
rows = spark.sql("SELECT 'a' value")
rows.write.format("rabbitmq").options(url=url, routing_key="q").mode("append").save()
print(spark.read.format("reliablepub_outbox").load(outbox).count())
spark.stop()
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "reliablepub.zip"
    assert archive.build(path) == path.stat().st_size
    return path


def test_it_is_small_and_holds_what_is_needed_alone(built: Path) -> None:
    assert built.stat().st_size < BYTES_MAX
    with zipfile.ZipFile(built) as zipped:
        names = zipped.namelist()
    folders = {name.split("/")[0] for name in names if "/" in name and "dist-info" not in name}
    assert folders == {"pika", "reliablepub", "spark_sink", "tenacity"}
    assert {"pyspark_rabbitmq.py", "pyspark_reliablepub_outbox.py"} <= set(names)
    assert any("LICENSE" in name and name.startswith("pika") for name in names)
    assert not any("/cli/" in name or "/testing/" in name or "/demo/" in name for name in names)


def test_the_same_files_give_the_same_bytes(built: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.zip"
    archive.build(again)
    assert again.read_bytes() == built.read_bytes()


def test_a_python_with_nothing_else_publishes_and_reads_outboxes(
    built: Path, tmp_path: Path, fake: FakeBroker
) -> None:
    python = bare_python(tmp_path / "python")
    with Outbox(tmp_path / "app.db") as outbox:
        outbox.enqueue(Message(b"x", routing_key="q"))
    done = subprocess.run(
        [str(python), "-c", PROGRAM, fake.url, str(tmp_path / "app.db")],
        cwd=tmp_path,
        env={"PYTHONPATH": str(built)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "2 True\n", done.stderr
    assert sorted(message.body for message in fake.messages("q")) == [b'"a"', b'"b"']


@pytest.mark.timeout(300)
def test_from_a_wheel_it_is_the_same_and_spark_finds_the_sources_by_name(
    built: Path, tmp_path: Path, fake: FakeBroker
) -> None:
    package, unpacked = shipped(tmp_path)
    with zipfile.ZipFile(built) as one, zipfile.ZipFile(package) as other:
        names = [[n for n in z.namelist() if "dist-info" not in n] for z in (one, other)]
        assert names[0] == names[1]
        assert all(one.read(name) == other.read(name) for name in names[0])
    with Outbox(tmp_path / "app.db") as outbox:
        outbox.enqueue(Message(b"x", routing_key="q"))
    python = str(bare_python(tmp_path / "python"))
    done = subprocess.run(
        [python, "-c", BY_NAME, fake.url, str(tmp_path / "app.db")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(unpacked), "PYSPARK_PYTHON": python},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "1\n", done.stderr
    assert [message.body for message in fake.messages("q")] == [b"a"]


def test_the_command_says_how_large_it_is(tmp_path: Path) -> None:
    path = tmp_path / "reliablepub.zip"
    command = [sys.executable, "-m", "spark_sink.archive", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{path}: {path.stat().st_size / 1e6:.1f} MB\n"
