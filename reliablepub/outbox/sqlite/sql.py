"""The named statements of both ``queries.sql``, and how a script is cut into statements.

Knows: where the ``.sql`` files are, their convention (``-- name: xyz``), how an insert of one row
becomes one of many, and how rows become dictionaries. Must never know: what any statement means.

SQL is put together from strings in two places, from constants only: `of_rows` repeats the
parameters of a row, and ``outbox/admin/selection.py`` joins the conditions that an operator asks
for. Values are always bound. Pragmas, ``BEGIN`` and ``COMMIT`` stand where they are used.
"""

from __future__ import annotations

import pkgutil
import re
import sqlite3
from collections.abc import Iterator, Mapping
from typing import Any, Final

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def script(name: str, package: str = "reliablepub.outbox.sqlite") -> str:
    """Return the text of a ``.sql`` file, by default of one of this package's."""
    # It works from a zip too, and spares the imports of `importlib.resources`, which take 10 ms.
    data = pkgutil.get_data(package, name)
    assert data is not None, "every loader of packages has data"
    return data.decode()


def statements(text: str) -> Iterator[str]:
    """Split a script into statements, to run one by one within a transaction.

    ``executescript`` would commit an open transaction first.
    """
    lines: list[str] = []
    for line in text.splitlines():
        if not lines and (not line.strip() or line.startswith("--")):
            continue
        lines.append(line)
        statement = "\n".join(lines)
        if sqlite3.complete_statement(statement):
            yield statement
            lines = []
    if lines:
        raise ValueError(f"the script ends within a statement: {lines[0]!r}")


def _named(text: str) -> dict[str, str]:
    """Return the statements by the name in the comment above each."""
    queries: dict[str, str] = {}
    parts = _NAME.split(text)[1:]
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        (statement,) = statements(part)
        if name in queries:
            raise ValueError(f"two statements are named {name}")
        queries[name] = statement
    return queries


QUERIES: Final = _named(script("queries.sql", "reliablepub.outbox") + script("queries.sql"))


def of_rows(name: str, count: int) -> str:
    """Return a statement that inserts one row, made to insert as many rows at once."""
    statement = QUERIES[name].rstrip(";")
    row = statement[statement.rindex("(") :]
    return statement + f", {row}" * (count - 1)


def named_rows(
    connection: sqlite3.Connection, query: str, values: Mapping[str, object]
) -> Iterator[dict[str, Any]]:
    """Run a query, and yield its rows as dictionaries by column."""
    from sqlite_utils import Database  # noqa: PLC0415 - takes 50 ms; producers do not need it

    # A plug-in of its command line has no business here, and its pragma would change the writer.
    database = Database(connection, recursive_triggers=False, execute_plugins=False)
    return database.query(query, dict(values))
