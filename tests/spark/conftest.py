"""What the tests of the Spark sink share: one session, a broker, a folder."""

from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from reliablepub.testing import FakeBroker
from spark_sink import connection
from tests.spark.session import spark_session

HERE = Path(__file__).parent
UNCLOSED_BY = ("4.0.", "4.1.")
"""Versions of PySpark whose `collect` leaves its socket to the garbage collector, and says so in
`pyspark.util._load_from_socket`; 4.2 closes it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those sockets are no fault of ours. One that were would show with the other versions."""
    if pyspark.__version__.startswith(UNCLOSED_BY):
        unclosed = pytest.mark.filterwarnings(
            r"ignore:unclosed <socket.socket .*raddr=\('127.0.0.1', \d+\)>:ResourceWarning"
        )
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(unclosed)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The Spark session of the test run."""
    with spark_session(tmp_path_factory.mktemp("spark")) as session:
        yield session


@pytest.fixture
def fake() -> Iterator[FakeBroker]:
    """The fake broker with a queue `q`."""
    with FakeBroker() as broker:
        broker.declare_queue("q")
        yield broker
        connection.close_idle()


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """A folder for reports."""
    return tmp_path / "report"


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[None]:
    """Several Arrow batches even of few rows."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    yield
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
