"""What to do with a message after an attempt: a small table.

Knows: outcomes and numbers. Must never know: how the numbers came about (policy, clock, chance).

    =========  ===========================================
    outcome    decision
    =========  ===========================================
    confirmed  remove it
    uncertain  send it again, however often (rule: outages never spend the budget)
    returned   retry after the wait while the budget lasts, then park
    nacked     likewise
    refused    likewise
    expired    park
    =========  ===========================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from reliablepub.outcome import OutcomeKind


@dataclass(frozen=True, slots=True)
class Remove:
    """The broker has taken responsibility; the message leaves the outbox."""


@dataclass(frozen=True, slots=True)
class SendAgain:
    """The session sends it again as soon as it can."""


@dataclass(frozen=True, slots=True)
class RetryAt:
    """Leave it in the outbox until then (same clock as ``now``)."""

    at: float


@dataclass(frozen=True, slots=True)
class Park:
    """Give it up, and keep it for a person."""


Decision: TypeAlias = Remove | SendAgain | RetryAt | Park

REFUSALS = frozenset({OutcomeKind.RETURNED, OutcomeKind.NACKED, OutcomeKind.REFUSED})


def decide(
    kind: OutcomeKind, *, refusals: int, attempts_max: int, wait_s: float, now: float
) -> Decision:
    """Decide on a message whose attempt has just ended.

    Args:
        kind: how it ended.
        refusals: how often it has ended so, this time included.
        attempts_max: the budget of refusals of this kind.
        wait_s: seconds to wait before the next attempt, if there is one.
        now: seconds; `RetryAt` is on the same clock.
    """
    if kind is OutcomeKind.CONFIRMED:
        return Remove()
    if kind is OutcomeKind.UNCERTAIN:
        return SendAgain()
    if kind in REFUSALS and refusals < attempts_max:
        return RetryAt(now + wait_s)
    return Park()
