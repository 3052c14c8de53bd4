"""Floods become a few lines, and nothing is left uncounted."""

from hypothesis import given
from hypothesis import strategies as st

from reliablepub.relay.journal import Digest, Sum


def alike(_kind: object) -> str:
    """The wider kind of every kind."""
    return "others"


def test_the_first_is_said_and_the_others_are_summed_up() -> None:
    digest: Digest[object] = Digest(alike, 10.0)
    said = [digest.is_said("nacked", n / 1_000) for n in range(10_000)]
    assert said == [True] + [False] * 9_999
    assert digest.due(9.9) == []
    assert digest.due(10.0) == [Sum("nacked", 9_999, 10.0)]


def test_as_long_as_it_goes_on_there_is_one_sum_an_interval_and_no_line() -> None:
    digest: Digest[object] = Digest(alike, 10.0)
    lines = 0
    for tick in range(1_000):
        lines += digest.is_said("nacked", tick * 0.1) + len(digest.due(tick * 0.1))
    assert lines == 1 + 9


def test_after_a_quiet_interval_the_next_one_is_a_first_again() -> None:
    digest: Digest[object] = Digest(alike, 10.0)
    assert digest.is_said("a", 0.0)
    assert digest.due(10.0) == []
    assert digest.is_said("a", 10.1)


def test_kinds_are_bounded_and_the_others_are_counted_together() -> None:
    digest: Digest[object] = Digest(alike, 10.0, kinds_max=3)
    assert [digest.is_said(n, 0.0) for n in range(10)] == [True] * 4 + [False] * 6
    assert digest.due(10.0) == [Sum("others", 6, 10.0)]


def test_what_is_left_at_the_end_is_told() -> None:
    digest: Digest[object] = Digest(alike, 10.0)
    for _ in range(3):
        digest.is_said("a", 0.0)
    assert digest.rest(1.0) == [Sum("a", 2, 1.0)]


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 5)), max_size=200))
def test_everything_is_said_or_counted(things: list[tuple[int, float]]) -> None:
    digest: Digest[object] = Digest(alike, 10.0, kinds_max=3)
    now, total = 0.0, 0
    for kind, wait in things:
        now += wait
        total += sum(found.count for found in digest.due(now))
        total += digest.is_said(kind, now)
    total += sum(found.count for found in digest.rest(now))
    assert total == len(things)
