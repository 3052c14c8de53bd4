"""The bell of an outbox: every writer rings it, and no decision depends on it."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from select import select

import pytest

from reliablepub import Message, Outbox
from reliablepub.outbox.entry import Changes
from reliablepub.outbox.sqlite import bell as bells
from reliablepub.outbox.sqlite.bell import Bell
from reliablepub.outbox.sqlite.location import libc
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.asking import fill
from tests.between import after
from tests.outbox.conftest import Make
from tests.sqlite import sql

ENQUEUE = """
import sys
from reliablepub import Message, Outbox
Outbox(sys.argv[1]).enqueue(Message(b"", routing_key="q"))
"""


@pytest.fixture
def bell(store: SqliteStore) -> Bell:
    assert store.bell is not None
    store.changed_elsewhere()
    store.bell.arm()
    assert store.bell.is_armed
    return store.bell


def is_readable(bell: Bell) -> bool:
    return bool(select([bell.fileno()], [], [], 0)[0])


def enqueue(path: Path) -> None:
    fill(path, Message(b"", routing_key="q"))


def in_a_transaction(path: Path) -> None:
    with closing(sqlite3.connect(path)) as own, own:
        Outbox(path).enqueue(Message(b"", routing_key="q"), connection=own)


def in_another_process(path: Path) -> None:
    subprocess.run([sys.executable, "-c", ENQUEUE, path], check=True)


def by_hand(path: Path) -> None:
    sql(
        path,
        "UPDATE reliablepub_messages SET due_at = 0",
        "CREATE TABLE IF NOT EXISTS of_the_application (id)",
    )


@pytest.mark.parametrize("write", [enqueue, in_a_transaction, in_another_process, by_hand])
def test_it_rings_for_every_writer(write: object, bell: Bell, path: Path) -> None:
    assert not is_readable(bell)
    assert callable(write)
    write(path)
    assert is_readable(bell)
    assert bell.has_rung()
    assert not bell.has_rung(), "once"
    assert not is_readable(bell)


def test_it_is_silent_until_it_is_armed_again(bell: Bell, path: Path) -> None:
    enqueue(path)
    assert bell.has_rung()
    assert not bell.is_armed
    enqueue(path)
    assert not is_readable(bell)
    assert not bell.has_rung()
    bell.arm()
    enqueue(path)
    assert bell.has_rung()


def test_who_only_reads_does_not_ring(bell: Bell, path: Path) -> None:
    with Outbox(path) as outbox:
        outbox.status()
        outbox.parked()
    assert not bell.has_rung()


def test_a_commit_of_the_relay_does_not_ring(store: SqliteStore, bell: Bell, entry: Make) -> None:
    store.commit(Changes(new=[entry()]))
    assert not bell.has_rung()
    assert not is_readable(bell)
    assert not store.may_have_changed()
    assert not store.changed_elsewhere()


def test_what_was_written_before_the_commit_of_the_relay_is_found(
    store: SqliteStore, bell: Bell, entry: Make, path: Path
) -> None:
    enqueue(path)
    store.commit(Changes(new=[entry()]))
    assert not bell.has_rung()
    assert store.may_have_changed()
    assert store.may_have_changed(), "until it was looked at"
    assert store.changed_elsewhere()
    assert not store.may_have_changed()


def test_a_log_that_is_made_anew_can_be_watched_again(path: Path, entry: Make) -> None:
    with closing(SqliteStore(path)) as store:
        assert store.bell is not None
        store.bell.arm()
        store._writer.rest()  # as for a fork; SQLite removes the log
        assert not Path(f"{path}-wal").exists()
        assert store.bell.has_rung()
        store.commit(Changes(new=[entry()]))
        store.bell.arm()
        enqueue(path)
        assert store.bell.has_rung()


def test_without_a_log_it_cannot_be_armed(tmp_path: Path) -> None:
    bell = Bell(tmp_path / "none.db")
    bell.arm()
    assert not bell.is_armed
    assert not bell.has_rung()
    bell.close()


def test_child_programs_do_not_inherit_it(bell: Bell) -> None:
    assert not os.get_inheritable(bell.fileno())


@pytest.mark.parametrize("why", ["no inotify", "no instance", "nothing is told"])
def test_a_system_without_it_is_asked_as_before(
    why: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "no inotify":
        monkeypatch.setattr(bells, "libc", lambda: None)
    elif why == "no instance":
        monkeypatch.setattr(libc(), "inotify_init1", lambda _flags: -1)
    else:
        monkeypatch.setattr(Bell, "has_rung", lambda _self: False)
    with closing(SqliteStore(path)) as store:
        assert store.bell is None
        enqueue(path)
        assert store.changed_elsewhere()
        store.commit(Changes())


def test_a_store_that_cannot_be_opened_leaves_no_bell(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Bell] = []
    after(monkeypatch, Bell, "__init__", lambda self, outbox: made.append(self))
    monkeypatch.setattr(SqliteStore, "_begin_run", lambda *_: (_ for _ in ()).throw(OSError("x")))
    with pytest.raises(OSError, match="x"):
        SqliteStore(path)
    assert [bell.fileno() for bell in made] == [-1]
