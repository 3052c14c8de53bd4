"""From one task to eight hundred at once on one RabbitMQ: speed, CPU time, memory, retries.

Not by Spark, which would need eight hundred cores: the tasks are processes of `swarm`. ``-m soak
-s`` prints the figures behind the advice of docs/spark.md; RELIABLEPUB_TASKS=1,8 measures fewer.
"""

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
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
RATED_MAX = 200
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
        median_s: until half of the workers had.
        broker_us: CPU time of the broker for a row, with its share of connections.
        task_us: CPU time of the tasks for a row.
        kept: connections, each with one channel, when all tasks have ended.
        made: connections in all.
        peak_mb: the most that the broker's memory grew.
        failed: attempts that failed.
        words: of the first of them.
    """

    per_second: float
    slowest_s: float
    median_s: float
    broker_us: float
    task_us: float
    kept: int
    made: int
    peak_mb: float
    failed: int
    words: str


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_from_one_task_to_many(kind: str) -> None:
    """Each at full speed, then with a rate of half of that; 800 would take three minutes for it."""
    for tasks in TASKS:
        with RabbitMQNode() as node:
            fast = measured(node, tasks, kind=kind)
        print_line(f"{kind}, {tasks} tasks", fast)
        assert fast.kept == fast.made == tasks
        if tasks > RATED_MAX:
            continue
        rate = max(tasks, int(fast.per_second * SHARE))
        with RabbitMQNode() as node:
            slow = measured(node, tasks, kind=kind, maxRowsPerSecond=rate)
        print_line(f"{kind}, {tasks} tasks, maxRowsPerSecond={rate}", slow)
        assert slow.kept == slow.made == tasks
        assert slow.per_second <= 1.1 * rate


@pytest.mark.parametrize("is_slow", [False, True], ids=["fast", "slow"])
def test_windows(*, is_slow: bool) -> None:
    """On a broker as it is, and on one that stands still for most of the time."""
    for tasks, window in itertools.product((2, 32), (32, 256, 4_096)):
        with RabbitMQNode() as node, slowed(node) if is_slow else nullcontext():
            found = measured(node, tasks, window=window)
        name = "slow broker, " if is_slow else ""
        print_line(f"{name}{tasks} tasks, window={window}", found)
        assert found.failed == 0


def test_a_slow_broker_and_many_tasks() -> None:
    with RabbitMQNode() as node, slowed(node):
        found = measured(node, 200)
    print_line("slow broker, 200 tasks", found)
    assert found.failed == 0


def test_queues() -> None:
    for kind in ("classic", "quorum"):
        for queues in (1, 2, 8, 32):
            with RabbitMQNode() as node:
                found = measured(node, 8, kind=kind, queues=queues)
            print_line(f"8 tasks, {queues} {kind} queues", found)


def test_connections_that_are_kept_and_those_that_are_not() -> None:
    """Of 200 tasks, so many at once; with `maxConnections` each opens one of its own."""
    for at_once in (2, 8, 32):
        for bound in (None, at_once):
            with RabbitMQNode() as node:
                found = measured(node, 200, at_once=at_once, maxConnections=bound)
            print_line(f"200 tasks, {at_once} at once, maxConnections={bound}", found)
            assert found.made == (at_once if bound is None else 200)
            assert found.kept == (at_once if bound is None else 0)


def print_line(name: str, found: Figures) -> None:
    cells = (
        name,
        f"{found.per_second:.0f}",
        f"{found.median_s:.1f}, {found.slowest_s:.1f}",
        f"{found.broker_us:.0f}, {found.task_us:.0f}",
        f"{found.peak_mb:.0f}",
        f"{found.made}",
        f"{found.failed} {found.words}",
    )
    print(f"\n| {' | '.join(cells)} |", flush=True)


def measured(
    node: RabbitMQNode,
    tasks: int,
    *,
    at_once: int | None = None,
    kind: str = "classic",
    queues: int = QUEUES,
    **options: object,
) -> Figures:
    """All tasks at once, if nothing else is said."""
    at_once = at_once or tasks
    probe = AmqpProbe(node.url)
    names = [probe.declare_queue(arguments={"x-queue-type": kind}) for _ in range(queues)]
    rows = ROWS // tasks
    given = {
        "url": node.url,
        "idletimeout": "1800",
        **{name.lower(): str(value) for name, value in options.items() if value is not None},
    }
    plan = {"tasks": tasks, "at_once": at_once, "rows": rows, "queues": names, "options": given}
    swarm = subprocess.Popen(
        [sys.executable, "-m", "tests.spark.swarm", json.dumps(plan)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
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
        kept = connections(node, 0 if "maxconnections" in given else at_once)
        arrived = sum(probe.count(name) for name in names)
        swarm.communicate("\n", timeout=120)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(swarm.pid, signal.SIGKILL)  # the workers as well
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
        kept=kept,
        made=sum(one["connects"] for one in told),
        peak_mb=max(seen) - before_mb,
        failed=len(errors),
        words=errors[0] if errors else "",
    )


@contextmanager
def watched(look: Callable[[], float]) -> Iterator[list[float]]:
    """What is seen meanwhile, ten times per second."""
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


def connections(node: RabbitMQNode, expected: int) -> int:
    """How many there are, each with one channel.

    A busy machine may take longer over it than `ctl` waits, and connections that end are listed for
    a moment. Erlang prints a list of small numbers as text, but for the 0.
    """
    found = -1
    for _ in range(_PATIENCE):
        with suppress(subprocess.TimeoutExpired):
            listed = node.eval(
                "[0, length(rabbit_networking:connections()), length(rabbit_channel:list())]."
            )
            _, found, channels = json.loads(listed)
            if found == channels == expected:
                break
    return int(found)


def resident_mb(node: RabbitMQNode) -> float:
    """What the kernel has given to the broker."""
    pages = int(Path(f"/proc/{node.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def processor_s(node: RabbitMQNode) -> float:
    fields = Path(f"/proc/{node.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
