"""The tables of an outbox: how they are created, and in which databases they are refused."""

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from reliablepub.errors import NotAnOutbox, OutboxError
from reliablepub.message import Message
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite import connections
from reliablepub.outbox.sqlite.checkup import check_up
from reliablepub.outbox.sqlite.connections import OLDEST, VERSION, add_outbox, holds_outbox
from reliablepub.outbox.sqlite.sql import schema as statements_of_schema
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outbox.sqlite.transactions import transaction
from tests.sqlite import sql

PATH = Path("here.db")


@pytest.fixture
def empty() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        yield connection


def schema(connection: sqlite3.Connection) -> set[tuple[str, str, str]]:
    rows = connection.execute("SELECT type, name, coalesce(sql, '') FROM sqlite_schema")
    return {(kind, name, " ".join(re.findall(r"[\w']+|[^\w\s]", sql))) for kind, name, sql in rows}


def versions(connection: sqlite3.Connection) -> list[int]:
    rows = connection.execute("SELECT version FROM reliablepub_schema ORDER BY 1")
    return [version for (version,) in rows]


def test_an_outbox_is_added_once_and_says_its_version(empty: sqlite3.Connection) -> None:
    for is_done in (False, True):
        with transaction(empty, PATH):
            assert holds_outbox(empty.cursor(), PATH) is is_done
            add_outbox(empty.cursor(), PATH)
        assert versions(empty) == [VERSION]


def test_an_outbox_joins_the_tables_of_an_application(path: Path) -> None:
    with closing(sqlite3.connect(path)) as app:
        app.execute("CREATE TABLE orders (id INTEGER)")
        before = schema(app)
        Outbox(path).enqueue(Message(b"body"), connection=app)
        app.commit()
        assert schema(app) > before
        assert versions(app) == [VERSION]


def test_temporary_tables_of_the_application_get_nothing_of_a_new_outbox(path: Path) -> None:
    SqliteStore(other := path.with_name("other.db")).close()
    with closing(sqlite3.connect(other)) as connection:
        expected = schema(connection)
    with closing(sqlite3.connect(path)) as application:
        application.execute("ATTACH ? AS other", (str(other),))
        for kind, name, _ in expected:
            if kind == "table" and name != "sqlite_sequence":
                application.execute(f"CREATE TEMP TABLE {name} AS SELECT * FROM other.{name}")
        Outbox(path).enqueue(Message(b"x"), connection=application)
        application.commit()
    with closing(sqlite3.connect(path)) as connection:
        assert schema(connection) == expected
    assert (Outbox(path).status().open, Outbox(path).audit().is_right) == (1, True)


def test_an_outbox_that_went_through_migrations_stays_usable(path: Path) -> None:
    """Until 8, versions followed each other in a file: each left a row, and columns were added."""
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany(
            "INSERT INTO reliablepub_schema VALUES (?, 0.0)", [(n,) for n in range(1, VERSION)]
        )
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b"body"))
        assert outbox.status().open == 1
    found = check_up(path)
    assert (found.pages, found.missing, found.changed) == ((), (), ())


def test_the_numbers_of_the_application_are_not_touched(empty: sqlite3.Connection) -> None:
    empty.executescript("PRAGMA user_version = 42; PRAGMA application_id = 7")
    with transaction(empty, PATH):
        add_outbox(empty.cursor(), PATH)
    assert empty.execute("PRAGMA user_version").fetchone() == (42,)
    assert empty.execute("PRAGMA application_id").fetchone() == (7,)


def test_every_name_is_ours(empty: sqlite3.Connection) -> None:
    with transaction(empty, PATH):
        add_outbox(empty.cursor(), PATH)
    names = {name for _, name, _ in schema(empty)}
    assert {name for name in names if not name.startswith("reliablepub_")} == {"sqlite_sequence"}


def test_a_schema_that_fails_leaves_nothing(
    empty: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = list(statements_of_schema())
    monkeypatch.setattr(connections, "schema", lambda: [*whole, "SELECT no_such_thing;"])
    with pytest.raises(Exception, match="no_such_thing"), transaction(empty, PATH):
        add_outbox(empty.cursor(), PATH)
    assert schema(empty) == set()


def check_refused(path: Path, words: str) -> None:
    """Each use is refused in these words, and changes nothing."""
    before = path.read_bytes()
    outbox = Outbox(path)
    uses: list[Callable[[], object]] = [
        lambda: SqliteStore(path),
        lambda: outbox.enqueue(Message(b"")),
        outbox.status,
        outbox.audit,
        lambda: outbox.position("s"),
        lambda: check_up(path),
    ]
    for use in uses:
        with pytest.raises(NotAnOutbox, match=words):
            use()
    with closing(sqlite3.connect(path)) as app:
        app.execute("BEGIN IMMEDIATE")
        with pytest.raises(NotAnOutbox, match=words):
            outbox.enqueue(Message(b""), connection=app)
    assert path.read_bytes() == before


def test_a_newer_outbox_is_refused(path: Path) -> None:
    SqliteStore(path).close()
    sql(path, "INSERT INTO reliablepub_schema VALUES (99, 0.0)")
    check_refused(path, r"version 99.*upgrade reliablepub")


@pytest.mark.parametrize("version", [1, OLDEST - 1])
def test_an_older_outbox_is_refused(path: Path, version: int) -> None:
    SqliteStore(path).close()
    sql(path, "UPDATE reliablepub_schema SET version = ?", values=(version,))
    words = f"outbox .* has version {version}, and this reliablepub knows version {VERSION}; "
    check_refused(path, words + "drain it with the reliablepub that made it")


@pytest.mark.parametrize("encoding", ["UTF-16le", "UTF-16be"])
def test_a_database_in_utf_16_is_refused_before_anything_is_stored(
    path: Path, encoding: str
) -> None:
    """Checksums are over UTF-8, so the relay would take every message for a damaged one."""
    with closing(sqlite3.connect(path)) as app:
        app.execute(f"PRAGMA encoding = '{encoding}'")
        app.execute("CREATE TABLE orders (id INTEGER)")
        app.execute("INSERT INTO orders VALUES (1)")
        with pytest.raises(OutboxError, match=f"{encoding}.*needs UTF-8") as caught:
            Outbox(path).enqueue(Message(b"body"), connection=app)
        assert not caught.value.retryable
        app.commit()
        for use in (lambda: Outbox(path).enqueue(Message(b"body")), lambda: SqliteStore(path)):
            with pytest.raises(OutboxError, match="needs UTF-8"):
                use()
        names = [name for (name,) in app.execute("SELECT name FROM sqlite_schema")]
        assert names == ["orders"]
        assert app.execute("SELECT count(*) FROM orders").fetchone() == (1,)
