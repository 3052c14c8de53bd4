"""Whatever a program stores on both sides of a fork is there, or the call has raised."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.surroundings.forking import SHAPES

REFUSED = {
    "publisher_in_the_child": {("child", "PublisherForked")},
    "application_connection": {
        *{("inherited", "OutboxForked"), ("new", "OutboxForked"), ("own", "OutboxForked")}
    },
    "fork_without_hooks": {("child", "OutboxForked"), ("own", "OutboxForked")},
    "imported_in_the_child": {("child", "OutboxForked")},
    "closed_by_the_parent": {
        *{("inherited", "OutboxForked"), ("new", "OutboxForked"), ("own", "OutboxForked")}
    },
}
"""The calls that raise, by process; every other call returns."""


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_stored_on_either_side_is_there(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "outbox.db"
    command = [sys.executable, "-m", "tests.surroundings.forking", shape, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    told = [line.split() for line in done.stdout.splitlines()]
    stored = [id_ for word, id_, *_ in told if word == "stored"]
    raised = {(id_.rsplit("-", 1)[0], *error) for word, id_, *error in told if word == "raised"}
    assert raised == REFUSED.get(shape, set())
    assert len(stored) > 10
    with closing(sqlite3.connect(path)) as connection:
        found = [i for (i,) in connection.execute("SELECT message_id FROM reliablepub_messages")]
        assert sorted(found) == sorted(stored)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'orders'").fetchone():
            orders = {i for (i,) in connection.execute("SELECT id FROM orders")}
            assert orders <= set(stored), "an order without its message"
            assert orders >= {id_ for id_ in stored if id_.startswith("worker")}
