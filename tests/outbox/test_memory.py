"""What only the store without a disk could get wrong."""

from reliablepub.outbox.entry import Changes
from reliablepub.outbox.memory import _CROWDED_MIN, MemoryStore
from tests.outbox.conftest import Make


def test_times_that_are_no_longer_true_do_not_pile_up(entry: Make) -> None:
    store = MemoryStore()
    new = [entry() for _ in range(_CROWDED_MIN + 200)]
    store.commit(Changes(new=new))
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
