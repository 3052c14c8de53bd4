"""What becomes of a message after an attempt."""

from __future__ import annotations

import pytest

from reliablepub._core.decide import Decision, Discard, Expire, Park, RetryAt, SendAgain, decide
from reliablepub.outcome import OutcomeKind

AGAIN = RetryAt(107.5)
UNCERTAIN, NACKED = OutcomeKind.UNCERTAIN, OutcomeKind.NACKED
RETURNED, REFUSED = OutcomeKind.RETURNED, OutcomeKind.REFUSED


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize(
    ("kind", "is_spent", "in_time", "late"),
    [
        (UNCERTAIN, False, SendAgain(), Expire()),
        (UNCERTAIN, True, SendAgain(), Expire()),
        (RETURNED, False, AGAIN, Expire()),
        (RETURNED, True, None, None),
        (NACKED, False, AGAIN, Expire()),
        (NACKED, True, None, None),
        (REFUSED, False, AGAIN, Expire()),
        (REFUSED, True, None, None),
    ],
)
def test_each_outcome_has_its_decision(
    kind: OutcomeKind,
    is_spent: bool,  # noqa: FBT001
    is_kept: bool,  # noqa: FBT001
    in_time: Decision | None,
    late: Decision | None,
) -> None:
    """None stands for what is done with those who are given up."""
    given_up: Decision = Park() if is_kept else Discard()
    for expires_at, decision in [(None, in_time), (100.1, in_time), (100.0, late), (50.0, late)]:
        found = decide(
            kind, is_spent=is_spent, is_kept=is_kept, wait_s=7.5, now=100.0, expires_at=expires_at
        )
        assert found == (decision or given_up)


@pytest.mark.parametrize("kind", [OutcomeKind.CONFIRMED, OutcomeKind.EXPIRED])
@pytest.mark.parametrize("expires_at", [None, 101.0])
def test_nothing_is_decided_about_others(kind: OutcomeKind, expires_at: float | None) -> None:
    for is_spent in (True, False):
        with pytest.raises(ValueError, match="nothing to decide about a message that is"):
            decide(
                kind, is_spent=is_spent, is_kept=True, wait_s=1.0, now=100.0, expires_at=expires_at
            )
