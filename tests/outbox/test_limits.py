"""Limits of processes that only enqueue: all open messages count, also those of other processes."""

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Literal

import pytest

from reliablepub.errors import ConfigurationError, NotAnOutbox, OutboxFull
from reliablepub.message import Message
from reliablepub.outbox.entry import Changes
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite.store import SqliteStore

SIZE = Message(b"x", message_id="m-1").size


@pytest.fixture
def app(path: Path) -> Iterator[sqlite3.Connection]:
    """The application's own database, with a table of its own and one message in its outbox."""
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE orders (id INTEGER)")
        Outbox(path).enqueue(message(1), connection=db)
        db.commit()
        yield db


def message(n: int) -> Message:
    return Message(b"x", message_id=f"m-{n}")


def confirm_one(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(confirmed=store.read_ready(1, 10**9, limit=1, bytes_max=10**9)[0]))


def test_no_more_messages_are_open_than_may_be(path: Path) -> None:
    with Outbox(path, open_messages_max=2) as outbox, Outbox(path) as another:
        outbox.enqueue(message(1))
        another.enqueue(message(2))
        with pytest.raises(
            OutboxFull, match=r"m-3 was not stored: .* 2 open messages, and open_messages_max is 2"
        ):
            outbox.enqueue(message(3))
        assert (outbox.status().stored, outbox.status().open) == (2, 2)
        confirm_one(path)
        outbox.enqueue(message(3))
        another.enqueue(message(4))  # who has no limit knows none
        assert outbox.status().open == 3
        assert outbox.audit().is_right


def test_no_more_bytes_are_open_than_may_be(path: Path) -> None:
    with Outbox(path, open_bytes_max=2 * SIZE) as outbox:
        outbox.enqueue(message(1))
        wide = Message(b"xx", message_id="m-2")
        with pytest.raises(OutboxFull, match=f"holds {SIZE} bytes .* open_bytes_max is {2 * SIZE}"):
            outbox.enqueue(wide)
        outbox.enqueue(message(2))  # it fits to the byte
        confirm_one(path)
        confirm_one(path)
        outbox.enqueue(wide)
        with pytest.raises(
            OutboxFull, match=f"cannot take a message of {SIZE + 1000} bytes"
        ) as never:
            outbox.enqueue(Message(b"x" * 1001, message_id="m-3"))
        assert not never.value.retryable
        assert outbox.status().open == 1
        assert outbox.audit().is_right


def test_a_message_as_large_as_the_limit_fits_alone(path: Path) -> None:
    with Outbox(path, open_bytes_max=SIZE) as outbox:
        assert outbox.enqueue(message(1)) == "m-1"


def test_a_full_outbox_spares_the_rest_of_the_callers_transaction(
    path: Path, app: sqlite3.Connection
) -> None:
    outbox = Outbox(path, open_messages_max=2)
    with app:
        app.execute("INSERT INTO orders VALUES (1)")
        outbox.enqueue(message(2), connection=app)  # not committed, and yet it counts
        with pytest.raises(OutboxFull) as error:
            outbox.enqueue(message(3), connection=app)
        assert "rolled back" not in str(error.value)
        app.execute("INSERT INTO orders VALUES (2)")
    assert app.execute("SELECT id FROM orders").fetchall() == [(1,), (2,)]
    assert outbox.status().stored == 2


@pytest.mark.parametrize("isolation_level", ["DEFERRED", None])
def test_a_refusal_leaves_no_transaction_that_keeps_the_relay_out(
    path: Path, app: sqlite3.Connection, isolation_level: Literal["DEFERRED"] | None
) -> None:
    app.isolation_level = isolation_level
    with pytest.raises(OutboxFull):
        Outbox(path, open_messages_max=1).enqueue(message(2), connection=app)
    assert not app.in_transaction
    confirm_one(path)
    assert Outbox(path).status().open == 0


@pytest.mark.parametrize("count", [0, 1])
def test_a_refused_first_message_adds_no_outbox(path: Path, count: int) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE orders (id INTEGER)")
        for _ in range(count):
            db.execute("INSERT INTO orders VALUES (1)")
        assert db.in_transaction is (count > 0)
        with pytest.raises(OutboxFull):
            Outbox(path, open_bytes_max=1).enqueue(message(1), connection=db)
        assert db.execute("SELECT name FROM sqlite_schema").fetchall() == [("orders",)]
        assert db.execute("SELECT id FROM orders").fetchall() == [(1,)] * count
    with pytest.raises(NotAnOutbox):
        Outbox(path).status()


def test_a_key_that_is_there_needs_no_room(path: Path) -> None:
    with Outbox(path, open_messages_max=1) as outbox:
        outbox.enqueue(message(1), key="order 1")
        assert outbox.enqueue(message(2), key="order 1") == "m-1"
        with pytest.raises(OutboxFull):
            outbox.enqueue(message(2), key="order 2")
        confirm_one(path)
        assert outbox.enqueue(message(2), key="order 2") == "m-2"  # the refusal took no key


def test_those_who_come_at_once_get_no_more_in(path: Path) -> None:
    def enqueue(first: int) -> int:
        stored = 0
        with Outbox(path, open_messages_max=25) as outbox:
            for n in range(first, first + 10):
                try:
                    outbox.enqueue(message(n))
                except OutboxFull:
                    continue
                stored += 1
        return stored

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(enqueue, range(0, 40, 10))) == 25
    assert Outbox(path).status().open == 25


@pytest.mark.parametrize("limits", [{"open_messages_max": 0}, {"open_bytes_max": 0}])
def test_a_limit_that_lets_nothing_in_is_a_mistake(path: Path, limits: dict[str, int]) -> None:
    names = "^open_messages_max and open_bytes_max must be whole numbers, at least 1$"
    with pytest.raises(ConfigurationError, match=names):
        Outbox(path, **limits)  # type: ignore[arg-type]
