"""Enqueuing into PostgreSQL: forgotten keys, interrupted calls, pipelines, cursors, the disk."""

import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import Any, LiteralString

import psycopg
import pytest

from reliablepub import (
    ConfigurationError,
    Message,
    Outbox,
    OutboxError,
    OutboxLocked,
    ScheduleChange,
)
from reliablepub.outbox.postgres import enqueue
from reliablepub.outbox.postgres.server import Link
from tests.asking import message_ids
from tests.postgres import PostgresServer
from tests.waiting import until

LATER = datetime(2100, 1, 1, tzinfo=UTC)


@pytest.fixture
def app(url: str) -> Iterator[psycopg.Connection]:
    with closing(psycopg.connect(url)) as connection:
        yield connection


# ---------------------------------------------------------------------------- keys


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_message_whose_key_is_forgotten_meanwhile_is_stored(
    url: str, monkeypatch: pytest.MonkeyPatch, *, is_joined: bool
) -> None:
    """Between the attempt to store the message and the question which message has its key."""
    outbox = Outbox(url)
    outbox.enqueue(Message(b"", message_id="first"), key="k")
    rows, execute = Link.rows, enqueue.execute

    def after_cancelling(link: Link, name: str, values: Any = None) -> Any:
        if name == "first_with_key":
            Outbox(url).cancel("k")
        return rows(link, name, values)

    def execute_after_cancelling(connection: Any, text: str, values: Any = None) -> Any:
        if text.startswith("SELECT message_id"):
            Outbox(url).cancel("k")
        return execute(connection, text, values)

    monkeypatch.setattr(Link, "rows", after_cancelling)
    monkeypatch.setattr(enqueue, "execute", execute_after_cancelling)
    with closing(psycopg.connect(url, autocommit=True)) as connection:
        joined = connection if is_joined else None
        told = outbox.enqueue(Message(b"", message_id="second"), key="k", connection=joined)
    assert told == "second"
    assert message_ids(url) == ["second"]


def test_a_message_whose_key_is_never_free_and_never_known_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(url)
    outbox.enqueue(Message(b"", message_id="first"), key="k")
    rows = Link.rows

    def forget(link: Link, name: str, values: Any = None) -> Any:
        return [] if name == "first_with_key" else rows(link, name, values)

    monkeypatch.setattr(Link, "rows", forget)
    with pytest.raises(OutboxLocked, match="was not stored"):
        outbox.enqueue(Message(b"", message_id="second"), key="k")
    assert message_ids(url) == ["first"]


# ---------------------------------------------------------------------------- interrupted


class TimeLimitError(Exception):
    """Raised by a signal handler, as Celery does."""


@contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise TimeLimitError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with pytest.raises(TimeLimitError):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_call_that_a_signal_handler_interrupts_spoils_no_later_one(
    url: str, app: psycopg.Connection
) -> None:
    with Outbox(url) as outbox:
        outbox.enqueue(Message(b"", message_id="before"))
        app.execute("LOCK TABLE reliablepub.messages")
        with interrupted(0.3):
            outbox.enqueue(Message(b"", message_id="interrupted"))
        with interrupted(0.3):
            outbox.status()
        app.rollback()
        for number in range(3):
            outbox.enqueue(Message(b"", message_id=str(number)))
        assert outbox.status().open >= 4
        assert not outbox.audit().differences
    assert {"before", "0", "1", "2"} <= {*message_ids(url)}


# ---------------------------------------------------------------------------- connections


def test_all_is_possible_in_a_pipeline(url: str, app: psycopg.Connection) -> None:
    outbox = Outbox(url)
    with app.pipeline():
        for key in ("gone", "moved"):
            outbox.enqueue(Message(b"", message_id=key), key=key, connection=app)
        app.execute("CREATE TABLE orders (id integer)")
        assert outbox.cancel("gone", connection=app) is ScheduleChange.MADE
        assert outbox.reschedule("moved", LATER, connection=app) is ScheduleChange.MADE
        assert outbox.cancel("unknown", connection=app) is ScheduleChange.UNKNOWN
        app.commit()
        assert outbox.cancel("moved", connection=app) is ScheduleChange.MADE
        app.rollback()
    assert message_ids(url) == ["moved"]
    assert not outbox.audit().differences


def test_a_pipeline_without_a_transaction_is_refused(url: str) -> None:
    outbox = Outbox(url)
    outbox.enqueue(Message(b""), key="k")
    with closing(psycopg.connect(url, autocommit=True)) as app, app.pipeline():
        with pytest.raises(ConfigurationError, match="autocommit"):
            outbox.cancel("k", connection=app)
        assert app.execute("SELECT 1").fetchone() == (1,)
    assert outbox.status().open == 1


def test_a_pipeline_creates_no_outbox(postgres_url: str) -> None:
    with closing(psycopg.connect(postgres_url)) as app:
        with app.pipeline(), pytest.raises(ConfigurationError, match="pipeline"):
            Outbox(postgres_url).create(connection=app)
        app.rollback()
        Outbox(postgres_url).create(connection=app)
        app.commit()
    assert Outbox(postgres_url).status().open == 0


@pytest.mark.parametrize("kind", [psycopg.ClientCursor, psycopg.RawCursor])
def test_a_connection_may_have_other_cursors(url: str, kind: Any) -> None:
    outbox = Outbox(url)
    with closing(psycopg.connect(url, cursor_factory=kind)) as app:
        for key in (None, "k", "k", "gone"):
            outbox.enqueue(Message(b"a\\b", message_id=f"m-{key}"), key=key, connection=app)
        assert outbox.cancel("gone", note="a\\b%s", connection=app) is ScheduleChange.MADE
        app.commit()
    assert message_ids(url) == ["m-None", "m-k"]


LEFT_OUT = """
    CREATE FUNCTION public.audit() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RETURN NULL; -- as in a trigger that runs after the insert
    END $$;
    CREATE TRIGGER audit BEFORE INSERT ON reliablepub.messages
    FOR EACH ROW EXECUTE FUNCTION public.audit();
"""


@pytest.mark.parametrize("key", [None, "k"])
def test_a_message_that_a_trigger_of_the_application_leaves_out_is_not_stored(
    url: str, key: str | None
) -> None:
    with Outbox(url) as outbox, closing(psycopg.connect(url, autocommit=True)) as admin:
        admin.execute(LEFT_OUT)
        with pytest.raises(OutboxError, match="trigger"):
            outbox.enqueue(Message(b"", message_id="m"), key=key)
        with pytest.raises(psycopg.errors.RaiseException, match="trigger"):
            admin.execute("SELECT reliablepub.enqueue('', 'q', 'x'::bytea)")
        admin.execute("DROP TRIGGER audit ON reliablepub.messages")
        outbox.enqueue(Message(b"", message_id="m"), key=key)
    assert message_ids(url) == ["m"]


# ---------------------------------------------------------------------------- on disk


@pytest.fixture
def hasty_server(postgres_server: PostgresServer) -> Iterator[Callable[[], None]]:
    """Turn ``synchronous_commit`` off in all sessions, those that are open too."""

    def run(statement: LiteralString) -> None:
        postgres_server.execute(statement)
        postgres_server.execute("SELECT pg_reload_conf()")

    yield lambda: run("ALTER SYSTEM SET synchronous_commit = off")
    postgres_server.recover()
    run("ALTER SYSTEM RESET synchronous_commit")


def test_a_message_is_on_disk_though_an_administrator_no_longer_waits_for_it(
    url: str, postgres_server: PostgresServer, hasty_server: Callable[[], None]
) -> None:
    """The connection was opened before; so was one that PgBouncer lends with another's ``SET``."""
    with Outbox(url) as outbox, closing(psycopg.connect(url, autocommit=True)) as other:
        outbox.enqueue(Message(b"", message_id="before"))
        hasty_server()
        until(lambda: other.execute("SHOW synchronous_commit").fetchone() == ("off",))
        for number in range(3):
            outbox.enqueue(
                Message(b"", message_id=str(number)), key=f"{number}" if number else None
            )
        postgres_server.kill()
        postgres_server.start()
        assert message_ids(url) == ["before", "0", "1", "2"]
