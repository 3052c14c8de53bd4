import gc
import os
import pickle
import random
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from sqlalchemy import create_engine

from reliablepub._core.events import Batch
from reliablepub.errors import (
    ConfigurationError,
    InvalidMessage,
    NotAnOutbox,
    OutboxDiskFull,
    OutboxError,
    OutboxFull,
    OutboxInUse,
    OutboxLocked,
)
from reliablepub.message import Message
from reliablepub.outbox.admin.inspection import OutboxStatus
from reliablepub.outbox.admin.transfer import export_lines, import_lines
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import Attempt, Changes, Entry, Intervened
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.rows import ID_MAX
from reliablepub.outbox.sqlite import database, enqueue, transactions
from reliablepub.outbox.sqlite.connections import open_writer
from reliablepub.outbox.sqlite.enqueue import _is_autocommit
from reliablepub.outbox.sqlite.location import Place
from reliablepub.outbox.sqlite.space import Ballast
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import Outcome, OutcomeKind
from tests.asking import fill, stored
from tests.lazy import Lazy
from tests.outbox.conftest import Make
from tests.outcomes import RETURNED
from tests.sqlite import sql, writer_of


def open_messages(path: Path) -> list[Message]:
    with closing(SqliteStore(path)) as store:
        entries = store.read_ready(1, 10**9, limit=1000, bytes_max=10**9)[0]
        assert len(entries) == store.snapshot().counters.open
        assert sum(e.message.size for e in entries) == store.snapshot().counters.open_bytes
        return [entry.message for entry in entries]


def test_a_message_is_stored_under_its_id(path: Path) -> None:
    message = Message(b"body", "x", "k", {"n": 1}, message_id="mine", app_id="app")
    with Outbox(path) as outbox:
        assert outbox.enqueue(message) == "mine"
        minted = outbox.enqueue(Message(b"other"))
        assert outbox.enqueue(message) == "mine"  # no uniqueness: that is the application's affair
    assert open_messages(path) == [message, Message(b"other", message_id=minted), message]
    assert len(minted) == 36


def test_it_is_part_of_the_callers_transaction(path: Path, app: sqlite3.Connection) -> None:
    outbox = Outbox(path)
    with app:
        app.execute("INSERT INTO orders VALUES (1)")
        outbox.enqueue(Message(b"order 1", message_id="1"), connection=app)

    def change_of_mind() -> None:
        with app:
            app.execute("INSERT INTO orders VALUES (2)")
            outbox.enqueue(Message(b"order 2", message_id="2"), connection=app)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        change_of_mind()
    with app:  # the message comes first, and the transaction is still the caller's
        outbox.enqueue(Message(b"order 3", message_id="3"), connection=app)
        assert app.in_transaction
        app.execute("INSERT INTO orders VALUES (3)")
    assert app.execute("SELECT id FROM orders").fetchall() == [(1,), (3,)]
    app.close()
    assert [m.message_id for m in open_messages(path)] == ["1", "3"]


@pytest.mark.parametrize(
    ("pragma", "warned"),
    [
        ("synchronous = OFF", "synchronous = OFF"),
        ("synchronous = NORMAL", "synchronous = NORMAL"),
        ("synchronous = FULL", ""),
        ("synchronous = EXTRA", ""),
        ("journal_mode = MEMORY", "journal_mode = MEMORY: a process that is killed"),
        ("journal_mode = OFF", "journal_mode = OFF: a process that is killed"),
        ("journal_mode = DELETE", ""),
    ],
)
def test_a_connection_whose_commits_can_be_lost_is_warned_of_once(
    path: Path, app: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch, pragma: str, warned: str
) -> None:
    """By a power cut, or with the process."""
    said: list[str] = []
    monkeypatch.setattr(
        enqueue.LOGGER, "warning", lambda text, *words, **_: said.append(text % words)
    )
    app.execute(f"PRAGMA {pragma}")
    outbox = Outbox(path)
    for _ in range(3):
        outbox.enqueue(Message(b"body"), connection=app)
        app.commit()
    assert len(said) == bool(warned)
    assert all(warned in words for words in said)


def test_a_rollback_leaves_no_trace_of_the_first_message(
    path: Path, app: sqlite3.Connection
) -> None:
    app.execute("INSERT INTO orders VALUES (1)")
    Outbox(path).enqueue(Message(b"x"), connection=app)
    app.rollback()
    assert app.execute("SELECT name FROM sqlite_schema").fetchall() == [("orders",)]
    with pytest.raises(NotAnOutbox):
        Outbox(path).status()


def test_in_autocommit_mode_it_is_stored_at_once(path: Path, app: sqlite3.Connection) -> None:
    app.isolation_level = None
    Outbox(path).enqueue(Message(b"x"), connection=app)
    assert not app.in_transaction
    assert Outbox(path).status().open == 1


def test_the_callers_text_factory_does_not_matter(path: Path, app: sqlite3.Connection) -> None:
    app.text_factory = bytes
    for _ in range(2):
        with app:
            app.execute("CREATE TABLE IF NOT EXISTS theirs (name TEXT)")
            app.execute("INSERT INTO theirs VALUES ('x')")
            stored = Outbox(path).enqueue(Message(b"x", message_id="m-1"), key="k", connection=app)
            assert stored == "m-1"
    assert app.text_factory is bytes
    assert app.execute("SELECT name FROM theirs").fetchone() == (b"x",)
    assert Outbox(path).status().open == 1


@pytest.mark.parametrize("verb", ["position", "forget", "resume_key", "skip_key"])
def test_a_name_that_is_no_text_is_refused(path: Path, verb: str) -> None:
    outbox = Outbox(path)
    outbox.create()
    with pytest.raises(InvalidMessage, match="cannot be encoded as UTF-8"):
        getattr(outbox, verb)("\ud800")


@pytest.mark.parametrize("key", ["\ud800", b"k", pytest.param(Lazy("k"), id="lazy")])
def test_a_key_that_cannot_be_stored_is_refused(
    path: Path, app: sqlite3.Connection, key: Any
) -> None:
    for connection in (None, app):
        with pytest.raises(InvalidMessage, match="key"):
            Outbox(path).enqueue(Message(b"x"), key=key, connection=connection)
    app.rollback()
    Outbox(path).enqueue(Message(b"x"), key="k")
    assert Outbox(path).status().open == 1


def test_a_body_and_fields_are_stored_as_a_message(path: Path) -> None:
    id_ = Outbox(path).enqueue(b"x", exchange="orders", routing_key="new", key="order 1")
    (row,) = Outbox(path).rows("open")
    assert (row["message_id"], row["exchange"], row["routing_key"]) == (id_, "orders", "new")
    for given, fields in ((Message(b"x"), {"exchange": "orders"}), ({"order": 1}, {})):
        with pytest.raises(InvalidMessage):
            Outbox(path).enqueue(given, **fields)  # type: ignore[arg-type]
    assert Outbox(path).status().open == 1


def test_the_connection_of_a_framework_is_refused_with_what_to_use(path: Path) -> None:
    engine = create_engine(f"sqlite:///{path}")
    with (
        engine.connect() as connection,
        pytest.raises(
            ConfigurationError, match=r"reliablepub\.integrations\.sqlalchemy\.SessionOutbox"
        ),
    ):
        Outbox(path).enqueue(b"x", connection=connection)
    engine.dispose()


def test_the_number_of_a_deleted_log_may_be_another_databases(
    path: Path, app: sqlite3.Connection
) -> None:
    """A file system gives the number of a deleted file to the next one."""
    app.execute("PRAGMA journal_mode = WAL")
    with app:
        Outbox(path).enqueue(Message(b"x"), connection=app)
    place, other = Place(path), path.with_name("other.db")
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        Outbox(other).enqueue(Message(b"x"), connection=connection)
        _, _, reused = Place(other)._inodes
        file, log, _ = place._inodes
        place._inodes = (file, log, reused)  # as recorded before the index was deleted
        assert not place.is_left_open(Place(path))
        other.with_name("other.db-shm").unlink()
        assert place.is_left_open(Place(path)), "it is open, and has no name any more"


def test_the_callers_row_factory_does_not_matter(path: Path, app: sqlite3.Connection) -> None:
    def factory(_cursor: sqlite3.Cursor, _row: tuple[object, ...]) -> dict[str, str]:
        return {"only": "dicts"}

    app.row_factory = factory
    with app:
        Outbox(path).enqueue(Message(b"x"), connection=app)
    assert app.row_factory is factory
    assert Outbox(path).status().open == 1


def test_a_transaction_that_sqlite_has_ended_on_a_full_disk_is_told(
    path: Path, app: sqlite3.Connection
) -> None:
    outbox = Outbox(path)
    with app:
        outbox.enqueue(Message(b"x"), connection=app)
    app.execute("INSERT INTO orders VALUES (1)")
    (pages,) = app.execute("PRAGMA page_count").fetchone()
    app.execute(f"PRAGMA max_page_count = {pages}").fetchone()
    words = r"rolled back your whole transaction: start it again$"
    with pytest.raises(OutboxDiskFull, match=words):
        outbox.enqueue(Message(b"x" * 100_000), connection=app)
    assert not app.in_transaction
    assert not app.execute("SELECT id FROM orders").fetchall()
    assert outbox.status().stored == 1


@pytest.mark.parametrize("other", [":memory:", "other.db"])
@pytest.mark.parametrize("is_there", [False, True])
def test_another_database_is_refused(path: Path, other: str, is_there: bool) -> None:  # noqa: FBT001
    if is_there:
        SqliteStore(path).close()
    name = other if other.startswith(":") else str(path.with_name(other))
    with closing(sqlite3.connect(name)) as db, pytest.raises(ConfigurationError) as error:
        Outbox(path).enqueue(Message(b"x"), connection=db)
    assert str(error.value) == (
        f"connection is to {'no file' if name == other else name}, and the outbox is {path}; they "
        "must be the same database, or the message would not be part of your transaction"
    )
    assert path.exists() is is_there


@pytest.mark.parametrize(
    ("attributes", "is_so"),
    [
        pytest.param({"isolation_level": None}, True, id="by its isolation level"),
        pytest.param({"isolation_level": "", "autocommit": True}, True, id="as since Python 3.12"),
        pytest.param({"isolation_level": "", "autocommit": False}, False, id="switched off"),
        pytest.param({"isolation_level": "", "autocommit": -1}, False, id="as it always was"),
        pytest.param({"isolation_level": ""}, False, id="before Python 3.12"),
    ],
)
def test_both_ways_to_autocommit_are_known(attributes: dict[str, Any], is_so: bool) -> None:  # noqa: FBT001
    assert _is_autocommit(SimpleNamespace(**attributes)) is is_so


def test_it_lives_among_an_applications_tables_of_the_same_names(
    path: Path, app: sqlite3.Connection
) -> None:
    names = ("messages", "runs", "parked", "sources", "attempts", "audit", "history")
    for name in names:
        app.execute(f"CREATE TABLE {name} (id INTEGER PRIMARY KEY AUTOINCREMENT, chat TEXT)")
        app.execute(f"INSERT INTO {name} VALUES (1000, 'theirs')")
    app.execute("PRAGMA user_version = 42")
    app.execute("PRAGMA application_id = 7")
    app.commit()
    outbox = Outbox(path)
    with app:
        app.execute("INSERT INTO messages (chat) VALUES ('hello')")
        outbox.enqueue(Message(b"1", message_id="1"), connection=app)
    with closing(SqliteStore(path)) as store:
        (first,) = store.read_ready(1, 99, limit=9, bytes_max=10**9)[0]
        assert (first.id, first.message.message_id) == (1, "1")
        with app:
            outbox.enqueue(Message(b"2", message_id="2"), connection=app)
        assert store.changed_elsewhere()
        assert store.snapshot().last_id == 2
        second = Entry(Message(b"3", message_id="3"), 1.0)
        store.commit(Changes(new=[second], confirmed=[first]))
        assert second.id == 3
        outbox.enqueue(Message(b"4"))
        status = outbox.status()
        assert (status.stored, status.open, status.confirmed) == (4, 3, 1)
    outbox.close()
    assert app.execute("PRAGMA user_version").fetchone() == (42,)
    assert app.execute("PRAGMA application_id").fetchone() == (7,)
    rows = [(1000, "theirs")]
    assert app.execute("SELECT * FROM messages").fetchall() == [*rows, (1001, "hello")]
    for name in names[1:]:
        assert app.execute(f"SELECT * FROM {name}").fetchall() == rows


@pytest.mark.parametrize("use", ["relay", "enqueue"])
def test_a_database_of_an_application_becomes_an_outbox(
    path: Path, app: sqlite3.Connection, use: str
) -> None:
    app.execute("INSERT INTO orders VALUES (1)")
    app.commit()
    if use == "relay":
        SqliteStore(path).close()
    else:
        fill(path, Message(b"x"))
    assert Outbox(path).status().open == (use == "enqueue")
    assert app.execute("SELECT id FROM orders").fetchall() == [(1,)]


def test_a_database_without_an_outbox_is_told_so_and_left_alone(
    path: Path, app: sqlite3.Connection
) -> None:
    before = path.read_bytes()
    outbox = Outbox(path)
    for ask in (outbox.status, outbox.parked, outbox.retry):
        with pytest.raises(NotAnOutbox, match=r"holds no outbox; .*Outbox.create\(\), its first"):
            ask()
    assert outbox.position("file") == 0
    outbox.forget("file")
    assert path.read_bytes() == before


def test_a_table_of_our_name_is_not_overwritten(path: Path, app: sqlite3.Connection) -> None:
    app.execute("CREATE TABLE reliablepub_messages (chat)")
    with pytest.raises(OutboxError, match="already exists"), app:
        Outbox(path).enqueue(Message(b"x"), connection=app)
    assert app.execute("SELECT name FROM sqlite_schema ORDER BY 1").fetchall() == [
        ("orders",),
        ("reliablepub_messages",),
    ]


def test_threads_that_make_the_first_calls_take_turns(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, using = threading.Barrier(4), threading.Lock()
    turns: list[bool] = []
    commit = transactions.transaction_at_path

    def getpid() -> int:
        time.sleep(chance.random() / 50)
        return os.getpid()

    @contextmanager
    def commit_alone(*args: Any) -> Iterator[None]:
        is_alone = using.acquire(blocking=False)
        turns.append(is_alone)
        try:
            time.sleep(0.02)
            with commit(*args):
                yield
        finally:
            if is_alone:
                using.release()

    chance = random.Random(1)
    monkeypatch.setattr(database, "transaction_at_path", commit_alone)
    outbox = Outbox(path)
    monkeypatch.setattr(transactions, "os", SimpleNamespace(**vars(os) | {"getpid": getpid}))

    def enqueue_one(_: int) -> None:
        begun.wait()
        outbox.enqueue(Message(b"x"))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(enqueue_one, range(4)))
    assert turns == [True] * 4
    assert outbox.status().open == 4


def test_a_child_does_not_wait_for_a_thread_of_its_parent(
    path: Path, child: Callable[..., int]
) -> None:
    outbox = Outbox(path)
    outbox.enqueue(Message(b"x"))
    call_lock = outbox._database._call_lock  # type: ignore[attr-defined]
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with call_lock.lock:
            taken.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    try:
        assert child(outbox.close) == 0
    finally:
        done.set()
        holder.join()


@pytest.mark.parametrize("is_theirs", [False, True], ids=["its own", "the application's"])
def test_threads_may_share_a_connection(path: Path, *, is_theirs: bool) -> None:
    begun = threading.Barrier(4)
    with (
        Outbox(path) as outbox,
        closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as db,
    ):
        db.row_factory = sqlite3.Row

        def enqueue_some(_: int) -> None:
            begun.wait()
            for _ in range(25):
                outbox.enqueue(Message(b"x"), connection=db if is_theirs else None)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(enqueue_some, range(4)))
        assert db.row_factory is sqlite3.Row
        assert (outbox.status().stored, outbox.status().open) == (100, 100)


def test_a_call_that_interrupts_another_on_the_connection_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message would be undone with that of the interrupted call, by ``sys.exit()`` for one."""
    outbox, check = Outbox(path), Ballast.check
    with closing(sqlite3.connect(path, isolation_level=None)) as db:

        def handler(*_: Any) -> None:
            monkeypatch.setattr(Ballast, "check", check)
            outbox.enqueue(Message(b"handler"), connection=db)
            sys.exit()

        monkeypatch.setattr(Ballast, "check", handler)
        with pytest.raises(OutboxError, match="signal handler that has interrupted a call on it"):
            outbox.enqueue(Message(b"interrupted"), connection=db)
        outbox.enqueue(Message(b"again"), connection=db)
    assert [one.body for one in open_messages(path)] == [b"again"]


def test_one_that_is_never_closed_goes_without_a_warning(path: Path) -> None:
    Outbox(path).enqueue(Message(b"x"))  # Python 3.13 warns of a connection that is left open
    gc.collect()
    assert not path.with_name(path.name + "-wal").exists(), "it is closed"
    assert Outbox(path).status().open == 1
    open_writer(path, is_relay=False)  # goes before its `Writer`, as may happen in a cycle
    gc.collect()


class Deaf:
    def on_stored(self, _events: object) -> None: ...


@pytest.mark.parametrize("hook", [object(), Deaf()], ids=["object", "Deaf"])
def test_a_hook_that_would_never_be_told_anything_is_refused_and_leaves_nothing_to_be_closed(
    path: Path, monkeypatch: pytest.MonkeyPatch, hook: Any
) -> None:
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    words = (
        f"^the hook {type(hook).__name__} has no method stamp or rejected; "
        "hooks for events belong to the relay$"
    )
    with pytest.raises(ConfigurationError, match=words):
        Outbox(path, hooks=[hook])
    gc.collect()
    assert unraisable == []


def test_after_an_error_it_looks_afresh(path: Path) -> None:
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b"1"))
        sql(path, "DROP TABLE reliablepub_messages")
        with pytest.raises(OutboxError, match="could not be used"):
            outbox.enqueue(Message(b"2"))
        for file in path.parent.iterdir():
            file.unlink()
        outbox.enqueue(Message(b"3"))
        assert Outbox(path).status().stored == 1


def test_a_lock_is_no_reason_to_look_afresh(path: Path) -> None:
    with Outbox(path) as outbox, closing(sqlite3.connect(path, isolation_level=None)) as other:
        outbox.enqueue(Message(b"1"))
        before = writer_of(outbox).opened()
        assert before is not None
        before.execute("PRAGMA busy_timeout = 10")
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(OutboxLocked):
            outbox.enqueue(Message(b"2"))
        other.execute("ROLLBACK")
        outbox.enqueue(Message(b"2"))
        assert writer_of(outbox).opened() is before
        assert outbox.status().stored == 2


def test_lists_have_a_hundred_rows_unless_more_are_asked_for(path: Path, entry: Make) -> None:
    with closing(SqliteStore(path)) as store:
        new = stored(store, *(entry(ordering_key=f"k{n}") for n in range(101)))
        parked = [Attempt(one, "1-1", 1, RETURNED, 5.0) for one in new]
        store.commit(Changes(parked=parked, attempts=parked))
    outbox = Outbox(path)
    for look in (outbox.parked, outbox.held_keys):
        assert [len(look()), len(look(101)), len(look(limit=2))] == [100, 101, 2]


def test_only_what_was_put_in_after_the_holder_is_behind_it(path: Path, entry: Make) -> None:
    with closing(SqliteStore(path)) as store:
        new = stored(store, *(entry(ordering_key="k") for _ in range(4)))
        parked = [Attempt(new[1], "1-1", 1, RETURNED, 5.0)]
        store.commit(Changes(parked=parked, attempts=parked))
    [held] = Outbox(path).held_keys()
    [row] = sql(path, "SELECT id, held_back FROM reliablepub_held_keys")
    assert row == (held.id, held.held_back) == (2, 2)


def test_a_forked_child_enqueues_on_a_connection_of_its_own(
    path: Path, child: Callable[[Callable[[], None]], int]
) -> None:
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b"parent"))
        parents = writer_of(outbox).opened()

        def enqueue() -> None:
            outbox.enqueue(Message(b"child"))
            assert writer_of(outbox).opened() is not parents
            outbox.close()

        assert child(enqueue) == 0
        assert writer_of(outbox).connection is None, "it was closed before the fork"
        outbox.enqueue(Message(b"parent"))
        assert outbox.status().open == 3


def test_the_status_tells_how_it_is(path: Path, entry: Make) -> None:
    with closing(SqliteStore(path)) as store:
        new = [entry() for _ in range(6)]
        store.commit(Changes(new=new, sent=[Batch(1, 1, new[:5])]))
        expired = Outcome(OutcomeKind.EXPIRED)
        given_up = [
            Attempt(new[1], "1-1", 2, RETURNED, 5.0),
            Attempt(new[2], "1-1", 3, expired, 5.0),
        ]
        new[5].due_at = 99.0
        store.commit(
            Changes(confirmed=[new[0]], parked=given_up, attempts=given_up, rescheduled=[new[5]])
        )
        status = Outbox(path).status()
        size = sum(p.stat().st_size for p in (path, path.with_name(path.name + "-wal")))
        assert status == OutboxStatus(
            stored=6,
            open=3,
            in_flight=2,
            confirmed=1,
            parked=1,
            expired=1,
            discarded=0,
            waiting=1,
            held_keys=0,
            oldest_open_at=new[3].stored_at,
            relay=os.getpid(),
            bytes_on_disk=size,
            log_bytes=path.with_name(path.name + "-wal").stat().st_size,
            relays=(os.getpid(),),
        )
    after = Outbox(path).status()
    assert (after.relay, after.in_flight, after.open) == (None, 0, 3)
    assert pickle.loads(pickle.dumps(after)) == after


def test_an_empty_outbox_has_a_status_too(path: Path) -> None:
    SqliteStore(path).close()
    status = Outbox(path).status()
    assert (status.stored, status.oldest_open_at, status.relay) == (0, None, None)


def test_parking_can_be_undone(path: Path, entry: Make) -> None:
    with closing(SqliteStore(path)) as store:
        new = stored(store, *(entry() for _ in range(4)))
        for one in new:
            one.returned, one.uncertain = 3, 2
        given_up = [Attempt(e, "1-1", e.id, RETURNED, 5.0) for e in new[1:]]
        store.commit(Changes(parked=given_up))
        with Outbox(path) as outbox:
            parked = outbox.parked()
            assert [
                (p.id, p.message_id, p.attempts, p.reply_code, p.reply_text) for p in parked
            ] == [(n, f"m-{n}", 5, 312, "NO_ROUTE") for n in (2, 3, 4)]
            assert [p.id for p in outbox.parked(limit=1)] == [2]
            assert outbox.retry([3, 99, 3]) == 1
            assert store.changed_elsewhere()
            assert [touched.id for touched in store.touched()] == [3]
            (again,), _ = store.read_due(2e9, limit=9, bytes_max=1 << 30, loaded=())
            assert (again.id, again.message) == (3, new[2].message)
            assert (again.returned, again.uncertain) == (0, 2)
            assert store.snapshot().counters.parked == 2
            assert store.snapshot().counters.open_bytes == sum(
                e.message.size for e in (new[0], again)
            )
            assert outbox.retry() == 2
            assert outbox.retry() == 0
            assert outbox.parked() == []
        assert store.snapshot().counters.open == 4
        with pytest.raises(Intervened):
            store.read_due(2e9, limit=9, bytes_max=1 << 30, loaded=())
        assert [touched.id for touched in store.touched()] == [2, 4]
        assert len(store.read_due(2e9, limit=9, bytes_max=1 << 30, loaded=())[0]) == 3


def test_it_shows_where_it_is(path: Path) -> None:
    assert repr(Outbox(path)) == f"Outbox({str(path)!r})"


class Stamp:
    def stamp(self, message: Message) -> Message:
        return replace(message, app_id="shop")


def test_it_is_pickled_without_its_connection(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.chdir(path.parent)
    with Outbox(path.name, open_messages_max=1, hooks=[Stamp()]) as outbox:
        outbox.enqueue(b"1")
        pickled = pickle.dumps(outbox)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    with pickle.loads(pickled) as again:
        assert repr(again) == f"Outbox({str(path)!r})"
        with pytest.raises(OutboxFull):
            again.enqueue(b"2")
        assert again._stamps


def test_its_keys_are_not_pickled(path: Path) -> None:
    with pytest.raises(TypeError, match="keys"):
        pickle.dumps(Outbox(path, keys=OutboxKeys({"k": bytes(32)})))


def test_the_position_of_a_source_is_read_and_forgotten(path: Path, entry: Make) -> None:
    with Outbox(path) as outbox:
        assert outbox.position("file") == 0
        outbox.forget("file")
        assert not path.exists()
        with closing(SqliteStore(path)) as store:
            store.commit(Changes(new=[entry(), entry()], sources={"file": 2, "other": 0}))
            store.commit(Changes(new=[entry()], sources={"other": 1}))
            assert outbox.position("file") == 2
            outbox.forget("file")
            assert store.position("file") == outbox.position("file") == 0
            assert outbox.position("other") == 1
            assert outbox.status().open == 3


def test_the_position_in_a_strange_file_is_not_guessed(path: Path) -> None:
    path.write_text("dear diary\n" * 100)
    for ask in (Outbox(path).position, Outbox(path).forget):
        with pytest.raises(NotAnOutbox):
            ask("file")


def test_the_position_in_a_folder_of_others_is_not_guessed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "stat", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(OutboxError, match="cannot be used: Permission denied; this user needs"):
        Outbox(path).position("file")


def test_a_transaction_that_has_only_begun_waits_for_another_writer(path: Path) -> None:
    fill(path, Message(b"1"))
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as app,
        closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other,
    ):
        other.execute("BEGIN IMMEDIATE")
        other.execute("CREATE TABLE elsewhere (a)")
        app.execute("BEGIN")  # as Django does
        commit = threading.Timer(0.2, other.execute, ("COMMIT",))
        commit.start()
        Outbox(path).enqueue(Message(b"2"), connection=app)
        app.execute("COMMIT")
        commit.join()
    assert Outbox(path).status().stored == 2


def test_one_process_may_have_several(path: Path, entry: Make) -> None:
    other = path.with_name("other.db")
    with closing(SqliteStore(path)) as store:
        with closing(SqliteStore(other)) as second, Outbox(path) as one, Outbox(other) as two:
            one.enqueue(Message(b"1"))
            two.enqueue(Message(b"2"))
            second.commit(Changes(new=[entry()]))
            assert (store.snapshot().counters.open, second.snapshot().counters.open) == (1, 2)
        with pytest.raises(OutboxInUse):  # closing the other has not cost this one its lock
            SqliteStore(path)
        store.commit(Changes(new=[entry()]))
        assert Outbox(path).status().open == 2


def test_only_what_holds_the_key_is_resumed(path: Path, entry: Make) -> None:
    new = [entry(ordering_key="k"), entry(ordering_key="other"), entry()]
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=new))
        store.commit(Changes(parked=[Attempt(one, "1-1", one.id, RETURNED, 5.0) for one in new]))
    with Outbox(path) as outbox:
        assert outbox.resume_key("k") == 1
        assert [parked.id for parked in outbox.parked()] == [2, 3]


def test_a_hook_adds_to_what_is_stored(path: Path) -> None:
    class Signed:
        def stamp(self, message: Message) -> Message:
            return Message(message.body, headers={"signed": True})

    with Outbox(path, hooks=[Signed()]) as outbox:
        id_ = outbox.enqueue(Message(b"x"))
    assert [(m.message_id, m.headers) for m in open_messages(path)] == [(id_, {"signed": True})]


@pytest.mark.parametrize("found", [None, pytest.param(Lazy(Message(b"x")), id="lazy")])
def test_a_hook_that_returns_no_message_is_named(path: Path, found: Any) -> None:
    class Forgetful:
        def stamp(self, message: Message) -> Message:
            return found  # type: ignore[no-any-return]

    words = rf"Forgetful\.stamp returned {type(found).__name__}, not a Message"
    with Outbox(path, hooks=[Forgetful()]) as outbox, pytest.raises(TypeError, match=words):
        outbox.enqueue(b"x")


def test_the_outbox_of_an_attached_database_gets_none_of_its_messages(path: Path) -> None:
    """SQLite looks for a table in every attached database that the first one does not have."""
    old = path.with_name("old.db")
    Outbox(old).create()
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE orders (id INTEGER)")
        db.execute("ATTACH ? AS old", (str(old),))
        with db:
            Outbox(path).enqueue(b"x", connection=db)
        with db:
            Outbox(path).enqueue(b"y", connection=db)
    assert (Outbox(path).status().open, Outbox(old).status().open) == (2, 0)


def test_no_id_is_assigned_twice_although_an_application_numbers_its_rows_anew(
    path: Path, entry: Make
) -> None:
    change = "DELETE FROM sqlite_sequence"
    with closing(SqliteStore(path)) as store:
        new = stored(store, *(entry() for _ in range(3)))
        attempt = Attempt(new[2], "1-1", 1, RETURNED, 5.0)
        store.commit(Changes(confirmed=new[:2], parked=[attempt], attempts=[attempt]))
        sql(path, change)
        assert store.snapshot().last_id == 3
        fill(path, Message(b"by another process"))
        assert store.snapshot().last_id == 4, "or the relay would not look for it"
        sql(path, change)
        last = entry()
        assert store.commit(Changes(new=[last])).last_id == last.id == 5
        sql(path, change)
    other = path.with_name("other.db")
    fill(other, Message(b"from elsewhere"))
    list(import_lines(outbox_at(path), export_lines(outbox_at(other), [1]), "other"))
    assert [row["id"] for row in Outbox(path).rows("open")] == [4, 5, 6]


def test_a_number_that_no_row_can_have_is_ignored(path: Path) -> None:
    with Outbox(path) as outbox:
        outbox.create()
        assert outbox.retry([2**63, -(2**63) - 1, 10**30]) == 0


def test_temporary_tables_of_the_application_change_nothing(path: Path, entry: Make) -> None:
    """SQLite looks for a table among them first."""
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=(new := [entry() for _ in range(3)])))
        store.commit(Changes(confirmed=new))
        with closing(sqlite3.connect(path)) as db:
            for name in ("messages", "keys", "ledger"):
                ours = f"reliablepub_{name}"
                db.execute(f"CREATE TEMP TABLE {ours} AS SELECT * FROM main.{ours}")
            db.commit()
            for key in ("a", "b", "a"):
                with db:
                    Outbox(path).enqueue(b"x", key=key, connection=db)
        found, _ = store.read_ready(1, 99, limit=9, bytes_max=10**9)
        assert [one.id for one in found] == [4, 5]
        assert store.snapshot().last_id == 5


def test_a_row_factory_of_its_cursors_does_not_matter(path: Path) -> None:
    class Cursor(sqlite3.Cursor):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.row_factory = lambda cursor, row: {"only": "dicts"}

    class Connection(sqlite3.Connection):
        def cursor(self, factory: Any = Cursor) -> Any:
            return super().cursor(factory)

    with closing(sqlite3.connect(path, factory=Connection)) as db, db:
        assert Outbox(path).enqueue(Message(b"x", message_id="m"), connection=db) == "m"


@pytest.mark.parametrize("kind", ["TEXT", "INTEGER", "REAL"])
def test_a_converter_of_the_application_does_not_matter(
    path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setitem(sqlite3.converters, kind, lambda text: f"converted {text!r}")
    with closing(sqlite3.connect(path, detect_types=sqlite3.PARSE_DECLTYPES)) as db:
        for name in ("a", "b", "b"):
            stored = Outbox(path).enqueue(Message(b"x", message_id=name), key=name, connection=db)
            db.commit()
            assert stored == name
        Outbox(path).cancel("b", connection=db)
        db.commit()
        sql(path, "UPDATE reliablepub_keys SET kept_until = 1")
        Outbox(path).enqueue(Message(b"x", message_id="c"), key="c", connection=db)
        db.commit()
        assert sql(path, "SELECT min(kept_until) > 1 FROM reliablepub_keys") == [(1,)]
        with closing(SqliteStore(path)) as store:
            [one, _], _ = store.read_ready(1, 9, limit=9, bytes_max=10**9)
            store.commit(Changes(sent=[Batch(1, 1, [one])]))
            Outbox(path).cancel("a", connection=db)
            db.commit()
    assert [row["message_id"] for row in Outbox(path).rows("open")] == ["a", "c"]


def test_a_temporary_table_that_stands_before_that_of_the_outbox_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        Outbox(path).enqueue(b"x", key="k", connection=db)
        ours = "reliablepub_messages"
        db.execute(f"CREATE TEMP TABLE {ours} AS SELECT * FROM main.{ours}")
        db.commit()
        with pytest.raises(ConfigurationError, match=f"a temporary table or view {ours}"):
            Outbox(path).cancel("k", connection=db)
    assert (Outbox(path).status().open, Outbox(path).audit().differences) == (1, {})


def test_overdue_keys_are_not_those_of_a_temporary_table(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        Outbox(path).enqueue(b"x", key="k", connection=db)
        db.execute("UPDATE reliablepub_keys SET kept_until = 1")
        db.execute("DELETE FROM reliablepub_messages")
        db.execute("CREATE TEMP TABLE reliablepub_keys AS SELECT * FROM main.reliablepub_keys")
        Outbox(path).enqueue(b"y", key="new", connection=db)
        assert db.execute("SELECT key FROM main.reliablepub_keys").fetchall() == [("new",)]


def test_a_ledger_that_lost_its_highest_id_assigns_none_again(path: Path, entry: Make) -> None:
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=(new := [entry() for _ in range(3)])))
        store.commit(Changes(confirmed=new))
    sql(path, "UPDATE reliablepub_ledger SET last_id = 0")
    Outbox(path).enqueue(b"x")
    assert [row["id"] for row in Outbox(path).rows("open")] == [4]
    sql(path, "UPDATE reliablepub_ledger SET last_id = 0")
    with closing(SqliteStore(path)) as store:
        assert store.commit(Changes(new=[entry()])).last_id == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("DELETE FROM reliablepub_ledger", "its ledger has no row"),
        (f"UPDATE reliablepub_ledger SET last_id = {ID_MAX}", "the numbers in its ledger are imp"),
    ],
)
def test_a_damaged_ledger_is_told_wherever_it_is_needed(
    path: Path, change: str, words: str
) -> None:
    other, outbox = path.with_name("other.db"), Outbox(path)
    for one in (path, other):
        Outbox(one).enqueue(Message(b"x", message_id=one.name))
    sql(path, change)
    with pytest.raises(OutboxError, match=words):
        outbox.enqueue(b"y")
    with pytest.raises(OutboxError, match=words), closing(SqliteStore(path)) as store:
        store.snapshot()
    if "no row" in words:
        for ask in (outbox.status, outbox.audit):
            with pytest.raises(OutboxError, match=words):
                ask()
        with pytest.raises(OutboxError, match=words):
            list(import_lines(outbox_at(path), export_lines(outbox_at(other), [1]), "other"))
        assert [row["id"] for row in outbox.rows("open")] == [1]


def test_nor_in_an_outbox_that_was_salvaged(path: Path, entry: Make) -> None:
    """Its ids are higher than the number of messages that were stored."""
    new = path.with_name("new.db")
    with closing(SqliteStore(path)) as store:
        entries = stored(store, *(entry() for _ in range(10)))
        attempt = Attempt(entries[9], "1-1", 1, RETURNED, 5.0)
        store.commit(Changes(confirmed=entries[:8], parked=[attempt], attempts=[attempt]))
    assert Outbox(new).salvage(path).open == 1
    sql(new, "UPDATE reliablepub_ledger SET last_id = 0")  # damaged since
    with closing(SqliteStore(new)) as store:
        (last,) = made = [entry()]
        store.commit(Changes(new=made))
        assert last.id == 11
