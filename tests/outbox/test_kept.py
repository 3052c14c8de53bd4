"""What each version has stored, this one opens and sends: parked, scheduled and encrypted too."""

import gzip
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from reliablepub import Outbox, Publisher
from reliablepub.cli import main
from reliablepub.outbox.postgres.sql import VERSION
from reliablepub.outbox.sqlite.connections import VERSION as FILE_VERSION
from reliablepub.testing import FakeBroker
from tests.asking import fill
from tests.moves import restore
from tests.outbox.keeping import EDITED, FAR, KEPT, KEY, KEYED, KEYS, OPEN, SECRET
from tests.postgres import PostgresServer
from tests.waiting import until

FILES = sorted(KEPT.iterdir())


@pytest.fixture(params=FILES, ids=lambda path: path.name.partition(".")[0])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A copy of what a version has made."""
    content = gzip.decompress(request.param.read_bytes())
    if request.param.name.startswith("sqlite"):
        copy = tmp_path / "kept.db"
        copy.touch(0o600)
        copy.write_bytes(content)
        yield str(copy)
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    restore(server, request.getfixturevalue("postgres_database"), content)
    yield request.getfixturevalue("postgres_url")


def test_what_this_version_makes_is_kept() -> None:
    """If not: python -m tests.outbox.keeping."""
    names = {path.name for path in FILES}
    assert names >= {f"sqlite-{FILE_VERSION}.db.gz", f"postgres-{VERSION}.sql.gz"}


def drained(where: str, left: int) -> dict[str | None, object]:
    """Relay an outbox until so many messages are left, and return what has come."""
    with FakeBroker() as broker:
        broker.declare_queue("q")
        broker.declare_queue("none")
        with Publisher(broker.url, outbox=where, outbox_keys=KEYS):
            until(lambda: Outbox(where).status().open == left)
        arrived = [*broker.messages("q"), *broker.messages("none")]
    found: dict[str | None, object] = {}
    for one in arrived:
        properties: dict[str, Any] = dict(one.properties)
        del properties["headers"]["rp-attempt"]
        assert properties["message_id"] not in found, "it came twice"
        found[properties["message_id"]] = (one.body, properties)
    return found


def explained(where: str, message_id: str) -> str:
    command = ["outbox", "explain", message_id, "--outbox", where]
    return CliRunner().invoke(main, command).output


def test_it_is_opened_and_all_of_it_is_sent(kept: str, path: Path) -> None:
    with Outbox(kept) as outbox:
        outbox.upgrade()
        assert outbox.audit().is_right
        status = outbox.status()
        assert (status.open, status.confirmed, status.expired) == (len(OPEN) + 4, 1, 1)
        (parked,) = (one for one in outbox.parked() if one.state == "parked")
        assert (parked.message_id, parked.reply_code) == ("parked", 312)
        assert [held.ordering_key for held in outbox.held_keys()] == ["k"]
        assert outbox.enqueue(b"again", key=KEY) == "once"
        assert "edited" in explained(kept, "edited")
        assert "why" in explained(kept, "edited")
        assert "basic.nack" in explained(kept, "nacked")
        assert outbox.retry([parked.id]) == 1
    fill(path, *OPEN, SECRET, *KEYED, replace(EDITED, type="after"))
    assert drained(kept, left=1) == drained(str(path), left=0)
    (later,) = Outbox(kept).rows("open")
    assert later["message_id"] == "later"
    assert str(later["due_at"]).startswith(str(FAR.date()))
