"""What a relay that runs for weeks keeps of messages that are gone: alike in both databases."""

from collections.abc import Callable
from pathlib import Path

from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.entry import Attempt, Changes, Store
from reliablepub.outbox.opening import outbox_at
from tests.outbox.conftest import Clock, Make
from tests.outcomes import REFUSED

DAY_S = 86_400.0


def outlive_the_history(
    store: Store,
    clock: Clock,
    entry: Make,
    *,
    where: str | Path,
    count: Callable[[str], int],
    ids_of_attempts: Callable[[], list[tuple[int]]],
) -> None:
    """Let ten messages age, some of them gone, in a store that looks for old rows at each turn.

    Args:
        store: the store, which is empty.
        clock: its clock.
        entry: makes a new entry.
        where: the outbox, as operators name it.
        count: counts the rows of ``attempts`` or ``interventions``.
        ids_of_attempts: selects the ids of messages that have attempts, in order.
    """
    entries = [entry() for _ in range(10)]
    store.commit(Changes(new=entries))
    for one in entries:
        attempts = [Attempt(one, "1-1", number, REFUSED, clock.now) for number in (1, 2, 3)]
        one.refused = 3
        store.commit(Changes(rescheduled=[one], attempts=attempts))
    intervene(outbox_at(where), [2, 3], Intervention(Action.PARK), clock=clock)
    intervene(outbox_at(where), [3], Intervention(Action.DISCARD), clock=clock)
    assert store.changed_elsewhere()
    clock.now += 8 * DAY_S
    store.relieve()
    assert len(store.touched()) == 3, "however old, until the relay has read them"
    clock.now -= 8 * DAY_S
    store.commit(Changes(confirmed=[entries[0], *entries[4:]]))

    def history() -> tuple[int, int]:
        for _ in range(50):
            assert store.relieve() == ""
        return count("attempts"), count("interventions")

    before = history()
    assert before[0] >= 30
    clock.now += 6 * DAY_S
    assert history() == before
    clock.now += 2 * DAY_S
    store.commit(Changes(attempts=[Attempt(entries[9], "1-1", 4, REFUSED, clock.now)]))
    assert history() != before
    left = ids_of_attempts()
    assert left == [(2,), (3,), (4,), (10,)], "open, parked, with interventions, or young"
    assert count("interventions") == 2, "of a parked message, and the newest"
