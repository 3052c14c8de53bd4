"""A bit flips in the head of one row's record: at most that row is parked, and the others go on.

The head of a record in SQLite's file format is its own length and a type for each column. A flipped
bit makes a number NULL, a text bytes, or a value longer than it is. SQLite notices the last, but
only when it reads the value: https://www.sqlite.org/fileformat2.html#record_format
"""

import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from reliablepub._core.events import Batch
from reliablepub.errors import OutboxError
from reliablepub.message import Message
from reliablepub.outbox.admin.interventions import Action, Intervention, foresee, intervene
from reliablepub.outbox.admin.rekeying import rekey
from reliablepub.outbox.admin.transfer import export_lines, import_lines
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import HELD, Attempt, Changes, Entry, HeldExchange, Rebase, Release
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.rows import MISTYPED
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import NACKED
from tests.asking import fill
from tests.outbox.conftest import Make
from tests.sqlite import edit_lax as edit
from tests.sqlite import sql

FLIPPED = 3
OTHERS = [1, 2, 4, 5]
COLUMNS = 17
ALL: dict[str, Any] = {"limit": 99, "bytes_max": 1 << 30}
NOW = 9_000.0


def entries(kind: str) -> list[Entry]:
    """Five entries, of which the third is of a kind."""
    body = b"\xff\xfe not UTF-8" if kind == "keyed" else b'{"order": 17}'
    messages = [Message(body, "", "q", message_id=f"m-{n}") for n in range(1, 6)]
    new = [Entry(message, 1_000.0) for message in messages]
    changed = new[FLIPPED - 1]
    if kind == "due":
        changed.due_at, changed.nacked, changed.expires_at = 5.5, 2, 8_000.5
    if kind == "keyed":
        changed.message = replace(changed.message, ordering_key="k")
    return new


def head_of(data: bytes) -> range:
    """Where the head of the third row's record is in the file."""
    texts = data.index(b"m-3")
    assert data.count(b"m-3q") == 1
    # The length of the head is its first byte. A type is one byte here, except for a long value.
    return next(
        range(first, texts)
        for first in range(texts - COLUMNS - 1, 0, -1)
        if data[first] == texts - first
    )


def read_all(store: SqliteStore) -> list[Entry]:
    """Read as a relay does: what is ready, page after page, and what is due and expiring."""
    first, last = 1, store.snapshot().last_id
    found: dict[int, Entry] = {}
    while first <= last:
        page, looked_at = store.read_ready(first, last, **ALL)
        assert looked_at >= first, "or it would read for ever"
        found |= {entry.id: entry for entry in page}
        first = looked_at + 1
    for read in (store.read_due, store.read_expired):
        page, _ = read(NOW, loaded=found, **ALL)
        found |= {entry.id: entry for entry in page}
    return list(found.values())


def relayed(path: Path, messages: dict[int, Message]) -> str:
    """Read all rows, have the broker refuse each message once, then confirm the others.

    Returns:
        what became of the row in which a bit flipped.
    """
    with closing(SqliteStore(path, keep_confirmed_s=60.0, clock=lambda: NOW)) as store:
        found = read_all(store)
        assert all(entry.message == messages[entry.id] for entry in found), "or a wrong one is sent"
        ids = {entry.id for entry in found}
        assert ids - {FLIPPED} == {*OTHERS}
        for entry in found:
            entry.due_at, entry.nacked = NOW, 1
        store.commit(Changes(rescheduled=found))
        refused = [Attempt(e, "1-1", 1, NACKED, NOW) for e in found if e.id == FLIPPED]
        confirmed = [entry for entry in found if entry.id != FLIPPED]
        counters = store.commit(Changes(confirmed=confirmed, parked=refused)).counters
        assert counters.confirmed == len(OTHERS)
        damaged = store.damaged()
        if FLIPPED in ids:
            assert (counters.open, counters.parked, damaged) == (0, 1, [])
            return "readable"
        if not damaged:
            # The row became a waiting one, which relays find by an index, where it is not. It
            # stays open, and a flush waits for it.
            assert (counters.open, counters.parked) == (1, 0)
            assert store.lowest_awaited(1, NOW) == FLIPPED
            return "left open"
        assert (counters.open, counters.parked, counters.open_bytes) == (0, 1, 0)
        assert [row.id for row in damaged] == [FLIPPED]
    assert sql(path, "PRAGMA integrity_check") == [("ok",)], "the row could be parked as it is"
    return "parked"


@pytest.mark.parametrize("kind", ["text", "due", "keyed", "in flight"])
def test_one_flipped_bit_in_the_head_of_a_row_costs_at_most_that_row(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "whole.db"
    new = entries(kind)
    messages = {n: entry.message for n, entry in enumerate(new, 1)}
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=new))
        if kind == "in flight":
            store.commit(Changes(sent=[Batch(1, 1, new)]))
    data = path.read_bytes()
    became = Counter[str]()
    for at in head_of(data):
        for bit in range(8):
            flipped = tmp_path / "flipped" / "o.db"
            flipped.parent.mkdir()
            flipped.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            flipped.chmod(0o600)
            try:
                became[relayed(flipped, messages)] += 1
            except OutboxError as error:
                cause = error.__cause__
                assert isinstance(cause, sqlite3.DatabaseError)
                assert cause.sqlite_errorname in ("SQLITE_CORRUPT", "SQLITE_CORRUPT_INDEX"), cause
                became["reported by SQLite"] += 1
            shutil.rmtree(flipped.parent)
    # By far the most flips make a value longer than the record, which SQLite reports.
    assert became["parked"] >= 16, became
    assert became["readable"] >= 6, became
    assert became["left open"] <= 3, became


@pytest.mark.parametrize("kind", ["due", "keyed", "text"])
@pytest.mark.parametrize(
    ("column", "value"),
    [
        *((name, "NULL") for name in ("message_id", "stored_at", "nacked", "size", "checksum")),
        *((name, "x'31'") for name in ("message_id", "properties", "stored_at", "refused", "size")),
        *((name, "x'31'") for name in ("checksum", "refused_at")),
        ("ordering_key", "x'6b'"),
        ("body", "NULL"),
        ("body", """'{"order": 17}'"""),
        ("body", "CAST(x'fffe' AS TEXT)"),
        ("body", "17"),
        ("size", "'x'"),
    ],
)
def test_a_value_of_another_type_parks_its_row(
    path: Path, kind: str, column: str, value: str
) -> None:
    """Of each column that relays read, and each way to read a row; one bit cannot change it so."""
    new = entries(kind)
    messages = {n: entry.message for n, entry in enumerate(new, 1)}
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=new))
        store.commit(Changes(sent=[Batch(1, 1, new)]))
    edit(path, f"{column} = {value} WHERE id = {FLIPPED}")
    assert relayed(path, messages) == "parked"
    (parked,) = Outbox(path).parked()
    assert parked.id == FLIPPED
    assert MISTYPED in parked.reply_text or column in parked.reply_text
    assert Outbox(path).audit().differences == {}


def test_so_does_one_of_a_row_that_is_not_next_of_its_key(path: Path, entry: Make) -> None:
    new = [entry(ordering_key="k") for _ in range(3)]
    new[1].due_at = 5.0  # as after a retry by an operator
    with closing(SqliteStore(path, clock=lambda: NOW)) as store:
        store.commit(Changes(new=new))
        edit(path, "refused = x'31' WHERE id = 2")
        edit(path, "size = x'31' WHERE id = 3")
        assert [one.id for one in read_all(store)] == [1]
        assert sorted(row.id for row in store.damaged()) == [2, 3]


def test_so_does_one_of_the_first_row_of_a_key(path: Path, entry: Make) -> None:
    with closing(SqliteStore(path, clock=lambda: NOW)) as store:
        store.commit(Changes(new=[entry(ordering_key="k"), entry(ordering_key="l")]))
        edit(path, "due_at = x'31' WHERE id = 1")
        found, looked_at = store.read_first(["k", "l"], NOW, bytes_max=1 << 30)
        assert ([one.id for one in found], looked_at) == ([2], 2)
        assert [row.id for row in store.damaged()] == [1]


@pytest.mark.parametrize("column", ["due_at", "expires_at"])
def test_a_time_in_an_index_that_is_no_number_is_passed_over(path: Path, column: str) -> None:
    with closing(SqliteStore(path, clock=lambda: NOW)) as store:
        store.commit(Changes(new=entries("due")))
        edit(path, f"{column} = 'soon' WHERE id = {FLIPPED}")
        assert {one.id for one in read_all(store)} == {*OTHERS}


@pytest.mark.parametrize(
    "ids",
    ["", "[[1,", "[5]", '["x"]', '{"a":1}', "null", '[["a","b"]]', "[[1]]", "[[]]", "[[3,9e99]]"],
)
def test_tags_in_flight_that_cannot_be_read_are_dropped(path: Path, ids: str) -> None:
    new = entries("text")
    messages = {n: entry.message for n, entry in enumerate(new, 1)}
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=new))
        store.commit(Changes(sent=[Batch(1, 1, new[:2]), Batch(1, 3, new[2:])]))
    sql(path, "UPDATE reliablepub_in_flight SET ids = ? WHERE first_tag = 3", values=(ids,))
    assert relayed(path, messages) == "readable"
    uncertain = sql(path, "SELECT id FROM reliablepub_attempts WHERE outcome = 'uncertain'")
    assert {(1,), (2,)} <= {*uncertain}


def test_a_held_exchange_whose_name_and_time_have_another_type(path: Path) -> None:
    new = entries("text")
    new[2].due_at = new[2].refused_at = HELD
    with closing(SqliteStore(path, clock=lambda: NOW)) as store:
        store.commit(Changes(new=new))
        edit(path, f"exchange = NULL, refused_at = 'x' WHERE id = {FLIPPED}")
        assert store.held_exchanges(9) == [HeldExchange(None, 1, None)]


@pytest.mark.parametrize("change", ["size = x'31'", "exchange = x'31'", "body = 'x'"])
@pytest.mark.parametrize("state", ["held", "rebased", "in memory", "nacked"])
def test_a_row_that_no_commit_can_change_is_parked_by_it(
    path: Path, change: str, state: str
) -> None:
    new = entries("text")
    with closing(SqliteStore(path, clock=lambda: NOW)) as store:
        store.commit(Changes(new=new))
        if state == "held":
            for one in new:
                one.due_at = HELD
            store.commit(Changes(rescheduled=new))
            changes = Changes(released=[Release(None, None, 9)])
        elif state == "rebased":
            for one in new:
                one.due_at, one.nacked = NOW + 60, 1
            store.commit(Changes(rescheduled=new))
            changes = Changes(rebase=Rebase(-30.0, set()))
        elif state == "in memory":
            for one in new:
                one.due_at, one.nacked = NOW + 60, 1
            changes = Changes(rescheduled=new)
        else:
            changes = Changes(parked=[Attempt(one, "1-1", 1, NACKED, NOW) for one in new])
        edit(path, f"{change} WHERE id = {FLIPPED}")
        counters = store.commit(changes).counters
        assert [row.id for row in store.damaged()] == [FLIPPED]
        assert counters.parked == (5 if state == "nacked" else 1)
        assert counters.open == 5 - counters.parked
        changed = {"held": 0.0, "rebased": NOW + 30, "in memory": NOW + 60}
        rows = sql(path, "SELECT DISTINCT due_at FROM reliablepub_messages")
        assert rows == ([] if state == "nacked" else [(changed[state],)])


def test_a_relay_starts_beside_a_row_whose_wait_it_cannot_change(path: Path) -> None:
    new = entries("text")
    attempts = [Attempt(one, "1-1", 1, NACKED, NOW) for one in new]
    with closing(SqliteStore(path, clock=lambda: NOW)) as store:
        store.commit(Changes(new=new))
        for one in new:
            one.due_at, one.nacked = NOW + 60, 1
        store.commit(Changes(rescheduled=new, attempts=attempts))
    edit(path, f"refused = x'31' WHERE id = {FLIPPED}")
    with closing(SqliteStore(path, clock=lambda: NOW - 600)) as store:
        assert [row.id for row in store.damaged()] == [FLIPPED]
        assert store.snapshot().counters.open == len(OTHERS)
        found, _ = store.read_due(NOW - 600 + 60, loaded=(), **ALL)
        assert [one.id for one in found] == OTHERS


@pytest.mark.parametrize(("tags", "due_at"), [("1", NOW - 540), ("1, 2", NOW + 60)])
def test_a_relay_starts_beside_an_attempt_whose_time_is_no_number(
    path: Path, tags: str, due_at: float
) -> None:
    new = entries("text")
    attempts = [Attempt(one, "1-1", tag, NACKED, NOW) for one in new for tag in (1, 2)]
    with closing(SqliteStore(path, clock=lambda: NOW)) as store:
        store.commit(Changes(new=new))
        for one in new:
            one.due_at, one.nacked = NOW + 60, 1
        store.commit(Changes(rescheduled=new, attempts=attempts))
    edit(path, f"at = 'x' WHERE id = {FLIPPED} AND tag IN ({tags})", "reliablepub_attempts")
    SqliteStore(path, clock=lambda: NOW - 600).close()
    rows = dict(sql(path, "SELECT id, due_at FROM reliablepub_messages"))
    assert rows == dict.fromkeys(OTHERS, NOW - 540) | {FLIPPED: due_at}


def test_what_is_wrong_with_a_row_can_always_be_stored(path: Path) -> None:
    """An error may quote the row, with half of a surrogate pair or a U+0000 in it."""
    with closing(SqliteStore(path, clock=lambda: NOW)) as store:
        store.commit(Changes(new=entries("text")))
        for id_, name in ((2, "\\ud800"), (3, "\\u0000")):
            change = f"properties = '{{\"{name}\": 1}}', checksum = -1 WHERE id = {id_}"
            sql(path, f"UPDATE reliablepub_messages SET {change}")
        assert {one.id for one in read_all(store)} == {1, 4, 5}
        reasons = [row.reason for row in store.damaged()]
    assert [row.reply_text for row in Outbox(path).parked()] == reasons
    assert "\\ud800" in reasons[0]
    assert "\\x00" in reasons[1]


def test_a_damaged_row_is_parked_later_if_another_process_holds_the_lock(path: Path) -> None:
    with closing(SqliteStore(path, clock=lambda: NOW)) as store:
        store.commit(Changes(new=entries("text")))
        edit(path, f"body = NULL WHERE id = {FLIPPED}")
        connection = store._writer.opened()
        connection.execute("PRAGMA busy_timeout = 10")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert [one.id for one in read_all(store)] == OTHERS
        assert store.damaged() == []
        store.relieve()
        assert [row.id for row in store.damaged()] == [FLIPPED]
        store.relieve()
        assert (store.damaged(), store.snapshot().counters.parked) == ([], 1)


@pytest.mark.parametrize(
    "change", ["nacked = x'31'", "stored_at = 'x'", "exchange = CAST(exchange AS BLOB)"]
)
@pytest.mark.parametrize("action", [Action.RETRY, Action.DISCARD])
def test_a_parked_row_that_cannot_be_changed_keeps_no_other_from_being_retried(
    path: Path, change: str, action: Action
) -> None:
    new = entries("text")
    with closing(SqliteStore(path, clock=lambda: NOW)) as store:
        store.commit(Changes(new=new))
        store.commit(Changes(parked=[Attempt(one, "1-1", 1, NACKED, NOW) for one in new]))
    edit(path, f"{change} WHERE id = {FLIPPED}", "reliablepub_parked")
    effect = intervene(outbox_at(path), [1, 2, 3, 4, 5], Intervention(action))
    is_possible = action is Action.DISCARD or "nacked" in change  # refusals no longer count
    assert (effect.changed, effect.damaged) == ((5, []) if is_possible else (4, [FLIPPED]))
    audit = Outbox(path).audit()
    assert audit.differences == {}
    assert bool(audit.structure) is not is_possible


def test_an_intervention_in_a_message_whose_id_is_no_text_ends_no_relay(path: Path) -> None:
    with closing(SqliteStore(path, clock=lambda: NOW)) as store:
        store.commit(Changes(new=entries("text")))
        sql(path, "UPDATE reliablepub_messages SET message_id = CAST(x'ed33' AS TEXT) WHERE id = 3")
        assert [one.id for one in read_all(store)] == OTHERS
        assert intervene(outbox_at(path), [3], Intervention(Action.DISCARD)).changed == 1
        assert [touched.message_id for touched in store.touched()] == ["\ufffd3"]


def test_messages_are_imported_beside_a_damaged_row(path: Path) -> None:
    other = path.with_name("other.db")
    for outbox in (path, other):
        with closing(SqliteStore(outbox, clock=lambda: NOW)) as store:
            store.commit(Changes(new=entries("text")))
    edit(path, f"stored_at = 'x' WHERE id = {FLIPPED}")
    lines = export_lines(outbox_at(other), [*OTHERS, FLIPPED])
    *_, brought = import_lines(outbox_at(path), lines, "other")
    assert (brought.stored, brought.known) == (1, 4)


@pytest.mark.parametrize(
    "change",
    [
        *("message_id = NULL", "message_id = x'31'", "stored_at = x'31'"),
        *("size = x'31'", "body = NULL", "body = 'x'", "ordering_key = x'6b'"),
    ],
)
@pytest.mark.parametrize("table", ["reliablepub_messages", "reliablepub_parked"])
def test_an_operator_can_change_the_others_and_discard_such_a_row(
    path: Path, table: str, change: str
) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    ids, where = [1, 2, 3], outbox_at(path)
    fill(path, *(Message(b"x", "e", "k", not_before=later, ordering_key=f"k{n}") for n in ids))
    if table == "reliablepub_parked":
        assert intervene(where, ids, Intervention(Action.PARK)).changed == 3
    edit(path, f"{change} WHERE id = 2", table)
    to = Intervention(Action.REROUTE, exchange="x")
    assert foresee(where, ids, to).damaged == [2]
    for what in (Intervention(Action.RETRY), to):
        effect = intervene(where, ids, what)
        assert (effect.changed, effect.damaged) == (2, [2])
    assert list(rekey(where, OutboxKeys({"one": bytes(32)}, accept_plaintext=True)).left) == [2]
    assert intervene(where, [2], Intervention(Action.DISCARD)).changed == 1
    with closing(SqliteStore(path)) as store:
        counters = store.commit(Changes()).counters
        assert (counters.open, counters.discarded, store.damaged()) == (2, 1, [])
