"""What is done with a message that the broker refused: tried again for how long, and then?

Knows: tenacity's strategies, and what a refusal is. Must never know: the clock, the outbox or the
wire; what it says are numbers and words that others act upon.

Outages spend no budget: an uncertain attempt is sent again without limit, so that a broker that is
down for a week parks nothing. Refusals do. Those that concern a destination (nacked, returned, 403,
404) are a state of the world that ends one day, so their budgets are times; one that concerns the
message itself (406 and the like) ends only when a person does something, so its budget is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from tenacity import (
    RetryCallState,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential,
    wait_random_exponential,
)

from reliablepub.errors import ConfigurationError
from reliablepub.outcome import Concern, Outcome, OutcomeKind

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
            refused for the first time, in whatever way, or had to wait for a paused destination.
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

    @property
    def is_patient(self) -> bool:
        """Whether the budget is a time; False if it counts attempts."""
        return not self.stop(_state(_MANY_ATTEMPTS, 0.0))


_MANY_ATTEMPTS: Final = 1_000_000
_DAY_S: Final = 24 * 3600.0
_DEPLOYMENT_S: Final = 15 * 60.0


_ONCE: Final = Retries(stop_after_attempt(1), wait_random_exponential(multiplier=1, max=60))


def _for(seconds: float) -> Retries:
    """Patience for a time."""
    return Retries(stop_after_delay(seconds), wait_random_exponential(multiplier=0.2, max=60))


@dataclass(frozen=True, slots=True)
class Breaker:
    """When a destination that keeps refusing is paused.

    What goes there then waits, and everything else goes on. After the pause one message is sent as
    a probe: if it is refused too, another pause begins; if it is confirmed, the others follow, two
    for each that is confirmed. A destination is an exchange and a routing key, or a whole exchange
    where it does not exist (404) or may not be written to (403); such an exchange is paused by its
    first refusal. Only messages that are to be tried again pause anything: where the policy gives
    messages up at once, each is tried.

    Attributes:
        refusals_max: so many in a row (nacked, returned) pause a destination.
        pause: how long; a tenacity wait strategy. The *attempt* is the number of the pause, since
            something was last confirmed there.
        destinations_max: so many destinations that refuse are watched at a time.
    """

    refusals_max: int = 5
    pause: WaitStrategy = field(default_factory=lambda: wait_exponential(multiplier=1, max=60))
    destinations_max: int = 10_000

    def __post_init__(self) -> None:
        """Refuse numbers that would pause everything, or nothing."""
        if self.refusals_max < 1 or self.destinations_max < 1:
            msg = "refusals_max and destinations_max of a Breaker are at least 1"
            raise ConfigurationError(msg)
        if not callable(self.pause):
            msg = f"pause is {self.pause!r}; it takes a strategy, such as wait_fixed(3)"
            raise ConfigurationError(msg)


_OF_THE_PATIENT: Final = Breaker()
"""The default, told from one that is given by its identity."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A message that the broker refused, as `RetryPolicy.decide` sees it: its address, no body.

    Attributes:
        message_id: the AMQP ``message_id``.
        exchange: where it was published to.
        routing_key: with which routing key.
        outcome: nacked, returned or refused, with the broker's words.
        refusals: how often that has happened to it, this time included; one that only waited for a
            paused destination may not have been refused itself.
        age_s: seconds since it was refused for the first time, in whatever way, or had to wait for
            a paused destination.
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
        nacked: a queue is full, or has failed: tried for 24 hours.
        returned: no queue is bound. A binding may be missing for the time of a deployment, or the
            routing key is wrong: tried for 15 minutes.
        refused: the broker closed the channel, or the connection, because of the message itself
            (406 and the like): it will not change by itself, so by default (None) it is not tried
            again.
        decide: called with every refusal, and when the budget of a message runs out that waits for
            a paused destination; what it returns is done, and None means as the policy says. It is
            called on the relay's thread, so it must be quick. One that raises changes nothing: it
            is logged and counted (``Status.callback_errors``).
        breaker: pauses destinations that keep refusing; None pauses none. By default a refusal
            pauses its destination where its budget is a time, and not where it counts attempts,
            since a message that waits makes none. A breaker that is given pauses either way.
        unavailable: the exchange does not exist (404), or this user may not write to it (403): a
            state of the broker and not of the message. By default (None) it is tried for 24 hours,
            or as ``refused`` says where that is given.
    """

    nacked: Retries = field(default_factory=lambda: _for(_DAY_S))
    returned: Retries = field(default_factory=lambda: _for(_DEPLOYMENT_S))
    refused: Retries | None = None
    decide: Callable[[Refusal], Verdict | None] | None = None
    breaker: Breaker | None = _OF_THE_PATIENT
    unavailable: Retries | None = None

    @classmethod
    def prompt(cls) -> RetryPolicy:
        """A few seconds of patience, and no pauses: where somebody waits for each outcome.

        A nacked message is tried ten times, a returned one three times, any other once.
        """
        return cls(
            nacked=Retries(stop_after_attempt(10), wait_random_exponential(multiplier=0.2, max=60)),
            returned=Retries(stop_after_attempt(3), wait_random_exponential(multiplier=0.2, max=5)),
            refused=_ONCE,
            breaker=None,
        )

    def pauses(self, outcome: Outcome) -> bool:
        """Whether this refusal may pause the destination of its message."""
        if self.breaker is _OF_THE_PATIENT:
            return self.retries(outcome).is_patient
        return self.breaker is not None

    def retries(self, outcome: Outcome) -> Retries:
        """The budget for an outcome that is ``nacked``, ``returned`` or ``refused``."""
        match outcome.kind:
            case OutcomeKind.NACKED:
                return self.nacked
            case OutcomeKind.RETURNED:
                return self.returned
            case OutcomeKind.REFUSED:
                if outcome.concern is Concern.MESSAGE:
                    return self.refused or _ONCE
                return self.unavailable or self.refused or _for(_DAY_S)
            case _:
                msg = f"{outcome.kind} is no refusal and has no budget"
                raise ValueError(msg)
