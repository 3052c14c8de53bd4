"""The named statements of ``queries.sql``, and how a script is cut into statements.

Knows: where this package keeps its ``.sql`` files, and their one convention (``-- name: xyz``).
Must never know: what any statement means. No SQL is ever put together from strings.
"""

from __future__ import annotations

import pkgutil
import re
import sqlite3
from collections.abc import Iterator
from typing import Final

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def script(name: str) -> str:
    """Text of one of this package's ``.sql`` files, which may be in a zip.

    `importlib.resources` has ten milliseconds of imports, for all that it can do beside this.
    """
    data = pkgutil.get_data("reliablepub.outbox.sqlite", name)
    assert data is not None, "every loader of packages has data"
    return data.decode()


def statements(text: str) -> Iterator[str]:
    """Cut a script into its statements.

    ``executescript`` would commit an open transaction first, so statements run one by one.
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
    """Statements by the name in the comment above each."""
    queries: dict[str, str] = {}
    parts = _NAME.split(text)[1:]
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        (statement,) = statements(part)
        if name in queries:
            raise ValueError(f"two statements are named {name}")
        queries[name] = statement
    return queries


QUERIES: Final = _named(script("queries.sql"))
