"""Clusters whose Python does not have our package: it is shipped to them, in each way there is."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.amqp_probe import AmqpProbe
from tests.spark.drained import assert_once_by_id, drained
from tests.spark.job import BODY_BYTES
from tests.spark.shipping import ROOT, bare_python, shipped
from tests.spark.standalone import connect_server, environment, standalone, submit

pytestmark = [pytest.mark.rabbit, pytest.mark.spark_versions, pytest.mark.timeout(1200)]

ROWS = 2_000
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Cluster:
    """Two hosts without our package.

    Attributes:
        master: its address.
        python: what runs its tasks.
        package: our package as a zip.
        unpacked: the same, unpacked.
        folder: for whatever is needed.
    """

    master: str
    python: Path
    package: Path
    unpacked: Path
    folder: Path

    def run(self, *arguments: str, path: Path | None = None, **confs: str) -> None:
        """Submit `tests.spark.job`, from a folder where it finds nothing of ours."""
        program = self.folder / "job.py"
        program.write_text((HERE / "job.py").read_text())
        confs = {"spark.cores.max": "2"} | confs
        done = subprocess.run(
            submit(self.master, confs, *arguments),
            cwd=self.folder,
            env=environment(self.python, path),
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    python = bare_python(folder / "python")
    with standalone(folder, python) as master:
        yield Cluster(master, python, *shipped(folder), folder)


def job(cluster: Cluster, url: str, queue: str) -> list[str]:
    options = [f"--option=url={url}", f"--option=routing_key={queue}"]
    program = str(cluster.folder / "job.py")
    return [program, f"--master={cluster.master}", f"--rows={ROWS}", *options]


def assert_all_arrived(rabbitmq: AmqpProbe, queue: str) -> None:
    expected = Counter(str(n).ljust(BODY_BYTES).encode() for n in range(ROWS))
    assert_once_by_id(drained(rabbitmq.url, queue), expected)


@pytest.mark.parametrize("name", ["reliablepub", "spark_sink", "pika"])
def test_the_python_of_the_cluster_does_not_have_it(cluster: Cluster, name: str) -> None:
    command = [str(cluster.python), "-c", f"import pyspark, pyarrow; import {name}"]
    done = subprocess.run(command, cwd=cluster.folder, capture_output=True, text=True, check=False)
    assert f"No module named '{name}'" in done.stderr


def test_with_py_files(cluster: Cluster, rabbitmq: AmqpProbe) -> None:
    queue = rabbitmq.declare_queue()
    program = job(cluster, rabbitmq.url, queue)
    cluster.run("--py-files", str(cluster.package), *program, "--register")
    assert_all_arrived(rabbitmq, queue)


def test_with_an_archive(cluster: Cluster, rabbitmq: AmqpProbe) -> None:
    """The executors unpack it; the driver has it on its path, where Spark finds it by its name."""
    queue = rabbitmq.declare_queue()
    cluster.run(
        *("--archives", f"{cluster.package}#shipped"),
        *job(cluster, rabbitmq.url, queue),
        path=cluster.unpacked,
        **{"spark.executorEnv.PYTHONPATH": "shipped"},
    )
    assert_all_arrived(rabbitmq, queue)


def remote(cluster: Cluster, what: str, **arguments: object) -> dict[str, Any]:
    """What `tests.spark.remote` tells; it has the package, and PySpark's client."""
    command = [sys.executable, "-m", "tests.spark.remote", what, f"--package={cluster.package}"]
    command += [f"--{name}={value}" for name, value in arguments.items()]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_as_an_artifact_of_spark_connect(
    cluster: Cluster, rabbitmq: AmqpProbe, tmp_path: Path
) -> None:
    queue = rabbitmq.declare_queue()
    with connect_server(tmp_path, cluster.master, cluster.python) as address:
        told = remote(
            cluster, "batch", address=address, url=rabbitmq.url, queue=queue, folder=tmp_path
        )
    assert_all_arrived(rabbitmq, queue)
    log = (tmp_path / "connect.log").read_text()
    assert f": {ROWS} rows in 4 partitions, {ROWS} confirmed, " in log
    assert "there is no option 'rootingkey'" in told["mistake"]
    assert told["open"] == ["of the outbox"]


def test_streams_of_spark_connect(cluster: Cluster, rabbitmq: AmqpProbe, tmp_path: Path) -> None:
    """Artifacts do not reach the tasks of streams, so the server's executors have an archive."""
    queue = rabbitmq.declare_queue()
    archive = {
        "spark.archives": f"{cluster.package}#shipped",
        "spark.executorEnv.PYTHONPATH": "shipped",
    }
    with connect_server(
        tmp_path, cluster.master, cluster.python, cluster.unpacked, **archive
    ) as address:
        remote(cluster, "stream", address=address, url=rabbitmq.url, queue=queue, folder=tmp_path)
    lines = Counter({b"a": 2, b"b": 2, b"c": 1})
    assert_once_by_id(drained(rabbitmq.url, queue), lines + lines)
