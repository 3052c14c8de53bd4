import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlite_utils import Database

from reliablepub.errors import NotAnOutbox
from reliablepub.outbox import migrate as migrate_module
from reliablepub.outbox.database import transaction
from reliablepub.outbox.migrate import APPLICATION_ID, migrate, migrations
from reliablepub.outbox.sql import QUERIES, script, statements
from reliablepub.outbox.store import SqliteStore

PATH = Path("here.db")


@pytest.fixture
def empty() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        yield connection


def schema(connection: sqlite3.Connection) -> set[tuple[str, str, str]]:
    rows = connection.execute("SELECT type, name, coalesce(sql, '') FROM sqlite_schema")
    return {(kind, name, re.sub(r"\s+", " ", sql)) for kind, name, sql in rows}


def test_the_schema_is_what_all_migrations_make(empty: sqlite3.Connection) -> None:
    with transaction(empty, PATH):
        migrate(empty.cursor(), PATH)
    with closing(sqlite3.connect(":memory:")) as other:
        other.executescript(script("schema.sql"))
        assert schema(empty) == schema(other)
        assert len(schema(empty)) > 10
        assert list(Database(empty)["ledger"].rows) == list(Database(other)["ledger"].rows)


def test_migrations_are_numbered_from_one_without_gaps() -> None:
    assert [name[:5] for name in migrations()] == [
        f"{n:04}_" for n in range(1, len(migrations()) + 1)
    ]


def test_a_migrated_database_says_so(empty: sqlite3.Connection) -> None:
    with transaction(empty, PATH):
        migrate(empty.cursor(), PATH)
    assert empty.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    assert empty.execute("PRAGMA user_version").fetchone() == (len(migrations()),)
    with transaction(empty, PATH):
        migrate(empty.cursor(), PATH)  # again: nothing to do


def test_a_migration_that_fails_leaves_nothing(
    empty: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = script("schema.sql")
    monkeypatch.setattr(migrate_module, "script", lambda *_: whole + "\nSELECT no_such_thing;")
    with pytest.raises(Exception, match="no_such_thing"), transaction(empty, PATH):
        migrate(empty.cursor(), PATH)
    assert schema(empty) == set()
    assert empty.execute("PRAGMA application_id").fetchone() == (0,)
    assert empty.execute("PRAGMA user_version").fetchone() == (0,)


def test_the_next_migration_reaches_an_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SqliteStore(path).close()
    monkeypatch.setattr(migrate_module, "migrations", lambda: [*migrations(), "next"])
    first = script("migrations", migrations()[0])
    texts = {migrations()[0]: first, "next": "CREATE TABLE extra (a);"}
    monkeypatch.setattr(migrate_module, "script", lambda _, name: texts[name])
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (len(migrations()) + 1,)
        assert connection.execute("SELECT count(*) FROM extra").fetchone() == (0,)


@pytest.mark.parametrize(
    ("pragma", "words"),
    [
        (f"application_id = {APPLICATION_ID}; PRAGMA user_version = 99", "upgrade reliablepub"),
        ("application_id = 7", "another application"),
        ("user_version = 3", "another application"),
    ],
)
def test_other_databases_are_recognised(path: Path, pragma: str, words: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"PRAGMA {pragma}")
    before = path.read_bytes()
    with pytest.raises(NotAnOutbox, match=words):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_a_database_with_other_tables_is_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (id)")
    before = path.read_bytes()
    with pytest.raises(NotAnOutbox, match="without an outbox"):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_every_statement_can_be_prepared(empty: sqlite3.Connection) -> None:
    with transaction(empty, PATH):
        migrate(empty.cursor(), PATH)
    for sql in QUERIES.values():
        names = set(re.findall(r"(?<!\w):(\w+)", sql))
        parameters = dict.fromkeys(names) if names else (None,) * sql.count("?")
        empty.execute(f"EXPLAIN {sql}", parameters).fetchall()


def test_a_script_may_not_end_within_a_statement() -> None:
    with pytest.raises(ValueError, match="ends within a statement"):
        list(statements("SELECT 1;\nSELECT"))
