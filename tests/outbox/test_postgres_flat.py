"""A turn on PostgreSQL reads as many pages beside 200 000 messages as beside a thousand.

Pages are counted, since times say little on a busy machine. The server itself tells the plan of
each statement that the relay runs (``auto_explain``), in the relay's own transaction.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
import pytest

from reliablepub.outbox import history
from reliablepub.outbox.entry import Changes, Entry, Release
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.postgres import retention
from reliablepub.outbox.postgres.server import Server
from reliablepub.outbox.postgres.store import PostgresStore
from tests.outbox.conftest import Clock

PAGE = 500
BACKLOG = 200_000
PAGES_MAX = 8 * PAGE
"""Of one statement on 500 rows. To delete a row by its key in a large table takes four to five."""
EXPLAIN = """
LOAD 'auto_explain';
SET auto_explain.log_min_duration = 0;
SET auto_explain.log_analyze = on;
SET auto_explain.log_timing = off;
SET auto_explain.log_buffers = on;
SET auto_explain.log_format = json;
SET auto_explain.log_level = notice;
"""
# One in ten is sent later, one in ten expires.
FILL = """
INSERT INTO reliablepub.messages (
    message_id, exchange, routing_key, body, stored_at, size, due_at, expires_at
)
SELECT
    'm-' || n, '', 'orders', '\\x00', extract(epoch FROM now()), 201,
    CASE WHEN n %% 10 = 1 THEN 1e11 END, CASE WHEN n %% 10 = 2 THEN 1e11 END
FROM generate_series(1, %s) AS n
"""
KEEP = """
INSERT INTO reliablepub.confirmed
SELECT n, %s + n, 'm', '', 'orders', NULL, '{}', 1, 201, -1, '\\x00'
FROM generate_series(1, 20000) AS n
"""
REMEMBER = """
INSERT INTO reliablepub.attempts (
    id, message_id, at, epoch, tag, outcome, reply_code, reply_text, persistence
)
SELECT 1000000 + n, 'm', 1, '1-1', n, 'refused', 312, 'NO_ROUTE', 'not written'
FROM generate_series(1, 20000) AS n
"""
TURNS = """
INSERT INTO reliablepub.turns
SELECT
    shard, -n, run, token, at, is_free, stored, confirmed, parked, expired, discarded, open_bytes,
    intervention, seen, backend
FROM reliablepub.turns, generate_series(1, 20000) AS n
WHERE turn = (SELECT max(turn) FROM reliablepub.turns)
"""


def run(url: str, statement: LiteralString, *values: float) -> None:
    """Execute it in a transaction of its own."""
    with psycopg.connect(url) as application:
        application.execute(statement, values or None)


@dataclass(frozen=True)
class Explained:
    """A statement that the server ran.

    Attributes:
        text: the statement.
        pages: how many pages it read, from disk or from memory.
        whole: the tables that it read from end to end.
    """

    text: str
    pages: int
    whole: list[str]


@dataclass
class Batch:
    """Messages in flight, as the store records them."""

    epoch: int
    first_tag: int
    keys: Sequence[Entry]


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def explained(told: str) -> Explained:
    found = json.loads(told[told.index("{") :])
    plan = found["Plan"]
    pages = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    scans = ("Seq Scan", "Bitmap Heap Scan")
    whole = [node["Relation Name"] for node in nodes(plan) if node["Node Type"] in scans]
    return Explained(found["Query Text"], pages, whole)


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[Explained]:
    """What relays run from now on."""
    found: list[Explained] = []
    connect = Server.connect

    def note(diagnostic: psycopg.errors.Diagnostic) -> None:
        told = diagnostic.message_primary or ""
        if "plan:" in told:
            found.append(explained(told))

    def connect_and_explain(server: Server) -> psycopg.Connection[Any]:
        connection = connect(server)
        connection.execute(EXPLAIN)
        connection.add_notice_handler(note)
        return connection

    monkeypatch.setattr(Server, "connect", connect_and_explain)
    return found


def take_turns(store: PostgresStore, url: str) -> None:
    """What a relay does with a page, while others go on storing."""
    store.changed_elsewhere()
    snapshot = store.snapshot()
    first = store.lowest_awaited(1, 1.0)
    for number in range(3):
        run(url, FILL, PAGE)
        assert store.changed_elsewhere()
        assert store.snapshot().last_id > snapshot.last_id
        snapshot = store.snapshot()
        assert first is not None
        limits = {"limit": PAGE, "bytes_max": 10**9}
        entries, last_read = store.read_ready(first, snapshot.last_id, **limits)
        first = last_read + 1
        assert len(entries) == PAGE
        batch = Batch(1, number * PAGE + 1, entries)
        store.commit(Changes(sent=[batch]))
        store.commit(Changes(confirmed=entries, finished=[batch]))
        store.read_due(2.0, **limits, loaded=())
        store.read_expired(2.0, **limits, loaded=())


@pytest.mark.parametrize("backlog", [1_000, BACKLOG])
def test_no_statement_of_a_turn_reads_more_pages_beside_a_backlog(
    postgres_outbox: str, statements: list[Explained], backlog: int
) -> None:
    with psycopg.connect(postgres_outbox) as long_one:
        long_one.execute("SELECT pg_current_xact_id()")  # it may run for hours
        run(postgres_outbox, FILL, backlog)
        with closing(PostgresStore(Server.of(postgres_outbox))) as store:
            for is_analyzed in (False, True):
                if is_analyzed:
                    long_one.execute("ANALYZE reliablepub.messages")
                    long_one.commit()
                    long_one.execute("SELECT pg_current_xact_id()")
                del statements[:]
                take_turns(store, postgres_outbox)
                assert len(statements) > 40
                assert [one for one in statements if "messages" in one.whole] == []
                assert [one for one in statements if one.pages > PAGES_MAX] == []


@pytest.mark.parametrize("is_analyzed", [False, True])
def test_a_relay_that_takes_over_looks_only_at_what_was_in_flight(
    postgres_outbox: str, statements: list[Explained], *, is_analyzed: bool
) -> None:
    """The planner would join the few tags with all that is stored."""
    run(postgres_outbox, FILL, BACKLOG)
    with closing(PostgresStore(Server.of(postgres_outbox))) as store:
        store.snapshot()
        entries, _ = store.read_ready(1, BACKLOG, limit=10, bytes_max=10**9)
        store.commit(Changes(sent=[Batch(1, 1, entries)]))
    if is_analyzed:
        run(postgres_outbox, "ANALYZE")
    del statements[:]
    with closing(PostgresStore(Server.of(postgres_outbox))) as store:
        assert [one for one in statements if "messages" in one.whole] == []
        assert [one for one in statements if one.pages > 500] == []
        [left], _ = store.read_ready(entries[0].id, BACKLOG, limit=1, bytes_max=10**9)
        assert left.uncertain == 1


def test_counts_do_not_depend_on_the_backlog(
    postgres_outbox: str, statements: list[Explained]
) -> None:
    """An enqueuer with limits asks for them five times a second."""
    with psycopg.connect(postgres_outbox) as long_one:
        long_one.execute("SELECT pg_current_xact_id()")
        run(postgres_outbox, FILL, 20_000)
        with closing(PostgresStore(Server.of(postgres_outbox))) as store:
            del statements[:]
            [counters] = store._link.read("ledger", {})
            assert counters[0] == 20_000
            assert max(one.pages for one in statements) < 100
            run(postgres_outbox, FILL, 10)
            long_one.execute(FILL, [1])
        long_one.commit()
    with closing(outbox_at(postgres_outbox)) as database, database.reading() as session:
        assert next(iter(session.rows("ledger")))["stored"] == 20_011


def test_counts_do_not_depend_on_the_turns_that_a_long_transaction_keeps(
    postgres_outbox: str, statements: list[Explained]
) -> None:
    with psycopg.connect(postgres_outbox) as long_one:
        long_one.execute("SELECT pg_current_xact_id()")
        with closing(PostgresStore(Server.of(postgres_outbox))) as store:
            with psycopg.connect(postgres_outbox) as application:
                application.execute(TURNS)
                application.execute("DELETE FROM reliablepub.turns WHERE turn < 0")
            del statements[:]
            store._link.read("ledger", {})
            assert max(one.pages for one in statements) < 100


def test_retention_does_not_depend_on_the_backlog_or_on_what_was_deleted(
    postgres_outbox: str, statements: list[Explained], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "LOOK_S", 0.0)
    with psycopg.connect(postgres_outbox) as long_one:
        long_one.execute("SELECT pg_current_xact_id()")
        run(postgres_outbox, FILL, 20_000)
        store = PostgresStore(Server.of(postgres_outbox), keep_confirmed_s=60, clock=clock)
        with closing(store):
            run(postgres_outbox, KEEP, clock.now - 50_000)
            run(postgres_outbox, REMEMBER)
            store.relieve()
            run(postgres_outbox, "DELETE FROM reliablepub.confirmed WHERE id < 20000")
            store.relieve()
            del statements[:]
            store.relieve()
            store.commit(Changes(confirmed=store.read_ready(1, 9, limit=9, bytes_max=1)[0]))
            texts = [one.text for one in statements]
            for part in ("SELECT min(confirmed_at)", "FROM reliablepub.attempts", "WITH gone"):
                assert [text for text in texts if part in text]
            assert [one for one in statements if one.pages > PAGES_MAX] == []
            kept = [one.pages for one in statements if "reliablepub.confirmed" in one.text]
            assert max(kept) < 50
            with psycopg.connect(postgres_outbox) as looking:
                left = looking.execute("SELECT count(*) FROM reliablepub.attempts").fetchone()
            assert left == (20_000 - 3 * history.PAGE,)


def test_held_messages_of_another_shard_are_not_read(
    postgres_outbox: str, statements: list[Explained], clock: Clock
) -> None:
    with closing(PostgresStore(Server.of(postgres_outbox), clock=clock)) as store:
        with psycopg.connect(postgres_outbox) as application:
            application.execute(FILL, [20_000])
            application.execute(
                "UPDATE reliablepub.messages SET due_at = 'infinity', exchange = 'x',"
                " shard = CASE WHEN id % 10000 = 0 THEN 0 ELSE 1 END"
            )
        del statements[:]
        [held] = store.held_exchanges(10)
        assert (held.exchange, held.count) == ("x", 2)
        store.commit(Changes(released=[release := Release("x", None, limit=10)]))
        assert release.count == 2
        assert max(one.pages for one in statements) < 50


@pytest.mark.parametrize(
    ("scope", "last"), [((None, None), 3), (("x", None), 50_000), (("y", "a"), 49_999)]
)
def test_a_release_reads_what_it_releases_alone_with_old_statistics(
    postgres_outbox: str,
    statements: list[Explained],
    clock: Clock,
    scope: tuple[str | None, str | None],
    last: int,
) -> None:
    """The planner believes that one index is as good as another."""
    with closing(PostgresStore(Server.of(postgres_outbox), clock=clock)) as store:
        with psycopg.connect(postgres_outbox) as application:
            application.execute(FILL, [50_000])
            application.execute("ANALYZE reliablepub.messages")
            application.commit()
            application.execute(
                "UPDATE reliablepub.messages SET due_at = 'infinity',"
                " exchange = CASE WHEN id = 50000 THEN 'x' ELSE 'y' END,"
                " routing_key = CASE WHEN id = 49999 THEN 'a' ELSE 'b' END"
                " WHERE id % 3 = 0 OR id >= 49999"
            )
        del statements[:]
        store.commit(Changes(released=[release := Release(*scope, 1)]))
        assert release.last == last
        assert max(one.pages for one in statements) < 50


def test_messages_of_another_shard_are_passed_a_part_at_a_time(
    postgres_outbox: str, statements: list[Explained]
) -> None:
    with psycopg.connect(postgres_outbox) as application:
        application.execute("ALTER TABLE reliablepub.messages ALTER shard SET DEFAULT 1")
        application.execute(FILL, [40_000])
        application.execute("ALTER TABLE reliablepub.messages ALTER shard SET DEFAULT 0")
        application.execute(FILL, [2])
    with closing(PostgresStore(Server.of(postgres_outbox))) as store:
        last_id = store.snapshot().last_id
        del statements[:]
        found: list[Entry] = []
        first = lowest = 1
        for _ in range(5):
            entries, last_read = store.read_ready(first, last_id, limit=PAGE, bytes_max=10**9)
            found += entries
            first = last_read + 1
            lowest = store.lowest_awaited(lowest, 1.0) or 0
        assert [entry.id for entry in found] == [last_id]
        assert lowest == last_id
        assert max(one.pages for one in statements) < 500
