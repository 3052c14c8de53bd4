"""Our own ways in, side by side in one run: what the ways beside `publish_many` cost.

A file by the command line, a backlog that others have enqueued, what is stored before the
connection is open, a task for each message; messages in a transaction of the application's beside
the same rows by a bare INSERT; and Celery's tasks.
"""

import asyncio
import itertools
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns

import pytest
from celery import Celery, group
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from reliablepub import AsyncPublisher, Message, Outbox, Publisher
from reliablepub.cli.app import main
from reliablepub.integrations import Enqueues
from reliablepub.integrations.celery import use_outbox
from reliablepub.integrations.sqlalchemy import SessionOutbox, immediate_transactions
from tests.amqp_probe import AmqpProbe
from tests.rabbitmq import RabbitMQNode
from tests.speed.joined import BARE, EACH, MANY, in_transactions
from tests.speed.measuring import (
    Goal,
    Results,
    Run,
    Way,
    check,
    in_rounds,
    measured,
    print_table,
    spaced,
)
from tests.speed.peers import BODY
from tests.speed.ways import WAIT_S

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1_800)]

COUNT = 20_000
ROUNDS = 5
QUEUES = 8
LIST = "`publish_many` of a list"
FILE = "`reliablepub publish` of a file"
BACKLOG = "a relay with a backlog of `enqueue`"
EARLY = "`publish_many` before the connection is open"
DRAIN = "`reliablepub relay --drain`, its start included"
TASKS = "`AsyncPublisher.publish`, a task for each message, 1 000 at once"
AT_ONCE = 1_000
PLAIN = "Celery alone"
STORED = "with an outbox, each task stored at once"
JOINED = "with an outbox, in a transaction"
TASKS_OF_A_GROUP = 3_000


@dataclass
class Doors:
    """Each makes ready what is not measured, and returns what is."""

    node: RabbitMQNode
    queues: list[str]
    folder: Path

    @property
    def url(self) -> str:
        return self.node.url

    def _path(self) -> Path:
        return self.folder / f"{monotonic_ns()}.db"

    def _messages(self, count: int) -> list[Message]:
        queues = itertools.islice(itertools.cycle(self.queues), count)
        return [Message(BODY, routing_key=queue) for queue in queues]

    def of_a_list(self, count: int) -> Callable[[int], object]:
        messages, path = self._messages(count), self._path()

        def publish(count: int) -> None:
            with Publisher(self.url, outbox=path) as publisher:
                assert publisher.publish_many(messages).wait(WAIT_S).confirmed == count

        return publish

    def of_a_file(self, count: int) -> Callable[[int], object]:
        file, path = self.folder / "records.ndjson", self._path()
        body = "x" * (len(BODY) - len(json.dumps({"queue": self.queues[0], "body": ""})))
        queues = itertools.islice(itertools.cycle(self.queues), count)
        file.write_text("".join(json.dumps({"queue": q, "body": body}) + "\n" for q in queues))
        command = ["publish", str(file), "--routing-key", "{queue}", "--url", self.url]

        def publish(_: int) -> None:
            with pytest.raises(SystemExit) as ended:
                main([*command, "--outbox", str(path)])
            assert ended.value.code == 0

        return publish

    def of_a_backlog(self, count: int) -> Callable[[int], object]:
        path = self._filled(count)

        def publish(count: int) -> None:
            with Publisher(self.url, outbox=path) as publisher:
                assert publisher.flush(WAIT_S).counters.confirmed == count

        return publish

    def of_a_drain(self, count: int) -> Callable[[int], object]:
        path = self._filled(count)
        command = [sys.executable, "-m", "reliablepub", "relay", "--drain", "--url", self.url]

        # As where it is installed: with its bytecode.
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}

        def publish(count: int) -> None:
            command_line = [*command, "--outbox", str(path)]
            subprocess.run(command_line, check=True, capture_output=True, env=environment)
            assert Outbox(path).status().confirmed == count

        return publish

    def _filled(self, count: int) -> Path:
        path = self._path()
        with Outbox(path) as outbox:
            outbox.enqueue_many(self._messages(count))
        return path

    def of_an_outage(self, count: int) -> Callable[[int], object]:
        messages, path = self._messages(count), self._path()

        def publish(count: int) -> None:
            self.node.pause()
            try:
                publisher = Publisher(self.url, outbox=path)
                receipt = publisher.publish_many(messages)
            finally:
                self.node.resume()
            with publisher:
                assert receipt.wait(WAIT_S).confirmed == count

        return publish

    def of_tasks(self, count: int) -> Callable[[int], object]:
        queues, path = itertools.islice(itertools.cycle(self.queues), count), self._path()

        async def each(publisher: AsyncPublisher) -> None:
            for queue in queues:  # which all tasks share
                await (await publisher.publish(BODY, routing_key=queue)).result(WAIT_S)

        async def publish() -> None:
            async with AsyncPublisher(self.url, outbox=path) as publisher:
                await asyncio.gather(*(each(publisher) for _ in range(AT_ONCE)))

        return lambda _: asyncio.run(publish())


@pytest.mark.rabbit
def test_ways_in_beside_publish_many(rabbitmq_node: RabbitMQNode, tmp_path: Path) -> None:
    with closing(AmqpProbe(rabbitmq_node.url)) as probe:
        queues = [probe.declare_queue() for _ in range(QUEUES)]
        doors = Doors(rabbitmq_node, queues, tmp_path)
        ways = {
            LIST: doors.of_a_list,
            BACKLOG: doors.of_a_backlog,
            EARLY: doors.of_an_outage,
            DRAIN: doors.of_a_drain,
            FILE: doors.of_a_file,
            TASKS: doors.of_tasks,
        }
        runs: dict[str, list[Run]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, prepare in ways.items():
                runs[name].append(measured(prepare(COUNT), COUNT))
                probe.purge(*queues)
    results = Results(runs)
    print_table(
        ("", "confirmed per second", "of a list", "client's CPU time per message", "of a list's"),
        [
            (
                name,
                spaced(results[name].per_second),
                f"{results.ratio(name, LIST):.2f}",
                f"{results[name].cpu_us:.0f} µs",
                f"{results.cpu_ratio(name, LIST):.2f}",
            )
            for name in results
        ],
    )
    print(f"medians of {ROUNDS} rounds of {COUNT:,} messages of 1 KiB, on disk, {QUEUES} queues")
    check(
        [
            Goal(f"{FILE} / {LIST}", results.ratio(FILE, LIST), 0.8, 0.3),
            Goal(f"{BACKLOG} / {LIST}", results.ratio(BACKLOG, LIST), 0.9, 0.3),
            Goal(f"{EARLY} / {LIST}", results.ratio(EARLY, LIST), 0.85, 0.3),
            Goal(f"{DRAIN} / {LIST}", results.ratio(DRAIN, LIST), 0.85, 0.3),
            Goal(f"{TASKS}, µs of CPU time", results[TASKS].cpu_us, 30.0, is_most=True),
        ]
    )


@pytest.mark.parametrize(("at_once", "count"), [(1, 1_000), (500, 10_000)])
def test_messages_in_a_transaction(tmp_path: Path, at_once: int, count: int) -> None:
    """Five hundred a commit, so that CPU time decides; and one, as applications do."""
    path = tmp_path / "app.db"
    outbox = Outbox(path)
    outbox.create()
    with closing(sqlite3.connect(path)) as db:
        columns = "message_id, exchange, routing_key, properties, stored_at, size, checksum, body"
        db.execute(f"CREATE TABLE bare (id INTEGER PRIMARY KEY, {columns})")
        into = f"INSERT INTO bare ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        row = ("d41d8cd98f00b204e9800998ecf8427e", "", "orders", b"", 1.5, 1_100, 12_345, BODY)

        def bare() -> None:
            for _ in range(at_once):
                db.execute(into, row)

        results = in_transactions(
            outbox, db, bare, at_once=at_once, count=count, rounds=2 * ROUNDS + 1
        )
    slower = results.ratio(BARE, EACH)
    goals = [Goal("time of enqueue / of the bare one", slower, 1.2, 30.0, is_most=True)]
    if at_once > 1:
        of_bare = results.cpu_ratio(MANY, BARE)
        goals.append(Goal("CPU time of many / of bare", of_bare, 2.5, 5.0, is_most=True))
    check(goals)


def counted(number: int) -> int:
    return number


@pytest.mark.rabbit
def test_tasks_of_celery(rabbitmq: AmqpProbe, tmp_path: Path) -> None:
    """A group of tasks: by Celery alone, each stored at once, and in a transaction."""
    engine = create_engine(f"sqlite:///{tmp_path / 'joined.db'}")
    immediate_transactions(engine)
    joining = SessionOutbox(Outbox(tmp_path / "joined.db"))
    joining.outbox.create()

    def sends(outbox: Enqueues | None) -> Callable[[int], None]:
        app = Celery("shop", broker=rabbitmq.url)
        app.conf.update(task_ignore_result=True, task_default_queue=rabbitmq.declare_queue())
        app.conf.task_create_missing_queues = True
        if outbox is not None:
            use_outbox(app, outbox)
        task = app.task(name="count")(counted)
        return lambda count: group(task.s(number) for number in range(count)).apply_async()

    send_joined = sends(joining)

    def joined(count: int) -> None:
        with Session(engine) as session, session.begin(), joining.joined(session):
            send_joined(count)

    ways = {PLAIN: sends(None), STORED: sends(Outbox(tmp_path / "stored.db")), JOINED: joined}
    results = in_rounds(
        {name: Way(run) for name, run in ways.items()}, TASKS_OF_A_GROUP, ROUNDS, lambda: None
    )
    print_table(
        (f"a group of {spaced(TASKS_OF_A_GROUP)} tasks", "ms a task", "of Celery alone"),
        [
            (name, f"{1e3 / results[name].per_second:.2f}", f"{results.ratio(PLAIN, name):.2f}")
            for name in results
        ],
    )
    check([Goal(f"{JOINED} / {PLAIN}", results.ratio(PLAIN, JOINED), 1.15, 3.0, is_most=True)])
