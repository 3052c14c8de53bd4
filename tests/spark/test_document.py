"""The Python of docs/spark.md runs here, not in tests/docs."""

import os
import subprocess
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from reliablepub.testing import FakeBroker
from tests.docs.documents import PLACEHOLDER, ROOT, blocks, run
from tests.spark.shipping import wheel_python

pytestmark = pytest.mark.timeout(300)


def test_the_python_of_the_document_runs(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(ROOT / "docs" / "spark.md", tmp_path)  # whose `getOrCreate` finds the session


@pytest.mark.spark_versions
def test_the_page_can_be_pasted_where_only_the_wheel_is_installed(
    tmp_path: Path, fake: FakeBroker
) -> None:
    """Its Python alone, without what only the tests see."""
    page = ROOT / "docs" / "spark.md"
    pasted = "\n".join(block.text for block in blocks(page) if block.language == "python")
    python = wheel_python(tmp_path / "python")
    done = subprocess.run(
        [python, "-c", pasted.replace(PLACEHOLDER, fake.url)],
        cwd=tmp_path,
        env={**os.environ, "PYSPARK_PYTHON": str(python)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5_000:]
