"""How late scheduled messages arrive, at 1 000 due a second, also while relays are killed.

A relay and one that stands by for it, as processes of their own; a killed one is followed by the
next. Lateness is from `not_before` to the consumer's callback, of the first copy of each message.

    pytest -m bench -s tests/speed/test_lateness.py     # two minutes
    pytest -m soak -s tests/speed/test_lateness.py      # 5 million messages wait besides
"""

import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Self

import pika
import pytest

from reliablepub import Message, Outbox, Publisher
from tests.amqp_probe import AmqpProbe
from tests.speed.measuring import Goal, check, print_table, spaced
from tests.stores import DURABLE, Where, outbox_of

pytestmark = [pytest.mark.rabbit, pytest.mark.timeout(3_600)]

A_SECOND = 1_000
LASTS_S = 24
LEAD_S = 8.0
"""From the moment when all is stored and the relays are started to the first due time."""
FAR_S = 30 * 86_400.0
BODY = bytes(500)
NOWHERE = "amqp://guest:guest@127.0.0.1:9/%2F"  # the port of "discard", where nobody listens


@pytest.fixture(params=DURABLE)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def where(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Where:
    found = outbox_of(kind, request, tmp_path)
    assert found is not None
    return found


class Consumer:
    """Notes how late each message is when it arrives for the first time."""

    def __init__(self, url: str, queue: str) -> None:
        self._url, self._queue = url, queue
        self.late_s: dict[int, float] = {}
        self.copies = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            channel = connection.channel()
            for delivery, properties, _ in channel.consume(
                self._queue, auto_ack=True, inactivity_timeout=0.1
            ):
                now = time.time()
                if self._is_over.is_set():
                    break
                if delivery is None:
                    continue
                assert properties is not None
                assert properties.headers is not None
                self.copies += 1
                self.late_s.setdefault(
                    properties.headers["number"], now - properties.headers["due_us"] / 1e6
                )


def store(where: Where, queue: str, first_at: float, count: int) -> None:
    """Store messages that are due one by one."""
    with Publisher(NOWHERE, outbox=where, close_timeout_s=0) as publisher:
        publisher.publish_many(
            Message(
                BODY,
                routing_key=queue,
                headers={"number": number, "due_us": round(at * 1e6)},
                not_before=datetime.fromtimestamp(at, UTC),
            )
            for number in range(count)
            if (at := first_at + number / A_SECOND)
        )


class Relays:
    """A relay, and one that stands by."""

    def __init__(self, where: Where, url: str) -> None:
        program = [sys.executable, "-m", "reliablepub", "relay", "--standby"]
        self._command: list[str] = [*program, "--outbox", str(where), "--url", url]
        self._running: list[subprocess.Popen[bytes]] = []
        self.peak_kib = 0

    def __enter__(self) -> Self:
        for _ in range(2):
            self._start()
            time.sleep(LEAD_S / 3)
        return self

    def __exit__(self, *_: object) -> None:
        while self._running:
            self._end()

    def kill(self) -> None:
        """Kill the one that relays; start one that stands by for the other."""
        self._end()
        self._start()

    def _start(self) -> None:
        self._running.append(
            subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )

    def _end(self) -> None:
        process = self._running.pop(0)
        assert process.poll() is None
        status = Path(f"/proc/{process.pid}/status").read_text()
        (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
        self.peak_kib = max(self.peak_kib, int(peak))
        process.kill()
        process.wait()


@pytest.mark.parametrize("kill_every_s", [inf, 6.0], ids=["alive", "killed"])
@pytest.mark.parametrize(
    "far",
    [
        pytest.param(0, marks=pytest.mark.bench, id="short"),
        pytest.param(5_000_000, marks=pytest.mark.soak, id="long"),
    ],
)
def test_scheduled_messages_arrive_when_they_are_due(
    far: int, kill_every_s: float, kind: str, where: Where, rabbitmq: AmqpProbe
) -> None:
    queue = rabbitmq.declare_queue()
    count = A_SECOND * LASTS_S
    store(where, queue, time.time() + FAR_S, far)
    first_at = time.time() + LEAD_S + count / 1_000
    store(where, queue, first_at, count)
    assert time.time() < first_at - LEAD_S
    time.sleep(first_at - LEAD_S - time.time())
    with (
        Outbox(where) as outbox,
        Consumer(rabbitmq.url, queue) as consumer,
        Relays(where, rabbitmq.url) as relays,
    ):
        kill_at = first_at + kill_every_s / 2
        while kill_at < first_at + LASTS_S:
            time.sleep(max(0.0, kill_at - time.time()))
            relays.kill()
            kill_at += kill_every_s
        patience = first_at + LASTS_S + 60
        while len(consumer.late_s) < count and time.time() < patience:
            time.sleep(0.1)
        while outbox.status().open > far and time.time() < patience:  # its confirm is to come
            time.sleep(0.1)
    late_ms = sorted(1_000 * late_s for late_s in consumer.late_s.values())
    assert len(late_ms) == count
    assert late_ms[0] >= 0
    p50, p99, worst = (late_ms[int(part * (count - 1))] for part in (0.5, 0.99, 1.0))
    cells = (f"{p50:.0f} ms", f"{p99:.0f} ms", f"{worst:.0f} ms", f"{relays.peak_kib / 1024:.0f}")
    killed = "none killed" if kill_every_s == inf else f"killed every {kill_every_s:.0f} s"
    head = ("outbox", "relays", "waiting besides", "p50", "p99", "worst", "MiB", "duplicates")
    print_table(head, [(kind, killed, spaced(far), *cells, spaced(consumer.copies - count))])
    with Outbox(where) as outbox:
        assert outbox.status().open == far
        assert outbox.audit().is_right
    check(
        [
            Goal("lateness, p99, ms", p99, 1_000.0, is_most=True),
            Goal("memory of a relay, MiB", relays.peak_kib / 1024, 80.0, 120.0, is_most=True),
        ]
    )
