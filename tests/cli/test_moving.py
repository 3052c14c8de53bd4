"""An outbox moves to another RabbitMQ under load, as docs/moving-to-another-cluster.md says."""

import itertools
import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reliablepub import Message, Outbox
from tests.amqp_probe import AmqpProbe
from tests.cli.conftest import Cli
from tests.rabbitmq import RabbitMQNode
from tests.waiting import until

pytestmark = [pytest.mark.rabbit, pytest.mark.timeout(300)]

QUEUE = "moved"
WINDOW = 200
TOPOLOGY = f'[[queue]]\nname = "{QUEUE}"\n'


@pytest.fixture(scope="module")
def other_node(_node: RabbitMQNode) -> Iterator[RabbitMQNode]:
    """The new cluster."""
    with RabbitMQNode() as node:
        yield node


class Move:
    """A relay that is told by its configuration where to publish, and both of the places."""

    def __init__(self, cli: Cli, old: RabbitMQNode, new: RabbitMQNode) -> None:
        self.cli, self.old, self.new = cli, old, new
        self.relay: subprocess.Popen[str] | None = None
        del cli.environment["RELIABLEPUB_URL"]  # it would come before the configuration
        (cli.folder / "topology.toml").write_text(TOPOLOGY)
        for node in (old, new):
            declared = cli("topology", "declare", "topology.toml", "--url", node.url)
            assert declared.code == 0, declared.err

    def points_to(self, node: RabbitMQNode) -> None:
        config = self.cli.folder / "relay.toml"
        url = node.url.replace("guest:guest@", "")  # the default; a password has a file of its own
        config.write_text(f'url = "{url}"\noutbox = "o.db"\nwindow = {WINDOW}\n')

    def begin(self) -> None:
        self.relay = self.cli.begin("relay", "--config", "relay.toml", "--json")

    def reload(self) -> None:
        assert self.relay is not None
        self.relay.send_signal(signal.SIGHUP)

    def end(self) -> None:
        assert self.relay is not None
        self.relay.send_signal(signal.SIGTERM)
        assert self.cli.ended(self.relay).code in {0, 3}

    def is_at(self, node: RabbitMQNode, count: int) -> bool:
        return AmqpProbe(node.url).count(QUEUE) >= count

    def numbers(self, node: RabbitMQNode) -> list[int]:
        return [int(body) for body, _ in AmqpProbe(node.url).drain(QUEUE)]


@pytest.fixture
def move(cli: Cli, rabbitmq_node: RabbitMQNode, other_node: RabbitMQNode) -> Iterator[Move]:
    yield Move(cli, rabbitmq_node, other_node)
    for node in (rabbitmq_node, other_node):
        node.recover()
        probe = AmqpProbe(node.url)
        probe.declare_queue(QUEUE)
        probe.close()  # deletes it


@contextmanager
def load(outbox: Path) -> Iterator[Callable[[], int]]:
    """An application that stores a number every two milliseconds; gives how many it has stored."""
    stored = itertools.count()
    counted = [0]
    is_over = threading.Event()

    def enqueue() -> None:
        with Outbox(outbox) as queue:
            while not is_over.wait(0.002):
                queue.enqueue(Message(b"%d" % next(stored), routing_key=QUEUE))
                counted[0] += 1

    thread = threading.Thread(target=enqueue)
    thread.start()
    try:
        yield lambda: counted[0]
    finally:
        is_over.set()
        thread.join()


def while_both_run(move: Move) -> None:
    move.points_to(move.new)
    move.reload()


def while_the_old_one_hangs(move: Move) -> None:
    move.old.pause()
    time.sleep(0.5)  # so that a window is in flight there
    while_both_run(move)


def when_the_old_one_is_empty(move: Move) -> None:
    move.end()
    move.points_to(move.new)
    move.begin()


@pytest.mark.parametrize(
    "step", [while_both_run, while_the_old_one_hangs, when_the_old_one_is_empty]
)
def test_an_outbox_moves_to_another_rabbitmq_under_load(
    move: Move, step: Callable[[Move], None]
) -> None:
    """Nothing is lost, a window at most is in both, and what came later is never in the old one."""
    outbox = move.cli.folder / "o.db"
    move.points_to(move.old)
    move.begin()
    with load(outbox) as stored:
        until(lambda: move.is_at(move.old, 200), 60)
        step(move)
        until(lambda: move.is_at(move.new, 200), 60)
    with Outbox(outbox) as queue:
        until(lambda: queue.status().open == 0, 60)
        assert queue.status().parked == 0
    move.end()
    move.old.recover()
    old, new = move.numbers(move.old), move.numbers(move.new)
    print(f"{step.__name__}: {len(old)} in the old one, {len(new)} in the new one", end=", ")
    print(f"{len(set(old) & set(new))} in both")
    assert set(old) | set(new) == set(range(stored()))
    assert len(old) == len(set(old))
    assert len(new) == len(set(new))
    assert len(set(old) & set(new)) <= WINDOW
    assert old == sorted(old)
    assert new == sorted(new)
    assert max(old) < min(set(new) - set(old))


@pytest.mark.soak
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_shovel_empties_the_old_one(cli: Cli, *, is_cut: bool) -> None:
    """Nothing is lost and ids stay, also when the shovel's connections are cut under way."""
    with RabbitMQNode() as old, RabbitMQNode(plugins=("rabbitmq_shovel",)) as new:
        move = Move(cli, old, new)
        outbox = cli.folder / "o.db"
        move.points_to(old)
        move.begin()
        with load(outbox) as stored:
            until(lambda: move.is_at(old, 2_000), 60)
            while_both_run(move)
            until(lambda: move.is_at(new, 200), 60)
            new.ctl("set_parameter", "shovel", "empties", shovel(old, new))
            if is_cut:
                until(lambda: not move.is_at(old, 1_000), 60)
                old.close_all_connections("cut")
            until(lambda: not move.is_at(old, 1), 60)
        with Outbox(outbox) as queue:
            until(lambda: queue.status().open == 0, 60)
        move.end()
        until(lambda: move.is_at(new, stored()), 60)
        found = [
            (int(body), properties.message_id)
            for body, properties in AmqpProbe(new.url).drain(QUEUE)
        ]
        assert move.numbers(old) == []
    print(f"{stored()} stored, {len(found)} in the new one")
    assert {number for number, _ in found} == set(range(stored()))
    assert len(set(found)) == stored()  # a second copy has the id of the first


def shovel(old: RabbitMQNode, new: RabbitMQNode) -> str:
    """What docs/moving-to-another-cluster.md says of it."""
    return json.dumps(
        {
            "src-protocol": "amqp091",
            "src-uri": old.url,
            "src-queue": QUEUE,
            "dest-protocol": "amqp091",
            "dest-uri": new.url,
            "dest-queue": QUEUE,
            "ack-mode": "on-confirm",
            "reconnect-delay": 1,
        }
    )


def test_an_outbox_goes_back(move: Move) -> None:
    """The way back is the same step."""
    outbox = move.cli.folder / "o.db"
    move.points_to(move.old)
    move.begin()
    with load(outbox) as stored:
        until(lambda: move.is_at(move.old, 1), 60)
        for count, node in enumerate((move.new, move.old, move.new, move.old), 2):
            move.points_to(node)
            move.reload()
            until(lambda: move.is_at(node, 50 * count), 60)  # noqa: B023 - called at once
    with Outbox(outbox) as queue:
        until(lambda: queue.status().open == 0, 60)
    move.end()
    old, new = move.numbers(move.old), move.numbers(move.new)
    assert set(old) | set(new) == set(range(stored()))
    assert len(old) + len(new) - stored() <= 4 * WINDOW
