"""Real workers run what was committed, whatever is killed meanwhile, and nothing else.

The database is a SQLite file; a cell with PostgreSQL belongs here too.
"""

import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from reliablepub import Binding, Exchange, Outbox, Publisher, Queue, Topology
from reliablepub.testing import FakeBroker
from tests.integrations.conftest import until
from tests.rabbitmq import RabbitMQNode

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
ship.apply_async((3,), priority=5, compression="zlib", serializer="json")
chain(add.s(1, 2), add.s(3), tell.s("chain"))()
group(ship.s(n) for n in (4, 5, 6))()
chord([add.s(n, n) for n in range(4)], total.s() | tell.s("chord"))()
stubborn.delay()
parent.delay()
"""
EXPECTED = {*("1", "2", "3", "4", "5", "6", "1001", "chain 6", "chord 12", "stubborn 2")}


class Shop:
    """The processes of a shop, and its folder."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.database = folder / "app.db"
        (folder / "results").mkdir()
        with closing(sqlite3.connect(self.database)) as connection:
            connection.execute("CREATE TABLE orders (number INTEGER PRIMARY KEY)")
        Outbox(self.database).create()

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {"SHOP_URL": self.url, "SHOP_FOLDER": str(self.folder)}
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

    def orders(self) -> set[str]:
        with closing(sqlite3.connect(self.database)) as connection:
            return {str(number) for (number,) in connection.execute("SELECT number FROM orders")}

    def log(self) -> str:
        return (self.folder / "log").read_text()[-4000:]


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.rabbit)])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "real":
        yield request.getfixturevalue("rabbitmq_node").url
        return
    with FakeBroker() as broker:
        yield broker.url


def test_a_worker_runs_every_kind_of_call(url: str, tmp_path: Path) -> None:
    shop = Shop(tmp_path, url)
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


def shop_topology() -> Topology:
    return Topology(
        (Exchange("shop"),), (Queue("shop"),), (Binding("shop", "shop", routing_key="shop"),)
    )


# -------------------------------------------------------------------------------------- under kills


def producer(first: int, last: int) -> tuple[str, ...]:
    code = f"from tests.integrations.shop import place_orders; place_orders(range({first}, {last}))"
    return ("-c", code)


def relay(shop: Shop) -> tuple[str, ...]:
    return ("-m", "reliablepub", "relay", "--outbox", str(shop.database), "--url", shop.url)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def place_orders_under_kills(
    shop: Shop, node: RabbitMQNode, orders: int, kills: dict[str, int], luck: random.Random
) -> None:
    """Place orders; kill a producer, a relay or the broker whenever an order of a list is there."""
    points = sorted(
        (luck.randrange(orders), victim) for victim, count in kills.items() for _ in range(count)
    )
    processes = {"relay": shop.start(*relay(shop)), "producer": shop.start(*producer(0, orders))}
    try:
        for point, victim in points:
            until(lambda point=point: last_order(shop) >= point, 600)  # type: ignore[misc]
            if victim == "broker":
                node.kill()
                node.start()
                continue
            kill(processes[victim])
            # The numbers of a transaction that was open may be rolled back: they are left out.
            again = relay(shop) if victim == "relay" else producer(last_order(shop) + 3, orders)
            processes[victim] = shop.start(*again)
        assert processes["producer"].wait(600) == 0, shop.log()
    finally:
        for process in processes.values():
            kill(process)


def last_order(shop: Shop) -> int:
    with closing(sqlite3.connect(shop.database, timeout=60)) as connection:
        (last,) = connection.execute("SELECT max(number) FROM orders").fetchone()
    return last if last is not None else -1


@pytest.mark.rabbit
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("orders", "kills"),
    [
        (2_000, {"producer": 2, "relay": 2, "broker": 1}),
        pytest.param(100_000, {"producer": 40, "relay": 40, "broker": 20}, marks=pytest.mark.soak),
    ],
    ids=["short", "long"],
)
def test_what_was_committed_runs_and_nothing_else(
    orders: int, kills: dict[str, int], rabbitmq_node: RabbitMQNode, tmp_path: Path
) -> None:
    shop = Shop(tmp_path, rabbitmq_node.url)
    seed = random.randrange(2**32)
    with shop.running(*WORKER) as worker:
        with Publisher(shop.url, outbox=shop.database, topology=shop_topology()) as publisher:
            publisher.flush(timeout=60)
        place_orders_under_kills(shop, rabbitmq_node, orders, kills, random.Random(seed))
        with Publisher(shop.url, outbox=shop.database) as publisher:
            assert publisher.flush(timeout=600).open == 0
        committed = shop.orders()
        try:
            until(lambda: committed <= set(shop.ran()) or worker.poll() is not None, 600)
        except AssertionError:
            missing = len(committed - set(shop.ran()))
            pytest.fail(f"{missing} did not run (seed {seed}): {shop.log()}")
    ran = shop.ran()
    print(f"{len(committed)} committed, {len(ran)} runs, {kills}")
    assert set(ran) == committed, f"seed {seed}"
    assert len(committed) > orders / 2
    outbox = Outbox(shop.database)
    assert outbox.parked() == []
    assert outbox.audit().is_right
    assert outbox.status().stored == len(committed)


@pytest.mark.bench
def test_sending_a_task_costs_little_more_than_its_commit_while_the_broker_is_down(
    tmp_path: Path,
) -> None:
    """The 99th percentile of `delay()`, beside that of `Outbox.enqueue`, in turn."""
    shop = Shop(tmp_path, "amqp://127.0.0.1:9")
    took = subprocess.run(
        [sys.executable, "-c", SIDE_BY_SIDE],
        cwd=ROOT,
        env=os.environ | {"SHOP_URL": shop.url, "SHOP_FOLDER": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    print(took)
    delay, enqueue = (float(word) for word in took.split())
    assert delay < 3 * enqueue


SIDE_BY_SIDE = """
import time
from reliablepub import Message
from tests.integrations.shop import *

def timed(call, *arguments):
    begin = time.perf_counter()
    call(*arguments)
    return (time.perf_counter() - begin) * 1000

ship.delay(0)
plain, message = Outbox(DATABASE), Message(bytes(500), routing_key="shop")
both = [(timed(ship.delay, n), timed(plain.enqueue, message)) for n in range(600)]
for took in zip(*both):
    print(sorted(took)[int(len(took) * 0.99)])
"""
