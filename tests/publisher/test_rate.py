"""A backlog goes out at the rate that was asked for."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from reliablepub import ConfigurationError, Message, Publisher
from reliablepub.testing import FakeBroker
from tests.asking import fill


def backlog(folder: Path, count: int) -> Path:
    """An outbox with so many messages."""
    fill(folder / "o.db", *(Message(b"", routing_key="q") for _ in range(count)))
    return folder / "o.db"


def test_a_backlog_goes_out_at_the_rate(tmp_path: Path) -> None:
    path = backlog(tmp_path, 40)
    with FakeBroker() as broker:
        broker.declare_queue("q")
        began = time.monotonic()
        with Publisher(broker.url, outbox=path, rate_max=30, rate_burst=10) as publisher:
            assert publisher.flush(60).open == 0
            assert publisher.status.rate_max == 30
        assert time.monotonic() - began >= 30 / 30  # but for the burst, one by one
        assert len(broker.published) == 40


def test_a_relay_has_it_as_options_and_shows_it(tmp_path: Path) -> None:
    path = backlog(tmp_path, 12)
    with FakeBroker() as broker:
        broker.declare_queue("q")
        run = [sys.executable, "-m", "reliablepub"]
        options = ["--outbox", str(path), "--url", broker.url, "--rate", "2", "--burst", "2"]
        began = time.monotonic()
        relay = subprocess.Popen([*run, "relay", "--drain", *options])
        shown: Any = None
        while relay.poll() is None and shown != 2:
            told = subprocess.run(
                [*run, "outbox", "status", "--json", "--outbox", str(path)],
                check=True,
                capture_output=True,
            )
            shown = json.loads(told.stdout)["rate_max"]
        assert relay.wait(60) == 0
        assert time.monotonic() - began >= 10 / 2
        assert shown == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rate_max": 0}, "rate_max is 0"),
        ({"rate_max": float("inf")}, "rate_max is inf"),
        ({"rate_max": 5, "rate_burst": 0}, "rate_burst is 0"),
        ({"rate_max": 5, "rate_burst": 1.5}, "rate_burst is 1.5"),
        ({"rate_burst": 5}, "needs rate_max"),
    ],
)
def test_what_is_no_rate_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Publisher("amqp://localhost/", outbox=None, **options)
