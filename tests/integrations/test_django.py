"""The Django application, in a project of its own, under Django's own test runner.

The databases are SQLite files; PostgreSQL's cells belong beside them, in `django_settings`.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.amqp_probe import AmqpProbe

ROOT = Path(__file__).parent.parent.parent


def test_the_django_application(broker: AmqpProbe, tmp_path: Path) -> None:
    """In a process of its own: Django is configured once and for all."""
    queue = broker.declare_queue()
    environment = {
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
