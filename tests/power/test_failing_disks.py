"""Disks that fail by halves: at one call or for good, read-only from now on, or slow.

The errors come from the kernel, as from a real disk (`forgetful`), for SQLite's files and ours.
"""

import errno
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from reliablepub import Outbox, Publisher, RetryPolicy
from reliablepub.errors import OutboxError, OutboxUnsure, PublisherClosed
from reliablepub.outbox.sqlite import space
from reliablepub.testing import FakeBroker
from tests.policies import ONCE
from tests.power.images import FOLDER, IMAGE, mounted, written_down
from tests.power.mounts import CHANGES, Mounted, Trouble, forgetful
from tests.waiting import until

RETRY = RetryPolicy(returned=ONCE, breaker=None)
CALLS_MAX = 600
ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EROFS": errno.EROFS}


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker() as broker:
        broker.declare_queue("q", durable=True)
        yield broker


@pytest.fixture(autouse=True)
def little_ballast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space.Ballast.__init__, "__kwdefaults__", {"size": 8192})


@pytest.fixture
def left_open(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """Connections that stay open until the process ends: they would keep a disk mounted."""
    left: list[sqlite3.Connection] = []
    monkeypatch.setattr("reliablepub.outbox.sqlite.connections.abandon", left.append)
    return left


@pytest.fixture
def disk(memory: Path, left_open: list[sqlite3.Connection]) -> Iterator[Mounted]:
    with forgetful(memory) as below:
        yield below
        for connection in left_open:
            connection.close()


def is_read_only(folder: Path) -> bool:
    """Whether a file system has given up; not all kernels show it as mounted read-only."""
    try:
        (folder / "new").touch()
    except OSError as error:
        return error.errno == errno.EROFS
    return False


class Told:
    """What callers were told, and whether it is so."""

    def __init__(self, broker: FakeBroker) -> None:
        self._broker = broker
        self.promised: set[str] = set()
        self.refused: set[str] = set()
        self.errors = Counter[str]()

    def tell(self, store: Callable[..., object], message_id: str, routing_key: str = "q") -> None:
        """Store a message; notes whether it is told to be there."""
        try:
            store(message_id.encode(), routing_key=routing_key, message_id=message_id)
        except (OutboxError, PublisherClosed) as error:
            self.errors[type(error).__name__] += 1
            if not isinstance(error, OutboxUnsure):
                self.refused.add(message_id)
        else:
            self.promised.add(message_id)

    def check(self, path: Path) -> None:
        """Once all is well again, a relay delivers what was promised; nothing that was refused."""
        with Publisher(self._broker.url, outbox=path, retry=RETRY) as publisher:
            assert publisher.flush(30).open == 0
        with Outbox(path) as outbox:
            assert outbox.audit().is_right
            parked = {str(row["message_id"]) for row in outbox.rows("parked")}
        there = {m.properties.message_id or "" for m in self._broker.messages("q")} | parked
        assert self.promised <= there
        assert not self.refused & there


def work(told: Told, url: str, path: Path, name: str) -> None:
    """Open, store by both doors, park, settle, close; whatever fails."""
    with suppress(OutboxError), ExitStack() as opened:
        outbox = opened.enter_context(Outbox(path))
        publisher = Publisher(url, outbox=path, retry=RETRY, close_timeout_s=0.1)
        opened.callback(publisher.close)
        told.tell(publisher.publish, f"{name}-1")
        told.tell(outbox.enqueue, f"{name}-2")
        told.tell(publisher.publish, f"{name}-3", "nowhere")
        publisher.flush(0.1)
        told.tell(publisher.publish, f"{name}-4")


def fail_at_every_call(
    disk: Mounted, broker: FakeBroker, trouble: Callable[[int], Trouble], step: int
) -> tuple[int, int, Counter[str]]:
    """The nth call that changes a file fails, for every nth until none does.

    Returns:
        how many there were, how many messages were promised, and the errors that callers got.
    """
    promised, errors = 0, Counter[str]()
    for count, at in enumerate(range(1, CALLS_MAX, step), 1):
        told = Told(broker)
        path = disk.orders.folder / f"{at}.db"
        disk.orders.trouble(trouble(at))
        work(told, broker.url, path, str(at))
        hits = disk.orders.hits
        disk.orders.heal()
        told.check(path)
        promised += len(told.promised)
        errors += told.errors
        if not hits:
            return count, promised, errors
    pytest.fail("it has more calls than that")


def test_no_space_at_one_call_after_the_other(disk: Mounted, broker: FakeBroker) -> None:
    trouble = partial(Trouble, CHANGES, errno.ENOSPC, last=0)
    _, _, errors = fail_at_every_call(disk, broker, lambda at: trouble(first=at), step=20)
    assert errors["OutboxDiskFull"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("is_persistent", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_at_every_call(
    disk: Mounted, broker: FakeBroker, error: str, *, is_persistent: bool
) -> None:
    def trouble(at: int) -> Trouble:
        return Trouble(CHANGES, ERRORS[error], first=at, last=0 if is_persistent else at)

    count, promised, errors = fail_at_every_call(disk, broker, trouble, step=1)
    print(f"\n{error}, {count} calls: {promised} promised, {dict(errors)}")
    assert promised > 0
    if not is_persistent and error != "ENOSPC":
        assert errors.keys() <= {"OutboxUnsure", "OutboxDiskFailed"}, "never a closed publisher"


def test_a_sync_that_fails_for_a_moment_and_one_that_goes_on_failing(
    disk: Mounted, broker: FakeBroker
) -> None:
    told, path = Told(broker), disk.orders.folder / "outbox.db"
    with Publisher(broker.url, outbox=path) as publisher:
        told.tell(publisher.publish, "first")
        disk.orders.trouble(Trouble(("fsync",), errno.EIO))
        told.tell(publisher.publish, "once")
        assert disk.orders.hits == 1
        time.sleep(0.5)  # while new messages are refused
        told.tell(publisher.publish, "second")
        disk.orders.trouble(Trouble(("fsync",), errno.EIO, last=0))
        for n in range(20):
            told.tell(publisher.publish, f"for good {n}")
        assert "the disk of the outbox fails" in publisher.status.trouble
        disk.orders.heal()
        time.sleep(0.5)  # while it still refuses
        told.tell(publisher.publish, "last")
    assert told.promised == {"first", "second", "last"}
    assert told.errors.total() == 21
    # Until the commit is tried again, further callers are refused, and told that for sure.
    assert told.errors.keys() == {"OutboxUnsure", "OutboxDiskFailed"}
    told.check(path)


def test_ext4_goes_read_only_under_us(
    memory: Path, broker: FakeBroker, left_open: list[sqlite3.Connection]
) -> None:
    """Its image fails, so it gives up its journal; what was promised is on the image."""

    def close_left_open() -> None:
        for connection in left_open:
            connection.close()

    told = Told(broker)
    with written_down(memory, "ext4", "errors=remount-ro") as (below, data):
        with ExitStack() as opened:
            # Last: they keep the disk mounted, also if the test fails.
            opened.callback(close_left_open)
            outbox = opened.enter_context(Outbox(data / "outbox.db"))
            publisher = Publisher("amqp://127.0.0.1:1", outbox=data / "outbox.db")
            opened.callback(publisher.close, timeout_s=0)
            told.tell(publisher.publish, "first")
            below.orders.trouble(Trouble(("write",), errno.EIO, last=0))
            for n in range(200):
                told.tell(publisher.publish, f"{n} published")
                told.tell(outbox.enqueue, f"{n} enqueued")
                if is_read_only(data):
                    break
                time.sleep(0.05)
            else:
                pytest.fail("it did not")
            told.tell(outbox.enqueue, "read-only, too")

            def says_so() -> bool:  # for `RETRY_S` after each refusal
                told.tell(publisher.publish, "read-only")
                return "the disk of the outbox fails" in publisher.status.trouble

            until(says_so)
            below.orders.heal()
        shutil.copy(below.orders.folder / IMAGE, memory / "left")
    assert told.promised == {"first"}
    with mounted(memory / "left", memory / "again") as point:
        told.check(point / FOLDER / "outbox.db")


@pytest.mark.parametrize(
    ("sync_s", "heartbeat_s"),
    [
        (1.2, 2),
        (4.5, 1),
        pytest.param(30, 10, marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
        pytest.param(30, 60, marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
    ],
)
def test_a_disk_that_takes_long(
    disk: Mounted, broker: FakeBroker, sync_s: float, heartbeat_s: int
) -> None:
    """`publish` takes as long. Beyond two heartbeats, messages arrive once the disk is well."""

    def arrived() -> int:
        return len({m.properties.message_id for m in broker.messages("q")})

    told, path = Told(broker), disk.orders.folder / "outbox.db"
    with Publisher(broker.url, outbox=path, heartbeat_s=heartbeat_s) as publisher:
        told.tell(publisher.publish, "first")
        publisher.flush(10)
        disk.orders.trouble(Trouble(("fsync",), delay_s=sync_s))
        begun = time.monotonic()
        for n in range(3):
            told.tell(publisher.publish, f"slow {n}")
        took_s = (time.monotonic() - begun) / 3
        assert took_s >= sync_s
        if heartbeat_s > sync_s:  # some twice: their confirms came later than confirm_timeout_s
            until(lambda: arrived() == 4, timeout_s=4 * sync_s + 60)
        else:
            time.sleep(3 * sync_s)
            assert arrived() == 1, "only what came before the disk was slow"
        print(f"\n{sync_s} s: publish took {took_s:.1f} s, {arrived()} of 4 arrived")
        disk.orders.heal()
    assert len(told.promised) == 4
    told.check(path)
    print(f"{len(broker.messages('q')) - 4} twice")
