"""The message is part of the transaction of SQLAlchemy or Django: their commit, their rollback."""

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.orm import Session

from reliablepub.message import Message
from reliablepub.outbox.outbox import Outbox


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (id)")
    engine = create_engine(f"sqlite:///{path}")
    yield engine
    engine.dispose()


def driver(connection: Connection) -> sqlite3.Connection:
    found = connection.connection.driver_connection
    assert isinstance(found, sqlite3.Connection)
    return found


def both(path: Path) -> tuple[int, int]:
    """How many orders there are, and how many messages."""
    with closing(sqlite3.connect(path)) as connection:
        (orders,) = connection.execute("SELECT count(*) FROM orders").fetchone()
        query = "SELECT count(*) FROM sqlite_schema WHERE name = 'reliablepub_messages'"
        if not connection.execute(query).fetchone()[0]:
            return orders, 0
        (messages,) = connection.execute("SELECT count(*) FROM reliablepub_messages").fetchone()
        return orders, messages


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


DJANGO = """
import sys
from pathlib import Path
import django
from django.conf import settings
path = Path(sys.argv[1])
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": path}})
django.setup()
from django.db import connection, transaction
from reliablepub import Message, Outbox
outbox = Outbox(path)
def order():
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO orders VALUES (%s)", [1])
    outbox.enqueue(Message(b""), connection=connection.connection)
def counts():
    with connection.cursor() as cursor:
        orders = cursor.execute("SELECT count(*) FROM orders").fetchone()[0]
    return orders, outbox.status().stored
with connection.cursor() as cursor:
    cursor.execute("CREATE TABLE orders (id)")
order()  # in autocommit mode each is stored at once
assert counts() == (1, 1), counts()
with transaction.atomic():
    order()
assert counts() == (2, 2), counts()
try:
    with transaction.atomic():
        order()
        raise KeyError
except KeyError:
    pass
assert counts() == (2, 2), counts()
with transaction.atomic():  # an inner block is a savepoint
    order()
    try:
        with transaction.atomic():
            order()
            raise KeyError
    except KeyError:
        pass
assert counts() == (3, 3), counts()
assert outbox.audit().is_right
print("done")
"""


def test_it_is_part_of_djangos_transaction(path: Path) -> None:
    """In a process of its own: Django is configured once and for all."""
    command = [sys.executable, "-W", "error", "-c", DJANGO, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")
