"""What the policy says of a refusal, whatever the application's part in it does.

Knows: the policy, and what an entry has been through. Must never know: the store, the wire.
"""

from __future__ import annotations

from typing import Final

from reliablepub.outbox.entry import Entry
from reliablepub.outcome import Outcome
from reliablepub.policy import GiveUp, Refusal, RetryIn, RetryPolicy, Verdict
from reliablepub.relay.guard import Guard

_DEFAULT: Final = RetryPolicy()


class Ruling:
    """Asks the policy; one that fails is passed over, and the default one counts.

    Args:
        policy: with strategies and a callback of the application's own.
        guard: keeps their failures off us.
    """

    def __init__(self, policy: RetryPolicy, guard: Guard) -> None:
        self._policy = policy
        self._guard = guard

    def verdict(self, entry: Entry, outcome: Outcome, wall: float) -> Verdict:
        """What is to be done after a refusal, which the entry has counted already."""
        return self._decided(entry, outcome, wall, self._by_budget(entry, outcome, wall))

    def end_of_wait(self, entry: Entry, outcome: Outcome, wall: float) -> GiveUp | None:
        """What becomes of an entry that waits, where its budget is spent; None: it may go on.

        Args:
            entry: it waits for its destination.
            outcome: what that destination refused last.
            wall: seconds since 1970.
        """
        verdict = self._by_budget(entry, outcome, wall)
        if isinstance(verdict, GiveUp):
            verdict = self._decided(entry, outcome, wall, verdict)
        return verdict if isinstance(verdict, GiveUp) else None

    def _by_budget(self, entry: Entry, outcome: Outcome, wall: float) -> Verdict:
        refusals, age_s = _spent(entry, outcome, wall)
        with self._guard.calling("a strategy of RetryPolicy"):
            return self._policy.retries(outcome).verdict(refusals, age_s)
        return _DEFAULT.retries(outcome).verdict(refusals, age_s)

    def _decided(self, entry: Entry, outcome: Outcome, wall: float, verdict: Verdict) -> Verdict:
        """What the application's callback says, or the verdict."""
        if self._policy.decide is None:
            return verdict
        refusals, age_s = _spent(entry, outcome, wall)
        with self._guard.calling("RetryPolicy.decide"):
            message = entry.message
            said = self._policy.decide(
                Refusal(
                    message_id=message.message_id or "",
                    exchange=message.exchange,
                    routing_key=message.routing_key,
                    outcome=outcome,
                    refusals=refusals,
                    age_s=age_s,
                    verdict=verdict,
                )
            )
            if isinstance(said, RetryIn | GiveUp):
                return said
            if said is not None:
                msg = f"it returned {said!r}: not RetryIn, GiveUp or None"
                raise TypeError(msg)
        return verdict


def _spent(entry: Entry, outcome: Outcome, wall: float) -> tuple[int, float]:
    """Refusals of this kind, and seconds since the first one of any."""
    age_s = 0.0 if entry.refused_at is None else max(0.0, wall - entry.refused_at)
    return getattr(entry, outcome.kind.value), age_s
