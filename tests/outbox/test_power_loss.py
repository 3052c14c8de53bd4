"""The power fails at every write: what was accepted is there, whatever the disk had not yet synced.

Every write and sync of a life of an outbox is recorded. Then for each moment of it a disk is made
on which everything synced is there, and of the rest any sectors or none, in any order. What SQLite
finds on it must hold all that `commit` or `enqueue` had returned for by then.
"""

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from reliablepub._core.events import Batch
from reliablepub.errors import OutboxUnsure
from reliablepub.message import Message
from reliablepub.outbox.entry import Attempt, Changes, Entry
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite import checkpoints, connections, space
from reliablepub.outbox.sqlite.space import PAGE_BYTES
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.between import after
from tests.outbox import shim as vfs
from tests.outbox.shim import Operation, Shim, shim
from tests.outcomes import REFUSED
from tests.power.disk import write_torn


class Disk:
    """What is certainly on the disk, and what may be.

    Args:
        seed: decides what happens to what is not synced.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._synced: dict[str, bytearray] = {}
        self._pending: dict[str, list[Operation]] = {}

    def do(self, operation: Operation) -> None:
        path = operation.path
        if operation.kind in ("write", "truncate", "delete"):
            self._pending.setdefault(path, []).append(operation)
        elif operation.kind == "sync":
            self._sync_folder(path)
            for pending in self._pending.pop(path, []):
                self._apply(self._synced, pending, lambda: True)
        elif operation.kind == "failed sync":  # the pages count as clean: no later sync writes them
            for pending in self._pending.pop(path, []):
                self._apply(self._synced, pending, self._coin(0.5))

    def fail(self, folder: Path, share: float) -> None:
        """Write down what is left when the power fails now.

        Args:
            folder: for the files.
            share: how much of what is not synced has reached the disk.
        """
        left = {path: bytearray(data) for path, data in self._synced.items()}
        for pending in self._pending.values():
            for operation in pending:
                if not self._apply(left, operation, self._coin(share)):
                    break
        for path, data in left.items():
            (folder / Path(path).name).write_bytes(data)

    def _sync_folder(self, path: str) -> None:
        """SQLite syncs the directory, too, with the first sync of a new log or journal."""
        is_new = path not in self._synced or self._deletes(path)
        if is_new and path.endswith(("-wal", "-journal")):
            for other in [other for other in self._pending if self._deletes(other)]:
                last = max(n for n, o in enumerate(self._pending[other]) if o.kind == "delete")
                del self._pending[other][: last + 1]
                self._synced.pop(other, None)

    def _deletes(self, path: str) -> bool:
        return any(operation.kind == "delete" for operation in self._pending.get(path, ()))

    def _coin(self, share: float) -> Callable[[], bool]:
        return lambda: self._random.random() < share

    def _apply(
        self, files: dict[str, bytearray], operation: Operation, is_there: Callable[[], bool]
    ) -> bool:
        """Do it, or some of it; False when the name goes on meaning an older file."""
        if operation.kind == "delete":
            if not is_there():
                return False
            files.pop(operation.path, None)
            return True
        data = files.setdefault(operation.path, bytearray())
        if operation.kind == "truncate":
            if is_there():
                del data[operation.offset :]
            return True
        write_torn(data, operation.offset, operation.data, is_there)
        return True


class Life:
    """A life of an outbox: whatever changes it, with marks of what was asked and promised."""

    def __init__(self, path: Path, control: Shim, seed: int) -> None:
        self._path = path
        self._shim = control
        self._random = random.Random(seed)
        self._count = 0
        self._open: list[Entry] = []

    def live(self, turns: int) -> None:
        store = self._reopen(None)
        outbox = Outbox(self._path)
        for _ in range(turns):
            match self._random.randrange(12):
                case 0 | 1 | 2 | 3:
                    self._accept(store)
                case 4 | 5 | 6:
                    self._settle(store)
                case 7 | 8:
                    message = self._new().message
                    self._told([message.message_id], partial(outbox.enqueue, message))
                case 9:
                    self._shim.fail("sync", suffix="-wal", at=1, code=vfs.IOERR_FSYNC, does_it=True)
                    with suppress(OutboxUnsure):
                        self._accept(store)
                    self._shim.heal()
                case 10:
                    self._shim.fail(
                        "sync", at=1, code=vfs.IOERR_FSYNC, does_it=True, is_persistent=True
                    )
                    with suppress(OutboxUnsure):
                        self._accept(store)
                    self._shim.heal()
                case 11:
                    store = self._reopen(store)
        outbox.close()
        store.close()

    def _reopen(self, store: SqliteStore | None) -> SqliteStore:
        if store is not None:
            store.close()
        store = SqliteStore(self._path)
        self._open = store.read_ready(1, 10**9, limit=10**9, bytes_max=10**9)[0]
        return store

    def _new(self) -> Entry:
        self._count += 1
        size = self._random.choice((10, 500, 5000))
        body = b"%06d" % self._count * size
        return Entry(Message(body, "x", "k", message_id=f"m-{self._count}"), 1.0)

    def _accept(self, store: SqliteStore) -> None:
        new = [self._new() for _ in range(self._random.randrange(1, 5))]
        turn = Changes(new=new, sent=[Batch(1, self._count, new)])
        self._told([entry.message.message_id for entry in new], lambda: store.commit(turn))
        self._open += new

    def _told(self, ids: list[str | None], work: Callable[[], object]) -> None:
        names = " ".join(str(id_) for id_ in ids)
        self._shim.mark(f"asked {names}")
        work()
        self._shim.mark(f"promised {names}")

    def _settle(self, store: SqliteStore) -> None:
        self._random.shuffle(self._open)
        count = self._random.randrange(1, 6)
        settled, self._open = self._open[:count], self._open[count:]
        names = " ".join(str(entry.message.message_id) for entry in settled)
        self._shim.mark(f"settled {names}")
        parked = [Attempt(entry, "1-1", 1, REFUSED, 2.0) for entry in settled[:1]]
        store.commit(Changes(confirmed=settled[1:], parked=parked, attempts=parked))


class Promises:
    """What must be on the disk at a moment, and what may be."""

    def __init__(self) -> None:
        self.must: set[str] = set()
        self.may: set[str] = set()

    def heed(self, mark: str) -> None:
        word, *ids = mark.split()
        if word == "asked":
            self.may.update(ids)
        elif word == "promised":
            self.must.update(ids)
        else:
            self.must.difference_update(ids)


def look(path: Path) -> tuple[set[str], set[str]]:
    """What is open, and what is there at all; every body is what it was, and the ledger adds up."""
    if not path.exists() or not path.stat().st_size:
        return set(), set()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        query = "SELECT count(*) FROM sqlite_schema WHERE name = 'reliablepub_schema'"
        if not connection.execute(query).fetchone()[0]:
            return set(), set()
        (differences,) = connection.execute(
            "SELECT abs(open_difference) + abs(parked_difference) + abs(expired_difference) "
            "+ abs(bytes_difference) FROM reliablepub_audit"
        ).fetchone()
        assert differences == 0
        found = dict(connection.execute("SELECT message_id, body FROM reliablepub_messages"))
        for message_id, body in found.items():
            assert body == b"%06d" % int(message_id[2:]) * (len(body) // 6)
        parked = {row[0] for row in connection.execute("SELECT message_id FROM reliablepub_parked")}
        return set(found), set(found) | parked


def check(log: list[Operation], folder: Path, seed: int, *, every: int = 1) -> int:
    """Let the power fail at each moment of a log; how often it did."""
    disk, promises, count = Disk(seed), Promises(), 0
    for index, operation in enumerate(log):
        if operation.kind == "mark":
            promises.heed(operation.path)
            continue
        disk.do(operation)
        if index % every:
            continue
        for share in (0.0, 0.5, 1.0):
            with TemporaryDirectory(dir=folder) as left:
                disk.fail(Path(left), share)
                found, known = look(Path(left) / "outbox.db")
            assert promises.must <= found, f"lost at operation {index} of {len(log)}, {share=}"
            assert known <= promises.may, "nothing is there that no caller stored"
            count += 1
    return count


def record(folder: Path, seed: int, turns: int) -> list[Operation]:
    with shim() as control:
        control.log = []
        Life(folder / "outbox.db", control, seed).live(turns)
        return control.log


@pytest.fixture(autouse=True)
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint every few pages, so that the log is moved and begun again all the time."""
    monkeypatch.setattr(checkpoints, "CHECKPOINT_BYTES", 12 * PAGE_BYTES)
    monkeypatch.setattr(space.Ballast.__init__, "__kwdefaults__", {"size": 8192})


def test_what_was_promised_survives_a_loss_of_power(memory: Path) -> None:
    log = record(memory, seed=1, turns=40)
    assert any(o.kind == "write" and o.path.endswith("outbox.db") for o in log), "it checkpoints"
    assert any(o.kind == "failed sync" for o in log)
    assert check(log, memory, seed=1, every=3) > 500


def test_without_its_syncs_it_would_not(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation can tell: with `synchronous = OFF` promises are broken."""
    after(
        monkeypatch,
        connections,
        "_prepare",
        lambda connection, path, *, is_relay: connection.execute("PRAGMA synchronous = OFF"),
    )
    log = record(memory, seed=1, turns=10)
    with pytest.raises((AssertionError, sqlite3.DatabaseError)):
        check(log, memory, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_long_lives_survive_it_too(memory: Path, seed: int) -> None:
    assert check(record(memory, seed, turns=100), memory, seed) > 2_000
