"""The decision about a message after an attempt that has ended without a confirm.

Knows: outcomes, and numbers that the caller computes. Must never know: policy, clock, randomness.

    =========  ====================================================================
    outcome    decision
    =========  ====================================================================
    uncertain  send again, without limit: outages never spend the budget
    returned   retry after the wait while the budget lasts, then park or discard
    nacked     retry after the wait while the budget lasts, then park or discard
    refused    retry after the wait while the budget lasts, then park or discard
    =========  ====================================================================

A message whose deadline has passed expires instead of being sent again. The deadline has no effect
while an attempt is in flight: a late confirm is still a confirm, and a message whose budget is
spent is parked or discarded for its refusal, not for its deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from reliablepub.outcome import OutcomeKind


@dataclass(slots=True)
class SendAgain:
    """Do nothing: the session itself sends the message again, as soon as it can."""


@dataclass(slots=True)
class RetryAt:
    """Keep the message in the outbox, and send it again later."""

    at: float  # on the clock of `decide`'s ``now``


@dataclass(slots=True)
class Expire:
    """Give the message up as expired, and keep it for an operator."""


@dataclass(slots=True)
class Park:
    """Give the message up, and keep it for an operator."""


@dataclass(slots=True)
class Discard:
    """Give the message up, and delete it; only a count remains."""


Decision: TypeAlias = SendAgain | RetryAt | Expire | Park | Discard

REFUSALS = frozenset({OutcomeKind.RETURNED, OutcomeKind.NACKED, OutcomeKind.REFUSED})


def decide(
    kind: OutcomeKind,
    *,
    is_spent: bool,  # the retry budget
    is_kept: bool,  # parked, not discarded, when the budget is spent
    wait_s: float,
    now: float,
    expires_at: float | None = None,  # on the clock of ``now``
) -> Decision:
    """Decide about a message whose attempt has just ended without a confirm."""
    if kind in REFUSALS and is_spent:
        return Park() if is_kept else Discard()
    if expires_at is not None and expires_at <= now:
        return Expire()
    if kind in REFUSALS:
        return RetryAt(now + wait_s)
    if kind is OutcomeKind.UNCERTAIN:
        return SendAgain()
    msg = f"there is nothing to decide about a message that is {kind}"
    raise ValueError(msg)
