"""What can go wrong with a cluster, by name: each is so for a while, and two may come together.

It knows a cluster, and the queues in it; it must never know the publisher.
"""

import contextlib
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from tests.chaos.cluster import Cluster

NODES: Final = range(3)
INSIST_S: Final = 60.0
CATCH_UP_S: Final = 3.0


@dataclass(frozen=True)
class Scene:
    """Where a fault happens.

    Attributes:
        cluster: the nodes and their links.
        queues: by kind.
        chance: which node, and for how long.
        unanswered: what a node was asked in vain; such a fault may not have happened.
    """

    cluster: Cluster
    queues: Mapping[str, str]
    chance: random.Random
    unanswered: list[str] = field(default_factory=list)

    def others(self, number: int) -> list[int]:
        return [other for other in NODES if other != number]

    def ask(self, number: int, *words: str) -> None:
        """Run rabbitmqctl on a node, which may be in no state to answer."""
        try:
            self.cluster.nodes[number].ctl(*words)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            self.unanswered.append(f"{' '.join(words)}: {error}")


Fault: TypeAlias = Callable[[Scene, int], AbstractContextManager[None]]
"""Something is wrong with a node, by its number, for the block."""


# ---------------------------------------------------------------------- links


def node_cut_off(scene: Scene, number: int) -> AbstractContextManager[None]:
    return scene.cluster.unplugged(number)


def split_in_two(scene: Scene, number: int) -> AbstractContextManager[None]:
    """Clients reach both sides, a node alone and the two others."""
    cuts = [pair for other in scene.others(number) for pair in ((number, other), (other, number))]
    return scene.cluster.hidden(*cuts)


def one_way(scene: Scene, number: int) -> AbstractContextManager[None]:
    """A node hears the others, and is not heard."""
    return scene.cluster.hidden(*((number, other) for other in scene.others(number)))


def ring(scene: Scene, number: int) -> AbstractContextManager[None]:
    """Two nodes do not see each other, and the third one sees both: each has a majority."""
    one, other = scene.others(number)
    return scene.cluster.hidden((one, other), (other, one))


@contextlib.contextmanager
def link_flaps(scene: Scene, number: int) -> Iterator[None]:
    for _ in range(scene.chance.randint(3, 6)):
        with scene.cluster.unplugged(number):
            time.sleep(scene.chance.uniform(0.2, 2.0))
        time.sleep(scene.chance.uniform(0.2, 1.0))
    yield


# ---------------------------------------------------------------------- nodes


@contextlib.contextmanager
def node_killed(scene: Scene, number: int) -> Iterator[None]:
    scene.cluster.nodes[number].kill()
    try:
        yield
    finally:
        scene.cluster.nodes[number].start()


@contextlib.contextmanager
def node_frozen(scene: Scene, number: int) -> Iterator[None]:
    """For longer than a heartbeat and a tick."""
    scene.cluster.nodes[number].pause()
    try:
        yield
        time.sleep(6.0)
    finally:
        scene.cluster.nodes[number].resume()


@contextlib.contextmanager
def node_frozen_for_a_moment(scene: Scene, number: int) -> Iterator[None]:
    for _ in range(3):
        scene.cluster.nodes[number].pause()
        time.sleep(1.0)
        scene.cluster.nodes[number].resume()
        time.sleep(1.0)
    yield


@contextlib.contextmanager
def leader_moved(scene: Scene, number: int) -> Iterator[None]:
    """The one of the quorum queue, to this node."""
    queue, node = f"'%2F_{scene.queues['quorum']}'", scene.cluster.nodes[number].name
    move = f"{{ok, _, L}} = ra:members({{{queue}, node()}}), "
    scene.ask(number, "eval", f"{move} ra:transfer_leadership(L, {{{queue}, '{node}'}}).")
    yield


@contextlib.contextmanager
def memory_alarm(scene: Scene, number: int) -> Iterator[None]:
    alarm = "{resource_limit, memory, node()}"
    scene.ask(number, "eval", f"rabbit_alarm:set_alarm({{{alarm}, []}}).")
    try:
        yield
    finally:
        scene.ask(number, "eval", f"rabbit_alarm:clear_alarm({alarm}).")


@contextlib.contextmanager
def policy_changed(scene: Scene, number: int) -> Iterator[None]:
    name = f"p{number}"
    scene.ask(number, "set_policy", name, ".*", '{"delivery-limit": 9, "max-length": 9000000}')
    try:
        yield
    finally:
        scene.ask(number, "clear_policy", name)


@contextlib.contextmanager
def rolling_restart(scene: Scene, number: int) -> Iterator[None]:
    """In order, one after the other, from this one on; one that does not stop is killed."""
    yield
    for each in (number, *scene.others(number)):
        node = scene.cluster.nodes[each]
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.stop()
        node.kill()
        node.start()


# ---------------------------------------------------------------------- members and leaders


@contextlib.contextmanager
def node_removed(scene: Scene, number: int) -> Iterator[None]:
    """A node leaves the cluster, and joins it again as a new one, without data.

    It is never the first one: the classic queue would be deleted with it.
    """
    first, node = scene.cluster.nodes[0], scene.cluster.nodes[number or 1]
    replicas = {kind: scene.queues[kind] for kind in _JOIN if kind in scene.queues}
    if "stream" in replicas:  # RabbitMQ 3.10 forgets a node with its quorum queues only
        leave = f"rabbit_stream_queue:delete_replica({_replica(replicas['stream'], node.name)})."
        _insist(lambda: first.eval(leave) == "ok")
    node.stop()
    first.ctl("forget_cluster_node", node.name)
    try:
        yield
    finally:
        node.erase()
        node.start()
        for kind, queue in replicas.items():
            join = _JOIN[kind].format(replica=_replica(queue, node.name))
            _insist(lambda join=join: first.eval(join) == "ok")  # type: ignore[misc]


_JOIN: Final = {
    "quorum": "rabbit_quorum_queue:add_member({replica}, 5000).",
    "stream": "rabbit_stream_queue:add_replica({replica}).",
}


def _replica(queue: str, node: str) -> str:
    return f'<<"/">>, <<"{queue}">>, \'{node}\''


@contextlib.contextmanager
def stream_leader_moved(scene: Scene, _number: int) -> Iterator[None]:
    """Its process is killed until another node has the leader: RabbitMQ 3.10 cannot be asked to.

    The node that had it has the longest log, and gets it again, unless another one has caught up
    that is asked before it: of three, two are asked, of two always both.
    """
    first = scene.cluster.nodes[0]
    queue = f'rabbit_misc:r(<<"/">>, queue, <<"{scene.queues["stream"]}">>)'
    find = f"{{ok, Q}} = rabbit_amqqueue:lookup({queue}), P = amqqueue:get_pid(Q), "
    before = first.eval(find + "node(P).")

    def is_elsewhere() -> bool:
        if first.eval(find + "node(P).") != before:
            return True
        first.eval(find + "exit(P, kill).")
        return False

    _insist(is_elsewhere, CATCH_UP_S)
    yield


def _insist(is_done: Callable[[], bool], pause_s: float = 1.0) -> None:
    """Try until it is done; the cluster may not be ready for it."""
    deadline, refusal = time.monotonic() + INSIST_S, "it does not happen"
    while True:
        try:
            if is_done():
                return
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            refusal = str(error)
        assert time.monotonic() < deadline, f"the cluster refuses: {refusal}"
        time.sleep(pause_s)


# ---------------------------------------------------------------------- together


LINKS: Final[tuple[Fault, ...]] = (node_cut_off, split_in_two, one_way, ring, link_flaps)
OTHERS: Final[tuple[Fault, ...]] = (
    node_killed,
    node_frozen,
    node_frozen_for_a_moment,
    leader_moved,
    memory_alarm,
    policy_changed,
    rolling_restart,
)
MEMBERS: Final[tuple[Fault, ...]] = (node_removed, stream_leader_moved)
"""Never drawn, only asked for by name: so a seed is the schedule that it was without them."""
FAULTS: Final = {fault.__name__.replace("_", " "): fault for fault in (*LINKS, *OTHERS, *MEMBERS)}


def names(chance: random.Random) -> list[str]:
    """One fault, or one of a node while there is one of the links; the latter is mended first."""
    chosen = chance.choice([[OTHERS], [LINKS], [LINKS], [OTHERS, LINKS]])
    return [chance.choice(kind).__name__.replace("_", " ") for kind in chosen]


def happen(scene: Scene, faults: list[str]) -> None:
    """Let these be so for a while, each begun and ended at its own time."""
    with ExitStack() as stack:
        for name in faults:
            stack.enter_context(FAULTS[name](scene, scene.chance.choice(NODES)))
            time.sleep(scene.chance.uniform(0.5, 3.0))
        time.sleep(scene.chance.uniform(1.0, 10.0))
