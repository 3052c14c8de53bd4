"""An outbox that an earlier version has created gets the tables of this one."""

import sqlite3
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner

from reliablepub import Message, Outbox, Publisher
from reliablepub.cli import main
from reliablepub.errors import NotAnOutbox, OutboxInUse, OutboxLocked
from reliablepub.outbox.postgres.sql import VERSION, creation
from reliablepub.outbox.queries import steps_of
from reliablepub.outbox.sqlite.checkup import check_up
from reliablepub.outbox.sqlite.connections import OLDEST
from reliablepub.outbox.sqlite.connections import VERSION as FILE_VERSION
from reliablepub.outbox.sqlite.lock import RelayLock
from reliablepub.testing import FakeBroker
from tests.asking import count, sql
from tests.outbox.earlier_versions import OLDEST_IN_POSTGRES, create_file, create_in_postgres
from tests.outbox.keeping import FAR
from tests.waiting import until

PAGE = Path(__file__).parent.parent.parent / "docs" / "upgrading.md"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file of the oldest version."""
    path = tmp_path / "outbox.db"
    create_file(path)
    return path


def run(where: object, *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["outbox", *arguments, "--outbox", str(where)])
    assert result.exit_code == code, result.output
    return result.output


def sent(where: object) -> list[str | None]:
    """Relay the outbox, and return the ids that have come."""
    with FakeBroker() as broker:
        broker.declare_queue("q")
        with Publisher(broker.url, outbox=str(where)):
            until(lambda: Outbox(str(where)).status().open == 0)
        return [message.properties.message_id for message in broker.messages("q")]


def test_there_is_a_step_for_each_version() -> None:
    assert sorted(steps_of("reliablepub.outbox.sqlite")) == [*range(OLDEST, FILE_VERSION)]
    assert sorted(steps_of("reliablepub.outbox.postgres")) == [*range(OLDEST_IN_POSTGRES, VERSION)]


def test_the_page_names_these_versions() -> None:
    page = PAGE.read_text()
    assert f"| a file | {FILE_VERSION} | {OLDEST} |" in page
    assert f"| in PostgreSQL | {VERSION} | {OLDEST_IN_POSTGRES} |" in page


# ------------------------------------------------------------------------ files


def test_a_file_is_as_if_this_version_had_created_it(old: Path) -> None:
    told = f"tables of version {OLDEST} are now of version {FILE_VERSION}\n"
    assert run(old, "upgrade") == told
    assert "nothing was changed" in run(old, "upgrade")
    found = check_up(old)
    assert (found.pages, found.missing, found.changed) == ((), (), ())
    assert "put back by jo: because" in run(old, "explain", "7")
    assert "1 message edited" in run(old, "edit", "7", "--set", "type=t")
    numbers = sql(old, "SELECT intervention FROM reliablepub_interventions")
    assert numbers == [(1,), (2,), (3,), (4,)]
    run(old, "audit")
    assert sent(old) == ["m"]


def test_until_then_every_door_names_the_remedy(old: Path) -> None:
    for arguments in (("status",), ("retry", "7"), ("explain", "7")):
        assert "run `reliablepub outbox upgrade`" in run(old, *arguments, code=4)
    with pytest.raises(NotAnOutbox, match="outbox upgrade"):
        Outbox(old).enqueue(Message(b""))
    with pytest.raises(NotAnOutbox, match="outbox upgrade"):
        Publisher("amqp://127.0.0.1:1", outbox=old)
    assert Outbox(old).upgrade()
    assert Outbox(old).status().open == 1


def test_a_file_that_cannot_be_upgraded_stays_as_it_is(old: Path, tmp_path: Path) -> None:
    sql(old, "CREATE TABLE reliablepub_originals (in_the_way)")
    assert "already exists" in run(old, "upgrade", code=4)
    sql(old, "DROP TABLE reliablepub_originals")
    assert count(old, "interventions") == 3
    sql(old, "UPDATE reliablepub_schema SET version = version - 1")
    words = f"has version {OLDEST - 1}, and this reliablepub knows version {FILE_VERSION}; drain it"
    for command in ("upgrade", "check", "status"):
        told = run(old, command, code=4)
        assert f"{words} with the reliablepub that made it" in told
    assert "holds no outbox" in run(tmp_path / "none.db", "upgrade", code=4)
    sql(tmp_path / "app.db", "CREATE TABLE theirs (x)")
    assert "holds no outbox" in run(tmp_path / "app.db", "upgrade", code=4)
    assert "not for a file" in run(old, "upgrade", "--sql", code=2)


def test_not_beside_a_relay_nor_a_writer(old: Path) -> None:
    relay_lock = RelayLock.borrow(old)
    assert relay_lock is not None
    with pytest.raises(OutboxInUse, match="stop it, upgrade"):
        Outbox(old).upgrade()
    relay_lock.release()
    with closing(sqlite3.connect(old, isolation_level=None)) as app:
        app.execute("BEGIN IMMEDIATE")
        with pytest.raises(OutboxLocked):
            Outbox(old).upgrade()


def test_a_file_of_this_version_is_left_alone_beside_a_relay(tmp_path: Path) -> None:
    with FakeBroker() as broker, Publisher(broker.url, outbox=tmp_path / "o.db"):
        assert Outbox(tmp_path / "o.db").upgrade() == []


def test_the_way_back_is_a_drain_and_an_export(old: Path, tmp_path: Path) -> None:
    """What an earlier reliablepub says of this one's outbox, this one says of a later one's."""
    run(old, "upgrade")
    outbox, written, back = Outbox(old), tmp_path / "rest.ndjson", tmp_path / "back.db"
    outbox.enqueue(b"later", routing_key="q", message_id="later", not_before=FAR)
    for name in ("parked", "behind"):
        outbox.enqueue(b"", routing_key="none", message_id=name, ordering_key="k")
    with FakeBroker() as broker:
        broker.declare_queue("q")
        drain = ["relay", "--drain", "--outbox", str(old), "--url", broker.url]
        assert CliRunner().invoke(main, drain).exit_code == 0
        assert [message.properties.message_id for message in broker.messages("q")] == ["m"]
    run(old, "export", "--to", str(written))
    sql(old, "INSERT INTO reliablepub_schema VALUES (?, 0.0)", FILE_VERSION + 1)
    before = old.read_bytes()
    for arguments in (("status",), ("upgrade",), ("export",), ("audit",)):
        assert f"knows version {FILE_VERSION}; upgrade reliablepub" in run(old, *arguments, code=4)
    with pytest.raises(NotAnOutbox, match="upgrade reliablepub"):
        Outbox(old).enqueue(Message(b""))
    assert old.read_bytes() == before
    run(back, "import", str(written))
    columns = "message_id, ordering_key, due_at"
    open_ones = f"SELECT {columns} FROM reliablepub_messages ORDER BY message_id"
    assert sql(back, open_ones) == [("behind", "k", None), ("later", None, FAR.timestamp())]
    assert [held.message_id for held in Outbox(back).held_keys()] == ["parked"]


# ------------------------------------------------------------------- PostgreSQL

MADE = """
SELECT
    'column', table_name || '.' || column_name,
    data_type || is_nullable || coalesce(column_default, '')
FROM information_schema.columns WHERE table_schema = 'SCHEMA'
UNION ALL
SELECT 'constraint', conname, pg_get_constraintdef(oid) FROM pg_constraint
WHERE connamespace = 'SCHEMA'::regnamespace
UNION ALL
SELECT 'index', indexname, indexdef FROM pg_indexes WHERE schemaname = 'SCHEMA'
UNION ALL
SELECT 'view', viewname, definition FROM pg_views WHERE schemaname = 'SCHEMA'
UNION ALL
SELECT 'function', proname, pg_get_functiondef(oid) FROM pg_proc
WHERE pronamespace = 'SCHEMA'::regnamespace
UNION ALL
SELECT 'trigger', tgname, pg_get_triggerdef(t.oid) FROM pg_trigger AS t
JOIN pg_class AS c ON c.oid = t.tgrelid WHERE c.relnamespace = 'SCHEMA'::regnamespace
AND NOT tgisinternal
"""


def made(url: str, schema: str) -> list[tuple[str, ...]]:
    found = sql(url, MADE.replace("SCHEMA", schema))
    return sorted(tuple(part.replace(schema, "S") for part in row) for row in found)


@pytest.fixture
def old_url(postgres_url: str) -> str:
    """An outbox of the oldest version in the schema `earlier`, with two shards."""
    create_in_postgres(postgres_url, "earlier", shards=2)
    return f"{postgres_url}?schema=earlier"


@pytest.mark.parametrize("is_by_hand", [False, True])
def test_an_outbox_in_postgresql(old_url: str, postgres_url: str, *, is_by_hand: bool) -> None:
    assert "run `reliablepub outbox upgrade`" in run(old_url, "status", code=4)
    if is_by_hand:
        printed = run(old_url, "upgrade", "--sql")
        sql(postgres_url, printed)
        assert run(old_url, "upgrade", "--sql") == ""
    else:
        told = run(old_url, "upgrade")
        assert "tables of version 3 are now of version 4\n" in told
        assert "function enqueue is that of this version\n" in told
    assert "nothing was changed" in run(old_url, "upgrade")
    sql(postgres_url, creation("afresh", shards=2))
    assert made(postgres_url, "earlier") == made(postgres_url, "afresh")
    assert "1 message edited" in run(old_url, "edit", "m", "--set", "type=t")
    run(old_url, "audit")
    until(lambda: Outbox(old_url).status().open == 1)


def test_a_transaction_of_the_application_may_be_of_either_version(
    old_url: str, postgres_url: str
) -> None:
    """The database's own function stores it; a connection of the outbox's own is refused."""
    with psycopg.connect(postgres_url) as connection:
        Outbox(old_url).enqueue(
            Message(b"", routing_key="q", message_id="n"), connection=connection
        )
    with pytest.raises(NotAnOutbox, match="outbox upgrade"):
        Outbox(old_url).enqueue(Message(b""))
    run(old_url, "upgrade")
    sql(postgres_url, f"UPDATE earlier.outbox SET version = {VERSION + 1}")
    with psycopg.connect(postgres_url) as connection:
        Outbox(old_url).enqueue(
            Message(b"", routing_key="q", message_id="o"), connection=connection
        )
    with pytest.raises(NotAnOutbox, match="upgrade reliablepub"):
        Outbox(old_url).enqueue(Message(b""))
    sql(postgres_url, f"UPDATE earlier.outbox SET version = {VERSION}")
    names = sql(postgres_url, "SELECT message_id FROM earlier.messages ORDER BY 1")
    assert names == [("m",), ("n",), ("o",)]


def test_one_that_cannot_be_upgraded_stays_as_it_is(old_url: str, postgres_url: str) -> None:
    sql(postgres_url, "CREATE TABLE earlier.originals (in_the_way integer)")
    assert "already exists" in run(old_url, "upgrade", code=4)
    sql(postgres_url, "UPDATE earlier.outbox SET version = 2")
    assert "version 2" in run(old_url, "upgrade", code=4)
    assert "holds no outbox" in run(f"{postgres_url}?schema=none", "upgrade", code=4)
