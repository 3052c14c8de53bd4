"""Outboxes that this version has made, kept so that each later one shows that it opens them.

    python -m tests.outbox.keeping

writes what is missing in ``kept``: run it once the tables have a new version. What was kept is
never changed.
"""

import gzip
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from click.testing import CliRunner
from tenacity import stop_after_attempt, stop_after_delay, wait_fixed

from reliablepub import Message, Outbox, OutboxKeys, Publisher, Retries, RetryPolicy
from reliablepub.cli import main
from reliablepub.outbox.postgres.sql import VERSION
from reliablepub.outbox.sqlite.connections import VERSION as FILE_VERSION
from reliablepub.testing import FakeBroker, faults
from tests.asking import fill
from tests.moves import dump
from tests.postgres import PostgresServer
from tests.waiting import until

KEPT: Final = Path(__file__).with_name("kept")
KEYS: Final = OutboxKeys({"kept": bytes(range(32))}, accept_plaintext=True)
KEY: Final = "order 17"
FAR: Final = datetime(2100, 1, 1, tzinfo=UTC)
OPEN: Final = (
    Message(b"", routing_key="q", message_id="plain"),
    Message(b"once", routing_key="q", message_id="once"),
    Message(b"twice", routing_key="q", message_id="nacked"),
    Message(
        b"\0\xff",
        routing_key="q",
        headers={"n": 2**40, "x": 0.5, "s": "ü", "b": b"\xff", "l": [1, None], "d": {"t": True}},
        message_id="full",
        persistent=False,
        priority=5,
        timestamp=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        content_type="application/octet-stream",
        content_encoding="identity",
        correlation_id="c",
        reply_to="r",
        type="t",
        app_id="a",
    ),
)
SECRET: Final = Message(b"secret", routing_key="q", message_id="secret")
LATER: Final = Message(b"", routing_key="q", message_id="later", not_before=FAR)
# The first is parked, and the second waits behind it.
KEYED: Final = tuple(
    Message(b"", routing_key="none", message_id=name, ordering_key="k")
    for name in ("parked", "behind")
)
EDITED: Final = Message(b"", routing_key="q", message_id="edited", type="before")
_POLICY: Final = RetryPolicy(
    nacked=Retries(stop_after_delay(3_600), wait_fixed(60)),
    returned=Retries(stop_after_attempt(2), wait_fixed(0)),
)


def fill_every_table(where: str) -> None:
    """Store messages in each state, with a history, an intervention and a deduplication key."""
    outbox = Outbox(where)
    outbox.create()
    fill(where, Message(b"", routing_key="q", message_id="confirmed"), OPEN[2], KEYED[0])
    outbox.enqueue(b"", routing_key="q", message_id="expired", expires_in_s=0.001)
    with FakeBroker() as broker:
        broker.declare_queue("q")
        broker.inject(faults.Nack(nth=2))
        with Publisher(broker.url, outbox=where, retry=_POLICY):
            until(lambda: outbox.status().open == 1 and outbox.status().parked == 1, 40)
    fill(where, OPEN[0], OPEN[3], KEYED[1], LATER, EDITED)
    outbox.enqueue(OPEN[1], key=KEY)
    Outbox(where, keys=KEYS).enqueue(SECRET)
    edit = ["outbox", "edit", "edited", "--set", "type=after", "--outbox", where, "--note", "why"]
    assert CliRunner().invoke(main, edit).exit_code == 0
    outbox.close()


def _keep_file(path: Path) -> None:
    with TemporaryDirectory() as folder:
        made = Path(folder) / "outbox.db"
        fill_every_table(str(made))
        with closing(sqlite3.connect(made)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        path.write_bytes(gzip.compress(made.read_bytes(), mtime=0))


def _keep_dump(path: Path) -> None:
    with PostgresServer() as server:
        fill_every_table(server.url_of())
        path.write_bytes(gzip.compress(dump(server, "postgres"), mtime=0))


if __name__ == "__main__":
    for name, keep in (
        (f"sqlite-{FILE_VERSION}.db.gz", _keep_file),
        (f"postgres-{VERSION}.sql.gz", _keep_dump),
    ):
        if not (KEPT / name).exists():
            KEPT.mkdir(exist_ok=True)
            keep(KEPT / name)
