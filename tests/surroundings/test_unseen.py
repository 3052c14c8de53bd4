"""The directory of an open outbox may not be looked at for a while, as after ``chmod -R 600``."""

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from reliablepub import Message, Outbox
from reliablepub.errors import OutboxDiskFailed, OutboxError, OutboxUnsure
from reliablepub.outbox.entry import Attempt, Changes, Entry, Rebase
from reliablepub.outbox.sqlite import connections, location
from reliablepub.outbox.sqlite.failures import os_error
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import NACKED
from tests.sqlite import sql, writer_of
from tests.surroundings.test_moved import ids_at

UNSEEN = r"outbox.db cannot be seen any more \(Permission denied\), so it is unknown whether"


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[None]:
    @contextmanager
    def unseen() -> Iterator[None]:
        denied = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
        with monkeypatch.context() as patch:
            patch.setattr(location, "look", lambda _: (None, 0))
            patch.setattr(os, "lstat", denied)
            patch.setattr(Path, "stat", denied)
            yield

    return unseen()


def test_an_enqueuer_goes_on_afterwards(path: Path, unseen: AbstractContextManager[None]) -> None:
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b"", message_id="before"))
        connection = writer_of(outbox).connection
        with unseen, pytest.raises(OutboxDiskFailed, match=UNSEEN):
            outbox.enqueue(Message(b"", message_id="refused"))
        outbox.enqueue(Message(b"", message_id="after"))
        assert writer_of(outbox).connection is connection
    assert ids_at(path) == {"before", "after"}


def test_a_relay_goes_on_afterwards(path: Path, unseen: AbstractContextManager[None]) -> None:
    with closing(SqliteStore(path)) as store:
        assert not store.changed_elsewhere()
        new = Entry(Message(b"", message_id="unsure"), stored_at=0.0)
        with unseen:
            with pytest.raises(OutboxUnsure, match=f"{UNSEEN}.*; the message may be stored"):
                store.commit(Changes(new=[new]))
            with pytest.raises(OutboxDiskFailed, match=UNSEEN):
                store.changed_elsewhere()
            assert store.relieve() == ""
        assert new.id == 0
        assert store.may_have_changed()
        assert store.changed_elsewhere(), "or the relay would not look for it"
        assert store.snapshot().last_id == 1
        store.commit(Changes(new=[Entry(Message(b"", message_id="after"), stored_at=0.0)]))
    assert ids_at(path) == {"unsure", "after"}


def test_a_relay_writes_nothing_twice(path: Path, unseen: AbstractContextManager[None]) -> None:
    """Its commit was made, and the relay tries again what it was told to be unsure."""
    with closing(SqliteStore(path, clock=lambda: 1_000.0)) as store:
        entry, confirmed = (Entry(Message(b"", message_id="m"), 1_000.0) for _ in range(2))
        entry.due_at, entry.refused_at, entry.is_plain = 1_050.0, 1_000.0, False
        store.commit(Changes(new=[entry, confirmed]))
        changes = Changes(
            confirmed=[confirmed],
            attempts=[Attempt(entry, "1", 1, NACKED, 1_000.0)],
            rebase=Rebase(100.0, set()),
        )
        with unseen:
            with pytest.raises(OutboxUnsure):
                store.commit(changes)
            for _ in range(3):
                with pytest.raises(OutboxDiskFailed, match=UNSEEN):
                    store.commit(changes)
        counters = store.commit(changes).counters
    assert (counters.confirmed, counters.open) == (1, 1)
    assert sql(path, "SELECT due_at FROM reliablepub_messages") == [(1_150.0,)]
    assert sql(path, "SELECT count(*) FROM reliablepub_attempts") == [(1,)]


def test_a_folder_that_is_seen_at_the_second_look_has_lost_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(SqliteStore(path)) as store, monkeypatch.context() as patch:
        patch.setattr(location, "look", lambda _: (None, 0))
        store.commit(Changes(new=[Entry(Message(b"", message_id="m"), stored_at=0.0)]))
    assert ids_at(path) == {"m"}


def test_a_fork_meanwhile_ends_no_relay(path: Path, unseen: AbstractContextManager[None]) -> None:
    with closing(SqliteStore(path)) as store:
        store._writer.rest()
        with unseen, pytest.raises(OutboxDiskFailed, match="cannot be used"):
            store.snapshot()
        assert store.snapshot().last_id == 0


def test_a_file_that_cannot_be_made_again_after_a_fork_is_no_failing_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = Mock(side_effect=os_error(path, PermissionError(errno.EACCES, "denied")))
    with closing(SqliteStore(path)) as store:
        store._writer.rest()
        with monkeypatch.context() as patch:
            patch.setattr(connections, "open_writer", denied)
            with pytest.raises(OutboxError) as caught:
                store.snapshot()
        assert type(caught.value) is OutboxError


@pytest.mark.parametrize("level", ["DEFERRED", None])
def test_an_application_is_told_the_truth(
    path: Path, unseen: AbstractContextManager[None], level: Any
) -> None:
    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            done = super().execute(sql, *values)
            if sql == "COMMIT" and self.total_changes > before:
                unseen.__enter__()
            return done

    before = 1 << 30
    outbox = Outbox(path)
    with closing(sqlite3.connect(path, isolation_level=level, factory=Connection)) as app:
        outbox.enqueue(Message(b"", message_id="before"), connection=app)
        app.commit()
        if level is None:
            before = app.total_changes
            with pytest.raises(OutboxUnsure, match=f"{UNSEEN}.*; the message may be stored"):
                outbox.enqueue(Message(b"", message_id="unsure"), connection=app)
            unseen.__exit__(None, None, None)
        else:
            with unseen, pytest.raises(OutboxDiskFailed, match=UNSEEN):
                outbox.enqueue(Message(b"", message_id="refused"), connection=app)
            app.commit()
    assert ids_at(path) == ({"before", "unsure"} if level is None else {"before"})
