"""Every statement of both engines is understood by its engine, and operators' by both alike."""

import ast
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Final

import psycopg
import pytest

import reliablepub
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.postgres.sql import DEFAULT_SCHEMA, named
from reliablepub.outbox.sqlite.sql import QUERIES

OPERATORS: Final = named(DEFAULT_SCHEMA).keys() & QUERIES.keys()
NOT_OPERATORS: Final = (Path("outbox/sqlite"), Path("outbox/postgres"))
OF_ONE_ENGINE: Final = {"shard", "turn", "ids"}
"""Values that one engine needs: PostgreSQL's session knows its own, and a file assigns ids."""
TYPES: Final = {"at": 701, "id": 20}
"""What the server cannot tell from a statement: double precision, bigint."""
VALUE: Final = re.compile(r"(?<!:):([a-z]\w*)")

Columns = list[str] | None
"""Names of the columns of a result; None if it has none, or a constraint did not let it be had."""


def values_of(statement: str) -> list[str]:
    return list(dict.fromkeys(VALUE.findall(statement)))


@cache
def names_of_operators() -> set[str]:
    """Every name in `session.run("name")` and `session.rows("name")`."""
    package = Path(reliablepub.__file__).parent
    return {
        node.args[0].value
        for path in package.rglob("*.py")
        if not path.is_relative_to(package / NOT_OPERATORS[0])
        if not path.is_relative_to(package / NOT_OPERATORS[1])
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("run", "rows")
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    }


@pytest.fixture(scope="module")
def sqlite_columns(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Columns]:
    """Run every statement on an empty outbox; the columns of each."""
    path = tmp_path_factory.mktemp("sqlite") / "outbox.db"
    with Outbox(path) as outbox:
        outbox.create()
    return dict(_sqlite_columns(path))


def _sqlite_columns(path: Path) -> Iterator[tuple[str, Columns]]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for name, statement in QUERIES.items():
            named_values = dict.fromkeys(values_of(statement), 0)
            values = named_values or (0,) * statement.count("?")
            connection.execute(f"EXPLAIN {statement}", values)
            connection.execute("BEGIN")
            columns: Columns = None
            with suppress(sqlite3.IntegrityError):
                cursor = connection.execute(statement, values)
                columns = [column[0] for column in cursor.description or ()] or None
            yield name, columns
            connection.execute("ROLLBACK")


@pytest.fixture
def postgres_columns(postgres_outbox: str) -> dict[str, Columns]:
    """Prepare every statement; the columns of each."""
    found: dict[str, Columns] = {}
    with closing(psycopg.connect(postgres_outbox)) as connection:
        server = connection.pgconn
        for name, statement in named(DEFAULT_SCHEMA).items():
            values = values_of(statement)
            text = VALUE.sub(lambda value: f"${values.index(value[1]) + 1}", statement)  # noqa: B023
            types = [TYPES.get(value, 0) for value in values]
            assert server.prepare(b"one", text.encode(), types).error_message == b"", name
            told = server.describe_prepared(b"one")
            columns = [(told.fname(n) or b"").decode() for n in range(told.nfields)]
            found[name] = columns or None
            connection.execute("DEALLOCATE one")
    return found


def test_operators_use_statements_that_both_engines_have() -> None:
    assert len(names_of_operators()) > 20
    assert names_of_operators() <= OPERATORS


def test_every_statement_can_be_prepared(sqlite_columns: dict[str, Columns]) -> None:
    assert sqlite_columns.keys() == QUERIES.keys()


def test_both_engines_understand_every_statement_and_answer_operators_alike(
    sqlite_columns: dict[str, Columns], postgres_columns: dict[str, Columns]
) -> None:
    for name in sorted(names_of_operators()):
        one, other = sqlite_columns[name], postgres_columns[name]
        if one is None:
            continue
        assert other is not None, name
        assert len(one) == len(other), name
        for column, same in zip(one, other, strict=True):
            if column.isidentifier():  # an expression without a name is named by its engine
                assert column == same, name


@pytest.mark.parametrize("name", sorted(names_of_operators()))
def test_operators_statements_take_the_same_values(name: str) -> None:
    of_sqlite, of_postgres = (set(values_of(q[name])) for q in (QUERIES, named(DEFAULT_SCHEMA)))
    assert of_postgres - OF_ONE_ENGINE == of_sqlite - OF_ONE_ENGINE
