"""Eight hundred tasks at once on one RabbitMQ: connections, memory, time, and what a restart does.

Not by Spark, which would need eight hundred processes: each task is the worker's own publisher, in
threads of a few processes. ``-m soak -s`` prints the figures that docs/spark.md quotes;
RELIABLEPUB_TASKS makes it smaller.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.amqp_probe import AmqpProbe
from tests.rabbitmq import RabbitMQNode

pytestmark = [pytest.mark.rabbit, pytest.mark.soak, pytest.mark.timeout(1200)]

TASKS = int(os.environ.get("RELIABLEPUB_TASKS", "800"))
PROCESSES = 4
ROWS = 200
ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import json, random, sys, threading, time
from reliablepub import Message
from spark_sink import connection
from spark_sink.cluster import spread_s
from spark_sink.options import parse
from spark_sink.task import Sending

url, queue, first, tasks, of, rows, is_spread = sys.argv[1:]
first, tasks, of, rows = int(first), int(tasks), int(of), int(rows)
settings = parse({"url": url, "routing_key": queue})
told, resent, failed = [], [], []

def task(partition):
    began = time.monotonic()
    time.sleep(random.uniform(0, spread_s(partition, of)) if is_spread == "1" else 0)
    try:
        lent = connection._open(settings, (url,))
        sending = Sending(lent, settings, partition)
        messages = [
            Message(b"x" * 1024, routing_key=queue, message_id=f"{partition}-{n}")
            for n in range(rows)
        ]
        list(sending.send(messages, 0))
        list(sending.finish())
        told.append(time.monotonic() - began)
        resent.append(lent.publisher.status.connects - 1)
    except Exception as error:
        failed.append(repr(error)[:200])
    input_done.wait()
    lent.publisher.close(0)

input_done = threading.Event()
threads = [threading.Thread(target=task, args=(first + n,)) for n in range(tasks)]
for thread in threads:
    thread.start()
while len(told) + len(failed) < tasks:
    time.sleep(0.1)
slowest_s = max(told, default=0)
print(json.dumps({"slowest_s": slowest_s, "again": sum(resent), "failed": failed}), flush=True)
sys.stdin.readline()
input_done.set()
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize("is_spread", ["0", "1"])
def test_hundreds_of_tasks_at_once(rabbitmq_node: RabbitMQNode, is_spread: str) -> None:
    probe = AmqpProbe(rabbitmq_node.url)
    queue = probe.declare_queue()
    before = memory_mb(rabbitmq_node)
    each = TASKS // PROCESSES
    since = time.monotonic()
    command = [sys.executable, "-c", PROGRAM, rabbitmq_node.url, queue]
    processes = [
        subprocess.Popen(
            [*command, *map(str, (each * n, each, TASKS, ROWS)), is_spread],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for n in range(PROCESSES)
    ]
    try:
        told = [json.loads(process.stdout.readline()) for process in processes if process.stdout]
        took = time.monotonic() - since
        open_now = int(rabbitmq_node.eval("length(rabbit_networking:connections())."))
        channels = int(rabbitmq_node.eval("length(rabbit_channel:list())."))
        after = memory_mb(rabbitmq_node)
        for process in processes:
            process.communicate("\n")
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    failed = [error for one in told for error in one["failed"]]
    print(
        f"\n{'spread' if is_spread == '1' else 'at once'}: {TASKS} tasks of {ROWS} rows in "
        f"{took:.1f} s, the slowest {max(one['slowest_s'] for one in told):.1f} s; {open_now} "
        f"connections, {channels} channels; the broker's memory "
        f"{before:.0f} -> {after:.0f} MB; {sum(one['again'] for one in told)} connections made "
        f"again, {len(failed)} tasks failed {failed[:2]}"
    )
    found = probe.count(queue)
    assert found >= TASKS * ROWS
    assert failed == []
    assert open_now >= TASKS


def memory_mb(node: RabbitMQNode) -> float:
    return int(node.eval("erlang:memory(total).")) / 1e6
