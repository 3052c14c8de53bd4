import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from reliablepub.errors import NotAnOutbox, OutboxError, OutboxLocked
from reliablepub.message import Message
from reliablepub.outbox.entry import Changes, Entry
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite import checkpoints, connections
from reliablepub.outbox.sqlite.connections import reading
from reliablepub.outbox.sqlite.lock import RelayLock
from reliablepub.outbox.sqlite.space import PAGE_BYTES
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outbox.sqlite.transactions import transaction
from tests.disks import small_disk
from tests.outbox.conftest import Make
from tests.outbox.shim import IOERR_SHMMAP, shim
from tests.sqlite import overwrite, sql, writer_of


def test_only_the_owner_may_read_any_of_its_files(path: Path, entry: Make) -> None:
    before = os.umask(0)
    try:
        store = SqliteStore(path)
        store.commit(Changes(new=[entry()]))
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    store.close()
    suffixes = ("", "-wal", "-shm", ".lock", ".ballast")
    assert modes == {f"outbox.db{suffix}": 0o600 for suffix in suffixes}


def test_it_is_written_ahead_and_synced(store: SqliteStore) -> None:
    def pragma(name: str) -> object:
        return store._writer.opened().execute(f"PRAGMA {name}").fetchone()[0]

    assert pragma("journal_mode") == "wal"
    assert pragma("synchronous") == 2
    assert pragma("secure_delete") == 1
    assert pragma("journal_size_limit") == checkpoints.LOG_BYTES_KEPT
    assert pragma("page_size") == PAGE_BYTES
    assert pragma("wal_autocheckpoint") == checkpoints.CHECKPOINT_BYTES // PAGE_BYTES


def test_it_is_not_mapped_into_memory(store: SqliteStore) -> None:
    assert store._writer.opened().execute("PRAGMA mmap_size").fetchone() in (None, (0,))


def test_who_finds_it_current_waits_for_no_writer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SqliteStore(path).close()
    monkeypatch.setattr(connections, "BUSY_TIMEOUT_S", 0.0)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        connections.open_writer(path, is_relay=False).close()


@pytest.mark.parametrize(("page_bytes", "pages"), [(4_096, 1_024), (65_536, 64)])
def test_a_checkpoint_is_as_large_whatever_pages_a_file_has(
    path: Path, page_bytes: int, pages: int
) -> None:
    sql(path, f"PRAGMA page_size = {page_bytes}", "CREATE TABLE orders (id)")
    path.chmod(0o600)
    with closing(SqliteStore(path)) as store:
        assert store._writer.opened().execute("PRAGMA page_size").fetchone() == (page_bytes,)
        assert store._writer.opened().execute("PRAGMA wal_autocheckpoint").fetchone() == (pages,)


def test_who_only_enqueues_does_not_checkpoint(path: Path) -> None:
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b"body"))
        assert writer_of(outbox).opened().execute("PRAGMA wal_autocheckpoint").fetchone() == (0,)
        assert writer_of(outbox).opened().execute("PRAGMA synchronous").fetchone() == (2,)


def test_something_else_is_not_an_outbox(path: Path) -> None:
    path.write_bytes(b"hello " * 1000)
    for use in (
        SqliteStore,
        lambda p: Outbox(p).status(),
        lambda p: Outbox(p).enqueue(Message(b"")),
    ):
        with pytest.raises(NotAnOutbox, match="not a SQLite database"):
            use(path)
    assert path.read_bytes() == b"hello " * 1000
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_a_link_and_a_pipe_are_refused(path: Path) -> None:
    path.mkdir()
    with pytest.raises(NotAnOutbox, match=f"^{path} is not a regular file; an outbox is"):
        SqliteStore(path)
    path.rmdir()
    target = path.with_name("target.db")
    SqliteStore(target).close()
    path.symlink_to(target)
    with pytest.raises(NotAnOutbox, match=f"^{path} is a symbolic link; an outbox is"):
        SqliteStore(path)
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))
    with pytest.raises(NotAnOutbox, match="symbolic link"):
        SqliteStore(path)
    assert not path.with_name("nowhere").exists()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(NotAnOutbox, match="not a regular file"):
        SqliteStore(path)


def test_a_missing_folder_is_named(path: Path) -> None:
    with pytest.raises(OutboxError, match=r"directory of outbox .* does not exist"):
        Outbox(path / "x" / "outbox.db").enqueue(Message(b""))


def test_a_foreign_owner_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SqliteStore(path).close()
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    with pytest.raises(OutboxError, match=rf"belongs to user .*: chown 4321 {path} .*\.ballast$"):
        SqliteStore(path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OutboxError, match=rf"\.ballast {path.parent}$"):
        SqliteStore(path)
    monkeypatch.undo()
    SqliteStore(path).close()  # the refused one left no relay lock behind


def test_a_read_only_file_is_refused(path: Path, child: Callable[..., int]) -> None:
    SqliteStore(path).close()
    path.chmod(0o400)

    def open_it() -> None:
        if os.geteuid() == 0:
            os.chown(path.parent, 65534, 65534)
            for file in path.parent.iterdir():
                os.chown(file, 65534, 65534)
            for folder in list(path.parents)[:3]:
                folder.chmod(0o755)
            os.setuid(65534)
        with pytest.raises(OutboxError, match=r"check its (owner and )?mode"):
            SqliteStore(path)

    assert child(open_it) == 0


def test_a_damaged_page_is_reported(path: Path, entry: Make) -> None:
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=[entry(body=b"x" * 3000) for _ in range(50)]))
    overwrite(path, PAGE_BYTES, b"\xa5" * (path.stat().st_size - PAGE_BYTES))
    with pytest.raises(OutboxError, match="is damaged"):
        SqliteStore(path)
    RelayLock(path, timeout_s=0.05).release()


def test_a_look_creates_nothing(path: Path) -> None:
    outbox = Outbox(path)
    for look in (outbox.status, outbox.retry, outbox.audit):
        with pytest.raises(NotAnOutbox, match="there is no outbox"):
            look()
    assert list(path.parent.iterdir()) == []


def test_a_look_shows_damaged_text_too(path: Path, store: SqliteStore, entry: Make) -> None:
    store.commit(Changes(new=[entry(), entry()]))
    broken = "UPDATE reliablepub_messages SET exchange = CAST(x'61ff' AS TEXT) WHERE id = 1"
    sql(path, broken)
    assert [row["exchange"] for row in Outbox(path).rows("open")] == ["a\ufffd", "orders"]


def test_a_link_that_comes_in_between_is_not_followed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, create = path.with_name("target"), os.open

    def late(*arguments: object, **options: object) -> int:
        monkeypatch.undo()
        path.symlink_to(target)
        return create(*arguments, **options)  # type: ignore[arg-type]

    outbox = Outbox(path)
    monkeypatch.setattr(os, "open", late)
    with pytest.raises(NotAnOutbox, match="is a symbolic link"):
        outbox.enqueue(Message(b""))
    assert not target.exists()


def test_a_look_cannot_write(path: Path) -> None:
    SqliteStore(path).close()
    with pytest.raises(OutboxError, match="cannot be written"), reading(path) as connection:
        connection.execute("DELETE FROM reliablepub_ledger")


LOOK = "import sys; from reliablepub import Outbox; print(Outbox(sys.argv[1]).status().open)"


@pytest.mark.parametrize("locks_are_lost", [False, True])
def test_a_look_does_not_take_the_log_away(
    path: Path, entry: Make, *, locks_are_lost: bool
) -> None:
    """Even when this process has lost its locks, by opening and closing the file as it must not."""
    store = SqliteStore(path)
    store.commit(Changes(new=[entry()]))
    if locks_are_lost:
        path.open("rb").close()
    log = path.with_name(path.name + "-wal")
    before = log.stat().st_ino
    for count in range(1, 4):
        seen = subprocess.run(
            [sys.executable, "-c", LOOK, str(path)], capture_output=True, text=True, check=True
        ).stdout
        assert int(seen) == count
        assert log.stat().st_ino == before
        store.commit(Changes(new=[entry()]))
    store.close()
    with closing(SqliteStore(path)) as again:
        assert again.snapshot().counters.open == 4


def test_a_reader_in_the_middle_stops_no_writer(
    path: Path, store: SqliteStore, entry: Make
) -> None:
    store.commit(Changes(new=[one := entry()]))
    with reading(path) as connection:
        assert connection.execute("SELECT count(*) FROM reliablepub_messages").fetchone() == (1,)
        store.commit(Changes(new=[entry()], confirmed=[one]))
        assert connection.execute("SELECT count(*) FROM reliablepub_messages").fetchone() == (1,)


def test_a_writer_that_does_not_end_is_reported(
    path: Path, store: SqliteStore, entry: Make
) -> None:
    store._writer.opened().execute("PRAGMA busy_timeout = 50")
    new = entry()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(OutboxLocked, match="locked by another process") as caught:
            store.commit(Changes(new=[new]))
        assert caught.value.retryable
        other.execute("ROLLBACK")
    assert store.commit(Changes(new=[new])).counters.stored == 1


def test_opening_waits_for_another_to_create_it(path: Path) -> None:
    code = "import sys\nfrom reliablepub.message import Message\n"
    code += "from reliablepub import Outbox\n"
    code += (
        "with Outbox(sys.argv[1]) as outbox:\n    for n in range(20): outbox.enqueue(Message(b'x'))"
    )
    several = [subprocess.Popen([sys.executable, "-c", code, str(path)]) for _ in range(4)]
    assert [process.wait() for process in several] == [0] * 4
    status = Outbox(path).status()
    assert (status.stored, status.open) == (80, 80)


def test_a_reader_that_keeps_the_log_from_being_made_is_reported(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SqliteStore(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM reliablepub_messages").fetchone()
        monkeypatch.setattr(connections, "BUSY_TIMEOUT_S", 0.05)
        with pytest.raises(OutboxLocked):
            SqliteStore(path)
        other.execute("ROLLBACK")
    SqliteStore(path).close()


def test_only_a_lock_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SqliteStore(path).close()
    sql(path, "PRAGMA journal_mode = DELETE")
    tried, make_log = [], connections._write_ahead

    def fails(connection: sqlite3.Connection, path: Path) -> None:
        tried.append(path)
        if len(tried) < 3:
            raise OutboxLocked("for a moment")
        if len(tried) == 3:
            raise OutboxError("for good")
        make_log(connection, path)

    monkeypatch.setattr(connections, "_write_ahead", fails)
    with pytest.raises(OutboxError, match="for good"):
        SqliteStore(path)
    assert tried == [path] * 3


def test_an_error_inside_a_transaction_undoes_it(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE t (a)")

        def interrupted() -> None:
            with transaction(connection, path):
                connection.execute("INSERT INTO t VALUES (1)")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert not connection.in_transaction
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A file system that cannot be written, with an outbox on it."""
    with small_disk(tmp_path, "tmpfs") as folder:
        with closing(SqliteStore(folder / "outbox.db")) as store:
            store.commit(Changes(new=[Entry(Message(b"", message_id="m"), 1.0)]))
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield folder


def test_a_read_only_file_system_is_named(read_only: Path) -> None:
    for use in (SqliteStore, lambda p: Outbox(p).enqueue(Message(b""))):
        with pytest.raises(OutboxError, match="is mounted read-only"):
            use(read_only / "outbox.db")
    with pytest.raises(OutboxError, match="Read-only file system"):
        Outbox(read_only / "new.db").enqueue(Message(b""))


def test_a_file_system_without_shared_memory_is_refused(path: Path) -> None:
    with shim() as files:
        files.has_shared_memory = False
        advice = r"\); network file systems often cannot: put it on a local disk$"
        for use in (SqliteStore, lambda p: Outbox(p).enqueue(Message(b""))):
            with pytest.raises(OutboxError, match=advice):
                use(path)
    SqliteStore(path).close()


def test_a_file_system_that_only_seems_to_have_shared_memory_is_refused(path: Path) -> None:
    with shim() as files:
        for use in (SqliteStore, lambda p: Outbox(p).enqueue(Message(b""))):
            files.fail("shm_map", at=1, code=IOERR_SHMMAP, is_persistent=True)
            with pytest.raises(OutboxError, match="file system without shared memory"):
                use(path)
            files.heal()
    SqliteStore(path).close()


def test_of_a_log_that_was_cut_off_the_whole_commits_are_there(path: Path, entry: Make) -> None:
    ends = []
    log = path.with_name("outbox.db-wal")
    with closing(SqliteStore(path)) as store:
        for _ in range(10):  # the first one is longer than the log that the start has left
            store.commit(Changes(new=[entry(body=b"x" * 50_000)]))
            ends.append(log.stat().st_size)
        crashed = path.with_name("crashed.db")
        shutil.copy(path, crashed)
        whole = log.read_bytes()
    data = crashed.read_bytes()
    for size in (*range(0, len(whole), 7001), *ends):
        crashed.write_bytes(data)
        crashed_log = crashed.with_name("crashed.db-wal")
        crashed_log.touch(0o600)
        crashed_log.write_bytes(whole[:size])
        with closing(SqliteStore(crashed)) as store:
            assert store.snapshot().counters.open == sum(end <= size for end in ends)
            store.commit(Changes(new=[entry()]))
        assert Outbox(crashed).audit().is_right


def test_a_folder_that_every_user_may_write_is_warned_of(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.chmod(0o1777)
    for _ in range(2):
        SqliteStore(path).close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"every user can write to directory {path.parent}" in caplog.text
