"""Floods become a few lines, and nothing is left uncounted."""

from hypothesis import given
from hypothesis import strategies as st

from reliablepub.relay.journal import KINDS_MAX, Digest, Kind

NACKED = Kind("nacked", "orders", 0)
KINDS = [NACKED._replace(about=f"e{n}") for n in range(KINDS_MAX + 6)]
OTHERS = Kind("nacked", None, 0)


def test_the_first_is_said_and_the_others_are_summed_up() -> None:
    digest = Digest()
    said = [digest.is_said(NACKED, n / 1_000) for n in range(10_000)]
    assert said == [True] + [False] * 9_999
    assert digest.due(9.9) == []
    assert digest.due(10.0) == [(NACKED, 9_999, 10.0)]


def test_as_long_as_it_goes_on_there_is_one_sum_an_interval_and_no_line() -> None:
    digest = Digest()
    lines = 0
    for tick in range(1_000):
        lines += digest.is_said(NACKED, tick * 0.1) + len(digest.due(tick * 0.1))
    assert lines == 1 + 9


def test_after_a_quiet_interval_the_next_one_is_a_first_again() -> None:
    digest = Digest()
    assert digest.is_said(NACKED, 0.0)
    assert digest.due(10.0) == []
    assert digest.is_said(NACKED, 10.1)


def test_kinds_are_bounded_and_the_others_are_counted_together() -> None:
    digest = Digest()
    said = [digest.is_said(kind, 0.0) for kind in KINDS]
    assert said == [True] * (KINDS_MAX + 1) + [False] * 5
    assert digest.due(10.0) == [(OTHERS, 5, 10.0)]


def test_what_is_left_at_the_end_is_told() -> None:
    digest = Digest()
    for _ in range(3):
        digest.is_said(NACKED, 0.0)
    assert digest.due(1.0, interval_s=0.0) == [(NACKED, 2, 1.0)]


@given(st.lists(st.tuples(st.sampled_from(KINDS[-12:]), st.floats(0, 5)), max_size=200))
def test_everything_is_said_or_counted(things: list[tuple[Kind, float]]) -> None:
    digest = Digest()
    now, total = 0.0, 0
    # So many kinds that few more fit.
    things = [*((kind, 0.0) for kind in KINDS[: KINDS_MAX - 3]), *things]
    for kind, wait in things:
        now += wait
        total += sum(count for _, count, _ in digest.due(now))
        total += digest.is_said(kind, now)
    total += sum(count for _, count, _ in digest.due(now, interval_s=0.0))
    assert total == len(things)
