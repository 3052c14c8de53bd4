"""The Python of docs/spark.md runs here, not in tests/docs."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.docs.documents import ROOT, run

pytestmark = pytest.mark.timeout(300)


def test_the_python_of_the_document_runs(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(ROOT / "docs" / "spark.md", tmp_path)  # whose `getOrCreate` finds the session
