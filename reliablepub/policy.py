"""How often, and after what wait, a message that the broker refused is tried again.

Knows: limits, and tenacity's wait strategies. Must never know: the clock, the outbox or the wire;
the wait is a number that others act upon.

The budget counts refusals (nacked, returned, refused), never outages: an uncertain attempt is sent
again without limit, so that a broker that is down for a week parks nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from tenacity import RetryCallState, wait_random_exponential

from reliablepub.errors import ConfigurationError
from reliablepub.outcome import OutcomeKind

WaitStrategy: TypeAlias = Callable[[RetryCallState], float]
"""One of tenacity's ``wait_...``; gives seconds."""


def wait_s(strategy: WaitStrategy, attempt: int) -> float:
    """Seconds that the strategy wants to wait after the given attempt (from 1)."""
    state = RetryCallState(retry_object=None, fn=None, args=(), kwargs={})  # type: ignore[arg-type]
    state.attempt_number = attempt
    return max(0.0, strategy(state))


@dataclass(frozen=True, slots=True)
class Retries:
    """The budget for one kind of refusal.

    Attributes:
        attempts_max: park the message when it has been refused in this way so often; at least 1.
        wait: a tenacity wait strategy (gives seconds), such as ``wait_random_exponential()``.
    """

    attempts_max: int
    wait: WaitStrategy

    def __post_init__(self) -> None:
        """Refuse budgets that could not be kept."""
        if self.attempts_max < 1:
            msg = f"attempts_max is {self.attempts_max}; the first attempt counts, so at least 1"
            raise ConfigurationError(msg)

    def wait_s(self, refusals: int) -> float:
        """Seconds to wait after the given number of refusals (1 after the first)."""
        return wait_s(self.wait, refusals)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What to do with messages that the broker will not take.

    Attributes:
        nacked: a queue was full, or failed: it may well recover, so patience.
        returned: no queue is bound: a binding may be on its way, so a few tries.
        refused: the broker closed the channel because of it (404, 403, 406): it will not change by
            itself.
    """

    nacked: Retries = field(
        default_factory=lambda: Retries(10, wait_random_exponential(multiplier=0.2, max=60))
    )
    returned: Retries = field(
        default_factory=lambda: Retries(3, wait_random_exponential(multiplier=0.2, max=5))
    )
    refused: Retries = field(
        default_factory=lambda: Retries(1, wait_random_exponential(multiplier=1, max=60))
    )

    def retries(self, kind: OutcomeKind) -> Retries:
        """The budget for ``nacked``, ``returned`` or ``refused``."""
        match kind:
            case OutcomeKind.NACKED:
                return self.nacked
            case OutcomeKind.RETURNED:
                return self.returned
            case OutcomeKind.REFUSED:
                return self.refused
            case _:
                msg = f"{kind} is no refusal and has no budget"
                raise ValueError(msg)
