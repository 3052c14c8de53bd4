"""What holds forks back, without a fork."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from reliablepub.errors import OutboxLocked
from reliablepub.outbox.sqlite import forks
from reliablepub.outbox.sqlite.forks import Gate
from tests.sqlite import sql


class Resting:
    """A keeper that has nothing to close."""

    def rest(self) -> None:
        pass


def test_a_keeper_may_come_while_another_thread_has_the_lock() -> None:
    """A signal handler may interrupt the caller there, and wait for the relay, which needs it."""
    gate, late = Gate(), Resting()
    adding = threading.Thread(target=gate.keep, args=(late,), daemon=True)
    with gate._lock:
        adding.start()
        adding.join(10)
        assert not adding.is_alive()
    assert gate._kept() == [late]


def test_a_keeper_that_comes_during_a_fork_does_not_stop_it() -> None:
    """An exception in a hook is ignored, and then no connection would be closed."""
    gate, late, rested = Gate(), Resting(), list[int]()

    class Adding:
        def rest(self) -> None:
            gate.keep(late)
            rested.append(id(self))

    keepers = [Adding(), Adding()]
    for keeper in keepers:
        gate.keep(keeper)
    gate._before()
    gate._after_in_parent()
    assert rested == [*map(id, keepers)]
    assert late in gate._kept()


def test_a_call_does_not_wait_for_good_for_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """An at-fork hook of the application may wait for a lock that the caller holds."""
    monkeypatch.setattr(forks, "QUIET_TIMEOUT_S", 0.05)
    gate = Gate()
    forking = threading.Thread(target=gate._before)
    forking.start()
    forking.join()
    with pytest.raises(OutboxLocked, match="another thread of this process has been forking"):
        gate.begin_use()
    gate._after_in_parent()
    gate.end_use(gate.begin_use())


ABANDON = """
import gc, sqlite3, sys
from reliablepub.outbox.sqlite.forks import abandon

if sys.argv[2]:
    sys.modules[sys.argv[2]] = None
connection = sqlite3.connect(sys.argv[1])
connection.execute("PRAGMA journal_mode = WAL")
connection.execute("CREATE TABLE orders (id)")
abandon(connection)
del connection
gc.collect()
"""


@pytest.mark.parametrize("missing", ["", "ctypes", "_ctypes"])
def test_what_is_abandoned_stays_open_until_the_end(path: Path, missing: str) -> None:
    command = [sys.executable, "-W", "error", "-c", ABANDON, str(path), missing]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert not done.stderr
    assert path.with_name(path.name + "-wal").stat().st_size, "it was not closed"
    assert sql(path, "SELECT count(*) FROM orders") == [(0,)]
