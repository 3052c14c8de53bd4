"""The application's hooks: events gathered during a turn, told at its end, failures contained.

Knows: what happens in a turn, which hooks there are, and since when a callback has been running.
Must never know: what hooks are for.

Events without listeners are not collected. An exception from a callback, `SystemExit` included, is
logged and counted; it never ends the relay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeAlias

from reliablepub._core.events import Settlement
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
from reliablepub.outbox.entry import Attempt, DamagedRow, Entry, Sent
from reliablepub.outcome import Outcome, OutcomeKind
from reliablepub.relay.clock import Clock
from reliablepub.relay.journal import write
from reliablepub.relay.status import Link, Status

LOGGER: Final = logging.getLogger("reliablepub.hooks")


class Running(NamedTuple):
    """A callback that has not returned.

    Attributes:
        name: of the callback.
        since: monotonic seconds.
    """

    name: str
    since: float


class Guard:
    """Stands between the relay and the application's callbacks.

    Args:
        log: writes a line of the log, as `Scribe.write` does.

    Attributes:
        errors: how often one has raised.
        running: which one runs now; read from other threads.
    """

    def __init__(self, log: Callable[..., None] = write) -> None:
        self.errors = 0
        self.running: Running | None = None
        self._log = log
        self._monotonic = Clock().monotonic  # those who look are threads, and not in a simulation
        self._told: set[str] = set()

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Call a callback in here; what it raises is logged the first time, and always counted."""
        self.running = Running(name, self._monotonic())
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - the relay goes on, whatever it is
            self.errors += 1
            if name not in self._told:
                self._told.add(name)
                said = f"{name} has failed and is passed over; this is said once"
                self._log(LOGGER, logging.ERROR, said, {"event": "callback_failed"}, error)
        finally:
            self.running = None


Calls: TypeAlias = Mapping[str, Sequence[Callable[[Sequence[Any]], None]]]
"""What is to be called, by event."""
Facts: TypeAlias = tuple[str, str, str, Mapping[str, FieldValue] | None, int]


def calls_of(hooks: Iterable[object]) -> Calls:
    """The methods of the hooks, by event.

    Raises:
        ConfigurationError: one of them listens to nothing, or to an event that does not exist.
    """
    calls: dict[str, list[Callable[[Sequence[Any]], None]]] = {}
    for hook in hooks:
        names = [name for name in dir(hook) if name.startswith("on_")]
        unknown = [name for name in names if name.removeprefix("on_") not in EVENTS]
        if unknown or not (names or hasattr(hook, "watch") or hasattr(hook, "stamp")):
            said = (
                f"has {', '.join(unknown)}" if unknown else "has no method on_..., watch or stamp"
            )
            msg = f"the hook {type(hook).__name__} {said}; events are {', '.join(EVENTS)}"
            raise ConfigurationError(msg)
        for name in names:
            calls.setdefault(name.removeprefix("on_"), []).append(getattr(hook, name))
    return calls


def with_calls(calls: Calls, own: Mapping[str, Callable[[Sequence[Any]], None]]) -> Calls:
    """Those of the hooks, and after them our own."""
    names = (*calls, *(name for name in own if name not in calls))
    return {name: [*calls.get(name, ()), *((own[name],) if name in own else ())] for name in names}


class Notices:
    """Gathers events, and tells them.

    Args:
        calls: see `calls_of`.
        guard: keeps a failing hook off us.
    """

    def __init__(self, calls: Calls, guard: Guard) -> None:
        self._calls = calls
        self._guard = guard
        self._events: dict[str, list[object]] = {name: [] for name in EVENTS if name in calls}
        self._link: tuple[Link, str] = (Link.CONNECTING, "")

    @property
    def hears_confirms(self) -> bool:
        """Whether anybody listens to what happens all the time."""
        return "confirmed" in self._events

    def __bool__(self) -> bool:
        """Whether anybody listens to anything."""
        return bool(self._events)

    def stored(self, entries: Iterable[Entry]) -> None:
        """New entries were committed."""
        events = self._events.get("stored")
        if events is not None:
            events += [MessageStored(*_facts(entry)) for entry in entries]

    def sent(self, batch: Sent) -> None:
        """Entries were written."""
        events = self._events.get("sent")
        if events is not None:
            events += [
                AttemptBegun(*_facts(entry), batch.epoch, tag, entry.attempts + 1)
                for tag, entry in enumerate(batch.entries, batch.first_tag)
            ]

    def ended(self, settlement: Settlement[Entry], epoch: str, latency_s: float) -> None:
        """An attempt has ended, and was counted."""
        outcome, entry = settlement.outcome, settlement.key
        events = self._events.get(outcome.kind.value)
        if events is not None:
            facts, attempts = _facts(entry), entry.attempts
            events.append(AttemptEnded(*facts, epoch, settlement.tag, outcome, attempts, latency_s))

    def given_up(self, parked: Iterable[Attempt], discarded: Iterable[Attempt]) -> None:
        """Entries have left the store without a confirm."""
        for attempt in parked:
            is_expired = attempt.outcome.kind is OutcomeKind.EXPIRED
            self._given_up("expired" if is_expired else "parked", attempt)
        for attempt in discarded:
            self._given_up("discarded", attempt)

    def damaged(self, rows: Iterable[DamagedRow]) -> None:
        """Rows were parked unsent by us, because they are not what was stored.

        Whether they were sent before, by whoever relayed before us, nobody knows any more.
        """
        events = self._events.get("parked")
        if events is not None:
            events += [
                MessageGivenUp(
                    *(row.message_id, row.exchange, row.routing_key, None, 0),
                    Outcome(OutcomeKind.UNCERTAIN, 0, row.reason),
                    attempts=0,
                )
                for row in rows
            ]

    def _given_up(self, name: str, attempt: Attempt) -> None:
        events = self._events.get(name)
        if events is not None:
            entry = attempt.entry
            events.append(MessageGivenUp(*_facts(entry), attempt.outcome, entry.attempts))

    def destination(
        self, name: str, destination: tuple[str, str | None], refusals: int, outcome: Outcome
    ) -> None:
        """A destination is ``paused`` or ``resumed``."""
        events = self._events.get(name)
        if events is not None:
            events.append(DestinationChanged(*destination, refusals, outcome))

    def deliver(self, status: Status) -> None:
        """The turn is over: tell all that was gathered, and how the connection has changed."""
        self._look_at_link(status)
        for name, events in self._events.items():
            if not events:
                continue
            self._events[name] = []
            for call in self._calls[name]:
                with self._guard.calling(f"a hook's on_{name}"):
                    call(events)

    def _look_at_link(self, status: Status) -> None:
        """To be trying again is no news; to fail for another reason is."""
        reason = "" if status.link is Link.CONNECTED else status.reason
        last, now = self._link, (status.link, reason)
        if status.link is Link.CONNECTING or last == now:
            return
        self._link = now
        name = status.link.value
        if status.link is Link.CONNECTED and last[0] is Link.BLOCKED:
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
