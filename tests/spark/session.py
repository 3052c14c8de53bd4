"""The one Spark session of a test run, since a Java machine takes seconds to start.

Knows: the session's configuration. Must never know: tests.
"""

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from pyspark.sql import SparkSession

from tests.rabbitmq import free_ports
from tests.spark.troubled import TroubledDataSource

ENVIRONMENT_PORT = "reliablepub.test.port"
"""Where the session tells the port of the broker that its workers have in RELIABLEPUB_URL."""
PASSWORD_VARIABLE = "BROKER_PASSWORD"
CANARY = "canary-4f1d"
"""A password that the executors have in that variable, and that Spark must not show."""


@contextmanager
def spark_session(folder: Path) -> Iterator[SparkSession]:
    """A session with two task slots that tries each task twice.

    A cluster tries a task four times. Two attempts show a retry as well, and a test of an error
    that lasts takes half as long: each failed attempt costs a new Python worker.
    """
    events = folder / "events"
    events.mkdir()
    (port,) = free_ports(1)
    builder = (
        SparkSession.builder.master("local[2,2]")
        .appName("reliablepub")
        .config(ENVIRONMENT_PORT, port)
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.eventLog.enabled", "true")  # test_secrets reads what it says
        .config("spark.eventLog.compress", "false")
        .config("spark.eventLog.dir", events.as_uri())
        .config(f"spark.executorEnv.{PASSWORD_VARIABLE}", CANARY)
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.ui.port", "0")
        .config("spark.ui.showConsoleProgress", "false")
    )
    environment = {
        "PYSPARK_PYTHON": str(_worker_python(folder / "python")),
        "RELIABLEPUB_URL": f"amqp://guest:guest@127.0.0.1:{port}/",
        PASSWORD_VARIABLE: CANARY,  # a local master sets no variables of spark.executorEnv
    }
    with patch.dict(os.environ, environment):  # the Java machine keeps what it is born with
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    session.dataSource.register(TroubledDataSource)
    try:
        yield session
    finally:
        session.stop()


def _worker_python(path: Path) -> Path:
    """This Python, for workers that import what is installed, compiled.

    Spark puts its pyspark.zip first on their path. Python keeps no bytecode of a zip, so that each
    daemon compiles pyspark anew, in a second of CPU time; a streaming query starts four.
    """
    path.write_text(
        "#!/bin/sh\n"
        "unset PYTHONPATH PYTHONDONTWRITEBYTECODE\n"
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    path.chmod(0o755)
    return path
