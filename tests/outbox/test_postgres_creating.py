"""Creating an outbox in PostgreSQL: the SQL that is shown to a DBA, and writers in plain SQL."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pytest

from reliablepub import Message, NotAnOutbox, Outbox, OutboxError, Publisher
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.postgres.server import Link
from reliablepub.outbox.postgres.sql import creation, roles
from reliablepub.testing import FakeBroker
from tests.asking import fill
from tests.postgres import PostgresServer
from tests.waiting import until

PAGE: dict[str, Any] = {"limit": 9, "bytes_max": 10**6}


def test_an_outbox_is_missing_until_it_is_created(postgres_url: str) -> None:
    with Outbox(postgres_url) as outbox:
        for use in (outbox.status, lambda: outbox.enqueue(Message(b""))):
            with pytest.raises(NotAnOutbox, match="create it: `reliablepub outbox create`"):
                use()
        outbox.create()
        outbox.create()
        outbox.enqueue(Message(b""))
        assert outbox.status().open == 1


def test_it_may_be_created_while_another_process_looks_for_it(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Link._check_version

    def check(_link: Link) -> None:
        monkeypatch.setattr(Link, "_check_version", look)
        with psycopg.connect(postgres_url) as other:
            other.execute(creation("reliablepub"))
        raise NotAnOutbox("not there yet")

    monkeypatch.setattr(Link, "_check_version", check)
    with Outbox(postgres_url) as outbox:
        outbox.create()
        assert outbox.status().stored == 0


def test_its_sql_can_be_run_by_an_administrator(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as administrator:
        administrator.execute(creation("events"))
    with Outbox(f"{postgres_url}?schema=events") as outbox:
        outbox.enqueue(Message(b""))
        assert outbox.status().open == 1


def test_it_is_created_with_the_applications_tables(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as application:
        Outbox(postgres_url).create(connection=application)
        application.rollback()
    database = outbox_at(postgres_url)
    with closing(database):
        assert not database.exists()
        with psycopg.connect(postgres_url) as application:
            Outbox(postgres_url).create(connection=application)
        assert database.exists()


@pytest.mark.parametrize("is_joined", [False, True])
def test_several_processes_may_create_it_at_once(postgres_url: str, *, is_joined: bool) -> None:
    """As the workers of a service do when they start."""
    at_once = threading.Barrier(4)

    def create(_: int) -> None:
        with Outbox(postgres_url) as outbox, psycopg.connect(postgres_url) as application:
            at_once.wait()
            outbox.create(connection=application if is_joined else None)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(create, range(4)))
    with Outbox(postgres_url) as outbox:
        assert outbox.status().stored == 0


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_who_waits_for_a_creation_sees_it_at_any_isolation_level(
    postgres_url: str, isolation: str
) -> None:
    url = (
        f"{postgres_url}?options=-c default_transaction_isolation={isolation.replace(' ', '%5C ')}"
    )
    waiting = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with ThreadPoolExecutor(1) as pool, psycopg.connect(postgres_url) as application:
        Outbox(postgres_url).create(connection=application)
        second = pool.submit(Outbox(url).create)
        until(lambda: application.execute(waiting).fetchone() is not None)
        application.commit()
        second.result(20)
        assert Outbox(url).status().stored == 0


def test_it_may_be_created_twice_in_a_transaction(postgres_url: str) -> None:
    with Outbox(postgres_url) as outbox, psycopg.connect(postgres_url) as application:
        outbox.create(connection=application)
        outbox.create(connection=application)
        application.commit()
        assert outbox.status().stored == 0


@pytest.fixture
def encoded_url(postgres_server: PostgresServer) -> Iterator[Callable[[str], str]]:
    """Make a database with an encoding; its URL."""
    made: list[str] = []

    def make(encoding: str) -> str:
        made.append(f"test_of_{encoding.lower()}")
        postgres_server.drop_database(made[-1])
        postgres_server.execute(
            "CREATE DATABASE {} ENCODING {} LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0",
            made[-1],
            encoding,
        )
        return postgres_server.url_of(made[-1])

    yield make
    for name in made:
        postgres_server.drop_database(name)


def test_a_database_that_cannot_hold_any_text_is_refused(encoded_url: Callable[[str], str]) -> None:
    url = encoded_url("LATIN1")
    with Outbox(url) as outbox:
        with pytest.raises(OutboxError, match="needs a database with encoding UTF8"):
            outbox.create()
        with pytest.raises(NotAnOutbox):
            outbox.status()


@pytest.mark.parametrize("is_in_database", [False, True])
def test_texts_are_the_same_in_any_environment(
    encoded_url: Callable[[str], str],
    postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_in_database: bool,
) -> None:
    """An encoding of the database, or of the client, that is not UTF-8."""
    url = encoded_url("SQL_ASCII") if is_in_database else postgres_url
    Outbox(url).create()
    if not is_in_database:
        monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    with FakeBroker() as broker, Outbox(url) as outbox:
        broker.declare_queue("grüße €")
        fields: dict[str, Any] = {"routing_key": "grüße €", "headers": {"to": "Ł"}}
        outbox.enqueue(Message(b"", message_id="é", **fields), key="ключ")
        assert outbox.enqueue(Message(b"", message_id="2", **fields), key="ключ") == "é"
        [row] = outbox.rows("open")
        assert (row["message_id"], row["routing_key"]) == ("é", "grüße €")
        with Publisher(broker.url, outbox=url) as publisher:
            publisher.publish(b"", message_id="€", **fields)
            assert publisher.flush(20).counters.confirmed == 2
        assert {m.properties.message_id for m in broker.messages("grüße €")} == {"é", "€"}
        assert outbox.audit().is_right


def test_roles_suffice_where_nobody_may_call_functions_by_default(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    """As security guides recommend."""
    user = "only_enqueues"
    with psycopg.connect(postgres_url) as administrator:
        administrator.execute("ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC")
        administrator.execute(creation("hardened"))
        administrator.execute(roles("hardened"))
        if not postgres_server.execute("SELECT 1 FROM pg_roles WHERE rolname = 'only_enqueues'"):
            administrator.execute("CREATE ROLE only_enqueues LOGIN")
        administrator.execute("GRANT hardened_enqueuer TO only_enqueues")
    fill(postgres_url.replace("postgres@", f"{user}@") + "?schema=hardened", Message(b""))
    with Outbox(postgres_url + "?schema=hardened") as outbox:
        assert outbox.status().open == 1


def test_plain_sql_stores_messages(postgres_url: str) -> None:
    Outbox(postgres_url).create()
    with psycopg.connect(postgres_url) as anybody:
        simple = anybody.execute(
            "SELECT reliablepub.enqueue('orders', 'created', 'hello'::bytea)"
        ).fetchone()
        anybody.execute(
            """SELECT reliablepub.enqueue(
                exchange => 'orders', routing_key => 'created', body => '{}'::bytea,
                properties => '{"content_type": "application/json", "headers": {"n": 1}}',
                message_id => 'm-1', ordering_key => 'k', expires_in_s => 60)"""
        )
    with pytest.raises(psycopg.DataError), psycopg.connect(postgres_url) as anybody:
        anybody.execute("SELECT reliablepub.enqueue('', '', '', 'not JSON')")
    store = outbox_at(postgres_url).open_store(keep_confirmed_s=0.0, keys=None)
    with closing(store):
        first, second = store.read_ready(1, 9, **PAGE)[0]
        assert simple == (first.message.message_id,)
        assert (first.message.body, first.message.exchange) == (b"hello", "orders")
        message = second.message
        assert (message.message_id, message.ordering_key) == ("m-1", "k")
        assert (message.content_type, message.headers) == ("application/json", {"n": 1})
        assert second.expires_at == pytest.approx(second.stored_at + 60)
        assert store.snapshot().counters.open == 2
    assert Outbox(postgres_url).audit().is_right


@pytest.mark.parametrize(
    "values",
    [
        "not_before => 'infinity'",
        "not_before => '-infinity'",
        "expires_in_s => 'Infinity'",
        "expires_in_s => 'NaN'",
        "expires_in_s => 1e300",
        "expires_in_s => 0",
        "properties => '[1]'",
        "ordering_key => repeat('k', 256)",
    ],
)
def test_plain_sql_refuses_what_could_never_be_sent(postgres_url: str, values: str) -> None:
    with Outbox(postgres_url) as outbox, psycopg.connect(postgres_url) as anybody:
        outbox.create()
        with pytest.raises(psycopg.errors.RaiseException, match=values.split(maxsplit=1)[0]):
            anybody.execute(f"SELECT reliablepub.enqueue('', 'q', 'x', {values})".encode())
        anybody.rollback()
        assert list(outbox.rows("open")) == []
