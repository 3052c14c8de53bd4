"""Many tasks on one broker, their workers processes of their own: forked, as Spark forks them.

Knows: what the sink does in a task. Must never know: Spark, nor what is measured.

It forks, prints a line, and has all workers start when a line comes in. Each runs its share of the
tasks, one after another. When all have ended it prints their figures, and keeps the connections,
as Python workers do, until its input ends. A task that fails is tried again, four times in all, as
by a cluster.
"""

import json
import os
import sys
import time
from typing import Any

from reliablepub import Message, ReliablePubError
from spark_sink import connection
from spark_sink.cluster import rate_of_task, spread_s
from spark_sink.options import parse
from spark_sink.task import Sending, slice_rows

ATTEMPTS_MAX = 4
BODY = b"x" * 1024


def run(partition: int, plan: dict[str, Any], used: dict[int, connection.Lent]) -> int:
    """One attempt; raises as a task does. How many of its rows were confirmed."""
    at_once, rows, queues = plan["at_once"], plan["rows"], plan["queues"]
    settings = parse(plan["options"])
    rate = rate_of_task(settings, at_once)
    each = slice_rows(rate)
    with connection.publisher(settings, spread_s(partition, at_once)) as lent:
        used[id(lent)] = lent
        sending = Sending(lent, settings, partition, rate)
        for first in range(0, rows, each):
            messages = [
                Message(BODY, routing_key=queues[n % len(queues)], message_id=f"{partition}-{n}")
                for n in range(first, min(rows, first + each))
            ]
            list(sending.send(messages, first))
        list(sending.finish())
    return sending.counts.confirmed


def worker(number: int, plan: dict[str, Any]) -> dict[str, Any]:
    """All attempts of all tasks of a worker."""
    began = time.monotonic()
    errors: list[str] = []
    used: dict[int, connection.Lent] = {}
    confirmed = 0
    for partition in range(number, plan["tasks"], plan["at_once"]):
        for _ in range(ATTEMPTS_MAX):
            try:
                confirmed += run(partition, plan, used)
                break
            except ReliablePubError as error:
                errors.append(str(error)[:150])
    return {
        "confirmed": confirmed,
        "connects": sum(lent.publisher.status.connects for lent in used.values()),
        "errors": errors,
        "s": time.monotonic() - began,
        "cpu_s": time.process_time(),
    }


def child(number: int, plan: dict[str, Any], gate: int, told: int, hold: int) -> None:
    """A worker: waits at the gate, runs its tasks, and holds its connection."""
    os.read(gate, 1)
    line = json.dumps(worker(number, plan)) + "\n"
    os.write(told, line.encode())  # less than a pipe takes at once
    os.read(hold, 1)
    connection.close_idle()


def main() -> None:
    plan = json.loads(sys.argv[1])
    (gate, open_gate), (read_told, told), (hold, let_go) = os.pipe(), os.pipe(), os.pipe()
    pids = []
    for number in range(plan["at_once"]):
        pid = os.fork()
        if pid == 0:
            os.close(open_gate)
            os.close(let_go)
            child(number, plan, gate, told, hold)
            os._exit(0)
        pids.append(pid)
    print("ready", flush=True)
    sys.stdin.readline()
    os.close(open_gate)
    with os.fdopen(read_told) as lines:
        print(json.dumps([json.loads(lines.readline()) for _ in pids]), flush=True)
    sys.stdin.readline()
    os.close(let_go)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
