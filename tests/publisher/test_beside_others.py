"""A publisher beside others that enqueue into its outbox: the kernel tells it, it need not ask."""

import contextlib
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from reliablepub import Message, Outbox, Publisher
from reliablepub.hooks import AttemptEnded
from reliablepub.outbox.sqlite import checkpoints
from reliablepub.relay import elsewhere, relay
from reliablepub.testing import FakeBroker
from reliablepub.testing.faults import HoldConfirms
from tests.waiting import until

NEVER_S = 3_600.0
ENQUEUE = """
import sys
from reliablepub import Message, Outbox
Outbox(sys.argv[1]).enqueue(Message(b"", routing_key="q", message_id="process"))
"""


class Confirmed:
    """The ids of what was confirmed."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self._is_new = threading.Condition()

    def on_confirmed(self, events: Sequence[AttemptEnded]) -> None:
        with self._is_new:
            self.ids += [event.message_id for event in events]
            self._is_new.notify_all()

    def until(self, id_: str) -> None:
        with self._is_new:
            assert self._is_new.wait_for(lambda: id_ in self.ids, 60), self.ids


@pytest.fixture
def confirmed(
    fake_broker: FakeBroker, path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Confirmed]:
    """Of a publisher that has published one message, and does not look before the bell rings."""
    fake_broker.declare_queue("q")
    confirmed = Confirmed()
    with Publisher(fake_broker.url, outbox=path, hooks=[confirmed]) as publisher:
        publisher.publish(b"", routing_key="q").result(60)
        assert publisher.flush(60).is_flushed
        own = publisher._client.relay._relay
        assert own is not None
        for module, name in ((elsewhere, "POLL_S"), (elsewhere, "REST_S"), (relay, "LOOK_S")):
            monkeypatch.setattr(module, name, NEVER_S)
        until(lambda: (bell := own._elsewhere._bell) and bell.is_armed)
        own._elsewhere._pause_s = NEVER_S
        own._full_look_at = own._elsewhere.look_at = time.monotonic() + NEVER_S
        yield confirmed


def test_what_another_process_enqueues_rings(confirmed: Confirmed, path: Path) -> None:
    subprocess.run([sys.executable, "-c", ENQUEUE, path], check=True)
    confirmed.until("process")


def test_what_a_transaction_of_the_application_holds_rings_when_it_commits(
    confirmed: Confirmed, path: Path
) -> None:
    with contextlib.closing(sqlite3.connect(path)) as own:
        own.execute("BEGIN")
        own.execute("CREATE TABLE orders (id)")
        own.execute("INSERT INTO orders VALUES (1)")
        Outbox(path).enqueue(Message(b"", routing_key="q", message_id="order"), connection=own)
        assert "order" not in confirmed.ids
        own.commit()
    confirmed.until("order")


def test_what_another_thread_enqueues_rings(confirmed: Confirmed, path: Path) -> None:
    with Outbox(path) as outbox:
        for number in range(3):
            outbox.enqueue(Message(b"", routing_key="q", message_id=f"thread{number}"))
            confirmed.until(f"thread{number}")


def test_close_waits_no_longer_for_the_lock_of_another_process(
    fake_broker: FakeBroker, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a lock, no confirm can be recorded: the message is sent again by the next publisher."""
    monkeypatch.setattr("reliablepub.outbox.sqlite.connections.BUSY_TIMEOUT_S", NEVER_S)
    fake_broker.declare_queue("q")
    fake_broker.inject(HoldConfirms())
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        publisher = Publisher(fake_broker.url, outbox=path)
        publisher.publish(b"", routing_key="q")
        other.execute("BEGIN IMMEDIATE")
        fake_broker.release_confirms()
        publisher.close(0.1)
    with Publisher(fake_broker.url, outbox=path) as publisher:
        assert publisher.flush(60).counters.confirmed == 1


def test_the_log_stays_short_while_the_broker_is_away(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "LOG_BYTES_LONG", 1024 * 1024)
    monkeypatch.setattr(checkpoints, "_RESTART_S", 0.0)
    log, sizes = path.with_name(path.name + "-wal"), list[int]()
    with (
        Publisher("amqp://127.0.0.1:9", outbox=path, close_timeout_s=0) as publisher,
        Outbox(path) as outbox,
    ):
        while len(sizes) < 1_000:  # 25 MiB of log
            for _ in range(100):
                outbox.enqueue(Message(bytes(500), routing_key="q"))
                sizes.append(log.stat().st_size)
            # A quick disk would be far ahead of the relay.
            until(lambda: publisher.status.open == len(sizes))
    assert max(sizes) < 16 * 1024 * 1024
