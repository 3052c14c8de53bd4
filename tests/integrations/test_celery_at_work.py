"""Real workers run what was committed, whatever is killed meanwhile, and nothing else."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pika
import pytest
from sqlalchemy import NullPool, text

from reliablepub import Binding, Exchange, Outbox, Publisher, Queue, Topology
from reliablepub.testing import FakeBroker
from tests.integrations.engines import engine_of
from tests.rabbitmq import RabbitMQNode
from tests.waiting import until

ROOT = Path(__file__).parent.parent.parent
WORKER = (
    *("-m", "celery", "--app=tests.integrations.shop:app", "worker", "--loglevel=WARNING"),
    *("--without-gossip", "--without-mingle", "--without-heartbeat", "--pool=solo"),
)
CALLS = """
from celery import chain, chord, group
from tests.integrations.shop import *
ship.delay(1)
ship.apply_async((2,), countdown=0.5)
assert outbox.outbox.cancel(ship.apply_async((99,), countdown=1).id)
ship.apply_async((3,), priority=5, compression="zlib", serializer="json")
chain(add.s(1, 2), add.s(3), tell.s("chain"))()
group(ship.s(n) for n in (4, 5, 6))()
chord([add.s(n, n) for n in range(4)], total.s() | tell.s("chord"))()
stubborn.delay()
parent.delay()
"""
EXPECTED = {*("1", "2", "3", "4", "5", "6", "1001", "chain 6", "chord 12", "stubborn 2")}


class Shop:
    """The processes of a shop, its directory and its database."""

    def __init__(self, folder: Path, url: str, database: str) -> None:
        self.folder, self.url, self.database = folder, url, database
        self._engine = engine_of(database, poolclass=NullPool)  # nothing stays open
        (folder / "results").mkdir()
        with self._engine.begin() as connection:
            connection.execute(text("CREATE TABLE orders (number INTEGER PRIMARY KEY)"))
        Outbox(self.database).create()

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "SHOP_URL": self.url,
            "SHOP_FOLDER": str(self.folder),
            "SHOP_DATABASE": self.database,
        }
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=log, stderr=log
            )

    @contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        process = self.start(*arguments)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def ran(self) -> list[str]:
        ran = self.folder / "ran"
        return ran.read_text().splitlines() if ran.exists() else []

    def items(self, count: int) -> set[str]:
        """What the tasks of the orders that were committed note."""
        with self._engine.begin() as connection:
            found = connection.execute(text("SELECT number FROM orders"))
            return {f"{number}.{item}" for (number,) in found for item in range(count)}

    def last_order(self) -> int:
        with self._engine.begin() as connection:
            last = connection.execute(text("SELECT max(number) FROM orders")).scalar()
        return -1 if last is None else int(last)

    def log(self) -> str:
        return (self.folder / "log").read_text()[-4000:]


@pytest.fixture
def url_without_queues(rabbitmq_node: RabbitMQNode) -> str:
    """RabbitMQ without what a worker that was killed has left in its queues."""
    with pika.BlockingConnection(pika.URLParameters(rabbitmq_node.url)) as connection:
        for queue in ("celery", "shop"):
            connection.channel().queue_delete(queue)
    return rabbitmq_node.url


@pytest.fixture
def shop(url_without_queues: str, database: str, tmp_path: Path) -> Shop:
    """A shop whose messages go to RabbitMQ."""
    return Shop(tmp_path, url_without_queues, database)


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.rabbit)])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "real":
        yield request.getfixturevalue("url_without_queues")
        return
    with FakeBroker() as broker:
        yield broker.url


def test_a_worker_runs_every_kind_of_call(url: str, database: str, tmp_path: Path) -> None:
    shop = Shop(tmp_path, url, database)
    with (
        shop.running(*WORKER) as worker,
        Publisher(url, outbox=shop.database, topology=shop_topology()),
        shop.running("-c", CALLS) as calls,
    ):
        assert calls.wait(60) == 0, shop.log()
        try:
            until(lambda: worker.poll() is not None or set(shop.ran()) >= EXPECTED)
        except AssertionError:
            pytest.fail(f"{EXPECTED - set(shop.ran())} did not run: {shop.log()}")
    assert sorted(shop.ran()) == sorted(EXPECTED)  # each once
    assert Outbox(shop.database).parked() == []


REVOKES = """
from datetime import UTC, datetime
from tests.integrations.shop import *
while not app.control.ping(timeout=1, limit=1):
    pass
held = [ship.apply_async((number,), countdown=3600) for number in range(2)]
held[0].revoke()
app.control.revoke(held[1].id)
assert app.control.ping(timeout=30, limit=1)  # after the other two
assert outbox.outbox.status().open == 2
for task in held:
    assert outbox.outbox.reschedule(task.id, datetime.now(UTC))
ship.delay(2)
"""


def test_a_worker_drops_a_held_task_that_was_revoked(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it remembers the id; until then the task waits in the outbox."""
    monkeypatch.setenv("SHOP_REMOTE_CONTROL", "yes")
    database = str(tmp_path / "app.db")
    shop = Shop(tmp_path, url, database)
    with (
        shop.running(*WORKER, "--loglevel=INFO"),
        Publisher(url, outbox=database, topology=shop_topology()),
        shop.running("-c", REVOKES) as revokes,
    ):
        assert revokes.wait(60) == 0, shop.log()
        until(lambda: shop.log().count("Discarding revoked task") == 2 and shop.ran() == ["2"])
    assert Outbox(database).status().confirmed == 3


def test_a_worker_forks_after_its_module_has_used_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_broker: FakeBroker
) -> None:
    """SQLite's connections are closed in `worker_init`; in `worker_process_init` it is too late."""
    monkeypatch.setenv("SHOP_USES_ITS_DATABASE", "yes")
    database = str(tmp_path / "app.db")
    shop = Shop(tmp_path, fake_broker.url, database)
    with (
        shop.running(*WORKER, "--pool=prefork", "--concurrency=2"),
        Publisher(fake_broker.url, outbox=database, topology=shop_topology()),
        shop.running("-c", "from tests.integrations.shop import *; parent.delay()") as calls,
    ):
        assert calls.wait(60) == 0, shop.log()
        until(lambda: shop.ran() == ["1001"])


def shop_topology() -> Topology:
    return Topology(
        (Exchange("shop"),), (Queue("shop"),), (Binding("shop", "shop", routing_key="shop"),)
    )


# -------------------------------------------------------------------------------------- under kills


@dataclass(frozen=True)
class Load:
    """What a producer does, and how often each process is killed meanwhile."""

    orders: int
    items: int
    kills: dict[str, int]

    def producer(self, first: int) -> tuple[str, ...]:
        numbers = f"range({first}, {self.orders})"
        module = "tests.integrations.shop"
        return ("-c", f"from {module} import place_orders; place_orders({numbers}, {self.items})")


def relay(shop: Shop) -> tuple[str, ...]:
    return ("-m", "reliablepub", "relay", "--outbox", shop.database, "--url", shop.url)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def place_orders_under_kills(
    shop: Shop, node: RabbitMQNode, load: Load, luck: random.Random
) -> None:
    """Place orders; kill a producer, a relay or the broker whenever an order of a list is there."""
    points = sorted(
        (luck.randrange(load.orders), victim)
        for victim, count in load.kills.items()
        for _ in range(count)
    )
    processes = {"relay": shop.start(*relay(shop)), "producer": shop.start(*load.producer(0))}
    try:
        for point, victim in points:
            until(lambda point=point: shop.last_order() >= point, 600, every_s=0.05)  # type: ignore[misc]
            if victim == "broker":
                node.kill()
                node.start()
                continue
            kill(processes[victim])
            # The numbers of a transaction that was open may be rolled back: they are left out.
            again = relay(shop) if victim == "relay" else load.producer(shop.last_order() + 3)
            processes[victim] = shop.start(*again)
        assert processes["producer"].wait(600) == 0, shop.log()
    finally:
        for process in processes.values():
            kill(process)


def check_under_kills(shop: Shop, node: RabbitMQNode, load: Load) -> None:
    """Have a worker run what was committed, each once at least, and nothing that was not."""
    seed = random.randrange(2**32)
    began = time.monotonic()
    with shop.running(*WORKER) as worker:
        with Publisher(shop.url, outbox=shop.database, topology=shop_topology()) as publisher:
            publisher.flush(timeout_s=60)
        place_orders_under_kills(shop, node, load, random.Random(seed))
        with Publisher(shop.url, outbox=shop.database) as publisher:
            assert publisher.flush(timeout_s=600).open == 0
        committed = shop.items(load.items)
        try:
            until(
                lambda: committed <= set(shop.ran()) or worker.poll() is not None, 600, every_s=0.5
            )
        except AssertionError:
            missing = len(committed - set(shop.ran()))
            pytest.fail(f"{missing} did not run (seed {seed}): {shop.log()}")
    ran = shop.ran()
    took = f"{time.monotonic() - began:.0f} s"
    print(f"{len(committed)} tasks committed, {len(ran)} runs, {took}, {load}")
    assert set(ran) == committed, f"seed {seed}"
    assert len(committed) > load.orders * load.items / 2
    outbox = Outbox(shop.database)
    assert outbox.parked() == []
    assert outbox.audit().is_right
    assert outbox.status().stored == len(committed)


@pytest.mark.rabbit
@pytest.mark.timeout(600)
def test_what_was_committed_runs_and_nothing_else(rabbitmq_node: RabbitMQNode, shop: Shop) -> None:
    load = Load(orders=300, items=2, kills={"producer": 2, "relay": 2, "broker": 1})
    check_under_kills(shop, rabbitmq_node, load)


@pytest.mark.soak
@pytest.mark.rabbit
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(10))
def test_a_hundred_thousand_tasks_that_were_committed_run(
    part: int, rabbitmq_node: RabbitMQNode, shop: Shop
) -> None:
    """In ten parts, each under other kills: of three orders, two are committed."""
    load = Load(orders=3_100, items=5, kills={"producer": 4, "relay": 4, "broker": 2})
    check_under_kills(shop, rabbitmq_node, load)


@pytest.mark.bench
def test_sending_a_task_takes_less_than_5_ms_while_the_broker_is_down(
    database: str, tmp_path: Path
) -> None:
    """The 99th percentiles of `delay()`, of `Outbox.enqueue` and of a bare commit, in turn.

    On a disk that takes longer for the commit of one row, that commit is the limit.
    """
    shop = Shop(tmp_path, "amqp://127.0.0.1:9", database)
    with shop.running("-c", SIDE_BY_SIDE) as side_by_side:
        assert side_by_side.wait(300) == 0, shop.log()
    print(took := shop.log())
    delay, _, bare = (float(line.split()[-1]) for line in took.splitlines())
    assert delay < max(5.0, 3 * bare)


SIDE_BY_SIDE = """
import sqlite3, time
from reliablepub import Message
from tests.integrations.shop import *

def timed(call):
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1000

bare = sqlite3.connect(FOLDER / "bare.db", isolation_level=None)
bare.execute("PRAGMA journal_mode = wal")
bare.execute("PRAGMA synchronous = full")
bare.execute("CREATE TABLE messages (body)")
plain, message = Outbox(DATABASE), Message(bytes(500), routing_key="shop")
calls = {
    "delay()": lambda: ship.delay(1),
    "Outbox.enqueue": lambda: plain.enqueue(message),
    "INSERT and COMMIT": lambda: bare.execute("INSERT INTO messages VALUES (?)", (bytes(800),)),
}
ship.delay(0)
took = [[timed(call) for call in calls.values()] for _ in range(600)]
for name, each in zip(calls, zip(*took)):
    p50, p99 = (sorted(each)[int(len(each) * part)] for part in (0.5, 0.99))
    print(f"{name}, milliseconds, p50 and p99: {p50:.2f} {p99:.2f}")
"""
