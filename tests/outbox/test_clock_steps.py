"""A clock that is set moves stored times part by part, and each time once."""

import random
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from reliablepub.errors import OutboxDiskFull
from reliablepub.message import Message
from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.entry import HELD, Changes, Entry, Step
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.sqlite import clock_steps
from reliablepub.outbox.sqlite.store import SqliteStore, write_changes
from tests.outbox.conftest import Clock
from tests.sqlite import sql

HOUR = 3_600.0
START = 1_000_000.0


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[SqliteStore]:
    with closing(SqliteStore(tmp_path / "o.db", clock=clock)) as store:
        yield store


def an_entry(chance: random.Random, now: float, size: int = 1) -> Entry:
    """An entry that waits for a retry, its destination or its sender's time, or for nothing."""
    entry = Entry.accepted(Message(b"x" * size, message_id="m"), now)
    if chance.random() < 0.6:
        entry.expires_at = now + chance.choice([0.0, 1.0, 60.0, 2 * HOUR])
    if chance.random() < 0.6:
        entry.due_at = chance.choice([0.0, now - 5.0, now + 5.0, now + 2 * HOUR, HELD])
        if chance.random() < 0.7:
            entry.refused_at = now - chance.choice([0.0, 30.0])
    entry.is_plain = False
    return entry


Times = dict[int, tuple[float | None, ...]]


def times_in(store: SqliteStore) -> Times:
    columns = "id, due_at, expires_at, refused_at"
    rows = sql(store.path, f"SELECT {columns} FROM reliablepub_messages")
    return {id_: (due, expires, refused) for id_, due, expires, refused in rows}


def times_of(entries: list[Entry]) -> Times:
    return {e.id: (e.due_at, e.expires_at, e.refused_at) for e in entries}


def is_close(found: Times, expected: Times) -> bool:
    return found.keys() == expected.keys() and all(
        a == b or (a is not None and b is not None and abs(a - b) < 1e-3)
        for id_ in found
        for a, b in zip(found[id_], expected[id_], strict=True)
    )


def naively_stepped(entry: Entry, by: float) -> None:
    was_now = entry.due_at == 0.0
    entry.step(by)
    entry.due_at = 0.0 if was_now else entry.due_at


@pytest.mark.parametrize("seed", range(40))
def test_every_time_moves_once_whatever_is_written_meanwhile(
    store: SqliteStore, clock: Clock, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(clock_steps, "PART", 3)
    chance = random.Random(seed)
    entries = [an_entry(chance, clock.now) for _ in range(40)]
    store.commit(Changes(new=list(entries)))
    parts = 0
    for _ in range(chance.choice([1, 2, 3])):
        by = chance.choice([HOUR, -HOUR, 0.7, -0.7])
        clock.now += 1.0
        since, clock.now = clock.now + by, clock.now + by + 0.05
        step = Step(by, since, len(entries))
        for entry in entries:
            naively_stepped(entry, by)
        changes = Changes(stepped=step)
        for _ in range(chance.choice([2, 9, 99])):
            changes.new = [an_entry(chance, clock.now)] if chance.random() < 0.2 else []
            changes.rescheduled = [e for e in entries if chance.random() < 0.05]
            for entry in changes.rescheduled:
                entry.due_at, entry.refused_at = clock.now + 5.0, clock.now
            entries += changes.new
            store.commit(changes)
            parts += 1
            if not store.is_stepping:
                break
            changes = Changes()
            clock.now += 0.01
    while store.is_stepping:
        store.commit(Changes())
    assert parts > 1
    assert is_close(times_in(store), times_of(entries))


def filled(store: SqliteStore, clock: Clock, count: int, size: int = 1) -> list[Entry]:
    entries = [
        Entry.accepted(Message(b"x" * size, message_id="m"), clock.now) for _ in range(count)
    ]
    for entry in entries:
        entry.expires_at, entry.is_plain = clock.now + 60.0, False
    store.commit(Changes(new=list(entries)))
    return entries


def stepped(store: SqliteStore, clock: Clock, by: float, last_id: int) -> Changes:
    clock.now += by
    return Changes(stepped=Step(by, clock.now, last_id))


def test_large_messages_make_small_parts(
    store: SqliteStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_steps, "PART_BYTES", 2_500)
    filled(store, clock, 5, size=1_000)
    store.commit(stepped(store, clock, HOUR, 5))
    moved = [at for _, at, _ in times_in(store).values() if at != START + 60.0]
    assert len(moved) == 2
    assert store.is_stepping


def test_closing_moves_what_is_left(store: SqliteStore, clock: Clock, tmp_path: Path) -> None:
    count = 2 * clock_steps.PART + 1
    filled(store, clock, count)
    store.commit(stepped(store, clock, -HOUR, count))
    assert store.is_stepping
    store.close()
    assert {at for _, at, _ in times_in(store).values()} == {START + 60.0 - HOUR}


def test_closing_ends_though_an_operator_has_changed_a_message(
    store: SqliteStore, clock: Clock
) -> None:
    count = 2 * clock_steps.PART + 1
    filled(store, clock, count)
    store.commit(stepped(store, clock, -HOUR, count))
    what = Intervention(Action.DISCARD, person="jo@host", note="")
    assert intervene(outbox_at(store.path), [count], what, clock=clock).changed == 1
    store.close()
    with closing(SqliteStore(store.path, clock=clock)) as again:
        assert again.snapshot().counters.open == count - 1


@pytest.mark.parametrize("by", [HOUR, -HOUR])
def test_a_part_that_is_not_committed_is_moved_by_a_later_commit(
    store: SqliteStore, clock: Clock, monkeypatch: pytest.MonkeyPatch, by: float
) -> None:
    monkeypatch.setattr(clock_steps, "PART", 2)
    monkeypatch.setattr(clock_steps, "PART_OF_A_FULL_DISK", 1)
    filled(store, clock, 7)
    real: Any = write_changes
    fails = iter([True, True, True, False, False, True, True, False])

    def write(*args: Any, **options: Any) -> Any:
        if next(fails, False):
            raise OutboxDiskFull("full")
        return real(*args, **options)

    monkeypatch.setattr("reliablepub.outbox.sqlite.store.write_changes", write)
    changes = stepped(store, clock, by, 7)
    with pytest.raises(OutboxDiskFull):
        store.commit(changes)
    assert {at for _, at, _ in times_in(store).values()} == {START + 60.0}
    store.commit(changes)
    while store.is_stepping:
        with suppress(OutboxDiskFull):
            store.commit(Changes())
    assert next(fails, None) is None
    assert {at for _, at, _ in times_in(store).values()} == {START + 60.0 + by}
