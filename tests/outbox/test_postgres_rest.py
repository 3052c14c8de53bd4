"""A relay at rest: it writes nothing, asks rarely, and is woken by the enqueuers' commits."""

import time
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from psycopg import sql

from reliablepub import Message, Outbox, OutboxInUse, Publisher
from reliablepub.outbox.postgres import ownership
from reliablepub.outbox.postgres.bell import CALM_S
from reliablepub.outbox.postgres.database import create_outbox
from reliablepub.outbox.postgres.server import Server
from reliablepub.outbox.postgres.store import PostgresStore
from reliablepub.testing import FakeBroker
from tests.outbox.cuts import end_connections
from tests.postgres import PostgresServer
from tests.waiting import until

pytestmark = pytest.mark.postgres
LOCK = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock'"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server on which no transaction can be prepared, as by default; and that counts."""
    settings = {"max_prepared_transactions": "0"}
    settings["shared_preload_libraries"] = "pg_stat_statements"
    with PostgresServer(settings=settings) as server:
        yield server


@pytest.fixture
def url(server: PostgresServer) -> Iterator[str]:
    url = server.url_of()
    create_outbox(Server.of(url))
    yield url
    server.execute("DROP SCHEMA reliablepub CASCADE")


@pytest.fixture
def own(url: str) -> Iterator[PostgresStore]:
    with closing(PostgresStore(Server.of(url))) as store:
        store.changed_elsewhere()
        yield store


def rest(store: PostgresStore) -> bool:
    """Whether the relay rests, after nothing has come for a while."""
    bell = store.bell
    assert bell is not None
    time.sleep(CALM_S)
    bell.arm()
    return bell.is_armed


def has_rung(store: PostgresStore) -> bool:
    assert store.bell is not None
    return store.bell.has_rung()


def test_an_idle_relay_writes_nothing_and_asks_rarely(url: str, admin: psycopg.Connection) -> None:
    admin.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
    with FakeBroker() as broker, Publisher(broker.url, outbox=url) as publisher:
        broker.declare_queue("q")
        publisher.publish(b"", routing_key="q").result(20)
        until(lambda: admin.execute(LOCK).fetchone() == (1,))
        least = [1_000_000, 1_000_000]  # of three times: a checkpoint may come in one
        for _ in range(3):
            before = admin.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
            admin.execute("SELECT pg_stat_statements_reset()")
            time.sleep(2)
            calls = "SELECT sum(calls) - 1 FROM pg_stat_statements"
            wal = "SELECT pg_current_wal_insert_lsn() - %s::pg_lsn"
            for n, found in enumerate(
                (admin.execute(calls).fetchone(), admin.execute(wal, before).fetchone())
            ):
                assert found is not None
                least[n] = min(least[n], int(found[0]))
        statements, written = least
        assert statements <= 2 * 3
        assert written == 0
        Outbox(url).enqueue(Message(b"", routing_key="q"))
        until(lambda: len(broker.messages("q")) == 2)


def test_a_commit_wakes_a_relay_at_rest_and_others_notify_nobody(
    url: str, own: PostgresStore, admin: psycopg.Connection
) -> None:
    [channel] = admin.execute("SELECT reliablepub.channel(0)").fetchone() or ("",)
    admin.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
    with Outbox(url) as outbox:
        outbox.enqueue(Message(b""))
        assert own.changed_elsewhere()
        assert rest(own)
        assert not has_rung(own)
        with closing(psycopg.connect(url)) as application:
            outbox.enqueue(Message(b""), connection=application)
            outbox.enqueue(Message(b""), connection=application)
            assert not has_rung(own)
            application.commit()
        until(lambda: has_rung(own))
        assert own.changed_elsewhere()
        outbox.enqueue(Message(b""))
        assert not has_rung(own)
    assert len(list(admin.notifies(timeout=0.1))) == 1


def test_a_schema_with_a_long_name_wakes_its_relay(server: PostgresServer) -> None:
    url = f"{server.url_of()}?schema={'s' * 63}"
    create_outbox(Server.of(url))
    with closing(PostgresStore(Server.of(url))) as own, Outbox(url) as outbox:
        assert rest(own)
        outbox.enqueue(Message(b""))
        until(lambda: has_rung(own))
    server.execute("DROP SCHEMA {} CASCADE", "s" * 63)


def test_a_relay_does_not_rest_while_a_transaction_may_bring_a_message(
    url: str, own: PostgresStore
) -> None:
    with closing(psycopg.connect(url)) as application:
        Outbox(url).enqueue(Message(b""), connection=application)
        assert not rest(own)
        application.commit()
    assert own.changed_elsewhere()
    assert rest(own)


def test_a_relay_whose_connection_is_lost_at_rest_looks_at_once_and_rests_again(
    url: str, own: PostgresStore
) -> None:
    for _ in range(2):
        assert rest(own)
        end_connections(url)
        assert has_rung(own)
        assert own.bell is not None
        assert not own.bell.is_armed
        own.changed_elsewhere()


def test_an_owner_at_rest_keeps_its_shard_by_its_looks_alone(
    url: str, own: PostgresStore, admin: psycopg.Connection
) -> None:
    newest = "SELECT max(turn) FROM reliablepub.turns"
    before = admin.execute(newest).fetchone()
    until_s = time.monotonic() + ownership.EXPIRY_S + 1
    while time.monotonic() < until_s:
        assert not own.changed_elsewhere()
        time.sleep(0.2)
        words = "may own a shard: stop it, only enqueue here, or"
        with pytest.raises(OutboxInUse, match=words):
            PostgresStore(Server.of(url))
    assert admin.execute(newest).fetchone() == before
    assert Outbox(url).status().relay is not None


def test_a_message_can_be_stored_in_a_transaction_that_is_prepared(postgres_outbox: str) -> None:
    """A transaction that has notified cannot be: so no relay of such a server asks for that."""
    with closing(PostgresStore(Server.of(postgres_outbox))) as own:
        assert not rest(own)
        with closing(psycopg.connect(postgres_outbox)) as application:
            application.tpc_begin("stored")
            Outbox(postgres_outbox).enqueue(Message(b""), connection=application)
            application.tpc_prepare()
            application.tpc_commit()
        assert own.changed_elsewhere()


# Their arguments change with the version.
REFUSED = """
    SELECT oid::regprocedure::text FROM pg_proc WHERE proname IN (
        'pg_control_system', 'pg_postmaster_start_time', 'pg_stat_get_activity',
        'pg_current_wal_insert_lsn', 'pg_current_wal_flush_lsn', 'pg_logical_emit_message'
    )
"""


@pytest.fixture
def refusing(server: PostgresServer) -> Iterator[str]:
    """A managed server: its user owns the outbox, and may call few functions."""
    refused = [name for (name,) in server.execute(REFUSED)]
    assert len(refused) >= 6
    for name in refused:
        server.execute(f"REVOKE EXECUTE ON FUNCTION {name} FROM PUBLIC")
    server.execute("CREATE ROLE tenant LOGIN")
    server.execute("GRANT CREATE ON DATABASE postgres TO tenant")
    url = server.url_of(user="tenant")
    create_outbox(Server.of(url))
    yield url
    server.execute("DROP OWNED BY tenant")
    server.execute("DROP ROLE tenant")
    for name in refused:
        server.execute(f"GRANT EXECUTE ON FUNCTION {name} TO PUBLIC")


def test_a_server_that_refuses_administrative_functions_is_enough(refusing: str) -> None:
    with closing(PostgresStore(Server.of(refusing))) as own:
        own._link.flush()  # as after a commit that was cut off
    with FakeBroker() as broker:
        broker.declare_queue("q")
        with Publisher(broker.url, outbox=refusing) as publisher, Outbox(refusing) as outbox:
            publisher.publish(b"", routing_key="q").result(20)
            outbox.enqueue(Message(b"", routing_key="q"), key="k")
            assert publisher.flush(20).is_flushed
            time.sleep(ownership.EXPIRY_S)
            with pytest.raises(OutboxInUse):
                PostgresStore(Server.of(refusing))
            assert outbox.status().relay is not None
            assert publisher.status.reason == ""
        assert not outbox.audit().differences
        with Publisher(broker.url, outbox=refusing) as publisher:
            publisher.publish(b"", routing_key="q").result(20)
        assert len(broker.messages("q")) == 3
