"""Our own ways in, side by side in one run: what the ways beside `publish_many` cost.

A file by the command line, a backlog that others have enqueued, a task for each message, and
a message in a transaction of the application's beside the same row by a bare INSERT.
"""

import asyncio
import itertools
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns

import pytest

from reliablepub import AsyncPublisher, Message, Outbox, Publisher
from reliablepub.cli.app import main
from tests.amqp_probe import AmqpProbe
from tests.speed.measuring import Goal, Results, Run, check, measured, print_table, spaced
from tests.speed.peers import BODY
from tests.speed.ways import WAIT_S

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1_800)]

COUNT = 20_000
ROUNDS = 5
QUEUES = 8
LIST = "`publish_many` of a list"
FILE = "`reliablepub publish` of a file"
BACKLOG = "a relay with a backlog of `enqueue`"
TASKS = "`AsyncPublisher.publish`, a task for each message, 1 000 at once"
AT_ONCE = 1_000
BARE = "`INSERT` of the same columns"
ENQUEUE = "`Outbox.enqueue(connection=...)`"


@dataclass
class Doors:
    """Each makes ready what is not measured, and returns what is."""

    url: str
    queues: list[str]
    folder: Path

    def _path(self) -> Path:
        return self.folder / f"{monotonic_ns()}.db"

    def _messages(self, count: int) -> list[Message]:
        queues = itertools.islice(itertools.cycle(self.queues), count)
        return [Message(BODY, routing_key=queue) for queue in queues]

    def of_a_list(self, count: int) -> Callable[[int], object]:
        messages, path = self._messages(count), self._path()

        def publish(count: int) -> None:
            with Publisher(self.url, outbox=path) as publisher:
                receipt = publisher.publish_many(messages)
                assert receipt.wait(WAIT_S).confirmed == count

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
        path = self._path()
        outbox = Outbox(path, open_messages_max=None)
        with closing(sqlite3.connect(path)) as db:
            for message in self._messages(count):
                outbox.enqueue(message, connection=db)
            db.commit()

        def publish(count: int) -> None:
            with Publisher(self.url, outbox=path) as publisher:
                assert publisher.flush(WAIT_S).counters.confirmed == count

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
def test_ways_in_beside_publish_many(rabbitmq: AmqpProbe, tmp_path: Path) -> None:
    queues = [rabbitmq.declare_queue() for _ in range(QUEUES)]
    doors = Doors(rabbitmq.url, queues, tmp_path)
    ways = {
        LIST: doors.of_a_list,
        FILE: doors.of_a_file,
        BACKLOG: doors.of_a_backlog,
        TASKS: doors.of_tasks,
    }
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, prepare in ways.items():
            runs[name].append(measured(prepare(COUNT), COUNT))
            rabbitmq.purge(*queues)
    results = Results(runs)
    print_table(
        ("", "confirmed a second", "of a list", "client's processor time a message"),
        [
            (
                name,
                spaced(results[name].per_second),
                f"{results.ratio(name, LIST):.2f}",
                f"{results[name].cpu_us:.0f} µs",
            )
            for name in results
        ],
    )
    print(f"medians of {ROUNDS} rounds of {COUNT:,} messages of 1 KiB, on disk, {QUEUES} queues")
    check(
        [
            Goal(f"{FILE} / {LIST}", results.ratio(FILE, LIST), 0.8, 0.3),
            Goal(f"{BACKLOG} / {LIST}", results.ratio(BACKLOG, LIST), 0.8, 0.3),
            Goal(f"{TASKS}, µs of processor time", results[TASKS].cpu_us, 30.0, is_most=True),
        ]
    )


@pytest.mark.parametrize(("at_once", "count"), [(1, 1_000), (100, 5_000)])
def test_a_message_in_a_transaction(tmp_path: Path, at_once: int, count: int) -> None:
    """A hundred messages a commit, so that processor time decides; and one, as applications do."""
    path = tmp_path / "app.db"
    runs: dict[str, list[Run]] = {BARE: [], ENQUEUE: []}
    message = Message(BODY, routing_key="orders")
    outbox = Outbox(path)
    outbox.create()
    with closing(sqlite3.connect(path)) as db:
        columns = "message_id, exchange, routing_key, properties, stored_at, size, checksum, body"
        db.execute(f"CREATE TABLE bare (id INTEGER PRIMARY KEY, {columns})")
        into = f"INSERT INTO bare ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        row = ("d41d8cd98f00b204e9800998ecf8427e", "", "orders", b"", 1.5, 1_100, 12_345, BODY)

        def bare(count: int) -> None:
            for number in range(count):
                db.execute(into, row)
                if number % at_once == 0:
                    db.commit()

        def enqueue(count: int) -> None:
            for number in range(count):
                outbox.enqueue(message, connection=db)
                if number % at_once == 0:
                    db.commit()

        for _ in range(2 * ROUNDS + 1):
            runs[BARE].append(measured(bare, count))
            runs[ENQUEUE].append(measured(enqueue, count))
    results = Results(runs)
    print_table(
        (f"messages a transaction: {at_once}", "µs a message", "processor time"),
        [
            (name, f"{1e6 / results[name].per_second:.1f}", f"{results[name].cpu_us:.0f} µs")
            for name in results
        ],
    )
    slower = results.ratio(BARE, ENQUEUE)
    check([Goal("time of enqueue / of the bare one", slower, 1.2, 20.0, is_most=True)])
