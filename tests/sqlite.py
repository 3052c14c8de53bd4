"""The file of an outbox, seen and changed by plain SQLite; and the outbox's own connection."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from reliablepub import Outbox
from reliablepub.outbox.sqlite.connections import Writer
from reliablepub.outbox.sqlite.database import SqliteDatabase


def sql(path: Path, *statements: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """Run statements in one transaction; the rows of the last one, whose values are given."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements[:-1]:
            connection.execute(statement)
        return connection.execute(statements[-1], values).fetchall()


def edit_lax(path: Path, change: str, name: str = "reliablepub_messages") -> None:
    """Change a row as if its table took any value, as a flipped bit does."""
    define = f"UPDATE sqlite_schema SET sql = ? WHERE name = '{name}'"
    [(strict,)] = sql(path, f"SELECT sql FROM sqlite_schema WHERE name = '{name}'")
    lax = strict.replace(" NOT NULL", "").removesuffix(" STRICT")
    for definition in (lax, strict):
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            if definition is strict:
                connection.execute(f"UPDATE {name} SET {change}")
            connection.execute("PRAGMA writable_schema = ON")
            connection.execute(define, (definition,))
            (version,) = connection.execute("PRAGMA schema_version").fetchone()
            connection.execute(f"PRAGMA schema_version = {version + 1}")


def overwrite(path: Path, at: int, data: bytes) -> None:
    """Write bytes into the file, as damage does."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def count(path: Path, table: str) -> int:
    """How many rows one of our tables has."""
    [(rows,)] = sql(path, f"SELECT count(*) FROM reliablepub_{table}")
    return int(rows)


def writer_of(outbox: Outbox) -> Writer:
    """The connection with which an `Outbox` writes to its file."""
    database = outbox._database
    assert isinstance(database, SqliteDatabase)
    return database._writer
