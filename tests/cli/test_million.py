"""How long people wait for an answer out of a million messages; nothing is read in vain."""

import os
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from reliablepub.cli.commands import Exit
from reliablepub.outbox.admin.selection import Selection
from reliablepub.outbox.sqlite.database import SqliteSession
from reliablepub.outbox.sqlite.space import Ballast
from reliablepub.outbox.sqlite.sql import QUERIES
from tests.cli.million import make_million

Values: TypeAlias = tuple[int | str, ...] | dict[str, Any]
ROOT = Path(__file__).parents[2]
COMMANDS = [
    *("outbox status --over 0", "outbox list", "outbox list --state waiting"),
    *("outbox list --state parked", "outbox list --sort age", "outbox list --sort size"),
    *("outbox list --exchange nowhere", "outbox list --key k5000", "outbox list --reason 404"),
    *("outbox list --reason nowhere", "outbox show 500000", "outbox show order_5000"),
    *("outbox explain 500000", "outbox explain m-999999", "outbox explain nobody"),
    *("outbox in-flight", "outbox keys", "outbox duplicates", "outbox stats --all --plot"),
    *("outbox retry --reason 404 --dry-run", "outbox park --state waiting --dry-run"),
    *("outbox export 500000", "outbox prune --dry-run --parked 1h --confirmed 1h"),
    *("watch --count 1", "doctor", "outbox audit", "outbox check"),
]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """The same in small: SQLite plans alike, since it has gathered no statistics."""
    make_million(tmp_path / "o.db", 1_000)
    with closing(sqlite3.connect(tmp_path / "o.db")) as connection:
        yield connection


def plan(connection: sqlite3.Connection, statement: str, values: Values = ()) -> list[str]:
    rows = connection.execute(f"EXPLAIN QUERY PLAN {statement}", values)
    return [row[3] for row in rows]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("waiting_count", ()),
        ("held_key_count", ()),
        ("one_message", {"id": 1}),
        ("attempts_of", {"id": 1}),
        ("interventions_of", {"id": 1}),
        ("last_attempt", {"id": 1}),
        ("rows_of_enqueue_key", {"name": "x"}),
        ("key_held_by", {"ordering_key": "x", "id": 1}),
        ("ids_holding_key", {"ordering_key": "x"}),
    ],
)
def test_what_is_asked_often_is_answered_from_an_index(
    small: sqlite3.Connection, name: str, values: Values
) -> None:
    lines = plan(small, QUERIES[name], values)
    assert any(line.startswith("SEARCH") for line in lines)
    found = {line.replace("CO-ROUTINE", "SCAN") for line in lines if line.startswith("CO-ROUTINE")}
    scans = {line for line in lines if line.startswith("SCAN")}
    assert scans <= found, lines  # of what was found by an index


@pytest.mark.parametrize("name", ["newest_failures", "top_reasons"])
def test_the_newest_of_the_history_is_read_from_its_end(
    small: sqlite3.Connection, name: str
) -> None:
    steps: list[int] = []
    small.set_progress_handler(lambda: steps.append(1), 1_000)
    assert small.execute(QUERIES[name], {"limit": 5}).fetchall()
    before = len(steps)
    small.execute(
        "INSERT INTO reliablepub_attempts SELECT NULL, id, message_id, at, epoch, tag, outcome, "
        "reply_code, reply_text, persistence FROM reliablepub_attempts, "
        "(SELECT value FROM json_each('[1,2,3,4,5,6]'))"
    )
    steps.clear()
    assert small.execute(QUERIES[name], {"limit": 5}).fetchall()
    assert len(steps) <= 3 * before + 50, "a thousand lines, however many there are"


@pytest.mark.parametrize("state", ["ready", "parked", "expired"])
def test_a_list_in_the_order_of_ids_stops_at_its_limit(
    small: sqlite3.Connection, state: str
) -> None:
    table = "reliablepub_messages" if state == "ready" else "reliablepub_parked"
    session = SqliteSession(small, Path("o.db"), Ballast(Path("o.db")))
    for after in (None, 500):  # the dashboard's next page begins where the last one has ended
        selection = Selection(states=(state,), after=after)
        query, values = selection.query(table, session, columns="id", order="id LIMIT 50")
        lines = plan(small, query, values)
        assert not any("TEMP B-TREE" in line for line in lines)
        assert after is None or any("SEARCH" in line and "rowid>?" in line for line in lines)


def test_status_reads_no_message_but_the_oldest(small: sqlite3.Connection) -> None:
    (line,) = plan(small, QUERIES["oldest_open_at"])
    assert line == "SCAN reliablepub_messages", "in the order of ids, to the first one"


@pytest.mark.bench
@pytest.mark.timeout(3_600)
def test_answers_out_of_a_million(tmp_path: Path) -> None:
    """Processor time counts where the machine has other things to do."""
    path = tmp_path / "o.db"
    make_million(path)
    environment = {**os.environ, "RELIABLEPUB_OUTBOX": str(path)}
    print()
    for words in ("--version", *COMMANDS):
        arguments = [word.replace("order_", "order ") for word in words.split()]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        begun = time.monotonic()
        command = [sys.executable, "-m", "reliablepub", *arguments]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=False)
        seconds = time.monotonic() - begun
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"{words:>58}  {seconds:6.2f} s  {cpu:6.2f} s of processor  exit {done.returncode}")
        assert b"Traceback" not in done.stderr
        assert done.returncode != Exit.BAD_INPUT or "nobody" in words, done.stderr
    path.unlink()


@pytest.mark.parametrize(
    "name",
    [
        *("states", "possible_among", "any_message"),
        *("delete_open", "delete_parked", "due_now", "unpark"),
    ],
)
def test_chosen_messages_are_found_by_their_ids(small: sqlite3.Connection, name: str) -> None:
    lines = plan(small, QUERIES[name], {"chosen": "[1, 2, 3]"})
    scans = [line for line in lines if line.startswith("SCAN") and "json_each" not in line]
    assert not scans, lines
    assert any("USING INTEGER PRIMARY KEY" in line for line in lines), lines
