"""A full disk: a clear error, nothing lost, and what is there can still drain."""

import errno
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from reliablepub.errors import OutboxDiskFull, OutboxUnsure
from reliablepub.message import Message
from reliablepub.outbox import Outbox
from reliablepub.outbox.ballast import BALLAST_BYTES, Ballast
from reliablepub.outbox.checkpoints import CHECKPOINT_BYTES
from reliablepub.outbox.entry import Entry, Turn
from reliablepub.outbox.store import SqliteStore

Make = Callable[..., Entry]
KIB = b"x" * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def accept_until_full(store: SqliteStore, entry: Make) -> list[Entry]:
    accepted: list[Entry] = []
    while True:
        new = [entry(body=KIB) for _ in range(20)]
        try:
            store.commit(Turn(new=new))
        except OutboxDiskFull:
            return accepted
        accepted += new


def test_full_and_then_not(store: SqliteStore, path: Path, entry: Make) -> None:
    store.commit(Turn(new=[old := entry()]))
    before = store.snapshot()
    (pages,) = store._writer.opened().execute("PRAGMA page_count").fetchone()
    store._writer.opened().execute(f"PRAGMA max_page_count = {pages + 2}").fetchone()
    new = [entry(body=KIB) for _ in range(50)]
    turn = Turn(new=new, confirmed=[old], sources={"s": 50})
    for _ in range(2):
        with pytest.raises(OutboxDiskFull, match="free some space") as caught:
            store.commit(turn)
        assert caught.value.retryable
        assert not store._writer.opened().in_transaction
        assert {e.id for e in new} == {0}
        assert store.snapshot() == before
        assert store.lowest_awaited(0, 1e12) == old.id
    store._writer.opened().execute("PRAGMA max_page_count = 1000000").fetchone()
    snapshot = store.commit(turn)
    assert (snapshot.counters.stored, snapshot.counters.confirmed) == (51, 1)
    assert [e.id for e in new] == list(range(2, 52))


def test_a_full_disk_still_drains(small_disk: Path, entry: Make) -> None:
    path = small_disk / "outbox.db"
    with closing(SqliteStore(path)) as store:
        assert (small_disk / "outbox.db.ballast").stat().st_size == BALLAST_BYTES
        accepted = accept_until_full(store, entry)
        assert len(accepted) > 1000
        while accepted:
            store.commit(Turn(confirmed=accepted[:20]))
            del accepted[:20]
        assert store.snapshot().counters.open == 0
        store.commit(Turn(new=[entry(body=KIB)]))
    with closing(SqliteStore(path)) as store:
        assert store.snapshot().counters.open == 1


def test_without_its_ballast_it_would_not(small_disk: Path, entry: Make) -> None:
    path = small_disk / "outbox.db"
    with closing(SqliteStore(path)) as store:
        store._ballast._is_kept = False  # and the file stays where it is
        accepted = accept_until_full(store, entry)
        (small_disk / "filler").write_bytes(b"")
        with suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass
        with pytest.raises(OutboxDiskFull):
            store.commit(Turn(confirmed=accepted))


def test_a_disk_that_is_full_from_the_start(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(16 * 1024 * 1024 - 4096))
    with pytest.raises(OutboxDiskFull):
        SqliteStore(small_disk / "outbox.db")
    with Outbox(small_disk / "other.db") as outbox, pytest.raises(OutboxDiskFull):
        outbox.enqueue(Message(b"body"))
    (small_disk / "filler").unlink()
    SqliteStore(small_disk / "outbox.db").close()


def test_a_limit_on_file_sizes(path: Path, entry: Make, child: Callable[..., int]) -> None:
    """EFBIG is an I/O error to SQLite: if the commit gets it, what is on disk is not known."""

    def fill() -> None:
        store = SqliteStore(path)
        kept = [entry()]
        store.commit(Turn(new=kept))
        size = path.with_name(path.name + "-wal").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 8192, resource.RLIM_INFINITY))
        new = [entry(body=KIB) for _ in range(50)]
        for _ in range(2):
            with pytest.raises(OutboxUnsure, match="is not known"):
                store.commit(Turn(new=new))
            assert {e.id for e in new} == {0}
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert store.commit(Turn(new=new[:1])).counters.stored == 2

    assert child(fill) == 0
    with closing(SqliteStore(path)) as store:
        assert store.snapshot().counters.open == 2
        assert store.lowest_awaited(0, 1e12) == 1


def test_ballast_is_given_once_and_kept_again(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    ballast = Ballast(path, size=8192)
    file = tmp_path / "outbox.db.ballast"
    assert (file.stat().st_size, file.stat().st_mode & 0o777) == (8192, 0o600)
    assert ballast.release()
    assert not file.exists()
    assert not ballast.release()
    ballast.restore()
    assert not file.exists(), "not at once: the space is wanted"
    Ballast(path, size=8192)
    assert Ballast(path, size=8192).release(), "it is kept from one relay to the next"


def test_ballast_is_tried_again_every_ten_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, is_full = 0.0, False
    fallocate = os.posix_fallocate

    def reserve(fd: int, offset: int, size: int) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "full")
        fallocate(fd, offset, size)

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(os, "posix_fallocate", reserve)
    ballast = Ballast(tmp_path / "outbox.db", size=8192)
    file = tmp_path / "outbox.db.ballast"
    assert file.exists(), "at once, even if the machine has just been started"

    def is_kept_at(moment: float) -> bool:
        nonlocal now
        now = moment
        ballast.restore()
        return file.exists()

    assert is_kept_at(100.0)
    assert ballast.release()
    assert not is_kept_at(100.0)
    assert not is_kept_at(109.5)
    is_full = True
    assert not is_kept_at(110.0), "a part of it would be of no use"
    assert not ballast.release()
    is_full = False
    assert not is_kept_at(110.0)
    assert not is_kept_at(119.5)
    assert is_kept_at(120.0)
    assert is_kept_at(500.0)
    assert file.stat().st_size == 8192
    assert ballast.release()


def test_ballast_that_somebody_else_has_removed_gives_nothing(tmp_path: Path) -> None:
    ballast = Ballast(tmp_path / "outbox.db", size=8192)
    file = tmp_path / "outbox.db.ballast"
    file.unlink()
    assert not ballast.release()
    file.write_bytes(b"")  # another one's
    assert not ballast.release(), "it has none any more"


def test_ballast_follows_no_link(tmp_path: Path) -> None:
    target = tmp_path / "somebody's"
    (tmp_path / "outbox.db.ballast").symlink_to(target)
    assert not Ballast(tmp_path / "outbox.db", size=8192).release()
    assert not target.exists()


def test_a_missing_ballast_is_no_error(tmp_path: Path) -> None:
    ballast = Ballast(tmp_path / "no" / "outbox.db")
    ballast.restore()
    assert not ballast.release()


def test_ballast_outweighs_a_checkpoint() -> None:
    assert BALLAST_BYTES > CHECKPOINT_BYTES
