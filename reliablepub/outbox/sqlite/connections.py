"""Creates and opens an outbox file, and keeps connections to write to it.

Knows: paths, modes, pragmas, the schema and its version, and when a connection may be kept,
closed, or must never be closed. Must never know: messages.

The `Database` of this package is `SqliteDatabase`, in `reliablepub.outbox.sqlite.database`.

While this process may have the file open, only SQLite opens it: closing any other descriptor drops
SQLite's POSIX locks, and the next process to close the database would then delete the write-ahead
log that this process writes to. So the file is created and closed before SQLite opens it, and
examined by name only (``lstat``).

The database may belong to the application, with its own tables, ``user_version`` and
``application_id``. None of these is read or changed. The table ``reliablepub_schema`` holds the
version of the outbox.
"""

from __future__ import annotations

import logging
import os
import shlex
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Final
from urllib.parse import quote_from_bytes

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from reliablepub.errors import NotAnOutbox, OutboxDiskFailed, OutboxError, OutboxLocked
from reliablepub.outbox.entry import Counters
from reliablepub.outbox.patience import Patience
from reliablepub.outbox.rows import ID_MAX
from reliablepub.outbox.sqlite import checkpoints
from reliablepub.outbox.sqlite.failures import (
    is_unfinished,
    lacks_index,
    os_error,
    outbox_error,
    raise_reported,
    reported,
)
from reliablepub.outbox.sqlite.forks import GATE, Inode, abandon
from reliablepub.outbox.sqlite.location import (
    OF_SQLITE,
    OURS,
    Place,
    WritingConnection,
    check_side_files,
    claim_log,
    moved,
    refuse_overwritten,
    refuse_second_name,
    takes_over,
    warn_of_folder,
)
from reliablepub.outbox.sqlite.mounts import refuse_shared
from reliablepub.outbox.sqlite.space import PAGE_BYTES, Ballast
from reliablepub.outbox.sqlite.sql import QUERIES, schema
from reliablepub.outbox.sqlite.transactions import roll_back, transaction

VERSION: Final = 11
"""Version of the tables in ``schema.sql``."""
OLDEST: Final = 10
"""Version of the oldest outbox that can be upgraded."""


def holds_outbox(cursor: sqlite3.Cursor, path: Path) -> bool:
    """Whether the database holds an outbox. One of another version is refused."""
    # Without a transaction, another process could create the outbox between the two statements.
    assert cursor.connection.in_transaction
    (count,) = cursor.execute(QUERIES["has_schema"]).fetchone()
    if not count:
        return False
    (version,) = cursor.execute(QUERIES["schema_version"]).fetchone()
    check_version(version, path)
    return True


_UPGRADE: Final = (
    "when every process that uses the outbox has this reliablepub, run `reliablepub outbox upgrade`"
)


def check_version(version: int, path: Path, *, oldest: int = VERSION) -> None:
    """Check that an outbox is of a version that this library knows, and can use or upgrade."""
    if version > VERSION:
        raise NotAnOutbox(
            f"outbox {path} has version {version}, and this reliablepub knows version {VERSION}; "
            "upgrade reliablepub"
        )
    if version < oldest:
        remedy = _UPGRADE if version >= OLDEST else "drain it with the reliablepub that made it"
        raise NotAnOutbox(
            f"outbox {path} has version {version}, and this reliablepub knows version {VERSION}; "
            f"{remedy}"
        )


def ledger_of(row: tuple[int, ...] | None, path: Path) -> tuple[int, Counters]:
    """Return the highest id and the counts, as the query ``snapshot`` has found them."""
    if row is not None and {*map(type, row)} == {int} and row[0] < ID_MAX:  # an id is left
        last_id, *counts = row
        return last_id, Counters(*counts)
    what = "its ledger has no row" if row is None else "the numbers in its ledger are impossible"
    raise OutboxError(
        f"outbox {path} is damaged: {what}, so nothing was stored; copy its messages into a new "
        "outbox with `reliablepub outbox salvage`"
    )


def refuse_utf16(cursor: sqlite3.Cursor, path: Path) -> None:
    """Refuse a database with UTF-16 text: checksums cover the UTF-8 bytes that are sent."""
    (encoding,) = cursor.execute("PRAGMA encoding").fetchone()
    if encoding != "UTF-8":
        raise OutboxError(
            f"database {path} has text encoding {encoding}, and an outbox needs UTF-8: nothing was "
            "stored. Use a separate file for the outbox, or copy the application's tables into a "
            "new database with PRAGMA encoding = 'UTF-8', which cannot be changed later"
        )


def add_outbox(cursor: sqlite3.Cursor, path: Path) -> None:
    """Create the tables of the outbox in a transaction, if the database does not have them."""
    if not holds_outbox(cursor, path):
        refuse_utf16(cursor, path)
        for statement in schema():
            cursor.execute(statement)
        cursor.execute(QUERIES["record_version"], (VERSION, time.time()))


BUSY_TIMEOUT_S: Final = 5.0
_CLAIMS_MAX: Final = 9
_STEPS: Final = 1_000
"""Steps of SQLite's virtual machine between two looks at their number."""
_C_INT_MAX: Final = 2**31 - 1
_ADDED: Final = (
    "`reliablepub outbox create`, Outbox.create(), its first message or its relay creates it"
)


def lacks_outbox(path: Path) -> NotAnOutbox:
    """Make the error for a database without an outbox."""
    return NotAnOutbox(f"the database {path} holds no outbox; {_ADDED}")


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return the path as an absolute one, whose links are not resolved."""
    # If a link to its directory is switched to another one, the path must lead to the other file,
    # which the next process will open.
    return Path(path).absolute()


def _is_unseen(path: Path) -> bool:
    """Whether this process may not look at a path."""
    try:
        path.lstat()
    except PermissionError:
        return True
    except OSError:
        pass
    return False


def check_file(path: Path) -> bool:
    """Check that this process may use the file as an outbox; return whether it exists."""
    refuse_shared(path)
    try:
        found = path.lstat()
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise OutboxError(
                f"the directory of outbox {path} does not exist; create it first"
            ) from None
        return False
    except OSError as error:
        raise os_error(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a regular file"
        raise NotAnOutbox(f"{path} is {what}; an outbox is a regular file: name it directly")
    _refuse_stranger(path, found)
    refuse_second_name(path, found)
    refuse_overwritten(path, found)
    GATE.check(path, found)
    return True


def _refuse_stranger(path: Path, found: os.stat_result) -> None:
    """Refuse a process whose user is not the owner, who could not use the files it makes."""
    user = os.geteuid()
    if found.st_uid != user:
        beside = [Path(f"{path}{suffix}") for suffix in ("", *OF_SQLITE, *OURS)]
        beside += [] if os.access(path.parent, os.W_OK) else [path.parent]  # to make these files in
        files = " ".join(shlex.quote(os.fspath(file)) for file in beside if file.exists())
        raise OutboxError(
            f"outbox {path} belongs to user {found.st_uid}, and this process runs as user {user}; "
            "run it as the owner. To change the owner, stop every process that uses the "
            f"outbox, and as root: chown {user} {files}"
        )


def check_database(path: Path) -> None:
    """Refuse a file that cannot be an outbox, without creating files beside it."""
    is_there = check_file(path)
    check_side_files(path)
    if not is_there:
        return
    if takes_over(path):
        claim_log(path)
    try:
        with (
            GATE.use(),
            closing(sqlite3.connect(uri_of(path, "ro"), uri=True)) as connection,
        ):
            connection.execute("PRAGMA schema_version").fetchone()
    except sqlite3.Error as error:
        # These errors mean a database that only a writer can open: it rolls back an unfinished
        # transaction, or releases disk space.
        if not is_unfinished(error) and not lacks_index(error):
            raise outbox_error(path, error) from error


def uri_of(path: Path, mode: str) -> str:
    """Return the URI by which SQLite opens a file, without creating it."""
    # `Path.as_uri` loads urllib.request, and with it http.client and ssl, since Python 3.14.
    return f"file:{quote_from_bytes(os.fsencode(path))}?mode={mode}"


def open_writer(path: Path, *, is_relay: bool) -> WritingConnection:
    """Open an outbox to write to it. A missing one is created, readable by its owner only."""
    if not check_file(path):
        _create(path)
    warn_of_folder(path.parent)
    check_side_files(path)
    if not takes_over(path):
        return _connect(path, is_relay=is_relay)
    if not path.stat().st_size:
        # First the tables: SQLite would remove a log that is claimed beside an empty file. There is
        # no message in them yet, so a planted log may get them.
        _connect(path, is_relay=False).close()
    for _ in range(_CLAIMS_MAX):
        log = claim_log(path)
        connection = _connect(path, is_relay=is_relay)
        if log == claim_log(path):
            return connection
        connection.close()  # another process has closed the outbox, and removed the log
    raise OutboxError(
        f"outbox {path} was not opened: its log is removed repeatedly, and other users can "
        "create files in its directory; keep it in a directory that only its owner can write to"
    )


def _connect(path: Path, *, is_relay: bool) -> WritingConnection:
    with reported(path):
        # Any thread may use the connection; its owner lets only one use it at a time.
        connection = sqlite3.connect(
            uri_of(path, "rw"),
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
            factory=WritingConnection,
        )
    connection.text_factory = _lenient
    try:
        with reported(path):
            _prepare(connection, path, is_relay=is_relay)
            connection.execute("SELECT 1 FROM sqlite_schema").fetchone()  # opens -wal and -shm
        check_side_files(path)  # after the log was opened, so that it is the one that is checked
        connection.place = Place(path, is_logged=True)
    except BaseException:
        connection.close()
        raise
    return connection


def _lenient(text: bytes) -> str:
    """Decode a text of the database: damaged rows, which may not be UTF-8, must be listed too."""
    return text.decode(errors="replace")


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open an outbox read-only, in one read transaction."""
    with looking(path) as (connection, has_outbox):
        if not has_outbox:
            raise lacks_outbox(path)
        yield connection


@contextmanager
def looking(
    path: Path, *, steps_max: int | None = None
) -> Iterator[tuple[sqlite3.Connection, bool]]:
    """Open a database read-only, and tell whether it holds an outbox."""
    try:
        found = path.stat()
    except PermissionError as error:
        raise OutboxError(
            f"outbox {path} cannot be seen by this user: {error.strerror}; run this as its owner"
        ) from error
    except OSError:
        raise NotAnOutbox(f"there is no outbox {path}; {_ADDED}") from None
    if not stat.S_ISREG(found.st_mode):
        raise NotAnOutbox(f"{path} is not a regular file; an outbox is a regular file")
    real = path.resolve()
    refuse_shared(real)
    if os.geteuid():
        _refuse_stranger(real, found)
    check_side_files(real)
    if found.st_uid != os.geteuid() or takes_over(real):
        # Root may look; what it creates must belong to the owner.
        claim_log(real)
    GATE.check(path, found)
    with GATE.use(), reported(path):
        # A `mode=ro` connection never checkpoints and never removes the log.
        connection = sqlite3.connect(
            uri_of(path, "ro"), uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None
        )
        try:
            connection.text_factory = _lenient
            if steps_max is not None:
                _limit(connection, steps_max)  # a view in a forged file can take any number
            has_outbox = _begin_looking(connection, path)
            check_side_files(real)
            yield connection, has_outbox
        finally:
            connection.close()


def _limit(connection: sqlite3.Connection, steps_max: int) -> None:
    """Limit the steps of SQLite's virtual machine in all, and also the bytes of each value."""
    asks = count(1)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(steps_max, _C_INT_MAX))
    connection.set_progress_handler(lambda: next(asks) * _STEPS > steps_max, _STEPS)


def _begin_looking(connection: sqlite3.Connection, path: Path) -> bool:
    """Begin the read transaction; on a full disk, release a part of the ballast for it."""
    while True:
        connection.execute("BEGIN")
        try:
            return holds_outbox(connection.cursor(), path)
        except sqlite3.OperationalError as error:
            if not lacks_index(error) or not Ballast(path.resolve()).lend():
                raise
            roll_back(connection)


def _create(path: Path) -> None:
    """Create an empty file with mode 600: SQLite would give it a wider one, and the log as well."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL  # O_EXCL follows no symbolic link
    try:
        os.close(os.open(path, flags, 0o600))
    except FileExistsError:
        check_file(path)  # another process has created it
    except OSError as error:
        raise os_error(path, error) from error


def _prepare(connection: sqlite3.Connection, path: Path, *, is_relay: bool) -> None:
    connection.execute("BEGIN")  # read only: if the tables are there, no writer delays the open
    try:
        refuse_utf16(connection.cursor(), path)
        is_ready = holds_outbox(connection.cursor(), path)
    finally:
        roll_back(connection)
    if not is_ready:
        _shape(connection)
        with transaction(connection, path):
            add_outbox(connection.cursor(), path)
        Ballast(path).restore()
    # The switch to a log needs an exclusive lock, and SQLite does not wait for it.
    retry_while_locked = Retrying(
        retry=retry_if_exception_type(OutboxLocked),
        stop=stop_after_delay(BUSY_TIMEOUT_S),
        wait=wait_fixed(0.02),
        reraise=True,
    )
    retry_while_locked(_write_ahead, connection, path)
    connection.execute("PRAGMA synchronous = FULL")  # one fsync a commit: accepted means on disk
    # On macOS, fsync leaves the data in the drive's cache. Elsewhere SQLite ignores these.
    connection.execute("PRAGMA fullfsync = ON")
    connection.execute("PRAGMA checkpoint_fullfsync = ON")
    # A rewrite of the file fails where no temporary file can be created, as in many containers. It
    # needs 8 MiB (see `space.LEFT_PAGES_MAX`).
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("PRAGMA mmap_size = 0")  # a stray pointer could write into a mapped file
    connection.execute("PRAGMA secure_delete = ON")  # no confirmed body remains in a free page
    connection.execute(f"PRAGMA journal_size_limit = {checkpoints.LOG_BYTES_KEPT:d}")
    checkpoints.begin(connection, is_relay=is_relay)


def _shape(connection: sqlite3.Connection) -> None:
    """Set page size and incremental vacuum of a new file; an application's file keeps its own."""
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    if pages == 0:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES:d}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")


def _write_ahead(connection: sqlite3.Connection, path: Path) -> None:
    """Switch to a write-ahead log."""
    with reported(path):
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise OutboxError(
            f"outbox {path} cannot have a write-ahead log (it stays in mode {mode!r}); "
            "network file systems often cannot: put it on a local disk"
        )


LOGGER: Final = logging.getLogger("reliablepub.outbox")


class Writer:
    """A connection to an outbox, used as long as the path leads to the open files.

    A ``with`` block provides the connection, opened if necessary. A fork waits until the block
    ends, and errors of SQLite in the block become `OutboxError`.
    """

    def __init__(self, path: Path, *, is_relay: bool, patience: Patience | None = None) -> None:
        self._path = path
        self._is_relay = is_relay  # the caller holds the relay lock: the connection checkpoints
        self._file: Inode | None = None
        self._pid = 0
        self._uses: list[tuple[int, int]] = []
        self._patience = patience or Patience(str(path))  # for the lock of other writers
        self.connection: WritingConnection | None = None
        GATE.keep(self)

    def __enter__(self) -> WritingConnection:
        """Begin a use."""
        use = GATE.begin_use()
        try:
            connection = self.connection or self.opened()
        except BaseException:
            GATE.end_use(use)
            raise
        self._uses.append(use)
        return connection

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object
    ) -> None:
        """End the use."""
        GATE.end_use(self._uses.pop())
        if error is not None:
            raise_reported(self._path, error)

    def renewed(self) -> WritingConnection:
        """Check that the path leads to the open files; open them again if SQLite's locks were lost.

        Call it within a use.
        """
        connection = self.opened()
        connection.place.check()
        if connection.place.is_locked:
            return connection
        done = "was opened again"
        if connection.must_stay:
            done = "cannot be opened again before a commit succeeds"
        LOGGER.warning(
            "the locks on outbox %s were lost, because this process opened and closed the file "
            "without SQLite (perhaps to copy it); it %s. Copy an outbox with sqlite3's backup, or "
            "from another process",
            self._path,
            done,
            extra={"event": "locks_lost"},
        )
        GATE.rest()  # also other connections of this process to the file, which keep it open
        self.rest()
        return self.opened()

    # How a use of the file ends:
    #
    #           | the connection is                        | the next use opens
    # rest()    | closed, unless that could lose messages  | the same file, or raises
    # leave()   | left open, unless it was overwritten     | the file at the path then
    # close()   | closed, or left open as above            | the file at the path then
    #
    # Left open means `abandon`: out of reach, with SQLite's locks, until the process ends.

    def rest(self) -> None:
        """Close the connection, as before a fork. The next use opens the same file, or raises."""
        connection = self.connection
        is_own = os.getpid() == self._pid
        # `must_stay`: after a commit that failed on the disk, a new connection could rebuild the
        # index of the log, and take that commit for a good one. A connection whose file was
        # overwritten stays too, and raises at each use. A forked child then refuses the file.
        if connection is None or (is_own and connection.must_stay):
            return
        self.connection = None
        if is_own:
            connection.close()
        else:
            abandon(connection)

    def leave(self) -> None:
        """Drop files that the path does not lead to any more. The next use opens the new ones."""
        if self.connection is None or not self.connection.place.is_overwritten:
            # Closing it could delete the log of another process that uses the path now.
            self._abandon()

    def close(self) -> None:
        """Close the file. The next use opens the file that is at the path then, even another."""
        if self.connection is not None and self.connection.must_stay:
            self._abandon()
        self._file = None
        self.rest()

    def _abandon(self) -> None:
        connection, self.connection, self._file = self.connection, None, None
        if connection is not None:
            abandon(connection)

    def opened(self) -> WritingConnection:
        """Return the open connection, or open one."""
        if self.connection is not None:
            return self.connection
        try:
            connection = open_writer(self._path, is_relay=self._is_relay)
        except OutboxError as error:
            # Closed for a fork, perhaps: the directory may be seen again soon.
            if self._file is not None and _is_unseen(self._path):
                raise OutboxDiskFailed(str(error)) from error
            raise
        if self._file not in (None, connection.place.file):
            connection.close()
            raise moved(self._path, "was replaced by another file")
        self._file, self._pid = connection.place.file, os.getpid()
        connection.patience = self._patience
        self.connection = connection
        return connection

    def __del__(self) -> None:
        """Close the connection: Python 3.13 warns of one left open, and users need not close."""
        if self.connection is not None:
            with GATE.use():
                self.close()
