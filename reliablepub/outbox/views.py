"""The views of an outbox, row by row: for whoever analyzes what is in it, or in a thousand of them.

Knows: which views there are. Must never know: how anything is changed.

A view is read a piece at a time, each in a short read transaction of its own: a reader that took an
hour over one would keep the relay from emptying its log for so long. So rows of one piece are of
one moment, and a message that is parked meanwhile may be met twice or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from reliablepub.errors import ConfigurationError
from reliablepub.outbox.database import reading
from reliablepub.outbox.sql import QUERIES

PIECE_ROWS: Final = 2_000
VIEWS: Final = ("open", "parked", "confirmed", "history", "interventions", "audit")


def read_view(path: Path, view: str) -> Iterator[dict[str, object]]:
    """Rows of a view, in the order of the number that comes first in it.

    Raises:
        ConfigurationError: there is no such view.
        NotAnOutbox: there is no outbox.
    """
    if view not in VIEWS:
        raise ConfigurationError(f"there is no view {view!r}; there are {', '.join(VIEWS)}")
    after = 0
    while True:
        with reading(path) as connection:
            found = connection.execute(QUERIES[f"view_{view}"], (after, PIECE_ROWS))
            names = [column[0] for column in found.description]
            rows = found.fetchall()
        for row in rows:
            yield dict(zip(names, row, strict=True))
        if len(rows) < PIECE_ROWS:
            return
        after = rows[-1][0]
