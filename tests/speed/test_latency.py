"""How long a caller waits for the disk, and how many can be served at once.

What a disk can do is measured in the same run: `fdatasync` after 4 KiB more, on the same file
system, and `sqlite3` by itself. Rounds are interleaved, and everything is told as a ratio as well.
"""

import itertools
import os
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from reliablepub import Message, Outbox, Publisher, Receipt
from reliablepub._core.events import Batch
from reliablepub.outbox.entry import Changes, Entry, Sent, new_id
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.amqp_probe import AmqpProbe
from tests.speed.measuring import Goal, check, print_table, spaced, without_old_garbage
from tests.speed.peers import BODY
from tests.stores import DURABLE, outbox_of

pytestmark = [pytest.mark.bench, pytest.mark.rabbit, pytest.mark.timeout(900)]

QUEUES = 8
ROUNDS = 5
ONE_BY_ONE = 200
THREADS = 64
LASTS_S = 2.0
STEADY = (100, 1_000, 4_000)
AT_ONCE = 40_000
A_COMMIT = 500
WRITERS = 5
ENQUEUES = 1_000
SYNC = "`fdatasync` of 4 KiB"
COMMIT = "`sqlite3` alone, one row per commit"
TURN = "the relay's commit of one message, and nothing else"
AWAY = "`publish()`, the broker is away"
THERE = "`publish()`"
NOWHERE = "amqp://guest:guest@127.0.0.1:9/%2F"  # the port of "discard", where nobody listens


@pytest.fixture
def queues(rabbitmq: AmqpProbe) -> list[str]:
    return [rabbitmq.declare_queue(arguments={"x-max-length": 1_000}) for _ in range(QUEUES)]


@pytest.fixture
def publisher(rabbitmq: AmqpProbe, queues: list[str], tmp_path: Path) -> Iterator[Publisher]:
    """Connected, and warm."""
    with without_old_garbage(), Publisher(rabbitmq.url, outbox=tmp_path / "outbox.db") as publisher:
        receipt = publisher.publish_many(Message(BODY, routing_key=name) for name in queues * 100)
        assert receipt.wait(60).confirmed == receipt.stored
        yield publisher


def percentile_ms(taken_s: Sequence[float], percent: float) -> float:
    ordered = sorted(taken_s)
    return 1_000 * ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def all_of(rounds: Iterable[list[float]]) -> list[float]:
    return list(itertools.chain.from_iterable(rounds))


def taken_s(act: Callable[[], object]) -> float:
    since = time.perf_counter()
    act()
    return time.perf_counter() - since


class Turns:
    """Commits as the relay makes them for a message that comes alone, in the thread that waits.

    Each stores a message and its tag, and removes the message before it. No way to commit on
    behalf of a caller could take less.
    """

    def __init__(self, store: SqliteStore, routing_keys: Iterator[str]) -> None:
        self._store, self._routing_keys = store, routing_keys
        self._before: list[Sent] = []
        self._tags = itertools.count(1)

    def __call__(self) -> None:
        message = Message(BODY, routing_key=next(self._routing_keys), message_id=new_id())
        sent = Batch(1, next(self._tags), [Entry.accepted(message, time.time())])
        gone = [entry for batch in self._before for entry in batch.keys]
        self._store.commit(
            Changes(new=list(sent.keys), sent=[sent], confirmed=gone, finished=self._before)
        )
        self._before = [sent]


def test_one_thread_that_waits_for_the_disk_each_time(
    publisher: Publisher, queues: list[str], tmp_path: Path
) -> None:
    names = itertools.cycle(queues)
    with (
        (tmp_path / "log").open("wb", buffering=0) as log,
        closing(_bare(tmp_path / "bare.db")) as db,
        closing(SqliteStore(tmp_path / "turns.db")) as store,
        Publisher(NOWHERE, outbox=tmp_path / "away.db", close_timeout_s=0.0) as away,
    ):

        def synced() -> None:
            log.write(bytes(4_096))
            os.fdatasync(log.fileno())

        def committed() -> None:
            with db:
                db.execute("INSERT INTO messages (routing_key, body) VALUES ('q', ?)", [BODY])

        ways: dict[str, Callable[[], object]] = {
            SYNC: synced,
            COMMIT: committed,
            TURN: Turns(store, names),
            AWAY: lambda: away.publish(BODY, routing_key=next(names)),
            THERE: lambda: publisher.publish(BODY, routing_key=next(names)),
        }
        rounds: dict[str, list[list[float]]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, act in ways.items():
                rounds[name].append([taken_s(act) for _ in range(ONE_BY_ONE)])
            assert publisher.flush(60).is_flushed

    def commits(name: str, percent: float) -> float:
        """In commits of one message, the median of the rounds."""
        pairs = zip(rounds[name], rounds[COMMIT], strict=True)
        return statistics.median(
            percentile_ms(us, percent) / percentile_ms(it, 50) for us, it in pairs
        )

    rows = []
    for name, taken in rounds.items():
        at = [f"{percentile_ms(all_of(taken), percent):.2f} ms" for percent in (50, 99)]
        rows.append((name, *at, f"{commits(name, 50):.2f}", f"{commits(name, 99):.1f}"))
    print_table(("one thread", "p50", "p99", "p50 in commits", "p99 in commits"), rows)
    check(
        [
            Goal("`publish()`, p50 in commits", commits(THERE, 50), 1.5, is_most=True),
            Goal("the same, the broker is away", commits(AWAY, 50), 1.5, is_most=True),
            Goal("`publish()`, p99 in commits", commits(THERE, 99), 4.0, is_most=True),
        ]
    )


class Load:
    """Threads that publish one message after the other, and how long each of them took.

    Args:
        every_s: seconds from one publish of a thread to its next; 0 publishes as fast as it can.
        hears: whether to learn when each message is confirmed.

    Attributes:
        taken_s: how long each call took.
        late_s: the same, from the moment at which it was due.
        confirmed_s: from the moment at which it was due to the confirm.
    """

    def __init__(
        self,
        publisher: Publisher,
        queues: Sequence[str],
        every_s: float = 0.0,
        *,
        hears: bool = False,
    ) -> None:
        self._publisher, self._queues, self._every_s = publisher, queues, every_s
        self._hears = hears
        self.taken_s: list[float] = []
        self.late_s: list[float] = []
        self.confirmed_s: list[float] = []

    def run(self, lasts_s: float) -> float:
        """Publish for a while.

        Returns:
            durable messages per second.
        """
        since = time.perf_counter()
        threads = [
            threading.Thread(target=self._publish, args=(since, lasts_s, number))
            for number in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(self.taken_s) / (time.perf_counter() - since)

    def _publish(self, since: float, lasts_s: float, number: int) -> None:
        queue = self._queues[number % len(self._queues)]
        due = since + self._every_s * number / THREADS
        while (now := time.perf_counter()) < since + lasts_s:
            if due > now:
                time.sleep(due - now)
            begun = time.perf_counter()
            receipt = self._publisher.publish(BODY, routing_key=queue)
            ended = time.perf_counter()
            if self._hears:
                receipt.add_done_callback(partial(self._confirmed, due))
            self.taken_s.append(ended - begun)
            self.late_s.append(ended - due)
            due = due + self._every_s if self._every_s else ended

    def _confirmed(self, due: float, receipt: Receipt) -> None:
        receipt.result(0)
        self.confirmed_s.append(time.perf_counter() - due)


def test_many_threads_and_half_of_what_they_can(publisher: Publisher, queues: list[str]) -> None:
    rates: list[float] = []
    half_rates: list[float] = []
    full = Load(publisher, queues)
    half = Load(publisher, queues)
    for _ in range(ROUNDS):
        load = Load(publisher, queues)
        rates.append(load.run(LASTS_S))
        full.taken_s += load.taken_s
        assert publisher.flush(60).is_flushed
        load = Load(publisher, queues, every_s=2 * THREADS / rates[-1])
        half_rates.append(load.run(LASTS_S))
        half.taken_s += load.taken_s
        half.late_s += load.late_s
        assert publisher.flush(60).is_flushed
    columns = [
        (f"`publish()`, {THREADS} threads, as fast as they can", full.taken_s),
        (f"`publish()`, {THREADS} threads, half of that", half.taken_s),
        ("the same, from the moment it was due", half.late_s),
    ]
    print_table(
        ("", "p50", "p99", "worst"),
        [
            (name, *(f"{percentile_ms(taken, percent):.1f} ms" for percent in (50, 99, 100)))
            for name, taken in columns
        ],
    )
    print(f"half of that was {spaced(statistics.median(half_rates))} a second")
    check(
        [
            Goal(f"durable a second, {THREADS} threads", statistics.median(rates), 15_000.0),
            Goal("p99 at half load, ms", percentile_ms(half.taken_s, 99), 10.0, is_most=True),
        ]
    )


def test_how_late_messages_are_stored_and_confirmed_at_a_steady_rate(
    publisher: Publisher, queues: list[str]
) -> None:
    rows = []
    for rate in STEADY:
        load = Load(publisher, queues, every_s=THREADS / rate, hears=True)
        reached = load.run(ROUNDS * LASTS_S)
        assert publisher.flush(60).is_flushed
        assert len(load.confirmed_s) == len(load.late_s)  # what a callback raises is only logged
        for what, taken in (("`publish()`", load.late_s), ("the confirm", load.confirmed_s)):
            at = [f"{percentile_ms(taken, percent):.1f} ms" for percent in (50, 99, 100)]
            rows.append((spaced(reached), what, *at))
    print_table(("messages per second", "from when it was due until", "p50", "p99", "worst"), rows)


def test_many_at_once_while_the_broker_is_away(tmp_path: Path) -> None:
    ours: list[float] = []
    plain: list[float] = []
    with without_old_garbage():
        for turn in range(ROUNDS):
            plain.append(AT_ONCE / taken_s(partial(_insert, tmp_path / f"{turn}-plain.db")))
            ours.append(AT_ONCE / taken_s(partial(_store, tmp_path / f"{turn}.db")))
    rates = [statistics.median(rates) for rates in (plain, ours)]
    share = statistics.median(us / it for us, it in zip(ours, plain, strict=True))
    names = (f"`sqlite3` alone, {A_COMMIT} rows a commit", "`publish_many`, the broker is away")
    rows = [(name, spaced(rate)) for name, rate in zip(names, rates, strict=True)]
    print_table(("", "durable a second"), rows)
    on_disk = Outbox(tmp_path / "0.db").status().bytes_on_disk / AT_ONCE
    print(f"a message of {len(BODY)} bytes takes {on_disk:.0f} bytes of disk while it waits")
    check(
        [
            Goal("`publish_many`, durable a second", rates[1], 25_000.0),
            Goal("`publish_many` / `sqlite3` alone", share, 0.5, 0.1),
        ]
    )


def _store(path: Path) -> None:
    with Publisher(NOWHERE, outbox=path, close_timeout_s=0.0) as publisher:
        publisher.publish_many(Message(BODY, routing_key="away") for _ in range(AT_ONCE))


def _insert(path: Path) -> None:
    rows = (("away", BODY) for _ in range(AT_ONCE))
    with closing(_bare(path)) as db:
        while batch := list(itertools.islice(rows, A_COMMIT)):
            with db:
                db.executemany("INSERT INTO messages (routing_key, body) VALUES (?, ?)", batch)


def _bare(path: Path) -> sqlite3.Connection:
    """The least that a row on disk costs: no checksum, no ledger, no ids."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE messages (id INTEGER PRIMARY KEY, routing_key, body)")
    return connection


WRITER = """
import sys, time
from reliablepub import Message, Outbox
_, where, queue, count = sys.argv
with Outbox(where) as outbox:
    for _ in range(int(count)):
        begun = time.perf_counter()
        outbox.enqueue(Message(bytes(500), routing_key=queue))
        print(time.perf_counter() - begun)
        time.sleep(0.01)
"""


@pytest.mark.parametrize("kind", DURABLE)
@pytest.mark.parametrize("state", ["away", "there"])
def test_processes_that_enqueue_beside_a_relay(
    kind: str, state: str, rabbitmq: AmqpProbe, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    where = str(outbox_of(kind, request, tmp_path))
    queue = rabbitmq.declare_queue(arguments={"x-max-length": 1_000})
    Outbox(where).create()
    url = NOWHERE if state == "away" else rabbitmq.url
    with subprocess.Popen(
        [sys.executable, "-m", "reliablepub", "relay", "--outbox", where, "--url", url],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as relay:
        try:
            alone, together = (_enqueued_s(where, queue, count) for count in (1, WRITERS))
        finally:
            relay.terminate()
    rows = [
        (name, *(f"{percentile_ms(taken, percent):.2f} ms" for percent in (50, 99, 100)))
        for name, taken in (("one process", alone), (f"{WRITERS} processes", together))
    ]
    print_table((f"`enqueue`, {kind}, broker {state}", "p50", "p99", "worst"), rows)
    check(
        [
            Goal("one process, p99, ms", percentile_ms(alone, 99), 5.0, is_most=True),
            Goal(f"{WRITERS} processes, p99, ms", percentile_ms(together, 99), 10.0, is_most=True),
        ]
    )


def _enqueued_s(where: str, queue: str, writers: int) -> list[float]:
    """How long each enqueue took, of so many processes at once."""
    command = [sys.executable, "-c", WRITER, where, queue, str(ENQUEUES)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(writers)]
    told = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0] * writers
    return [float(line) for lines in told for line in lines.split()]
