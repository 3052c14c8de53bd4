"""What waits in a store: for its turn, its time, its end, its destination."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.entry import HELD, Changes, Entry, HeldExchange, Intervened, Release, Store
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.sqlite.sql import QUERIES
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.asking import park
from tests.outbox.conftest import Make
from tests.sqlite import sql

ALL = {"limit": 1000, "bytes_max": 10**9}


def ids(entries: list[Entry]) -> list[int]:
    return [entry.id for entry in entries]


def store_keyed(store: Store, entry: Make, *keys: str | None) -> list[Entry]:
    """One entry for each key; all of one size."""
    new = [entry(message_id=f"m-{n}", ordering_key=key, body=b"x") for n, key in enumerate(keys)]
    store.commit(Changes(new=new))
    return new


# ------------------------------------------------------------------------------------- its turn


def test_the_first_of_each_key_is_found(any_store: Store, entry: Make) -> None:
    new = store_keyed(any_store, entry, "a", "b", "a", "b", None)
    found, looked_at = any_store.read_first(["b", "unknown", "a"], 0.0, bytes_max=10**9)
    assert (ids(found), looked_at) == ([2, 1], 3)
    any_store.commit(Changes(confirmed=[new[0]]))
    found, looked_at = any_store.read_first(["a"], 0.0, bytes_max=10**9)
    assert (ids(found), looked_at) == ([3], 1)
    assert any_store.read_first([], 0.0, bytes_max=10**9) == ([], 0)


def test_looking_for_the_first_ones_stops_where_no_more_fit(any_store: Store, entry: Make) -> None:
    size = store_keyed(any_store, entry, "a", "b", "c")[0].message.size
    keys = ["a", "b", "c"]
    for bytes_max, count in ((0, 1), (2 * size - 1, 1), (2 * size, 2), (3 * size, 3)):
        found, looked_at = any_store.read_first(keys, 0.0, bytes_max=bytes_max)
        assert (ids(found), looked_at) == ([1, 2, 3][:count], count)


def test_the_first_of_a_key_is_not_found_before_it_is_due(any_store: Store, entry: Make) -> None:
    new = store_keyed(any_store, entry, "a", "a")
    new[0].due_at = 50.0
    any_store.commit(Changes(rescheduled=[new[0]]))
    assert any_store.read_first(["a"], 49.9, bytes_max=10**9) == ([], 1)
    assert ids(any_store.read_first(["a"], 50.0, bytes_max=10**9)[0]) == [1]


def test_a_parked_one_holds_its_key(store: SqliteStore, entry: Make) -> None:
    new = store_keyed(store, entry, "a", "a", "b")
    park(store, new[0])
    found, looked_at = store.read_first(["a", "b"], 0.0, bytes_max=10**9)
    assert (ids(found), looked_at) == ([3], 2)


def test_what_is_due_before_its_turn_waits_for_its_turn_alone(
    any_store: Store, entry: Make
) -> None:
    new = store_keyed(any_store, entry, "a", "a")
    new[1].due_at = 50.0
    any_store.commit(Changes(rescheduled=[new[1]]))
    assert any_store.read_due(60.0, loaded=(), **ALL) == ([], None)
    any_store.commit(Changes(confirmed=[new[0]]))
    assert any_store.read_due(60.0, loaded=(), **ALL) == ([], None), "it has no time any more"
    assert ids(any_store.read_ready(1, 9, **ALL)[0]) == [2]


# -------------------------------------------------------------------------------------- its end


def store_mortal(store: Store, entry: Make, *ends: float | None, key: str | None) -> int:
    """One entry for each time; their size."""
    new = [entry(message_id=f"m-{n}", ordering_key=key, body=b"x") for n in range(len(ends))]
    for one, end in zip(new, ends, strict=True):
        one.expires_at = end
    store.commit(Changes(new=new))
    return new[0].message.size


@pytest.mark.parametrize("key", [None, "all of one"])
def test_what_has_expired_is_found_the_earliest_first_and_out_of_turn(
    any_store: Store, entry: Make, key: str | None
) -> None:
    store_mortal(any_store, entry, 50.0, None, 30.0, 40.0, key=key)
    assert any_store.read_expired(29.9, loaded=(), **ALL) == ([], 30.0)
    found, next_at = any_store.read_expired(40.0, loaded=(), **ALL)
    assert (ids(found), next_at) == ([3, 4], 50.0)
    found, next_at = any_store.read_expired(60.0, loaded={4}, **ALL)
    assert (ids(found), next_at) == ([3, 1], None)


def test_looking_for_what_has_expired_stops_at_each_limit(any_store: Store, entry: Make) -> None:
    size = store_mortal(any_store, entry, 10.0, 20.0, 30.0, key=None)
    found, next_at = any_store.read_expired(60.0, limit=2, bytes_max=10**9, loaded=())
    assert (ids(found), next_at) == ([1, 2], 30.0)
    for bytes_max, expected in ((0, ([1], 20.0)), (2 * size, ([1, 2], 30.0))):
        found, next_at = any_store.read_expired(60.0, limit=9, bytes_max=bytes_max, loaded=())
        assert (ids(found), next_at) == expected


@pytest.mark.parametrize("reads", ["read_due", "read_expired"])
def test_what_has_come_is_not_read_past_a_persons_change(
    store: SqliteStore, entry: Make, reads: str
) -> None:
    store_mortal(store, entry, 10.0, 10.0, key=None)
    read = getattr(store, reads)
    assert intervene(outbox_at(store.path), [1], Intervention(Action.PARK)).changed == 1
    with pytest.raises(Intervened):
        read(60.0, loaded=(), **ALL)
    assert [touched.id for touched in store.touched()] == [1]
    read(60.0, loaded=(), **ALL)


# ------------------------------------------------------------------------- who waits for whom


def test_what_its_sender_put_off_is_not_awaited_and_a_retry_is(
    any_store: Store, entry: Make
) -> None:
    new = [entry() for _ in range(8)]
    for one in new[:6]:
        one.due_at = 50.0
    new[2].uncertain = new[3].nacked = new[4].returned = new[5].refused = 1
    new[6].due_at = HELD
    any_store.commit(Changes(new=new))
    for first_id, at, expected in (
        *((0, 50.0, 1), (2, 50.0, 2), (0, 49.9, 4)),
        *((5, 0.0, 5), (6, 0.0, 6), (7, 0.0, 7), (8, 0.0, 8), (9, 99.0, None)),
    ):
        assert any_store.lowest_awaited(first_id, at) == expected
    any_store.commit(Changes(confirmed=[new[0], new[7]]))
    assert any_store.lowest_awaited(0, 50.0) == 2
    assert any_store.lowest_awaited(8, 50.0) is None


# ------------------------------------------------------------------------------ its destination


def held(entries: Iterable[Entry]) -> list[Entry]:
    """They wait for their destination, since 100, 101 and so on."""
    all_ = list(entries)
    for number, one in enumerate(all_):
        one.due_at, one.refused_at = HELD, 100.0 + number
    return all_


def test_what_is_held_is_released_by_address_the_lowest_ids_first(
    any_store: Store, entry: Make
) -> None:
    new = [entry(routing_key=key) for key in "aabab"]
    for one in new[:4]:
        one.due_at = HELD
    any_store.commit(Changes(new=new))
    probe = Release("orders", "a", 1, is_counted=True)
    none = Release("elsewhere", "a", 9, is_counted=True)
    any_store.commit(Changes(released=[probe, none]))
    assert (probe.count, probe.left, none.count, none.left) == (1, 2, 0, 0)
    assert ids(any_store.read_due(0.0, loaded=(), **ALL)[0]) == [1], "by any clock"
    rest = Release("orders", "a", 9)
    any_store.commit(Changes(released=[rest]))
    assert (rest.count, rest.left) == (2, None)
    others = Release(None, None, 9)
    any_store.commit(Changes(released=[others]))
    assert others.count == 1
    assert ids(any_store.read_due(60.0, loaded=(), **ALL)[0]) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("exchange", "routing_key", "pages"),
    [
        (None, None, [[2, 3], [4, 5], [6, 7], [8, 9]]),
        ("x", None, [[3, 4], [6, 7], [9]]),
        ("x", "a", [[4, 6], [9]]),
    ],
)
def test_what_is_held_is_released_page_by_page_the_oldest_first(
    any_store: Store,
    entry: Make,
    exchange: str | None,
    routing_key: str | None,
    pages: list[list[int]],
) -> None:
    """What is held again, up to the id after which a page begins, is not found a second time."""
    addresses = zip("xwxxwxxwx", "cababacaa", strict=True)
    new = held(entry(exchange=name, routing_key=key) for name, key in addresses)
    any_store.commit(Changes(new=new))
    after = 1
    for expected in pages:
        page = Release(exchange, routing_key, 2, after=after)
        any_store.commit(Changes(released=[page]))
        entries, _ = any_store.read_due(0.0, loaded=(), **ALL)
        assert ids(entries) == expected
        assert (page.count, page.last) == (len(expected), expected[-1])
        after = page.last
        any_store.commit(Changes(rescheduled=held(entries)))
    none = Release(exchange, routing_key, 2, after=after)
    any_store.commit(Changes(released=[none]))
    assert (none.count, none.last) == (0, 0)


def test_what_is_held_and_leaves_is_not_counted(any_store: Store, entry: Make) -> None:
    new = held(entry(routing_key="a") for _ in range(4))
    any_store.commit(Changes(new=new))
    any_store.commit(Changes(confirmed=new[:2]))
    probe = Release("orders", "a", 1, is_counted=True)
    any_store.commit(Changes(released=[probe]))
    assert (probe.count, probe.left) == (1, 1)


def test_exchanges_for_which_messages_wait_are_found_on_disk(
    store: SqliteStore, path: Path, entry: Make
) -> None:
    new = held(entry(exchange=exchange, routing_key=str(n)) for n, exchange in enumerate("baba"))
    store.commit(Changes(new=[*new, entry(exchange="c")]))
    expected = [HeldExchange("a", 2, 101.0), HeldExchange("b", 2, 100.0)]
    assert store.held_exchanges(9) == expected
    assert store.held_exchanges(1) == expected[:1]
    sql(path, "UPDATE reliablepub_messages SET exchange = CAST(x'ff' AS TEXT) WHERE id = 1")
    assert [one.exchange for one in store.held_exchanges(9)] == ["a", "b", None]


def test_what_is_held_is_found_by_an_index(store: SqliteStore, path: Path) -> None:
    values = {"exchange": "", "routing_key": "", "id": 0, "limit": 1}
    with closing(sqlite3.connect(path)) as db:
        for name, found_by in (
            ("held", "waiting (due_at=? AND rowid>?)"),
            ("held_of_exchange", "held_of_exchange (exchange=? AND rowid>?)"),
            ("held_of_address", "held (exchange=? AND routing_key=? AND rowid>?)"),
            ("count_held_of_exchange", "held (exchange=?)"),
            ("count_held_of_address", "held (exchange=? AND routing_key=?)"),
            ("held_exchanges", "held"),
        ):
            given = (1,) if name == "held_exchanges" else values
            [step] = db.execute(f"EXPLAIN QUERY PLAN {QUERIES[name]}", given)
            assert step[3].endswith(f"INDEX reliablepub_messages_{found_by}")
