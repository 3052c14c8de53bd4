"""What a relay that has nothing to do takes of a core."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from reliablepub.testing import FakeBroker
from tests.speed.alone import relay
from tests.speed.measuring import Goal, check

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]

SETTLES_S = 15.0
LASTS_S = 60.0
PUBLISHER = """
import sys
from reliablepub import Publisher
with Publisher(sys.argv[1], outbox=sys.argv[2]) as publisher:
    publisher.publish(b"", routing_key="all").result(60)
    sys.stdin.read()
"""


@contextmanager
def publisher(url: str, outbox: str) -> Iterator[int]:
    """A process whose publisher has nothing to publish any more; its id."""
    command = [sys.executable, "-c", PUBLISHER, url, outbox]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def processor_s(pid: int) -> float:
    """Of the threads that live now, exactly (schedstat; proc(5)'s stat counts in ticks)."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def test_a_relay_with_nothing_to_do(tmp_path: Path) -> None:
    with ExitStack() as stack:
        broker = stack.enter_context(FakeBroker())
        broker.declare_queue("all")
        processes = {
            "an idle `Publisher`": publisher(broker.url, str(tmp_path / "publisher.db")),
            "an idle `reliablepub relay`": relay(broker.url, str(tmp_path / "relay.db")),
        }
        pids = {name: stack.enter_context(process) for name, process in processes.items()}
        time.sleep(SETTLES_S)
        before = {name: processor_s(pid) for name, pid in pids.items()}
        time.sleep(LASTS_S)
        used = {name: (processor_s(pid) - before[name]) / LASTS_S for name, pid in pids.items()}
    check(
        [
            Goal(f"{name}, % of a core", 100 * share, 0.2, 2.0, is_most=True)
            for name, share in used.items()
        ]
    )
