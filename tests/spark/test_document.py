"""The Python of docs/spark.md and of the README that needs Spark runs here, not in tests/docs."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from reliablepub.testing import FakeBroker
from tests.docs.documents import PLACEHOLDER, README, ROOT, blocks, run

pytestmark = pytest.mark.timeout(300)


def test_the_python_of_the_document_runs(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(ROOT / "docs" / "spark.md", tmp_path)  # whose `getOrCreate` finds the session


def test_the_spark_of_the_readme_runs(spark: SparkSession) -> None:
    (block,) = (block for block in blocks(README) if block.language == "py")
    with FakeBroker() as broker:
        broker.declare_exchange("orders", "topic")
        broker.declare_queue("invoices")
        broker.bind("invoices", "orders", "created.#")
        exec(compile(block.text.replace(PLACEHOLDER, broker.url), str(README), "exec"), {})
        bodies = {message.body for message in broker.messages("invoices")}
    assert bodies == {b'{"order":1,"country":"it"}', b'{"order":2,"country":"fr"}'}
