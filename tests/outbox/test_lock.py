import errno
import fcntl
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from reliablepub.errors import OutboxError, OutboxInUse
from reliablepub.outbox.sqlite import lock as lock_module
from reliablepub.outbox.sqlite.lock import RelayLock, holder_pid, lock_path
from reliablepub.outbox.sqlite.store import SqliteStore

HOLD = """
import sys, time
from pathlib import Path
from reliablepub.outbox.sqlite.lock import RelayLock
lock = RelayLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Kill it, unless it is dead already."""
    process.send_signal(signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def test_the_loser_learns_who_has_it_and_what_to_do(
    path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "BORROWED_MAX_S", math.inf)  # who has a name is no borrower
    words = (
        f"outbox {path} is relayed by process {holder.pid}, and there can be only one relay; "
        "stop it, or only enqueue here"
    )
    with pytest.raises(OutboxInUse, match=f"^{re.escape(words)}$") as caught:
        RelayLock(path, timeout_s=0.05)
    assert caught.value.retryable
    assert holder_pid(path) == holder.pid


def test_a_parent_that_has_it_is_told_as_that_of_a_reloader(path: Path) -> None:
    relay_lock = RelayLock(path)
    try:
        done = subprocess.run(
            [sys.executable, "-c", HOLD, str(path)], capture_output=True, text=True, check=False
        )
    finally:
        relay_lock.release()
    assert f"process {os.getpid()}, the parent of this one; a reloader" in done.stderr


def test_death_frees_it_at_once(path: Path, holder: subprocess.Popen[str]) -> None:
    end(holder)
    assert holder_pid(path) is None
    relay_lock = RelayLock(path, timeout_s=0)
    assert holder_pid(path) == os.getpid()
    relay_lock.release()


def test_a_dying_holder_is_waited_for(path: Path, holder: subprocess.Popen[str]) -> None:
    killer = subprocess.Popen(["/bin/sh", "-c", f"sleep 0.3; kill -9 {holder.pid}"])
    relay_lock = RelayLock(path, timeout_s=60)
    assert relay_lock.is_held
    relay_lock.release()
    killer.wait()


def test_one_process_cannot_have_it_twice(path: Path) -> None:
    relay_lock = RelayLock(path)
    words = (
        r"another publisher of this process; use that one, close it \(.*\), or only enqueue here$"
    )
    with pytest.raises(OutboxInUse, match=words):
        RelayLock(path, timeout_s=0.05)
    relay_lock.release()
    relay_lock.release()  # twice is no error
    RelayLock(path, timeout_s=0.05).release()


def test_no_process_is_named_after_release(path: Path) -> None:
    assert holder_pid(path) is None
    RelayLock(path).release()
    assert holder_pid(path) is None
    assert lock_path(path).read_bytes() == b""
    assert lock_path(path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", [b"", b"\xff\xfe", "\N{ARABIC-INDIC DIGIT THREE}".encode(), b"-3"])
def test_a_name_that_is_no_number_names_no_process(path: Path, name: bytes) -> None:
    relay_lock = RelayLock(path)
    lock_path(path).write_bytes(name)
    assert holder_pid(path) is None
    relay_lock.release()


def test_a_link_to_another_outboxs_lock_is_refused(path: Path) -> None:
    output = os.fstat(1)
    other = path.with_name("other.db")
    relay_lock = RelayLock(other)
    lock_path(path).symlink_to(lock_path(other))
    assert holder_pid(path) is None
    with pytest.raises(OutboxError, match=str(lock_path(path))):
        RelayLock(path)
    assert RelayLock.borrow(path) is None
    relay_lock.release()
    assert os.path.samestat(os.fstat(1), output), "nothing else is closed"


def test_a_removed_lock_file_is_not_locked_in_secret(path: Path) -> None:
    first = RelayLock(path)
    lock_path(path).unlink()
    second = RelayLock(
        path, timeout_s=0.1
    )  # the run number in the outbox tells the first it has lost
    assert holder_pid(path) == os.getpid()
    second.release()
    first.release()


def test_a_child_neither_has_nor_keeps_it(path: Path) -> None:
    relay_lock = RelayLock(path)
    ready, let_go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(let_go[1])  # so that the end of the parent lets it go, too
        os.write(ready[1], b"y" if not relay_lock.is_held else b"n")
        os.read(let_go[0], 1)
        os._exit(0)
    assert os.read(ready[0], 1) == b"y"
    assert holder_pid(path) == os.getpid()  # the child's closing did not release it
    relay_lock.release()
    RelayLock(path, timeout_s=0.1).release()  # while the child still lives
    os.write(let_go[1], b"x")
    os.waitpid(pid, 0)
    for fd in (*ready, *let_go):
        os.close(fd)


@pytest.mark.parametrize("call", [RelayLock, RelayLock.borrow, holder_pid])
def test_a_child_that_is_made_while_it_is_taken_does_not_keep_it(
    path: Path, call: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_path(path).write_bytes(b"1\n")
    lock_path(path).chmod(0o600)
    pids, let_go = list[int](), os.pipe()

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            os.close(let_go[1])  # so that the end of the parent lets it go, too
            os.read(let_go[0], 1)
            os._exit(0)
        pids.append(pid)

    forker = threading.Thread(target=fork)

    def flock(fd: int, how: int) -> None:
        fcntl.flock(fd, how)
        forker.start()
        forker.join(0.3)  # it ends meanwhile, unless it waits

    monkeypatch.setattr(lock_module, "fcntl", SimpleNamespace(**vars(fcntl) | {"flock": flock}))
    taken = call(path)
    monkeypatch.undo()
    forker.join()
    try:
        if isinstance(taken, RelayLock):
            taken.release()
        RelayLock(path, timeout_s=0.0).release()  # while the child still lives
    finally:
        os.write(let_go[1], b"x")
        os.waitpid(pids[0], 0)
        for fd in let_go:
            os.close(fd)


def test_a_relay_of_another_container_may_have_the_same_process_id(
    path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    same = {"getpid": lambda: holder.pid}
    monkeypatch.setattr(lock_module, "os", SimpleNamespace(**vars(os) | same))
    with pytest.raises(OutboxInUse, match=f"by process {holder.pid}, and there can be only one"):
        RelayLock(path, timeout_s=0.05)


def test_a_process_without_standard_input_can_have_it_too(
    path: Path, child: Callable[[Callable[[], None]], int]
) -> None:
    def work() -> None:
        os.close(0)  # as daemons do: the next file that is opened is number 0
        for take in (RelayLock, RelayLock.borrow):
            relay_lock = take(path)
            assert relay_lock is not None
            assert relay_lock.is_held
            assert RelayLock.borrow(path) is None
            relay_lock.release()
            assert not relay_lock.is_held

    assert child(work) == 0
    RelayLock(path, timeout_s=0).release()


def test_it_is_not_passed_on_to_programs(path: Path, child: Callable[..., int]) -> None:
    relay_lock = RelayLock(path)
    listing = "import glob, os; print([os.path.realpath(f) for f in glob.glob('/proc/self/fd/*')])"
    seen = subprocess.run(
        [sys.executable, "-c", listing], capture_output=True, text=True, check=True, close_fds=False
    ).stdout
    assert "outbox" not in seen
    relay_lock.release()


def test_what_cannot_be_locked_is_not_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def refused(outbox: Path) -> int:
        tries.append(outbox)
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(lock_module, "_locked_fd", refused)
    monkeypatch.setattr(lock_module, "BORROWED_MAX_S", 0.1)
    with pytest.raises(OutboxError, match="Permission denied"):
        RelayLock(path)
    assert tries == [path]


def test_descriptor_0_is_one_like_any_other(path: Path) -> None:
    relay_lock = RelayLock(path)
    real, relay_lock._fd = relay_lock._fd, 0
    assert relay_lock.is_held
    relay_lock._fd = real
    relay_lock.release()


@pytest.mark.parametrize("harm", ["delete", "replace", "empty"])
def test_a_lock_file_that_was_harmed_is_locked_again(path: Path, harm: str) -> None:
    relay_lock = RelayLock(path)
    file = lock_path(path)
    if harm == "empty":
        os.truncate(file, 0)
    else:
        file.unlink()
    if harm == "replace":
        file.touch(0o600)
    assert holder_pid(path) is None
    relay_lock.keep()
    assert holder_pid(path) == os.getpid()
    with pytest.raises(OutboxInUse):
        RelayLock(path, timeout_s=0.05)
    before = file.stat()
    relay_lock.keep()
    assert file.stat() == before, "nothing is written if all is well"
    relay_lock.release()
    assert RelayLock.borrow(path) is not None


def test_a_lock_that_another_process_has_taken_meanwhile_is_its(
    path: Path, request: pytest.FixtureRequest
) -> None:
    relay_lock = RelayLock(path)
    lock_path(path).unlink()
    holder: subprocess.Popen[str] = request.getfixturevalue("holder")
    relay_lock.keep()
    relay_lock.release()
    assert holder_pid(path) == holder.pid


def test_a_relay_keeps_its_lock(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        lock_path(path).unlink()
        store.relieve()
        assert holder_pid(path) == os.getpid()
