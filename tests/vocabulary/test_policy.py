"""Budgets for refusals, with tenacity's stops and waits, and what comes after them."""

from __future__ import annotations

import pytest
import tenacity
from hypothesis import given
from hypothesis import strategies as st
from tenacity import (
    stop_after_attempt,
    stop_after_delay,
    stop_before_delay,
    stop_never,
    wait_fixed,
    wait_none,
    wait_random_exponential,
)

from reliablepub.errors import ConfigurationError
from reliablepub.outcome import OutcomeKind
from reliablepub.policy import GiveUp, Retries, RetryIn, RetryPolicy

REFUSALS = [OutcomeKind.NACKED, OutcomeKind.RETURNED, OutcomeKind.REFUSED]
NOW = RetryIn(0.0)


@pytest.mark.parametrize(
    ("stop", "refusals", "age_s", "verdict"),
    [
        (stop_after_attempt(1), 1, 0.0, GiveUp.PARK),
        (stop_after_attempt(3), 2, 1e9, NOW),
        (stop_after_attempt(3), 3, 0.0, GiveUp.PARK),
        (stop_after_delay(3600), 1_000, 3599.0, NOW),
        (stop_after_delay(3600), 1, 3600.0, GiveUp.PARK),
        (stop_after_attempt(10) | stop_after_delay(3600), 9, 3599.0, NOW),
        (stop_after_attempt(10) | stop_after_delay(3600), 10, 0.0, GiveUp.PARK),
        (stop_after_attempt(10) | stop_after_delay(3600), 1, 3601.0, GiveUp.PARK),
        (stop_after_attempt(10) & stop_after_delay(3600), 11, 3599.0, NOW),
        (stop_never, 10**9, 1e9, NOW),
        (lambda state: state.attempt_number == 7, 7, 0.0, GiveUp.PARK),
    ],
)
def test_any_stop_of_tenacity_will_do(
    stop: tenacity.stop.stop_base, refusals: int, age_s: float, verdict: object
) -> None:
    assert Retries(stop, wait_none()).verdict(refusals, age_s) == verdict


def test_a_stop_may_look_at_the_wait_ahead() -> None:
    retries = Retries(stop_before_delay(10), wait_fixed(3))
    assert retries.verdict(1, 6.9) == RetryIn(3.0)
    assert retries.verdict(1, 7.1) is GiveUp.PARK


def test_any_wait_of_tenacity_will_do() -> None:
    assert Retries(stop_never, wait_fixed(3)).verdict(1, 0) == RetryIn(3.0)
    assert Retries(stop_never, lambda s: float(s.attempt_number)).verdict(7, 0) == RetryIn(7.0)


def test_no_strategy_waits_into_the_past() -> None:
    assert Retries(stop_never, lambda _state: -5.0).verdict(1, 0) == NOW


def test_what_is_given_up_may_be_discarded() -> None:
    assert Retries(stop_after_attempt(1), wait_none(), GiveUp.DISCARD).verdict(1, 0) == "discard"


@given(refusals=st.integers(1, 10_000), kind=st.sampled_from(REFUSALS))
def test_default_waits_grow_at_most_exponentially_and_have_a_ceiling(
    refusals: int, kind: OutcomeKind
) -> None:
    verdict = Retries(stop_never, RetryPolicy().retries(kind).wait).verdict(refusals, 0)
    multiplier, ceiling = {
        OutcomeKind.NACKED: (0.2, 60.0),
        OutcomeKind.RETURNED: (0.2, 5.0),
        OutcomeKind.REFUSED: (1.0, 60.0),
    }[kind]
    assert isinstance(verdict, RetryIn)
    assert 0.0 <= verdict.seconds <= min(ceiling, multiplier * 2.0 ** min(refusals - 1, 100))


def test_waits_are_jittered() -> None:
    retries = Retries(stop_never, wait_random_exponential(multiplier=1, max=60))
    assert len({retries.verdict(8, 0) for _ in range(10)}) > 1


def test_each_refusal_has_its_own_budget() -> None:
    budgets = []
    for kind in REFUSALS:
        retries = RetryPolicy(refused=Retries(stop_after_attempt(7), wait_none())).retries(kind)
        budgets.append(next(n for n in range(1, 99) if retries.verdict(n, 0) is GiveUp.PARK))
    assert budgets == [10, 3, 7]


@pytest.mark.parametrize("kind", sorted(set(OutcomeKind) - set(REFUSALS)))
def test_what_is_no_refusal_has_no_budget(kind: OutcomeKind) -> None:
    with pytest.raises(ValueError, match="is no refusal"):
        RetryPolicy().retries(kind)


def test_numbers_are_no_strategies() -> None:
    with pytest.raises(ConfigurationError, match=r"stop is 3; .*stop_after_attempt\(3\)"):
        Retries(3, wait_none())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"wait is 1.5; .*wait_fixed\(3\)"):
        Retries(stop_never, 1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [-0.1, float("nan")])
def test_nothing_is_tried_again_in_the_past(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match="0 or more"):
        RetryIn(seconds)
