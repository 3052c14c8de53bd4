import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from sqlite_utils import Database

from reliablepub.errors import NotAnOutbox, OutboxError
from reliablepub.message import Message
from reliablepub.outbox.entry import Counters, Snapshot
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite import database as database_module
from reliablepub.outbox.sqlite import database as migrate_module
from reliablepub.outbox.sqlite.database import MIGRATIONS, is_current, migrate
from reliablepub.outbox.sqlite.sql import QUERIES, script, statements
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outbox.sqlite.transactions import transaction

PATH = Path("here.db")
OPEN_COLUMNS_OF_1 = """
    id, message_id, exchange, routing_key, properties, stored_at, due_at,
    nacked, returned, refused, uncertain, size, checksum, body
"""
PARKED_COLUMNS_OF_1 = """
    id, message_id, exchange, routing_key, properties, stored_at,
    parked_at, state, outcome, reply_code, reply_text, nacked, returned, refused, uncertain,
    size, checksum, body
"""


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


def test_migrations_are_the_files_there_are_numbered_from_one_without_gaps() -> None:
    folder = Path(migrate_module.__file__).with_name("migrations")
    assert list(MIGRATIONS) == sorted(path.name for path in folder.glob("*.sql"))
    assert [int(name[:4]) for name in MIGRATIONS] == list(range(1, len(MIGRATIONS) + 1))


def test_a_migrated_database_says_so(empty: sqlite3.Connection) -> None:
    for is_done in (False, True):
        with transaction(empty, PATH):
            assert is_current(empty.cursor(), PATH) is is_done
            migrate(empty.cursor(), PATH)
        assert versions(empty) == list(range(1, len(MIGRATIONS) + 1))


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
    monkeypatch.setattr(migrate_module, "MIGRATIONS", (*MIGRATIONS, "next"))
    texts = {"next": "CREATE TABLE extra (a);"}
    monkeypatch.setattr(migrate_module, "script", lambda _, name: texts[name])
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as connection:
        assert versions(connection) == list(range(1, len(MIGRATIONS) + 2))
        assert connection.execute("SELECT count(*) FROM extra").fetchone() == (0,)


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS) + 1))
def test_an_outbox_of_any_version_keeps_its_messages(path: Path, version: int) -> None:
    """As a publisher of that version left it: one open, one waiting, one parked, one damaged."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for number, name in enumerate(MIGRATIONS[:version], 1):
            for statement in statements(script("migrations", name)):
                connection.execute(statement)
            connection.execute(QUERIES["record_migration"], (number, 0.0))
        for id_, due_at in ((1, None), (2, 5.0), (4, None)):
            row: tuple[Any, ...] = (
                id_,
                f"m-{id_}",
                "x",
                "k",
                '{"type":"t"}',
                1.0,
                due_at,
                2,
                0,
                0,
                1,
                140,
            )
            checksum = crc32(b'm-%d\0x\0k\0{"type":"t"}\0body' % id_)
            row += (checksum + (id_ == 4), b"body")
            connection.execute(
                f"INSERT INTO reliablepub_messages ({OPEN_COLUMNS_OF_1})"
                f" VALUES ({', '.join('?' * 14)})",
                row,
            )
        row = (3, "m-3", "x", "k", "{}", 1.0, 2.0, "parked", "nacked", 0, "no", 1, 0, 0, 0, 140)
        row += (crc32(b"m-3\0x\0k\0{}\0body"), b"body")
        connection.execute(
            f"INSERT INTO reliablepub_parked ({PARKED_COLUMNS_OF_1})"
            f" VALUES ({', '.join('?' * 18)})",
            row,
        )
        connection.execute(
            "UPDATE reliablepub_ledger SET stored = 4, parked = 1, open_bytes = 3 * 140"
        )
    with closing(SqliteStore(path)) as store:
        assert store.snapshot() == Snapshot(4, Counters(stored=4, parked=1, open_bytes=420))
        [ready] = store.read_ready(1, 9, limit=9, bytes_max=10**9)[0]
        [due], _ = store.read_due(5.0, limit=9, bytes_max=10**9, loaded=())
        assert [(e.id, e.nacked, e.uncertain, e.due_at) for e in (ready, due)] == [
            (1, 2, 1, None),
            (2, 2, 1, 5.0),
        ]
        assert ready.message == Message(b"body", "x", "k", message_id="m-1", type="t")
        outbox = Outbox(path)
        assert [p.message_id for p in outbox.parked()] == ["m-3", "m-4"]  # 4 is damaged
        assert outbox.retry([3]) == 1
        assert [touched.id for touched in store.touched()] == [3]
        found, _ = store.read_due(1e12, limit=9, bytes_max=10**9, loaded=())
        assert [e.message.body for e in found] == [b"body"] * 2
        audit = store._writer.opened().execute("SELECT * FROM reliablepub_audit").fetchone()
        assert audit[-4:] == (0, 0, 0, 0)
        outbox.close()


def test_what_people_have_done_is_kept_and_its_numbers_go_on(path: Path) -> None:
    """A relay knows the last number: one that comes again would be overlooked."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for number, name in enumerate(MIGRATIONS[:5], 1):
            for statement in statements(script("migrations", name)):
                connection.execute(statement)
            connection.execute(QUERIES["record_migration"], (number, 0.0))
        done = "(id, message_id, exchange, routing_key, at, action, person, note)"
        for _ in range(2):
            connection.execute(
                f"INSERT INTO reliablepub_interventions {done}"
                " VALUES (7, 'm-7', 'x', 'k', 9e9, 'discard', 'ann', 'why')"
            )
        connection.execute("DELETE FROM reliablepub_interventions WHERE intervention = 2")
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            f"INSERT INTO reliablepub_interventions {done}"
            " VALUES (8, 'm-8', 'x', 'k', 9e9, 'skip', 'ann', '')"
        )
        kept = connection.execute("SELECT * FROM reliablepub_interventions").fetchall()
        assert kept == [
            (1, 7, "m-7", "x", "k", 9e9, "discard", "ann", "why"),
            (3, 8, "m-8", "x", "k", 9e9, "skip", "ann", ""),
        ]


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
    monkeypatch.setattr(database_module, "MIGRATIONS", (*MIGRATIONS, "next"))
    words = f"is of the older version {len(MIGRATIONS)}; the next relay updates it, or "
    with pytest.raises(NotAnOutbox, match=f"^outbox {path} {words}`reliablepub outbox migrate`$"):
        Outbox(path).status()


def test_every_statement_can_be_prepared(empty: sqlite3.Connection) -> None:
    with transaction(empty, PATH):
        migrate(empty.cursor(), PATH)
    for sql in QUERIES.values():
        names = set(re.findall(r"(?<!\w):(\w+)", sql))
        parameters = dict.fromkeys(names) if names else (None,) * sql.count("?")
        is_of_this_connection = "TEMP TABLE" in sql  # the next statements are about it
        empty.execute(sql if is_of_this_connection else f"EXPLAIN {sql}", parameters).fetchall()


def test_a_script_may_not_end_within_a_statement() -> None:
    with pytest.raises(ValueError, match="ends within a statement"):
        list(statements("SELECT 1;\nSELECT"))


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
