"""How much work a message is, counted: a guard that a busy machine cannot break.

Seconds say more and depend on the machine; calls and instructions are the same everywhere. A limit
is about a tenth above what was counted with Python 3.11 when it was written. Who makes a message
dearer learns it here, and raises the limit if it is worth it; who makes it cheaper lowers it.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from reliablepub import Outbox
from reliablepub.outbox.chunks import Cutter, cut
from reliablepub.outbox.entry import Store
from reliablepub.outbox.memory import MemoryStore
from reliablepub.outbox.sqlite import location
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.relay.handover import CHUNK_BYTES_MAX, CHUNK_MESSAGES_MAX
from tests.speed.counting import Calls, Instructions, Steps
from tests.speed.unplugged import (
    Unplugged,
    chunks_of,
    confirms,
    hear_confirms,
    messages,
    nobody_waits,
    pika_by_hand,
)

COUNT = 5_000
SHORT_COUNT = 2_000


@pytest.fixture(params=["sqlite", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    store = SqliteStore(tmp_path / "outbox.db") if request.param == "sqlite" else MemoryStore()
    yield store
    store.close()


def test_from_the_inbox_to_the_last_confirm(store: Store) -> None:
    unplugged, receipt = Unplugged(store), nobody_waits()
    chunks = chunks_of(messages(COUNT), receipt)
    calls = counted(lambda: unplugged.publish(chunks, receipt))
    assert unplugged.wire.bytes > COUNT * 1_024
    assert calls < 21.7, f"{calls:.1f} calls a message"


def test_what_sqlite_does_for_it(tmp_path: Path) -> None:
    """An index more, or a look more, which no call of Python's shows; one is of what waits."""
    with closing(SqliteStore(tmp_path / "outbox.db")) as store:
        unplugged, receipt = Unplugged(store), nobody_waits()
        chunks = chunks_of(messages(COUNT), receipt)
        with Steps(store._writer.opened()) as steps:
            unplugged.publish(chunks, receipt)
    a_message = steps.count / COUNT
    assert a_message < 90, f"{a_message:.1f} steps of its virtual machine a message"


def counted(work: Callable[[], object]) -> float:
    with Calls() as calls:
        work()
    return calls.count / COUNT


def test_a_message_and_its_id() -> None:
    made = counted(lambda: messages(COUNT))
    assert made < 10, f"{made:.1f} calls a message"
    stream = messages(COUNT)
    chunks = counted(lambda: list(cut(stream, Cutter(CHUNK_MESSAGES_MAX, CHUNK_BYTES_MAX))))
    assert chunks < 14.5, f"{chunks:.1f} calls a message"


def test_confirms_off_the_wire() -> None:
    data = confirms(range(1, COUNT + 1))
    calls = counted(lambda: hear_confirms(data))
    assert hear_confirms(data) == COUNT
    assert calls < 1.3, f"{calls:.1f} calls a message"


@pytest.fixture(scope="module")
def by_hand() -> int:
    """Pika's instructions, with a window by hand."""
    with Instructions() as instructions:
        pika_by_hand(SHORT_COUNT)
    return instructions.count


def test_beside_a_window_by_hand(store: Store, by_hand: int) -> None:
    """All of it, from the message to the last confirm: against a peer, so for every Python."""
    most = 0.49 if isinstance(store, SqliteStore) else 0.415
    unplugged, receipt = Unplugged(store), nobody_waits()
    data = confirms(range(1, SHORT_COUNT + 1))
    with Instructions() as instructions:
        unplugged.publish(chunks_of(messages(SHORT_COUNT), receipt), receipt)
        hear_confirms(data)
    assert receipt.confirmed == SHORT_COUNT
    ratio = instructions.count / by_hand
    assert ratio < most, f"{ratio:.3f} times pika's {by_hand / SHORT_COUNT:.0f} instructions"


def test_a_message_in_a_transaction_of_the_application(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reliablepub.outbox.sqlite.space.PLENTY_S", 3_600.0)
    said: list[str] = []
    looks: list[object] = []
    times: list[object] = []

    def noted(names: list[object], look: Callable[..., Any]) -> Callable[..., Any]:
        def noted(name: object, **options: Any) -> object:
            names.append(name)
            return look(name, **options)

        return noted

    outbox = Outbox(tmp_path / "app.db")
    outbox.create()
    with closing(sqlite3.connect(tmp_path / "app.db")) as application:
        for _ in range(3):  # the first ones look more closely at the file
            outbox.enqueue(b"", connection=application)
        application.set_trace_callback(said.append)
        monkeypatch.setattr(location, "look", noted(looks, location.look))
        monkeypatch.setattr(os, "lstat", noted(times, os.lstat))
        monkeypatch.setattr(os, "stat", noted(times, os.stat))
        outbox.enqueue(b"", connection=application)
    # Which file it is, the lock with the version, the last id, the ledger, the row, and a savepoint
    # around these. RETURNING would spare one statement, and take longer than it does.
    assert len(said) == 7, said
    # The database, its log and the index of the log. Whoever looks at the times of a log makes its
    # next write dearer, so those of the ballast alone are looked at.
    assert len(looks) == 3, looks
    assert len(times) == 1, times


def test_a_message_in_a_transaction_of_the_application_in_postgres(postgres_url: str) -> None:
    said: list[object] = []

    class Cursor(psycopg.Cursor[Any]):
        def execute(self, query: Any, *values: Any, **options: Any) -> Any:
            said.append(query)
            return super().execute(query, *values, **options)

    outbox = Outbox(postgres_url)
    outbox.create()
    with psycopg.connect(postgres_url, cursor_factory=Cursor) as application:
        outbox.enqueue(b"", connection=application)
        said.clear()
        outbox.enqueue(b"", connection=application)
    assert len(said) == 1, said
