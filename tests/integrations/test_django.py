"""The Django application, in a project of its own, under Django's own test runner."""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from reliablepub.testing import FakeBroker
from tests.amqp_probe import AmqpProbe

if TYPE_CHECKING:  # it needs psycopg
    from tests.postgres import PostgresServer

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(
    params=["sqlite", pytest.param("postgres", marks=[pytest.mark.postgres, pytest.mark.rabbit])]
)
def server(request: pytest.FixtureRequest) -> str:
    """Host, port and user of a PostgreSQL server; or nothing."""
    if request.param == "sqlite":
        return ""
    found: PostgresServer = request.getfixturevalue("postgres_server")
    return f"127.0.0.1 {found.port} postgres"


@pytest.fixture
def broker(server: str, request: pytest.FixtureRequest) -> AmqpProbe:
    """RabbitMQ beside PostgreSQL, the fake broker beside SQLite: only the relay speaks to it."""
    if server:
        found: AmqpProbe = request.getfixturevalue("rabbitmq")
        return found
    fake: FakeBroker = request.getfixturevalue("fake_broker")
    return AmqpProbe(fake.url)


@pytest.mark.timeout(600)
def test_the_django_application(broker: AmqpProbe, server: str, tmp_path: Path) -> None:
    """In a process of its own: Django is configured once and for all.

    The test runner drops its databases, which a server refuses as long as a connection is open.
    """
    queue = broker.declare_queue()
    environment = {
        "SHOP_SERVER": server,
        "DJANGO_SETTINGS_MODULE": "tests.integrations.django_settings",
        "SHOP_FOLDER": str(tmp_path),
        "SHOP_URL": broker.url,
        "SHOP_QUEUE": queue,
    }
    command = ["-W", "error", "-m", "django", "test", "tests.integrations.django_cases"]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "OK" in done.stderr
    assert {body for body, _ in broker.drain(queue, 2)} >= {b"1", b"2"}
