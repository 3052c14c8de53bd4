"""A small disk, enqueuers in other processes, and a relay that keeps what is confirmed."""

import subprocess
import sys
from pathlib import Path

import pytest

from reliablepub import Outbox, Publisher
from reliablepub.outbox.sqlite.space import Ballast
from reliablepub.testing import FakeBroker
from tests.disks import KINDS, fill, give_back, small_disk
from tests.waiting import until

ENQUEUE = """
import sys, time
from reliablepub import Message, Outbox, OutboxDiskFull, OutboxLocked

count, refused = int(sys.argv[2]), 0
with Outbox(sys.argv[1]) as outbox:
    while count:
        try:
            outbox.enqueue(Message(bytes(16 * 1024), routing_key="q"))
        except (OutboxDiskFull, OutboxLocked):  # both may be tried again
            refused += 1
            time.sleep(0.01)
        else:
            count -= 1
print(refused)
"""
EACH = 1_200
"""Of two enqueuers: together 38 MiB, for a disk of 24."""
TIMEOUT_S = 120


@pytest.mark.parametrize("kind", KINDS)
def test_more_goes_through_a_disk_than_fits_on_it(tmp_path: Path, kind: str) -> None:
    """What is kept of confirmed messages gives way, and nothing comes to a standstill."""
    with small_disk(tmp_path, kind, 24) as disk, FakeBroker() as broker:
        broker.declare_queue("q", durable=True)
        path = disk / "outbox.db"
        with Publisher(broker.url, outbox=path, keep_confirmed_s=1e6) as publisher:
            command = [sys.executable, "-c", ENQUEUE, str(path), str(EACH)]
            enqueuers = [subprocess.Popen(command) for _ in range(2)]
            try:
                for enqueuer in enqueuers:
                    assert enqueuer.wait(TIMEOUT_S) == 0
            finally:
                for enqueuer in enqueuers:
                    enqueuer.kill()
            counters = publisher.flush(TIMEOUT_S).counters
        assert (counters.stored, counters.confirmed) == (2 * EACH, 2 * EACH)
        assert len(broker.messages("q")) >= 2 * EACH
        assert sum(1 for _ in Outbox(path).rows("confirmed")) < 2 * EACH


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_another_program_has_filled_is_told_and_drains(
    tmp_path: Path, kind: str
) -> None:
    """With enqueuers that press on; a little that is freed goes to the relay, and more to them."""
    with small_disk(tmp_path, kind, 24) as disk, FakeBroker() as broker:
        path = disk / "outbox.db"
        with Publisher(broker.url, outbox=path, keep_confirmed_s=1e6) as publisher:
            broker.declare_queue("q", durable=True)
            command = [sys.executable, "-c", ENQUEUE, str(path), str(EACH)]
            enqueuers = [subprocess.Popen(command) for _ in range(2)]
            try:
                until(lambda: publisher.status.counters.stored >= 20, TIMEOUT_S)
                filler = fill(disk)
                until(lambda: publisher.status.reason.startswith("disk full"), TIMEOUT_S)
                give_back(filler, min(3 * 1024 * 1024, filler.stat().st_size))
                until(lambda: not publisher.status.open, TIMEOUT_S)  # what is there drains
                filler.unlink()
                for enqueuer in enqueuers:
                    assert enqueuer.wait(TIMEOUT_S) == 0
            finally:
                for enqueuer in enqueuers:
                    enqueuer.kill()
            counters = publisher.flush(TIMEOUT_S).counters
            assert (counters.stored, counters.confirmed) == (2 * EACH, 2 * EACH)
            until(lambda: not publisher.status.reason, TIMEOUT_S)
        assert Ballast(path).is_whole
