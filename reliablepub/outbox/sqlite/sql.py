"""The named statements of both ``queries.sql``, and how a script is cut into statements.

Knows: how an insert of one row becomes one of many, and how rows become dictionaries. Must never
know: what any statement means.

SQL is put together from strings in three places, from constants only: `text_of_queries` and
`QUERIES` fill in expressions, `of_rows` repeats the parameters of a row, and
``outbox/admin/selection.py`` joins the conditions that an operator asks for. Values are always
bound. Pragmas, ``BEGIN`` and ``COMMIT`` stand where they are used.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from typing import Any, Final

from reliablepub.outbox.queries import named, text_of, text_of_queries


def schema() -> Iterator[str]:
    """Return the statements of ``schema.sql``."""
    return statements(text_of(__package__, "schema.sql"))


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


# Whether the values of an open message have the types of their columns. SQLite orders numbers
# before texts, and texts before blobs; `max` is NULL if one of its values is.
_HAS_NUMBERS: Final = (
    "max(stored_at, nacked, returned, refused, uncertain, size, checksum, "
    "coalesce(due_at, 0), coalesce(expires_at, 0), coalesce(refused_at, 0)) < ''"
)
_HAS_CONTENT: Final = (
    "max(message_id, exchange, routing_key, properties, coalesce(ordering_key, '')) < x'' "
    "AND typeof(body) = 'blob'"
)
QUERIES: Final = named(
    text_of_queries(
        __package__,
        bytes_of="CAST({} AS BLOB)",
        utc_of="datetime({}, 'unixepoch')",
        is_chosen="{} IN (SELECT value FROM json_each(:chosen))",
        infinity="9e999",
    )
    .replace("HAS_NUMBERS", _HAS_NUMBERS)
    .replace("HAS_CONTENT", _HAS_CONTENT)
)


def of_rows(name: str, count: int) -> str:
    """Return a statement that inserts one row, made to insert as many rows at once."""
    statement = QUERIES[name]
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
