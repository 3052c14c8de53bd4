"""What the application has called: its hooks, at the end of each turn, and its retry policy.

Knows: the events of a turn, the hooks, the policy, and since when a callback has been running. Must
never know: what hooks do.

Events without listeners are not collected. An exception from a callback, `SystemExit` included, is
counted, and logged the first time; it never ends the relay.

A callback may fork. In the child, its thread is a copy of the relay's, with the parent's connection
to the broker. So a child that leaves the callback ends there: a second relay on the connection
would take confirms of the parent's messages, and shift its delivery tags.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import iscoroutinefunction
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

from reliablepub._core.events import Batch, Settlement
from reliablepub.errors import ConfigurationError
from reliablepub.headers import FieldValue
from reliablepub.hooks import (
    EVENTS,
    AttemptBegun,
    AttemptEnded,
    DestinationChanged,
    LinkChanged,
    MessageGivenUp,
    MessageStored,
)
from reliablepub.outbox.entry import Attempt, DamagedRow, Entry
from reliablepub.outcome import Outcome, OutcomeKind
from reliablepub.policy import Breaker, GiveUp, Refusal, RetryIn, RetryPolicy, Verdict, wait_s
from reliablepub.printable import named
from reliablepub.relay.clock import Clock
from reliablepub.relay.journal import write
from reliablepub.relay.status import Link, Outage, Status

LOGGER: Final = logging.getLogger("reliablepub.hooks")


class Running(NamedTuple):
    """A callback that has not returned yet."""

    name: str
    since: float  # monotonic seconds


class Guard:
    """Contains exceptions of the application's callbacks: counts each, logs the first per name."""

    def __init__(self, log: Callable[..., None] = write) -> None:
        self.errors: int = 0
        self.running: Running | None = None  # other threads read it
        self._log = log
        self._monotonic = Clock().monotonic  # the real clock: other threads compare with it
        self._told: set[str] = set()

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """A context in which to call a callback, whose exceptions are suppressed."""
        outer, self.running = self.running, Running(name, self._monotonic())
        pid = os.getpid()
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - no exception of a callback ends the relay
            if os.getpid() != pid:  # a child that the callback has forked
                _end_child(error)
            self.failed(name, error)
        else:
            if os.getpid() != pid:
                _end_child(SystemExit())
        finally:
            self.running = outer  # a callback may have called this one

    def failed(self, name: str, error: BaseException) -> None:
        """Count an exception of a callback; log it if it is the first of this name."""
        self.errors += 1
        if name not in self._told:
            self._told.add(name)
            said = f"{name} has raised an exception; further ones are counted, not logged"
            self._log(LOGGER, logging.ERROR, said, {"event": "callback_failed"}, error)


def _end_child(error: BaseException) -> NoReturn:
    """End a forked process in which a callback has raised, and clean up nothing of its parent's."""
    status = 1
    try:
        if isinstance(error, SystemExit) and isinstance(error.code, int | None):
            status = (error.code or 0) & 0xFF
        else:
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(status)


_STRATEGY: Final = "a strategy of RetryPolicy"
_DEFAULT: Final = RetryPolicy()
_OF_DUPLICATES: Final = (OutcomeKind.RETURNED, OutcomeKind.NACKED)
"""How a broker answers a copy that it drops as a duplicate. It closes no channel because of one."""


class GuardedPolicy:
    """The application's retry policy, with exceptions of its callbacks contained."""

    def __init__(self, policy: RetryPolicy, guard: Guard) -> None:
        self._policy = policy
        self._guard = guard
        self.breaker: Final = policy.breaker or Breaker()

    def pauses(self, outcome: Outcome) -> bool:
        """Whether refusals like this one pause their destination."""
        with self._guard.calling(_STRATEGY):
            return self._policy.pauses(outcome)
        return True  # the strategy has raised

    def pause_s(self, opening: int) -> float:
        """Length of the n-th pause in a row of a destination, in seconds."""
        with self._guard.calling("Breaker.pause"):
            return wait_s(self.breaker.pause, opening)
        return wait_s(Breaker().pause, opening)  # the strategy has raised

    def lasts_s(self) -> dict[str, float]:
        """Seconds for which a refused message is retried, by outcome, where it is a time."""
        found: dict[str, float] = {}
        for outcome, retries in (
            ("nacked", self._policy.nacked),
            ("returned", self._policy.returned),
        ):
            with self._guard.calling(_STRATEGY):
                if (lasts_s := retries.lasts_s) is not None:
                    found[outcome] = lasts_s
        return found

    def gives_up_at(self, outcome: Outcome, since: float) -> float | None:
        """When a message that was first refused at a time is given up; None if no time decides."""
        with self._guard.calling(_STRATEGY):
            lasts_s = self._policy.retries(outcome).lasts_s
            return None if lasts_s is None else since + lasts_s
        return None  # the strategy has raised

    def is_time_over(self, outcome: Outcome, age_s: float) -> bool:
        """Whether a message that had only waited for as long is given up, and a new one is not.

        Not so where the policy gives up at once, for example a 404 by its ``decide``.
        """
        with self._guard.calling(_STRATEGY):
            retries = self._policy.retries(outcome)
            is_new_kept = isinstance(retries.verdict(1, 0.0), RetryIn)
            return is_new_kept and isinstance(retries.verdict(0, age_s), GiveUp)
        return False  # the strategy has raised

    def verdict(self, entry: Entry, outcome: Outcome, wall: float) -> Verdict:
        """What to do with an entry after a refusal, which its counts include already."""
        verdict = self._by_budget(entry, outcome, wall)
        may_be_duplicate = bool(entry.uncertain) and outcome.kind in _OF_DUPLICATES
        return self._decided(entry, outcome, wall, verdict, may_be_duplicate=may_be_duplicate)

    def end_of_wait(self, entry: Entry, outcome: Outcome, wall: float) -> GiveUp | None:
        """How to give up an entry after a refusal by its destination; None if it may wait on."""
        verdict = self._by_budget(entry, outcome, wall)
        if isinstance(verdict, GiveUp):
            # Another message may have met the refusal, so it says nothing about a copy of this one.
            verdict = self._decided(entry, outcome, wall, verdict, may_be_duplicate=False)
        return verdict if isinstance(verdict, GiveUp) else None

    def _by_budget(self, entry: Entry, outcome: Outcome, wall: float) -> Verdict:
        refusals, age_s = _spent(entry, outcome, wall)
        with self._guard.calling(_STRATEGY):
            return self._policy.retries(outcome).verdict(refusals, age_s)
        # The strategy has raised.
        return _DEFAULT.retries(outcome).verdict(refusals, age_s)

    def _decided(
        self,
        entry: Entry,
        outcome: Outcome,
        wall: float,
        verdict: Verdict,
        *,
        may_be_duplicate: bool,
    ) -> Verdict:
        """The verdict of the application's ``decide``; without one, the given verdict."""
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
                    may_have_arrived=entry.may_have_arrived,
                    may_be_duplicate=may_be_duplicate,
                )
            )
            if said is GiveUp.ARRIVED and not may_be_duplicate:
                msg = f"RetryPolicy.decide returned {said!r}, but may_be_duplicate is false"
                raise ValueError(msg)
            if isinstance(said, RetryIn | GiveUp):
                return said
            if said is not None:
                msg = f"RetryPolicy.decide returned {said!r}: not RetryIn, GiveUp or None"
                raise TypeError(msg)
        return verdict  # also if ``decide`` has raised


def _spent(entry: Entry, outcome: Outcome, wall: float) -> tuple[int, float]:
    """Refusals of this kind, and seconds since the first refusal of any kind."""
    return getattr(entry, outcome.kind.value), entry.refused_for_s(wall)


Calls: TypeAlias = Mapping[str, Sequence[Callable[[Sequence[Any]], None]]]
"""Callbacks by event; each takes a list of events."""
OTHER_METHODS: Final = ("watch", "stamp", "rejected")
"""Methods of hooks that are not event callbacks."""
Facts: TypeAlias = tuple[str, str, str, Mapping[str, FieldValue] | None, int]


def calls_of(hooks: Iterable[object]) -> Calls:
    """Collect the ``on_...`` methods of hooks, by event; refuse hooks that can never be called."""
    calls: dict[str, list[Callable[[Sequence[Any]], None]]] = {}
    for hook in hooks:
        names = [name for name in dir(hook) if name.startswith("on_")]
        unknown = [name for name in names if name.removeprefix("on_") not in EVENTS]
        if unknown or not (names or any(hasattr(hook, name) for name in OTHER_METHODS)):
            said = (
                f"has {', '.join(unknown)}"
                if unknown
                else f"has no method on_..., {' or '.join(OTHER_METHODS)}"
            )
            msg = f"the hook {type(hook).__name__} {said}; events are {', '.join(EVENTS)}"
            raise ConfigurationError(msg)
        methods = [*names, *(name for name in OTHER_METHODS if hasattr(hook, name))]
        awaited = [name for name in methods if iscoroutinefunction(getattr(hook, name))]
        if awaited:
            raise ConfigurationError(
                f"the hook {type(hook).__name__} has async def {' and '.join(awaited)}; hooks are "
                "called on the relay's thread or the caller's, where nothing can be awaited"
            )
        for name in names:
            calls.setdefault(name.removeprefix("on_"), []).append(getattr(hook, name))
    return calls


def with_calls(calls: Calls, own: Mapping[str, Callable[[Sequence[Any]], None]]) -> Calls:
    """Combine the hooks' callbacks with the library's own, which are called last."""
    names = (*calls, *(name for name in own if name not in calls))
    return {name: [*calls.get(name, ()), *((own[name],) if name in own else ())] for name in names}


class Notices:
    """Collects the events of a turn, and delivers them to hooks."""

    def __init__(self, calls: Calls, guard: Guard) -> None:
        self._calls = calls
        self._guard = guard
        self._events: dict[str, list[object]] = {name: [] for name in EVENTS if name in calls}
        self._link: tuple[Link, str] = (Link.CONNECTING, "")
        self._outage = Outage()
        self.hears_sent: Final = "sent" in self._events
        self.hears_confirms: Final = "confirmed" in self._events  # the most frequent event to build

    def stored(self, entries: Iterable[Entry]) -> None:
        """Note that new entries were committed."""
        events = self._events.get("stored")
        if events is not None:
            events += [MessageStored(*_facts(entry)) for entry in entries]

    def sent(self, batch: Batch[Entry], epoch: str) -> None:
        """Note that a batch was passed to the transport."""
        self._events["sent"] += [
            AttemptBegun(*_facts(entry), epoch, tag, entry.attempts + 1)
            for tag, entry in enumerate(batch.keys, batch.first_tag)
        ]

    def ended(self, settlement: Settlement[Entry], epoch: str, latency_s: float) -> None:
        """Note that an attempt has ended; the entry's counts include it already."""
        outcome, entry = settlement.outcome, settlement.key
        events = self._events.get(outcome.kind.value)
        if events is not None:
            facts, attempts = _facts(entry), entry.attempts
            tag, stored_at = settlement.tag, entry.stored_at
            event = AttemptEnded(*facts, epoch, tag, outcome, attempts, latency_s, stored_at)
            is_confirmed = outcome.kind is OutcomeKind.CONFIRMED
            event.may_have_arrived = is_confirmed or entry.may_have_arrived
            events.append(event)

    def given_up(self, parked: Iterable[Attempt], discarded: Iterable[Attempt]) -> None:
        """Note that entries were given up, and committed as such."""
        for attempt in parked:
            is_expired = attempt.outcome.kind is OutcomeKind.EXPIRED
            self._given_up("expired" if is_expired else "parked", attempt)
        for attempt in discarded:
            self._given_up("discarded", attempt)

    def damaged(self, rows: Iterable[DamagedRow]) -> None:
        """Note that the store has parked rows because they are damaged."""
        events = self._events.get("parked")
        if events is not None:
            events += [
                MessageGivenUp(
                    *(row.message_id, row.exchange, row.routing_key, None, 0),
                    Outcome(OutcomeKind.UNCERTAIN, 0, row.reason),
                    attempts=0,
                    may_have_arrived=row.may_have_arrived,
                )
                for row in rows
            ]

    def _given_up(self, name: str, attempt: Attempt) -> None:
        events = self._events.get(name)
        if events is not None:
            entry = attempt.entry
            facts, doubt = _facts(entry), entry.may_have_arrived
            events.append(MessageGivenUp(*facts, attempt.outcome, entry.attempts, doubt))

    def destination(
        self,
        name: str,  # "paused" or "resumed"
        destination: tuple[str, str | None, str | None],  # exchange, key (None: all), user_id
        refusals: int,  # in a row
        outcome: Outcome,  # the last of them
    ) -> None:
        """Note that a destination was paused or resumed."""
        events = self._events.get(name)
        if events is not None:
            exchange, routing_key, user_id = destination
            changed = DestinationChanged(exchange, routing_key, refusals, outcome, user_id)
            events.append(changed)

    def deliver(self, status: Status) -> None:
        """Deliver the events of the turn, among them changes of the connection."""
        self._look_at_link(status)
        for name, events in self._events.items():
            if not events:
                continue
            self._events[name] = []  # not cleared: a hook may keep the list that it was given
            for call in self._calls[name]:
                with self._guard.calling(f"on_{name} ({named(call)})"):
                    call(events)

    def _look_at_link(self, status: Status) -> None:
        """Note a change of the connection.

        Another attempt to connect is not a change; a failure for another reason is. The next
        attempt may begin in the turn that hears of the failure, so *connecting* with a reason
        counts as a failure too.
        """
        link, reason = status.link, "" if status.link is Link.CONNECTED else status.reason
        if link is Link.CONNECTING:
            if not reason:
                return
            link = Link.DISCONNECTED
        last, self._link = self._link, (link, reason)
        if last == self._link:
            return
        if link is not Link.DISCONNECTED:
            self._outage.end()
        elif not self._outage.is_new(reason):
            return
        name = link.value
        if link is Link.CONNECTED and last[0] is Link.BLOCKED:
            name = "unblocked"
        events = self._events.get(name)
        if events is not None:
            events.append(LinkChanged(reason, status.connects, status.open))


def _facts(entry: Entry) -> Facts:
    message = entry.message
    return (
        message.message_id or "",
        message.exchange,
        message.routing_key,
        message.headers,
        message.size,
    )
