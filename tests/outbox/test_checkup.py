"""What is said of a file: what schema.sql makes, page by page, and what lies beside it."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from reliablepub.errors import NotAnOutbox
from reliablepub.message import Message
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import Changes
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite.checkup import Checkup, check_up
from reliablepub.outbox.sqlite.lock import RelayLock
from reliablepub.outbox.sqlite.status_file import status_file_path, write_status_file
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.asking import fill
from tests.sqlite import sql


def test_of_a_new_file_there_is_nothing_to_say(path: Path) -> None:
    SqliteStore(path).close()
    assert check_up(path) == Checkup(
        pages=(),
        missing=(),
        changed=(),
        journal="wal",
        bytes_unused=0,
        can_shrink=True,
        leftovers=(),
        rescued=(),
        keys={},
        folder="",
        exposed=(),
    )
    with pytest.raises(NotAnOutbox):
        check_up(path.with_name("none.db"))


def test_an_applications_file_may_be_otherwise(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (id)")
        Outbox(path).enqueue(Message(b"x"))
        connection.execute("DROP TABLE orders")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("PRAGMA journal_mode = DELETE")
        page_bytes, unused = (
            connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_size", "freelist_count")
        )
    assert unused
    path.chmod(0o640)
    found = check_up(path)
    assert found.bytes_unused == unused * page_bytes
    assert (found.can_shrink, found.journal, found.exposed[0]) == (False, "delete", path)


@pytest.mark.parametrize("mode", [0o610, 0o601])
def test_every_right_of_others_counts(path: Path, mode: int) -> None:
    SqliteStore(path).close()
    path.chmod(mode)
    assert check_up(path).exposed


def test_all_that_is_missing_or_different_is_named(path: Path) -> None:
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        for name in ("parked_messages", "held_keys", "history", "audit"):
            connection.execute(f"DROP VIEW reliablepub_{name}")
        for name in ("parked_messages", "held_keys"):
            connection.execute(f"CREATE VIEW reliablepub_{name} AS SELECT 1 AS one")
    found = check_up(path)
    assert found.missing == ("view reliablepub_audit", "view reliablepub_history")
    assert found.changed == ("view reliablepub_held_keys", "view reliablepub_parked_messages")


def test_unless_it_shall_be_quick_indexes_are_compared(path: Path) -> None:
    SqliteStore(path).close()
    sql(
        path,
        "CREATE TABLE orders (id)",
        "CREATE INDEX orders_by_id ON orders (id) WHERE id IS NULL",
        "INSERT INTO orders VALUES (1)",
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_schema SET sql = replace(sql, 'IS NULL', 'IS NOT NULL')",
    )
    assert check_up(path, is_quick=True).pages == ()
    assert check_up(path).pages == check_up(path, is_quick=False).pages != ()


def test_what_a_dead_relay_has_left_is_listed_and_a_live_one_leaves_nothing(path: Path) -> None:
    SqliteStore(path).close()
    write_status_file(path, {})
    picture = status_file_path(path)
    draft = picture.with_name(picture.name + ".new")
    draft.touch(0o600)
    assert check_up(path).leftovers == (picture, draft)
    picture.unlink()
    assert check_up(path).leftovers == (draft,)
    relay_lock = RelayLock(path)
    assert check_up(path).leftovers == ()
    relay_lock.release()


def test_the_keys_that_messages_need_are_counted(path: Path) -> None:
    for keys in (None, OutboxKeys({"a": bytes(32)}), OutboxKeys({'"b': bytes(32)})):
        fill(path, Message(b"x"), Message(b"x"), keys=keys)
    with closing(SqliteStore(path)) as store:
        kept = store.read_ready(1, 1, limit=1, bytes_max=999)[0]
        store.commit(Changes(confirmed=kept))
    assert check_up(path).keys == {None: 1, '"b': 2, "a": 2}
    query = """UPDATE reliablepub_messages SET properties = '{"$key":' WHERE id = 2"""
    sql(path, query)
    assert check_up(path).keys[None] == 1


def test_the_copy_of_an_outbox_that_was_moved_is_named(path: Path) -> None:
    fill(path, Message(b""))
    copy = path.with_name(f"{path.name}.rescued-3")
    copy.touch()
    assert check_up(path).rescued == (copy,)
