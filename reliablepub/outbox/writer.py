"""One outbox to write to: opened when it is needed, closed for a fork, left when its files move.

Knows: when a connection may be kept, closed, or never be closed. Must never know: what is written.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from reliablepub.outbox.database import open_writer
from reliablepub.outbox.forks import GATE, Inode, abandon
from reliablepub.outbox.place import WritingConnection, moved

LOGGER: Final = logging.getLogger("reliablepub.outbox")


class Writer:
    """A connection to an outbox, for as long as the path leads to the same files.

    Args:
        path: absolute.
        is_relay: as for `open_writer`.
    """

    def __init__(self, path: Path, *, is_relay: bool) -> None:
        self._path = path
        self._is_relay = is_relay
        self._file: Inode | None = None
        self._pid = 0
        self.connection: WritingConnection | None = None
        GATE.keep(self)

    @contextmanager
    def use(self) -> Iterator[WritingConnection]:
        """The connection; no fork of this process happens meanwhile.

        Raises:
            OutboxMoved: the file is another one than it was when it was opened first.
            OutboxError: it cannot be opened.
        """
        with GATE.use():
            yield self.opened()

    def renew(self) -> None:
        """Compare the path with what is open; open it again if SQLite's lock on it was lost.

        Raises:
            OutboxMoved: the path leads elsewhere.
        """
        with GATE.use():
            if self.connection is None:
                return
            self.connection.place.check()
            if self.connection.place.is_locked:
                return
            LOGGER.warning(
                "the locks on outbox %s were lost, because this process opened and closed the file "
                "otherwise (a copy, perhaps); it is opened again. Copy an outbox with sqlite3's "
                "backup, or from another process",
                self._path,
            )
            self.rest()

    def rest(self) -> None:
        """Let go of the connection; the next use opens the file again, which must be the same.

        One whose last commit has failed on the disk is kept: a new one could rebuild the index of
        the log, find that commit in it, and believe it. One whose file was overwritten is kept,
        too, and raises at each use. A forked child then refuses the file.
        """
        connection = self.connection
        is_own = os.getpid() == self._pid
        if connection is None or (is_own and connection.must_stay):
            return
        self.connection = None
        if is_own:
            connection.close()
        else:
            abandon(connection)

    def leave(self) -> None:
        """Let go of files that the path does not lead to any more; the next use looks afresh.

        They stay open: closing the connection could delete the log of whoever is there now.
        """
        if self.connection is not None and not self.connection.place.is_overwritten:
            self._abandon()

    def close(self) -> None:
        """Close the file; the next use opens what it finds then."""
        if self.connection is not None and self.connection.must_stay:
            self._abandon()
        self._file = None
        self.rest()

    def _abandon(self) -> None:
        connection, self.connection, self._file = self.connection, None, None
        if connection is not None:
            abandon(connection)

    def opened(self) -> WritingConnection:
        """The connection as it is, or a new one."""
        if self.connection is not None:
            return self.connection
        connection = open_writer(self._path, is_relay=self._is_relay)
        if self._file not in (None, connection.place.file):
            connection.close()
            raise moved(self._path, "was replaced by another file")
        self._file, self._pid = connection.place.file, os.getpid()
        self.connection = connection
        return connection

    def __del__(self) -> None:
        """Users need not close an outbox, but Python 3.13 warns of a connection left open."""
        if self.connection is not None:
            with GATE.use():
                self.close()
