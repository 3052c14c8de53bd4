"""A set: a cluster, a publisher under load, and faults from a seed; then the account.

    python -m tests.chaos.sets 3 [--seconds 180] [--client plain] [--shared]
        [--kind quorum ...] [--fault "node cut off + node killed" ...]

It needs root, for the network and the mounts of its own that it runs itself in. It prints a line of
JSON, and fails if something was wrong. It knows how a set is run and judged; it must never know how
a fault is made.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pika

from reliablepub import Message, Publisher
from tests.amqp_probe import AmqpProbe
from tests.chaos import judge, partitions
from tests.chaos.account import attempts
from tests.chaos.cluster import NAME, Cluster, apart
from tests.chaos.judge import KINDS, History
from tests.chaos.load import OPTIONS, RATE_PER_S, WINDOW_MAX, Load
from tests.chaos.partitions import Scene
from tests.chaos.plain import PlainLoad
from tests.chaos.timeline import Timeline

HANDLINGS: Final = ("pause_minority", "autoheal", "ignore")
DOORS: Final = ("three URLs", "one URL", "a name")
CLIENTS: Final = ("reliablepub", "plain", "careless")
"""Ours; plain pika with confirms and returns; and one that takes a write for a confirm."""
PATIENCE_S: Final = 300.0
HEALS_WITHIN_S: Final = 30.0
QUEUE_AGE_S: Final = 3.0
ACKED_AT_ONCE: Final = 100


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
    """

    seed: int
    seconds: float = 180.0
    client: str = CLIENTS[0]
    faults: tuple[str, ...] = ()
    kinds: tuple[str, ...] = KINDS
    is_shared: bool = False

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

    def attempts(self) -> tuple[int, int, int]:
        """Uncertain ones, refused ones, and most that were uncertain on one channel."""
        if self.outbox is None:
            return 0, 0, 0
        return attempts(self.outbox)


class Set:
    """One set, on a cluster of its own."""

    def __init__(self, plan: Plan, cluster: Cluster, folder: Path) -> None:
        self.plan = plan
        self._cluster = cluster
        self._folder = folder
        self._parts: list[Part] = []
        self._timeline = Timeline()
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
        chance = random.Random(self.plan.seed)
        scene = Scene(self._cluster, self._queues, chance)
        incidents: list[dict[str, Any]] = []
        began = time.monotonic()
        with ExitStack() as stack:
            for kinds in self.plan.parts:
                self._parts.append(self._part(kinds, stack))
            stack.enter_context(self._timeline.watch(self._counts))
            for part in self._parts:
                part.load.start()
                stack.callback(part.load.stop)
            self._wait_until_it_flows()
            for names in self._schedule(chance, began):
                with self._timeline.fault(" + ".join(names)):
                    partitions.happen(scene, names)
                healed_at = time.monotonic()
                restarted = self._cluster.become_whole(HEALS_WITHIN_S)
                self._wait_until_it_flows()
                flows_after_s = round(time.monotonic() - healed_at, 1)
                incidents.append(
                    {"faults": names, "restarted": restarted, "flows_after_s": flows_after_s}
                )
            for part in self._parts:
                part.load.stop()
            for part in self._parts:
                part.finish()
        return self._judge(incidents, time.monotonic() - began)

    def _schedule(self, chance: random.Random, began: float) -> Iterator[list[str]]:
        """Names of faults that come together, until the time is over."""
        for given in self.plan.faults:
            yield given.split(" + ")
        if not self.plan.faults:
            yield partitions.names(chance)
            while time.monotonic() - began < self.plan.seconds:
                yield partitions.names(chance)

    def _counts(self) -> tuple[int, int]:
        counts = [part.load.counts for part in self._parts]
        return sum(stored for stored, _ in counts), sum(confirmed for _, confirmed in counts)

    def _wait_until_it_flows(self) -> None:
        for part in self._parts:
            part.load.wait_until_it_flows(PATIENCE_S)

    def _part(self, kinds: tuple[str, ...], stack: ExitStack) -> Part:
        rate_per_s = RATE_PER_S * len(kinds) / len(self.plan.kinds)
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

    def _judge(self, incidents: list[dict[str, Any]], took_s: float) -> dict[str, Any]:
        arrivals = list(self._arrivals())
        kinds: dict[str, dict[str, int]] = {}
        wrong: list[str] = []
        attempts = [part.attempts() for part in self._parts]
        for part, (uncertain, refused, most) in zip(self._parts, attempts, strict=True):
            failed = len(arrivals) if part.outbox is None else uncertain + refused
            found = judge.Load(part.kinds, part.load.told, part.history, part.outbox, failed)
            figures, more = judge.judge(found, self._exchange, arrivals)
            kinds |= judge.as_json(figures)
            wrong += more + [f"{most} uncertain at once"] * (most > WINDOW_MAX)
        return asdict(self.plan) | {
            "handling": self.plan.handling,
            "door": self.plan.door,
            "took_s": round(took_s, 1),
            "incidents": incidents,
            "kinds": kinds,
            "uncertain": sum(uncertain for uncertain, _, _ in attempts),
            "refused": sum(refused for _, refused, _ in attempts),
            "wrong": wrong,
        }

    def _arrivals(self) -> Iterator[tuple[str, bytes, str]]:
        """Kind of queue, body and id of everything in the queues, in order."""
        url = self._cluster.nodes[0].url
        for kind, queue in self._queues.items():
            arguments = {"x-stream-offset": "first"} if kind == "stream" else None
            with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
                channel = connection.channel()
                channel.basic_qos(prefetch_count=10 * ACKED_AT_ONCE)
                for method, properties, body in channel.consume(
                    queue, inactivity_timeout=10.0, arguments=arguments
                ):
                    if method is None or properties is None or body is None:
                        break
                    yield kind, body, properties.message_id or ""
                    if method.delivery_tag % ACKED_AT_ONCE == 0:
                        channel.basic_ack(method.delivery_tag, multiple=True)

    def keep(self, folder: Path, result: dict[str, Any]) -> None:
        """The result, the history of a set in which something was wrong, and a picture."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"cluster-{self.plan.client}-{self.plan.seed}"
        with (folder / "cluster.jsonl").open("a") as file:
            print(json.dumps(result), file=file)
        for part in self._parts if result["wrong"] else []:
            lines = [json.dumps(event) for event in part.history.events] if part.history else []
            (folder / f"{name}-{part.kinds[0]}.history.jsonl").write_text("\n".join(lines))
        self._timeline.draw(folder / f"{name}.svg", f"{self.plan.handling}, {self.plan.door}")


def play(plan: Plan, folder: Path) -> dict[str, Any]:
    """Run a set in a process of its own, whose network nobody else is in; its result."""
    done = subprocess.run(
        apart("-m", "tests.chaos.sets", *plan.command()),
        cwd=Path(__file__).parents[2],
        env=os.environ | {"RELIABLEPUB_APART": "1", "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.stdout, f"the set ended without a result ({done.returncode})"
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.sets")
    parser.add_argument("seed", type=int)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--client", choices=CLIENTS, default=CLIENTS[0])
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--kind", choices=KINDS, action="append", default=[])
    parser.add_argument("--shared", action="store_true")
    chosen = parser.parse_args(words)
    kinds = tuple(kind for kind in KINDS if kind in (chosen.kind or KINDS))
    plan = Plan(
        chosen.seed, chosen.seconds, chosen.client, tuple(chosen.fault), kinds, chosen.shared
    )
    with tempfile.TemporaryDirectory(prefix="cluster-") as name:
        if "RELIABLEPUB_APART" not in os.environ:
            result = play(plan, Path(name))
        else:
            with Cluster(plan.handling, Path(name)) as cluster:
                one = Set(plan, cluster, Path(name))
                result = one.run()
                if report := os.environ.get("RELIABLEPUB_CHAOS_REPORT"):
                    one.keep(Path(report), result)
    print(json.dumps(result))
    return bool(result["wrong"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
