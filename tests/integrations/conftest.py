"""A database for the outbox and the application, and a relay that drains it to a test's brokers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from reliablepub import Publisher, Status
from tests.amqp_probe import AmqpProbe
from tests.integrations.engines import engine_of
from tests.stores import Where


@pytest.fixture
def database(where: Where) -> str:
    """The path of a file, then the URL of a PostgreSQL database: for what must hold on both."""
    return str(where)


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    made = engine_of(database)
    yield made
    made.dispose()


@pytest.fixture
def relayed(path: Path, broker: AmqpProbe) -> Callable[[], Status]:
    """Publish everything in the outbox, to the fake broker or to RabbitMQ."""

    def relay() -> Status:
        with Publisher(broker.url, outbox=path) as publisher:
            return publisher.flush(timeout_s=60)

    return relay
