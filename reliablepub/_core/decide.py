"""What to do with a message after an attempt: a small table.

Knows: outcomes and numbers. Must never know: how the numbers came about (policy, clock, chance).

    =========  ===========================================
    outcome    decision
    =========  ===========================================
    confirmed  remove it
    uncertain  send it again, however often (outages never spend the budget), unless it is late
    returned   retry after the wait while the budget lasts, then park or discard; unless late
    nacked     likewise
    refused    likewise
    =========  ===========================================

*Late* is a message whose own deadline has passed: it expires instead of being sent again. A
deadline decides nothing while an attempt is on the wire. The attempt's own end does: a confirm is a
confirm, however late, and a refusal that is final is told as what it is.
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
class Expire:
    """Its own deadline has passed: give it up as expired, and keep it for a person."""


@dataclass(frozen=True, slots=True)
class Park:
    """Give it up, and keep it for a person."""


@dataclass(frozen=True, slots=True)
class Discard:
    """Give it up, and keep nothing but its count."""


Decision: TypeAlias = Remove | SendAgain | RetryAt | Expire | Park | Discard

REFUSALS = frozenset({OutcomeKind.RETURNED, OutcomeKind.NACKED, OutcomeKind.REFUSED})


def decide(
    kind: OutcomeKind,
    *,
    is_spent: bool,
    is_kept: bool,
    wait_s: float,
    now: float,
    expires_at: float | None = None,
) -> Decision:
    """Decide on a message whose attempt has just ended.

    Args:
        kind: how it ended.
        is_spent: whether the budget of refusals is.
        is_kept: whether a person shall see it when it is.
        wait_s: seconds to wait before the next attempt, if there is one.
        now: seconds; `RetryAt` is on the same clock.
        expires_at: the message's own deadline, on the same clock.
    """
    if kind is OutcomeKind.CONFIRMED:
        return Remove()
    if kind in REFUSALS and is_spent:
        return Park() if is_kept else Discard()
    if expires_at is not None and expires_at <= now:
        return Expire()
    if kind in REFUSALS:
        return RetryAt(now + wait_s)
    if kind is OutcomeKind.UNCERTAIN:
        return SendAgain()
    msg = f"no attempt ends as {kind}"
    raise ValueError(msg)
