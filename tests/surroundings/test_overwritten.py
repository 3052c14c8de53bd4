"""A backup is copied into the file of a live process: same name, same inode, other content."""

import errno
import os
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from reliablepub import Message, Outbox
from reliablepub.errors import OutboxMoved
from reliablepub.outbox.entry import Changes, Entry
from reliablepub.outbox.sqlite import location, store
from reliablepub.outbox.sqlite.connections import Writer
from reliablepub.outbox.sqlite.location import Place
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.asking import fill
from tests.sqlite import sql, writer_of
from tests.surroundings.app import CALLS, RELAYING, App
from tests.surroundings.test_moved import ids_at

OLD = 60
"""Messages of 1 KiB before the backup, and as many after it."""


def checkpoint(path: Path) -> None:
    """As an application's own connection does now and then, and a busy relay."""
    sql(path, "PRAGMA wal_checkpoint(PASSIVE)")


def back_up(path: Path) -> Path:
    backup = path.with_name("backup.db")
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(backup)) as target:
        source.backup(target)
    return backup


def enqueue(path: Path, prefix: str, count: int) -> None:
    fill(path, *(Message(b"x" * 1024, message_id=f"{prefix}{n}") for n in range(count)))


@pytest.mark.parametrize("door", [*RELAYING, "enqueue", "within"])
def test_a_restore_into_the_open_file_is_noticed(tmp_path: Path, door: str) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "outbox.db"
    enqueue(path, "old", OLD)
    backup = back_up(path)
    with App(door, path) as app:
        app.round()
        enqueue(path, "new", OLD)
        checkpoint(path)
        assert len(app.round().stored) == CALLS
        subprocess.run(["cp", backup, path], check=True)
        after = [app.round(), app.round()]
    assert all(told.is_complete for told in after)
    assert not [id_ for told in after for id_ in told.stored], after


def test_a_restore_is_noticed_by_a_relay_that_alone_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It need not read the first page again, and then SQLite goes on writing the same counter."""
    monkeypatch.setattr(store, "REREAD_S", 0.0)
    path = tmp_path / "outbox.db"
    with closing(SqliteStore(path)) as relay:

        def commit(name: str) -> None:
            relay.relieve()
            for n in range(OLD):
                message = Message(b"x" * 1024, message_id=f"{name}{n}")
                relay.commit(Changes(new=[Entry(message, stored_at=0.0)]))
            with relay._writer as connection:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

        commit("old")
        backup = path.with_name("backup.db")
        subprocess.run(["cp", path, backup], check=True)
        commit("new")
        commit("newer")
        subprocess.run(["cp", backup, path], check=True)
        with pytest.raises(OutboxMoved, match="overwritten"):
            commit("lost")


def test_a_restore_is_noticed_before_a_checkpoint_hides_it(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    with Outbox(path) as outbox:
        enqueue(path, "old", OLD)
        backup = back_up(path)
        outbox.enqueue(Message(b""))
        enqueue(path, "new", OLD)
        checkpoint(path)
        outbox.enqueue(Message(b""))
        writer_of(outbox).opened().execute("PRAGMA wal_autocheckpoint = 1")
        subprocess.run(["cp", backup, path], check=True)
        with pytest.raises(OutboxMoved, match="overwritten"):
            outbox.enqueue(Message(b""))


def test_checkpoints_of_others_are_no_restore(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    with Outbox(path) as outbox:
        for n in range(20):
            outbox.enqueue(Message(b"x" * 1000 * n, message_id=f"m{n}"))
            checkpoint(path)
            sql(
                path,
                "CREATE TABLE IF NOT EXISTS orders (x)",
                "INSERT INTO orders VALUES (?)",
                values=(b"x" * 20_000,),
            )
    assert ids_at(path) == {f"m{n}" for n in range(20)}


def test_a_restore_while_no_connection_is_open_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    enqueue(path, "old", OLD)
    backup = back_up(path)
    outbox = Outbox(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        outbox.enqueue(Message(b""), connection=connection)
    enqueue(path, "new", OLD)
    subprocess.run(["cp", backup, path], check=True)
    with closing(sqlite3.connect(path)) as connection, connection:
        outbox.enqueue(Message(b"", message_id="after"), connection=connection)
    assert ids_at(path) == {"after", *(f"old{n}" for n in range(OLD))}


def test_a_connection_is_marked_once(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    with closing(sqlite3.connect(path)) as connection:
        for _ in range(3):
            with connection:
                Outbox(path).enqueue(Message(b""), connection=connection)
        functions = connection.execute("PRAGMA function_list").fetchall()
        assert [name for name, *_ in functions].count("reliablepub_mark") == 1


def test_a_descriptor_that_is_another_files_for_a_while_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    other = tmp_path / "other"
    other.write_bytes(b"\xff" * 100)
    with Outbox(path) as outbox, other.open("rb") as file:
        outbox.enqueue(Message(b""))
        place = writer_of(outbox).opened().place
        own, place._locked_fd = place._locked_fd, file.fileno()
        place.check()
        place._locked_fd = own
        place.check()


def test_a_descriptor_that_is_another_files_by_now_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    other = tmp_path / "other"
    other.write_bytes(bytes(100))
    with Outbox(path) as outbox, other.open("rb") as file:
        outbox.enqueue(Message(b""))
        place = writer_of(outbox).opened().place
        for fd in (file.fileno(), -1, 9_999):
            place._locked_fd, place._changes = fd, 1_000
            place.check()


def test_a_disk_that_cannot_be_read_for_a_moment_is_no_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "outbox.db"
    with Outbox(path) as outbox:
        for n in range(3):
            with monkeypatch.context() as patch:
                if n == 1:
                    patch.setattr(os, "pread", Mock(side_effect=OSError(errno.EIO, "EIO")))
                outbox.enqueue(Message(b"x" * 20_000, message_id=f"m{n}"))
            checkpoint(path)
        writer_of(outbox).opened().place.check()
    assert ids_at(path) == {f"m{n}" for n in range(3)}


def test_a_counter_that_another_thread_has_read_later_is_no_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that enqueue through one `Outbox` share its `Place`."""
    path = tmp_path / "outbox.db"
    enqueue(path, "old", 1)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("SELECT count(*) FROM reliablepub_messages").fetchall()
        place = Place(path)
        counters = [place._changes, place._changes + 1]

        def read(_fd: int) -> int:
            counter = counters.pop(0)
            if counters:
                place.check_content()  # in another thread, before this one compares
            return counter

        monkeypatch.setattr(location, "_changes", read)
        place.check_content()
        assert not place.is_overwritten
        counters = [place._changes]
        place.check_content()


def test_a_restore_is_noticed_although_the_connection_that_saw_the_file_first_is_closed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "outbox.db"
    enqueue(path, "old", OLD)
    backup = back_up(path)
    outbox = Outbox(path)
    first, second, third = (sqlite3.connect(path) for _ in range(3))
    for connection in (first, second):
        with connection:
            connection.execute("CREATE TABLE IF NOT EXISTS orders (id)")
            outbox.enqueue(Message(b""), connection=connection)
    first.close()
    enqueue(path, "new", OLD)
    checkpoint(path)
    with second:
        outbox.enqueue(Message(b""), connection=second)
    third.execute("SELECT count(*) FROM orders").fetchall()
    subprocess.run(["cp", backup, path], check=True)
    for connection in (third, second, second):  # the third one calls for the first time
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(OutboxMoved):
            outbox.enqueue(Message(b""), connection=connection)
        connection.rollback()
    second.close()
    third.close()


@pytest.mark.parametrize("is_noticed", [True, False])
@pytest.mark.parametrize("act", [Writer.close, Writer.rest])
def test_a_restore_is_not_forgotten(
    tmp_path: Path, act: Callable[[Writer], None], *, is_noticed: bool
) -> None:
    """The file is closed before a fork (`Writer.rest`), and by `Outbox.close`."""
    path = tmp_path / "outbox.db"
    enqueue(path, "old", OLD)
    backup = back_up(path)
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b""))
        enqueue(path, "new", OLD)
        checkpoint(path)
        outbox.enqueue(Message(b""))
        subprocess.run(["cp", backup, path], check=True)
        if is_noticed:
            with pytest.raises(OutboxMoved, match="overwritten"):
                outbox.enqueue(Message(b""))
        act(writer_of(outbox))
        for again in (outbox, outbox, Outbox(path)):
            with pytest.raises(OutboxMoved, match="overwritten"):
                again.enqueue(Message(b""))
    with closing(sqlite3.connect(path)) as connection, pytest.raises(OutboxMoved):
        outbox.enqueue(Message(b""), connection=connection)
