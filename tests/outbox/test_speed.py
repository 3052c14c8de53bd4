"""How soon a relay in another process sends what was enqueued here."""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reliablepub.message import Message
from reliablepub.outbox.outbox import Outbox
from reliablepub.testing import FakeBroker

pytestmark = pytest.mark.bench
COUNT = 100


def test_a_commit_elsewhere_is_seen_at_once(path: Path) -> None:
    with FakeBroker() as broker, Outbox(path) as outbox:
        broker.declare_queue("all")
        outbox.enqueue(Message(b"", routing_key="all"))
        arguments = ["relay", "--outbox", str(path), "--url", broker.url]
        relay = subprocess.Popen([sys.executable, "-m", "reliablepub", *arguments], env=os.environ)
        try:
            broker.wait_for(1, timeout_s=60)
            delays_ms = []
            for number in range(2, COUNT + 2):
                outbox.enqueue(Message(b"", routing_key="all"))
                begun = time.monotonic()
                while broker.published_count < number:
                    time.sleep(0.001)
                delays_ms.append((time.monotonic() - begun) * 1000)
                time.sleep(0.02 + number % 7 / 100)
        finally:
            relay.terminate()
            relay.wait()
    delays_ms.sort()
    print(
        f"\nfrom enqueue() to the broker, another process relays: "
        f"p50 {statistics.median(delays_ms):.0f} ms, p95 {delays_ms[int(COUNT * 0.95)]:.0f} ms, "
        f"most {delays_ms[-1]:.0f} ms"
    )
