"""The short path of a message that comes alone, whatever happens to its caller, files and locks."""

import gc
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from reliablepub import Message, OutboxLocked, Publisher, PublisherForked
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import Entry
from reliablepub.outbox.rows import plain_row_of
from reliablepub.outbox.sqlite import connections, lone
from reliablepub.outbox.sqlite.forks import GATE
from reliablepub.testing import FakeBroker
from tests.waiting import until

ENQUEUE = """
import sys
from reliablepub import Message, Outbox
with Outbox(sys.argv[1]) as outbox:
    outbox.enqueue(Message(b"of another process", routing_key="q"))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "outbox.db"


@pytest.fixture
def publisher(fake_broker: FakeBroker, path: Path) -> Iterator[Publisher]:
    fake_broker.declare_queue("q")
    with Publisher(fake_broker.url, outbox=path, close_timeout_s=5) as publisher:
        lend(publisher)
        yield publisher


def lend(publisher: Publisher) -> None:
    """Publish until the short path is open."""
    lone = publisher._client.relay.lone

    def is_lent() -> bool:
        publisher.publish(b"first", routing_key="q").result(30)
        return lone._lent is not None

    until(is_lent)


def test_a_lock_that_another_process_keeps_is_not_waited_for_twice(
    publisher: Publisher, path: Path
) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        begun = time.monotonic()
        with pytest.raises(OutboxLocked):
            publisher.publish(b"x", routing_key="q")
    assert time.monotonic() - begun < 2 * connections.BUSY_TIMEOUT_S


def test_locks_that_a_copy_has_taken_away_are_taken_again(publisher: Publisher, path: Path) -> None:
    """SQLite's own cannot be taken again while any connection of the process is open."""
    shutil.copy(path, path.with_name("copy.db"))

    def is_locked_again() -> bool:
        publisher.publish(b"x", routing_key="q").result(30)
        return is_locked(path)

    until(is_locked_again)
    subprocess.run([sys.executable, "-c", ENQUEUE, path], check=True, timeout=60)
    publisher.publish(b"x", routing_key="q").result(30)
    assert publisher.flush(30).is_flushed


class Interrupted(BaseException):
    """Raised by a signal handler, as `KeyboardInterrupt` is."""


def test_a_handler_that_raises_leaves_nothing_behind(publisher: Publisher, path: Path) -> None:
    lone = publisher._client.relay.lone
    me = threading.get_ident()
    is_armed = False

    def handler(*_: object) -> None:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise Interrupted

    gc.collect()
    gc.disable()  # what is raised while it runs is told as a warning
    before = signal.signal(signal.SIGALRM, handler)
    raised = 0
    end = time.monotonic() + 3
    try:
        while time.monotonic() < end:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.000_01, 0.001))
            try:
                is_armed = True
                publisher.publish(b"x", routing_key="q")
                is_armed = False
            except Interrupted:
                raised += 1
            assert me not in GATE._using
    finally:
        is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert raised > 100
    lend(publisher)
    assert publisher.flush(30).is_flushed
    with closing(sqlite3.connect(path)) as other:
        rows = "SELECT count(*) FROM reliablepub_in_flight"
        until(lambda: other.execute(rows).fetchone() == (0,))
    assert not lone._users
    assert len(lone._announced) < 2
    assert publisher.status.counters.open == 0


HANDLER = """
import gc, random, signal, sys, time
from reliablepub import Publisher
from reliablepub.testing import FakeBroker

gc.disable()
is_nested = False

def handler(*_):
    global is_nested
    if not is_nested:
        is_nested = True
        publisher.publish(b"of the handler", routing_key="q")
        is_nested = False

with FakeBroker() as broker:
    broker.declare_queue("q")
    with Publisher(broker.url, outbox=sys.argv[1], close_timeout_s=30) as publisher:
        signal.signal(signal.SIGALRM, handler)
        end = time.monotonic() + 2
        while time.monotonic() < end:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.000_01, 0.001))
            publisher.publish(b"x", routing_key="q")
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert publisher.flush(30).is_flushed
"""


def test_a_handler_that_waits_for_the_relay_never_waits_for_ever(path: Path) -> None:
    """Whatever the call holds that it has interrupted, the relay must not need."""
    subprocess.run([sys.executable, "-c", HANDLER, path], check=True, timeout=60)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_a_handler_has_forked_stores_nothing(
    publisher: Publisher, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the connection that was in use, but none of the locks."""
    parent = os.getpid()
    told: list[int] = []

    def interrupted(entry: Entry, keys: OutboxKeys | None) -> tuple[object, ...]:
        if not told:
            child = os.fork()
            told.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 0)
        return plain_row_of(entry, keys)

    monkeypatch.setattr(lone, "plain_row_of", interrupted)
    try:
        receipt = publisher.publish(b"x", routing_key="q")
    except PublisherForked:
        os._exit(7)
    finally:
        if os.getpid() != parent:
            os._exit(8)
    assert told == [7]
    receipt.result(30)


def test_close_counts_what_was_stored_while_it_ended(
    publisher: Publisher, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the last turn it is stored, and counted; from then on, it is refused."""
    relay, lone = publisher._client.relay._relay, publisher._client.relay.lone
    assert relay is not None
    drain, commit = relay.drain, relay._commit_and_send
    stored: list[bool] = []

    def store() -> None:
        time.sleep(0.01)  # otherwise two threads publish
        stored.append(lone.store(Message(b"x", routing_key="q", message_id="m"), None))

    def before_the_last_turn() -> None:
        drain()
        store()

    def within_the_last_turn(*arguments: Any, **options: Any) -> None:
        commit(*arguments, **options)
        if stored:
            store()

    monkeypatch.setattr(relay, "drain", before_the_last_turn)
    monkeypatch.setattr(relay, "_commit_and_send", within_the_last_turn)
    status = publisher.close()
    assert status.open == stored.count(True)
    assert stored == [True, False]


def is_locked(path: Path) -> bool:
    """Whether this process holds a lock on the file, as another process sees it."""
    inode = f":{path.stat().st_ino} "
    return any(inode in line for line in Path("/proc/locks").read_text().splitlines())
