"""The message is part of the transaction of SQLAlchemy: its commit, its rollback."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.orm import Session

from reliablepub.message import Message
from reliablepub.outbox.outbox import Outbox
from tests.sqlite import count, sql


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    sql(path, "CREATE TABLE orders (id)")
    engine = create_engine(f"sqlite:///{path}")
    yield engine
    engine.dispose()


def driver(connection: Connection) -> sqlite3.Connection:
    found = connection.connection.driver_connection
    assert isinstance(found, sqlite3.Connection)
    return found


def both(path: Path) -> tuple[int, int]:
    """How many orders there are, and how many messages."""
    [(orders,)] = sql(path, "SELECT count(*) FROM orders")
    is_there = sql(path, "SELECT 1 FROM sqlite_schema WHERE name = 'reliablepub_messages'")
    return orders, count(path, "messages") if is_there else 0


@pytest.mark.parametrize("is_first", [True, False])
def test_it_is_part_of_sqlalchemys_transaction(
    path: Path, engine: Engine, *, is_first: bool
) -> None:
    for is_kept, expected in ((False, (0, 0)), (True, (1, 1)), (False, (1, 1)), (True, (2, 2))):
        with engine.connect() as connection:
            if is_first:
                Outbox(path).enqueue(Message(b""), connection=driver(connection))
            connection.execute(text("INSERT INTO orders VALUES (1)"))
            if not is_first:
                Outbox(path).enqueue(Message(b""), connection=driver(connection))
            if is_kept:
                connection.commit()
            else:
                connection.rollback()
        assert both(path) == expected


def test_it_is_part_of_a_session(path: Path, engine: Engine) -> None:
    with Session(engine) as session:
        session.execute(text("INSERT INTO orders VALUES (1)"))
        Outbox(path).enqueue(Message(b""), connection=driver(session.connection()))
        assert both(path) == (0, 0)
        session.commit()
        assert both(path) == (1, 1)
        session.execute(text("INSERT INTO orders VALUES (2)"))
        Outbox(path).enqueue(Message(b""), connection=driver(session.connection()))
    assert both(path) == (1, 1)
