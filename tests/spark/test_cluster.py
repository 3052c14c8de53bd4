"""Executors in processes of their own, on real RabbitMQ, while they and the broker are killed.

Killed Python workers are in the short tests too: test_matrix.py, test_batch.py, test_stream.py.
"""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.amqp_probe import AmqpProbe
from tests.rabbitmq import RabbitMQNode
from tests.spark.drained import arrived, assert_once_by_id, drained
from tests.spark.job import BODY_BYTES
from tests.spark.processes import executors, kill, python_workers
from tests.spark.standalone import standalone

pytestmark = [pytest.mark.rabbit, pytest.mark.soak, pytest.mark.timeout(600)]

ROOT = Path(__file__).parent.parent.parent
LOCAL_CLUSTER = "local-cluster[2,1,1024]"
LONG = 200_000


class Job:
    """A running write, and the queue it writes to.

    Args:
        node: the broker.
        rows: how many.
        arguments: of `tests.spark.job`.
        options: of the sink.
    """

    def __init__(
        self,
        node: RabbitMQNode,
        rows: int,
        *arguments: str,
        master: str = LOCAL_CLUSTER,
        **options: str,
    ) -> None:
        self._node = node
        self._probe = AmqpProbe(node.url)
        self.queue = self._probe.declare_queue()
        self.rows = rows
        given = {"url": node.url, "routing_key": self.queue} | options
        command = [sys.executable, "-m", "tests.spark.job", f"--master={master}", f"--rows={rows}"]
        command += [*arguments, *(f"--option={name}={value}" for name, value in given.items())]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for(self, messages: int) -> None:
        """Until so many are in the queue."""
        while arrived(self._node.url, self.queue) < messages:
            assert self._process.poll() is None, self._output()
            time.sleep(0.1)

    def assert_complete(self) -> int:
        """It succeeds, none is missing, duplicates share an id; returns how many there were."""
        output = self._output()
        assert self._process.returncode == 0, output
        found = drained(self._node.url, self.queue, quiet_s=1.0)
        expected = Counter(str(n).ljust(BODY_BYTES).encode() for n in range(self.rows))
        assert_once_by_id(found, expected)
        self._probe.close()
        return len(found) - self.rows

    def _output(self) -> str:
        return self._process.communicate()[0]


def until_killed(found: Callable[[], list[int]], wanted: int = 1) -> None:
    """Kill so many of what there is, waiting for it to be there."""
    killed = 0
    while killed < wanted:
        killed += kill(found()[: wanted - killed])
        time.sleep(0.05)


def test_many_rows_while_workers_and_executors_are_killed(rabbitmq_node: RabbitMQNode) -> None:
    job = Job(rabbitmq_node, LONG, "--shuffle", "--partitions=16")
    for number in range(20_000, LONG, 40_000):
        job.wait_for(number)
        until_killed(lambda: python_workers(job.pid))
        if number == 60_000:
            until_killed(lambda: executors(job.pid))
    duplicates = job.assert_complete()
    print(f"{duplicates} duplicates")
    assert duplicates > 0


def test_many_rows_while_the_broker_is_killed(rabbitmq_node: RabbitMQNode) -> None:
    job = Job(rabbitmq_node, LONG, "--partitions=8")
    for number in (30_000, 100_000):
        job.wait_for(number)
        rabbitmq_node.kill()
        time.sleep(2)
        rabbitmq_node.start()
    print(f"{job.assert_complete()} duplicates")


def test_two_hosts_race_for_each_task(rabbitmq_node: RabbitMQNode, tmp_path: Path) -> None:
    """Speculation on a standalone master, with workers on 127.0.0.2 and 127.0.0.3."""
    with standalone(tmp_path) as master:
        speculation = {
            "spark.speculation": "true",
            "spark.speculation.interval": "100ms",
            "spark.speculation.multiplier": "1.01",
            "spark.speculation.quantile": "0.1",
            "spark.speculation.minTaskRuntime": "100ms",
            "spark.executor.cores": "1",
        }
        confs = [f"--conf={name}={value}" for name, value in speculation.items()]
        slow = {"maxConnections": "8", "maxRowsPerSecond": "1600"}
        job = Job(
            rabbitmq_node, 8_000, "--shuffle", "--partitions=8", *confs, master=master, **slow
        )
        job.wait_for(2_000)
        until_killed(lambda: python_workers(os.getpid()))
        print(f"{job.assert_complete()} duplicates")
