"""How an outbox file is created, opened, upgraded, and kept open to write.

Knows: paths, modes, pragmas, schema versions, and when a connection may be kept, closed, or must
never be closed. Must never know: messages.

Only SQLite opens the file while this process may have it open: closing any other descriptor would
drop SQLite's POSIX locks, and the next process to close the database would then delete the
write-ahead log that this process writes to. So the file is created and closed first, and otherwise
only looked at by name (``lstat``).

The database may be an application's own, with tables, a ``user_version`` and an ``application_id``
of its own: none of these is read or changed. The version of the outbox is in the table
``reliablepub_schema``.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from reliablepub.errors import NotAnOutbox, OutboxError, OutboxLocked
from reliablepub.outbox.sqlite import checkpoints
from reliablepub.outbox.sqlite.ballast import Ballast
from reliablepub.outbox.sqlite.failures import (
    is_unfinished,
    lacks_index,
    os_error,
    outbox_error,
    reported,
)
from reliablepub.outbox.sqlite.forks import GATE, Inode, abandon
from reliablepub.outbox.sqlite.location import (
    Place,
    WritingConnection,
    check_side_files,
    claim_log,
    moved,
    refuse_second_name,
    takes_over,
    warn_of_folder,
)
from reliablepub.outbox.sqlite.sql import QUERIES, script, statements
from reliablepub.outbox.sqlite.transactions import transaction

MIGRATIONS: Final = (
    "0001_first_schema.sql",
    "0002_schedule.sql",
    "0003_interventions.sql",
    "0004_first_refusal.sql",
    "0005_retention.sql",
    "0006_skipped_keys.sql",
    "0007_held_keys.sql",
    "0008_paused_destinations.sql",
)
"""The files in ``migrations``: the first leads to version 1."""


def version_of(cursor: sqlite3.Cursor, path: Path) -> int:
    """Which version of the outbox the database holds; 0 for none.

    Within a transaction, or another process may create the outbox between the two statements.

    Raises:
        NotAnOutbox: the outbox is of a newer version.
    """
    assert cursor.connection.in_transaction
    (count,) = cursor.execute(QUERIES["has_schema"]).fetchone()
    if not count:
        return 0
    (version,) = cursor.execute(QUERIES["schema_version"]).fetchone()
    newest = len(MIGRATIONS)
    if version > newest:
        raise NotAnOutbox(
            f"outbox {path} has version {version}, and this reliablepub knows versions up to "
            f"{newest}; upgrade reliablepub"
        )
    return int(version)


def is_current(cursor: sqlite3.Cursor, path: Path) -> bool:
    """Whether the database holds an outbox of this version; False when `migrate` can make it so.

    Raises:
        NotAnOutbox: the outbox is of a newer version.
    """
    return version_of(cursor, path) == len(MIGRATIONS)


def refuse_utf16(cursor: sqlite3.Cursor, path: Path) -> None:
    """Refuse a database whose texts are UTF-16: checksums are over UTF-8, which is what is sent.

    Raises:
        OutboxError: says what to do.
    """
    (encoding,) = cursor.execute("PRAGMA encoding").fetchone()
    if encoding != "UTF-8":
        raise OutboxError(
            f"database {path} keeps its texts as {encoding}, and an outbox needs UTF-8: nothing "
            "was stored. Use an outbox file of its own, or copy the application's tables into a "
            "new database with PRAGMA encoding = 'UTF-8'; none can change its encoding later"
        )


def migrate(cursor: sqlite3.Cursor, path: Path) -> None:
    """Bring a database to the newest version, within the open transaction of the caller.

    Args:
        cursor: inside a transaction that may write.
        path: for the errors.

    Raises:
        NotAnOutbox: the outbox is of a newer version.
        OutboxError: the database is no UTF-8 one.
    """
    refuse_utf16(cursor, path)
    version = version_of(cursor, path)
    for number, name in enumerate(MIGRATIONS, 1):
        if number > version:
            for statement in statements(script("migrations", name)):
                cursor.execute(statement)
            cursor.execute(QUERIES["record_migration"], (number, time.time()))


BUSY_TIMEOUT_S: Final = 5.0
_CLAIMS_MAX: Final = 9
PAGE_BYTES: Final = 8_192
"""Where many messages share a commit, less is written than with pages of 4 KiB, in half as many
pieces; a message alone writes twice as much, which takes the disk hardly longer."""


def absolute(path: str | os.PathLike[str]) -> Path:
    """The path, whatever the working folder will be; a link at its end is not followed."""
    path = Path(path).absolute()
    return path.parent.resolve() / path.name


def check_file(path: Path) -> bool:
    """Whether the file exists, and may be used as an outbox by this process.

    Raises:
        NotAnOutbox: it is a link, a folder or a device.
        OutboxForked: it was open when this process was forked.
        OutboxError: its folder is missing, another user owns it, or it has a second name.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise OutboxError(
                f"the folder of outbox {path} does not exist; create it first"
            ) from None
        return False
    except OSError as error:
        raise os_error(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a regular file"
        raise NotAnOutbox(f"{path} is {what}; an outbox is a regular file: name it directly")
    if found.st_uid != os.geteuid():
        raise OutboxError(
            f"outbox {path} belongs to user {found.st_uid}, and this process runs as user "
            f"{os.geteuid()}; run it as the owner, so that both can go on writing"
        )
    refuse_second_name(path, found)
    GATE.check(path, found)
    return True


def check_database(path: Path) -> None:
    """Refuse what cannot be an outbox, and leave nothing beside it.

    Raises:
        NotAnOutbox: it exists, and is no SQLite database.
        OutboxError: it cannot be used, or a file beside it is another user's.
    """
    is_there = check_file(path)
    check_side_files(path)
    if not is_there:
        return
    if takes_over(path):
        claim_log(path)
    try:
        with (
            GATE.use(),
            closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection,
        ):
            connection.execute("PRAGMA schema_version").fetchone()
    except sqlite3.Error as error:
        # A database it is; whoever opens it to write undoes that, and makes room.
        if not is_unfinished(error) and not lacks_index(error):
            raise outbox_error(path, error) from error


def open_writer(path: Path, *, is_relay: bool) -> WritingConnection:
    """Open an outbox to write to it; create it, readable by its owner only, where there is none.

    Args:
        path: absolute.
        is_relay: the one with the relay lock moves the log into the database, now and then.
    """
    if not check_file(path):
        _create(path)
    warn_of_folder(path.parent)
    check_side_files(path)
    if not takes_over(path):
        return _connect(path, is_relay=is_relay)
    if not path.stat().st_size:
        _connect(path, is_relay=False).close()  # no message is in it yet
    for _ in range(_CLAIMS_MAX):
        log = claim_log(path)
        connection = _connect(path, is_relay=is_relay)
        if log == claim_log(path):
            return connection
        connection.close()  # another process has closed the outbox, and removed the log
    raise OutboxError(
        f"outbox {path} was not opened: its log is removed again and again, and other users can "
        "create files in its folder; keep it in a folder that only its owner can write to"
    )


def _connect(path: Path, *, is_relay: bool) -> WritingConnection:
    with reported(path):
        # Used by one thread at a time, which the owner sees to; not always the same one.
        connection = sqlite3.connect(
            f"{path.as_uri()}?mode=rw",
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
            factory=WritingConnection,
        )
    try:
        with reported(path):
            _prepare(connection, path, is_relay=is_relay)
            connection.execute("SELECT 1 FROM sqlite_schema").fetchone()  # opens -wal and -shm
        check_side_files(path)  # the log is open now, and stays the one that was looked at
        connection.place = Place(path)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open an outbox only to look, in one consistent read transaction.

    Raises:
        NotAnOutbox: there is none.
    """
    with looking(path) as (connection, version):
        if not version:
            raise NotAnOutbox(
                f"the database {path} holds no outbox; its first message or its relay adds one"
            )
        if version < len(MIGRATIONS):
            raise NotAnOutbox(
                f"outbox {path} is of the older version {version}; the next relay updates it, "
                "or `reliablepub outbox migrate`"
            )
        yield connection


@contextmanager
def looking(path: Path) -> Iterator[tuple[sqlite3.Connection, int]]:
    """Look into a database that may not hold an outbox yet (version 0).

    A ``mode=ro`` connection never checkpoints and never removes the log, whatever else is broken.

    Raises:
        NotAnOutbox: there is no file, or it is something else.
    """
    try:
        found = path.stat()
    except OSError:
        found = None
    if found is None or not stat.S_ISREG(found.st_mode):
        raise NotAnOutbox(f"there is no outbox {path}; it comes into being with the first message")
    real = path.resolve()
    check_side_files(real)
    if takes_over(real):
        claim_log(real)
    GATE.check(path, found)
    with GATE.use(), reported(path):
        connection = sqlite3.connect(
            f"{path.as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None
        )
        try:
            # A damaged row must be listed too.
            connection.text_factory = lambda text: text.decode(errors="replace")
            version = _begin_looking(connection, path)
            check_side_files(real)
            yield connection, version
        finally:
            connection.close()


def _begin_looking(connection: sqlite3.Connection, path: Path) -> int:
    """Begin the read transaction; on a full disk, with a little of the ballast."""
    while True:
        connection.execute("BEGIN")
        try:
            return version_of(connection.cursor(), path)
        except sqlite3.OperationalError as error:
            if not lacks_index(error) or not Ballast(path.resolve()).lend():
                raise
            connection.execute("ROLLBACK")


def _create(path: Path) -> None:
    """Create an empty file before SQLite would, with a wider mode; its log inherits the mode."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL  # which follows no link
    try:
        os.close(os.open(path, flags, 0o600))
    except FileExistsError:
        check_file(path)  # another process was faster
    except OSError as error:
        raise os_error(path, error) from error


def _prepare(connection: sqlite3.Connection, path: Path, *, is_relay: bool) -> None:
    connection.execute("BEGIN")  # only to read: who finds it current waits for no writer
    try:
        refuse_utf16(connection.cursor(), path)
        is_ready = is_current(connection.cursor(), path)
    finally:
        connection.execute("ROLLBACK")
    if not is_ready:
        _shape(connection)
        with transaction(connection, path):
            migrate(connection.cursor(), path)
        Ballast(path).restore()
    retry_while_locked = Retrying(
        retry=retry_if_exception_type(OutboxLocked),
        stop=stop_after_delay(BUSY_TIMEOUT_S),
        wait=wait_fixed(0.02),
        reraise=True,
    )
    retry_while_locked(_write_ahead, connection, path)
    connection.execute("PRAGMA synchronous = FULL")  # one fsync a commit: accepted means on disk
    connection.execute("PRAGMA mmap_size = 0")  # or a stray pointer could write into the file
    connection.execute("PRAGMA secure_delete = ON")  # what is confirmed is in no free page either
    connection.execute(f"PRAGMA journal_size_limit = {checkpoints.LOG_BYTES_KEPT:d}")
    checkpoints.begin(connection, is_relay=is_relay)


def _shape(connection: sqlite3.Connection) -> None:
    """A file of our own has our pages, and can give them back; any other is left as it is."""
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    if pages == 0:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES:d}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")


def _write_ahead(connection: sqlite3.Connection, path: Path) -> None:
    """Switch to a write-ahead log: needs the file alone for a moment; SQLite does not wait."""
    with reported(path):
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise OutboxError(
            f"outbox {path} cannot have a write-ahead log (it stays in mode {mode!r}); "
            "network file systems often cannot: put it on a local disk"
        )


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
