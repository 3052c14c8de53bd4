"""A set: a cluster, a publisher under load, and faults from a seed; then the account.

    python -m tests.chaos.sets 3 [--seconds 180] [--client plain] [--shared] [--rate 600]
        [--kind quorum ...] [--fault "node cut off + node killed" ...]

It needs root, for the network and the mounts of its own that it runs itself in. It prints a line of
JSON, and fails if something was wrong. RELIABLEPUB_CHAOS_REPORT names a folder for this line, the
history and its picture, and the nodes' logs if something was wrong. Where the broker lost what it
had confirmed, the same seed is then played with plain pika. Where it takes nothing any more, plain
pika is tried at the same node: if that is refused too, the nodes are restarted, which is told, and
the set goes on. It knows how a set is run and judged; it must never know how a fault is made.
"""

import argparse
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import pika

from reliablepub import Message, Publisher, StillOpen
from tests.amqp_probe import AmqpProbe
from tests.chaos import judge, partitions, picture
from tests.chaos.account import Attempts, attempts
from tests.chaos.cluster import NAME, Cluster, NotWhole, apart
from tests.chaos.judge import KINDS, History
from tests.chaos.load import OPTIONS, RATE_PER_S, WINDOW_MAX, Load
from tests.chaos.partitions import Scene
from tests.chaos.plain import ALL_CONFIRMED, CONTROL, PlainLoad, control
from tests.rabbitmq import ROOT, ROOT_VARIABLE, NotStarted, RabbitMQNode

HANDLINGS: Final = ("pause_minority", "autoheal", "ignore")
NO_MNESIA: Final = (4, 3)
NO_HANDLING: Final = "no partition handling"
"""What such a RabbitMQ does: it takes the setting, and has no use for it."""
DOORS: Final = ("three URLs", "one URL", "a name")
CLIENTS: Final = ("reliablepub", "plain", "careless")
"""Ours; plain pika with confirms and returns; and one that takes a write for a confirm."""
PATIENCE_S: Final = 300.0
HEALS_WITHIN_S: Final = 30.0
QUEUE_AGE_S: Final = 3.0
ACKED_AT_ONCE: Final = 100
SILENCES_MAX: Final = 10
"""How long, in seconds, a queue is asked for a message that must be there and does not come."""


@dataclass(frozen=True)
class Plan:
    """What a set is; from the seed come its faults, its handling of partitions and its door.

    Attributes:
        seed: of the faults, where none are given, and of the node and the length of each.
        seconds: until no further fault begins.
        client: one of `CLIENTS`.
        faults: instead of those from the seed, one after the other; each at least once.
        kinds: of queues.
        is_shared: whether one publisher has all queues. Otherwise, the stream has its own.
        rate_per_s: messages a second.
    """

    seed: int
    seconds: float = 180.0
    client: str = CLIENTS[0]
    faults: tuple[str, ...] = ()
    kinds: tuple[str, ...] = KINDS
    is_shared: bool = False
    rate_per_s: float = RATE_PER_S

    @property
    def handling(self) -> str:
        return HANDLINGS[self.seed % len(HANDLINGS)]

    @property
    def door(self) -> str:
        return DOORS[self.seed // len(HANDLINGS) % len(DOORS)]

    @property
    def parts(self) -> list[tuple[str, ...]]:
        """The kinds of queues that each publisher has."""
        if self.is_shared:
            return [self.kinds]
        queues = tuple(kind for kind in self.kinds if kind != "stream")
        return [part for part in (queues, self.kinds[len(queues) :]) if part]

    def command(self) -> list[str]:
        """What repeats it."""
        options = ["--seconds", f"{self.seconds:g}", "--client", self.client]
        options += ["--rate", f"{self.rate_per_s:g}"]
        options += ["--shared"] * self.is_shared
        options += [word for kind in self.kinds for word in ("--kind", kind)]
        return [str(self.seed), *options, *(w for name in self.faults for w in ("--fault", name))]


@dataclass(frozen=True)
class Part:
    """A publisher of a set, and what it has to do."""

    kinds: tuple[str, ...]
    load: Load | PlainLoad
    outbox: Path | None = None
    history: History | None = None
    publisher: Publisher | None = None

    def finish(self) -> None:
        """Wait until every message has its outcome."""
        if isinstance(self.load, Load) and self.publisher is not None:
            self.publisher.flush(PATIENCE_S)
            self.load.settle()

    @cached_property
    def attempts(self) -> Attempts:
        """Those that were not confirmed; at the end."""
        return Attempts(0, 0, 0, 0) if self.outbox is None else attempts(self.outbox)


class Stuck(Exception):
    """A publisher that publishes nothing, though plain pika can, or all nodes were restarted."""


def outage(part: Part, nodes: Sequence[RabbitMQNode], exchange: str) -> str:
    """Wait for a publisher's messages; if none flow, what plain pika gets of the nodes.

    Raises:
        Stuck: plain pika can publish at the node that the publisher is connected to.
    """
    try:
        part.load.wait_until_it_flows(PATIENCE_S)
    except (AssertionError, StillOpen) as error:
        found = {node.url: control(node.url, exchange, part.kinds) for node in nodes}
        status = part.publisher.status if part.publisher else None
        text = f"{part.kinds}: {error}; with plain pika: {found}; {status}"
        if status is not None:  # with a name, it may be connected to any of them
            ours = [said for url, said in found.items() if status.server in url]
            if ALL_CONFIRMED in (ours or found.values()):
                raise Stuck(text) from error
        return text
    return ""


class Set:
    """One set, on a cluster of its own."""

    def __init__(self, plan: Plan, cluster: Cluster, folder: Path) -> None:
        self.plan = plan
        self._cluster = cluster
        self._folder = folder
        self._parts: list[Part] = []
        self._began = time.monotonic()
        self._incidents: list[dict[str, Any]] = []
        self._stuck: list[str] = []
        """What was wrong before the account."""
        self._probe = AmqpProbe(cluster.nodes[0].url)
        self._exchange = self._probe.declare_exchange()
        self._queues: dict[str, str] = {}
        for kind in plan.kinds:
            queue = self._probe.declare_queue(arguments={"x-queue-type": kind})
            self._probe.bind(queue, self._exchange, kind)
            self._queues[kind] = queue
        time.sleep(QUEUE_AGE_S)  # a younger quorum queue may not outlive a SIGKILL

    @property
    def urls(self) -> list[str]:
        urls = [node.url for node in self._cluster.nodes]
        if self.plan.client != "reliablepub" or self.plan.door == "three URLs":
            return urls
        if self.plan.door == "one URL":
            return urls[:1]
        return [f"amqp://guest:guest@{NAME}:{self._cluster.nodes[0].amqp_port}/%2F"]

    def run(self) -> dict[str, Any]:
        """Let it happen; what there is to say of it."""
        self._began = time.monotonic()
        with ExitStack() as stack:
            for kinds in self.plan.parts:
                self._parts.append(self._part(kinds, stack))
            for part in self._parts:
                part.load.start()
                stack.callback(part.load.stop)
            try:
                self._let_it_happen()
            except Stuck as error:
                self._stuck.append(f"nothing flows: {error}")
                self._cluster.restart()
            except NotWhole as error:  # nobody can be asked what arrived
                return self._result({}, [f"no account: {error}"], self._now_s)
            for part in self._parts:
                part.load.stop()
            for part in self._parts:
                part.finish()
        return self._judge(self._now_s)

    def _let_it_happen(self) -> None:
        """One incident after another, until the time is over or nothing flows any more."""
        chance = random.Random(self.plan.seed)
        scene = Scene(self._cluster, self._queues, chance)
        for part in self._parts:
            part.load.wait_until_it_flows(PATIENCE_S)
        for names in self._schedule(chance):
            incident: dict[str, Any] = {"faults": names, "began_s": self._now_s}
            with suppress(NotStarted):  # such a node is started again with the others
                partitions.happen(scene, names)
            incident |= {"ended_s": self._now_s, "restarted": 0, "outage": ""}
            incident["unanswered"] = [*scene.unanswered]
            scene.unanswered.clear()
            self._incidents.append(incident)
            try:
                incident["restarted"] = self._cluster.become_whole(HEALS_WITHIN_S)
                incident["outage"] = self._until_it_flows()
            finally:
                incident["flows_after_s"] = round(self._now_s - incident["ended_s"], 1)

    @property
    def _now_s(self) -> float:
        """Seconds since it began."""
        return round(time.monotonic() - self._began, 1)

    def _schedule(self, chance: random.Random) -> Iterator[list[str]]:
        """Names of faults that come together, until the time is over."""
        for given in self.plan.faults:
            yield given.split(" + ")
        if not self.plan.faults:
            yield partitions.names(chance)
            while self._now_s < self.plan.seconds:
                yield partitions.names(chance)

    def _until_it_flows(self) -> str:
        """Wait for messages of each kind; if the broker takes none, restart all nodes.

        Returns:
            what was said to us, and to plain pika, where all nodes had to be restarted.

        Raises:
            Stuck: nothing flows, and it is not the broker.
        """
        if said := self._outage():
            self._cluster.restart()
            if still := self._outage():
                raise Stuck(f"not even after a restart of all nodes: {still}; before: {said}")
        return said

    def _outage(self) -> str:
        found = [outage(part, self._cluster.nodes, self._exchange) for part in self._parts]
        return "; ".join(filter(None, found))

    def _part(self, kinds: tuple[str, ...], stack: ExitStack) -> Part:
        rate_per_s = self.plan.rate_per_s * len(kinds) / len(self.plan.kinds)
        make: Callable[[int], Message] = partial(judge.message, self._exchange, kinds)
        if self.plan.client != "reliablepub":
            is_careful = self.plan.client == "plain"
            load = PlainLoad(self.urls, len(kinds), make, rate_per_s, is_careful=is_careful)
            return Part(kinds, load)
        outbox, history = self._folder / f"{kinds[0]}.db", History()
        publisher = stack.enter_context(
            Publisher(self.urls, outbox=outbox, hooks=[history], **OPTIONS)  # type: ignore[arg-type]
        )
        return Part(kinds, Load(publisher, make, rate_per_s), outbox, history, publisher)

    # ------------------------------------------------------------------ the verdict

    def _judge(self, took_s: float) -> dict[str, Any]:
        arrivals = self._arrivals()
        kinds: dict[str, dict[str, int]] = {}
        wrong = [*self._stuck]
        for part in self._parts:
            tried = part.attempts
            failed = len(arrivals) if part.outbox is None else tried.uncertain + tried.refused
            most = tried.uncertain_at_once
            found = judge.Load(part.kinds, part.load.told, part.history, part.outbox, failed)
            figures, more = judge.judge(found, self._exchange, arrivals)
            kinds |= judge.as_json(figures)
            wrong += more + [f"{most} uncertain at once"] * (most > WINDOW_MAX)
        return self._result(kinds, wrong, took_s)

    def _result(
        self, kinds: dict[str, dict[str, int]], wrong: list[str], took_s: float
    ) -> dict[str, Any]:
        attempts = [part.attempts for part in self._parts]
        version = self._cluster.nodes[0].version
        return asdict(self.plan) | {
            "handling": self.plan.handling if version < NO_MNESIA else NO_HANDLING,
            "door": self.plan.door,
            "version": ".".join(map(str, version)),
            "took_s": took_s,
            "incidents": self._incidents,
            "kinds": kinds,
            "uncertain": sum(each.uncertain for each in attempts),
            "refused": sum(each.refused for each in attempts),
            "wrong": wrong,
        }

    def _arrivals(self) -> list[tuple[str, bytes, str]]:
        """Kind of queue, body and id of everything in the queues, in order."""
        with ThreadPoolExecutor() as threads:
            return [each for some in threads.map(self._consumed, self._queues) for each in some]

    def _consumed(self, kind: str) -> list[tuple[str, bytes, str]]:
        """All of a queue; of a stream, where most of it is: a replica may be late, or down."""
        found: list[tuple[str, bytes, str]] = []
        is_stream = kind == "stream"
        for node in self._cluster.nodes if is_stream else self._cluster.nodes[:1]:
            missing = {
                number
                for part in self._parts
                for number in part.load.told.confirmed
                if judge.kind_of(part.kinds, number) == kind
            }
            with suppress(*[pika.exceptions.ChannelClosedByBroker] * is_stream):
                found = max(found, self._consumed_at(node.url, kind, missing), key=len)
            if found and not missing:
                break
        return found

    def _consumed_at(self, url: str, kind: str, missing: set[int]) -> list[tuple[str, bytes, str]]:
        """All that a node has; what of it was confirmed is no longer missing."""
        found: list[tuple[str, bytes, str]] = []
        silences = 0
        parameters = pika.URLParameters(url)
        arguments = {"x-stream-offset": "first"} if kind == "stream" else None
        with closing(pika.BlockingConnection(parameters)) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=10 * ACKED_AT_ONCE)
            for method, properties, body in channel.consume(
                self._queues[kind], inactivity_timeout=1.0, arguments=arguments
            ):
                if method is None or properties is None or body is None:
                    silences += 1
                    if not missing or silences == SILENCES_MAX:
                        break
                    continue
                silences = 0
                if body != CONTROL:
                    found.append((kind, body, properties.message_id or ""))
                    missing.discard(int(body.split()[0]))
                if method.delivery_tag % ACKED_AT_ONCE == 0:
                    channel.basic_ack(method.delivery_tag, multiple=True)
        return found

    def keep(self, folder: Path, result: dict[str, Any]) -> None:
        """The result; what the publishers did, and a picture; logs, where something was wrong."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"cluster-{result['version']}-{self.plan.client}-{self.plan.seed}"
        with (folder / "cluster.jsonl").open("a") as file:
            print(json.dumps(result), file=file)
        for number, node in enumerate(self._cluster.nodes if result["wrong"] else []):
            shutil.copy(node.folder / "log", folder / f"{name}-node{number}.log")
        events = sorted(
            (*event, judge.kind_of(part.kinds, event[2]))
            for part in self._parts
            for event in (part.history.events if part.history else ())
        )
        if not events:
            return
        with gzip.open(folder / f"{name}.history.jsonl.gz", "wt", compresslevel=1) as file:
            print(json.dumps(result), file=file)
            for at, *more in events:
                print(json.dumps([round(at - self._began, 3), *more]), file=file)
        picture.draw(folder / f"{name}.history.jsonl.gz", folder / f"{name}.svg")


def play(plan: Plan, folder: Path, root: Path = ROOT) -> dict[str, Any]:
    """Run a set in a process of its own, whose network nobody else is in; its result.

    Args:
        plan: the set.
        folder: in which it has a folder of its own until it ends.
        root: where its RabbitMQ is installed.
    """
    with subprocess.Popen(
        apart("-m", "tests.chaos.sets", *plan.command()),
        cwd=Path(__file__).parents[2],
        env=os.environ | {_APART: str(folder), ROOT_VARIABLE: str(root)},
        stdout=subprocess.PIPE,
        start_new_session=True,  # whoever kills this process and its group: it can clean up
        text=True,
    ) as process:
        try:
            said, _ = process.communicate()
        finally:
            process.terminate()
            process.wait()
            shutil.rmtree(_own_folder(folder, process.pid), ignore_errors=True)  # if it was killed
    assert said, f"the set ended without a result ({process.returncode})"
    result: dict[str, Any] = json.loads(said.splitlines()[-1])
    return result


def with_plain_pika(
    plan: Plan, result: dict[str, Any], folder: Path, root: Path = ROOT
) -> dict[str, Any] | None:
    """The same set with pika alone, if the broker has lost something of ours: whose loss is it?"""
    lost = sum(figures["lost_by_broker"] for figures in result["kinds"].values())
    if not lost or plan.client != CLIENTS[0]:
        return None
    return play(replace(plan, client="plain"), folder, root)


_APART: Final = "RELIABLEPUB_APART"
"""Set where a network of one's own is: the folder in which to make another one."""


def _own_folder(folder: Path, pid: int) -> Path:
    return folder / f"cluster-{pid}"


def _run_apart(plan: Plan, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    tempfile.tempdir = str(folder)
    try:
        with Cluster(plan.handling, folder) as cluster:
            one = Set(plan, cluster, folder)
            result = one.run()
            if report := os.environ.get("RELIABLEPUB_CHAOS_REPORT"):
                one.keep(Path(report), result)
            return result
    finally:
        shutil.rmtree(folder)


def _end(_signal: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: it is cleaning up
    sys.exit("terminated")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.sets")
    parser.add_argument("seed", type=int)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--client", choices=CLIENTS, default=CLIENTS[0])
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--kind", choices=KINDS, action="append", default=[])
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--rate", type=float, default=RATE_PER_S)
    chosen = parser.parse_args(words)
    plan = Plan(
        chosen.seed,
        chosen.seconds,
        chosen.client,
        tuple(chosen.fault),
        tuple(kind for kind in KINDS if kind in (chosen.kind or KINDS)),
        chosen.shared,
        chosen.rate,
    )
    signal.signal(signal.SIGTERM, _end)
    if _APART in os.environ:
        result = _run_apart(plan, _own_folder(Path(os.environ[_APART]), os.getpid()))
        print(json.dumps(result))
        return 0
    folder = Path(tempfile.gettempdir())
    result = play(plan, folder)
    print(json.dumps(result), flush=True)
    if plain := with_plain_pika(plan, result, folder):
        print(json.dumps(plain))
    return bool(result["wrong"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
