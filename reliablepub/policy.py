"""Retry policy: how long a refused message is retried, at what intervals, and what happens then.

Knows: tenacity's strategies, and the kinds of refusal. Must never know: the clock, the outbox or
the wire. It returns decisions; the relay acts on them.

Outages spend no retry budget: an uncertain attempt is repeated without limit, so a broker that is
down for a week parks nothing. Only refusals spend it. A refusal that concerns a destination
(nacked, returned, 403, 404) is a temporary state of the broker, so its budget is a time. A refusal
that concerns the message itself (406, for example) does not end without an operator, so its budget
is one attempt.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import inf, isfinite
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
"""A tenacity stop strategy, such as ``stop_after_attempt(10) | stop_after_delay(60)``."""
WaitStrategy: TypeAlias = Callable[[RetryCallState], float]
"""A tenacity wait strategy, such as ``wait_fixed(3)``; returns seconds."""


class GiveUp(StrEnum):
    """What happens to a message that is not retried."""

    PARK = "park"
    """Keep the message in the outbox, with the reason; an operator can retry it."""
    DISCARD = "discard"
    """Delete the message, and count it as discarded."""
    ARRIVED = "arrived"
    """Settle the message as confirmed: an earlier attempt delivered it, and the broker dropped this
    copy as a duplicate. Only `RetryPolicy.decide` can return this, and only for a refusal that
    ``may_be_duplicate``."""


_WAIT_S_MAX: Final = 1e9
"""31 years. An outbox that is opened takes a time thousands of years from now for damage."""
_LIMIT_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RetryIn:
    """A verdict: retry the message after a wait.

    Attributes:
        seconds: length of the wait; 0 or more, and finite. More than 1e9 (31 years) counts as 1e9.

    Raises:
        ConfigurationError: the wait is not a number, is negative, or is not finite.
    """

    seconds: float

    def __post_init__(self) -> None:
        """Reject a negative or endless wait."""
        try:
            is_wait = 0 <= self.seconds < inf
        except TypeError:
            is_wait = False
        if not is_wait:
            said = "a wait is a number of seconds, 0 or more, and finite"
            raise ConfigurationError(f"RetryIn({self.seconds!r:.80}): {said}")
        seconds = float(min(self.seconds, _WAIT_S_MAX))  # float: a Decimal adds to no time
        object.__setattr__(self, "seconds", seconds)


Verdict: TypeAlias = RetryIn | GiveUp
"""What a policy decides after a refusal."""


def wait_s(strategy: WaitStrategy, attempt: int) -> float:
    """Return the wait that the strategy chooses after an attempt, in seconds.

    Args:
        strategy: a tenacity wait strategy.
        attempt: number of the attempt, from 1.

    Raises:
        ConfigurationError: the wait is not finite.
    """
    return _seconds(strategy(_state(attempt, 0.0)))


def _seconds(wait: float) -> float:
    if not isfinite(wait):
        raise ConfigurationError(f"a strategy returned {wait!r}; a wait is a finite number")
    return max(0.0, float(wait))


def _state(attempt: int, age_s: float) -> RetryCallState:
    """The argument of a tenacity strategy."""
    state = RetryCallState(retry_object=None, fn=None, args=(), kwargs={})  # type: ignore[arg-type]
    state.attempt_number = attempt
    state.start_time, state.outcome_timestamp = 0.0, age_s
    return state


@dataclass(frozen=True, slots=True)
class Retries:
    """The retry budget for one kind of refusal.

    Attributes:
        stop: tenacity stop strategy. Its *attempt number* is the number of refusals of this kind,
            so ``stop_after_attempt(1)`` never retries. Its *delay* is the time since the message
            was first refused, for any reason, or first had to wait for a paused destination.
        wait: tenacity wait strategy, such as ``wait_random_exponential()``; returns seconds.
        then: what happens to the message when ``stop`` ends the retries: ``GiveUp.PARK`` or
            ``GiveUp.DISCARD``.

    Raises:
        ConfigurationError: a strategy is not callable, or ``then`` is neither of the two.
    """

    stop: StopStrategy
    wait: WaitStrategy
    then: GiveUp = GiveUp.PARK

    def __post_init__(self) -> None:
        """Reject numbers in place of strategies when the policy is made, not at the first retry."""
        if not callable(self.stop):
            msg = f"stop is {self.stop!r}; it takes a strategy, such as stop_after_attempt(3)"
            raise ConfigurationError(msg)
        if not callable(self.wait):
            msg = f"wait is {self.wait!r}; it takes a strategy, such as wait_fixed(3)"
            raise ConfigurationError(msg)
        # A text would never end the retries, and a spent budget is no evidence of an arrival.
        if not isinstance(self.then, GiveUp) or self.then is GiveUp.ARRIVED:
            msg = f"then is {self.then!r}; it takes GiveUp.PARK or GiveUp.DISCARD"
            raise ConfigurationError(msg)

    def verdict(self, refusals: int, age_s: float) -> Verdict:
        """Decide what happens after a refusal.

        Args:
            refusals: number of refusals of this kind, including this one.
            age_s: seconds since the message was first refused, for any reason, or first had to wait
                for a paused destination.

        Raises:
            ConfigurationError: the wait that the strategy returns is not finite.
        """
        state = _state(refusals, age_s)
        state.upcoming_sleep = _seconds(self.wait(state))  # for `stop_before_delay`
        return self.then if self.stop(state) else RetryIn(state.upcoming_sleep)

    @property
    def lasts_s(self) -> float | None:
        """Seconds after which the budget ends; None if it is a number of attempts, or has no end.

        Raises:
            Exception: the strategy raised it.
        """
        if not self.is_patient or not self.stop(_state(1, _WAIT_S_MAX)):
            return None
        seconds = range(int(_WAIT_S_MAX) + 1)
        return float(
            bisect_left(seconds, 1, key=lambda age: bool(self.stop(_state(1, float(age)))))
        )

    @property
    def is_patient(self) -> bool:
        """Whether the budget is a time. False if it is a number of attempts."""
        # After so many attempts a budget of attempts has ended, and at age 0 one of time has not.
        return not self.stop(_state(_MANY_ATTEMPTS, 0.0))


_MANY_ATTEMPTS: Final = 1_000_000
_ONCE: Final = Retries(stop_after_attempt(1), wait_random_exponential(multiplier=1, max=60))


@dataclass(frozen=True, slots=True)
class Breaker:
    """A circuit breaker: pauses a destination that keeps refusing messages.

    Messages for a paused destination wait; all others are sent. After each pause, a message is sent
    as a probe, each time a different one; messages never sent go several at a time. If a probe is
    refused, another pause begins. If it is confirmed, the waiting messages follow: two for each
    confirm, or as fast as the window allows if the broker had refused the exchange or ``user_id``.

    A destination is an exchange and a routing key. It is a whole exchange if the exchange does not
    exist (404), the user may not write to it (403), or three of its routing keys were nacked
    without a confirm in between. It is a ``user_id`` if that is not the connection's user (406).

    Only a refusal that will be retried pauses a destination. Where the policy gives up messages at
    once, every message is tried. There is one exception: if an exchange refuses a message whose
    retry budget is spent, the exchange is paused too. Other messages whose budget is spent are then
    given up without being sent, because each would cost a channel.

    Attributes:
        refusals_max: number of consecutive refusals (nacked, returned) that pause a destination.
        pause: tenacity wait strategy for the length of a pause. Its *attempt number* is the number
            of pauses since a message to the destination was last confirmed. Messages that were
            never sent are used as probes at least once a minute.
        destinations_max: maximum number of refusing destinations that are tracked.

    Raises:
        ConfigurationError: a limit is not a whole number from 1 to 2**31 - 1, or ``pause`` is not
            callable.
    """

    refusals_max: int = 5
    pause: WaitStrategy = wait_exponential(multiplier=1, max=900)  # noqa: RUF009 (it has no state)
    destinations_max: int = 10_000

    def __post_init__(self) -> None:
        """Reject limits below 1 and a pause that is not a strategy."""
        for limit in (self.refusals_max, self.destinations_max):
            if type(limit) is not int or not 1 <= limit <= _LIMIT_MAX:
                msg = (
                    "refusals_max and destinations_max of a Breaker are whole numbers, at least 1 "
                    f"and at most {_LIMIT_MAX}; not {limit!r:.80}"
                )
                raise ConfigurationError(msg)
        if not callable(self.pause):
            msg = f"pause is {self.pause!r}; it takes a strategy, such as wait_fixed(3)"
            raise ConfigurationError(msg)

    def __reduce__(self) -> str | tuple[object, ...]:
        """Pickle and copy the default breaker by its name: a policy knows it by identity."""
        if self is _DEFAULT_BREAKER:
            return "_DEFAULT_BREAKER"
        return Breaker, (self.refusals_max, self.pause, self.destinations_max)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused message, the argument of `RetryPolicy.decide`, without its body.

    Attributes:
        message_id: AMQP ``message_id``.
        exchange: exchange it was published to.
        routing_key: routing key it was published with.
        outcome: the refusal (nacked, returned or refused), with the broker's reply code and text.
        refusals: number of refusals of this kind, including this one. 0 is possible for a message
            that has only waited for a paused destination.
        age_s: seconds since the message was first refused, for any reason, or first had to wait for
            a paused destination.
        verdict: what the policy will do if ``decide`` returns None.
        may_have_arrived: whether a queue may hold the message because of an earlier attempt or this
            one: an attempt was nacked, or its outcome is unknown.
        may_be_duplicate: whether the broker may have dropped this copy as a duplicate: it returned
            or nacked the copy, and the outcome of an earlier attempt is unknown. A broker that does
            not deduplicate gives the same answers if no queue is bound, or a queue is full.
            ``GiveUp.ARRIVED`` is accepted only if this is True.
    """

    message_id: str
    exchange: str
    routing_key: str
    outcome: Outcome
    refusals: int
    age_s: float
    verdict: Verdict
    may_have_arrived: bool = False
    may_be_duplicate: bool = False


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What happens to messages that the broker refuses.

    Attributes:
        nacked: budget for nacked messages (a queue is full or has failed). Default: 24 hours.
        returned: budget for returned messages (no queue is bound: the binding is missing during a
            deployment, or the routing key is wrong). Default: 15 minutes.
        refused: budget for messages that made the broker close the channel (406, for example),
            while it accepted others around them. Sending such a message again has the same result,
            so the default (None) is a single attempt.
        decide: called with every refusal, and when the budget of a message that waits for a paused
            destination runs out. Its return value replaces the policy's verdict; None keeps it.
            Called on the relay's thread, so it must be quick. If it raises, or returns
            ``GiveUp.ARRIVED`` for a refusal that cannot be a duplicate, the policy's verdict
            stands; the mistake is logged and counted (``Status.callback_errors``).
        breaker: pauses destinations that keep refusing messages. None disables pauses; a message
            that was alone on a channel that closed is then taken as the cause. The default breaker
            pauses only for refusals whose budget is a time: a waiting message makes no attempts, so
            a pause would prolong a budget of attempts. A breaker that you pass pauses for both.
        unavailable: budget for messages whose exchange does not exist (404) or may not be written
            to by this user (403). Default (None): ``refused`` if that is given, otherwise 24 hours.

    Raises:
        ConfigurationError: a value has the wrong type.
    """

    nacked: Retries = Retries(
        stop_after_delay(24 * 3600), wait_random_exponential(multiplier=0.2, max=60)
    )
    returned: Retries = Retries(
        stop_after_delay(15 * 60), wait_random_exponential(multiplier=0.2, max=60)
    )
    refused: Retries | None = None
    decide: Callable[[Refusal], Verdict | None] | None = None
    breaker: Breaker | None = Breaker()
    unavailable: Retries | None = None

    def __post_init__(self) -> None:
        """Reject values of other types when the policy is made, not at the first refusal."""
        for name in ("nacked", "returned", "refused", "unavailable"):
            value = getattr(self, name)
            is_left_out = value is None and name in ("refused", "unavailable")
            if not (isinstance(value, Retries) or is_left_out):
                raise ConfigurationError(f"{name} is {value!r:.80}; it takes Retries(stop, wait)")
        if not isinstance(self.breaker, Breaker | None):
            raise ConfigurationError(f"breaker is {self.breaker!r:.80}; it takes a Breaker or None")
        if self.decide is not None and not callable(self.decide):
            raise ConfigurationError(f"decide is {self.decide!r:.80}; it takes a function")

    @classmethod
    def prompt(cls) -> RetryPolicy:
        """A policy of short retries without pauses, for callers that wait for each outcome.

        A nacked message is tried ten times, a returned message three times, any other message once.
        """
        return cls(
            nacked=Retries(stop_after_attempt(10), wait_random_exponential(multiplier=0.2, max=60)),
            returned=Retries(stop_after_attempt(3), wait_random_exponential(multiplier=0.2, max=5)),
            refused=_ONCE,
            breaker=None,
        )

    def pauses(self, outcome: Outcome) -> bool:
        """Whether this refusal may pause the destination of its message."""
        if self.breaker is _DEFAULT_BREAKER:  # by identity: an equal one is the caller's
            return self.retries(outcome).is_patient
        return self.breaker is not None

    def retries(self, outcome: Outcome) -> Retries:
        """Return the budget for an outcome.

        Raises:
            ValueError: the outcome is not ``nacked``, ``returned`` or ``refused``.
        """
        match outcome.kind:
            case OutcomeKind.NACKED:
                return self.nacked
            case OutcomeKind.RETURNED:
                return self.returned
            case OutcomeKind.REFUSED:
                if outcome.concern is Concern.MESSAGE:
                    return self.refused or _ONCE
                return self.unavailable or self.refused or _DEFAULT.nacked
            case _:
                msg = f"{outcome.kind} is not a refusal and has no budget"
                raise ValueError(msg)


_DEFAULT: Final = RetryPolicy()
_DEFAULT_BREAKER: Final = _DEFAULT.breaker
