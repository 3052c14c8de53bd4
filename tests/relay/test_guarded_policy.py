"""What becomes of refusals: budgets in number and time, discarding, and callbacks that err."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from tenacity import stop_after_attempt, stop_after_delay, stop_never, wait_fixed

from reliablepub.front.receipt import publish_error
from reliablepub.outbox.entry import Store
from reliablepub.outcome import Outcome, OutcomeKind
from reliablepub.policy import GiveUp, Refusal, Retries, RetryIn, RetryPolicy
from tests.relay.scripted import Told, World

FIVE = Retries(stop_after_attempt(5), wait_fixed(10))
PATIENT = RetryPolicy(FIVE, FIVE, FIVE)


def refused_once(w: World) -> Told:
    """A message that is sent and nacked."""
    w.connect()
    told = w.sends("a")
    w.hears_nack(1)
    return told


def refuse_again(w: World, tag: int, *, after_s: float) -> None:
    """Its next attempt, when it is due."""
    sent = len(w.sent)
    w.turn(after_s=after_s)
    w.turn()
    assert len(w.sent) == sent + 1
    w.hears_nack(tag)


def test_a_budget_may_be_time_since_the_first_refusal(store: Store) -> None:
    retries = Retries(stop_after_delay(25), wait_fixed(10))
    w = World(store, policy=RetryPolicy(retries, retries, retries))
    w.time.now += 1_000  # stored and unsent for long: no part of the budget
    told = refused_once(w)
    refuse_again(w, 2, after_s=10)
    refuse_again(w, 3, after_s=10)
    assert told.outcomes == {}
    refuse_again(w, 4, after_s=10)
    assert told.kinds == {"a": OutcomeKind.NACKED}
    assert w.relay.status.counters.parked == 1


def test_what_the_policy_discards_is_counted_and_told_at_once(store: Store) -> None:
    retries = Retries(stop_after_attempt(1), wait_fixed(1), then=GiveUp.DISCARD)
    w = World(store, policy=RetryPolicy(nacked=retries))
    told = refused_once(w)
    counters = w.relay.status.counters
    assert (counters.stored, counters.discarded, counters.parked, counters.open) == (1, 1, 0, 0)
    assert counters.open_bytes == 0
    assert w.in_memory == (0, 0)
    assert told.kinds == {"a": OutcomeKind.NACKED}
    [entry] = [gone.entry for turn in w.store.turns for gone in turn.discarded]
    error = publish_error(entry, told.outcomes["a"])
    assert not error.is_kept
    assert "the retry policy discarded it" in str(error)


@pytest.mark.parametrize(
    ("said", "is_open", "is_parked"),
    [
        (None, True, False),
        (GiveUp.PARK, False, True),
        (GiveUp.DISCARD, False, False),
        (RetryIn(500), True, False),
    ],
)
def test_what_the_callback_says_is_done(
    store: Store,
    said: RetryIn | GiveUp | None,
    is_open: bool,  # noqa: FBT001
    is_parked: bool,  # noqa: FBT001
) -> None:
    heard: list[Refusal] = []

    def decide(refusal: Refusal) -> RetryIn | GiveUp | None:
        heard.append(refusal)
        return said

    w = World(store, policy=RetryPolicy(FIVE, FIVE, FIVE, decide))
    refused_once(w)
    counters = w.relay.status.counters
    assert (counters.open == 1, counters.parked == 1) == (is_open, is_parked)
    nack = Outcome(OutcomeKind.NACKED, 0, "basic.nack")
    refusal = Refusal("a", "", "q", nack, 1, 0.0, RetryIn(10), may_have_arrived=True)
    assert heard == [refusal], "no earlier copy is known, of which it could be a duplicate"
    if is_open:
        assert w.turned(after_s=9).sent == ["a"]
        assert w.turned(after_s=2).sent == ["a"] * (2 if said is None else 1)
        w.turn(after_s=500)
        assert len(w.sent) >= 2


def test_a_callback_may_retry_what_the_policy_would_give_up(store: Store) -> None:
    once = Retries(stop_after_attempt(1), wait_fixed(10))

    def decide(refusal: Refusal) -> RetryIn | None:
        return RetryIn(1) if refusal.refusals < 4 else None

    w = World(store, policy=RetryPolicy(once, once, once, decide))
    told = refused_once(w)
    for tag in (2, 3, 4):
        assert told.outcomes == {}
        refuse_again(w, tag, after_s=1)
    assert told.kinds == {"a": OutcomeKind.NACKED}


def raises(_refusal: Refusal) -> None:
    raise LookupError("no such rule")


def talks(_refusal: Refusal) -> str:
    return "park it"


def hopes(_refusal: Refusal) -> GiveUp:
    return GiveUp.ARRIVED


@pytest.mark.parametrize("decide", [raises, talks, hopes])
def test_a_callback_that_errs_changes_nothing_and_is_logged_once(
    store: Store, decide: Callable[[Refusal], Any], caplog: pytest.LogCaptureFixture
) -> None:
    w = World(store, policy=RetryPolicy(FIVE, FIVE, FIVE, decide))
    with caplog.at_level(logging.ERROR, "reliablepub"):
        told = refused_once(w)
        for tag in (2, 3, 4, 5):
            assert told.outcomes == {}
            refuse_again(w, tag, after_s=10)
    assert told.kinds == {"a": OutcomeKind.NACKED}
    assert w.relay.status.callback_errors == 5
    assert [record.getMessage() for record in caplog.records] == [
        "RetryPolicy.decide has raised an exception; further ones are counted, not logged"
    ]


def test_a_strategy_that_errs_is_replaced_by_the_default(store: Store) -> None:
    def broken(_state: object) -> float:
        raise ZeroDivisionError

    policy = RetryPolicy(nacked=Retries(stop_never, broken))
    w = World(store, policy=policy)
    told = refused_once(w)
    for tag in range(2, 5):  # the default gives it a day
        assert told.outcomes == {}
        refuse_again(w, tag, after_s=8 * 3600)
    assert told.kinds == {"a": OutcomeKind.NACKED}
    assert w.relay.status.callback_errors == 4
