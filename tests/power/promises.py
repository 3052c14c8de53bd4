"""What must be found after the power has failed, and whether it is.

Knows: the marks of a life, and an outbox as the next process finds it. Must never know: what was
synced.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

from reliablepub.message import Message
from reliablepub.outbox.entry import Changes, Entry
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.power.life import body

NEW: Final = Message(b"after the power cut", "x", "k", message_id="m0")


class Promises:
    """What was promised up to a moment."""

    def __init__(self) -> None:
        self._asked: set[str] = set()
        self._promised: set[str] = set()
        self._released: set[str] = set()
        self._gone: set[str] = set()

    def heed(self, mark: str) -> None:
        """Hear a mark."""
        word, *ids = mark.split()
        sets = {
            "asked": self._asked,
            "promised": self._promised,
            "released": self._released,
            "gone": self._gone,
        }
        if word in sets:
            sets[word].update(ids)

    def check(self, path: Path) -> None:
        """Compare with the file that is left: everything is kept, nothing is made up.

        Raises:
            AssertionError: it is not.
            sqlite3.Error: the file cannot be read.
            OutboxError: it cannot be read.
        """
        must = self._promised - self._released
        open_, parked, confirmed = found(path)
        lost = must - open_ - parked
        assert not lost, f"promised and not there: {sorted(lost)}"
        made_up = (open_ | parked | confirmed) - self._asked
        assert not made_up, f"there, and not asked for: {sorted(made_up)}"
        assert not self._gone & (open_ | parked), "discarded, and there again"
        assert confirmed <= self._released, "confirmed, and not by the broker"
        goes_on(path)


def found(path: Path) -> tuple[set[str], set[str], set[str]]:
    """Ids of what is open, parked and kept as confirmed; every body is what it was."""
    if not path.exists() or not path.stat().st_size:
        return set(), set(), set()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        query = "SELECT count(*) FROM sqlite_schema WHERE name = 'reliablepub_schema'"
        if not connection.execute(query).fetchone()[0]:
            return set(), set(), set()
        ids = []
        for table in ("messages", "parked", "confirmed"):
            rows = connection.execute(f"SELECT message_id, body FROM reliablepub_{table}")
            bodies = dict(rows)
            for message_id, found_body in bodies.items():
                assert found_body == body(message_id)
            ids.append(set(bodies))
    return ids[0], ids[1], ids[2]


def goes_on(path: Path) -> None:
    """The next relay opens it, stores a message, and the ledger adds up."""
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=[Entry(NEW, 1.0)]))
    with closing(Outbox(path)) as outbox:
        audit = outbox.audit()
        assert audit.is_right, audit
