"""`SqliteLoneWriter`: one statement stores, counts and notes a message, or changes nothing."""

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from reliablepub.errors import OutboxDiskFull, OutboxLocked, OutboxMoved, OutboxUnsure
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import Changes, Entry, OpenLimits
from reliablepub.outbox.sqlite import connections, lone
from reliablepub.outbox.sqlite import store as store_module
from reliablepub.outbox.sqlite.forks import GATE
from reliablepub.outbox.sqlite.location import WritingConnection
from reliablepub.outbox.sqlite.lone import SqliteLoneWriter
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.outbox.conftest import Make

ROOMY = OpenLimits(1_000, 1_000_000)
NOTED = "SELECT epoch, first_tag, count, ids FROM reliablepub_in_flight"
ROW = (
    "SELECT message_id, exchange, routing_key, properties, due_at, nacked, size, body, expires_at"
    " FROM reliablepub_messages"
)


@pytest.fixture
def writer(store: SqliteStore) -> Iterator[SqliteLoneWriter]:
    store.lone.prepare(ROOMY, is_sent=False)
    yield store.lone
    store.lone.close()


def numbered(writer: SqliteLoneWriter, entry: Entry) -> Entry:
    entry.id = writer.next_id()
    return entry


def audit(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        row = connection.execute("SELECT * FROM reliablepub_audit").fetchone()
        return [row[name] for name in row.keys() if name.endswith("_difference")]  # noqa: SIM118


def read(path: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def test_the_row_and_the_ledger_are_those_of_a_commit(
    store: SqliteStore, writer: SqliteLoneWriter, path: Path, entry: Make
) -> None:
    fields = {"body": b"b" * 5_000, "headers": {"n": 1}, "message_id": "same"}
    store.commit(Changes(new=[entry(**fields)]))
    of_commit = store.snapshot()
    assert not writer.store(numbered(writer, entry(**fields))), "its id was taken by the commit"
    alone = numbered(writer, entry(**fields))
    assert writer.store(alone)
    assert alone.id == 2 == writer.next_id() - 1
    assert store.snapshot() == of_commit.with_stored(alone)
    first, second = read(path, ROW)
    assert first == second
    assert audit(path) == [0, 0, 0, 0]
    entries, _ = store.read_ready(1, 2, limit=9, bytes_max=1_000_000)
    assert [one.message for one in entries] == [entries[0].message] * 2


def test_a_message_is_noted_as_in_flight_if_it_is_sent_without_a_commit(
    store: SqliteStore, writer: SqliteLoneWriter, path: Path, entry: Make
) -> None:
    assert writer.store(numbered(writer, entry()))
    assert read(path, NOTED) == []
    writer.prepare(ROOMY, is_sent=True)
    sent = [numbered(writer, entry())]
    assert writer.store(sent[0])
    for _ in range(2):
        sent.append(numbered(writer, entry()))
        assert writer.store(sent[-1])
    noted = read(path, NOTED)
    assert noted == [(f"{store.run}-0", id_, 1, f"[[{id_},1]]") for id_ in (2, 3, 4)]
    other = entry()
    other.id = 4  # it was not stored: the id has gone to another message
    store.commit(Changes(unnoted=[*sent[:2], sent[1], other]))
    assert read(path, NOTED) == noted[2:]


def test_after_a_crash_it_may_have_arrived(path: Path, entry: Make) -> None:
    with closing(SqliteStore(path)) as store:
        for is_sent in (False, True):
            store.lone.prepare(ROOMY, is_sent=is_sent)
            assert store.lone.store(numbered(store.lone, entry()))
        store.lone.close()
    with closing(SqliteStore(path)) as store:
        entries, _ = store.read_ready(1, 2, limit=9, bytes_max=1_000)
        assert [one.uncertain for one in entries] == [0, 1]
        assert read(path, NOTED) == []


def test_limits_hold_exactly(store: SqliteStore, path: Path, entry: Make) -> None:
    writer = store.lone
    writer.prepare(OpenLimits(2, 1_000_000), is_sent=True)
    assert [writer.store(numbered(writer, entry())) for _ in range(4)] == [True, True, False, False]
    size = store.snapshot().counters.open_bytes
    one = entry().message.size
    writer.prepare(OpenLimits(1_000, size + one), is_sent=True)
    assert [writer.store(numbered(writer, entry())) for _ in range(2)] == [True, False]
    assert store.snapshot().counters.open == 3
    assert len(read(path, NOTED)) == 3
    assert audit(path) == [0, 0, 0, 0]
    writer.close()


def test_a_connection_that_was_opened_again_stores_nothing_before_it_is_prepared(
    store: SqliteStore, writer: SqliteLoneWriter, entry: Make
) -> None:
    assert writer.is_prepared
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert not writer.is_prepared
    assert not writer.store(numbered(writer, entry()))
    assert store.snapshot().counters.stored == 0
    writer.prepare(ROOMY, is_sent=False)
    assert writer.store(numbered(writer, entry()))
    with GATE.use():
        assert store.snapshot().counters.stored == 1


def test_it_waits_for_a_short_transaction_and_not_for_a_long_one(
    store: SqliteStore, writer: SqliteLoneWriter, path: Path, entry: Make
) -> None:
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        begun = time.monotonic()
        assert not writer.store(numbered(writer, entry()))
        assert time.monotonic() - begun < 4, "no wait of SQLite's"
        assert store.snapshot().counters.stored == 0
        with mock.patch.object(lone, "_TRIES", 100_000):
            timer = threading.Timer(0.05, other.execute, ["COMMIT"])
            timer.start()
            assert writer.store(numbered(writer, entry()))
            timer.join()


SLOW = """CREATE TEMP TRIGGER slow AFTER INSERT ON main.reliablepub_messages
BEGIN SELECT wait_a_moment(); END"""


@pytest.mark.parametrize("is_long", [False, True])
def test_the_relay_waits_for_a_caller_whose_commit_takes_long(
    path: Path, entry: Make, monkeypatch: pytest.MonkeyPatch, *, is_long: bool
) -> None:
    monkeypatch.setattr(connections, "BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(store_module, "CALLER_WAITS", 1 if is_long else 1_000)
    has_lock = threading.Event()

    def wait_a_moment() -> None:
        has_lock.set()
        time.sleep(0.5)

    with closing(SqliteStore(path)) as store:
        writer = store.lone
        writer.prepare(ROOMY, is_sent=False)
        with writer._writer as connection:
            connection.create_function("wait_a_moment", 0, wait_a_moment)
            connection.execute(SLOW)
        caller = threading.Thread(target=writer.store, args=(numbered(writer, entry()),))
        caller.start()
        assert has_lock.wait(30)
        with pytest.raises(OutboxLocked) if is_long else nullcontext():
            store.commit(Changes(new=[entry()]))
        caller.join()
        assert not writer.is_writing
        assert store.snapshot().counters.stored == (1 if is_long else 2)
        writer.close()


def test_a_disk_that_fails_leaves_it_in_doubt_and_the_relay_decides(
    store: SqliteStore, path: Path, entry: Make
) -> None:
    class Failing(WritingConnection):
        is_failing = False

        def execute(self, sql: str, *rest: Any) -> sqlite3.Cursor:
            if self.is_failing and "lone" in sql:
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
                raise error
            return super().execute(sql, *rest)

    connect = sqlite3.connect
    with mock.patch("sqlite3.connect", lambda *a, **o: connect(*a, **o | {"factory": Failing})):
        writer = SqliteLoneWriter(path, None, store.run, store._writer)
        writer.prepare(ROOMY, is_sent=False)
    with mock.patch.object(Failing, "is_failing", new=True):
        with pytest.raises(OutboxUnsure, match="it is unknown whether the message is stored"):
            writer.store(numbered(writer, entry()))
        assert writer._writer.connection is not None
        assert writer._writer.connection.must_stay
    store.commit(Changes(new=[entry()]))
    assert not writer.store(numbered(writer, entry()))
    assert writer.store(numbered(writer, entry()))
    assert not writer._writer.connection.must_stay
    writer.close()


def test_a_full_disk_refuses_it(
    store: SqliteStore, writer: SqliteLoneWriter, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reliablepub.outbox.sqlite.space.free_bytes", lambda _folder: 0.0)
    with pytest.raises(OutboxDiskFull):
        writer.store(numbered(writer, entry()))
    assert store.snapshot().counters.stored == 0


def test_a_file_that_was_moved_is_noticed(
    writer: SqliteLoneWriter, path: Path, tmp_path: Path, entry: Make
) -> None:
    for file in tmp_path.glob("outbox.db*"):
        file.rename(file.with_name(f"moved-{file.name}"))
    with pytest.raises(OutboxUnsure) as told:
        writer.store(numbered(writer, entry()))
    assert isinstance(told.value.__cause__, OutboxMoved)


def test_a_file_that_is_gone_is_not_created_again(
    store: SqliteStore, path: Path, entry: Make
) -> None:
    for file in path.parent.glob("outbox.db*"):
        file.rename(file.with_name(f"moved-{file.name}"))
    with pytest.raises(OutboxMoved):
        store.lone.prepare(ROOMY, is_sent=False)
    assert not path.exists()
    assert not store.lone.is_prepared


def test_the_body_is_sealed_for_its_id(path: Path, entry: Make) -> None:
    with closing(SqliteStore(path, keys=OutboxKeys({"k": bytes(32)}))) as store:
        store.lone.prepare(ROOMY, is_sent=False)
        assert store.lone.store(numbered(store.lone, entry(body=b"secret")))
        [[body]] = read(path, "SELECT body FROM reliablepub_messages")
        assert isinstance(body, bytes)
        assert b"secret" not in body
        [found], _ = store.read_ready(1, 1, limit=1, bytes_max=1_000)
        assert found.message.body == b"secret"
        store.lone.close()
