"""An outbox in PostgreSQL: beside the one in SQLite, and beside a relay written by hand.

RabbitMQ, PostgreSQL and the client share the machine's processors and its disk, so look at the
ratios: rounds are interleaved, and of each way the median is taken. In the long form, 10 million
messages go through the tables, or as many as 10 minutes allow.

    pytest -m bench -s tests/speed/test_postgres.py     # three minutes
    pytest -m soak -s tests/speed/test_postgres.py
"""

import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pika
import psycopg
import pytest

from reliablepub import Message, Outbox, Publisher
from reliablepub.outbox.entry import Changes, Entry, Store
from reliablepub.outbox.postgres.database import create_outbox
from reliablepub.outbox.postgres.server import Server
from reliablepub.outbox.postgres.store import PostgresStore
from reliablepub.outbox.sqlite.store import SqliteStore
from tests import postgres
from tests.amqp_probe import AmqpProbe
from tests.postgres import PostgresServer
from tests.speed import gopher, joined
from tests.speed.alone import relay
from tests.speed.measuring import Goal, Results, Run, check, measured, print_table, spaced
from tests.speed.peers import BODY

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(3_600)]

COUNT = 20_000
ROUNDS = 3
QUEUES = 8
ENQUEUED = 500
SHARDED = 100_000
PAGE = 500
BATCH = 100
"""Rows that the relay made by hand takes at a time."""
NOWHERE = "amqp://guest:guest@127.0.0.1:9/%2F"  # the port of "discard", where nobody listens
SQLITE = "relay on SQLite"
POSTGRES = "relay on PostgreSQL"
BY_HAND = "by hand: `FOR UPDATE SKIP LOCKED`, pika with confirms, `DELETE`"
BARE = "`INSERT` and commit, no more"
ENQUEUE = "`enqueue`"
AT_ONCE = 500
FILL = """
INSERT INTO reliablepub.messages (message_id, exchange, routing_key, body, stored_at, size)
SELECT
    gen_random_uuid()::text, '', (%(queues)s::text[])[1 + n %% cardinality(%(queues)s::text[])],
    convert_to(repeat('x', %(bytes)s), 'UTF8'), extract(epoch FROM now()), 200 + %(bytes)s
FROM generate_series(1, %(count)s) AS n
"""
FILL_SHARDS = """
INSERT INTO reliablepub.messages
    (message_id, exchange, routing_key, body, stored_at, size, shard)
SELECT
    gen_random_uuid()::text, '', key, convert_to(repeat('x', %(bytes)s), 'UTF8'),
    extract(epoch FROM now()), 200 + %(bytes)s, reliablepub.shard_of(NULL, '', key)
FROM (
    SELECT (%(queues)s::text[])[1 + n %% cardinality(%(queues)s::text[])] AS key
    FROM generate_series(1, %(count)s) AS n
) AS keys
"""
MAKE_BY_HAND = """
CREATE TABLE outbox (id bigserial PRIMARY KEY, routing_key text NOT NULL, body bytea NOT NULL);
"""
FILL_BY_HAND = """
INSERT INTO outbox (routing_key, body)
SELECT
    (%(queues)s::text[])[1 + n %% cardinality(%(queues)s::text[])],
    convert_to(repeat('x', %(bytes)s), 'UTF8')
FROM generate_series(1, %(count)s) AS n
"""
TAKE_BY_HAND = """
SELECT id, routing_key, body FROM outbox ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED
"""
SIZES = """
SELECT
    pg_relation_size('reliablepub.messages'), pg_indexes_size('reliablepub.messages'),
    pg_total_relation_size(reltoastrelid)
FROM pg_class WHERE oid = 'reliablepub.messages'::regclass
"""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """On the disk, as SQLite's files are; memory and log as PostgreSQL has them by default."""
    if not postgres.is_installed():
        pytest.skip("needs Debian's package postgresql")
    settings = {"shared_buffers": "128MB", "max_wal_size": "1GB"}
    with PostgresServer(settings=settings, parent=Path(tempfile.gettempdir())) as server:
        yield server


@pytest.fixture
def url(server: PostgresServer) -> Iterator[str]:
    """An outbox of this test's own."""
    name = server.create_database()
    Outbox(server.url_of(name)).create()
    yield server.url_of(name)
    server.drop_database(name)


def run(url: str, statement: str, **values: object) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.encode(), values or None)


# ------------------------------------------------------------------ side by side


@dataclass
class Draining:
    """Ways to publish a backlog; each is stored before the clock starts."""

    amqp_url: str
    url: str
    queues: list[str]
    folder: Path

    def on_sqlite(self, count: int) -> Callable[[int], object]:
        path = self.folder / f"{time.monotonic_ns()}.db"
        with Publisher(
            NOWHERE, outbox=path, close_timeout_s=0.0, open_messages_max=None, open_bytes_max=None
        ) as publisher:
            publisher.publish_many(
                Message(BODY, routing_key=self.queues[number % QUEUES]) for number in range(count)
            )
        return lambda count: self._flush(path, count)

    def on_postgres(self, count: int) -> Callable[[int], object]:
        run(self.url, FILL, queues=self.queues, count=count, bytes=len(BODY))
        return lambda count: self._flush(self.url, count)

    def _flush(self, outbox: Path | str, count: int) -> None:
        with Publisher(self.amqp_url, outbox=outbox) as publisher:
            before = publisher.status.counters.confirmed
            assert publisher.flush(timeout_s=600).is_flushed
            assert publisher.status.counters.confirmed - before <= count
            assert publisher.status.open == 0

    def by_hand(self, count: int) -> Callable[[int], object]:
        run(self.url, FILL_BY_HAND, queues=self.queues, count=count, bytes=len(BODY))
        return lambda _: self._relay_by_hand()

    def _relay_by_hand(self) -> None:
        connection = pika.BlockingConnection(pika.URLParameters(self.amqp_url))
        channel = connection.channel()
        channel.confirm_delivery()
        properties = pika.BasicProperties(delivery_mode=2)
        rows: list[tuple[Any, ...]] = [()]
        with psycopg.connect(self.url) as db:
            while rows:
                rows = db.execute(TAKE_BY_HAND, [BATCH]).fetchall()
                for _, routing_key, body in rows:
                    channel.basic_publish("", routing_key, body, properties, mandatory=True)
                db.execute("DELETE FROM outbox WHERE id = ANY(%s)", [[row[0] for row in rows]])
                db.commit()
        connection.close()


@pytest.mark.bench
@pytest.mark.rabbit
def test_a_backlog_is_published(rabbitmq: AmqpProbe, url: str, tmp_path: Path) -> None:
    queues = [rabbitmq.declare_queue() for _ in range(QUEUES)]
    run(url, MAKE_BY_HAND)
    draining = Draining(rabbitmq.url, url, queues, tmp_path)
    ways = {
        SQLITE: (draining.on_sqlite, COUNT),
        POSTGRES: (draining.on_postgres, COUNT),
        BY_HAND: (draining.by_hand, COUNT // 15),
    }
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (store, count) in ways.items():
            runs[name].append(measured(store(count), count))
            rabbitmq.purge(*queues)
    results = Results(runs)
    print_table(
        ("", "confirmed per second", "of SQLite's", "client's CPU time per message"),
        [
            (
                name,
                spaced(results[name].per_second),
                f"{results.ratio(name, SQLITE):.2f}",
                f"{results[name].cpu_us:.0f} µs",
            )
            for name in results
        ],
    )
    check(
        [
            Goal("confirmed per second", results[POSTGRES].per_second, 5_000.0),
            Goal("PostgreSQL / by hand", results.ratio(POSTGRES, BY_HAND), 5.0, 2.0),
        ]
    )


@pytest.mark.bench
def test_a_relay_for_each_shard(server: PostgresServer, tmp_path: Path) -> None:
    """The broker is a `Sink`; PostgreSQL and the relays share the cores."""
    if reason := gopher.missing():
        pytest.skip(reason)
    rates = {
        shards: statistics.median(drained(server, tmp_path, shards) for _ in range(ROUNDS))
        for shards in (1, 2, 4)
    }
    print_table(
        ("shards, each with a relay", "confirmed per second"),
        [(f"{shards}", spaced(rate)) for shards, rate in rates.items()],
    )


def drained(server: PostgresServer, folder: Path, shards: int) -> float:
    """Messages per second while a backlog goes from nine tenths to one tenth."""
    name = server.create_database()
    where = server.url_of(name)
    create_outbox(Server.of(where), shards=shards)
    keys = [f"queue{number}" for number in range(1_000)]  # by whose hash the shards are chosen
    run(where, FILL_SHARDS, queues=keys, count=SHARDED, bytes=len(BODY))
    with ExitStack() as stack, Outbox(where) as outbox:
        url = stack.enter_context(gopher.sink(folder)).url
        for _ in range(shards):
            stack.enter_context(relay(url, where))
        since = wait_until_open(outbox, SHARDED * 9 // 10)
        until = wait_until_open(outbox, SHARDED // 10)
    server.drop_database(name)
    return (since[1] - until[1]) / (until[0] - since[0])


def wait_until_open(outbox: Outbox, most: int) -> tuple[float, int]:
    """Wait until no more messages are open; when that was, and how many there were."""
    deadline = time.monotonic() + 300
    while (count := outbox.status().open) > most:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return time.perf_counter(), count


@pytest.mark.bench
def test_a_message_is_enqueued(url: str) -> None:
    run(url, MAKE_BY_HAND)
    runs: dict[str, list[Run]] = {BARE: [], ENQUEUE: []}
    message = Message(BODY, routing_key="orders")
    with psycopg.connect(url, autocommit=True) as db, Outbox(url) as outbox:

        def bare(count: int) -> None:
            for _ in range(count):
                db.execute(
                    "INSERT INTO outbox (routing_key, body) VALUES (%s, %s)", ["orders", BODY]
                )

        def enqueue(count: int) -> None:
            for _ in range(count):
                outbox.enqueue(message)

        bare(200)
        enqueue(200)
        for _ in range(2 * ROUNDS + 1):
            runs[BARE].append(measured(bare, ENQUEUED))
            runs[ENQUEUE].append(measured(enqueue, ENQUEUED))
    results = Results(runs)
    print_table(
        ("one thread, one message a transaction", "ms", "client's CPU time"),
        [
            (name, f"{1_000 / results[name].per_second:.2f}", f"{results[name].cpu_us:.0f} µs")
            for name in results
        ],
    )
    check(
        [
            Goal(
                "time of enqueue / of the bare one",
                results.ratio(BARE, ENQUEUE),
                1.3,
                2.5,
                is_most=True,
            )
        ]
    )


@pytest.mark.bench
def test_messages_in_a_transaction(url: str) -> None:
    """Five hundred a commit, on the application's connection."""
    run(url, MAKE_BY_HAND)
    with psycopg.connect(url) as db, Outbox(url) as outbox:

        def bare() -> None:
            for _ in range(AT_ONCE):
                db.execute(
                    "INSERT INTO outbox (routing_key, body) VALUES (%s, %s)", ["orders", BODY]
                )

        results = joined.in_transactions(
            outbox, db, bare, at_once=AT_ONCE, count=10 * AT_ONCE, rounds=2 * ROUNDS + 1
        )
    check(
        [
            Goal(
                "time of enqueue / bare",
                results.ratio(joined.BARE, joined.EACH),
                1.6,
                3.0,
                is_most=True,
            ),
            Goal(
                "time of many / bare",
                results.ratio(joined.BARE, joined.MANY),
                0.4,
                1.0,
                is_most=True,
            ),
        ]
    )


# ------------------------------------------------------------------ as things grow


@dataclass
class InFlight:
    """Messages in flight, as the store records them."""

    epoch: int
    first_tag: int
    keys: Sequence[Entry]


def resident_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1_024


Fill = Callable[[int], None]
"""Stores so many messages of others."""
BACKLOGS = (0, 1_000, 100_000, 1_000_000, 5_000_000)


@pytest.mark.bench
def test_a_turn_beside_a_backlog_in_postgresql(url: str) -> None:
    def fill(count: int) -> None:
        run(url, FILL, queues=["orders"], count=count, bytes=100)

    check_turns(lambda: PostgresStore(Server.of(url)), fill)


@pytest.mark.bench
def test_a_turn_beside_a_backlog_in_sqlite(tmp_path: Path) -> None:
    path, message = tmp_path / "outbox.db", Message(bytes(100), routing_key="orders")

    def fill(count: int) -> None:
        with Outbox(path) as outbox:
            outbox.enqueue_many(itertools.repeat(message, count))

    Outbox(path).create()
    check_turns(lambda: SqliteStore(path), fill)


def check_turns(open_store: Callable[[], Store], fill: Fill) -> None:
    """A relay without a broker: what it takes to read, to record as in flight and to confirm."""
    rows, medians, stored = [], [], 0
    for backlog in BACKLOGS:
        fill(backlog - stored)
        memory = resident_mib()
        begun = time.perf_counter()
        with closing(open_store()) as store:
            opened_s = time.perf_counter() - begun
            took = [take_turn(store, fill, number) for number in range(60)]
        stored = backlog  # each turn stored as many as it took out
        medians.append(statistics.median(took))
        figures = opened_s * 1_000, took[0] * 1_000, medians[-1] * 1_000, max(took) * 1_000
        grown = f"{resident_mib() - memory:.1f}"
        rows.append((spaced(backlog), *(f"{figure:.0f}" for figure in figures), grown))
    head = ("messages that wait", "ms to open", "first turn", "median turn", "longest", "MiB more")
    print_table(head, rows)
    print("a turn: 500 messages stored by others, 500 read, recorded as in flight, and confirmed")
    growth = max(medians) / min(medians)
    check([Goal("turns: slowest median / fastest", growth, 1.5, 4.0, is_most=True)])


def take_turn(store: Store, fill: Fill, number: int) -> float:
    """Seconds for `PAGE` messages. As many are stored before, so that the backlog stays."""
    fill(PAGE)
    since = time.perf_counter()
    store.changed_elsewhere()
    last_id = store.snapshot().last_id
    first = store.lowest_awaited(1, 1.0)
    assert first is not None
    entries, _ = store.read_ready(first, last_id, limit=PAGE, bytes_max=10**8)
    assert len(entries) == PAGE
    sent = InFlight(1, number * PAGE + 1, entries)
    store.commit(Changes(sent=[sent]))
    store.commit(Changes(confirmed=entries, finished=[sent]))
    return time.perf_counter() - since


@dataclass(frozen=True)
class Size:
    """Of the table, when so many messages had gone through it."""

    messages: int
    table: int
    indexes: int
    toast: int


@pytest.mark.parametrize(
    "lasts_s",
    [pytest.param(60.0, marks=pytest.mark.bench), pytest.param(600.0, marks=pytest.mark.soak)],
)
def test_tables_stay_as_large_as_they_are(server: PostgresServer, url: str, lasts_s: float) -> None:
    """Autovacuum as it is by default, but that it looks ten times as often in the short form."""
    run(server.url_of(), f"ALTER SYSTEM SET autovacuum_naptime = {60 if lasts_s > 60 else 6}")
    run(server.url_of(), "SELECT pg_reload_conf()")
    sizes = list(through(url, lasts_s))
    mib = 1 / 1_048_576
    print_table(
        ("messages so far", "table, MiB", "indexes, MiB", "TOAST, MiB"),
        [
            (spaced(s.messages), *(f"{n * mib:.0f}" for n in (s.table, s.indexes, s.toast)))
            for s in sizes
        ],
    )
    half = len(sizes) // 2
    goals = []
    for what in ("table", "indexes", "toast"):
        before = max(getattr(size, what) for size in sizes[:half])
        after = max(getattr(size, what) for size in sizes[half:])
        goals.append(Goal(f"{what}: second half / first", after / before, 1.2, 3.0, is_most=True))
    check(goals)


def through(url: str, lasts_s: float) -> Iterator[Size]:
    """Store and confirm for so long, or 10 million messages; one in a hundred is for TOAST."""
    is_over = threading.Event()
    room = threading.Semaphore(40)

    def enqueue() -> None:
        large = "SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 200)"
        with psycopg.connect(url, autocommit=True) as db:
            db.execute(f"CREATE TEMPORARY TABLE large AS {large}".encode())
            while not is_over.is_set():
                if room.acquire(timeout=0.1):
                    db.execute(FILL.encode(), {"queues": ["orders"], "count": 990, "bytes": 100})
                    db.execute(
                        FILL.replace("repeat('x', %(bytes)s)", "(SELECT * FROM large)").encode(),
                        {"queues": ["orders"], "count": 10, "bytes": 6_400},
                    )

    thread = threading.Thread(target=enqueue)
    thread.start()
    begun, messages, told = time.monotonic(), 0, 0
    try:
        with closing(PostgresStore(Server.of(url))) as store, psycopg.connect(url) as db:
            first, last_id = 1, 0
            db.autocommit = True
            while (taken_s := time.monotonic() - begun) < lasts_s and messages < 10_000_000:
                if store.changed_elsewhere():
                    last_id = store.snapshot().last_id
                entries, first_unread = store.read_ready(
                    first, last_id, limit=PAGE, bytes_max=10**8
                )
                first = first_unread + 1
                if not entries:
                    time.sleep(0.002)
                    continue
                store.commit(Changes(confirmed=entries))
                for _ in range((messages + len(entries)) // 1_000 - messages // 1_000):
                    room.release()
                messages += len(entries)
                if taken_s > lasts_s / 20 * (told + 1):
                    told += 1
                    (found,) = db.execute(SIZES).fetchall()
                    yield Size(messages, *found)
    finally:
        is_over.set()
        thread.join()
