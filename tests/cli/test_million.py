"""How long people wait for an answer out of a million messages."""

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from reliablepub import Message, Outbox
from reliablepub.outbox.inspection import read_ambiguous, read_figures
from reliablepub.outbox.selection import Selection, find, find_ids
from reliablepub.outbox.story import resolve, tell

MESSAGES = 1_000_000
FILL = """
WITH RECURSIVE numbers (n) AS (SELECT 2 UNION ALL SELECT n + 1 FROM numbers WHERE n < ?)
INSERT INTO reliablepub_messages (
    id, message_id, exchange, routing_key, stored_at, due_at, nacked, size, checksum, body
)
SELECT
    n, hex(randomblob(16)), iif(n % 3, 'orders', 'invoices'), 'key.' || n % 100, 1e9 + n,
    iif(n % 5, NULL, 2e9 + n), n % 5 = 0, 1200, 0, zeroblob(1024)
FROM numbers
"""

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("million") / "o.db"
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b"first"))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute(FILL, (MESSAGES,))
    yield path
    path.unlink()


def cpu_s(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def test_answers_out_of_a_million(large: Path) -> None:
    """In processor time, and in units of one pass over the table."""
    with closing(sqlite3.connect(large)) as connection:
        a_pass = "SELECT count(*) FROM reliablepub_messages WHERE size < 0"
        unit_s = min(cpu_s(lambda: connection.execute(a_pass).fetchall()) for _ in range(3))
    first_50 = Selection()
    rare = Selection(exchange="nowhere")
    said = Selection(reason="404")
    middle = MESSAGES // 2
    questions: dict[str, Callable[[], object]] = {
        "status": Outbox(large).status,
        "list": lambda: find(large, first_50, limit=50),
        "list --state waiting": lambda: find(large, Selection(states=("waiting",)), limit=50),
        "list --state parked": lambda: find(large, Selection(states=("parked",)), limit=50),
        "list --sort size": lambda: find(large, first_50, sort="size", limit=50),
        "list --exchange nowhere": lambda: find(large, rare, limit=50),
        "list --reason 404": lambda: find(large, said, limit=50),
        "explain 500000": lambda: tell(large, middle),
        "explain MESSAGE_ID": lambda: resolve(large, "nowhere"),
        "duplicates": lambda: read_ambiguous(large, limit=50),
        "stats": lambda: read_figures(large, is_all=True),
        "park --state waiting --dry-run": lambda: find_ids(large, Selection(states=("waiting",))),
    }
    print()
    for question, ask in questions.items():
        seconds = cpu_s(ask)
        print(f"{question:>32}  {seconds:6.3f} s  {seconds / unit_s:6.2f} passes")
        if question in ("list", "list --state waiting", "list --state parked", "explain 500000"):
            assert seconds < unit_s, "it reads no more than it shows"
