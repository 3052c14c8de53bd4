"""Real files in a temporary directory; what the tests of the outbox share."""

import os
import sqlite3
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from reliablepub.message import Message
from reliablepub.outbox.entry import Entry, Store
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.testing import FakeBroker
from tests.asking import connect, opened, sql
from tests.outbox.shim import Shim, shim
from tests.stores import STORES, open_store, outbox_of

if TYPE_CHECKING:  # other tests do without
    import psycopg

    from reliablepub.outbox.postgres.store import PostgresStore

Make = Callable[..., Entry]
"""Makes an entry; its arguments are fields of the message."""
DAY_S = 86_400.0
TABLES = ("messages", "parked", "attempts", "in_flight", "ledger", "sources")


class Clock:
    """A wall clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path)
    yield store
    store.close()


@pytest.fixture
def url(postgres_outbox: str) -> str:
    """The outbox of a test that is about PostgreSQL."""
    return postgres_outbox


@pytest.fixture
def own(url: str) -> Iterator["PostgresStore"]:
    """The relay's store in that outbox."""
    with opened(url) as store:
        yield cast("PostgresStore", store)


@pytest.fixture
def admin(url: str) -> Iterator["psycopg.Connection"]:
    """A connection of an operator's, each of whose statements is a transaction."""
    with closing(connect(url)) as connection:
        connection.autocommit = True
        yield connection


@pytest.fixture
def app(path: Path) -> Iterator[sqlite3.Connection]:
    """The application's own connection to the file, with a table of its own."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER)")
        yield connection


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    """It has a queue ``orders``."""
    with FakeBroker() as broker:
        broker.declare_queue("orders")
        yield broker


def bodies(broker: FakeBroker) -> list[str]:
    """What is in that queue."""
    return [message.body.decode() for message in broker.messages("orders")]


@pytest.fixture(params=STORES)
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    store = open_store(outbox_of(request.param, request, tmp_path))
    yield store
    store.close()


@pytest.fixture
def entry() -> Make:
    """Make entries with bodies and ids of their own."""
    count = 0

    def make(**changes: Any) -> Entry:
        nonlocal count
        count += 1
        fields: dict[str, Any] = {
            "body": b"body %d" % count,
            "exchange": "orders",
            "routing_key": "created",
            "message_id": f"m-{count}",
        }
        return Entry(Message(**(fields | changes)), stored_at=1000.0 + count)

    return make


def deleting(monkeypatch: pytest.MonkeyPatch, *, for_s: float) -> None:
    """Have a relay delete old rows for so long at each look, and ten at once."""
    for module in ("sqlite.retention", "postgres.retention"):
        monkeypatch.setattr(f"reliablepub.outbox.{module}.PRUNED_MIN", 10)
    for module in ("sqlite.retention", "postgres.store"):
        monkeypatch.setattr(f"reliablepub.outbox.{module}.DELETING_S", for_s)


@pytest.fixture
def attentive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay that looks for old rows at each turn."""
    for module in ("sqlite.retention", "postgres.retention"):
        monkeypatch.setattr(f"reliablepub.outbox.{module}.LOOK_S", 0.0)


@pytest.fixture
def busy(attentive: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay that looks for old rows at each turn, two of them."""
    monkeypatch.setattr("reliablepub.outbox.history.PASS_S", 0.0)
    monkeypatch.setattr("reliablepub.outbox.history.PAGE", 2)


@pytest.fixture
def impatient(attentive: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay that looks at each turn, and deletes ten old rows."""
    deleting(monkeypatch, for_s=0.0)


@pytest.fixture
def rows() -> Callable[[Path], dict[str, list[tuple[Any, ...]]]]:
    """Read all tables but ``runs``, by plain SQLite."""

    def read(path: Path) -> dict[str, list[tuple[Any, ...]]]:
        return {t: sql(path, f"SELECT * FROM reliablepub.{t} ORDER BY 1, 2") for t in TABLES}

    return read


@pytest.fixture
def files() -> Iterator[Shim]:
    """What the files below a test do, which may fail."""
    with shim() as control:
        yield control


@pytest.fixture
def child() -> Callable[[Callable[[], None]], int]:
    """Run a function in a forked child; its exit status, negative for a signal."""

    def run(work: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                work()
                os._exit(0)
            except BaseException:  # noqa: BLE001 - the parent must not go on twice
                traceback.print_exc()
                os._exit(70)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)

    return run
