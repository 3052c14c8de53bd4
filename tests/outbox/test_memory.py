"""What only the store without a disk could get wrong."""

from dataclasses import replace

from reliablepub.outbox.entry import Attempt, Changes, Entry
from reliablepub.outbox.memory import _CROWDED_MIN, MemoryStore
from reliablepub.outcome import Outcome, OutcomeKind
from tests.asking import stored
from tests.outbox.conftest import Make


def test_times_that_are_no_longer_true_do_not_pile_up(entry: Make) -> None:
    store = MemoryStore()
    new = stored(store, *(entry() for _ in range(_CROWDED_MIN + 200)))
    for round_ in range(10):
        for one in new:
            one.due_at = float(100 * round_ + one.id % 7)
        store.commit(Changes(rescheduled=new))
        assert len(store._waiting._heap) <= 2 * len(new) + 1
    found, next_at = store.read_due(901.0, limit=9999, bytes_max=1 << 30, loaded=())
    assert [one.id for one in found] == [
        one.id for end in (0, 1) for one in new if one.id % 7 == end
    ]
    assert next_at == 902.0
    few = new[:10]
    store.commit(Changes(confirmed=new[10:]))
    for _ in range(1000):
        store.commit(Changes(rescheduled=few))
        assert len(store._waiting._heap) <= 2 * len(new) + 1
    assert len(store._waiting._heap) <= _CROWDED_MIN + 1


def test_a_flush_passes_what_has_gone_since_a_message_for_tomorrow(entry: Make) -> None:
    def delayed() -> Entry:
        one = entry()
        one.due_at = 86_400.0
        return one

    store = MemoryStore()
    store.commit(Changes(new=[delayed()]))
    store._snapshot = replace(store.snapshot(), last_id=10**12)
    assert store.lowest_awaited(0, 0.0) is None
    store.commit(Changes(new=[entry(), delayed(), entry()]))
    found = [store.lowest_awaited(first, 0.0) for first in (0, 10**12 + 1, 10**12 + 2)]
    assert found == [10**12 + 1, 10**12 + 1, 10**12 + 3]
    assert store.lowest_awaited(10**12 + 4, 0.0) is None


def test_what_expires_behind_another_of_its_key_leaves_nothing(entry: Make) -> None:
    store = MemoryStore()
    first, second = entry(ordering_key="a"), entry(ordering_key="a")
    store.commit(Changes(new=[first, second]))
    outcome = Outcome(OutcomeKind.EXPIRED)
    for _ in range(100):
        one = entry(ordering_key="a", expires_in_s=1.0)
        store.commit(Changes(new=[one]))
        store.commit(Changes(parked=[Attempt(one, "", 0, outcome, 0.0)]))
    assert {key: list(ids) for key, ids in store._by_key.items()} == {"a": [first.id, second.id]}
    store.commit(Changes(confirmed=[first]))
    assert store.read_first(["a"], 0.0, bytes_max=1_000) == ([second], 1)
    store.commit(Changes(confirmed=[second]))
    assert store._by_key == {}
