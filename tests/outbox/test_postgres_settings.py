"""Outboxes in PostgreSQL amid what administrators do: lock, hide, empty, monitor, name."""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import UTC, datetime
from itertools import pairwise

import psycopg
import pytest
from tenacity import retry, retry_if_exception_type, stop_after_attempt

from reliablepub import (
    ConfigurationError,
    Message,
    NotAnOutbox,
    Outbox,
    OutboxError,
    OutboxInUse,
    OutboxLocked,
    OutboxUnreachable,
    Publisher,
)
from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.admin.transfer import export_lines, import_lines
from reliablepub.outbox.entry import Changes
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.postgres import ownership, sql
from reliablepub.outbox.postgres.database import create_outbox
from reliablepub.outbox.postgres.server import Server
from reliablepub.outbox.postgres.store import PostgresStore
from reliablepub.testing import FakeBroker
from tests.outbox.conftest import Make
from tests.postgres import PostgresServer
from tests.waiting import until

LATER = datetime(2100, 1, 1, tzinfo=UTC)
SPY = """
CREATE TABLE public.seen (statement text);
CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.seen VALUES (current_query());
    RETURN NEW;
END $$;
CREATE TRIGGER note BEFORE INSERT OR UPDATE OF body ON reliablepub.messages
FOR EACH ROW EXECUTE FUNCTION public.note();
CREATE TRIGGER note BEFORE INSERT ON reliablepub.parked
FOR EACH ROW EXECUTE FUNCTION public.note();
"""


# ---------------------------------------------------------------------------- locks


def test_a_relay_whose_table_is_locked_says_so_and_refuses_messages(url: str) -> None:
    """VACUUM FULL, for instance. Callers must not hang for as long as that takes."""
    with FakeBroker() as broker, Publisher(broker.url, outbox=url) as publisher:
        broker.declare_queue("orders")
        publisher.publish(b"", routing_key="orders").result(20)
        with closing(psycopg.connect(url)) as locking:
            locking.execute("LOCK TABLE reliablepub.messages")
            until(lambda: "locked" in publisher.status.trouble)
            with pytest.raises(OutboxLocked):
                publisher.publish(b"", routing_key="orders")
            locking.rollback()
        deadline = time.monotonic() + 60
        while True:
            try:
                publisher.publish(b"", routing_key="orders").result(20)
                break
            except OutboxLocked:
                assert time.monotonic() < deadline
        assert publisher.status.trouble == ""


class StoodStill(Exception):
    """The machine kept the owner from its next turn for so long that another was to take over."""


tried_again = retry(
    retry=retry_if_exception_type(StoodStill), stop=stop_after_attempt(3), reraise=True
)


def attempts_to_take_over(url: str, for_s: float, live: Callable[[], object]) -> set[str]:
    """Open the outbox again and again, as standbys do, while the owner lives; what came of it."""
    told: set[str] = set()
    beats = [time.monotonic()]
    until_s = beats[0] + for_s

    def attempt() -> None:
        while time.monotonic() < until_s:
            try:
                PostgresStore(Server.of(url)).close()
                told.add("taken over")
            except OutboxError as error:
                told.add(type(error).__name__)

    standby = threading.Thread(target=attempt)
    standby.start()
    try:
        while standby.is_alive():
            live()
            beats.append(time.monotonic())
            time.sleep(0.05)
    except OutboxInUse:
        told.add("lost")
    finally:
        beats.append(time.monotonic())
        standby.join()
    if told != {"OutboxInUse"} and max(b - a for a, b in pairwise(beats)) > 2:
        raise StoodStill
    return told


@pytest.mark.parametrize("mode", ["ACCESS EXCLUSIVE", "SHARE"])
@tried_again
def test_an_owner_that_waits_for_the_lock_of_a_table_keeps_its_shard(
    url: str, entry: Make, mode: str
) -> None:
    """VACUUM FULL, or CREATE INDEX, for longer than a turn may be old."""
    stored = Outbox(url).status().stored
    with closing(PostgresStore(Server.of(url))) as own, closing(psycopg.connect(url)) as locking:
        own.changed_elsewhere()
        Outbox(url).enqueue(Message(b""))
        assert own.changed_elsewhere(), "found, and not counted yet"
        locking.execute(f"LOCK TABLE reliablepub.messages IN {mode} MODE".encode())

        def live() -> None:
            with suppress(OutboxLocked):
                own.changed_elsewhere()
            with suppress(OutboxLocked):
                own.commit(Changes(new=[entry()]))

        told = attempts_to_take_over(url, 2.5 * ownership.EXPIRY_S, live)
        locking.rollback()
        assert told == {"OutboxInUse"}
        assert own.commit(Changes(new=[entry()])).counters.stored == stored + 2
    assert not Outbox(url).audit().differences


@pytest.mark.timeout(60)
def test_an_owner_goes_on_though_the_table_of_its_status_is_locked(
    url: str, admin: psycopg.Connection, entry: Make
) -> None:
    """VACUUM FULL waits for a dump, perhaps for hours, and others for VACUUM FULL."""
    with closing(PostgresStore(Server.of(url))) as own, closing(psycopg.connect(url)) as locking:
        locking.execute("LOCK TABLE reliablepub.status")
        own.show({"n": 1})
        assert own.commit(Changes(new=[entry()])).counters.stored == 1
        locking.rollback()
        own.show({"n": 2})
        [(content,)] = admin.execute("SELECT content FROM reliablepub.status")
        assert json.loads(content)["n"] == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("table", ["outbox", "turns", "runs", "confirmed"])
def test_a_relay_that_starts_while_a_table_is_locked_says_so(url: str, table: str) -> None:
    with closing(psycopg.connect(url)) as locking:
        locking.execute(f"LOCK TABLE reliablepub.{table}".encode())
        with pytest.raises(OutboxLocked):
            PostgresStore(Server.of(url))
        locking.rollback()
    PostgresStore(Server.of(url)).close()


@pytest.mark.timeout(60)
def test_a_relay_waits_for_no_lock_to_name_its_successor_or_to_find_a_source(
    url: str, admin: psycopg.Connection
) -> None:
    with closing(PostgresStore(Server.of(url))) as own, closing(psycopg.connect(url)) as locking:
        admin.execute("UPDATE reliablepub.turns SET run = 99")
        locking.execute("LOCK TABLE reliablepub.runs, reliablepub.sources")
        with pytest.raises(OutboxLocked):
            own.position("source")
        with pytest.raises(OutboxLocked):
            own.changed_elsewhere()
        locking.rollback()
        with pytest.raises(OutboxInUse):
            own.changed_elsewhere()


@tried_again
def test_an_owner_whose_commit_took_long_keeps_its_shard(url: str) -> None:
    """It waits for a synchronous replica, for instance: its turn is old when others see it."""
    with closing(PostgresStore(Server.of(url))) as own:
        slow_s = ownership.EXPIRY_S + 1
        own._take_turn([("SELECT pg_catalog.pg_sleep(%(s)b)", {"s": slow_s})])
        told = attempts_to_take_over(url, ownership.EXPIRY_S, own.changed_elsewhere)
        assert told == {"OutboxInUse"}


def test_a_relay_starts_or_says_that_a_transaction_holds_its_turn(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prepared transaction that was forgotten would hold it for ever."""
    monkeypatch.setattr(ownership, "_LOCKED_MAX", 1)
    outbox = Outbox(url)
    outbox.enqueue(Message(b""), key="k")
    failures: list[BaseException] = []

    def start() -> None:
        try:
            PostgresStore(Server.of(url)).close()
        except OutboxInUse as error:
            failures.append(error)

    with closing(psycopg.connect(url)) as application:
        application.tpc_begin("forgotten")
        outbox.cancel("k", connection=application)
        application.tpc_prepare()
        starting = threading.Thread(target=start)
        starting.start()
        starting.join(60)
        application.tpc_rollback()
        starting.join()
    assert "pg_prepared_xacts" in str(failures)
    PostgresStore(Server.of(url)).close()


def test_a_relay_that_starts_ignores_the_statement_timeout_of_its_user(
    url: str, admin: psycopg.Connection
) -> None:
    """It waits for the transaction of an application that cancels a message."""
    waiting = (
        "SELECT 1 FROM pg_locks WHERE NOT granted AND age(now(), waitstart) > interval '0.3 s'"
    )
    outbox = Outbox(url)
    outbox.enqueue(Message(b""), key="k")
    own = Server.of(f"{url}?options=-c statement_timeout=200")
    with ThreadPoolExecutor(1) as pool, closing(psycopg.connect(url)) as application:
        outbox.cancel("k", connection=application)
        starting = pool.submit(PostgresStore, own)
        until(lambda: starting.done() or admin.execute(waiting).fetchone() is not None)
        application.commit()
        starting.result(20).close()


def test_a_relay_sends_nulls_where_arrays_have_none(url: str) -> None:
    """A database may still have the setting of an application of PostgreSQL 8.1."""
    database = url.rpartition("/")[2]
    with closing(psycopg.connect(url, autocommit=True)) as admin:
        admin.execute(f"ALTER DATABASE {database} SET array_nulls = off".encode())
    with FakeBroker() as broker:
        broker.declare_queue("orders")
        with Publisher(broker.url, outbox=url) as publisher:
            publisher.publish(b"", routing_key="orders", ordering_key="k").result(60)
            assert publisher.flush(60).is_flushed


# ---------------------------------------------------------------------------- policies


def test_a_policy_that_hides_messages_from_the_relay_is_an_error(
    url: str, admin: psycopg.Connection, postgres_server: PostgresServer
) -> None:
    admin.execute(sql.roles("reliablepub").encode())
    admin.execute("CREATE ROLE hidden_relay LOGIN IN ROLE reliablepub_relay")
    name = url.rpartition("/")[2]
    own = postgres_server.url_of(name, user="hidden_relay")
    try:
        with closing(PostgresStore(Server.of(own))) as store:
            admin.execute("ALTER TABLE reliablepub.messages ENABLE ROW LEVEL SECURITY")
            Outbox(url).enqueue(Message(b""))
            with pytest.raises(OutboxError, match="row-level security"):
                store.changed_elsewhere()
        admin.execute("ALTER TABLE reliablepub.outbox ENABLE ROW LEVEL SECURITY")
        with pytest.raises(OutboxError, match="policy"):
            PostgresStore(Server.of(own))
    finally:
        admin.execute("DROP OWNED BY hidden_relay, reliablepub_relay")
        admin.execute("DROP OWNED BY reliablepub_enqueuer, reliablepub_reader")
        admin.execute("DROP ROLE hidden_relay, reliablepub_relay")
        admin.execute("DROP ROLE reliablepub_enqueuer, reliablepub_reader")


def test_a_user_who_may_only_read_is_told_why(url: str, admin: psycopg.Connection) -> None:
    name = admin.info.dbname
    admin.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on".encode())
    with Outbox(url) as outbox:
        with pytest.raises(OutboxUnreachable, match="default_transaction_read_only"):
            outbox.enqueue(Message(b""))
        assert outbox.status().open == 0


# ---------------------------------------------------------------------------- emptied tables


@pytest.mark.parametrize("table", ["turns", "outbox"])
def test_an_outbox_whose_tables_were_emptied_is_refused(
    url: str, admin: psycopg.Connection, table: str
) -> None:
    """As test suites empty all tables between two tests."""
    admin.execute(f"TRUNCATE reliablepub.{table}".encode())
    with pytest.raises(NotAnOutbox, match="has emptied the table"):
        PostgresStore(Server.of(url))
    with Outbox(url) as outbox, pytest.raises(NotAnOutbox, match="has emptied the table"):
        outbox.retry([1])


def test_a_relay_whose_turns_are_deleted_says_so(
    url: str, admin: psycopg.Connection, entry: Make
) -> None:
    with closing(PostgresStore(Server.of(url))) as own:
        admin.execute("TRUNCATE reliablepub.turns")
        with pytest.raises(NotAnOutbox, match="has emptied the table"):
            own.changed_elsewhere()
        with pytest.raises(NotAnOutbox, match="has emptied the table"):
            own.commit(Changes(new=[entry()]))


def test_the_lost_ledger_of_an_emptied_outbox_is_told(url: str, admin: psycopg.Connection) -> None:
    """Sums over no turns are null, which is no difference and exceeds no limit."""
    with Outbox(url) as outbox, Outbox(url, open_messages_max=9) as limited:
        admin.execute("TRUNCATE reliablepub.turns")
        for ask in (outbox.status, outbox.audit, lambda: limited.enqueue(b"")):
            with pytest.raises(OutboxError, match="has emptied the table"):
                ask()


# ---------------------------------------------------------------------------- statements


def test_no_statement_of_an_operator_shows_a_body(url: str, admin: psycopg.Connection) -> None:
    """Members of pg_monitor see the statements of all users in pg_stat_activity."""
    database = outbox_at(url)
    for _ in range(2):
        Outbox(url).enqueue(Message(b"secret"))
    intervene(database, [2], Intervention(Action.PARK))
    lines = list(export_lines(database, [1, 2]))
    intervene(database, [2], Intervention(Action.DISCARD))
    admin.execute(SPY)
    intervene(database, [1], Intervention(Action.REROUTE, routing_key="other"))
    *_, brought = import_lines(database, lines, "export")
    assert brought.stored == 2
    seen = [statement for (statement,) in admin.execute("SELECT statement FROM public.seen")]
    assert len(seen) == 4, "the parked one was open first"
    assert not any(b"secret".hex() in statement for statement in seen)
    assert Outbox(url).audit().is_right


# ---------------------------------------------------------------------------- names


def test_words_that_need_quotes_are_known(admin: psycopg.Connection) -> None:
    words = admin.execute("SELECT word FROM pg_get_keywords() WHERE catcode IN ('R', 'T')")
    assert [word for (word,) in words if not sql._RESERVED.fullmatch(word)] == []


@pytest.mark.parametrize("schema", ["user", "order", "role_a_reliablepub_b", "values"])
def test_a_schema_may_have_any_name(postgres_url: str, schema: str) -> None:
    url = f"{postgres_url}?schema={schema}"
    create_outbox(Server.of(url))
    outbox = Outbox(url)
    outbox.create()
    with closing(psycopg.connect(postgres_url)) as app:
        outbox.enqueue(Message(b"1", routing_key="orders"))
        outbox.enqueue(Message(b"2", routing_key="orders"), connection=app)
        outbox.enqueue(Message(b"3", ordering_key="k", not_before=LATER), key="k", connection=app)
        app.commit()
        outbox.cancel("k", connection=app)
        app.commit()
        app.execute(sql.roles(schema).encode())
        roles = [f"{schema}_{name}" for name in ("enqueuer", "relay", "reader")]
        for role in roles:
            query = "SELECT has_schema_privilege(%s, %s, 'USAGE')"
            assert app.execute(query, (role, schema)).fetchone() == (True,)
        app.rollback()
    with FakeBroker() as broker, Publisher(broker.url, outbox=url) as publisher:
        broker.declare_queue("orders")
        assert publisher.flush(20).is_flushed
        assert sorted(message.body for message in broker.messages("orders")) == [b"1", b"2"]
    assert outbox.status().open == 0
    assert not outbox.audit().differences


def test_a_schema_whose_roles_would_be_cut_off_has_none() -> None:
    assert f"{'a' * 54}_enqueuer" in sql.roles("a" * 54)
    with pytest.raises(ConfigurationError, match="54 characters"):
        sql.roles("a" * 55)


@pytest.mark.parametrize(
    ("url", "password", "name"),
    [
        ("postgresql://u@h/d?password=a+b#c", "a+b#c", "postgresql://h/d"),
        ("postgresql://u:5432#s?e@h/d", "5432#s?e", "postgresql://h/d"),
        ("postgresql://u:a%2Bb%23@h/d?schema=x", "a+b#", "postgresql://h/d?schema=x"),
        ("postgresql://u:a,b@h/d\n", "a,b", "postgresql://h/d"),
    ],
)
def test_a_password_may_have_any_character(url: str, password: str, name: str) -> None:
    server = Server.of(url)
    known = psycopg.conninfo.conninfo_to_dict(server.url)
    assert (known["password"], known["host"], known["dbname"]) == (password, "h", "d")
    assert "target_session_attrs" not in known
    assert str(server) == name


# ---------------------------------------------------------------------------- collations


def test_no_index_depends_on_the_collations_of_the_operating_system(
    admin: psycopg.Connection,
) -> None:
    """A new version of them makes such an index wrong: messages of a key would not be found."""
    query = """
        SELECT indexrelid::regclass::text FROM pg_index, unnest(indcollation) AS c (used)
        WHERE indrelid IN (
            SELECT oid FROM pg_class WHERE relnamespace = 'reliablepub'::regnamespace
        ) AND c.used NOT IN (0, 'pg_catalog."C"'::regcollation)
    """
    assert admin.execute(query).fetchall() == []
