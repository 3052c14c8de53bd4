"""A cluster that falls apart and comes together again, under load: sets of faults from seeds.

None is tried again. What the broker lost of its classic queues and streams is printed, and the same
seed with plain pika shows that it loses such messages too:
`python -m tests.chaos.sets SEED --client plain`. Any other loss fails.
"""

import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from reliablepub.testing import FakeBroker
from tests.chaos import judge, networks, partitions, picture
from tests.chaos.account import Told
from tests.chaos.cluster import Cluster, NotWhole
from tests.chaos.judge import KINDS, History, kind_of, out_of_order
from tests.chaos.partitions import LINKS, OTHERS
from tests.chaos.plain import ALL_CONFIRMED, control
from tests.chaos.sets import HANDLINGS, Part, Plan, Stuck, outage, play, with_plain_pika
from tests.missing import miss
from tests.rabbitmq import ROOT, is_installed

SETS = 14
SHORT = 2034  # the first node is split off, the third one killed; pause_minority, three URLs
RATE_PER_S = 60.0
MEMBERS = ("node removed", "stream leader moved", "node removed + link flaps")
NEWEST = Path(os.environ.get("RABBITMQ_CACHE", ".rabbitmq-versions")).absolute() / "sid"
"""Where `make rabbitmq-versions` has unpacked RabbitMQ 4.3: every other set runs on it."""
SOAK_S = float(os.environ.get("RELIABLEPUB_CHAOS_S", "180"))

real = [pytest.mark.rabbit, pytest.mark.usefixtures("divisible")]


@pytest.fixture(scope="module")
def divisible() -> None:
    """There is a RabbitMQ, and a network that can be cut."""
    if not is_installed(ROOT):
        miss("no RabbitMQ here")
    if not networks.are_possible():
        # Also with CI=true: a container may lack the right, whoever runs in it.
        pytest.skip("no cluster is partitioned here: root, iproute2, network namespaces are needed")


def with_marks(test: Any) -> Any:
    for mark in real:
        test = mark(test)
    return test


def for_long(test: Any) -> Any:
    return pytest.mark.soak(pytest.mark.timeout(0)(with_marks(test)))


@with_marks
@pytest.mark.timeout(300)
def test_a_short_set(tmp_path: Path) -> None:
    plan = Plan(SHORT, 0.0, faults=("split in two", "node killed"), rate_per_s=RATE_PER_S)
    result = play(plan, tmp_path)
    print(f"\n{result}")
    assert result["wrong"] == []
    assert [incident["faults"] for incident in result["incidents"]] == [
        ["split in two"],
        ["node killed"],
    ]
    for figures in result["kinds"].values():
        assert figures["offered"] == figures["confirmed"] > 0


@with_marks
@pytest.mark.parametrize(
    ("whom", "how"),
    [
        ("who started it", signal.SIGKILL),
        pytest.param("who started it", signal.SIGTERM, marks=pytest.mark.soak),
        pytest.param("the set", signal.SIGKILL, marks=pytest.mark.soak),
    ],
)
def test_a_set_that_is_ended_leaves_nothing(whom: str, how: signal.Signals, tmp_path: Path) -> None:
    before = _networks()
    with subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.sets", "0"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    ) as process:
        _wait_until(lambda: bool([*tmp_path.glob("cluster-*/rabbitmq-*/data")]))
        (node,) = tmp_path.glob("cluster-*/rabbitmq-*")
        names = [str(tmp_path), node.name]  # in another root, a node knows its folder's name only
        assert len(_processes_of(names)) > 3  # both of them, a node and its port mapper
        (folder,) = tmp_path.iterdir()
        itself = int(folder.name.removeprefix("cluster-"))
        os.kill(itself if whom == "the set" else process.pid, how)
        assert process.wait(60) != 0
    _wait_until(lambda: [*tmp_path.iterdir()] == [] and _processes_of(names) == [])
    assert _networks() == before


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _networks() -> set[str]:
    """Names of networks and links of this host."""
    return {path.name for folder in ("/run/netns", "/sys/class/net") for path in _in(folder)}


def _in(folder: str) -> list[Path]:
    return [*Path(folder).iterdir()] if Path(folder).exists() else []


def _processes_of(names: Sequence[str]) -> list[str]:
    """Ids of processes that were told of one of these folders."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended
            told = path.read_bytes()
            if any(name.encode() in told for name in names):
                found.append(path.parent.name)
    return found


@for_long
@pytest.mark.parametrize("seed", range(SETS))
def test_a_set(seed: int, tmp_path: Path) -> None:
    plan = Plan(seed, SOAK_S)
    root = NEWEST if seed % 2 and NEWEST.exists() else ROOT
    result = play(plan, tmp_path, root)
    print(f"\n{result}")
    if plain := with_plain_pika(plan, result, tmp_path, root):
        print(f"lost by the broker; with plain pika: {plain}")
    assert result["wrong"] == []
    for figures in result["kinds"].values():
        assert figures["offered"] == figures["confirmed"] > 0


@for_long
@pytest.mark.parametrize("seed", range(len(HANDLINGS)))
@pytest.mark.parametrize("root", [ROOT, NEWEST] if NEWEST.exists() else [ROOT])
def test_members_and_leaders_come_and_go(seed: int, root: Path, tmp_path: Path) -> None:
    result = play(Plan(seed, 0.0, faults=MEMBERS), tmp_path, root)
    print(f"\n{result}")
    assert result["wrong"] == []
    for figures in result["kinds"].values():
        assert figures["offered"] == figures["confirmed"] > 0


@for_long
def test_a_node_cut_off_and_a_node_killed_lose_nothing_of_a_quorum_queue(tmp_path: Path) -> None:
    plan = Plan(18, 0.0, faults=("node cut off", "node killed"), kinds=("quorum",))
    result = play(plan, tmp_path)
    print(f"\n{result}")
    figures = result["kinds"]["quorum"]
    assert (result["handling"], result["wrong"]) == ("pause_minority", [])
    assert (figures["lost_by_broker"], figures["second_ids"], figures["late"]) == (0, 0, 0)
    assert figures["offered"] == figures["confirmed"] > 0


@for_long
def test_a_client_that_takes_a_write_for_a_confirm_is_caught(tmp_path: Path) -> None:
    plan = Plan(18, 0.0, "careless", ("node cut off",), ("quorum",))  # the node it is connected to
    assert any("confirmed falsely" in what for what in play(plan, tmp_path)["wrong"])


# ---------------------------------------------------------------------- what judges, and what plans


class _Node:
    """A node that counts its starts."""

    def __init__(self) -> None:
        self.name, self.starts, self.is_running = "rabbit", 0, True

    def kill(self) -> None:
        """Nothing runs here."""

    def launch(self) -> None:
        self.starts += 1

    def wait_until_ready(self) -> None:
        """It is."""


@pytest.mark.parametrize(("starts_of_the_first", "restarted"), [(0, 2), (1, 3)])
def test_a_cluster_that_stays_apart_has_more_and_more_nodes_restarted(
    starts_of_the_first: int, restarted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, nodes = _cluster_of(monkeypatch)
    monkeypatch.setattr(
        cluster, "is_whole", lambda: nodes[1].starts > 0 and nodes[0].starts >= starts_of_the_first
    )
    assert cluster.become_whole(0.0) == restarted


def test_a_first_node_that_is_down_is_started_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, nodes = _cluster_of(monkeypatch)
    nodes[0].is_running = False
    monkeypatch.setattr(cluster, "is_whole", lambda: nodes[0].starts > 0)
    assert cluster.become_whole(0.0) == 3
    assert [node.starts for node in nodes] == [1, 1, 1]


def test_a_cluster_that_never_heals_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, nodes = _cluster_of(monkeypatch)
    monkeypatch.setattr(cluster, "is_whole", lambda: False)
    with pytest.raises(NotWhole):
        cluster.become_whole(0.0)
    assert [node.starts for node in nodes] == [1, 2, 2]


def _cluster_of(monkeypatch: pytest.MonkeyPatch) -> tuple[Cluster, list[_Node]]:
    monkeypatch.setattr("tests.chaos.cluster._STARTS_WITHIN_S", 0.0)
    cluster, nodes = Cluster("ignore", Path()), [_Node(), _Node(), _Node()]
    monkeypatch.setattr(cluster, "nodes", nodes, raising=False)
    return cluster, nodes


class _Event:
    def __init__(self, number: int, epoch: str = "e", tag: int = 1) -> None:
        self.message_id, self.epoch, self.tag = f"n{number}", epoch, tag


def history(*events: tuple[str, int, int]) -> History:
    written = History()
    for what, number, tag in events:
        getattr(written, f"on_{what}")([_Event(number, tag=tag)])
    return written


def test_an_attempt_that_failed_and_one_that_did_not_are_in_order() -> None:
    events = [("stored", 1, 0), ("sent", 1, 1), ("nacked", 1, 1), ("sent", 1, 2)]
    assert history(*events, ("confirmed", 1, 2)).wrong({1}) == []


@pytest.mark.parametrize(
    ("events", "confirmed", "wrong"),
    [
        ([("sent", 1, 1), ("sent", 1, 1)], set(), "an attempt was sent twice"),
        ([("sent", 1, 1), ("nacked", 1, 1), ("confirmed", 1, 1)], {1}, "an attempt ended twice"),
        ([("sent", 1, 1), ("confirmed", 1, 2)], {1}, "ended, and never sent"),
        ([("sent", 1, 1), ("returned", 1, 1)], {1}, "told as confirmed, and no confirm came"),
    ],
)
def test_what_contradicts_itself_is_found(
    events: list[tuple[str, int, int]], confirmed: set[int], wrong: str
) -> None:
    assert any(what.startswith(wrong) for what in history(*events).wrong(confirmed))


def test_the_order_of_a_key_is_that_of_first_arrivals() -> None:
    assert out_of_order([1, 2, 1, 2, 3]) == []
    assert out_of_order([1, 3, 2]) == [2]


class _Relay:
    """A relay, a link and three queues, in memory; the link loses some messages once.

    Args:
        fault: what the relay does wrong.
    """

    def __init__(self, fault: str = "") -> None:
        self.told, self.history = Told(), History()
        self.arrivals: list[tuple[str, bytes, str]] = []
        self._tag = 0
        again: list[int] = []
        for number in range(1, 301):
            self.told.stored.add(number)
            self._note("stored", number, 0)
            is_lost = number % 20 == 10
            self._send(number, is_lost=is_lost)
            if is_lost and fault == "a write is a confirm":
                self.told.confirmed.add(number)
            elif is_lost and fault != "deletes what was sent":
                self._note("uncertain", number, self._tag)
                again.append(number)
            if fault != "later ones first" or number % 60 == 0:
                for each in again:
                    self._send(each)
                again.clear()
        if fault == "stores what it refuses":
            self.told.refused.add(301)
            self._arrive(301, "n301")
        if fault == "an id for each attempt":
            self._arrive(10, "m10")

    def _note(self, what: str, number: int, tag: int) -> None:
        getattr(self.history, f"on_{what}")([_Event(number, tag=tag)])

    def _arrive(self, number: int, message_id: str) -> None:
        body = judge.message("", KINDS, number).body
        self.arrivals.append((kind_of(KINDS, number), body, message_id))

    def _send(self, number: int, *, is_lost: bool = False) -> None:
        self._tag += 1
        self._note("sent", number, self._tag)
        if not is_lost:
            self._arrive(number, f"n{number}")
            self._note("confirmed", number, self._tag)
            self.told.confirmed.add(number)

    def judged(self) -> tuple[dict[str, judge.Figures], list[str]]:
        found = judge.Load(KINDS, self.told, self.history, None, duplicates_max=60)
        return judge.judge(found, "", self.arrivals)


def test_a_relay_that_sends_again_is_right() -> None:
    figures, wrong = _Relay().judged()
    assert wrong == []
    assert set(figures.values()) == {judge.Figures(100, 100, 0, 0, 0, 0)}


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        ("deletes what was sent", "lost"),
        ("a write is a confirm", "confirmed falsely"),
        ("a write is a confirm", "told as confirmed, and no confirm came"),
        ("an id for each attempt", "10 arrived as n10 and as m10"),
        ("later ones first", "out of order"),
        ("stores what it refuses", "refused, and there: [301]"),
    ],
)
def test_a_careless_relay_is_caught(fault: str, verdict: str) -> None:
    _, wrong = _Relay(fault).judged()
    assert any(what.startswith(verdict) for what in wrong), wrong


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_was_confirmed_to_a_classic_queue_or_a_stream_is_the_brokers_loss(
    kind: str,
) -> None:
    relay = _Relay()
    gone = next(n for n in range(1, 301) if kind_of(KINDS, n) == kind)
    relay.arrivals = [each for each in relay.arrivals if int(each[1].split()[0]) != gone]
    figures, wrong = relay.judged()
    is_the_brokers = kind in judge.BROKER_MAY_LOSE
    assert figures[kind].lost_by_broker == is_the_brokers
    assert [what for what in wrong if what.startswith("lost")] == (
        [] if is_the_brokers else [f"lost: [{gone}]"]
    )


def test_what_a_node_is_asked_in_vain_is_told() -> None:
    class Node:
        def ctl(self, *words: str) -> None:
            if words[0] == "clear_policy":
                raise RuntimeError("no answer")

    cluster: Any = SimpleNamespace(nodes=[Node()])
    scene = partitions.Scene(cluster, {}, random.Random(1))
    with partitions.policy_changed(scene, 0):
        assert scene.unanswered == []
    assert scene.unanswered == ["clear_policy p0: no answer"]


def test_a_seed_is_a_schedule_and_the_sets_have_every_fault() -> None:
    def schedule(seed: int) -> list[list[str]]:
        chance = random.Random(seed)
        return [partitions.names(chance) for _ in range(8)]

    assert schedule(3) == schedule(3)
    drawn = {fault.__name__.replace("_", " ") for fault in (*LINKS, *OTHERS)}
    assert {name for s in range(SETS) for one in schedule(s) for name in one} == drawn
    ways = {(Plan(s).handling, Plan(s).door) for s in range(SETS)}
    assert len(ways) == 9


def test_a_stream_has_a_publisher_of_its_own_unless_it_is_shared() -> None:
    assert Plan(0).parts == [("classic", "quorum"), ("stream",)]
    assert Plan(0, is_shared=True).parts == [KINDS]
    assert Plan(0, kinds=("quorum",)).parts == [("quorum",)]


def test_a_control_says_what_a_node_does_with_messages() -> None:
    with FakeBroker() as broker:
        assert control(broker.url, "", ["no such queue"]).startswith(
            "no confirm of no such queue: "
        )
        broker.declare_queue("orders")
        assert control(broker.url, "", ["orders"]) == ALL_CONFIRMED
    assert control(broker.url, "", ["orders"]).startswith("no connection: ")


class _Halted:
    """A load of which nothing is confirmed, and its publisher.

    Args:
        server: that the publisher is connected to.
    """

    def __init__(self, server: str) -> None:
        self.server = server

    @property
    def status(self) -> Self:
        return self

    def wait_until_it_flows(self, _timeout_s: float) -> float:
        raise AssertionError("nothing is confirmed any more")


@pytest.mark.parametrize(
    ("connected_to", "is_ours"), [("the healthy one", True), ("the other", False), ("a name", True)]
)
def test_a_publisher_that_halts_is_at_fault_only_if_plain_pika_gets_on_where_it_is(
    connected_to: str, *, is_ours: bool
) -> None:
    with FakeBroker() as healthy, FakeBroker() as other:
        healthy.declare_queue("quorum")
        ports = {"the healthy one": healthy.port, "the other": other.port}
        halted = _Halted(f"127.0.0.1:{ports.get(connected_to, 0)}")
        part = Part(("quorum",), halted, publisher=halted)  # type: ignore[arg-type]
        with pytest.raises(Stuck) if is_ours else contextlib.nullcontext():
            assert "UnroutableError" in outage(part, [healthy, other], "")  # type: ignore[list-item]


def test_what_plain_pika_itself_cannot_publish_is_the_brokers_outage() -> None:
    with FakeBroker() as healthy:
        healthy.declare_queue("quorum")
        part = Part(("quorum",), _Halted(""))  # type: ignore[arg-type]
        assert ALL_CONFIRMED in outage(part, [healthy], "")  # type: ignore[list-item]


def test_a_picture_has_what_was_confirmed_and_what_was_in_flight(tmp_path: Path) -> None:
    incident = {"faults": ["ring"], "began_s": 1.0, "ended_s": 2.0, "flows_after_s": 0.5}
    result = {"version": "3.10.8", "handling": "ignore", "door": "one URL", "took_s": 3.0}
    events = [
        (0.1, "stored", 1, "", 0, "quorum"),
        (0.1, "sent", 1, "e", 1, "quorum"),
        (0.2, "sent", 2, "e", 2, "quorum"),
        (0.3, "confirmed", 1, "e", 1, "quorum"),
        (1.7, "uncertain", 2, "e", 2, "quorum"),
        (1.8, "sent", 2, "f", 1, "quorum"),
        (2.6, "confirmed", 2, "f", 1, "quorum"),
    ]
    history = tmp_path / "history.jsonl.gz"
    with gzip.open(history, "wt") as file:
        for line in (result | {"incidents": [incident]}, *events):
            print(json.dumps(line), file=file)
    _, confirmed, in_flight = picture.read(history)
    assert confirmed == [1, 0, 0, 0, 0, 1, 0]
    assert in_flight == [1, 1, 1, 1, 1, 0, 0]
    picture.draw(history, tmp_path / "set.svg")
    drawn = (tmp_path / "set.svg").read_text()
    assert "ring" in drawn
    assert drawn.count("<polyline") == 5
