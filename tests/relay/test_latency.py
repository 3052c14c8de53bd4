"""Percentiles of confirm latencies, from a few counters."""

from hypothesis import given
from hypothesis import strategies as st

from reliablepub.relay.status import SPAN_S, Latencies, Percentiles

TOO_HIGH = 2 ** (1 / 8) + 1e-9
seconds = st.floats(1e-5, 3_600.0)


@given(st.lists(seconds, min_size=1, max_size=200))
def test_percentiles_are_never_too_low_and_hardly_too_high(taken: list[float]) -> None:
    latencies = Latencies()
    for taken_s in taken:
        latencies.took(taken_s, 1)
    found = latencies.told(0.0)
    assert found is not None
    ordered = sorted(taken)
    for share, value in ((0.5, found.p50_s), (0.95, found.p95_s), (0.99, found.p99_s)):
        right = ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)]
        assert right <= value * (1 + 1e-9)
        assert value <= right * TOO_HIGH
    assert max(taken) <= found.max_s * (1 + 1e-9) <= max(taken) * TOO_HIGH * (1 + 1e-9)
    assert found.confirms == len(taken)


def test_nothing_is_told_before_a_confirm_and_long_after_the_last_one() -> None:
    latencies = Latencies()
    assert latencies.told(0.0) is None
    latencies.took(0.5, 1)
    for now, confirms in ((1.0, 1), (SPAN_S + 1, 1), (2 * SPAN_S + 1, None)):
        found = latencies.told(now)
        assert (found and found.confirms) == confirms
    latencies.took(0.5, 1)
    assert latencies.told(3 * SPAN_S) is not None
    assert latencies.told(9 * SPAN_S) is None, "two generations later"


def test_the_first_confirm_after_a_long_rest_is_told() -> None:
    latencies = Latencies()
    latencies.told(0.0)
    for n in range(1, 4):
        latencies.took(0.5, 1)
        found = latencies.told(n * 3 * SPAN_S)
        assert found is not None
        assert found.confirms == 1


def test_a_run_of_equal_durations_counts_each() -> None:
    latencies = Latencies()
    for taken_s, times in ((0.001, 900), (0.5, 100), (0.001, 1)):
        latencies.took(taken_s, times)
    found = latencies.told(0.0)
    assert found is not None
    assert found.confirms == 1_001
    assert found.p50_s < 0.0012
    assert 0.5 <= found.p95_s < 0.55


def test_what_is_out_of_range_is_counted_at_its_end() -> None:
    latencies = Latencies()
    latencies.took(0.0, 1)
    latencies.took(1e9, 1)
    found = latencies.told(0.0)
    assert isinstance(found, Percentiles)
    assert found.confirms == 2
    assert found.p50_s < 2e-5
    assert found.max_s > 3_600
