"""What a person deletes, in small steps, and the space that comes back."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from reliablepub.errors import InvalidMessage, NotAnOutbox
from reliablepub.message import Message
from reliablepub.outbox.admin import pruning
from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.admin.pruning import Pruned, Times, foresee, prune
from reliablepub.outbox.entry import Attempt, Changes, Entry
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite.space import PAGE_BYTES
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import Outcome, OutcomeKind
from tests.outbox.conftest import Clock
from tests.outcomes import REFUSED
from tests.sqlite import count, sql

LATE = Outcome(OutcomeKind.EXPIRED, 0, "not sent")
NOW = 1_000_000.0


@pytest.fixture
def store(path: Path, clock: Clock) -> Iterator[SqliteStore]:
    with closing(SqliteStore(path, keep_confirmed_s=1e9, clock=clock)) as store:
        yield store


def stored(store: SqliteStore, count: int, body: bytes = b"") -> list[Entry]:
    entries = [Entry(Message(body, message_id=f"m-{n}"), NOW) for n in range(count)]
    store.commit(Changes(new=entries))
    return entries


def times(**before: float) -> Times:
    return Times(**{"history_before": 0.0, "now": NOW, **before})


def pruned_as_foreseen(path: Path, wanted: Times) -> Pruned:
    """Both ways of asking agree."""
    foreseen, found = foresee(outbox_at(path), wanted), prune(outbox_at(path), wanted)
    names = ("confirmed", "parked", "expired", "attempts", "interventions", "keys")
    assert [getattr(foreseen, name) for name in names] == [getattr(found, name) for name in names]
    assert Outbox(path).audit().is_right
    return found


@pytest.fixture
def one_of_each(store: SqliteStore) -> None:
    """A message that was confirmed, one that was refused, one that came too late, an open one."""
    confirmed, parked, late, _ = stored(store, 4)
    given_up = [Attempt(parked, "1-1", 1, REFUSED, NOW), Attempt(late, "1-1", 2, LATE, NOW)]
    store.commit(Changes(confirmed=[confirmed], parked=given_up, attempts=given_up))


def steps(path: Path, wanted: Times) -> list[tuple[str, int]]:
    """What is told while it is pruned: kinds, and how many of each are gone so far."""
    told: list[tuple[str, int]] = []
    prune(outbox_at(path), wanted, progress=lambda what, count: told.append((what, count)))
    return told


def steps_of(kind: str, path: Path, wanted: Times) -> list[int]:
    return [count for what, count in steps(path, wanted) if what == kind]


@pytest.mark.usefixtures("one_of_each")
def test_nothing_goes_unless_its_kind_is_named(path: Path) -> None:
    assert pruned_as_foreseen(path, times()).messages == 0
    assert (count(path, "confirmed"), count(path, "parked"), count(path, "messages")) == (1, 2, 1)


def test_what_was_confirmed_long_ago_goes(path: Path, store: SqliteStore, clock: Clock) -> None:
    old, new = stored(store, 1_200), stored(store, 3)
    store.commit(Changes(confirmed=old))
    clock.now += 100
    store.commit(Changes(confirmed=new))
    wanted = times(confirmed_before=NOW + 50)
    assert foresee(outbox_at(path), wanted).confirmed == 1_200
    assert steps_of("confirmed", path, wanted) == [1_000, 1_200]
    assert count(path, "confirmed") == 3


def test_what_was_given_up_long_ago_is_discarded(
    path: Path, store: SqliteStore, clock: Clock
) -> None:
    entries = stored(store, 4)
    for entry, outcome in zip(entries, (REFUSED, LATE, REFUSED, LATE), strict=True):
        store.commit(Changes(parked=[Attempt(entry, "1-1", 1, outcome, clock.now)]))
        clock.now += 10
    found = pruned_as_foreseen(path, times(parked_before=NOW + 15, expired_before=NOW + 15))
    assert (found.parked, found.expired) == (1, 1)
    status = Outbox(path).status()
    assert (status.parked, status.expired, status.discarded) == (1, 1, 2)
    assert [touched.action for touched in store.touched()] == ["discard"] * 2
    assert (
        store.commit(Changes(new=[Entry(Message(b"", message_id="m"), NOW)])).counters.open == 1
    ), "it goes on"


def test_history_goes_with_its_message(
    path: Path, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "_NUMBERS", 2)
    gone, there = stored(store, 2)
    attempts = [Attempt(entry, "1-1", 1, REFUSED, NOW) for entry in (gone, there) * 3]
    store.commit(Changes(confirmed=[gone], attempts=attempts))
    assert pruned_as_foreseen(path, times(history_before=NOW)).attempts == 0, "too new"
    assert pruned_as_foreseen(path, times(history_before=NOW + 1)).attempts == 3
    assert count(path, "attempts") == 3


def test_earlier_interventions_of_what_is_discarded_are_foreseen(
    path: Path, store: SqliteStore
) -> None:
    old, new, late, there = stored(store, 4)
    given_up = [Attempt(late, "1-1", 1, LATE, NOW)]
    store.commit(Changes(parked=given_up, attempts=given_up))
    for entry, at in ((old, NOW), (new, NOW + 50), (there, NOW)):
        park = Intervention(Action.PARK)
        intervene(outbox_at(path), [entry.id], park, clock=lambda at=at: at)  # type: ignore[misc]
    intervene(outbox_at(path), [there.id], Intervention(Action.RETRY), clock=lambda: NOW)
    wanted = times(history_before=NOW + 10, now=NOW + 70)
    assert pruned_as_foreseen(path, wanted).interventions == 0
    found = pruned_as_foreseen(path, replace(wanted, parked_before=NOW + 10))
    assert (found.parked, found.interventions) == (1, 1)
    found = pruned_as_foreseen(path, replace(wanted, expired_before=NOW + 10))
    assert (found.expired, found.interventions) == (1, 0)


def test_the_newest_intervention_stays_because_the_relay_counts_by_it(
    path: Path, store: SqliteStore
) -> None:
    ids = [entry.id for entry in stored(store, 3)]
    intervene(outbox_at(path), ids, Intervention(Action.DISCARD), clock=lambda: NOW)
    assert [found.id for found in store.touched()] == ids
    wanted = times(history_before=NOW + 1, now=NOW + pruning.UNREAD_S)
    assert pruned_as_foreseen(path, wanted).interventions == 0, "a relay may still have to read it"
    wanted = replace(wanted, now=NOW + pruning.UNREAD_S + 1)
    assert pruned_as_foreseen(path, wanted).interventions == 2
    stored(store, 1)
    assert Outbox(path).status().open == 1, "nothing has changed behind its back"


def test_keys_are_forgotten_when_their_time_is_over_and_their_message_is_gone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)
    monkeypatch.setattr(pruning, "CHUNK", 2)
    with Outbox(path) as outbox:
        for n in range(5):
            outbox.enqueue(Message(b""), key=f"k{n}")
    intervene(outbox_at(path), [1, 2, 3], Intervention(Action.DISCARD))
    late = NOW + 8 * 86_400
    assert pruned_as_foreseen(path, times()).keys == 0
    assert pruned_as_foreseen(path, times(now=late)).keys == 3
    assert count(path, "keys") == 2


def parked_mebibytes(store: SqliteStore, count: int) -> None:
    entries = stored(store, count * 16, bytes(65_536))
    store.commit(Changes(parked=[Attempt(entry, "1-1", 1, REFUSED, NOW) for entry in entries]))


def test_the_file_gives_its_space_back(path: Path, store: SqliteStore) -> None:
    parked_mebibytes(store, 4)
    store.close()
    before = path.stat().st_size
    found = prune(outbox_at(path), times(parked_before=NOW))
    assert found.bytes_given_back > 4 << 20
    assert path.stat().st_size == before - found.bytes_given_back
    assert found.bytes_unused == 0


def test_pages_are_cut_off_until_the_time_of_a_step_is_over(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(SqliteStore(path, clock=lambda: NOW)) as store:
        parked_mebibytes(store, 1)
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    told = steps_of("bytes", path, times(parked_before=NOW))
    assert told[0] > 100, "it never is"
    assert told == [told[0]] * 2


def test_the_database_of_an_application_keeps_its_length_and_that_is_foreseen(path: Path) -> None:
    sql(path, "CREATE TABLE orders (id)")
    path.chmod(0o600)
    with closing(SqliteStore(path, clock=lambda: NOW)) as store:
        parked_mebibytes(store, 1)
    found = prune(outbox_at(path), times(parked_before=NOW))
    assert (found.parked, found.bytes_given_back) == (16, 0)
    assert foresee(outbox_at(path), times()).bytes_unused == found.bytes_unused > 1 << 20


def test_history_goes_in_stretches(
    path: Path, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "_NUMBERS", 2)
    entries = stored(store, 4)
    attempts = [Attempt(entry, "1-1", n, REFUSED, NOW) for n, entry in enumerate(entries, 1)]
    store.commit(Changes(confirmed=entries, attempts=attempts))
    wanted = times(confirmed_before=NOW, history_before=NOW + 1)
    assert steps_of("attempts", path, wanted) == [2, 4], "and no step for nothing"
    assert count(path, "attempts") == 0


@pytest.mark.usefixtures("one_of_each")
def test_who_waits_is_told_of_each_kind_and_no_reason_is_made_up(path: Path) -> None:
    told = dict(steps(path, times(confirmed_before=NOW, parked_before=NOW, expired_before=NOW)))
    kinds = ("parked", "expired", "confirmed", "attempts", "interventions", "keys", "bytes")
    assert told == dict.fromkeys(kinds, 0) | {"parked": 1, "expired": 1, "confirmed": 1}
    notes = sql(path, "SELECT action, note FROM reliablepub_interventions")
    assert notes == [("discard", "")] * 2


def test_the_log_is_left_to_the_relay(
    path: Path, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(store, 4)
    before = path.read_bytes()
    monkeypatch.setattr("reliablepub.outbox.sqlite.checkpoints.CHECKPOINT_BYTES", PAGE_BYTES)
    assert intervene(outbox_at(path), [1, 2], Intervention(Action.PARK)).changed == 2
    pruned = prune(outbox_at(path), times(parked_before=1e12, history_before=1e12, now=1e13))
    assert (pruned.parked, pruned.interventions) == (2, 3)
    assert path.read_bytes() == before


def test_people_step_in_a_few_messages_at_a_time(
    path: Path, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reliablepub.outbox.admin.interventions.CHUNK", 2)
    stored(store, 5)
    told: list[int] = []
    effect = intervene(
        outbox_at(path), range(1, 6), Intervention(Action.PARK), progress=told.append
    )
    assert (effect.changed, told) == (5, [2, 4, 5])


def test_what_is_damaged_can_be_discarded(path: Path, store: SqliteStore) -> None:
    stored(store, 2)
    sql(path, "UPDATE reliablepub_messages SET body = x'00' WHERE id = 1")
    assert intervene(outbox_at(path), [1, 2], Intervention(Action.DISCARD)).changed == 2
    assert count(path, "messages") == 0


@pytest.mark.parametrize("address", [{"exchange": "x" * 256}, {"routing_key": "x" * 256}])
def test_nothing_is_sent_where_no_message_can_go(address: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessage):
        Intervention(Action.REROUTE, **address)


def test_who_has_no_name_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", Mock(side_effect=KeyError))
    assert Intervention(Action.PARK).person.split("@")[0] == str(os.geteuid())


def test_whatever_kind_it_was_is_a_message() -> None:
    assert Pruned(confirmed=1, parked=20, expired=300, attempts=4_000).messages == 321


def test_the_log_stays_short_without_a_relay(
    path: Path, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reliablepub.outbox.sqlite.checkpoints.LOG_BYTES_LONG", 1 << 20)
    parked_mebibytes(store, 6)
    store.close()
    longest = 0
    log = path.with_name(path.name + "-wal")

    def look(_what: str, _count: int) -> None:
        nonlocal longest
        longest = max(longest, log.stat().st_size)

    monkeypatch.setattr("reliablepub.outbox.admin.interventions.CHUNK", 8)
    prune(outbox_at(path), times(parked_before=NOW), progress=look)
    assert 0 < longest < 4 << 20


@pytest.mark.parametrize("ask", [foresee, prune])
def test_a_file_that_is_no_outbox_is_left_alone(path: Path, ask: Callable[..., Pruned]) -> None:
    with pytest.raises(NotAnOutbox):
        ask(outbox_at(path), times())
    assert not path.exists()
