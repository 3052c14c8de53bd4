"""A full disk: a clear error, nothing lost, and what is there can still drain."""

import errno
import math
import os
import resource
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from reliablepub._core.events import Batch
from reliablepub.errors import OutboxDiskFull
from reliablepub.message import Message
from reliablepub.outbox.admin.pruning import Times, prune
from reliablepub.outbox.entry import Attempt, Changes, Entry
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite import space
from reliablepub.outbox.sqlite.checkpoints import CHECKPOINT_BYTES, owed_bytes
from reliablepub.outbox.sqlite.space import (
    BALLAST_BYTES,
    LENT_BYTES,
    MARGIN_BYTES,
    PLENTY_BYTES,
    PLENTY_S,
    Ballast,
    free_bytes,
    give_space_back,
)
from reliablepub.outbox.sqlite.sql import QUERIES
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.asking import stored
from tests.between import after
from tests.disks import KINDS, fill, give_back, small_disk
from tests.outbox.conftest import Make
from tests.outcomes import REFUSED
from tests.sqlite import overwrite
from tests.waiting import until

KIB = b"x" * 1024


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    with small_disk(tmp_path, request.param, 24) as mounted:
        yield mounted


def accept_until_full(store: SqliteStore, entry: Make) -> list[Entry]:
    accepted: list[Entry] = []
    while True:
        new = [entry(body=KIB) for _ in range(20)]
        try:
            store.commit(Changes(new=new))
        except OutboxDiskFull:
            return accepted
        accepted += new


def enqueue(path: Path, count: int) -> None:
    with Outbox(path) as outbox:
        for _ in range(count):
            outbox.enqueue(Message(KIB))


def drain(path: Path, count: int) -> None:
    """Start a relay, and have everything confirmed, a little at a time."""
    with closing(SqliteStore(path)) as store:
        assert store.snapshot().counters.open == count
        while store.snapshot().counters.open:
            entries, _ = store.read_ready(1, 1 << 40, limit=20, bytes_max=1 << 20)
            tags = Batch(1, entries[0].id, entries)
            store.commit(Changes(sent=[tags]))
            store.commit(Changes(confirmed=entries, finished=[tags]))
    assert Outbox(path).status().confirmed >= count


def is_taken(store: SqliteStore, outbox: Outbox) -> bool:
    """Whether a message is stored, once the relay has looked at the disk."""
    store.relieve()
    with suppress(OutboxDiskFull):
        outbox.enqueue(Message(KIB))
        return True
    return False


def keep_some(store: SqliteStore, entry: Make) -> None:
    """Six mebibytes of messages that are confirmed."""
    for _ in range(12):
        new = stored(store, *(entry(body=KIB) for _ in range(500)))
        store.commit(Changes(confirmed=new))


def test_full_and_then_not(store: SqliteStore, path: Path, entry: Make) -> None:
    store.commit(Changes(new=[old := entry()]))
    before = store.snapshot()
    (pages,) = store._writer.opened().execute("PRAGMA page_count").fetchone()
    store._writer.opened().execute(f"PRAGMA max_page_count = {pages + 2}").fetchone()
    new = [entry(body=KIB) for _ in range(50)]
    turn = Changes(new=new, confirmed=[old], sources={"s": 50})
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


def test_a_full_disk_still_drains_and_then_takes_new_messages(disk: Path, entry: Make) -> None:
    path = disk / "outbox.db"
    with closing(SqliteStore(path)) as store:
        assert (disk / "outbox.db.ballast").stat().st_size == BALLAST_BYTES
        accepted = accept_until_full(store, entry)
        assert len(accepted) > 1000
        fill(disk)
        while accepted:
            store.commit(Changes(confirmed=accepted[:20]))
            del accepted[:20]
        assert store.snapshot().counters.open == 0
        until(lambda: not store.relieve())
        store.commit(Changes(new=[entry(body=KIB)]))
    with closing(SqliteStore(path)) as store:
        assert store.snapshot().counters.open == 1


def test_without_its_ballast_it_would_not(disk: Path, entry: Make) -> None:
    path = disk / "outbox.db"
    with closing(SqliteStore(path)) as store:
        accepted = accept_until_full(store, entry)
        store._ballast._path = str(disk / "another")
        fill(disk)
        with pytest.raises(OutboxDiskFull):
            store.commit(Changes(confirmed=accepted))


@pytest.mark.parametrize("is_first", [False, True])
def test_a_relay_starts_on_a_full_disk_and_drains(disk: Path, *, is_first: bool) -> None:
    """Also the first one ever: the process that creates the outbox creates its ballast."""
    path = disk / "outbox.db"
    if not is_first:
        SqliteStore(path).close()
    enqueue(path, 100)
    fill(disk)
    drain(path, 100)


def test_a_relay_that_was_killed_on_a_full_disk_is_followed_by_another(
    disk: Path, child: Callable[..., int]
) -> None:
    path = disk / "outbox.db"
    enqueue(path, 100)
    fill(disk)

    def die() -> None:
        store = SqliteStore(path)
        entries, _ = store.read_ready(1, 50, limit=50, bytes_max=1 << 20)
        store.commit(Changes(confirmed=entries))
        os.kill(os.getpid(), signal.SIGKILL)

    assert child(die) != 0
    drain(path, 50)


def test_a_large_message_leaves_a_full_disk(disk: Path, entry: Make) -> None:
    """To overwrite what is deleted would write more to the log than the ballast has."""
    path = disk / "outbox.db"
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=[large := entry(body=bytes(6 * 1024 * 1024))]))
        assert path.stat().st_size > 6 * 1024 * 1024
        fill(disk)
        assert store.commit(Changes(confirmed=[large])).counters.open == 0
        until(lambda: not store.relieve())
        (mode,) = store._writer.opened().execute("PRAGMA secure_delete").fetchone()
        assert mode == 1


def test_kept_messages_give_way_when_the_disk_is_full(disk: Path, entry: Make) -> None:
    path = disk / "outbox.db"
    with closing(SqliteStore(path, keep_confirmed_s=1e6)) as store:
        keep_some(store, entry)
        fill(disk)
        assert (
            store._writer.opened()
            .execute(QUERIES["has_confirmed"], {"before": math.inf})
            .fetchone()
        )
        until(lambda: "disk full" in store.relieve())
        until(lambda: not store.relieve())
        store.commit(Changes(new=[new := entry(body=KIB)]))
        store.commit(Changes(confirmed=[new]))
        kept = (
            store._writer.opened().execute("SELECT max(id) FROM reliablepub_confirmed").fetchone()
        )
        assert kept == (new.id,), "they are kept again"


def test_an_idle_relay_frees_what_enqueuers_wait_for(disk: Path, entry: Make) -> None:
    path = disk / "outbox.db"
    with closing(SqliteStore(path, keep_confirmed_s=1e6)) as store, Outbox(path) as outbox:
        keep_some(store, entry)
        fill(disk)
        with pytest.raises(OutboxDiskFull, match="free some space"):
            outbox.enqueue(Message(KIB))

        until(lambda: is_taken(store, outbox))


def test_a_disk_that_stays_full_is_looked_at_without_writing(
    disk: Path, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "SHORT_LOOK_S", 0.0)
    path = disk / "outbox.db"
    with closing(SqliteStore(path)) as store, closing(sqlite3.connect(path)) as other:
        accept_until_full(store, entry)
        fill(disk)

        def version() -> object:
            store.relieve()
            return other.execute("PRAGMA data_version").fetchone()

        until(store.relieve)
        until(lambda: version() == version())  # what could be given was given
        assert {version() for _ in range(20)} == {version()}
        assert store.relieve()


def test_what_a_person_frees_is_left_to_the_relay(disk: Path, entry: Make) -> None:
    """While the relay lacks space, no other process may take it."""
    path = disk / "outbox.db"
    with closing(SqliteStore(path)) as store, Outbox(path) as outbox:
        accepted = accept_until_full(store, entry)
        filler = fill(disk)
        assert store._ballast.release()
        filler = fill(disk)  # another program was faster
        with pytest.raises(OutboxDiskFull):
            store.commit(Changes(confirmed=accepted))
        give_back(filler, 3 * 1024 * 1024)
        with pytest.raises(OutboxDiskFull, match="free some space"):
            outbox.enqueue(Message(KIB))
        with closing(sqlite3.connect(path)) as own, pytest.raises(OutboxDiskFull):
            outbox.enqueue(Message(KIB), connection=own)
        with pytest.raises(OutboxDiskFull):
            store.commit(Changes(new=[entry()]))
        assert store.commit(Changes(confirmed=accepted)).counters.open == 0
        until(lambda: not store.relieve())
        outbox.enqueue(Message(KIB))


def beside_a_relay_that_looks(relay: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an operator's command pauses, the relay looks at the disk."""
    after(monkeypatch, time, "sleep", lambda *_: relay.relieve())


@pytest.mark.parametrize("is_relayed", [True, False])
@pytest.mark.parametrize("size", [500, 40_000])
def test_a_person_can_prune_on_a_full_disk(
    disk: Path, entry: Make, monkeypatch: pytest.MonkeyPatch, size: int, *, is_relayed: bool
) -> None:
    path = disk / "outbox.db"
    with closing(SqliteStore(path)) as store:
        for _ in range(40):
            new = stored(store, *(entry(body=bytes(size)) for _ in range(100_000 // size)))
            store.commit(Changes(parked=[Attempt(one, "1-1", 1, REFUSED, 1.0) for one in new]))
    database = outbox_at(path)
    with ExitStack() as stack:
        relay = stack.enter_context(closing(SqliteStore(path))) if is_relayed else None
        fill(disk)
        with pytest.raises(OutboxDiskFull):
            Outbox(path).enqueue(Message(KIB))
        if relay is not None:
            beside_a_relay_that_looks(relay, monkeypatch)
        until_then = Times(parked_before=1e12, history_before=0.0, now=0.0)
        assert prune(database, until_then).parked == 40 * (100_000 // size)
        relay = relay or stack.enter_context(closing(SqliteStore(path)))
        monkeypatch.undo()
        until(lambda: is_taken(relay, Outbox(path)))


def test_a_log_that_cannot_be_moved_takes_no_more_space(disk: Path, entry: Make) -> None:
    """A reader keeps the log long; what is free is kept for the day it is gone."""
    path = disk / "outbox.db"
    with (
        closing(SqliteStore(path)) as store,
        closing(sqlite3.connect(path, isolation_level=None)) as reader,
    ):
        store.commit(Changes(new=[entry()]))
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM reliablepub_messages").fetchone()
        accepted = accept_until_full(store, entry)
        owed = owed_bytes(store._writer.opened(), path)
        assert free_bytes(disk) >= owed > 1024 * 1024
        fill(disk)

        def settle_some(times: int) -> None:
            for _ in range(times):
                accepted[0].uncertain += 1
                store.commit(Changes(rescheduled=[accepted[0]]))

        with pytest.raises(OutboxDiskFull, match="at least"):
            settle_some(10_000)
        (disk / "filler").unlink()
        with suppress(OutboxDiskFull):
            settle_some(1_000)
        assert free_bytes(disk) >= owed_bytes(store._writer.opened(), path)
        reader.execute("COMMIT")
        assert store.commit(Changes(confirmed=accepted)).counters.open == 1
        assert owed_bytes(store._writer.opened(), path) == 0


def test_looks_work_on_a_full_disk(disk: Path) -> None:
    path = disk / "outbox.db"
    enqueue(path, 10)
    fill(disk)
    assert not path.with_name("outbox.db-shm").exists()
    for _ in range(20):
        assert Outbox(path).status().open == 10
    assert Ballast(path).is_whole
    with Outbox(path) as outbox, pytest.raises(OutboxDiskFull, match="free some space"):
        outbox.enqueue(Message(b"body"))
    drain(path, 10)


def test_without_a_ballast_a_look_says_that_the_disk_is_full(disk: Path) -> None:
    path = disk / "outbox.db"
    enqueue(path, 10)
    path.with_name("outbox.db.ballast").unlink()
    fill(disk)
    with pytest.raises(OutboxDiskFull, match=r"disk is full.*free some space"):
        Outbox(path).status()
    with pytest.raises(OutboxDiskFull, match=r"disk is full.*free some space"):
        SqliteStore(path)
    with Outbox(path) as outbox, pytest.raises(OutboxDiskFull, match="disk is full"):
        outbox.enqueue(Message(b"body"))


def test_a_disk_that_is_full_from_the_start(disk: Path) -> None:
    fill(disk)
    with pytest.raises(OutboxDiskFull):
        SqliteStore(disk / "outbox.db")
    with Outbox(disk / "other.db") as outbox, pytest.raises(OutboxDiskFull):
        outbox.enqueue(Message(b"body"))
    (disk / "filler").unlink()
    SqliteStore(disk / "outbox.db").close()


def test_who_only_enqueues_leaves_room_for_a_relay(disk: Path) -> None:
    path = disk / "outbox.db"
    with pytest.raises(OutboxDiskFull):
        enqueue(path, 100_000)
    stored = Outbox(path).status().stored
    assert stored > 50
    assert Ballast(path).is_whole
    drain(path, stored)


def test_a_limit_on_file_sizes(path: Path, entry: Make, child: Callable[..., int]) -> None:
    """EFBIG is an I/O error to SQLite, and no full disk."""

    def fill() -> None:
        store = SqliteStore(path)
        stored(store, entry())
        size = path.with_name(path.name + "-wal").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 8192, resource.RLIM_INFINITY))
        new = [entry(body=KIB) for _ in range(50)]
        for _ in range(2):
            with pytest.raises(OutboxDiskFull, match=r"may not make longer files \(ulimit -f"):
                store.commit(Changes(new=new))
            assert {e.id for e in new} == {0}
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert store.commit(Changes(new=new[:1])).counters.stored == 2

    assert child(fill) == 0
    with closing(SqliteStore(path)) as store:
        assert store.snapshot().counters.open == 2
        assert store.lowest_awaited(0, 1e12) == 1


@pytest.fixture
def ballast(path: Path) -> Ballast:
    return Ballast(path)


@pytest.fixture
def file(path: Path) -> Path:
    """Where the ballast is."""
    return path.with_name("outbox.db.ballast")


def test_ballast_is_given_once_and_kept_again(tmp_path: Path) -> None:
    ballast = Ballast(tmp_path / "outbox.db", size=8192)
    file = tmp_path / "outbox.db.ballast"
    assert not ballast.is_whole
    assert not ballast.release()
    assert ballast.restore()
    assert (file.stat().st_size, file.stat().st_mode & 0o777) == (8192, 0o600)
    assert ballast.is_whole
    assert Ballast(tmp_path / "outbox.db", size=8192).release(), "one relay's is the next one's"
    assert file.stat().st_size == 0
    assert not ballast.is_whole
    assert not ballast.release()
    assert ballast.restore()
    assert ballast.is_whole


@pytest.mark.parametrize("lent", [0, LENT_BYTES])
def test_a_part_of_the_ballast_is_not_kept_but_what_was_kept_stays_if_the_rest_finds_no_room(
    ballast: Ballast, file: Path, monkeypatch: pytest.MonkeyPatch, lent: int
) -> None:
    if lent:
        ballast.restore()
        assert ballast.lend()

    def reserve(fd: int, _offset: int, size: int) -> None:
        os.ftruncate(fd, size if lent else size // 2)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    assert not ballast.restore()
    assert file.stat().st_size == (BALLAST_BYTES - lent if lent else 0)
    assert ballast.is_whole is bool(lent)
    assert ballast.release() is bool(lent)


@pytest.mark.parametrize(
    ("spare", "kept"),
    [
        (0, BALLAST_BYTES),
        (-1, BALLAST_BYTES * 7 // 8),
        (-BALLAST_BYTES // 8, BALLAST_BYTES * 7 // 8),
        (-BALLAST_BYTES // 8 - 1, 0),
    ],
)
def test_most_of_it_is_kept_where_a_little_is_lacking(
    ballast: Ballast, file: Path, spare: int, kept: int
) -> None:
    ballast.restore()
    ballast.release()
    ballast.restore_within(spare)
    assert file.stat().st_size == kept
    assert ballast.is_whole is (kept > 0)


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_hole_is_no_ballast_and_is_filled(
    ballast: Ballast, file: Path, monkeypatch: pytest.MonkeyPatch, *, is_copy: bool
) -> None:
    """A look lends a little as the relay takes all of it; `cp --sparse=always` copies holes."""
    if is_copy:
        file.touch(0o600)
    else:
        ballast.restore()
        os.truncate(file, 0)
    os.truncate(file, BALLAST_BYTES if is_copy else BALLAST_BYTES - LENT_BYTES)
    assert not ballast.is_whole
    assert is_copy or not ballast.lend()
    assert ballast.restore()
    assert ballast.is_whole
    monkeypatch.setattr(ballast, "_lacking", lambda: BALLAST_BYTES)
    monkeypatch.setattr(os, "posix_fallocate", None)
    assert ballast.restore(), "a file system that stores no zeros is not asked again and again"


def test_a_damaged_page_is_no_fault_of_the_commit_before_a_rewrite(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE orders (x)")
        connection.executemany("INSERT INTO orders VALUES (?)", [(b"x" * 500,)] * 100)
        (page,) = connection.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name = 'orders'"
        ).fetchone()
    overwrite(path, (page - 1) * 4096 + 3, b"\xff\xff")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        with pytest.raises(sqlite3.DatabaseError) as error:
            connection.execute("VACUUM")
        assert error.type is sqlite3.DatabaseError
        assert not give_space_back(connection)


def test_ballast_lends_a_little_and_no_more(ballast: Ballast, file: Path) -> None:
    assert not ballast.lend()
    ballast.restore()
    lent = 0
    while ballast.lend():
        lent += 1
        assert ballast.is_whole
    assert lent == BALLAST_BYTES // 8 // LENT_BYTES == 5
    left = file.stat().st_size
    assert left == BALLAST_BYTES - lent * LENT_BYTES > CHECKPOINT_BYTES
    assert ballast.restore()
    assert file.stat().st_size == BALLAST_BYTES


def test_a_loan_is_no_room_for_a_new_message(tmp_path: Path) -> None:
    """Or a full disk would be told as one with room after each look at it."""
    with small_disk(tmp_path, "tmpfs", 24) as disk, closing(SqliteStore(disk / "o.db")) as store:
        fill(disk)
        ballast = Ballast(disk / "o.db")
        while ballast.lend():
            pass
        assert free_bytes(disk) > MARGIN_BYTES
        assert Outbox(disk / "o.db").status().is_disk_full
        with pytest.raises(OutboxDiskFull):
            store.commit(Changes(new=[Entry(Message(b"x", routing_key="q", message_id="m"), 1.0)]))


@pytest.mark.parametrize("what", ["a link", "no folder", "removed"])
def test_ballast_that_is_not_there_gives_nothing_and_is_no_error(tmp_path: Path, what: str) -> None:
    file, target = tmp_path / "folder" / "outbox.db.ballast", tmp_path / "somebody's"
    ballast = Ballast(file.with_suffix(""), size=8192)
    target.write_bytes(bytes(8192))
    if what != "no folder":
        file.parent.mkdir()
    if what == "removed":
        assert ballast.restore()
        file.unlink()
    else:
        if what == "a link":
            file.symlink_to(target)
        assert not ballast.restore()
    assert not ballast.is_whole
    assert not ballast.release()
    assert not ballast.lend()
    assert target.stat().st_size == 8192


def test_without_a_ballast_as_much_has_to_be_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "outbox.db"
    with closing(SqliteStore(path)) as store:
        connection, ballast = store._writer.opened(), Ballast(path)
        store._ballast.release()
        (tmp_path / "outbox.db.ballast").unlink()
        free = BALLAST_BYTES + MARGIN_BYTES + 2 * 1000 + owed_bytes(connection, path)
        monkeypatch.setattr("reliablepub.outbox.sqlite.space.free_bytes", lambda _: free)
        ballast.check(connection, 1000)
        with pytest.raises(OutboxDiskFull, match="at least 2 bytes"):
            ballast.check(connection, 1001)
        free = BALLAST_BYTES
        with pytest.raises(OutboxDiskFull):
            ballast.check(connection, 0)


def test_a_disk_with_plenty_of_space_is_not_looked_at_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, free, looks = 100.0, 2.0 * PLENTY_BYTES, 0

    def look(_: Path) -> float:
        nonlocal looks
        looks += 1
        return free

    path = tmp_path / "outbox.db"
    with closing(SqliteStore(path)) as store:
        monkeypatch.setattr(time, "monotonic", lambda: now)
        monkeypatch.setattr("reliablepub.outbox.sqlite.space.free_bytes", look)
        ballast = Ballast(path)
        for _ in range(5):
            ballast.check(store._writer.opened(), 1000)
        assert looks == 1
        store._ballast.release()
        for _ in range(5):
            ballast.check(store._writer.opened(), 1000)
        assert looks == 2, "but the ballast is, each time"
        store._ballast.restore()
        ballast.check(store._writer.opened(), 1000)
        assert looks == 3
        now += PLENTY_S
        free = PLENTY_BYTES / 2
        ballast.check(store._writer.opened(), 1000)
        ballast.check(store._writer.opened(), 1000)
        assert looks == 5


@pytest.mark.parametrize(
    ("blocks", "user", "free"),
    [
        ((0, 0, 0), 0, math.inf),  # some file systems in user space say nothing
        ((99_999, 10_000, 7_000), 1000, 7_000 * 4096),
        ((99_999, 10_000, 7_000), 0, 7_000 * 4096),
        ((99_999, 10_000, 5_000), 0, (10_000 - 4_096) * 4096),
        ((99_999, 10_000, 10_000), 0, 10_000 * 4096),
    ],
)
def test_what_counts_as_free(
    monkeypatch: pytest.MonkeyPatch, blocks: tuple[int, int, int], user: int, free: float
) -> None:
    total, left, left_for_users = blocks
    said = SimpleNamespace(f_blocks=total, f_bfree=left, f_bavail=left_for_users, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: said)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert free_bytes(Path("/")) == free


def test_ballast_outweighs_a_checkpoint() -> None:
    assert BALLAST_BYTES > CHECKPOINT_BYTES
