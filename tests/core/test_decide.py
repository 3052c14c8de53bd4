"""What becomes of a message after an attempt."""

from __future__ import annotations

import pytest

from reliablepub._core.decide import Decision, Park, Remove, RetryAt, SendAgain, decide
from reliablepub.outcome import OutcomeKind

WEEK_OF_REFUSALS = 1_000_000
AGAIN = RetryAt(107.5)


@pytest.mark.parametrize(
    ("kind", "refusals", "decision"),
    [
        (OutcomeKind.CONFIRMED, 0, Remove()),
        (OutcomeKind.CONFIRMED, WEEK_OF_REFUSALS, Remove()),
        (OutcomeKind.UNCERTAIN, 0, SendAgain()),
        (OutcomeKind.UNCERTAIN, WEEK_OF_REFUSALS, SendAgain()),
        (OutcomeKind.EXPIRED, 0, Park()),
        (OutcomeKind.RETURNED, 2, AGAIN),
        (OutcomeKind.RETURNED, 3, Park()),
        (OutcomeKind.NACKED, 2, AGAIN),
        (OutcomeKind.NACKED, 3, Park()),
        (OutcomeKind.REFUSED, 2, AGAIN),
        (OutcomeKind.REFUSED, 3, Park()),
        (OutcomeKind.REFUSED, WEEK_OF_REFUSALS, Park()),
    ],
)
def test_each_outcome_has_its_decision(
    kind: OutcomeKind, refusals: int, decision: Decision
) -> None:
    assert decide(kind, refusals=refusals, attempts_max=3, wait_s=7.5, now=100.0) == decision


def test_every_outcome_has_a_decision() -> None:
    for kind in OutcomeKind:
        assert decide(kind, refusals=1, attempts_max=1, wait_s=1.0, now=0.0) != RetryAt(1.0)
