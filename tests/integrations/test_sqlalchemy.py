"""Messages leave with the commit of a SQLAlchemy session, and go with its rollback."""

import asyncio
import sqlite3
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, suppress
from contextvars import ContextVar, copy_context
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import AsyncAdaptedQueuePool, Engine, create_engine, event, text
from sqlalchemy.exc import MissingGreenlet
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    scoped_session,
    sessionmaker,
)

from reliablepub import ConfigurationError, Message, NotAnOutbox, Outbox, ScheduleChange, Status
from reliablepub.integrations.sqlalchemy import SessionOutbox, immediate_transactions, include_name
from tests.amqp_probe import AmqpProbe


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def outbox(path: Path) -> SessionOutbox:
    return SessionOutbox(Outbox(path))


@pytest.fixture(params=["sqlite3's transactions", "immediate transactions"])
def engine(request: pytest.FixtureRequest, path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{path}")
    if request.param == "immediate transactions":
        immediate_transactions(engine)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def both(path: Path) -> tuple[list[int], list[bytes]]:
    """The ids of the orders, and the bodies of the messages."""
    with closing(sqlite3.connect(path)) as connection:
        orders = [id_ for (id_,) in connection.execute("SELECT id FROM orders ORDER BY id")]
        query = "SELECT count(*) FROM sqlite_schema WHERE name = 'reliablepub_messages'"
        if not connection.execute(query).fetchone()[0]:
            return orders, []
        query = "SELECT body FROM reliablepub_messages ORDER BY id"
        return orders, [body for (body,) in connection.execute(query)]


def place(session: Session | scoped_session[Session], outbox: SessionOutbox, number: int) -> None:
    session.add(Order(id=number))
    outbox.enqueue(Message(b"%d" % number), within=session)


def test_a_message_leaves_with_the_commit_and_goes_with_the_rollback(
    path: Path, engine: Engine, outbox: SessionOutbox
) -> None:
    with Session(engine) as session:
        place(session, outbox, 1)
        assert both(path) == ([], [])
        session.commit()
        assert both(path) == ([1], [b"1"])
        place(session, outbox, 2)
        session.rollback()
        place(session, outbox, 3)
        session.commit()
        place(session, outbox, 4)
    assert both(path) == ([1, 3], [b"1", b"3"])
    with suppress(KeyError), Session(engine) as session, session.begin():
        place(session, outbox, 5)
        raise KeyError
    assert both(path) == ([1, 3], [b"1", b"3"])
    assert outbox.outbox.audit().is_right


def test_a_connection_and_a_scoped_session_will_do(
    path: Path, engine: Engine, outbox: SessionOutbox
) -> None:
    sessions = scoped_session(sessionmaker(engine))
    place(sessions, outbox, 1)
    sessions.commit()
    sessions.remove()
    with engine.begin() as connection:
        outbox.enqueue(Message(b"2"), within=connection, key="two")
        outbox.enqueue(Message(b"again"), within=connection, key="two")
    with engine.connect() as connection:
        outbox.enqueue(Message(b"3"), within=connection)
    assert both(path) == ([1], [b"1", b"2"])


def test_many_messages_go_with_the_transaction(
    path: Path, engine: Engine, outbox: SessionOutbox
) -> None:
    many = [Message(b"%d" % number) for number in range(3)]
    with Session(engine) as session:
        outbox.enqueue_many(many, within=session)
        session.rollback()
        with outbox.joined(session):
            ids = outbox.enqueue_many(many)
        assert both(path) == ([], [])
        session.commit()
    assert len(ids) == 3
    assert outbox.enqueue_many(many)  # stored at once
    assert both(path) == ([], [b"0", b"1", b"2"] * 2)


def test_savepoints_keep_and_drop_their_messages(path: Path, outbox: SessionOutbox) -> None:
    engine = create_engine(f"sqlite:///{path}")
    immediate_transactions(engine)
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        with session.begin_nested():
            place(session, outbox, 1)
        with suppress(KeyError), session.begin_nested():
            place(session, outbox, 2)
            raise KeyError
        with session.begin_nested():
            place(session, outbox, 3)
            with suppress(KeyError), session.begin_nested():
                place(session, outbox, 4)
                raise KeyError
        session.commit()
        assert both(path) == ([1, 3], [b"1", b"3"])
        with session.begin_nested():
            place(session, outbox, 5)
        session.rollback()
    engine.dispose()
    assert both(path) == ([1, 3], [b"1", b"3"])


@pytest.mark.parametrize("given", [{}, {"isolation_level": None}], ids=str)
def test_a_savepoint_that_would_outlive_its_transaction_is_refused(
    given: dict[str, Any], path: Path, outbox: SessionOutbox
) -> None:
    engine = create_engine(f"sqlite:///{path}", connect_args=given)
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        with session.begin_nested():
            session.execute(text("INSERT INTO orders VALUES (1)"))
            with pytest.raises(ConfigurationError, match="immediate_transactions"):
                outbox.enqueue(Message(b"1"), within=session)
        session.rollback()
    engine.dispose()
    assert both(path) == ([1], [])  # what sqlite3 does, and why no message may be there


NEW_CONTROL = pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 of Python 3.12")


@pytest.mark.parametrize("is_async", [False, True], ids=["pysqlite", "aiosqlite"])
@pytest.mark.parametrize(
    "given",
    [{"isolation_level": None}, pytest.param({"autocommit": True}, marks=NEW_CONTROL)],
    ids=str,
)
def test_a_driver_that_commits_by_itself_is_refused(
    given: dict[str, Any], path: Path, outbox: SessionOutbox, *, is_async: bool
) -> None:
    """SQLAlchemy's rollback would keep the message."""
    outbox.outbox.create()

    async def send() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}", connect_args=given)
        async with AsyncSession(engine) as session:
            with pytest.raises(ConfigurationError, match="autocommit mode"):
                await outbox.enqueue_async(Message(b"1"), within=session)
            await session.rollback()
        await engine.dispose()

    if is_async:
        asyncio.run(send())
    else:
        engine = create_engine(f"sqlite:///{path}", connect_args=given)
        with Session(engine) as session:
            with pytest.raises(ConfigurationError, match="autocommit mode"):
                outbox.enqueue(Message(b"1"), within=session)
            session.rollback()
        engine.dispose()
    assert outbox.outbox.status().stored == 0


def test_a_begin_of_the_application_will_do(path: Path, outbox: SessionOutbox) -> None:
    engine = create_engine(f"sqlite:///{path}", connect_args={"isolation_level": None})
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    with Session(engine) as session:
        with session.begin_nested():
            outbox.enqueue(Message(b"1"), within=session)
        session.rollback()
        outbox.enqueue(Message(b"2", message_id="kept"), within=session)
        session.commit()
    engine.dispose()
    assert [row["message_id"] for row in outbox.outbox.rows("open")] == ["kept"]


@NEW_CONTROL
@pytest.mark.parametrize("autocommit", [True, False])
def test_immediate_transactions_need_a_driver_that_commits_them(
    path: Path, *, autocommit: bool
) -> None:
    """With autocommit, `commit` of sqlite3 would do nothing, and nothing would be stored."""
    engine = create_engine(f"sqlite:///{path}", connect_args={"autocommit": autocommit})
    immediate_transactions(engine)
    with pytest.raises(ConfigurationError, match="autocommit"):
        Base.metadata.create_all(engine)
    engine.dispose()


def test_code_that_knows_no_session_joins_it(
    path: Path, engine: Engine, outbox: SessionOutbox
) -> None:
    other = SessionOutbox(Outbox(path.with_name("other.db")))
    with Session(engine) as session:
        with outbox.joined(session):
            outbox.enqueue(Message(b"1"))
            other.enqueue(Message(b"elsewhere"))
        assert both(path) == ([], [])
        session.commit()
        assert both(path) == ([], [b"1"])
        with outbox.joined(session):
            outbox.enqueue(Message(b"2"))
        session.rollback()
    outbox.enqueue(Message(b"3"))
    assert both(path) == ([], [b"1", b"3"])
    assert other.outbox.status().stored == 1


@pytest.mark.parametrize("when", ["twice", "late", "after AUTOCOMMIT"])
def test_immediate_transactions_hold_for_each_transaction(
    when: str, path: Path, outbox: SessionOutbox
) -> None:
    engine = create_engine(f"sqlite:///{path}", pool_size=1, max_overflow=0)
    if when == "late":
        Base.metadata.create_all(engine)
    immediate_transactions(engine)
    if when == "twice":
        immediate_transactions(engine)
    if when == "after AUTOCOMMIT":
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("SELECT 1"))
    with Session(engine) as session:
        with session.begin_nested():
            outbox.enqueue(Message(b"rolled back"), within=session)
        session.rollback()
        with session.begin_nested():
            outbox.enqueue(Message(b"", message_id="kept"), within=session)
        session.commit()
    engine.dispose()
    assert [row["message_id"] for row in outbox.outbox.rows("open")] == ["kept"]


@pytest.mark.parametrize("of", ["connection", "engine", "create_engine"])
def test_what_is_written_in_autocommit_stays(of: str, path: Path, outbox: SessionOutbox) -> None:
    level: Any = {"isolation_level": "AUTOCOMMIT"}
    engine = create_engine(f"sqlite:///{path}", **(level if of == "create_engine" else {}))
    immediate_transactions(engine)
    Base.metadata.create_all(engine)
    if of == "engine":
        engine = engine.execution_options(**level)
    with engine.connect() as connection:
        if of == "connection":
            connection.execution_options(**level)
        connection.execute(text("INSERT INTO orders VALUES (1)"))
        outbox.enqueue(Message(b"1"), within=connection)
    with engine.connect().execution_options(**level) as connection:
        connection.execute(text("VACUUM"))
    engine.dispose()
    assert both(path) == ([1], [b"1"])


def test_a_block_in_a_generator_whose_steps_run_in_other_contexts_is_reported(
    path: Path, engine: Engine, outbox: SessionOutbox
) -> None:
    """FastAPI runs a dependency so that is not `async`; the endpoint does not see the block."""

    def dependency() -> Iterator[Session]:
        with Session(engine) as session, session.begin(), outbox.joined(session):
            yield session

    steps = dependency()
    copy_context().run(next, steps)
    with pytest.raises(ConfigurationError, match="async def"):
        copy_context().run(next, steps)


def test_another_database_is_refused(engine: Engine, path: Path) -> None:
    other = SessionOutbox(Outbox(path.with_name("other.db")))
    with Session(engine) as session, pytest.raises(ConfigurationError, match=r"other\.db"):
        other.enqueue(Message(b""), within=session)


def test_the_messages_arrive(
    path: Path, engine: Engine, broker: AmqpProbe, relayed: Callable[[], Status]
) -> None:
    outbox = SessionOutbox(Outbox(path))
    queue = broker.declare_queue()
    for number in range(20):
        with Session(engine) as session:
            session.add(Order(id=number))
            outbox.enqueue(Message(b"%d" % number, routing_key=queue), within=session)
            if number % 3:
                session.commit()
    assert relayed().open == 0
    assert sorted(int(body) for body, _ in broker.drain(queue, 13)) == both(path)[0]


# ---------------------------------------------------------------------------------------- asyncio


def run(path: Path, work: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
        immediate_transactions(engine)
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        try:
            await work(engine)
        finally:
            await engine.dispose()

    asyncio.run(main())


def test_an_async_session_commits_and_rolls_back(path: Path, outbox: SessionOutbox) -> None:
    async def work(engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session:
            session.add(Order(id=1))
            await outbox.enqueue_async(Message(b"1"), within=session, key="one")
            assert both(path) == ([], [])
            await session.commit()
            session.add(Order(id=2))
            await outbox.enqueue_async(Message(b"2"), within=session)
            await session.rollback()
            with suppress(KeyError):
                async with session.begin_nested():
                    await outbox.enqueue_async(Message(b"3"), within=session)
                    raise KeyError
            async with session.begin_nested():
                await outbox.enqueue_async(Message(b"4"), within=session)
            await session.commit()
        async with engine.begin() as connection:
            await outbox.enqueue_async(Message(b"5"), within=connection)
        await outbox.enqueue_async(Message(b"6"))

    run(path, work)
    assert both(path) == ([1], [b"1", b"4", b"5", b"6"])
    assert outbox.outbox.audit().is_right


def test_a_message_is_cancelled_with_the_commit(path: Path, outbox: SessionOutbox) -> None:
    when = datetime(2038, 1, 19, tzinfo=UTC)
    for key in ("a", "b", "c"):
        outbox.enqueue(Message(key.encode(), not_before=when), key=key)

    async def work(engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session:
            assert await session.run_sync(lambda sync: outbox.cancel("a", within=sync))
            await session.commit()
            assert await session.run_sync(lambda sync: outbox.cancel("b", within=sync))
            await session.rollback()

    run(path, work)
    assert outbox.cancel("a") is ScheduleChange.UNKNOWN
    assert outbox.reschedule("c", datetime(2030, 1, 1, tzinfo=UTC), note="sooner")
    assert both(path) == ([], [b"b", b"c"])
    assert outbox.outbox.audit().is_right


def test_code_that_knows_no_async_session_joins_it(path: Path, outbox: SessionOutbox) -> None:
    async def work(engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session:
            with outbox.joined(session):
                await outbox.enqueue_async(Message(b"1"))
                await session.run_sync(lambda _: outbox.enqueue(Message(b"2")))
                with pytest.raises(MissingGreenlet):  # SQLAlchemy says what is missing
                    outbox.enqueue(Message(b"3"))
            await session.commit()
        async with engine.begin() as connection:
            with outbox.joined(connection):
                await connection.run_sync(lambda _: outbox.enqueue(Message(b"4")))
        other = create_engine(f"sqlite:///{path}")
        with Session(other) as plain:
            await outbox.enqueue_async(Message(b"5"), within=plain)
            plain.rollback()
        other.dispose()

    run(path, work)
    assert both(path) == ([], [b"1", b"2", b"4"])


def test_hooks_run_in_the_context_of_a_coroutine(path: Path) -> None:
    """Though a thread of aiosqlite stores the message, or another one: there is its trace."""
    caller: ContextVar[str] = ContextVar("caller", default="nobody")
    seen: list[str] = []

    class Stamp:
        def stamp(self, message: Message) -> Message:
            seen.append(caller.get())
            return message

    outbox = SessionOutbox(Outbox(path, hooks=[Stamp()]))

    async def work(engine: AsyncEngine) -> None:
        caller.set("order 17")
        async with AsyncSession(engine) as session, session.begin():
            await outbox.enqueue_async(Message(b"1"), within=session)
            with outbox.joined(session):
                await session.run_sync(lambda _: outbox.enqueue(Message(b"2")))
        await outbox.enqueue_async(Message(b"3"))

    run(path, work)
    assert seen == ["order 17"] * 3
    assert both(path) == ([], [b"1", b"2", b"3"])


def test_a_connection_that_has_not_started_is_refused(path: Path, outbox: SessionOutbox) -> None:
    async def work(engine: AsyncEngine) -> None:
        connection = engine.connect()  # without await
        with outbox.joined(connection), pytest.raises(ConfigurationError, match="await"):
            outbox.enqueue(Message(b"1"))

    run(path, work)
    assert both(path) == ([], [])


def test_a_task_that_outlives_the_block_has_its_message_stored_at_once(
    path: Path, outbox: SessionOutbox
) -> None:
    async def work(engine: AsyncEngine) -> None:
        has_joined, is_committed = asyncio.Event(), asyncio.Event()

        async def later() -> None:
            await outbox.enqueue_async(Message(b"1"))
            has_joined.set()
            await is_committed.wait()
            await outbox.enqueue_async(Message(b"2"))

        async with AsyncSession(engine) as session:
            with outbox.joined(session):
                task = asyncio.create_task(later())
                await has_joined.wait()
            assert both(path) == ([], [])
            await session.commit()
            is_committed.set()
            await task
            await session.rollback()

    run(path, work)
    assert both(path) == ([], [b"1", b"2"])


def test_a_task_of_a_block_that_has_ended_joins_the_block_around_it(
    path: Path, outbox: SessionOutbox
) -> None:
    async def work(engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as outer, AsyncSession(engine) as inner:
            with outbox.joined(outer):
                with outbox.joined(inner):
                    task = asyncio.create_task(outbox.enqueue_async(Message(b"1")))
                await task
            assert both(path) == ([], [])
            await outer.commit()

    run(path, work)
    assert both(path) == ([], [b"1"])


def test_a_registry_gives_the_session_of_the_caller(path: Path, outbox: SessionOutbox) -> None:
    """Not that of the thread in which a message is stored."""
    sessions = scoped_session(sessionmaker(create_engine(f"sqlite:///{path}")))

    async def work(engine: AsyncEngine) -> None:
        await outbox.enqueue_async(Message(b"1"), within=sessions)
        sessions.commit()
        with outbox.joined(sessions):
            await outbox.enqueue_async(Message(b"2"))
        sessions.rollback()
        sessions.get_bind().dispose()  # type: ignore[union-attr]
        sessions.remove()
        registry = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
        await outbox.enqueue_async(Message(b"3"), within=registry)
        await registry.commit()
        with outbox.joined(registry):
            await outbox.enqueue_async(Message(b"4"))
            session = registry()
            await session.run_sync(lambda _: outbox.enqueue(Message(b"5")))
        await registry.rollback()
        await registry.remove()

    run(path, work)
    assert both(path) == ([], [b"1", b"3"])


@pytest.mark.parametrize("kind", ["a thread", "aiosqlite"])
def test_a_message_whose_caller_is_cancelled_is_rolled_back(
    kind: str, path: Path, outbox: SessionOutbox
) -> None:
    """Also if it is about to be stored: it must not become part of another transaction."""
    outbox.outbox.create()
    plain = create_engine(f"sqlite:///{path}", pool_size=1, max_overflow=0)
    Base.metadata.create_all(plain)

    async def main() -> None:
        pool: Any = {"poolclass": AsyncAdaptedQueuePool, "pool_size": 1, "max_overflow": 0}
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}", **pool)

        async def enqueue() -> None:
            if kind == "aiosqlite":
                async with AsyncSession(engine) as session:
                    await outbox.enqueue_async(Message(b"1"), within=session)
            else:
                with Session(plain) as session:
                    await outbox.enqueue_async(Message(b"1"), within=session)

        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            task = asyncio.create_task(enqueue())
            await asyncio.sleep(0.2)
            task.cancel()
            await asyncio.sleep(0.2)
            task.cancel()
            await asyncio.sleep(0.2)
            other.execute("ROLLBACK")
        with pytest.raises(asyncio.CancelledError):
            await task
        if kind == "aiosqlite":
            async with AsyncSession(engine) as session, session.begin():
                session.add(Order(id=1))
        else:
            with Session(plain) as plain_session, plain_session.begin():
                plain_session.add(Order(id=1))
        await engine.dispose()

    asyncio.run(main())
    plain.dispose()
    assert both(path) == ([1], [])


def test_many_tasks_share_an_engine(path: Path, outbox: SessionOutbox) -> None:
    async def work(engine: AsyncEngine) -> None:
        async def one(number: int) -> None:
            async with AsyncSession(engine) as session:
                session.add(Order(id=number))
                await outbox.enqueue_async(Message(b"%d" % number), within=session)
                if number % 2:
                    await session.commit()

        async with asyncio.TaskGroup() as tasks:
            for number in range(20):
                tasks.create_task(one(number))

    run(path, work)
    orders, messages = both(path)
    assert orders == list(range(1, 20, 2))
    assert sorted(map(int, messages)) == orders


# ------------------------------------------------------------------------------------- migrations


def test_a_migration_creates_the_outbox_and_alembic_leaves_it_alone(
    path: Path, engine: Engine, outbox: SessionOutbox
) -> None:
    with engine.connect() as connection:
        outbox.create(connection)
        connection.rollback()
        with pytest.raises(NotAnOutbox):
            outbox.outbox.status()
    with engine.begin() as connection:
        outbox.create(connection)
        outbox.create(connection)  # there already
        assert outbox.outbox.path == path
    assert outbox.outbox.status().stored == 0
    with engine.connect() as connection:
        careless = MigrationContext.configure(connection)
        assert compare_metadata(careless, Base.metadata), "it would drop our tables"
        careful = MigrationContext.configure(connection, opts={"include_name": include_name})
        assert compare_metadata(careful, Base.metadata) == []


def test_create_all_creates_it_too(path: Path, outbox: SessionOutbox) -> None:
    class Own(DeclarativeBase):
        pass

    @event.listens_for(Own.metadata, "after_create")
    def _created(_target: object, connection: object, **_: object) -> None:
        outbox.create(connection)  # type: ignore[arg-type]

    engine = create_engine(f"sqlite:///{path}")
    Own.metadata.create_all(engine)
    engine.dispose()
    assert outbox.outbox.status().stored == 0


def test_an_outbox_is_created_on_its_own(path: Path) -> None:
    Outbox(path).create()
    Outbox(path).create()
    assert Outbox(path).status().stored == 0


def test_names_of_the_application_stay() -> None:
    assert include_name("orders", "table", {})
    assert include_name(None, "schema", {})
    assert include_name("reliablepub_id", "column", {})
    assert not include_name("reliablepub", "schema", {})
