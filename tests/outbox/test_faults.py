"""The nth call of SQLite to its files fails, for every n until none does, once and for good.

After each: what was accepted before is there, what was reported as stored is there, what was
reported as not stored is not, the ledger adds up, and the error says so in our words.
"""

import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from reliablepub._core.events import Batch
from reliablepub.errors import OutboxDiskFailed, OutboxDiskFull, OutboxError, OutboxUnsure
from reliablepub.message import Message
from reliablepub.outbox.entry import Attempt, Changes, Entry
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite import connections, lock, space
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.asking import stored
from tests.disks import folder_in_memory
from tests.outbox import shim as vfs
from tests.outbox.shim import Shim, shim
from tests.outcomes import REFUSED
from tests.sqlite import sql, writer_of

CALLS_MAX = 400
KINDS = {
    "full": (("write",), vfs.FULL),
    "write": (("write", "truncate"), vfs.IOERR_WRITE),
    "sync": (("sync",), vfs.IOERR_FSYNC),
    "read": (("read", "file_size"), vfs.IOERR_READ),
    "corrupt": (("read",), vfs.CORRUPT),
    "busy": (("lock", "shm_lock"), vfs.BUSY),
    "readonly": (("open", "write"), vfs.READONLY),
    "cantopen": (("open", "shm_map"), vfs.CANTOPEN),
}


@pytest.fixture(autouse=True)
def _closed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Connections that stay open until the process ends: hundreds of tests share this one."""
    left: list[sqlite3.Connection] = []
    monkeypatch.setattr("reliablepub.outbox.sqlite.connections.abandon", left.append)
    yield
    for connection in left:
        connection.close()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for locks that a fault pretends, and little ballast."""
    monkeypatch.setattr(connections, "BUSY_TIMEOUT_S", 0.0)
    monkeypatch.setattr(lock, "ACQUIRE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(space.Ballast.__init__, "__kwdefaults__", {"size": 8192})


@pytest.fixture(scope="module")
def files() -> Iterator[Shim]:
    with shim() as control:
        yield control


@pytest.fixture
def faulty(files: Shim) -> Iterator[Shim]:
    yield files
    files.heal()


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """The same directory for all tests here."""
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture(scope="module")
def filled(memory: Path) -> Path:
    """A directory with an outbox of 16 messages, some of several pages, as a crash left it."""
    folder = memory / "filled"
    folder.mkdir()
    store = SqliteStore(folder / "outbox.db")
    with closing(store):
        entries = stored(store, *(new_entry(n, size=100 + 150 * n) for n in range(1, 21)))
        store.commit(Changes(sent=[Batch(1, 1, entries[:10])], confirmed=entries[16:]))
        crashed = folder.with_name("crashed")
        shutil.copytree(folder, crashed)  # with its log: a kill would leave it so
    return crashed


def new_entry(number: int, *, size: int = 3000) -> Entry:
    return Entry(Message(b"%04d" % number * (size // 4), "x", "k", message_id=f"m-{number}"), 1.0)


@dataclass
class Case:
    """What is done while a call fails.

    Attributes:
        prepare: opens what is needed; gives the act, and what closes it.
        adds: ids of the messages that are stored if it succeeds.
        removes: ids of open messages that are not open any more then.
    """

    prepare: Callable[[Path], tuple[Callable[[], object], Callable[[], object]]]
    adds: frozenset[str] = frozenset()
    removes: frozenset[str] = frozenset()


def turn(path: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    """Everything that a turn can do, and a checkpoint after it."""
    store = SqliteStore(path)
    store._writer.opened().execute("PRAGMA wal_autocheckpoint = 1")
    old = store.read_ready(1, 16, limit=99, bytes_max=10**9)[0]
    new = [new_entry(n) for n in range(101, 104)]
    parked = Attempt(old[3], "2-1", 4, REFUSED, 2.0)
    old[5].due_at = 9.0
    whole = Changes(
        new=new,
        sources={"s": 3},
        confirmed=old[:3],
        parked=[parked],
        attempts=[parked],
        rescheduled=[old[5]],
        sent=[Batch(2, 1, new)],
    )
    return lambda: store.commit(whole), store.close


def settle(path: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    """A turn that only settles: it may use the ballast."""
    store = SqliteStore(path)
    old = store.read_ready(1, 16, limit=99, bytes_max=10**9)[0]
    return lambda: store.commit(Changes(confirmed=old[:3])), store.close


def enqueue(path: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    outbox = Outbox(path)
    outbox.position("s")
    return lambda: outbox.enqueue(new_entry(101).message), outbox.close


def enqueue_opened(path: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    outbox = Outbox(path)
    outbox.forget("nothing")
    outbox.retry([])
    return lambda: outbox.enqueue(new_entry(101).message), outbox.close


def enqueue_within(path: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    """In a transaction of the application's, with a cache so small that it spills."""
    app = sqlite3.connect(path, timeout=0)
    app.execute("CREATE TABLE orders (id)")
    app.execute("PRAGMA cache_size = 3")

    def act() -> None:
        with app:
            app.execute("INSERT INTO orders VALUES (1)")
            Outbox(path).enqueue(new_entry(101).message, connection=app)

    return act, app.close


def opening(path: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    opened: list[SqliteStore] = []

    def close() -> None:
        for store in opened:
            store.close()

    return lambda: opened.append(SqliteStore(path)), close


def closing_it(path: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    store = SqliteStore(path)
    store.commit(Changes(new=[new_entry(101)]))
    return store.close, store.close


def reading_it(path: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    store = SqliteStore(path)
    store._writer.opened().execute("PRAGMA cache_size = 3")

    def act() -> None:
        assert len(store.read_ready(1, 99, limit=99, bytes_max=10**9)[0]) == 16
        store.read_due(99.0, limit=9, bytes_max=10**9, loaded=())
        store.snapshot()

    return act, store.close


def looking(path: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    outbox = Outbox(path)

    def act() -> None:
        outbox.status()
        outbox.parked()

    return act, outbox.close


CASES = {
    "turn": Case(
        turn, frozenset({"m-101", "m-102", "m-103"}), frozenset({"m-1", "m-2", "m-3", "m-4"})
    ),
    "settle": Case(settle, removes=frozenset({"m-1", "m-2", "m-3"})),
    "enqueue": Case(enqueue, frozenset({"m-101"})),
    "enqueue_opened": Case(enqueue_opened, frozenset({"m-101"})),
    "enqueue_within": Case(enqueue_within, frozenset({"m-101"})),
    "opening": Case(opening),
    "closing": Case(closing_it),
    "reading": Case(reading_it),
    "looking": Case(looking),
}


def open_ids(path: Path) -> set[str]:
    """What a plain SQLite finds, once everything is well again."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        audit = connection.execute("SELECT * FROM reliablepub_audit")
        names = [column[0] for column in audit.description]
        row = dict(zip(names, audit.fetchone(), strict=True))
        differences = {name: row[name] for name in names if name.endswith("difference")}
        kinds = ("open", "parked", "expired", "bytes")
        assert differences == {f"{kind}_difference": 0 for kind in kinds}
        rows = connection.execute("SELECT message_id, body FROM reliablepub_messages")
        found = {}
        for message_id, body in rows:
            assert body[:4] == b"%04d" % int(message_id[2:])
            found[message_id] = body
        return set(found)


def attempt(case: Case, name: str, path: Path, faulty: Shim, arm: Callable[[], None]) -> None:
    """Do it with the fault; then look at what is there, killed or closed."""
    act, close = case.prepare(path)
    before = open_ids(path)
    arm()
    error: Exception | None = None
    try:
        act()
    except OutboxError as caught:
        error = caught
        assert str(path) in str(error)
    except sqlite3.Error as caught:
        assert name == "enqueue_within"
        error = caught
    finally:
        faulty.heal()
    killed = path.parent / "killed"  # what the next process finds if this one ends here
    killed.mkdir()
    for file in (path, path.with_name(path.name + "-wal")):
        if file.exists():
            shutil.copy(file, killed)
    with suppress(sqlite3.Error):
        close()
    after = before - case.removes | case.adds
    for found in (open_ids(killed / path.name), open_ids(path)):
        if error is None:
            assert found == after, "it was reported as done"
        elif isinstance(error, OutboxUnsure) or name == "enqueue_within":
            assert found in (before, after), "wholly or not at all"
        else:
            assert found == before, f"it was reported as not done: {error}"


NEVER = {
    *((name, kind) for name in ("looking", "reading") for kind in ("full", "write", "sync")),
    ("reading", "readonly"),
    *(
        (name, "cantopen")
        for name in ("turn", "settle", "enqueue_opened", "enqueue_within", "closing", "reading")
    ),
}
"""Calls that a case never makes: it only reads, or has its files open before they fail."""

ONCE_OR_FOR_GOOD = pytest.mark.parametrize(
    ("is_persistent", "which"),
    [
        pytest.param(False, range(1, CALLS_MAX, 2), id="once"),
        pytest.param(True, (1, *range(2, CALLS_MAX, 2)), id="for good"),
        pytest.param(False, range(1, CALLS_MAX), id="each once", marks=pytest.mark.soak),
        pytest.param(True, range(1, CALLS_MAX), id="each for good", marks=pytest.mark.soak),
    ],
)
"""In short, every call fails in one of the two ways, and the first in both."""


@ONCE_OR_FOR_GOOD
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_the_nth_call_fails(
    name: str,
    kind: str,
    faulty: Shim,
    filled: Path,
    memory: Path,
    *,
    is_persistent: bool,
    which: Sequence[int],
) -> None:
    calls, code = KINDS[kind]
    for at in which:
        folder = memory / f"{name} {kind} {is_persistent} {at}"
        shutil.copytree(filled, folder)
        path = folder / "outbox.db"

        def arm(at: int = at) -> None:
            faulty.fail(*calls, at=at, code=code, is_persistent=is_persistent)

        attempt(CASES[name], name, path, faulty, arm)
        with closing(SqliteStore(path)) as store:  # and it goes on
            store.commit(Changes(new=[new_entry(999)]))
        assert "m-999" in open_ids(path)
        shutil.rmtree(folder)
        if not faulty.hits:
            assert at > 1 or (name, kind) in NEVER, "no such call was made to fail"
            return
    pytest.fail("it has more calls than that")


@pytest.fixture(scope="module")
def application(memory: Path) -> Path:
    """A database of an application, without an outbox."""
    path = memory / "application.db"
    sql(path, "PRAGMA journal_mode = WAL", "CREATE TABLE orders (id INTEGER)")
    return path


def complaint(path: Path) -> str:
    """What `Outbox.status` raises."""
    try:
        Outbox(path).status()
    except OutboxError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("is_persistent", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("kind", ["full", "write", "sync", "read"])
@pytest.mark.parametrize("is_new", [True, False], ids=["creating", "joining"])
def test_the_creation_of_an_outbox_survives_the_nth_failure(
    kind: str, faulty: Shim, application: Path, memory: Path, *, is_new: bool, is_persistent: bool
) -> None:
    calls, code = KINDS[kind]
    for at in range(1, CALLS_MAX, 1 if is_persistent else 3):
        folder = memory / f"{kind} {is_new} {is_persistent} {at}"
        folder.mkdir()
        path = folder / "outbox.db"
        if not is_new:
            shutil.copy(application, path)
        faulty.fail(*calls, at=at, code=code, is_persistent=is_persistent)
        with suppress(OutboxError):
            SqliteStore(path).close()
        faulty.heal()
        assert re.search("^$|no outbox|interrupted", complaint(path))
        with closing(SqliteStore(path)) as store:
            assert store.snapshot().counters.stored == 0
            store.commit(Changes(new=[new_entry(2)]))
        assert open_ids(path) == {"m-2"}
        shutil.rmtree(folder)
        if not faulty.hits:
            assert at > 1, "no such call was made to fail"
            return
    pytest.fail("it has more calls than that")


@pytest.fixture
def outbox_file(memory: Path, filled: Path) -> Iterator[Path]:
    folder = memory / "one"
    shutil.copytree(filled, folder)
    yield folder / "outbox.db"
    shutil.rmtree(folder)


def test_a_disk_that_goes_on_failing_leaves_it_open_and_then_goes_on(
    faulty: Shim, outbox_file: Path
) -> None:
    with closing(SqliteStore(outbox_file)) as store:
        faulty.fail("sync", at=1, code=vfs.IOERR_FSYNC, is_persistent=True, does_it=True)
        new = [new_entry(101)]
        for _ in range(3):
            with pytest.raises(OutboxUnsure, match="check the disk"):
                store.commit(Changes(new=new, sources={"s": 1}))
            assert new[0].id == 0
        faulty.heal()
        store.commit(Changes(new=[new_entry(102)], sources={"s": 1}))
        assert store.position("s") == 1
    found = open_ids(outbox_file)
    assert "m-102" in found
    assert "m-101" not in found, "the commit that succeeded has written over it"


def test_an_enqueue_after_one_in_doubt_is_made_on_the_same_connection(
    faulty: Shim, outbox_file: Path
) -> None:
    with closing(Outbox(outbox_file)) as outbox:
        outbox.enqueue(new_entry(101).message)
        before = writer_of(outbox).opened()
        faulty.fail("sync", at=1, code=vfs.IOERR_FSYNC, does_it=True)
        with pytest.raises(OutboxUnsure):
            outbox.enqueue(new_entry(103).message)
        faulty.heal()
        assert writer_of(outbox).opened() is before, (
            "a new one could believe what is not on the disk"
        )
        outbox.enqueue(new_entry(104).message)
    assert open_ids(outbox_file) > {"m-101", "m-104"}
    assert "m-103" not in open_ids(outbox_file)


BREAK_THE_INDEX = "import sys; open(sys.argv[1], 'r+b').write(bytes(136))"


@pytest.mark.parametrize("is_store", [True, False])
def test_what_comes_to_light_is_neither_written_twice_nor_called_stored(
    faulty: Shim, outbox_file: Path, *, is_store: bool
) -> None:
    """Another process dies at the wrong moment: the index is rebuilt, and finds the transaction."""
    index = outbox_file.with_name("outbox.db-shm")

    def fail_and_break() -> None:
        faulty.fail("sync", suffix="-wal", at=1, code=vfs.IOERR_FSYNC, does_it=True)
        faulty.when_hit = lambda: subprocess.run(
            [sys.executable, "-c", BREAK_THE_INDEX, str(index)], check=True
        )

    if is_store:
        with closing(SqliteStore(outbox_file)) as store:
            store.commit(
                Changes(new=[new_entry(100)])
            )  # begins the log, which has a sync of its own
            fail_and_break()
            new = new_entry(101)
            with pytest.raises(OutboxUnsure):
                store.commit(Changes(new=[new], sources={"s": 1}))
            assert new.id == 0
            assert store.position("s") == 1
    else:
        with closing(Outbox(outbox_file)) as outbox:
            outbox.enqueue(new_entry(100).message)
            fail_and_break()
            with pytest.raises(OutboxUnsure):
                outbox.enqueue(new_entry(101).message)
    assert "m-101" in open_ids(outbox_file)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (("write", vfs.FULL), OutboxDiskFull, "the disk is full"),
        (("write", vfs.IOERR_WRITE), OutboxUnsure, "the disk failed during a commit"),
        (("read", vfs.IOERR_READ), OutboxDiskFailed, "check the disk"),
        (("read", vfs.IOERR_CORRUPTFS), OutboxError, "is damaged, or the disk cannot read it"),
    ],
)
def test_each_failure_has_its_words(
    faulty: Shim, outbox_file: Path, fault: tuple[str, int], kind: type[OutboxError], words: str
) -> None:
    with closing(SqliteStore(outbox_file)) as store:
        store.changed_elsewhere()
        store._writer.opened().execute("PRAGMA shrink_memory").fetchall()
        faulty.fail(fault[0], at=1, code=fault[1], is_persistent=True)
        with pytest.raises(OutboxError, match=words) as caught:
            store.commit(Changes(new=[new_entry(102)]))
        assert type(caught.value) is kind
        faulty.heal()


@pytest.mark.parametrize("fails", ["read", "shm_lock"])
def test_an_outbox_that_cannot_be_read_when_it_is_opened_says_so(
    faulty: Shim, outbox_file: Path, fails: str
) -> None:
    """Not that SQLite has no transaction any more, which it has ended itself."""
    hits = 1
    for at in range(1, CALLS_MAX):
        faulty.fail(fails, at=at, code=vfs.IOERR_READ)
        with suppress(OutboxDiskFailed, OutboxUnsure), closing(Outbox(outbox_file)) as outbox:
            outbox.enqueue(b"")
        hits = faulty.hits
        faulty.heal()
        if not hits:
            break
    assert (hits, at > 5) == (0, True)
