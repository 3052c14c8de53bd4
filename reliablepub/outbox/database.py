"""How an outbox file is created, opened and written to, so that nothing is lost on the way.

Knows: paths, modes and pragmas. Must never know: messages.

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

from reliablepub.errors import NotAnOutbox, OutboxError, OutboxLocked
from reliablepub.outbox import checkpoints
from reliablepub.outbox.ballast import Ballast
from reliablepub.outbox.failures import (
    is_unfinished,
    lacks_index,
    os_error,
    outbox_error,
    reported,
)
from reliablepub.outbox.forks import GATE
from reliablepub.outbox.migrate import MIGRATIONS, is_current, migrate, refuse_utf16, version_of
from reliablepub.outbox.place import Place, WritingConnection, refuse_second_name
from reliablepub.outbox.side_files import (
    check_side_files,
    claim_log,
    takes_over,
    warn_of_folder,
)
from reliablepub.outbox.transactions import transaction

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
        is_relay: the one with the lease moves the log into the database, now and then.
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
