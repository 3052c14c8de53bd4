"""The power fails at each operation of an outbox's files: the disk forgets what is not synced.

First on a file system that promises what POSIX does and no more (`disk`), then under ext4 and xfs,
whose images are replayed. Whatever is left, the next process finds every message whose `publish`
had returned (`promises`). Code that breaks one rule must be caught.
"""

import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from reliablepub.errors import OutboxError
from reliablepub.testing import FakeBroker, Fate
from reliablepub.testing.faults import Nack
from reliablepub.testing.publishing import Publishing
from tests.chaos.nursery import Nursery
from tests.power.disk import Disk
from tests.power.images import BEGIN, END, FOLDER, IMAGE, KINDS, mounted, written_down
from tests.power.life import MUTANTS, Life
from tests.power.mounts import Mounted, Operation, Orders, forgetful, operations
from tests.power.promises import Promises

OUTBOX = "outbox.db"
SHARES = (0.0, 0.5, 1.0)
ZEROS = bytes(64 * 1024)
BROKEN = (AssertionError, sqlite3.DatabaseError, OutboxError)
PUBLISHES = 2
"""A seed whose first life begins with `publish`."""
SEEDS = int(os.environ.get("RELIABLEPUB_POWER_SEEDS", "10"))


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("tests.power.life") as nursery:
        yield nursery


@contextmanager
def broker_that_marks(orders: Orders) -> Iterator[FakeBroker]:
    """A broker that writes down what it takes responsibility for, before it says so."""
    settle = Publishing.settle

    def marking(self: Publishing, publish: Any) -> None:
        if publish.fate is Fate.ACCEPTED and not publish.rejected:
            orders.mark(f"released {publish.properties.message_id}")
        settle(self, publish)

    with pytest.MonkeyPatch.context() as patch, FakeBroker() as broker:
        patch.setattr(Publishing, "settle", marking)
        broker.declare_queue("q", durable=True)
        broker.declare_queue("limited", durable=True)
        broker.inject(Nack(routing_key="limited"))
        yield broker


def live(
    nursery: Nursery, below: Mounted, outbox: Path, seed: int, *, lives: int, **more: Any
) -> None:
    """Lives on one outbox, one after the other."""
    with broker_that_marks(below.orders) as broker:
        for n in range(lives):
            life = Life(
                url=broker.url,
                marks=str(below.orders.folder),
                outbox=str(outbox),
                first=1 + n * 1000,
                seed=seed * 1000 + n,
                **more,
            )
            assert nursery.fork(life) in (0, -signal.SIGKILL)


def record(nursery: Nursery, folder: Path, seed: int, **more: Any) -> list[Operation]:
    """What lives do to the files of an outbox."""
    with forgetful(folder) as below:
        live(nursery, below, below.orders.folder / OUTBOX, seed, **more)
    return list(operations(below.log))


def record_image(
    nursery: Nursery, folder: Path, kind: str, seed: int, **more: Any
) -> list[Operation]:
    """What a file system writes to its image meanwhile."""
    with written_down(folder, kind) as (below, data):
        live(nursery, below, data / OUTBOX, seed, **more)
    return list(operations(below.log))


def is_promise(operation: Operation) -> bool:
    return operation.kind == "mark" and operation.name.startswith("promised")


def write_sparsely(path: Path, data: bytearray) -> None:
    """Write a file without its zeros: most of a new file system."""
    with path.open("wb") as file, memoryview(data) as view:
        file.truncate(len(data))
        for start in range(0, len(data), len(ZEROS)):
            if (part := view[start : start + len(ZEROS)]) != ZEROS:
                file.seek(start)
                file.write(part)


class Points:
    """Moments at which the power fails.

    Args:
        folder: for what is left.
        seed: decides what that is.

    Attributes:
        count: how many there were.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._seed = seed
        self._disk = Disk(seed)
        self._promises = Promises()
        self.count = 0

    def try_files(self, log: Iterable[Operation], *, every: int = 1) -> None:
        """After each operation, or each nth, and after each promise.

        Of what is not synced, nothing, half or all is there.
        """
        for n, operation in enumerate(log):
            self._do(operation)
            if n % every and not is_promise(operation):
                continue
            for share in SHARES[:1] if self._disk.is_synced else SHARES:
                with TemporaryDirectory(dir=self._folder) as left:
                    self._disk.fail(Path(left), share)
                    self._check(Path(left) / OUTBOX, f"operation {n}, {share=}")

    def try_image(self, log: Iterable[Operation], *, every: int = 1) -> None:
        """Before and after each flush, or each nth, and after each promise."""
        flushes, is_ready = 0, False
        for n, operation in enumerate(log):
            if operation == END:
                return
            is_ready |= operation == BEGIN
            flushes += operation.kind == "sync"
            is_due = is_ready and operation.kind == "sync" and flushes % every == 0
            if is_due and not self._disk.is_synced:
                self._mount(0.5, f"operation {n}, before the flush")
                self._mount(0.1 + 0.8 * (n % 7) / 6, f"operation {n}, before the flush")
            self._do(operation)
            if is_due or is_promise(operation):
                self._mount(0.0, f"operation {n}, after it")

    def _do(self, operation: Operation) -> None:
        if operation.kind == "mark":
            self._promises.heed(operation.name)
        else:
            self._disk.do(operation)

    def _mount(self, share: float, where: str) -> None:
        # A new file each time: the loop device of the last one may not be gone yet, and be found.
        image = self._folder / f"left-{self.count}"
        write_sparsely(image, self._disk.left(share)[IMAGE])
        try:
            with mounted(image, self._folder / "point") as point:
                self._check(point / FOLDER / OUTBOX, where)
        finally:
            image.unlink()

    def _check(self, path: Path, where: str) -> None:
        self.count += 1
        try:
            self._promises.check(path)
        except BROKEN as error:
            error.add_note(f"the power failed at {where}, seed {self._seed}")
            raise


def test_what_was_promised_survives(nursery: Nursery, memory: Path) -> None:
    log = record(nursery, memory, PUBLISHES, lives=1, turns=10, has_trouble=True)
    points = Points(memory, PUBLISHES)
    points.try_files(log, every=60)
    assert points.count > 30


def test_so_it_does_on_ext4(nursery: Nursery, memory: Path) -> None:
    log = record_image(nursery, memory, "ext4", PUBLISHES, lives=1, turns=5)
    points = Points(memory, PUBLISHES)
    points.try_image(log, every=12)
    assert points.count > 10


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_rule_is_caught(nursery: Nursery, memory: Path, mutant: str) -> None:
    log = record(nursery, memory, PUBLISHES, lives=1, turns=2, mutant=mutant)
    with pytest.raises(BROKEN):
        Points(memory, PUBLISHES).try_files(log, every=1000)


# ---------------------------------------------------------------------------------- the long form


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(SEEDS))
def test_after_every_operation(nursery: Nursery, memory: Path, seed: int) -> None:
    log = record(nursery, memory, seed, lives=3, turns=12, has_trouble=True)
    points = Points(memory, seed)
    points.try_files(log, every=2)
    print(f"\nfiles, seed {seed}: {points.count} points, {told(log)}")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", KINDS)
def test_at_every_flush(nursery: Nursery, memory: Path, kind: str, seed: int) -> None:
    log = record_image(nursery, memory, kind, seed, lives=3, turns=15)
    points = Points(memory, seed)
    points.try_image(log)
    print(f"\n{kind}, seed {seed}: {points.count} points, {told(log)}")


@pytest.mark.soak
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if "directory" not in m])
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_rule_is_caught_there(
    nursery: Nursery, memory: Path, kind: str, mutant: str
) -> None:
    """Without those of the folder: both journals are said to write a new name with its file."""
    log = record_image(nursery, memory, kind, PUBLISHES, lives=1, turns=2, mutant=mutant)
    with pytest.raises(BROKEN):
        Points(memory, PUBLISHES).try_image(log, every=1000)


def told(log: list[Operation]) -> str:
    counts = Counter(o.kind for o in log)
    marks = Counter(o.name.split()[0] for o in log if o.kind == "mark")
    return f"{counts['write']} writes, {counts['sync']} syncs, {marks['promised']} promised"
