"""Budgets for refusals, and the waits of tenacity between them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tenacity import wait_fixed, wait_none, wait_random_exponential

from reliablepub.errors import ConfigurationError
from reliablepub.outcome import OutcomeKind
from reliablepub.policy import Retries, RetryPolicy

REFUSALS = [OutcomeKind.NACKED, OutcomeKind.RETURNED, OutcomeKind.REFUSED]


@pytest.mark.parametrize("attempts_max", [0, -1])
def test_the_first_attempt_counts(attempts_max: int) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        Retries(attempts_max, wait_none())
    assert Retries(1, wait_none()).attempts_max == 1


@given(refusals=st.integers(1, 10_000), kind=st.sampled_from(REFUSALS))
def test_default_waits_grow_at_most_exponentially_and_have_a_ceiling(
    refusals: int, kind: OutcomeKind
) -> None:
    wait_s = RetryPolicy().retries(kind).wait_s(refusals)
    multiplier, ceiling = {
        OutcomeKind.NACKED: (0.2, 60.0),
        OutcomeKind.RETURNED: (0.2, 5.0),
        OutcomeKind.REFUSED: (1.0, 60.0),
    }[kind]
    assert 0.0 <= wait_s <= min(ceiling, multiplier * 2.0 ** min(refusals - 1, 100))


def test_waits_are_jittered() -> None:
    retries = Retries(10, wait_random_exponential(multiplier=1, max=60))
    assert len({retries.wait_s(8) for _ in range(10)}) > 1


def test_any_strategy_of_tenacity_will_do() -> None:
    assert Retries(2, wait_fixed(3)).wait_s(1) == 3.0
    assert Retries(2, lambda state: float(state.attempt_number)).wait_s(7) == 7.0


def test_no_strategy_waits_into_the_past() -> None:
    assert Retries(2, lambda _state: -5.0).wait_s(1) == 0.0


def test_each_refusal_has_its_own_budget() -> None:
    policy = RetryPolicy(nacked=Retries(7, wait_none()))
    assert [policy.retries(kind).attempts_max for kind in REFUSALS] == [7, 3, 1]


@pytest.mark.parametrize("kind", sorted(set(OutcomeKind) - set(REFUSALS)))
def test_what_is_no_refusal_has_no_budget(kind: OutcomeKind) -> None:
    with pytest.raises(ValueError, match="is no refusal"):
        RetryPolicy().retries(kind)
