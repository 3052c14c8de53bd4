"""`World`: an outbox in PostgreSQL that is moved, with messages in every state, and the judgement.

Knows: what is stored before and after a move, how rows are copied, what must have arrived. Must
never know: which move a test chooses.
"""

import itertools
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

import psycopg

from reliablepub import Message, Outbox, OutboxError, Publisher
from reliablepub._core.events import Batch
from reliablepub.outbox.entry import Changes
from reliablepub.outbox.postgres.server import Server
from reliablepub.outbox.postgres.store import PostgresStore
from reliablepub.testing import FakeBroker
from reliablepub.testing.faults import HoldConfirms
from tests.chaos.proxy import Proxy
from tests.policies import AT_ONCE
from tests.postgres import PostgresServer
from tests.waiting import until

T = TypeVar("T")

_HISTORY: Final = """
    INSERT INTO reliablepub.attempts (
        id, message_id, at, epoch, tag, outcome, reply_code, reply_text, persistence
    )
    SELECT nextval('reliablepub.message_ids'), 'old', extract(epoch FROM now()), '0-1', n,
        'nacked', 0, '', 'not written'
    FROM generate_series(1, 1000) AS n;
    INSERT INTO reliablepub.interventions (
        id, message_id, exchange, routing_key, at, action, person, note
    )
    SELECT id, message_id, 'x', 'somewhere', at, 'retry', 'an operator', ''
    FROM reliablepub.attempts;
"""

REPLICATION: Final = {
    "wal_level": "logical",
    "max_replication_slots": "30",
    "max_wal_senders": "30",
    "max_worker_processes": "24",
    "max_logical_replication_workers": "16",
    "max_sync_workers_per_subscription": "6",
    "wal_retrieve_retry_interval": "50ms",  # after which another table is copied
    "hot_standby_feedback": "on",
    "wal_keep_size": "64MB",
    "max_wal_size": "256MB",
}
"""Settings of a server whose rows are replicated to another one."""
HELD: Final = "held"
"""The ordering key whose first message is parked."""
KEYS: Final = ("a", "b")
_QUEUE: Final = "q"
_EXCHANGE: Final = "x"
_PATIENCE_S: Final = 60.0


@dataclass
class World:
    """An outbox, a broker, and what was stored; the port of the outbox stays the same.

    Args:
        broker: where everything arrives.
        proxy: what the applications and the relay are told about the database.
        server: where the outbox is now.
        name: of its database, which stays the same too.
        scale: how many messages of each kind.
        is_killing: whether the relay is a process that is killed all the time, and begun again.
    """

    broker: FakeBroker
    proxy: Proxy
    server: PostgresServer
    name: str
    scale: int = 3
    is_killing: bool = False
    stored: list[tuple[str, str | None]] = field(default_factory=list)
    excused: set[str] = field(default_factory=set)
    publisher: Publisher | None = None
    victims: "Victims | None" = None

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)
        self.url = self.server.url_of(self.name, port=self.proxy.port)
        self.outbox = Outbox(self.url)
        self.broker.declare_exchange(_EXCHANGE, "topic")
        self.broker.declare_queue(_QUEUE)
        self.broker.bind(_QUEUE, _EXCHANGE, "somewhere")

    # ------------------------------------------------------------------ before the move

    def prepare(self) -> None:
        """Create the outbox, with a history: confirmed, parked, retried and parked again."""
        self.outbox.create()
        self.execute(_HISTORY)
        with self._publisher() as publisher:
            self.store(self.scale)
            self.store(1, key=HELD, routing_key="nowhere")
            self.outbox.enqueue(self._message(None), key="once")
            assert publisher.flush(_PATIENCE_S).is_flushed
            assert self.outbox.retry() == 1
            until(lambda: len(self.outbox.parked()) == 1 and not self.outbox.status().open)

    def begin(self, *, is_running: bool) -> None:
        """Have messages open, in flight and scheduled; a relay goes on, or has died."""
        self.broker.inject(HoldConfirms())
        seen = self.broker.published_count
        if is_running and self.is_killing:
            self.victims = Victims(self.url, self.broker.url)
        elif is_running:
            self.publisher = self._publisher()
        self.store_each()
        later = self._message(None, not_before=datetime.now(UTC) + timedelta(hours=1))
        self.outbox.enqueue(later, key="later")
        if is_running:  # of each key, one at a time
            self.broker.wait_for(seen + self.scale + len(KEYS), _PATIENCE_S)
        else:
            self._strand()

    def _strand(self) -> None:
        """Have messages in flight whose relay is gone: its connection ends, and nothing else."""
        store = PostgresStore(Server.of(self.url))
        store.changed_elsewhere()
        found, _ = store.read_ready(1, store.snapshot().last_id, limit=2, bytes_max=10**9)
        store.commit(Changes(sent=[Batch(1, 1, found)]))
        store._link.close()

    def store_each(self) -> None:
        """Enqueue messages of each key and without one."""
        for _ in range(self.scale):
            self.store(1)
            for key in (*KEYS, HELD):
                self.store(1, key=key)

    def store(
        self,
        count: int,
        *,
        key: str | None = None,
        routing_key: str = "somewhere",
        not_before: datetime | None = None,
    ) -> list[str]:
        """Enqueue messages, each until it is stored; their ids."""
        ids = []
        for _ in range(count):
            message = self._message(key, routing_key, not_before)
            assert message.message_id is not None
            until_stored(self.outbox, message)
            self.stored.append((message.message_id, key))
            ids.append(message.message_id)
        return ids

    def _message(
        self, key: str | None, routing_key: str = "somewhere", not_before: datetime | None = None
    ) -> Message:
        number = f"m-{next(self._numbers):05}"
        return Message(
            number.encode(),
            exchange=_EXCHANGE,
            routing_key=routing_key,
            message_id=number,
            ordering_key=key,
            not_before=not_before,
        )

    @contextmanager
    def load(self) -> Iterator[None]:
        """Store messages of one key all the time, from a thread."""
        is_over = threading.Event()

        def run() -> None:
            while not is_over.wait(0.005):
                self.store(1, key="load")

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    # ------------------------------------------------------------------ the move

    def settle(self) -> None:
        """Have a relay publish and confirm what may be sent, and end."""
        self.broker.clear_faults()
        self.broker.release_confirms()
        if self.publisher is not None:
            self._flush(self.publisher)
            return
        is_running = self.victims is not None
        self._end_victims()
        with self._publisher() as publisher:
            self._flush(publisher)
        if is_running:
            self.victims = Victims(self.url, self.broker.url)

    def _end_victims(self) -> None:
        if self.victims is not None:
            self.victims.end()
            self.victims = None

    def away(self) -> None:
        """Nobody reaches the database."""
        with closing(socket.create_server(("127.0.0.1", 0))) as taken:
            self.proxy.lead_to(taken.getsockname()[1])

    def go_to(self, server: PostgresServer) -> None:
        """The port of the database leads there now."""
        self.server = server
        self.proxy.lead_to(server.port)

    def execute(self, statement: str, *, server: PostgresServer | None = None) -> list[Any]:
        """Return the rows of a superuser's statement in the database of the outbox."""
        return execute(server or self.server, self.name, statement)

    def open(self, *, server: PostgresServer | None = None) -> set[str]:
        """The open messages."""
        found = self.execute("SELECT message_id FROM reliablepub.messages", server=server)
        return {message_id for (message_id,) in found}

    def excuse(self, server: PostgresServer) -> None:
        """What is missing there is lost by the way of the move: it need not arrive again."""
        there = self.open(server=server)
        for table in ("parked", "confirmed"):
            found = self.execute(f"SELECT message_id FROM reliablepub.{table}", server=server)
            there |= {message_id for (message_id,) in found}
        self.excused |= {message_id for message_id, _ in self.stored} - there

    # ------------------------------------------------------------------ after the move

    def finish(self, *, is_emptied: bool = False) -> None:
        """Judge: store more, and wait until everything has arrived.

        Args:
            is_emptied: whether open messages were removed, which the ledger must tell.
        """
        self.broker.clear_faults()
        self.broker.release_confirms()
        if self.victims is not None:
            self.wait_for_sequences()
            self.store_each()
            time.sleep(3)
            self._end_victims()
        if self.publisher is None:
            self.publisher = self._publisher()
        with self.publisher as publisher:
            self._flush(publisher)
            self.store_each()
            self.store(1, key="new")
            self.outbox.enqueue(self._message(None), key="once")  # is known
            self._retry()
            until(lambda: len(self.outbox.parked()) == 1, what="another return")
            self.broker.bind(_QUEUE, _EXCHANGE, "nowhere")
            self._retry()
            now = datetime.now(UTC)
            if not is_emptied:
                until(lambda: self._change(lambda: self.outbox.reschedule("later", now)))
            self._flush(publisher)
            until(lambda: not self.missing(), what=f"the arrival of {self.missing()}")
            self._flush(publisher)
            until(lambda: not self.open(), what="an outbox without an open message")
        self._judge(is_emptied=is_emptied)

    def _retry(self) -> None:
        until(lambda: self._change(self.outbox.retry), what="the retry of the parked message")

    def _change(self, change: Callable[[], T]) -> T | None:
        with suppress(OutboxError):
            return change()
        return None

    def _flush(self, publisher: Publisher) -> None:
        """A flush is complete only if nothing is open that may be sent."""
        known = {message_id for message_id, key in self.stored if key != HELD}
        known -= self.excused
        assert publisher.flush(_PATIENCE_S).is_flushed
        assert not known & self.open()
        assert not known & self.missing()

    def missing(self) -> set[str]:
        """What has not arrived."""
        arrived = set(self.arrived())
        return {message_id for message_id, _ in self.stored} - arrived - self.excused

    def arrived(self) -> list[str]:
        """All that has arrived, in this order."""
        return [message.body.decode() for message in self.broker.messages(_QUEUE)]

    def _judge(self, *, is_emptied: bool) -> None:
        arrived = self.arrived()
        assert not self.missing()
        ids = {message_id for message_id, _ in self.stored}
        by_key = set(arrived) - ids  # "later" and "once"
        assert len(by_key) == 2 - is_emptied, by_key
        key_of = dict(self.stored)
        for key in (*KEYS, HELD, "load", "new"):
            firsts = [one for one in dict.fromkeys(arrived) if key_of.get(one) == key]
            assert firsts == sorted(firsts), (key, firsts)
        audit = self.outbox.audit()
        assert bool(audit.differences) == is_emptied, audit.differences
        assert not audit.damaged

    def duplicates(self) -> int:
        """How many arrivals there were beyond the first ones."""
        arrived = self.arrived()
        return len(arrived) - len(set(arrived))

    def wait_for_sequences(self) -> None:
        """Wait until a relay has raised them: until then, a message may overtake its key."""
        behind = "SELECT 1 FROM reliablepub.sequences WHERE last_value < most"
        until(lambda: not self.execute(behind), what="a relay that raises the sequences")

    def told(self) -> list[str]:
        """Why relays have begun anew, as `outbox audit` tells it."""
        runs = "SELECT began_anew FROM reliablepub.runs WHERE began_anew <> '' ORDER BY id"
        return [why for (why,) in self.execute(runs)]

    def end(self) -> None:
        """End the relay, whatever the state of the outbox."""
        self._end_victims()
        self.broker.clear_faults()
        self.broker.release_confirms()
        if self.publisher is not None:
            self.publisher.close(0)

    def report(self) -> str:
        """One line of JSON."""
        counts = {"stored": len(self.stored) + 2, "excused": len(self.excused)}
        return json.dumps({**counts, "duplicates": self.duplicates(), "told": self.told()})

    def _publisher(self) -> Publisher:
        return Publisher(self.broker.url, outbox=self.url, retry=AT_ONCE, keep_confirmed_s=3_600.0)


class Victims:
    """Relays in processes of their own, one after another: each is killed by SIGKILL.

    Args:
        outbox: URL of the database.
        broker: URL of the broker.
    """

    def __init__(self, outbox: str, broker: str) -> None:
        self._command = [sys.executable, "-m", "reliablepub", "relay", "--outbox", outbox]
        self._command += ["--url", broker]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            with subprocess.Popen(
                self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ) as process:
                self._is_over.wait(random.uniform(0.8, 3.0))
                process.kill()

    def end(self) -> None:
        """Kill the last one."""
        self._is_over.set()
        self._thread.join()


def until_stored(outbox: Outbox, message: Message) -> None:
    """Enqueue a message, and again under its id after each error."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            outbox.enqueue(message)
        except OutboxError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        else:
            return


# ---------------------------------------------------------------------------- copying rows


def execute(server: PostgresServer, database: str, statement: str) -> list[Any]:
    """Return the rows of a superuser's statement in a database."""
    with closing(psycopg.connect(server.url_of(database), autocommit=True)) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def subscribe(source: PostgresServer, target: PostgresServer, name: str) -> None:
    """Replicate the rows of an outbox into the tables of another, and wait for the first copy."""
    execute(source, name, "CREATE PUBLICATION moved FOR TABLES IN SCHEMA reliablepub")
    url = source.url_of(name)
    execute(target, name, f"CREATE SUBSCRIPTION moved_{name} CONNECTION '{url}' PUBLICATION moved")
    catch_up(source, target, name)


def catch_up(
    source: PostgresServer, target: PostgresServer, name: str, timeout_s: float = _PATIENCE_S
) -> None:
    """Wait until the subscriber has everything."""
    rest = "SELECT 1 FROM pg_subscription_rel WHERE srsubstate <> 'r'"
    until(lambda: not execute(target, name, rest), what="the first copy")
    [(upto,)] = execute(source, name, "SELECT pg_current_wal_lsn()")
    lag = f"SELECT 1 FROM pg_stat_replication WHERE replay_lsn >= '{upto}'"
    until(lambda: execute(source, name, lag), timeout_s, what="the subscriber")


def unsubscribe(target: PostgresServer, name: str) -> None:
    """End the replication."""
    execute(target, name, f"DROP SUBSCRIPTION moved_{name}")


def copy_sequences(source: PostgresServer, target: PostgresServer, name: str) -> None:
    """As the operator does by hand, since replication does not."""
    sequences = "SELECT sequencename, last_value FROM pg_sequences WHERE schemaname = 'reliablepub'"
    for sequence, last in execute(source, name, sequences):
        if last is not None:
            execute(target, name, f"SELECT setval('reliablepub.{sequence}', {last})")


def dump(server: PostgresServer, name: str, *options: str) -> bytes:
    """The schema of an outbox, as `pg_dump` writes it."""
    return server.run(
        "pg_dump", f"--dbname={server.url_of(name)}", "--schema=reliablepub", *options
    )


def restore(server: PostgresServer, name: str, script: bytes) -> None:
    """Run what `pg_dump` has written."""
    options: Sequence[str] = ("--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1")
    server.run("psql", server.url_of(name), *options, stdin=script)
