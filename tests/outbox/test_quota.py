"""A disk quota that is used up: SQLite calls it a failing disk, and the outbox a full one."""

import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from reliablepub.errors import OutboxDiskFailed, OutboxDiskFull, OutboxUnsure
from reliablepub.message import Message
from reliablepub.outbox.entry import Changes
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite.failures import may_take
from reliablepub.outbox.sqlite.space import DISK_FULL, Ballast
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.asking import stored
from tests.outbox.conftest import Make
from tests.outbox.shim import IOERR_WRITE, Shim


class Quota:
    """What a user may still write: nothing while it is used up, but for what is given back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: Shim) -> None:
        self._files = files
        self._is_used_up = False
        allocate, truncate = os.posix_fallocate, os.ftruncate

        def fallocate(fd: int, offset: int, size: int) -> None:
            if self._is_used_up:
                raise OSError(errno.EDQUOT, "Disk quota exceeded")
            allocate(fd, offset, size)

        def ftruncate(fd: int, size: int) -> None:
            if size < os.fstat(fd).st_size:
                self._files.heal()
            truncate(fd, size)

        monkeypatch.setattr(os, "posix_fallocate", fallocate)
        monkeypatch.setattr(os, "ftruncate", ftruncate)

    def use_up(self) -> None:
        self._is_used_up = True
        self._files.fail("write", at=1, code=IOERR_WRITE, is_persistent=True)

    def raise_it(self) -> None:
        """As an administrator would."""
        self._is_used_up = False
        self._files.heal()


@pytest.fixture
def quota(monkeypatch: pytest.MonkeyPatch, files: Shim) -> Quota:
    return Quota(monkeypatch, files)


def test_a_quota_that_is_used_up_is_a_full_disk(quota: Quota, path: Path, entry: Make) -> None:
    with closing(SqliteStore(path)) as store:
        old = stored(store, *(entry() for _ in range(20)))
        quota.use_up()
        with pytest.raises(OutboxDiskFull, match="nothing was stored"):
            store.commit(Changes(new=[entry()]))
        with pytest.raises(OutboxDiskFull), Outbox(path) as outbox:
            outbox.enqueue(Message(b"new"))
        counters = store.commit(Changes(confirmed=old)).counters
        assert (counters.stored, counters.confirmed) == (20, 20)
        assert not Ballast(path).is_whole, "verdicts use it"
        assert store.relieve() == DISK_FULL
        with pytest.raises(OutboxDiskFull), Outbox(path) as outbox:
            outbox.enqueue(Message(b"would take the space of verdicts"))
        quota.raise_it()
        store._shortage._next_look_at = 0.0
        assert store.relieve() == ""
        assert Ballast(path).is_whole
        assert store.commit(Changes(new=[entry()])).counters.open == 1


def test_a_disk_that_fails_is_no_quota(files: Shim, path: Path, entry: Make) -> None:
    with closing(SqliteStore(path)) as store:
        files.fail("write", at=1, code=IOERR_WRITE, is_persistent=True)
        with pytest.raises((OutboxUnsure, OutboxDiskFailed)):
            store.commit(Changes(new=[entry()]))
        files.heal()
        assert Ballast(path).is_whole


def test_what_cannot_be_tried_may_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert may_take(tmp_path, 4096)
    assert list(tmp_path.iterdir()) == []
    assert may_take(tmp_path / "missing", 4096)
    monkeypatch.delattr(os, "O_TMPFILE")
    assert may_take(tmp_path, 1 << 60)


def test_a_folder_that_may_hold_no_more_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", Mock(side_effect=OSError(errno.EDQUOT, "Disk quota exceeded")))
    assert not may_take(tmp_path, 4096)


def test_sqlite_has_no_word_for_a_quota() -> None:
    """Should it get one, the trial is not needed any more."""
    assert not [name for name in dir(sqlite3) if "QUOTA" in name]
