"""What an outbox stands on is measured, and nothing of that is left behind."""

import os
import shutil
import sqlite3
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from reliablepub.errors import NotAnOutbox
from reliablepub.message import Message
from reliablepub.outbox.entry import Changes
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite.checkup import look_around
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.outbox.conftest import Make
from tests.sqlite import sql


def test_addresses_are_told_in_order(path: Path) -> None:
    with Outbox(path) as outbox:
        for exchange, key in (("nowhere", "k"), ("flights", "1"), ("", "no queue"), ("", "all")):
            outbox.enqueue(Message(b"secret", exchange, key))
    around = look_around(path)
    assert around.exchanges == ["flights", "nowhere"]
    assert around.queues == ["all", "no queue"]


def test_what_the_file_is_told_of_itself(path: Path) -> None:
    SqliteStore(path).close()
    around = look_around(path)
    assert (around.sqlite, around.journal) == (sqlite3.sqlite_version, "wal")
    assert around.is_shared is False
    sql(path, "CREATE TABLE orders (id)")
    assert look_around(path).is_shared is True


def test_there_must_be_an_outbox(path: Path) -> None:
    with pytest.raises(NotAnOutbox):
        look_around(path)


def test_the_newest_message_tells_whether_the_clock_was_set_back(
    store: SqliteStore, path: Path, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 500.0)
    assert look_around(path).ahead_s == 0.0
    store.commit(Changes(new=[first := entry(), second := entry()]))
    assert (first.stored_at, second.stored_at) == (1001.0, 1002.0)
    assert look_around(path).ahead_s == 502.0
    monkeypatch.setattr(time, "time", lambda: 5_000.0)
    assert look_around(path).ahead_s == 0.0


def test_the_disk_is_the_one_below_the_outbox(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, synced = 0.0, []

    def fsync(fd: int) -> None:
        nonlocal now
        synced.append((os.fstat(fd).st_size, Path(f"/proc/self/fd/{fd}").readlink().parent))
        now += len(synced) / 1_000

    before = set(path.parent.iterdir())
    disks = {path.parent: SimpleNamespace(free=7, total=9)}
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(shutil, "disk_usage", disks.__getitem__)
    around = look_around(path)
    assert (around.bytes_free, around.bytes_total) == (7, 9)
    assert synced == [(4_096 * n, path.parent) for n in range(1, 11)], "a page before each sync"
    assert around.sync_ms == pytest.approx(5.5), "the median"
    assert set(path.parent.iterdir()) == before, "nothing is left there"
