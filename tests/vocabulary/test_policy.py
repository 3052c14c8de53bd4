"""Budgets for refusals, with tenacity's stops and waits, and what comes after them."""

import copy
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pickle import dumps, loads
from typing import Any

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
from reliablepub.outbox.rows import TIME_MAX
from reliablepub.outcome import Concern, Outcome, OutcomeKind
from reliablepub.policy import Breaker, GiveUp, Retries, RetryIn, RetryPolicy, wait_s

REFUSED = [
    Outcome(OutcomeKind.NACKED),
    Outcome(OutcomeKind.RETURNED, 312, "NO_ROUTE"),
    Outcome(OutcomeKind.REFUSED, 406, "PRECONDITION_FAILED - message size"),
    Outcome(OutcomeKind.REFUSED, 404, "NOT_FOUND - no exchange 'x' in vhost '/'"),
]
NOW = RetryIn(0.0)


def a_second(_: object) -> float:
    return 1.0


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


@given(
    refusals=st.integers(1, 10_000),
    outcome=st.sampled_from(REFUSED),
    policy=st.sampled_from([RetryPolicy(), RetryPolicy.prompt()]),
)
def test_waits_grow_at_most_exponentially_and_have_a_ceiling(
    refusals: int, outcome: Outcome, policy: RetryPolicy
) -> None:
    verdict = Retries(stop_never, policy.retries(outcome).wait).verdict(refusals, 0)
    assert isinstance(verdict, RetryIn)
    assert 0.0 <= verdict.seconds <= min(60.0, 2.0 ** min(refusals - 1, 100))


def test_waits_are_jittered() -> None:
    retries = Retries(stop_never, wait_random_exponential(multiplier=1, max=60))
    assert len({retries.verdict(8, 0) for _ in range(10)}) > 1


@pytest.mark.parametrize(
    ("code", "text", "concern"),
    [
        (404, "NOT_FOUND - no exchange 'x' in vhost '/'", Concern.EXCHANGE),
        (403, "ACCESS_REFUSED - access to exchange 'x' in vhost '/' refused", Concern.EXCHANGE),
        (403, "ACCESS_REFUSED - access to topic 'k' in exchange 'x' refused", Concern.ADDRESS),
        (406, "PRECONDITION_FAILED - invalid expiration", Concern.MESSAGE),
        (540, "NOT_IMPLEMENTED - immediate=true", Concern.MESSAGE),
        (0, "it does not fit into a frame", Concern.MESSAGE),
    ],
)
def test_what_a_refusal_is_about(code: int, text: str, concern: Concern) -> None:
    outcome = Outcome(OutcomeKind.REFUSED, code, text)
    assert outcome.concern is concern
    refused, unavailable = (Retries(stop_never, wait_fixed(n)) for n in (1, 2))
    is_own = concern is Concern.MESSAGE
    policy = RetryPolicy(refused=refused, unavailable=unavailable)
    assert policy.retries(outcome) is (refused if is_own else unavailable)
    assert RetryPolicy(refused=refused).retries(outcome) is refused, "both, if one is given"
    if not is_own:
        assert RetryPolicy(unavailable=unavailable).retries(outcome) is unavailable


@pytest.mark.parametrize("kind", [OutcomeKind.NACKED, OutcomeKind.RETURNED])
def test_a_nack_or_a_return_is_about_its_address(kind: OutcomeKind) -> None:
    assert Outcome(kind).concern is Concern.ADDRESS


@pytest.mark.parametrize(
    ("outcome", "patience_s"), list(zip(REFUSED, [86_400.0, 900.0, 0.0, 86_400.0], strict=True))
)
def test_what_passes_by_itself_is_given_time(outcome: Outcome, patience_s: float) -> None:
    retries = RetryPolicy().retries(outcome)
    assert retries.verdict(1_000 if patience_s else 1, patience_s) is GiveUp.PARK
    if patience_s:
        assert isinstance(retries.verdict(1_000, patience_s - 1), RetryIn)


def test_each_refusal_has_its_own_budget() -> None:
    policy = RetryPolicy.prompt()
    budgets = []
    for outcome in REFUSED:
        retries = replace(policy, refused=Retries(stop_after_attempt(7), wait_none())).retries(
            outcome
        )
        budgets.append(next(n for n in range(1, 99) if retries.verdict(n, 0) is GiveUp.PARK))
    assert budgets == [10, 3, 7, 7]
    assert policy.breaker is None


@pytest.mark.parametrize(
    ("stop", "lasts_s"),
    [
        (stop_after_delay(900), 900.0),
        (stop_after_delay(0.5), 1.0),
        (stop_after_delay(60) | stop_after_delay(24 * 3600), 60.0),
        (stop_after_attempt(3), None),
        (stop_after_attempt(3) & stop_after_delay(60), None),
        (stop_never, None),
    ],
)
def test_a_budget_of_time_tells_when_it_ends(stop: Any, lasts_s: float | None) -> None:
    assert Retries(stop, wait_none()).lasts_s == lasts_s


@pytest.mark.parametrize(
    "kind", [OutcomeKind.CONFIRMED, OutcomeKind.UNCERTAIN, OutcomeKind.EXPIRED]
)
def test_what_is_no_refusal_has_no_budget(kind: OutcomeKind) -> None:
    with pytest.raises(ValueError, match="is not a refusal"):
        RetryPolicy().retries(Outcome(kind))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: loads(dumps(one))])
@pytest.mark.parametrize("given", [None, Breaker(refusals_max=2, pause=a_second)])
def test_a_copy_pauses_as_its_original_does(
    copied: Callable[[RetryPolicy], RetryPolicy], given: Breaker | None
) -> None:
    """A budget of attempts is paused by a breaker that was given, not by the default one."""
    attempts = Retries(stop_after_attempt(3), wait_none())
    policy = RetryPolicy(nacked=attempts)
    policy = policy if given is None else replace(policy, breaker=given)
    copy_ = copied(policy)
    assert copy_.breaker == policy.breaker
    assert copy_.pauses(REFUSED[0]) is policy.pauses(REFUSED[0]) is (given is not None)


def test_numbers_are_no_strategies() -> None:
    with pytest.raises(ConfigurationError, match=r"stop is 3; .*stop_after_attempt\(3\)"):
        Retries(3, wait_none())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"wait is 1.5; .*wait_fixed\(3\)"):
        Retries(stop_never, 1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [-0.1, float("nan"), float("inf"), "5", None])
def test_nothing_is_tried_again_in_the_past_or_never(seconds: Any) -> None:
    with pytest.raises(ConfigurationError, match="0 or more, and finite"):
        RetryIn(seconds)


@pytest.mark.parametrize("limit", [0, -1, 2.5, float("inf"), float("nan"), 10**19, "5", None, True])
@pytest.mark.parametrize("name", ["refusals_max", "destinations_max"])
def test_the_limits_of_a_breaker_are_whole_numbers(name: str, limit: Any) -> None:
    with pytest.raises(ConfigurationError, match="are whole numbers, at least 1"):
        Breaker(**{name: limit})


@pytest.mark.parametrize("seconds", [1e12, sys.maxsize])
def test_a_wait_for_ever_ends_before_the_outbox_takes_it_for_damage(seconds: float) -> None:
    assert (
        RetryIn(seconds) == Retries(stop_never, wait_fixed(seconds)).verdict(1, 0) == RetryIn(1e9)
    )
    assert time.time() + RetryIn(seconds).seconds < TIME_MAX


@pytest.mark.parametrize("wait", [Decimal("1.5"), Fraction(3, 2)])
def test_every_kind_of_number_is_a_wait(wait: Any) -> None:
    """A time stamp plus a Decimal would be a TypeError, on the relay's thread."""
    assert type(RetryIn(wait).seconds) is float
    assert type(wait_s(lambda _: wait, 1)) is float
    verdict = Retries(stop_never, lambda _: wait).verdict(1, 0)
    assert isinstance(verdict, RetryIn)
    assert type(verdict.seconds) is float


@pytest.mark.parametrize("wait", [float("inf"), float("nan")])
def test_a_strategy_that_waits_for_ever_has_failed(wait: float) -> None:
    """`GuardedPolicy` counts and logs it. A message would be neither sent nor parked."""
    with pytest.raises(ConfigurationError, match="finite"):
        wait_s(lambda _: wait, 1)
    with pytest.raises(ConfigurationError, match="finite"):
        Retries(stop_never, lambda _: wait).verdict(1, 0)
