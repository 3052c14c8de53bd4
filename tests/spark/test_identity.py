"""The identity of rows, without Spark: what must hold for every content and every order."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from spark_sink.identity import ByContent, ByPosition, Identity

ROWS = st.lists(
    st.tuples(st.binary(max_size=3), st.tuples(st.sampled_from(["a", "b"]), st.none())), max_size=30
)
Row = tuple[bytes, tuple[object, ...]]


def ids_of(identity: Identity, rows: list[Row]) -> list[str]:
    return identity([body for body, _ in rows], [rest for _, rest in rows])


def id_of(identity: Identity, body: bytes, rest: tuple[object, ...] = ()) -> str:
    return ids_of(identity, [(body, rest)])[0]


@given(ROWS)
def test_within_a_task_no_two_rows_share_an_id(rows: list[Row]) -> None:
    assert len(set(ids_of(ByContent("w", 0), rows))) == len(rows)


@given(ROWS, st.randoms())
def test_another_order_gives_the_same_rows_the_same_ids(rows: list[Row], random: Random) -> None:
    shuffled = random.sample(rows, len(rows))
    first = {(id_, row) for id_, row in zip(ids_of(ByContent("w", 0), rows), rows, strict=True)}
    second = {
        (id_, row) for id_, row in zip(ids_of(ByContent("w", 0), shuffled), shuffled, strict=True)
    }
    assert first == second


@given(ROWS, st.integers(0, 30))
def test_an_attempt_that_died_half_way_gave_no_id_to_a_row_that_another_has_now(
    rows: list[Row], sent: int
) -> None:
    half = dict(zip(ids_of(ByContent("w", 0), rows[:sent]), rows[:sent], strict=True))
    whole = dict(zip(ids_of(ByContent("w", 0), rows[::-1]), rows[::-1], strict=True))
    assert half.items() <= whole.items()


@given(st.binary(max_size=5))
def test_writes_partitions_and_constants_keep_equal_rows_apart(body: bytes) -> None:
    scopes: list[tuple[str, int, object]] = [("w", 0, ()), ("w", 1, ()), ("v", 0, ()), ("w", 0, 1)]
    assert len({id_of(ByContent(*scope), body) for scope in scopes}) == len(scopes)


@given(st.binary(max_size=5), st.binary(max_size=5))
def test_what_is_body_and_what_is_not_cannot_be_confused(body: bytes, more: bytes) -> None:
    first = id_of(ByContent("w", 0), body, ("a",))
    assert first != id_of(ByContent("w", 0), body + more, ("b",))
    assert first != id_of(ByContent("w", 0), b"('a',)" + body)


def test_an_id_does_not_change_with_a_release() -> None:
    """A stream that goes on after an upgrade replays its last batch under the ids it had."""
    identity = ByContent("query-7", 3, ([("exchange", "x")], ["value"]))
    assert id_of(identity, b"body", ("key", None, 5)) == "ce75f28030992b8c7cdceb1ff5f7c7c4"
    assert id_of(identity, b"body", ("key", None, 5)) == "ce75f28030992b8c7cdceb1ff5f7c7c4-1"


def test_positions_name_other_rows_when_the_order_changes() -> None:
    rows: list[Row] = [(b"a", ()), (b"b", ()), (b"c", ())]
    first = dict(zip(ids_of(ByPosition("w", 0), rows), rows, strict=True))
    second = dict(zip(ids_of(ByPosition("w", 0), rows[::-1]), rows[::-1], strict=True))
    assert first.keys() == second.keys()
    assert sum(first[id_] == second[id_] for id_ in first) == 1  # the one in the middle
