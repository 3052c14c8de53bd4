"""What people ask an outbox, and how much of it they get."""

import time
from collections import Counter
from pathlib import Path

import pytest

from reliablepub._core.events import Batch
from reliablepub.outbox.admin.inspection import (
    HeldKey,
    ParkedMessage,
    read_ambiguous,
    read_failures,
    read_figures,
    read_held_keys,
    read_in_flight,
    read_parked,
    read_position,
    read_status,
)
from reliablepub.outbox.admin.selection import Selection, find
from reliablepub.outbox.entry import Attempt, Changes, Entry
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import Outcome, OutcomeKind
from tests.asking import stored
from tests.outbox.conftest import Make
from tests.outcomes import RETURNED

CUT = Outcome(OutcomeKind.UNCERTAIN, 0, "connection lost")


def park(store: SqliteStore, *entries: Entry) -> None:
    for one in entries:
        one.returned = 1
    attempts = [Attempt(one, "1-1", one.id, RETURNED, 7.0) for one in entries]
    store.commit(Changes(parked=attempts, attempts=attempts))


def test_a_parked_message_is_told_without_its_body(
    store: SqliteStore, path: Path, entry: Make
) -> None:
    store.commit(Changes(new=[one := entry(), two := entry(), entry()]))
    park(store, one, two)
    first, second = read_parked(outbox_at(path), limit=5)
    assert first == ParkedMessage(
        id=1,
        message_id="m-1",
        exchange="orders",
        routing_key="created",
        state="parked",
        outcome="returned",
        reply_code=312,
        reply_text="NO_ROUTE",
        attempts=1,
        stored_at=1001.0,
        parked_at=7.0,
        size=one.message.size,
    )
    assert second.id == 2
    assert read_parked(outbox_at(path), limit=1) == [first]


def test_what_may_have_arrived_is_told_of_parked_messages_and_held_keys(
    store: SqliteStore, path: Path, entry: Make
) -> None:
    store.commit(Changes(new=(new := [entry(ordering_key=key) for key in "abc"])))
    new[1].uncertain = new[2].nacked = 1
    park(store, *new)
    doubts = [False, True, True]
    database = outbox_at(path)
    assert [one.may_have_arrived for one in read_parked(database, limit=5)] == doubts
    assert [one.may_have_arrived for one in read_held_keys(database, limit=5)] == doubts
    assert [row["may_have_arrived"] for row in find(database, Selection(), limit=5)] == doubts


def test_a_held_key_is_told_with_what_waits(store: SqliteStore, path: Path, entry: Make) -> None:
    new = stored(store, *(entry(ordering_key=key) for key in ("b", "b", "b", "a")))
    park(store, new[0], new[3])
    a, b = read_held_keys(outbox_at(path), limit=5)
    assert b == HeldKey(
        ordering_key="b",
        id=1,
        message_id="m-1",
        exchange="orders",
        routing_key="created",
        outcome="returned",
        reply_code=312,
        reply_text="NO_ROUTE",
        parked_at=7.0,
        held_back=2,
    )
    assert (a.ordering_key, a.id, a.held_back) == ("a", 4, 0)
    assert read_held_keys(outbox_at(path), limit=1) == [a]
    assert read_status(outbox_at(path)).held_keys == 2


def test_tags_count_as_long_as_their_relay(store: SqliteStore, path: Path, entry: Make) -> None:
    store.commit(Changes(new=(new := [entry(), entry(), entry()])))
    store.commit(Changes(sent=[Batch(1, 5, new)]))
    found = read_in_flight(outbox_at(path), limit=9)
    assert [(row["epoch"], row["tag"], row["id"]) for row in found] == [
        ("1-1", tag, id_) for tag, id_ in ((5, 1), (6, 2), (7, 3))
    ]
    assert read_in_flight(outbox_at(path), limit=2) == found[:2]
    store.close()
    assert read_in_flight(outbox_at(path), limit=9) == []


def test_uncertain_attempts_are_listed(store: SqliteStore, path: Path, entry: Make) -> None:
    store.commit(Changes(new=(new := [entry(), entry(), entry()])))
    unsure = [Attempt(new[n], "1-1", n, CUT, 5.0 + n) for n in (0, 2)]
    store.commit(Changes(rescheduled=[new[0], new[2]], attempts=unsure))
    assert [(row["id"], row["unsure"]) for row in read_ambiguous(outbox_at(path), limit=9)] == [
        (3, 1),
        (1, 1),
    ]
    assert [row["id"] for row in read_ambiguous(outbox_at(path), limit=1)] == [3]


def test_failures_are_told_newest_first_and_reasons_by_number(
    store: SqliteStore, path: Path, entry: Make
) -> None:
    store.commit(Changes(new=(new := [entry(), entry(), entry()])))
    said = [(new[0], RETURNED), (new[1], CUT), (new[2], RETURNED)]
    attempts = [Attempt(one, "1-1", n, how, 5.0 + n) for n, (one, how) in enumerate(said)]
    store.commit(Changes(rescheduled=new, attempts=attempts))
    newest, reasons = read_failures(outbox_at(path), failures=9, reasons=9)
    assert [(row["id"], row["outcome"]) for row in newest] == [
        *((3, "returned"), (2, "uncertain"), (1, "returned"))
    ]
    assert [(row["reply_text"], row["attempts"]) for row in reasons] == [
        *(("NO_ROUTE", 2), ("connection lost", 1))
    ]
    assert read_failures(outbox_at(path), failures=2, reasons=1) == (newest[:2], reasons[:1])


def test_figures_count_each_message_in_its_class(
    store: SqliteStore, path: Path, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored at 1001 and a second each later; classes are those of the statement."""
    sizes = (10, 300, 300, 5_000)
    store.commit(Changes(new=(new := [entry(body=bytes(size)) for size in sizes])))
    park(store, new[3])
    monkeypatch.setattr(time, "time", lambda: 1_011.5)
    of_open = read_figures(outbox_at(path), is_all=False)
    assert of_open == {
        "age": Counter({2: 1, 1: 2}),
        "attempts": Counter({0: 3}),
        "size": Counter({0: 1, 1: 2}),
    }
    of_all = read_figures(outbox_at(path), is_all=True)
    assert of_all["attempts"] == Counter({0: 3, 1: 1})
    assert of_all["size"] == Counter({0: 1, 1: 2, 3: 1})


def test_a_position_is_zero_where_there_is_none(
    store: SqliteStore, path: Path, entry: Make
) -> None:
    store.commit(Changes(new=[entry()], sources={"file": 3}))
    assert [read_position(outbox_at(path), name) for name in ("file", "other")] == [3, 0]
    assert read_position(outbox_at(path.with_name("none.db")), "file") == 0
    empty = path.with_name("empty.db")
    empty.touch()
    assert read_position(outbox_at(empty), "file") == 0


def test_the_log_counts_among_the_bytes_on_disk(
    store: SqliteStore, path: Path, entry: Make
) -> None:
    store.commit(Changes(new=[entry(body=bytes(50_000))]))
    log = path.with_name(path.name + "-wal")
    assert read_status(outbox_at(path)).bytes_on_disk == path.stat().st_size + log.stat().st_size
    assert read_status(outbox_at(path)).log_bytes == log.stat().st_size > 50_000
    store.close()
    assert not log.exists()
    assert read_status(outbox_at(path)).bytes_on_disk == path.stat().st_size
    assert read_status(outbox_at(path)).log_bytes == 0
