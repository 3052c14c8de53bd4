"""How an outbox file is created, opened and written to, so that nothing is lost on the way.

Knows: paths, modes, pragmas and transactions. Must never know: messages.

The file is never opened by anything but SQLite while this process may have it open: closing any
other descriptor would drop SQLite's locks, and the next process to close the database would then
delete the write-ahead log under our feet. So it is created and closed first, and otherwise only
looked at by name (``lstat``).
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from reliablepub.errors import NotAnOutbox, OutboxError, OutboxLocked, OutboxUnsure
from reliablepub.outbox.failures import is_io_error, os_error, outbox_error
from reliablepub.outbox.migrate import is_current, migrate, migrations, version_of

BUSY_TIMEOUT_S: Final = 5.0
CHECKPOINT_PAGES: Final = 1_000
"""4 MiB: larger ones were not measurably faster, and `ballast` must outweigh one checkpoint."""
JOURNAL_BYTES_MAX: Final = 64 * 1024 * 1024
"""What a log that a stuck reader let grow is cut back to."""


def absolute(path: str | os.PathLike[str]) -> Path:
    """The path, whatever the working folder will be; a link at its end is not followed."""
    path = Path(path).absolute()
    return path.parent.resolve() / path.name


def check_file(path: Path) -> bool:
    """Whether the file exists, and may be used as an outbox by this process.

    Raises:
        NotAnOutbox: it is a link, a folder or a device.
        OutboxError: its folder is missing, or it belongs to somebody else.
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
    return True


def check_database(path: Path) -> None:
    """Refuse what cannot be an outbox, and leave nothing beside it.

    Raises:
        NotAnOutbox: it exists, and is no SQLite database.
        OutboxError: it cannot be used.
    """
    if not check_file(path):
        return
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
            connection.execute("PRAGMA schema_version").fetchone()
    except sqlite3.Error as error:
        raise outbox_error(path, error) from error


def open_writer(path: Path, *, checkpoints: bool) -> sqlite3.Connection:
    """Open an outbox to write to it; create it, readable by its owner only, where there is none.

    Args:
        path: absolute.
        checkpoints: only the relay moves the write-ahead log into the database: one process that
            does it is enough, and two were the trigger of a rare corruption before SQLite 3.51.3.
    """
    if not check_file(path):
        _create(path)
    try:
        # Used by one thread at a time, which the owner sees to; not always the same one.
        connection = sqlite3.connect(
            f"{path.as_uri()}?mode=rw",
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
    except sqlite3.Error as error:
        raise outbox_error(path, error) from error
    try:
        _prepare(connection, path, checkpoints=checkpoints)
    except sqlite3.Error as error:
        connection.close()
        raise outbox_error(path, error) from error
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
        if version < len(migrations()):
            raise NotAnOutbox(
                f"outbox {path} is of the older version {version}; the next relay updates it"
            )
        yield connection


@contextmanager
def looking(path: Path) -> Iterator[tuple[sqlite3.Connection, int]]:
    """Look into a database that may not hold an outbox yet (version 0).

    A ``mode=ro`` connection never checkpoints and never removes the log, whatever else is broken.

    Raises:
        NotAnOutbox: there is no file, or it is something else.
    """
    if not path.is_file():
        raise NotAnOutbox(f"there is no outbox {path}; it comes into being with the first message")
    try:
        connection = sqlite3.connect(
            f"{path.as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None
        )
        try:
            # A damaged row must be listed too.
            connection.text_factory = lambda text: text.decode(errors="replace")
            connection.execute("BEGIN")
            yield connection, version_of(connection.cursor(), path)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise outbox_error(path, error) from error


@contextmanager
def transaction(connection: sqlite3.Connection, path: Path) -> Iterator[None]:
    """One transaction, wholly or not at all; takes the write lock at once.

    A transaction that begins by reading cannot wait for the lock later (SQLITE_BUSY_SNAPSHOT).

    Raises:
        OutboxUnsure: the commit itself failed on the disk; do not go on with this connection.
        OutboxError: nothing was changed.
    """
    committing = False
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield
        committing = True
        connection.execute("COMMIT")
    except BaseException as error:
        _roll_back(connection)
        if committing and is_io_error(error):
            raise OutboxUnsure(
                f"outbox {path}: the disk failed during a commit, so what it holds is not known; "
                f"open it again and look ({error})"
            ) from error
        if isinstance(error, sqlite3.Error):
            raise outbox_error(path, error) from error
        raise


def _roll_back(connection: sqlite3.Connection) -> None:
    """End the transaction if it is still open: some errors have ended it already."""
    try:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    except sqlite3.Error:
        pass  # the error that brought us here says more


def _create(path: Path) -> None:
    """Create an empty file before SQLite would, with a wider mode; its log inherits the mode."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        os.close(os.open(path, flags, 0o600))
    except FileExistsError:
        check_file(path)  # another process was faster
    except OSError as error:
        raise os_error(path, error) from error


def _prepare(connection: sqlite3.Connection, path: Path, *, checkpoints: bool) -> None:
    connection.execute("BEGIN")  # only to read: who finds it current waits for no writer
    try:
        is_ready = is_current(connection.cursor(), path)
    finally:
        connection.execute("ROLLBACK")
    if not is_ready:
        with transaction(connection, path):
            migrate(connection.cursor(), path)
    retry_while_locked = Retrying(
        retry=retry_if_exception_type(OutboxLocked),
        stop=stop_after_delay(BUSY_TIMEOUT_S),
        wait=wait_fixed(0.02),
        reraise=True,
    )
    retry_while_locked(_write_ahead, connection, path)
    connection.execute("PRAGMA synchronous = FULL")  # one fsync a commit: accepted means on disk
    connection.execute("PRAGMA secure_delete = FAST")
    connection.execute(f"PRAGMA journal_size_limit = {JOURNAL_BYTES_MAX:d}")
    # The last connection to close moves the log whatever this says, but alone: SQLite does it under
    # an exclusive lock on the database, so there is nobody to race with. It is not turned off
    # (SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE): where no relay runs, nothing else would shorten the log,
    # and each opening reads all of it. What is left before SQLite 3.51.3: in an application's own
    # database its own connections checkpoint every 1000 pages, beside the relay, unless it sets
    # `PRAGMA wal_autocheckpoint = 0` on them. They are not ours to set.
    pages = CHECKPOINT_PAGES if checkpoints else 0
    connection.execute(f"PRAGMA wal_autocheckpoint = {pages:d}")


def _write_ahead(connection: sqlite3.Connection, path: Path) -> None:
    """Switch to a write-ahead log: needs the file alone for a moment; SQLite does not wait."""
    try:
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    except sqlite3.Error as error:
        raise outbox_error(path, error) from error
    if mode != "wal":
        raise OutboxError(
            f"outbox {path} cannot have a write-ahead log (it stays in mode {mode!r}); "
            "network file systems often cannot: put it on a local disk"
        )
