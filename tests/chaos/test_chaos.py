"""Real brokers in real trouble, under load: nothing is lost, and nothing is confirmed falsely.

Every scenario of `scenarios` runs until its time is up, and is never tried again. Its result is one
line of JSON, and a picture, in the directory that RELIABLEPUB_CHAOS_REPORT names, if it does.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import disks
from tests.chaos.arena import Arena, Result
from tests.chaos.proxy import Proxy
from tests.chaos.scenarios import SCENARIOS, Scenario
from tests.rabbitmq import RabbitMQNode
from tests.waiting import until

SOAK_S = float(os.environ.get("RELIABLEPUB_CHAOS_S", "180"))
REPORT = os.environ.get("RELIABLEPUB_CHAOS_REPORT")

pytestmark = [pytest.mark.rabbit, pytest.mark.timeout(400)]
SHORT = [name for name, scenario in SCENARIOS.items() if scenario.is_short]
SINGLE = [name for name, scenario in SCENARIOS.items() if not scenario.is_clustered]
TOUR = [
    "network cut",
    "broker killed",
    "memory alarm",
    "binding removed",
    "broker frozen for longer than a heartbeat",
    "answers withheld and then cut",
]
SHOWN: dict[str, Callable[[Result], bool]] = {
    "network cut": lambda r: r.connections > r.incidents,
    "all connections closed by an operator": lambda r: r.connections > r.incidents,
    "answers withheld and then cut": lambda r: r.connections > r.incidents and r.uncertain > 0,
    "network loses connections": lambda r: r.connections > 1,
    "binding removed": lambda r: r.refused > 0,
}
"""By what it can be seen that the trouble happened."""
CLUSTERED = [name for name, scenario in SCENARIOS.items() if scenario.is_clustered]


@pytest.fixture
def arena(rabbitmq_node: RabbitMQNode, tmp_path: Path) -> Iterator[Arena]:
    with Proxy(rabbitmq_node.amqp_port) as proxy:
        arena = Arena([rabbitmq_node], proxy, tmp_path)
        yield arena
        rabbitmq_node.recover()
        arena.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[RabbitMQNode]]:
    with ExitStack() as stack:
        first = stack.enter_context(RabbitMQNode())
        yield [first, *(stack.enter_context(RabbitMQNode(beside=first)) for _ in range(2))]


@pytest.fixture
def wide_arena(cluster: list[RabbitMQNode], tmp_path: Path) -> Iterator[Arena]:
    with Proxy(cluster[0].amqp_port) as proxy:
        arena = Arena(cluster, proxy, tmp_path)
        yield arena
        for node in cluster:
            node.recover()
        arena.close()


def report(name: str, arena: Arena, result: Result) -> None:
    """Keep the result, and a picture of it."""
    print(f"\n{result.report(name)}")
    if REPORT is not None:
        folder = Path(REPORT)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "results.jsonl").open("a") as file:
            print(result.report(name), file=file)
        arena.timeline.draw(folder / f"{name.replace(' ', '-')}.svg", name)


def hold(name: str, arena: Arena, *, for_s: float) -> None:
    scenario: Scenario = SCENARIOS[name]

    def incident(arena: Arena) -> None:
        with arena.timeline.fault(name):
            scenario.happen(arena)

    result = arena.run(incident, for_s=for_s)
    report(name, arena, result)
    assert result.wrong == []
    assert result.stored == result.confirmed > 0
    assert name not in SHOWN or SHOWN[name](result), f"nothing shows it: {result}"


@pytest.mark.parametrize("name", SHORT)
def test_one_incident(name: str, arena: Arena) -> None:
    hold(name, arena, for_s=0.0)


@pytest.mark.soak
@pytest.mark.parametrize("name", SINGLE)
def test_incidents_for_a_long_time(name: str, arena: Arena) -> None:
    hold(name, arena, for_s=SOAK_S)


@pytest.mark.soak
@pytest.mark.parametrize("name", CLUSTERED)
def test_incidents_in_a_cluster(name: str, wide_arena: Arena) -> None:
    hold(name, wide_arena, for_s=SOAK_S)


@pytest.mark.soak
def test_one_thing_after_another(arena: Arena) -> None:
    """The run whose picture is in docs/reliability.md."""

    def incident(arena: Arena) -> None:
        for name in TOUR:
            with arena.timeline.fault(name):
                SCENARIOS[name].happen(arena)
            time.sleep(3.0)

    result = arena.run(incident, for_s=0.0)
    report("one thing after another", arena, result)
    assert result.wrong == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB: the outbox's reserve, its log, and little else."""
    with disks.small_disk(tmp_path, "tmpfs", 12) as folder:
        yield folder


@pytest.mark.parametrize(
    "for_s", [pytest.param(0.0, id="once"), pytest.param(SOAK_S, marks=pytest.mark.soak)]
)
def test_disk_full(arena: Arena, small_disk: Path, for_s: float) -> None:
    """Another program fills the outbox's disk while the broker is away, and frees it again.

    With the broker there, a slow publisher lives on the room that confirmed messages leave.
    """
    arena.outbox = small_disk / "outbox.db"
    filler = small_disk / "filler"

    def fill_and_free(arena: Arena) -> None:
        with arena.timeline.fault("disk full"):
            arena.node.set_memory_alarm()
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * 65_536)
            before = arena.load.turned_away
            until(lambda: arena.load.turned_away > before)  # the outbox itself had some room
            filler.unlink()
            arena.node.clear_memory_alarm()

    result = arena.run(fill_and_free, for_s=for_s)
    report("disk full", arena, result)
    assert result.wrong == []
    assert result.stored == result.confirmed > 0
    assert result.turned_away > 0
