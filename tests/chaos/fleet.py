"""Two relay hosts, enqueuers and a consumer around one outbox in PostgreSQL, and what befalls them.

It knows how a run is set up, each fault, and how the account is closed. It must never know which
faults a test chooses.
"""

import json
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import pika
import psycopg

from reliablepub import Outbox
from tests.chaos.account import Told, close_account
from tests.chaos.hosts import DATA, QUEUE, Hosts, Life, message
from tests.chaos.networks import Network
from tests.chaos.proxy import Proxy
from tests.postgres import PostgresServer
from tests.rabbitmq import RabbitMQNode

TAKEOVER_S_MAX: Final = 5.0
PATIENCE_S: Final = 60.0
BEYOND_OWNERSHIP_S: Final = 3.5
WORDS: Final = ("tried", "within", "stored", "refused")


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        seconds: from the first fault to the last confirm.
        faults: how often each happened.
        kills: how many relays and enqueuers were killed by SIGKILL.
        stored: messages that were committed.
        refused: messages that were rolled back, or told as not stored.
        duplicates: arrivals beyond the first.
        uncertain: attempts whose fate was unknowable, so that they were made again.
        stored_twice: messages whose enqueuer lost its connection, and which are there twice.
        takeovers_s: seconds from each SIGKILL of the owner to the next owner.
        arrivals_s: and to the next message that arrived.
        lost: how often a relay has stopped by itself, by error.
        wrong: what must not be.
    """

    seconds: float
    faults: dict[str, int]
    kills: int
    stored: int
    refused: int
    duplicates: int
    uncertain: int
    stored_twice: int
    takeovers_s: list[float]
    arrivals_s: list[float]
    lost: dict[str, int]
    wrong: list[str]

    def report(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


class Consumer:
    """A thread that takes everything from the queue, and remembers it in the order of arrival.

    Attributes:
        arrivals: body and ``message_id`` of each.
        last_at: when the last one arrived.
    """

    def __init__(self, url: str) -> None:
        self._parameters = pika.URLParameters(url)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="consumer")
        self.arrivals: list[tuple[bytes, str]] = []
        self.last_at = 0.0

    def _run(self) -> None:
        with closing(pika.BlockingConnection(self._parameters)) as connection:
            channel = connection.channel()
            for _, properties, body in channel.consume(
                QUEUE, auto_ack=True, inactivity_timeout=0.1
            ):
                if properties is not None and body is not None:
                    self.arrivals.append((body, properties.message_id or ""))
                    self.last_at = time.monotonic()
                elif self._is_over.is_set():
                    break
            channel.cancel()

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            self._thread.join()


@dataclass
class _Host:
    """One relay's place: its links, its log, and who lives there."""

    database: Proxy
    broker: Proxy
    log: Path
    network: Network | None
    pid: int = 0

    def lines(self) -> list[list[str]]:
        text = self.log.read_text() if self.log.exists() else ""
        return [line.split() for line in text.splitlines() if line]

    @property
    def owns_since(self) -> float | None:
        """Since when it relays, as far as it knows."""
        lines = self.lines()
        return float(lines[-1][1]) if lines and lines[-1][0] == "owner" else None


@dataclass
class Fleet:
    """Everything that runs, from `start` to `close`.

    Args:
        server: the database.
        name: of the database.
        node: the broker.
        hosts: where processes come from.
        links: to the database and to the broker, for each of the two relays, and its own network;
            None where the test has no right to make networks.
        folder: for logs.
        seed: of the choices of faults.
    """

    server: PostgresServer
    name: str
    node: RabbitMQNode
    hosts: Hosts
    links: list[tuple[Proxy, Proxy, Network | None]]
    folder: Path
    seed: int
    mutant: str = ""
    rate_per_s: float = 12.0
    enqueuers: dict[int, int] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    takeovers_s: list[float] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.url = self.server.url_of(self.name)
        with closing(psycopg.connect(self.url, autocommit=True)) as connection:
            connection.execute(DATA)
        with closing(pika.BlockingConnection(pika.URLParameters(self.node.url))) as broker:
            channel = broker.channel()
            channel.queue_delete(QUEUE)
            channel.queue_declare(QUEUE, durable=True)
        self.consumer = Consumer(self.node.url)
        self.relays = [
            _Host(database, broker, self.folder / f"relay-{n}", network)
            for n, (database, broker, network) in enumerate(self.links)
        ]

    # ------------------------------------------------------------------ lives

    def start(self, *, enqueuers: int) -> None:
        """Begin both relays and the enqueuers, and wait until messages arrive."""
        for host in self.relays:
            self._begin_relay(host)
        for _ in range(enqueuers):
            self.begin_enqueuer()
        self.wait_for_arrivals()
        self._began = time.monotonic()

    def _begin_relay(self, host: _Host) -> None:
        url = self.server.url_of(self.name, port=host.database.port)
        network = host.network.path if host.network is not None else ""
        life = Life(url, str(host.log), host.broker.url, mutant=self.mutant, network=network)
        host.pid = self.hosts.begin(life)

    def _kill_relay(self, host: _Host) -> None:
        self.hosts.kill(host.pid)
        self.kills += 1
        with host.log.open("a") as log:
            log.write("\nkilled\n")  # its own last line may be torn

    def begin_enqueuer(self) -> None:
        """Begin one more, whose messages have numbers of their own."""
        number = max(self.enqueuers, default=0) + 1
        log = str(self.folder / f"enqueuer-{number}")
        life = Life(self.url, log, number=number, rate_per_s=self.rate_per_s)
        self.enqueuers[number] = self.hosts.begin(life)

    def end_enqueuers(self) -> None:
        """SIGKILL to those that live; none of it counts as a fault."""
        for number, pid in self.enqueuers.items():
            if pid:
                self.hosts.kill(pid)
                self.enqueuers[number] = 0

    def end(self) -> None:
        """SIGKILL to everything that lives."""
        self.end_enqueuers()
        for host in self.relays:
            if host.pid:
                with suppress(ProcessLookupError):
                    self.hosts.kill(host.pid)
                host.pid = 0

    def owner(self) -> _Host:
        """The relay that has begun last; waits until there is one."""

        def newest() -> _Host | None:
            owners = [host for host in self.relays if host.owns_since is not None]
            return max(owners, key=lambda host: host.owns_since or 0.0, default=None)

        found: _Host = _awaited(newest, "a relay")
        return found

    def other(self, host: _Host) -> _Host:
        return self.relays[1 - self.relays.index(host)]

    def wait_for_arrivals(self) -> None:
        """It works (again): something that is stored from now on arrives."""
        since = time.monotonic()
        numbers = len(self.consumer.arrivals)
        _awaited(
            lambda: self.consumer.last_at > since and len(self.consumer.arrivals) > numbers + 5,
            "anything that arrives",
        )

    # ------------------------------------------------------------------ faults

    def fault(self, name: str) -> None:
        """Let one happen, and wait until messages arrive again."""
        self.faults[name] += 1
        FAULTS[name](self)
        self.wait_for_arrivals()

    def kill_owner(self, *, enqueuers: int = 0) -> None:
        host = self.owner()
        _awaited(lambda: self._is_standing_by(self.other(host)), "the other relay")
        killed_at = time.monotonic()
        self._kill_relay(host)
        for _ in range(enqueuers):
            self.kill_enqueuer()
        other = self.other(host)
        since = _awaited(lambda: other.owns_since, "a takeover")
        _awaited(lambda: self.consumer.last_at > since, "anything that arrives")
        self.takeovers_s.append(round(since - killed_at, 2))
        self.arrivals_s.append(round(self.consumer.last_at - killed_at, 2))
        self._begin_relay(host)

    def kill_host(self) -> None:
        """A relay, and the enqueuers beside it."""
        self.kill_owner(enqueuers=2)

    def kill_both_relays(self) -> None:
        for host in self.relays:
            self._kill_relay(host)
        time.sleep(self.rng.uniform(0.0, 1.0))
        for host in self.relays:
            self._begin_relay(host)

    def _is_standing_by(self, host: _Host) -> bool:
        lines = host.lines()
        return bool(lines) and lines[-1][0] in ("standby", "owner")

    def kill_standby(self) -> None:
        host = self.other(self.owner())
        self._kill_relay(host)
        self._begin_relay(host)

    def kill_enqueuer(self) -> None:
        number = self.rng.choice([number for number, pid in self.enqueuers.items() if pid])
        self.hosts.kill(self.enqueuers[number])
        self.kills += 1
        self.enqueuers[number] = 0
        self.begin_enqueuer()

    def kill_database(self) -> None:
        self.server.kill()
        time.sleep(self.rng.choice([0.0, 0.3, 1.0]))
        self.server.start()

    def stop_database_fast(self) -> None:
        self.server.stop("fast")
        self.server.start()

    def stop_database_immediately(self) -> None:
        self.server.stop("immediate")
        self.server.start()

    def stop_database_smartly(self) -> None:
        """It refuses new clients and waits for those that go on; then it ends their connections."""
        self.server.stop("smart", wait=False)
        time.sleep(1.0)
        if self.server.is_running:
            self.server.stop("fast")
        self.server.start()

    def freeze_database(self) -> None:
        self.server.pause()
        time.sleep(self.rng.choice([0.5, BEYOND_OWNERSHIP_S]))
        self.server.resume()

    def cut_database_link(self) -> None:
        self.owner().database.cut()

    def silence_database_link(self) -> None:
        """What the relay has sent may be delivered after another one has taken over."""
        link = self.owner().database
        self._silence(link, self.rng.choice([1.0, BEYOND_OWNERSHIP_S + 1.0]))

    def cut_host_off(self) -> None:
        """Its whole network is down, and neither end of a connection is told."""
        host = self.owner()
        if host.network is None:
            self._silence(host.database, BEYOND_OWNERSHIP_S + 1.0)
            return
        host.network.cut()
        time.sleep(self.rng.choice([1.0, BEYOND_OWNERSHIP_S + 2.0]))
        host.network.mend()

    def cut_broker_link(self) -> None:
        self.owner().broker.cut()

    def silence_broker_link(self) -> None:
        self._silence(self.owner().broker, self.rng.choice([1.0, 3.0]))

    def _silence(self, link: Proxy, for_s: float) -> None:
        up, down = self.rng.choice([(True, True), (True, False), (False, True)])
        link.is_silent_up, link.is_silent_down = up, down
        time.sleep(for_s)
        link.heal()
        if self.rng.random() < 0.5:
            link.cut()

    def pause_owner(self) -> None:
        """SIGSTOP until another relay has taken over and relays; then SIGCONT."""
        host = self.owner()
        since = host.owns_since or 0.0  # the other one may take over before the signal
        os.kill(host.pid, signal.SIGSTOP)
        other = self.other(host)
        _awaited(lambda: (other.owns_since or 0.0) > since, "a takeover")
        time.sleep(self.rng.uniform(0.0, 0.5))
        os.kill(host.pid, signal.SIGCONT)
        if not self.mutant:
            _awaited(lambda: host.owns_since is None, "the end of the paused relay")

    # ------------------------------------------------------------------ the account

    def close(self, *, drain_s: float = PATIENCE_S) -> Result:
        """Enqueue nothing more, let the relays drain the outbox, and compare."""
        self._drain(drain_s)
        seconds = time.monotonic() - self._began
        told = self._told()
        with closing(psycopg.connect(self.url)) as connection:
            data = {number for (number,) in connection.execute("SELECT number FROM data")}
        outbox = Outbox(self.url)
        uncertain = Counter(
            _number(row) for row in outbox.rows("history") if row["outcome"] == "uncertain"
        )
        rows = Counter(_number(row) for row in outbox.rows("confirmed"))
        stored_twice = {number for number, count in rows.items() if count > 1}
        account = close_account(
            Told(stored=told["stored"] | data),
            self.consumer.arrivals,
            self.url,
            message,
            duplicates_max=sum(uncertain.values()) + sum(rows.values()) - len(rows),
        )
        arrived = Counter(int(body.split()[0]) for body, _ in self.consumer.arrivals)
        twice = {number for number, count in arrived.items() if count > 1}
        found = {
            "refused, and arrived": told["refused"] & set(arrived),
            "told as stored, and rolled back": told["stored"] & told["within"] - data,
            "never committed, and arrived": set(arrived) & told["within"] - data,
            "never enqueued, and arrived": set(arrived) - told["within"] - told["tried"],
            "twice for no reason": twice - set(uncertain) - stored_twice,
            "stored twice in one transaction": stored_twice & told["within"],
            "out of order": set(_out_of_order(self.consumer.arrivals)),
        }
        differences = [f"{what}: {sorted(numbers)}" for what, numbers in found.items() if numbers]
        for number in sorted({number for numbers in found.values() for number in numbers}):
            self._print_story(number, outbox)
        lines = [line for host in self.relays for line in host.lines()]
        return Result(
            seconds=round(seconds, 1),
            faults=dict(self.faults),
            kills=self.kills,
            stored=account.promised,
            refused=len(told["refused"]),
            duplicates=account.duplicates,
            uncertain=sum(uncertain.values()),
            stored_twice=len(stored_twice),
            takeovers_s=sorted(self.takeovers_s),
            arrivals_s=sorted(self.arrivals_s),
            lost=dict(Counter(line[2] for line in lines if line[0] == "lost")),
            wrong=[*account.wrong, *differences, *self._trouble()],
        )

    def _print_story(self, number: int, outbox: Outbox) -> None:
        """What became of a message, and what arrived just before it each time."""
        arrived = [body.split()[0].decode() for body, _ in self.consumer.arrivals]
        for at in (n for n, found in enumerate(arrived) if found == str(number)):
            print(f"{number} is arrival {at}, after {arrived[max(0, at - 10) : at]}")
        for view in ("open", "confirmed", "history"):
            print(view, [row for row in outbox.rows(view) if _number(row) == number])

    def _drain(self, for_s: float) -> None:
        self.end_enqueuers()
        outbox = Outbox(self.url)
        deadline = time.monotonic() + for_s
        while outbox.status().open and time.monotonic() < deadline:
            time.sleep(0.1)
        quiet = time.monotonic() + 1.0
        while time.monotonic() < max(quiet, self.consumer.last_at + 0.5):
            time.sleep(0.05)
        self.end()

    def _trouble(self) -> Iterator[str]:
        """Yield what processes died of, and whether it took too long to take over."""
        for log in self.folder.iterdir():
            lines = log.read_text().splitlines()
            yield from (f"{log.name} {line}" for line in lines if line.startswith("died"))
        if self.takeovers_s and (taken := statistics.median(self.takeovers_s)) > TAKEOVER_S_MAX:
            yield f"it took {taken} s to take over"

    def _told(self) -> dict[str, set[int]]:
        """What the enqueuers wrote down; the last line of each may be torn."""
        told: dict[str, set[int]] = {what: set() for what in WORDS}
        for log in self.folder.glob("enqueuer-*"):
            for line in log.read_text().splitlines(keepends=True):
                what, _, number = line.partition(" ")
                if line.endswith("\n") and what in told:
                    told[what].add(int(number))
        return told


FAULTS: Final[dict[str, Callable[[Fleet], None]]] = {
    "enqueuer killed": Fleet.kill_enqueuer,
    "owner killed": Fleet.kill_owner,
    "standby killed": Fleet.kill_standby,
    "both relays killed": Fleet.kill_both_relays,
    "host killed": Fleet.kill_host,
    "owner paused": Fleet.pause_owner,
    "database killed": Fleet.kill_database,
    "database stopped: fast": Fleet.stop_database_fast,
    "database stopped: immediate": Fleet.stop_database_immediately,
    "database stopped: smart": Fleet.stop_database_smartly,
    "database frozen": Fleet.freeze_database,
    "database link cut": Fleet.cut_database_link,
    "database link silent": Fleet.silence_database_link,
    "host cut off": Fleet.cut_host_off,
    "broker link cut": Fleet.cut_broker_link,
    "broker link silent": Fleet.silence_broker_link,
}


def _awaited(look: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < deadline, f"there is no sign of {what}"
        time.sleep(0.02)
    return found


def _number(row: dict[str, object]) -> int:
    return int(str(row["message_id"]).removeprefix("n"))


def _out_of_order(arrivals: list[tuple[bytes, str]]) -> Iterator[int]:
    """Yield what arrived for the first time after a later message of its ordering key."""
    highest: dict[str, int] = {}
    seen: set[int] = set()
    for body, _ in arrivals:
        number = int(body.split()[0])
        key = message(number).ordering_key
        if key is None or number in seen:
            continue
        seen.add(number)
        if number < highest.get(key, 0):
            yield number
        highest[key] = max(number, highest.get(key, 0))
