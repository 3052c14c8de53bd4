"""What operators do, in each database: to what they selected, and as a dry run has told."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from reliablepub import Outbox, OutboxError
from reliablepub.outbox.admin import interventions, pruning
from reliablepub.outbox.admin.interventions import Action, Effect, Intervention, foresee, intervene
from reliablepub.outbox.admin.pruning import Times, prune
from reliablepub.outbox.admin.selection import Selection, find_ids, those_that_match
from reliablepub.outbox.entry import Attempt, Changes, Store
from reliablepub.outbox.opening import outbox_at
from reliablepub.outcome import NACKED
from tests.asking import stored
from tests.between import after
from tests.outbox.conftest import Make
from tests.outcomes import RETURNED
from tests.stores import Where, open_store

PARKED = Selection(states=("parked",), reason="no_route")


@pytest.fixture
def store(where: Where) -> Iterator[Store]:
    store = open_store(where)
    yield store
    store.close()


@pytest.fixture
def parked(store: Store, where: Where, entry: Make) -> Where:
    """Messages 1 to 4; 2 and 3 are parked, and 3 was nacked before."""
    new = stored(store, *(entry() for _ in range(4)))
    new[2].nacked = 1
    given_up = [Attempt(one, "1-1", one.id, RETURNED, 50.0) for one in new[1:3]]
    nacked = Attempt(new[2], "1-1", 9, NACKED, 40.0)
    store.commit(Changes(parked=given_up, attempts=[*given_up, nacked]))
    return where


def states(where: Where) -> dict[int, str]:
    with outbox_at(where).reading() as session:
        rows = (next(session.rows("one_message", {"id": id_}), None) for id_ in range(1, 5))
        return {row["id"]: row["state"] for row in rows if row is not None}


def test_what_no_longer_matches_is_left_alone(parked: Where) -> None:
    database = outbox_at(parked)
    ids = find_ids(database, PARKED)
    assert ids == [2, 3]
    assert intervene(database, [2], Intervention(Action.RETRY)).changed == 1
    with database.reading() as session:
        assert those_that_match(session, PARKED, [1, 2, 3, 4, 99]) == {3}
    effect = intervene(database, ids, Intervention(Action.DISCARD), selection=PARKED)
    assert (effect.changed, effect.unfit, effect.possible) == (1, [2], [3])
    assert states(parked) == {1: "ready", 2: "ready", 4: "ready"}


def test_nor_is_it_pruned(parked: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    database = outbox_at(parked)
    times = Times(parked_before=60.0, history_before=45.0, now=120.0)
    foreseen = pruning.foresee(database, times)
    assert (foreseen.parked, foreseen.expired, foreseen.interventions) == (2, 0, 0)
    retry = Intervention(Action.RETRY)
    after(monkeypatch, pruning, "find_ids", lambda *_: intervene(database, [2], retry))
    assert prune(database, times).parked == 1
    assert states(parked) == {1: "ready", 2: "ready", 4: "ready"}


@pytest.mark.parametrize("action", ["park", "retry", "discard", "reroute"])
def test_a_dry_run_tells_what_a_run_does(parked: Where, action: str) -> None:
    database, what = outbox_at(parked), Intervention(Action(action), exchange="x" * 9)
    ids = [1, 2, 3, 4, 99]  # the last one may have been confirmed since it was found
    before = states(parked)
    foreseen = foresee(database, ids, what)
    assert states(parked) == before
    assert asdict(foreseen) == asdict(intervene(database, ids, what))
    assert foreseen != Effect()


def test_what_was_put_back_before_an_error_stays(
    parked: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No relay can commit during a transaction, so one for all messages would last too long."""
    monkeypatch.setattr(interventions, "CHUNK", 1)
    change = interventions.change

    def failing(session: Any, ids: list[int], *others: Any, **named: Any) -> Effect:
        if 3 in ids:
            raise OutboxError("failed")
        return change(session, ids, *others, **named)

    monkeypatch.setattr(interventions, "change", failing)
    with Outbox(parked) as outbox, pytest.raises(OutboxError, match="failed"):
        outbox.retry()
    assert states(parked) == {1: "ready", 2: "ready", 3: "parked", 4: "ready"}


@pytest.mark.parametrize("read_bytes", [1, 500, 10**9])
def test_messages_are_rerouted_so_many_at_a_time_as_memory_holds(
    store: Store, where: Where, entry: Make, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(interventions, "_READ_BYTES", read_bytes)
    new = stored(store, *(entry(body=bytes(10 * n), headers={"n": n}) for n in range(12)))
    parked = [Attempt(one, "1-1", 1, RETURNED, 9.0) for one in new[6:]]
    store.commit(Changes(parked=parked, attempts=parked))
    store.close()
    what = Intervention(Action.REROUTE, exchange="a much longer name", routing_key="to")
    ids = [one.id for one in new]
    assert foresee(outbox_at(where), ids, what).changed == 12
    assert intervene(outbox_at(where), ids, what).changed == 12
    with Outbox(where) as outbox:
        assert outbox.audit().is_right
        rows = list(outbox.rows("open"))
    assert {(row["exchange"], row["routing_key"]) for row in rows} == {("a much longer name", "to")}
    assert len(rows) == 12
