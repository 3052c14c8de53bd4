"""An outbox in PostgreSQL with relays on two hosts, while everything is killed that can be killed.

Nothing committed is lost, nothing rolled back is sent, no message arrives twice without a reason
that is recorded, and ordering keys keep their order.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from reliablepub import Outbox
from tests.chaos import networks
from tests.chaos.fleet import FAULTS, Fleet, Result
from tests.chaos.hosts import Hosts
from tests.chaos.networks import Network
from tests.chaos.proxy import Proxy
from tests.postgres import PostgresServer
from tests.rabbitmq import RabbitMQNode

SOAK: dict[str, int] = {
    "enqueuer killed": 60,
    "owner killed": 30,
    "standby killed": 30,
    "both relays killed": 10,
    "host killed": 20,
    "owner paused": 8,
    "database killed": 20,
    "database stopped: fast": 4,
    "database stopped: immediate": 4,
    "database stopped: smart": 4,
    "database frozen": 4,
    "database link cut": 16,
    "database link silent": 10,
    "host cut off": 8,
    "broker link cut": 12,
    "broker link silent": 6,
}
"""200 SIGKILLs of relays and enqueuers, 20 of PostgreSQL, and everything else."""
PARTS = 4
SOAK_S = float(os.environ.get("RELIABLEPUB_HOSTS_S", "inf"))
"""When each part ends, if not all has happened by then."""
SHORT = [
    "enqueuer killed",
    "owner killed",
    "database killed",
    "database link cut",
    "broker link cut",
    "host cut off",
    "owner paused",
]

pytestmark = [pytest.mark.rabbit, pytest.mark.postgres, pytest.mark.timeout(180)]
NewFleet = Callable[..., Fleet]


@pytest.fixture
def new_fleet(
    postgres_server: PostgresServer,
    postgres_database: str,
    rabbitmq_node: RabbitMQNode,
    tmp_path: Path,
) -> Iterator[NewFleet]:
    Outbox(postgres_server.url_of(postgres_database)).create()
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts())
        links = []
        for _ in range(2):
            network = stack.enter_context(Network()) if networks.are_possible() else None
            ports = postgres_server.port, rabbitmq_node.amqp_port
            database, broker = (stack.enter_context(Proxy(port, network=network)) for port in ports)
            links.append((database, broker, network))

        def make(seed: int, *, enqueuers: int = 3, mutant: str = "") -> Fleet:
            fleet = Fleet(
                postgres_server,
                postgres_database,
                rabbitmq_node,
                hosts,
                links,
                tmp_path,
                seed,
                mutant,
            )
            stack.enter_context(fleet.consumer.running())
            stack.callback(fleet.end)
            fleet.start(enqueuers=enqueuers)
            return fleet

        yield make


def report(result: Result) -> None:
    print(f"\n{result.report()}")
    if folder := os.environ.get("RELIABLEPUB_CHAOS_REPORT"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with (Path(folder) / "hosts.jsonl").open("a") as file:
            print(result.report(), file=file)


def test_kills_and_cuts(new_fleet: NewFleet) -> None:
    fleet = new_fleet(1)
    for name in SHORT:
        fleet.fault(name)
    result = fleet.close()
    report(result)
    assert result.wrong == []
    assert result.stored > 100
    assert result.refused > 10


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(PARTS))
def test_kills_and_cuts_for_a_long_time(new_fleet: NewFleet, part: int) -> None:
    faults = [name for name in FAULTS for n in range(SOAK[name]) if n % PARTS == part]
    random.Random(part).shuffle(faults)
    fleet = new_fleet(part)
    ends_at = time.monotonic() + SOAK_S
    for name in faults:
        if time.monotonic() < ends_at:
            fleet.fault(name)
    result = fleet.close()
    report(result)
    assert result.wrong == []


@pytest.mark.soak
def test_a_relay_without_its_fence_is_caught(new_fleet: NewFleet) -> None:
    fleet = new_fleet(1, mutant="without fence")
    fleet.fault("owner paused")
    fleet.wait_for_arrivals()
    result = fleet.close(drain_s=3.0)
    assert any("twice for no reason" in what or "ledger" in what for what in result.wrong)


@pytest.mark.soak
def test_a_relay_that_remembers_the_last_id_is_caught(new_fleet: NewFleet) -> None:
    fleet = new_fleet(1, mutant="last id")
    time.sleep(10)  # transactions that stay open while others commit
    fleet.wait_for_arrivals()
    assert any("lost" in what for what in fleet.close(drain_s=3.0).wrong)
