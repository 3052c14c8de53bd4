import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlite_utils import Database

from reliablepub.errors import NotAnOutbox
from reliablepub.message import Message
from reliablepub.outbox import Outbox
from reliablepub.outbox import database as database_module
from reliablepub.outbox import migrate as migrate_module
from reliablepub.outbox.database import transaction
from reliablepub.outbox.migrate import is_current, migrate, migrations
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


def versions(connection: sqlite3.Connection) -> list[int]:
    rows = connection.execute("SELECT version FROM reliablepub_schema ORDER BY 1")
    return [version for (version,) in rows]


def test_the_schema_is_what_all_migrations_make(empty: sqlite3.Connection) -> None:
    with transaction(empty, PATH):
        migrate(empty.cursor(), PATH)
    with closing(sqlite3.connect(":memory:")) as other:
        other.executescript(script("schema.sql"))
        assert schema(empty) == schema(other)
        assert len(schema(empty)) > 10
        assert list(Database(empty)["reliablepub_ledger"].rows) == list(
            Database(other)["reliablepub_ledger"].rows
        )


def test_migrations_are_numbered_from_one_without_gaps() -> None:
    assert [name[:5] for name in migrations()] == [
        f"{n:04}_" for n in range(1, len(migrations()) + 1)
    ]


def test_a_migrated_database_says_so(empty: sqlite3.Connection) -> None:
    for is_done in (False, True):
        with transaction(empty, PATH):
            assert is_current(empty.cursor(), PATH) is is_done
            migrate(empty.cursor(), PATH)
        assert versions(empty) == list(range(1, len(migrations()) + 1))


def test_the_numbers_of_the_application_are_not_touched(empty: sqlite3.Connection) -> None:
    empty.executescript("PRAGMA user_version = 42; PRAGMA application_id = 7")
    with transaction(empty, PATH):
        migrate(empty.cursor(), PATH)
    assert empty.execute("PRAGMA user_version").fetchone() == (42,)
    assert empty.execute("PRAGMA application_id").fetchone() == (7,)


def test_every_name_is_ours(empty: sqlite3.Connection) -> None:
    with transaction(empty, PATH):
        migrate(empty.cursor(), PATH)
    names = {name for _, name, _ in schema(empty)}
    assert {name for name in names if not name.startswith("reliablepub_")} == {"sqlite_sequence"}


def test_a_migration_that_fails_leaves_nothing(
    empty: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = script("schema.sql")
    monkeypatch.setattr(migrate_module, "script", lambda *_: whole + "\nSELECT no_such_thing;")
    with pytest.raises(Exception, match="no_such_thing"), transaction(empty, PATH):
        migrate(empty.cursor(), PATH)
    assert schema(empty) == set()


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
        assert versions(connection) == list(range(1, len(migrations()) + 2))
        assert connection.execute("SELECT count(*) FROM extra").fetchone() == (0,)


def test_a_newer_outbox_is_refused(path: Path) -> None:
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO reliablepub_schema VALUES (99, 0.0)")
    before = path.read_bytes()
    outbox = Outbox(path)
    uses: list[Callable[[], object]] = [
        lambda: SqliteStore(path),
        lambda: outbox.enqueue(Message(b"")),
        outbox.status,
        lambda: outbox.position("s"),
    ]
    for use in uses:
        with pytest.raises(NotAnOutbox, match=r"version 99.*upgrade reliablepub"):
            use()
    assert path.read_bytes() == before


def test_an_older_outbox_is_not_looked_at_before_it_is_updated(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SqliteStore(path).close()
    monkeypatch.setattr(database_module, "migrations", lambda: [*migrations(), "next"])
    with pytest.raises(NotAnOutbox, match="older version 1; the next relay updates it"):
        Outbox(path).status()


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
