"""Spark Declarative Pipelines: the sink as the target of a flow."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from reliablepub.testing import FakeBroker
from tests.spark.standalone import HOME, environment

pytestmark = [
    pytest.mark.spark_versions,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (HOME / "pipelines").is_dir() or None in map(find_spec, ("grpc", "yaml")),
        reason="Spark has pipelines since 4.1, for Spark Connect",
    ),
]

FLOW = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

dp.create_sink("to_orders", "rabbitmq", {options})

@dp.append_flow(target="to_orders")
def orders():
    return SparkSession.active().readStream.format("text").load({source!r})
"""


def test_a_flow_into_the_sink(fake: FakeBroker, tmp_path: Path) -> None:
    """Run twice: the second time has one line more."""
    source = tmp_path / "source"
    source.mkdir()
    options = {"url": fake.url, "routing_key": "q", "idColumns": "value"}
    (tmp_path / "flow.py").write_text(FLOW.format(options=options, source=str(source)))
    spec = {
        "name": "orders",
        "storage": (tmp_path / "storage").as_uri(),
        "libraries": [{"glob": {"include": "flow.py"}}],
    }
    (tmp_path / "spark-pipeline.yml").write_text(json.dumps(spec))  # JSON is YAML
    for line in "ab":
        (source / f"{line}.txt").write_text(line)
        done = subprocess.run(
            [str(HOME / "bin" / "spark-pipelines"), "run"],
            cwd=tmp_path,
            env=environment(Path(sys.executable)),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(message.body for message in fake.messages("q")) == [b"a", b"b"]
