"""A page of entries: where it ends, so that the next one begins there."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from reliablepub.outbox.entry import Changes
from reliablepub.outbox.sqlite.sql import QUERIES
from reliablepub.outbox.sqlite.store import SqlitePage as Page
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.asking import opened
from tests.outbox.conftest import Make
from tests.stores import Where

ROOMY = 10**9


@pytest.fixture
def connection(path: Path, entry: Make) -> Iterator[sqlite3.Connection]:
    """To an outbox of ten messages of one key, of the same size, and one without."""
    entries = [entry(body=b"x", message_id=f"m-{n:02}", ordering_key="k") for n in range(10)]
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=[*entries, entry(body=b"x", message_id="m-10")]))
        yield store._writer.opened()


def ids(page: Page) -> list[int]:
    return [entry.id for entry in page.entries]


def test_a_page_that_takes_nothing_has_looked_at_nothing(connection: sqlite3.Connection) -> None:
    page = Page(0, ROOMY, None)
    assert page.read_ready(connection, 11, 11) == 10
    assert ids(page) == []


def test_a_page_passes_over_whose_turn_it_is_not(connection: sqlite3.Connection) -> None:
    page = Page(10, ROOMY, None)
    assert page.read_ready(connection, 1, 11) == 11
    assert ids(page) == [1, 11]


def test_a_page_passes_over_so_many_and_no_more(
    connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reliablepub.outbox.sqlite.store.PASSED_MAX", 3)
    page = Page(10, ROOMY, None)
    assert page.read_ready(connection, 1, 11) == 4
    assert ids(page) == [1]


def test_a_page_passes_over_as_many_bytes_as_it_may_hold(connection: sqlite3.Connection) -> None:
    (size,) = connection.execute("SELECT size FROM reliablepub_messages WHERE id = 2").fetchone()
    page = Page(10, 2 * size, None)
    assert page.read_ready(connection, 1, 11) == 4, "two fit to the byte, and the third does not"


def test_a_read_covers_so_many_ids_from_the_first_that_is_stored(
    where: Where, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("sqlite", "postgres"):
        monkeypatch.setattr(f"reliablepub.outbox.{kind}.store.SCANNED_MAX", 3)
    far = [entry() for _ in range(8)]
    for waiting in far:
        waiting.due_at = 9e9
    with opened(where) as store:
        store.commit(Changes(new=[*far, entry(message_id="a"), entry(message_id="b")]))
        store.commit(Changes(confirmed=far[2:5]))
        pages = [store.read_ready(first, 99, limit=9, bytes_max=ROOMY) for first in (1, 4, 9, 11)]
        assert [upto for _, upto in pages] == [3, 8, 11, 99]
        assert [[one.id for one in found] for found, _ in pages] == [[], [], [9, 10], []]
        awaited = [store.lowest_awaited(first, 1.0) for first in (1, 4, 6, 9, 11)]
        assert awaited == [6, 9, 9, 9, None]


def test_a_relay_that_begins_does_not_look_at_each_message_that_waits(
    connection: sqlite3.Connection,
) -> None:
    plan = connection.execute("EXPLAIN QUERY PLAN " + QUERIES["rebase_retries"], {"now": 1.0})
    assert not [row[3] for row in plan if row[3].startswith("SCAN m")]


def test_what_another_process_takes_away_in_between_is_passed_over(
    connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_index = [(1.0, 99), (2.0, 11)]
    monkeypatch.setattr(Page, "_from_index", lambda *_: (in_the_index, None))
    page = Page(10, ROOMY, None)
    assert page.read_timed(connection, "waiting", 3.0, ()) is None
    assert ids(page) == [11]
