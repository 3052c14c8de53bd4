"""Several worker processes enqueue orders into one outbox; one relay publishes for all of them.

As under gunicorn or uvicorn, the workers share an SQLite file and do not connect to RabbitMQ. Needs
only reliablepub; starts a fake broker::

    python examples/web_workers.py

or uses your own: ``python examples/web_workers.py amqp://guest:guest@localhost/``

It prints::

    accepted by 4 workers: 200
    relay drained: 200 confirmed, 0 parked, 0 open
    in the queue: 200 different orders
"""

import json
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

import pika

from reliablepub import Message, Outbox
from reliablepub.testing import FakeBroker

WORKERS = 4
ORDERS_EACH = 50


def work(path: Path, queue: str, worker: int) -> None:
    """Run one worker: every request stores an order and its event in one transaction."""
    outbox = Outbox(path)
    with closing(sqlite3.connect(path, timeout=30)) as db:  # SQLite's do not survive a fork
        for request in range(ORDERS_EACH):
            order = f"{worker}-{request}"
            event = Message(json.dumps({"order": order}).encode(), routing_key=queue)
            with db:
                db.execute("INSERT INTO orders VALUES (?)", (order,))
                outbox.enqueue(event, connection=db)


def relay(path: Path, url: str) -> dict[str, int]:
    """Run the relay until the outbox is empty; in production systemd keeps it running."""
    command = [sys.executable, "-m", "reliablepub", "relay", "--drain", "--json"]
    command += ["--outbox", str(path)]
    # The URL is no argument: every user can read those of a process, and the password in it.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RELIABLEPUB_")}
    environment["RELIABLEPUB_URL"] = url
    result: dict[str, int] = json.loads(
        subprocess.check_output(command, env=environment)  # noqa: S603 - our own command
    )
    return result


def main() -> None:
    """Run the workers and the relay, and count."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = sys.argv[1] if len(sys.argv) > 1 else stack.enter_context(FakeBroker()).url
        connection = stack.enter_context(pika.BlockingConnection(pika.URLParameters(url)))
        channel = connection.channel()
        queue = channel.queue_declare("", exclusive=True).method.queue

        path = folder / "app.db"
        with closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("CREATE TABLE orders (number TEXT PRIMARY KEY)")
        spawn = multiprocessing.get_context("spawn")
        workers = [spawn.Process(target=work, args=(path, queue, n)) for n in range(WORKERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        print(f"accepted by {WORKERS} workers:", Outbox(path).status().stored)

        done = relay(path, url)
        print(f"relay drained: {done['confirmed']} confirmed, {done['parked']} parked,", end=" ")
        print(f"{done['open']} open")
        orders = set()
        for method, _, body in channel.consume(queue, inactivity_timeout=0.5):
            if method is None or body is None:
                break
            orders.add(json.loads(body)["order"])
        print("in the queue:", len(orders), "different orders")


if __name__ == "__main__":
    main()
