"""The log is bounded for every writer, and moved by one connection at a time."""

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

import reliablepub.outbox
from reliablepub.errors import OutboxInUse
from reliablepub.message import Message
from reliablepub.outbox.admin.transfer import export_lines, import_lines
from reliablepub.outbox.entry import Changes
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite import checkpoints, lock
from reliablepub.outbox.sqlite.lock import RelayLock, holder_pid
from reliablepub.outbox.sqlite.space import PAGE_BYTES
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.outbox.conftest import Make
from tests.outbox.shim import Operation, shim

KIB = b"x" * 1024


@pytest.fixture
def application(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection of the application's, which may read for long."""
    Outbox(path).create()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


def begin_to_read(application: sqlite3.Connection) -> None:
    application.execute("BEGIN")
    application.execute("SELECT * FROM reliablepub_ledger").fetchall()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "LOG_BYTES_KEPT", 8 * PAGE_BYTES)
    monkeypatch.setattr(checkpoints, "LOG_BYTES_LONG", 32 * PAGE_BYTES)


def log_bytes(path: Path) -> int:
    return path.with_name(path.name + "-wal").stat().st_size


def moved(log: list[Operation], path: Path) -> int:
    """Pages written into the database itself."""
    return sum(o.kind == "write" and o.path == str(path) for o in log)


def test_the_log_stays_short_without_a_relay(path: Path) -> None:
    sizes = []
    with closing(Outbox(path)) as one, closing(Outbox(path)) as other:
        for _ in range(100):
            one.enqueue(Message(KIB))
            other.enqueue(Message(KIB))
            sizes.append(log_bytes(path))
        assert one.status().open == 200
    assert max(sizes) < 2 * checkpoints.LOG_BYTES_LONG
    assert sum(a > b for a, b in pairwise(sizes)) > 2, "cut back, several times"


@pytest.mark.parametrize("error", [sqlite3.OperationalError, sqlite3.DatabaseError])
def test_what_is_committed_counts_though_the_log_cannot_be_moved(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: type[sqlite3.Error]
) -> None:
    """Another program has filled the disk since, or the log cannot be read.

    A caller that gets an error stores it again.
    """
    checkpoint = checkpoints._checkpoint
    failed = 0

    def failing(connection: sqlite3.Connection, mode: str) -> bool:
        nonlocal failed
        if mode == "FULL":
            failed += 1
            raise error("disk I/O error")
        return checkpoint(connection, mode)

    monkeypatch.setattr(checkpoints, "_RESTART_S", 0.0)
    monkeypatch.setattr(checkpoints, "_checkpoint", failing)
    monkeypatch.setattr(checkpoints, "_log_bytes", lambda _: 3 * checkpoints.LOG_BYTES_LONG)
    with closing(Outbox(path)) as outbox:
        outbox.enqueue(Message(KIB))
        outbox.enqueue(Message(KIB))
        assert outbox.status().open == 2
    assert failed == 2


def test_it_is_not_moved_behind_a_call_that_has_written_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be checkpointed already, which SQLite before 3.51.3 must not begin anew."""
    checkpoint = checkpoints._checkpoint
    has_written: list[bool] = []

    def look(connection: sqlite3.Connection, mode: str) -> bool:
        log = files.log or []
        has_written.append(any(o.kind == "write" and o.path == f"{path}-wal" for o in log))
        return checkpoint(connection, mode)

    monkeypatch.setattr(checkpoints, "_checkpoint", look)
    monkeypatch.setattr(checkpoints, "_log_bytes", lambda _: 3 * checkpoints.LOG_BYTES_LONG)
    with shim() as files, closing(Outbox(path)) as outbox:
        for _ in range(2):
            files.log = []
            outbox.enqueue(Message(KIB), key="a")
        assert outbox.status().open == 1
    assert has_written == [True, True]


def test_it_stays_short_where_many_write_all_the_time(path: Path) -> None:
    """A checkpoint that lets others write never reaches the end of the log."""
    Outbox(path).create()
    sizes: list[int] = []

    def enqueue(_: int) -> None:
        with closing(Outbox(path)) as outbox:
            for _ in range(150):
                outbox.enqueue(Message(KIB * 8))
                sizes.append(log_bytes(path))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(enqueue, range(8)))
    assert Outbox(path).status().open == len(sizes) == 1_200
    assert max(sizes) < 60 * checkpoints.LOG_BYTES_LONG, "12 to 29 times; it was 200"


def test_a_reader_that_keeps_it_does_not_double_each_commit(
    path: Path, application: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_RESTART_S", 60.0)
    with shim() as files, closing(Outbox(path)) as outbox:
        outbox.enqueue(Message(KIB))
        begin_to_read(application)
        while log_bytes(path) < 3 * checkpoints.LOG_BYTES_LONG:
            outbox.enqueue(Message(KIB))
        files.log = []
        for _ in range(20):
            outbox.enqueue(Message(KIB))
        assert sum(o.kind == "sync" and o.path == f"{path}-wal" for o in files.log) == 20


def test_beside_a_relay_no_other_process_moves_it(path: Path) -> None:
    with shim() as files, closing(SqliteStore(path)), closing(Outbox(path)) as outbox:
        files.log = []
        for _ in range(100):
            outbox.enqueue(Message(KIB))
        assert moved(files.log, path) == 0
        assert log_bytes(path) > checkpoints.LOG_BYTES_LONG


@pytest.mark.parametrize("reader", [False, True])
def test_a_relay_with_nothing_to_commit_restarts_it(
    path: Path, application: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch, *, reader: bool
) -> None:
    monkeypatch.setattr(checkpoints, "_RESTART_S", 0.0)
    sizes = []
    with closing(SqliteStore(path)) as store, closing(Outbox(path)) as outbox:
        for n in range(100):
            if reader and n == 20:
                begin_to_read(application)
            if reader and n == 60:
                application.execute("ROLLBACK")
            outbox.enqueue(Message(KIB))
            assert store.relieve() == ""
            sizes.append(log_bytes(path))
        assert store.snapshot().counters.open == 100
    if reader:
        assert sizes[20:60] == sorted(sizes[20:60]), "never waits for the reader"
        sizes = sizes[61:]
    assert max(sizes[1:]) < 2 * checkpoints.LOG_BYTES_LONG
    assert any(a > b for a, b in pairwise(sizes)), "cut back"


def test_an_idle_relay_cuts_it_back_once_a_reader_is_gone(
    path: Path, application: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_RESTART_S", 0.0)
    with closing(SqliteStore(path)) as store, closing(Outbox(path)) as outbox:
        begin_to_read(application)
        for _ in range(60):
            outbox.enqueue(Message(KIB))
        application.execute("ROLLBACK")
        before = store.snapshot()
        for _ in range(3):
            store.relieve()
        assert log_bytes(path) < checkpoints.LOG_BYTES_LONG
        assert store.snapshot() == before


def test_a_relay_that_was_taken_over_leaves_the_log_alone(path: Path) -> None:
    with shim() as files, closing(SqliteStore(path)) as store, closing(Outbox(path)) as outbox:
        with store._writer as connection:
            store._begin_run(connection)  # as another relay does whose lock is not this one's
        for _ in range(100):
            outbox.enqueue(Message(KIB))
        files.log = []
        assert store.relieve() == ""
        assert moved(files.log, path) == 0


def test_a_read_transaction_that_stays_open_makes_it_grow_until_it_ends(
    path: Path, application: sqlite3.Connection, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "CHECKPOINT_BYTES", 8 * PAGE_BYTES)

    def turn(times: int) -> int:
        for _ in range(times):
            store.commit(Changes(new=[new := entry(body=KIB * 8)]))
            store.commit(Changes(confirmed=[new]))
        return Outbox(path).status().log_bytes

    with closing(SqliteStore(path)) as store:
        usual = turn(50)
        assert usual < 32 * PAGE_BYTES
        begin_to_read(application)
        assert turn(50) > 10 * usual, "nothing in it may be written over"
        application.execute("COMMIT")
        assert turn(10) <= usual


def test_an_import_beside_a_relay_does_not_move_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = path.with_name("other.db")
    with closing(Outbox(other)) as outbox:
        for _ in range(20):
            outbox.enqueue(Message(KIB))
    lines = list(export_lines(outbox_at(other), range(1, 21)))
    with shim() as files, closing(SqliteStore(path)):
        monkeypatch.setattr(checkpoints, "CHECKPOINT_BYTES", 2 * PAGE_BYTES)
        files.log = []
        (brought,) = import_lines(outbox_at(path), lines, "other")
        assert (brought.stored, moved(files.log, path)) == (20, 0)


def test_opening_moves_what_the_last_process_left(path: Path, entry: Make) -> None:
    with closing(Outbox(path)) as outbox:
        outbox.enqueue(Message(KIB))
        with shim() as files:
            files.log = []
            with closing(SqliteStore(path)):
                assert moved(files.log, path) > 0


def test_a_checkpoint_is_asked_for_in_one_place_only() -> None:
    """Any other is made by SQLite, behind a commit of ours (see the module)."""
    folder = Path(reliablepub.outbox.__file__).parent
    files = [*folder.rglob("*.py"), *folder.rglob("*.sql")]
    asked = {file.name: file.read_text().count("wal_checkpoint") for file in files}
    assert {name: times for name, times in asked.items() if times} == {"checkpoints.py": 1}


def test_it_is_asked_for_only_while_the_database_has_another_length_than_its_header_says(
    path: Path, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "CHECKPOINT_BYTES", 1024 * PAGE_BYTES)
    with shim() as files, closing(SqliteStore(path)) as store:
        connection = store._writer.opened()
        files.log = []
        first = entry()
        store.commit(Changes(new=[first]))
        first.uncertain += 1
        store.commit(
            Changes(rescheduled=[first])
        )  # in the log alone, and the database has its pages
        assert checkpoints.owed_bytes(connection, path) == 0
        assert checkpoints.move_what_is_owed(connection, path) == 0
        assert moved(files.log, path) == 0
        store.commit(Changes(new=[entry(body=KIB * 64)]))
        assert checkpoints.owed_bytes(connection, path) >= 64 * 1024
        assert checkpoints.move_what_is_owed(connection, path) == 0
        assert moved(files.log, path) >= 8


def test_a_borrowed_lock_names_no_process_and_is_waited_for(path: Path) -> None:
    lock = path.with_name(path.name + ".lock")
    lock.touch(0o600)
    lock.write_text("1\n")  # of a relay that was killed
    borrowed = RelayLock.borrow(path)
    assert borrowed is not None
    assert holder_pid(path) is None
    assert RelayLock.borrow(path) is None
    code = (
        "import sys; from pathlib import Path\n"
        "from reliablepub.outbox.sqlite.lock import RelayLock\n"
        "print('asking', flush=True); RelayLock(Path(sys.argv[1]), timeout_s=0.05); print('held')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "asking\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        borrowed.release()
        assert process.stdout.read() == "held\n"


def test_a_borrower_that_does_not_end_is_reported(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "BORROWED_MAX_S", 0.05)
    borrowed = RelayLock.borrow(path)
    assert borrowed is not None
    with pytest.raises(OutboxInUse, match=f"outbox {path} is relayed by another process, and "):
        RelayLock(path)
    borrowed.release()


def test_a_relay_takes_an_outbox_over_in_the_middle_of_enqueuing(path: Path, entry: Make) -> None:
    with closing(Outbox(path)) as outbox:
        for _ in range(60):
            outbox.enqueue(Message(KIB))
        with closing(SqliteStore(path)) as store:
            outbox.enqueue(Message(KIB))
            store.commit(Changes(new=[entry()]))
        outbox.enqueue(Message(KIB))
        assert outbox.status().open == 63
