"""From one task to eight hundred at once on one RabbitMQ: speed, processor time, memory, retries.

Not by Spark, which would need eight hundred cores: the tasks are processes of `swarm`. ``-m soak
-s`` prints the table that docs/spark.md shows; RELIABLEPUB_TASKS=1,8 measures fewer.
"""

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.amqp_probe import AmqpProbe
from tests.rabbitmq import RabbitMQNode

pytestmark = [pytest.mark.rabbit, pytest.mark.soak, pytest.mark.timeout(1800)]

TASKS = [int(n) for n in os.environ.get("RELIABLEPUB_TASKS", "1,2,8,32,200,800").split(",")]
ROWS = 32_000
"""Of all tasks together."""
QUEUES = 8
ROOT = Path(__file__).parent.parent.parent
_PATIENCE = 5
SHARE = 0.5
"""What a rate is set to here, of what the broker did without one."""
STOPPED_S, RUNNING_S = 0.4, 0.1
"""How a slow broker is made: it stands still for four fifths of the time."""


@dataclass(frozen=True)
class Figures:
    """What a swarm of tasks did.

    Attributes:
        per_second: confirmed rows of all tasks.
        slowest_s: from the start until the last task had all its confirms.
        median_s: until half of the tasks had.
        broker_us: processor time of the broker for a row, with its share of connections.
        task_us: processor time of the tasks for a row.
        connections: when all tasks have ended and their workers keep them.
        channels: then.
        peak_mb: the most that the broker's memory grew.
        failed: attempts that failed.
        again: connections that were made a second time.
    """

    per_second: float
    slowest_s: float
    median_s: float
    broker_us: float
    task_us: float
    connections: int
    channels: int
    peak_mb: float
    failed: int
    again: int
    words: str


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_from_one_task_to_many(kind: str) -> None:
    """Each at full speed, then with a rate of half of that."""
    for tasks in TASKS:
        with RabbitMQNode() as node:
            fast = measured(node, kind, tasks)
        print("\n" + line(kind, tasks, "none", fast), flush=True)
        rate = max(tasks, int(fast.per_second * SHARE))
        with RabbitMQNode() as node:
            slow = measured(node, kind, tasks, maxRowsPerSecond=rate)
        print(line(kind, tasks, f"{rate}", slow), flush=True)
        assert fast.connections == slow.connections == fast.channels == tasks
        assert slow.per_second <= 1.1 * rate


@pytest.mark.parametrize("tasks", [8, 200])
def test_a_slow_broker(tasks: int) -> None:
    with RabbitMQNode() as node, slowed(node):
        found = measured(node, "classic", tasks)
    print("\n" + line("classic, slow", tasks, "none", found))
    assert found.failed == 0


def line(kind: str, tasks: int, rate: str, found: Figures) -> str:
    cells = (
        f"{tasks}",
        kind,
        rate,
        f"{found.per_second:.0f}",
        f"{found.median_s:.1f} / {found.slowest_s:.1f}",
        f"{found.broker_us:.0f} / {found.task_us:.0f}",
        f"{found.peak_mb:.0f}",
        f"{found.failed} / {found.again} {found.words}",
    )
    return f"| {' | '.join(cells)} |"


def measured(node: RabbitMQNode, kind: str, tasks: int, **options: object) -> Figures:
    probe = AmqpProbe(node.url)
    arguments = {"x-queue-type": kind}
    queues = [probe.declare_queue(arguments=arguments) for _ in range(QUEUES)]
    rows = ROWS // tasks
    given = {
        "url": node.url,
        "idletimeout": "1800",
        **{name.lower(): str(value) for name, value in options.items()},
    }
    plan = {"tasks": tasks, "rows": rows, "queues": queues, "options": given}
    swarm = subprocess.Popen(
        [sys.executable, "-m", "tests.spark.swarm", json.dumps(plan)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert swarm.stdin
    assert swarm.stdout
    try:
        assert swarm.stdout.readline() == "ready\n"
        before_mb, before_s = resident_mb(node), processor_s(node)
        with watched(lambda: resident_mb(node)) as seen:
            swarm.stdin.write("\n")
            swarm.stdin.flush()
            told = json.loads(swarm.stdout.readline())
        broker_s = processor_s(node) - before_s
        open_now, channels = connections_and_channels(node)
        arrived = sum(probe.count(queue) for queue in queues)
        swarm.communicate("\n", timeout=120)
    finally:
        swarm.kill()
        swarm.communicate()
    confirmed = sum(one["confirmed"] for one in told)
    errors = [error for one in told for error in one["errors"]]
    slowest_s = max(one["s"] for one in told)
    assert arrived >= confirmed == tasks * rows, errors[:3]
    return Figures(
        per_second=confirmed / slowest_s,
        slowest_s=slowest_s,
        median_s=statistics.median(one["s"] for one in told),
        broker_us=broker_s / confirmed * 1e6,
        task_us=sum(one["cpu_s"] for one in told) / confirmed * 1e6,
        connections=open_now,
        channels=channels,
        peak_mb=max(seen) - before_mb,
        failed=len(errors),
        again=sum(one["connected_again"] for one in told),
        words=errors[0] if errors else "",
    )


@contextmanager
def watched(look: Callable[[], float]) -> Iterator[list[float]]:
    """What is seen meanwhile, ten times a second."""
    seen = [look()]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            seen.append(look())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


@contextmanager
def slowed(node: RabbitMQNode) -> Iterator[None]:
    done = threading.Event()

    def jerk() -> None:
        while not done.wait(RUNNING_S):
            node.pause()
            time.sleep(STOPPED_S)
            node.resume()

    thread = threading.Thread(target=jerk)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def connections_and_channels(node: RabbitMQNode) -> tuple[int, int]:
    """A busy machine may take longer over it than `ctl` waits."""
    for _ in range(_PATIENCE):
        with suppress(subprocess.TimeoutExpired):
            both = node.eval(
                "[length(rabbit_networking:connections()), length(rabbit_channel:list())]."
            )
            connections, channels = json.loads(both)
            return connections, channels
    raise TimeoutError("rabbitmqctl does not answer")


def resident_mb(node: RabbitMQNode) -> float:
    """What the kernel has given to the broker."""
    pages = int(Path(f"/proc/{node.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def processor_s(node: RabbitMQNode) -> float:
    fields = Path(f"/proc/{node.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
