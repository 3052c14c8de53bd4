"""A file for the outbox and the application, and a relay that drains it to the brokers of a test.

The outbox is a SQLite file; test_postgres_joined.py has PostgreSQL's cells.
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from reliablepub import Publisher, Status
from tests.amqp_probe import AmqpProbe


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture
def relayed(path: Path, broker: AmqpProbe) -> Callable[[], Status]:
    """Publish everything in the outbox, to the fake broker or to RabbitMQ."""

    def relay() -> Status:
        with Publisher(broker.url, outbox=path) as publisher:
            return publisher.flush(timeout=60)

    return relay


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
