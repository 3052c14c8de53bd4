"""What is done with a message that the broker refused: tried again for how long, and then?

Knows: tenacity's strategies, and what a refusal is. Must never know: the clock, the outbox or the
wire; what it says are numbers and words that others act upon.

The budget counts refusals (nacked, returned, refused), never outages: an uncertain attempt is sent
again without limit, so that a broker that is down for a week parks nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from tenacity import (
    RetryCallState,
    stop_after_attempt,
    wait_exponential,
    wait_random_exponential,
)

from reliablepub.errors import ConfigurationError
from reliablepub.outcome import Outcome, OutcomeKind

StopStrategy: TypeAlias = Callable[[RetryCallState], bool]
"""Of tenacity's ``stop_...``, one or several: ``stop_after_attempt(10) | stop_after_delay(60)``."""
WaitStrategy: TypeAlias = Callable[[RetryCallState], float]
"""One of tenacity's ``wait_...``; gives seconds."""


class GiveUp(StrEnum):
    """What becomes of a message that is not tried again."""

    PARK = "park"
    """It is kept in the outbox for a person, who may retry it."""
    DISCARD = "discard"
    """It is deleted, and counted as discarded."""


@dataclass(frozen=True, slots=True)
class RetryIn:
    """Try the message again after so many seconds."""

    seconds: float

    def __post_init__(self) -> None:
        """Nothing can be tried in the past."""
        if not self.seconds >= 0:
            msg = f"RetryIn({self.seconds}): a wait is 0 or more seconds"
            raise ConfigurationError(msg)


Verdict: TypeAlias = RetryIn | GiveUp


def wait_s(strategy: WaitStrategy, attempt: int) -> float:
    """Seconds that the strategy wants to wait after the given attempt (from 1)."""
    return max(0.0, strategy(_state(attempt, 0.0)))


def _state(attempt: int, age_s: float) -> RetryCallState:
    """What a strategy looks at."""
    state = RetryCallState(retry_object=None, fn=None, args=(), kwargs={})  # type: ignore[arg-type]
    state.attempt_number = attempt
    state.start_time, state.outcome_timestamp = 0.0, age_s
    return state


@dataclass(frozen=True, slots=True)
class Retries:
    """The budget for one kind of refusal, and what comes after it.

    Attributes:
        stop: a tenacity stop strategy. An *attempt* is a refusal of this kind, so that
            ``stop_after_attempt(1)`` never tries again; *delay* is the time since the message was
            refused for the first time, in whatever way.
        wait: a tenacity wait strategy (gives seconds), such as ``wait_random_exponential()``.
        then: what is done with the message when it is stopped.
    """

    stop: StopStrategy
    wait: WaitStrategy
    then: GiveUp = GiveUp.PARK

    def __post_init__(self) -> None:
        """Refuse numbers where strategies are wanted, before a message is refused at night."""
        if not callable(self.stop):
            msg = f"stop is {self.stop!r}; it takes a strategy, such as stop_after_attempt(3)"
            raise ConfigurationError(msg)
        if not callable(self.wait):
            msg = f"wait is {self.wait!r}; it takes a strategy, such as wait_fixed(3)"
            raise ConfigurationError(msg)

    def verdict(self, refusals: int, age_s: float) -> Verdict:
        """What is to be done after a refusal.

        Args:
            refusals: of this kind, this one included.
            age_s: seconds since the first one, of any kind.
        """
        state = _state(refusals, age_s)
        state.upcoming_sleep = max(0.0, self.wait(state))  # for `stop_before_delay`
        return self.then if self.stop(state) else RetryIn(state.upcoming_sleep)


@dataclass(frozen=True, slots=True)
class Breaker:
    """When a destination (exchange and routing key) that keeps refusing is paused.

    What goes there then waits, and spends no budget; everything else goes on. After the pause one
    message is sent as a probe: if it is refused too, another pause begins, and if it is confirmed,
    whatever waits may go.

    Attributes:
        refusals_max: so many in a row (nacked, returned, refused) pause a destination.
        pause: how long; a tenacity wait strategy. The *attempt* is the number of the pause, since
            something was last confirmed there.
        destinations_max: so many destinations that refuse are watched at a time.
    """

    refusals_max: int = 5
    pause: WaitStrategy = field(default_factory=lambda: wait_exponential(multiplier=1, max=60))
    destinations_max: int = 1_000

    def __post_init__(self) -> None:
        """Refuse numbers that would pause everything, or nothing."""
        if self.refusals_max < 1 or self.destinations_max < 1:
            msg = "refusals_max and destinations_max of a Breaker are at least 1"
            raise ConfigurationError(msg)
        if not callable(self.pause):
            msg = f"pause is {self.pause!r}; it takes a strategy, such as wait_fixed(3)"
            raise ConfigurationError(msg)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A message that the broker refused, as `RetryPolicy.decide` sees it: its address, no body.

    Attributes:
        message_id: the AMQP ``message_id``.
        exchange: where it was published to.
        routing_key: with which routing key.
        outcome: nacked, returned or refused, with the broker's words.
        refusals: how often that has happened to it, this time included.
        age_s: seconds since it was refused for the first time, in whatever way.
        verdict: what the policy would do.
    """

    message_id: str
    exchange: str
    routing_key: str
    outcome: Outcome
    refusals: int
    age_s: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What to do with messages that the broker will not take.

    Attributes:
        nacked: a queue was full, or failed: it may well recover, so patience.
        returned: no queue is bound: a binding may be on its way, so a few tries.
        refused: the broker closed the channel, or the connection, because of it (404, 403, 406): it
            will not change by itself.
        decide: called with every refusal; what it returns is done, and None means as the policy
            says. It is called on the relay's thread, so it must be quick. One that raises changes
            nothing: it is logged and counted (``Status.callback_errors``).
        breaker: pauses destinations that keep refusing; None pauses none.
    """

    nacked: Retries = field(
        default_factory=lambda: Retries(
            stop_after_attempt(10), wait_random_exponential(multiplier=0.2, max=60)
        )
    )
    returned: Retries = field(
        default_factory=lambda: Retries(
            stop_after_attempt(3), wait_random_exponential(multiplier=0.2, max=5)
        )
    )
    refused: Retries = field(
        default_factory=lambda: Retries(
            stop_after_attempt(1), wait_random_exponential(multiplier=1, max=60)
        )
    )
    decide: Callable[[Refusal], Verdict | None] | None = None
    breaker: Breaker | None = None

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
