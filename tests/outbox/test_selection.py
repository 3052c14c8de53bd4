"""Messages are found by every condition there is, in every order, up to the limit."""

import math
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from reliablepub.outbox.admin.selection import (
    GIVEN_UP_STATES,
    OPEN_STATES,
    Selection,
    find,
    find_ids,
    those_that_match,
)
from reliablepub.outbox.entry import Attempt, Changes
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import NACKED, Outcome, OutcomeKind
from tests.outbox.conftest import Make
from tests.outcomes import RETURNED

MATCHES = sqlite3.connect(":memory:", check_same_thread=False)
LATE = Outcome(OutcomeKind.EXPIRED, 0, "its deadline passed")


@pytest.fixture
def filled(store: SqliteStore, path: Path, entry: Make) -> Path:
    """Stored at 1001 to 1008; 2 is paused, 3 waits, 4 and 6 are parked, 5 has expired."""
    sizes = {7: 50, 4: 50, 1: 20}
    new = [
        entry(body=bytes(sizes.get(n, 1)), ordering_key="k" if n > 6 else None) for n in range(1, 9)
    ]
    store.commit(Changes(new=new))
    new[1].due_at, new[1].nacked, new[2].due_at = math.inf, 2, 9e9
    new[3].returned, new[5].returned, new[6].nacked, new[7].uncertain = 2, 1, 1, 1
    nacked = [Attempt(new[1], "1-1", 1, NACKED, 5.0), Attempt(new[6], "1-1", 2, RETURNED, 6.0)]
    store.commit(Changes(rescheduled=[new[1], new[2], *new[6:]], attempts=nacked))
    given_up = [
        Attempt(new[3], "1-1", 3, RETURNED, 50.0),
        Attempt(new[4], "1-1", 4, LATE, 60.0),
        Attempt(new[5], "1-1", 5, RETURNED, 70.0),
    ]
    before = Attempt(new[5], "1-1", 5, NACKED, 60.0)
    store.commit(Changes(parked=given_up, attempts=[*given_up[:2], before]))
    return path


def ids(path: Path, *, sort: str = "id", limit: int = 99, **conditions: Any) -> list[int]:
    return [
        row["id"] for row in find(outbox_at(path), Selection(**conditions), sort=sort, limit=limit)
    ]


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"states": ("ready",)}, [1, 7, 8]),
        ({"states": ("waiting",)}, [2, 3]),
        ({"states": ("parked",)}, [4, 6]),
        ({"states": ("expired",)}, [5]),
        ({"states": OPEN_STATES}, [1, 2, 3, 7, 8]),
        ({"states": GIVEN_UP_STATES}, [4, 5, 6]),
        ({"states": ("ready", "expired")}, [1, 5, 7, 8]),
        ({"states": ()}, []),
        ({"exchange": "ord*", "routing_key": "creat?d"}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"exchange": "ORD*"}, []),
        ({"ordering_key": "[k]"}, [7, 8]),
        ({"reason": "no_route"}, [4, 6, 7]),
        ({"reason": "nack"}, [2]),
        ({"reason": "312"}, [4, 6, 7]),
        ({"stored_before": 1002.0}, [1, 2]),
        ({"stored_after": 1007.0}, [7, 8]),
        ({"stored_after": 1002.0, "stored_before": 1002.0}, [2]),
        ({"given_up_before": 60.0}, [4, 5]),
        ({"given_up_before": 49.9}, []),
        ({"given_up_before": 60.0, "states": ("parked",)}, [4]),
    ],
)
def test_each_condition_is_asked(
    filled: Path, conditions: dict[str, Any], expected: list[int]
) -> None:
    assert ids(filled, **conditions) == expected
    found = find_ids(outbox_at(filled), Selection(**conditions))
    assert sorted(found) == expected
    with outbox_at(filled).reading() as session:
        for part in ([], [1], [2, 4, 99], [8, 7, 6, 5, 4, 3, 2, 1]):
            assert those_that_match(session, Selection(**conditions), part) == {*part} & {*expected}
    given_up = {4, 5, 6}
    assert found == sorted(found, key=lambda id_: (id_ in given_up, id_)), "table by table"


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("id", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("age", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("attempts", [2, 4, 6, 7, 8, 1, 3, 5]),
        ("size", [4, 7, 1, 2, 3, 5, 6, 8]),
    ],
)
def test_orders_are_those_of_both_tables_together(
    filled: Path, sort: str, expected: list[int]
) -> None:
    sizes = {row["id"]: row["size"] for row in find(outbox_at(filled), Selection(), limit=99)}
    if sort == "size":
        expected = sorted(expected, key=lambda id_: (-sizes[id_], id_))
    for limit in (1, 3, 99):
        assert ids(filled, sort=sort, limit=limit) == expected[:limit]


def test_what_was_said_last_is_told(filled: Path) -> None:
    rows = {row["id"]: row for row in find(outbox_at(filled), Selection(), limit=99)}
    said = {n: (row["outcome"], row["reply_code"], row["reply_text"]) for n, row in rows.items()}
    assert said[1] == said[3] == said[8] == (None, None, None), "8 was brought here without it"
    assert said[2] == ("nacked", 0, NACKED.reply_text)
    assert said[7] == said[4] == said[6] == ("returned", 312, "NO_ROUTE")
    assert [rows[n]["state"] for n in (1, 2, 4, 5)] == ["ready", "waiting", "parked", "expired"]
    assert [rows[n]["due_at"] for n in (1, 2, 3, 4)] == [None, None, 9e9, None]
    assert [rows[n]["parked_at"] for n in (1, 4)] == [None, 50.0]
    assert len({tuple(row) for row in rows.values()}) == 1, "the same names in all"


def test_states_that_were_asked_for_stay(filled: Path) -> None:
    assert Selection().within(("parked",)).states == ("parked",)
    assert Selection(states=("ready",)).within(("parked",)).states == ("ready",)
    assert Selection(exchange="x").within(("parked",)).exchange == "x"


GLOBS = st.text("ab-^[]*?.\\é\n", max_size=8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(glob=GLOBS, texts=st.lists(st.text("ab-^[]*?.\\é\n", max_size=6), max_size=9))
@example(glob="[^e]*", texts=["e", "ab", "^"])
@example(glob="[]a-]*", texts=["]", "-", "ab"])
@example(glob="[a-b]?", texts=["a-", "b", "-b"])
@example(glob="[b-a]", texts=["a", "b", ""])
@example(glob="[^b-a]", texts=["a", "b", ""])
@example(glob="[a-b-é]", texts=["a", "-", "é", "c"])
@example(glob="a[]*", texts=["a", "a]"])
@example(glob="[^]", texts=["^", "a"])
@example(glob="a.b", texts=["axb", "a.b"])
def test_a_pattern_means_the_same_in_both_databases(
    postgres_outbox: str, glob: str, texts: list[str]
) -> None:
    with outbox_at(postgres_outbox).reading() as session:
        for text in texts:
            values = {"text": text, "pattern": session.pattern(glob)}
            (there,) = session.select("SELECT :text ~ :pattern AS it", values)
            assert there["it"] == MATCHES.execute("SELECT ? GLOB ?", (text, glob)).fetchone()[0]
