"""What SQLite and the operating system say becomes an error that says what to do."""

import errno
import os
import resource
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from reliablepub.errors import (
    NotAnOutbox,
    OutboxDiskFailed,
    OutboxDiskFull,
    OutboxError,
    OutboxLocked,
    OutboxMoved,
)
from reliablepub.outbox.entry import TRANSIENT
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite import forks
from reliablepub.outbox.sqlite.failures import (
    is_damage,
    is_decided,
    is_unfinished,
    os_error,
    outbox_error,
    reported,
)
from reliablepub.outbox.sqlite.forks import open_files
from reliablepub.outbox.sqlite.lock import holder_pid
from reliablepub.outbox.sqlite.store import SqliteStore

PATH = Path("/outbox.db")


def raised(code: int) -> sqlite3.Error:
    """As SQLite raises it, with its extended result code."""
    error = sqlite3.OperationalError("its words")
    error.sqlite_errorcode, error.sqlite_errorname = code, "ITS_NAME"
    return error


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (sqlite3.SQLITE_BUSY_TIMEOUT, OutboxLocked, "stayed locked by another process"),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, OutboxError, "has changed since this connection began"),
        (sqlite3.SQLITE_LOCKED_SHAREDCACHE, OutboxLocked, "stayed locked by another process"),
        (sqlite3.SQLITE_PROTOCOL, OutboxLocked, "stayed locked by another process"),
        (sqlite3.SQLITE_READONLY_DIRECTORY, OutboxError, "cannot be written"),
        (sqlite3.SQLITE_READONLY_ROLLBACK, OutboxError, "holds an interrupted transaction"),
        (
            sqlite3.SQLITE_IOERR_FSYNC,
            OutboxDiskFailed,
            "cannot be read or written by the operating system",
        ),
        (sqlite3.SQLITE_CORRUPT_INDEX, OutboxError, "is damaged"),
        (sqlite3.SQLITE_FULL, OutboxDiskFull, "cannot grow, because the disk is full"),
        (sqlite3.SQLITE_CANTOPEN_ISDIR, OutboxError, "cannot be opened"),
        (sqlite3.SQLITE_READONLY_DBMOVED, OutboxMoved, "was deleted, moved or replaced while"),
        (sqlite3.SQLITE_NOTADB, NotAnOutbox, "is not a SQLite database"),
        (sqlite3.SQLITE_MISUSE, OutboxError, "could not be used"),
    ],
)
def test_each_code_has_a_meaning(code: int, kind: type[OutboxError], words: str) -> None:
    error = outbox_error(PATH, raised(code))
    assert type(error) is kind
    assert str(error).startswith(f"outbox {PATH} {words}")
    assert str(error).endswith(" (SQLite: its words, ITS_NAME)")


@contextmanager
def without_descriptors() -> Iterator[None]:
    """No file can be opened in the block."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    with ExitStack() as files:
        with suppress(OSError):
            while True:
                files.callback(os.close, os.dup(0))
        yield


def test_a_shortage_of_descriptors_passes(path: Path, child: Callable[..., int]) -> None:
    """A relay has its file open, but a fork closes it."""

    def run() -> None:
        with closing(SqliteStore(path)) as store:
            store._writer.rest()
            with (
                without_descriptors(),
                pytest.raises(OutboxDiskFailed, match="no file descriptor is free") as error,
            ):
                store.snapshot()
            assert isinstance(error.value, TRANSIENT)
            store.snapshot()

    assert child(run) == 0


@pytest.mark.parametrize("is_relay", [False, True])
def test_so_does_one_that_lets_no_outbox_be_created(
    path: Path, child: Callable[..., int], *, is_relay: bool
) -> None:
    def run() -> None:
        with closing(Outbox(path)) as outbox:
            with (
                without_descriptors(),
                pytest.raises(OutboxDiskFailed, match="no file descriptor is free"),
            ):
                SqliteStore(path) if is_relay else outbox.enqueue(b"")
            outbox.enqueue(b"")

    assert child(run) == 0


def test_without_a_free_descriptor_nothing_is_taken_for_absent(
    path: Path, child: Callable[..., int]
) -> None:
    """Neither the relay nor the files that are open."""
    words = r"lock cannot be opened, because no file descriptor is free"

    def run() -> None:
        with closing(SqliteStore(path)):
            before = open_files()
            with without_descriptors():
                with pytest.raises(OutboxDiskFailed, match=words):
                    holder_pid(path)
                assert before.keys() <= open_files().keys()

    assert child(run) == 0


def test_nor_without_one_of_the_whole_system(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def listdir(_: str) -> list[str]:
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    with closing(SqliteStore(path)):
        before = open_files()
        monkeypatch.setattr(forks, "os", SimpleNamespace(**vars(os) | {"listdir": listdir}))
        assert before.keys() <= open_files().keys()


def test_an_error_that_is_not_sqlites_own_has_no_code() -> None:
    error = sqlite3.ProgrammingError("Cannot operate on a closed database.")
    words = "(SQLite: Cannot operate on a closed database., ProgrammingError)"
    assert str(outbox_error(PATH, error)) == f"outbox {PATH} could not be used {words}"
    assert not any(is_so(error) for is_so in (is_damage, is_unfinished))
    assert not is_decided(PATH, error)


def test_it_is_known_what_a_code_decides() -> None:
    decided = {
        *(sqlite3.SQLITE_BUSY_RECOVERY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL),
        sqlite3.SQLITE_CONSTRAINT_UNIQUE,
    }
    open_ = {
        *(sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_CORRUPT_VTAB, sqlite3.SQLITE_READONLY),
        sqlite3.SQLITE_READONLY_ROLLBACK,
    }
    assert {code for code in decided | open_ if is_decided(PATH, raised(code))} == decided
    damage = {code for code in decided | open_ if is_damage(raised(code))}
    assert damage == {sqlite3.SQLITE_CORRUPT_VTAB}
    unfinished = {code for code in decided | open_ if is_unfinished(raised(code))}
    assert unfinished == {sqlite3.SQLITE_READONLY_ROLLBACK}


def test_only_what_sqlite_raises_is_told_in_our_words() -> None:
    cause = raised(sqlite3.SQLITE_FULL)
    with pytest.raises(OutboxDiskFull, match=str(PATH)) as caught, reported(PATH):
        raise cause
    assert caught.value.__cause__ is cause
    with pytest.raises(KeyError), reported(PATH):
        raise KeyError


def test_damage_that_cannot_even_be_quoted_is_damage() -> None:
    said = b'malformed database schema (t) - near "\xeb": syntax error'
    cause = UnicodeDecodeError("utf-8", said, 38, 39, "invalid continuation byte")
    words = rf"^outbox {PATH} is damaged, .* \(SQLite: malformed database schema\)$"
    with pytest.raises(OutboxError, match=words) as caught, reported(PATH):
        raise cause
    assert caught.value.__cause__ is cause
    with pytest.raises(UnicodeDecodeError), reported(PATH):
        raise UnicodeDecodeError("utf-8", b"\xeb", 0, 1, "invalid continuation byte")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_the_system_too_can_say_that_the_disk_is_full(number: int) -> None:
    words = os.strerror(number)
    error = os_error(PATH, OSError(number, words))
    assert type(error) is OutboxDiskFull
    what_to_do = "free some space and try again"
    assert str(error) == f"the disk is full under outbox {PATH} ({words}); {what_to_do}"


def test_any_other_word_of_the_system_is_passed_on() -> None:
    error = os_error(PATH, PermissionError(errno.EACCES, "Permission denied"))
    assert type(error) is OutboxError
    assert str(error) == (
        f"outbox {PATH} cannot be used: Permission denied; this user needs access to the file, "
        "and may need to write to its directory"
    )
