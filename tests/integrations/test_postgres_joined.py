"""Messages that join transactions on PostgreSQL: of each library that passes its connection."""

import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from psycopg.rows import RowFactory, class_row, dict_row, namedtuple_row, scalar_row
from sqlalchemy import Engine, text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from reliablepub import Message, NotAnOutbox, Outbox
from reliablepub.integrations.sqlalchemy import SessionOutbox
from tests.integrations.engines import async_engine_of, engine_of
from tests.missing import needed

pytestmark = pytest.mark.postgres

DJANGO = """
import sys
import django
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict

url = sys.argv[1]
found = conninfo_to_dict(url)
names = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}
database = {name: found.get(theirs, "") for name, theirs in names.items()}
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql"} | database})
django.setup()
from django.db import connection, transaction
from reliablepub import Message, Outbox

outbox = Outbox(url)
with transaction.atomic():
    outbox.enqueue(Message(b"", message_id="kept"), connection=connection)
    sid = transaction.savepoint()
    outbox.enqueue(Message(b"", message_id="savepoint"), connection=connection)
    transaction.savepoint_rollback(sid)
try:
    with transaction.atomic():
        outbox.enqueue(Message(b"", message_id="rolled back"), connection=connection)
        raise KeyError
except KeyError:
    pass
"""


@pytest.fixture
def outbox(postgres_outbox: str) -> Iterator[Outbox]:
    with Outbox(postgres_outbox) as opened:
        yield opened


@pytest.fixture
def engine(postgres_outbox: str) -> Iterator[Engine]:
    made = engine_of(postgres_outbox)
    yield made
    made.dispose()


def message(message_id: str) -> Message:
    return Message(b"", message_id=message_id)


def stored(outbox: Outbox) -> list[object]:
    return [row["message_id"] for row in outbox.rows("open")]


def test_a_message_goes_with_psycopgs_transaction(outbox: Outbox, postgres_outbox: str) -> None:
    with psycopg.connect(postgres_outbox) as connection:
        outbox.enqueue(message("kept"), connection=connection)
        assert stored(outbox) == []
        connection.commit()
        outbox.enqueue(message("rolled back"), connection=connection)
        connection.rollback()
    assert stored(outbox) == ["kept"]


class Row:
    """A row of an application, which makes objects of all its rows."""

    def __init__(self, **columns: object) -> None:
        self.columns = columns


@pytest.mark.parametrize("factory", [dict_row, namedtuple_row, scalar_row, class_row(Row)])
def test_rows_may_be_objects_of_the_application(
    factory: RowFactory[Any], outbox: Outbox, postgres_outbox: str
) -> None:
    with psycopg.connect(postgres_outbox, row_factory=factory) as connection:
        assert outbox.enqueue(message("plain"), connection=connection) == "plain"
        assert outbox.enqueue(message("first"), key="k", connection=connection) == "first"
        assert outbox.enqueue(message("second"), key="k", connection=connection) == "first"
        assert outbox.cancel("k", connection=connection)
    assert stored(outbox) == ["plain"]


def test_a_message_goes_with_sqlalchemys_transaction_and_savepoint(
    outbox: Outbox, engine: Engine
) -> None:
    with Session(engine) as session:
        session.execute(text("SELECT 1"))
        outbox.enqueue(message("session"), connection=session)
        session.commit()
        outbox.enqueue(message("rolled back"), connection=session)
        session.rollback()
        savepoint = session.begin_nested()
        outbox.enqueue(message("savepoint"), connection=session)
        savepoint.rollback()
        outbox.enqueue(message("after it"), connection=session)
        session.commit()
    with engine.begin() as connection:
        outbox.enqueue(message("connection"), connection=connection)
    with Session(engine) as session, session.begin():
        SessionOutbox(outbox).enqueue(message("session outbox"), within=session)
    assert stored(outbox) == ["session", "after it", "connection", "session outbox"]


def test_many_messages_go_with_sqlalchemys_transaction(outbox: Outbox, engine: Engine) -> None:
    many = [message(f"{n}") for n in range(3)]
    with Session(engine) as session, session.begin():
        SessionOutbox(outbox).enqueue_many(many, within=session)
        assert stored(outbox) == []
    assert stored(outbox) == ["0", "1", "2"]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_many_messages_go_with_the_transaction_of_an_async_session(
    outbox: Outbox, postgres_outbox: str, driver: str
) -> None:
    engine = async_engine_of(postgres_outbox, driver)
    many = [message("plain"), Message(b"\0\xff", message_id="later", expires_in_s=60)]
    async with AsyncSession(engine) as session, session.begin():
        await SessionOutbox(outbox).enqueue_many_async(many, within=session)
    async with AsyncSession(engine) as session:
        await SessionOutbox(outbox).enqueue_many_async(many, within=session)
    await engine.dispose()
    assert stored(outbox) == ["plain", "later"]
    assert outbox.audit().is_right


@pytest.mark.parametrize("option", [{"stream_results": True}, {"yield_per": 100}])
def test_a_message_goes_with_a_connection_that_reads_large_results(
    outbox: Outbox, engine: Engine, option: dict[str, Any]
) -> None:
    """SQLAlchemy would run each statement in a cursor of the server, which changes no table."""
    with engine.connect().execution_options(**option) as connection:
        outbox.enqueue(message("plain"), connection=connection)
        for key in ("kept", "gone"):
            outbox.enqueue(message(key), key=key, connection=connection)
        assert outbox.cancel("gone", connection=connection)
        connection.commit()
    assert stored(outbox) == ["plain", "kept"]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_message_goes_with_an_asynchronous_session(
    driver: str, outbox: Outbox, postgres_outbox: str
) -> None:
    needed(driver)
    engine = async_engine_of(postgres_outbox, driver)
    async with AsyncSession(engine) as session:
        async with session.begin():
            await SessionOutbox(outbox).enqueue_async(message("kept"), within=session)
        await SessionOutbox(outbox).enqueue_async(message("rolled back"), within=session)
        await session.rollback()
    await engine.dispose()
    assert stored(outbox) == ["kept"]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_message_is_cancelled_in_an_asynchronous_session(
    driver: str, outbox: Outbox, postgres_outbox: str
) -> None:
    needed(driver)
    of_sessions = SessionOutbox(outbox)
    for key in ("a", "b", "c"):
        outbox.enqueue(message(key), key=key)
    engine = async_engine_of(postgres_outbox, driver)
    async with AsyncSession(engine) as session:
        async with session.begin():
            assert await session.run_sync(lambda sync: of_sessions.cancel("a", within=sync))
            with of_sessions.joined(session):
                when = datetime(2038, 1, 19, tzinfo=UTC)
                assert await session.run_sync(lambda _: of_sessions.reschedule("c", when))
        assert await session.run_sync(lambda sync: of_sessions.cancel("b", within=sync))
        await session.rollback()
    await engine.dispose()
    assert stored(outbox) == ["b", "c"]
    assert outbox.audit().is_right


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_an_outbox_is_created_in_an_asynchronous_transaction(
    driver: str, postgres_url: str
) -> None:
    needed(driver)
    outbox = SessionOutbox(Outbox(postgres_url))
    engine = async_engine_of(postgres_url, driver)
    async with engine.connect() as connection:
        await connection.run_sync(outbox.create)
        await connection.rollback()
    with pytest.raises(NotAnOutbox):
        outbox.outbox.status()
    async with engine.begin() as connection:
        await connection.run_sync(outbox.create)
    await engine.dispose()
    assert outbox.outbox.status().stored == 0


@pytest.mark.parametrize("key", [None, "k"])
def test_no_error_of_sqlalchemy_shows_a_body_or_a_header(
    postgres_url: str, key: str | None
) -> None:
    engine, outbox = engine_of(postgres_url), Outbox(postgres_url)  # there is no outbox
    secret = Message(b"hush in the body", headers={"token": "hush in a header"})
    try:
        with Session(engine) as session, pytest.raises(ProgrammingError) as caught:
            outbox.enqueue(secret, key=key, connection=session)
    finally:
        engine.dispose()
    told = "".join(traceback.format_exception(caught.value))
    assert "reliablepub" in told
    assert "hush" not in told
    assert "hush" not in str(pickle.loads(pickle.dumps(caught.value)))


def test_a_message_goes_with_djangos_transaction_and_savepoint(
    outbox: Outbox, postgres_outbox: str
) -> None:
    subprocess.run([sys.executable, "-c", DJANGO, postgres_outbox], check=True, timeout=60)
    assert stored(outbox) == ["kept"]
