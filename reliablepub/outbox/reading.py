"""Reading entries back, a page at a time; and whose turn it is among those that share a key.

Knows: the reading statements. Must never know: transactions that write, leases, what entries are
read for.

No cursor stays open: the write-ahead log could not be reset behind it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Container
from contextlib import closing
from typing import Any, Final

from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import Entry
from reliablepub.outbox.rows import Unreadable, entry_of
from reliablepub.outbox.sql import QUERIES

PASSED_MAX: Final = 5_000
"""Rows of a page that are only looked at, because it is not their turn: some 20 ms."""


class Page:
    """Entries, up to a limit in messages and bytes; at least one, where there is any.

    Args:
        limit: messages.
        bytes_max: their bytes.
        keys: to decrypt them with, where the outbox is encrypted.

    Attributes:
        entries: what was read.
        damaged: ids of rows that are not what was stored, and what is wrong with each.
        out_of_turn: ids of rows whose time has come, and whose turn has not.
    """

    def __init__(self, limit: int, bytes_max: int, keys: OutboxKeys | None) -> None:
        self._keys = keys
        self._limit = limit
        self._bytes_max = bytes_max
        self._bytes = 0
        self.entries: list[Entry] = []
        self.damaged: dict[int, str] = {}
        self.out_of_turn: list[int] = []

    def read_ready(self, connection: sqlite3.Connection, first_id: int, last_id: int) -> int:
        """Read rows that wait for nothing, lowest ids first.

        Returns:
            up to which id all of them have been read, or passed over.
        """
        looked_at = first_id - 1
        passed = passed_bytes = 0
        with closing(connection.execute(QUERIES["ready"], (first_id, last_id))) as cursor:
            for *row, is_first in cursor:
                if not is_first:
                    passed, passed_bytes = passed + 1, passed_bytes + row[16]
                elif not self._take(row):
                    return looked_at
                looked_at = int(row[0])
                if passed >= PASSED_MAX or passed_bytes > self._bytes_max:
                    return looked_at
        return last_id

    def read_timed(
        self,
        connection: sqlite3.Connection,
        query: str,
        now: float,
        loaded: Container[int],
        *,
        in_turn: bool,
    ) -> float | None:
        """Read rows whose time in an index has come, earliest first.

        Args:
            connection: to read with.
            query: ``waiting`` or ``expiring``.
            now: wall clock.
            loaded: ids to pass over.
            in_turn: whether to leave out those that must wait for others of their key.

        Returns:
            the first time that is not among them, or None.
        """
        found, next_at = self._timed(connection, query, now, loaded)
        for at, id_ in found:
            row = connection.execute(QUERIES["message"], (id_,)).fetchone()
            if row is None:
                continue  # another process took it away in between
            is_keyed = row[14] is not None
            if in_turn and is_keyed and not _is_first(connection, id_):
                self.out_of_turn.append(id_)
            elif not self._take(row):
                return at
        return next_at

    def read_first(self, connection: sqlite3.Connection, key: str, now: float) -> bool:
        """Read the first row of a key, if it waits for nothing; False if it does not fit."""
        row = connection.execute(QUERIES["first_of_key"], {"key": key}).fetchone()
        is_for_now = row is not None and (row[6] is None or row[6] <= now)
        return not is_for_now or self._take(row)

    def _timed(
        self, connection: sqlite3.Connection, query: str, now: float, loaded: Container[int]
    ) -> tuple[list[tuple[float, int]], float | None]:
        """Times and ids from the index alone, and the first time that is not among them."""
        found: list[tuple[float, int]] = []
        with closing(connection.execute(QUERIES[query])) as cursor:
            for id_, at in cursor:
                if id_ in loaded:
                    continue
                if at > now or len(found) >= self._limit:
                    return found, at
                found.append((at, id_))
        return found, None

    def _take(self, row: Any) -> bool:  # noqa: ANN401 - a row of any types
        """Add a row's entry; False if it does not fit any more."""
        if len(self.entries) >= self._limit:
            return False
        try:
            entry = entry_of(row, self._keys)
        except Unreadable as error:
            self.damaged[row[0]] = str(error)
            return True
        self._bytes += entry.message.size
        if self.entries and self._bytes > self._bytes_max:
            return False
        self.entries.append(entry)
        return True


def _is_first(connection: sqlite3.Connection, id_: int) -> bool:
    """Whether nothing of its key has to go before."""
    return connection.execute(QUERIES["is_first_of_key"], (id_,)).fetchone() is not None
