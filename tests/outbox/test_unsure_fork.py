"""A fork behind a commit that failed on the disk: what may not be there is not believed."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from reliablepub.errors import OutboxForked, OutboxUnsure
from reliablepub.message import Message
from reliablepub.outbox.entry import Changes
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.outbox.conftest import Make
from tests.outbox.shim import IOERR_FSYNC, Shim


def ids_at(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as connection:
        return {id_ for (id_,) in connection.execute("SELECT message_id FROM reliablepub_messages")}


def in_child(act: Callable[[], str]) -> str:
    """What a forked child says."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writing, act().encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as said:
        return said.read()


def enqueued(path: Path) -> str:
    try:
        return Outbox(path).enqueue(Message(b"", message_id="of the child"))
    except OutboxForked:
        return "refused"


def test_the_index_of_the_log_outlives_a_fork(files: Shim, path: Path, entry: Make) -> None:
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=[entry(message_id="before")]))
        files.fail("sync", at=1, code=IOERR_FSYNC, is_persistent=True)
        with pytest.raises(OutboxUnsure):
            store.commit(Changes(new=[entry(message_id="unsure")]))
        assert in_child(lambda: enqueued(path)) == "refused"
        files.heal()
        assert ids_at(path) == {"before"}, "what may be in the page cache alone is not believed"
        store.commit(Changes(new=[entry(message_id="after")]))
        assert ids_at(path) == {"before", "after"}
        assert in_child(lambda: enqueued(path)) == "of the child"
    assert ids_at(path) == {"before", "after", "of the child"}
