"""Circuit breakers, one for each destination: pause a destination that keeps refusing, then probe.

Knows: names of destinations, the reason of the last refusal, and the time it is given. Must never
know: what a destination is, or which messages wait for it.

    ==========  ===========================  ========================  ===========================
    state       on a refusal                 on a confirm              when the pause is over
    ==========  ===========================  ========================  ===========================
    closed      counted; ``refusals_max``    forgotten
                in a row: open
    open        no change: the message was   recovering                probing
                sent before the pause
    probing     open, for a longer pause     recovering                more may go: the last probes
                                                                       have no outcome
    recovering  counted; ``refusals_max``    two more messages may go  one more message may go
                in a row: open, for the
                first pause
    ==========  ===========================  ========================  ===========================

A refused message may have reached another queue of its exchange, where each repetition is one more
copy. So *probing* admits *fresh* messages, which were never sent: twice as many after each pause,
and at least once a minute. If there are none, it admits one message that was sent before, after the
whole pause, which grows to minutes. *Recovering* admits two more for each confirm, like TCP slow
start: a probe that takes the only free place of a full queue must not be followed by thousands of
refusals. A recovering destination is closed when fewer messages wait than may go.

Only refusing destinations are tracked, up to ``destinations_max``. A new one replaces the closed
one whose last refusal is oldest. If all of them are paused, a new one is not tracked, and its
messages follow the retry policy alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count
from typing import Final, Generic, TypeVar

D = TypeVar("D")
"""Name of a destination."""
W = TypeVar("W")
"""Reason of a refusal."""

AT_ONCE_MAX: Final = 2_000
"""Maximum number of messages admitted at a time."""
FRESH_S: Final = 60.0
"""Longest time between probes by messages that were never sent, in seconds."""


class _State(Enum):
    CLOSED = auto()
    OPEN = auto()
    PROBING = auto()
    RECOVERING = auto()


@dataclass(slots=True)
class _Circuit(Generic[W]):
    """The breaker of one destination. Its times are valid only while it is not closed."""

    why: W  # of the last refusal
    state: _State = _State.CLOSED
    refusals: int = 0  # in a row
    openings: int = 0  # pauses in a row, without a confirm in between
    until: float = 0.0  # when the next fresh message may go
    again_at: float = 0.0  # when the pause is over, and a message may go that was sent before
    room: int = 0  # messages that may go while the breaker is not closed
    asked: int = 0  # part of `room` that `Breakers.poll_room` has not returned yet
    alarm: float = float("inf")  # when `Breakers.poll_room` checks it; never after `until`


@dataclass(slots=True)
class Pause(Generic[D, W]):
    """A destination whose breaker is not closed."""

    destination: D
    refusals: int  # in a row
    until: float  # when it ends, or ended, with a probe
    why: W  # of the last refusal


@dataclass(slots=True)
class Room(Generic[D]):
    """More messages may go to a destination."""

    destination: D
    count: int
    are_probes: bool  # these are to be fresh messages
    may_repeat: bool  # in place of fresh messages, one may go that was sent before


class Breakers(Generic[D, W]):
    """The breakers of all destinations that have recently refused messages."""

    def __init__(self, *, destinations_max: int, pause_s: Callable[[int], float]) -> None:
        self._destinations_max = destinations_max
        self._pause_s = pause_s  # seconds of the n-th pause in a row, n from 1
        self._circuits: dict[D, _Circuit[W]] = {}  # ordered by time of the last refusal
        self._paused: dict[D, _Circuit[W]] = {}
        self._letting_go: dict[D, None] = {}
        self._alarms: list[tuple[float, int, D, _Circuit[W]]] = []
        self._numbers = count()

    @property
    def tracked(self) -> Collection[D]:
        """The destinations that are tracked; a view that stays up to date."""
        return self._circuits

    @property
    def pauses(self) -> Iterator[Pause[D, W]]:
        """The destinations that are not closed, in the order in which they were paused."""
        for name, one in self._paused.items():
            yield Pause(name, one.refusals, one.until, one.why)

    def pause(self, destination: D) -> Pause[D, W] | None:
        """The pause of a destination; None if it is closed."""
        one = self._paused.get(destination)
        if one is None:
            return None
        return Pause(destination, one.refusals, one.until, one.why)

    def __len__(self) -> int:
        """Number of destinations that are not closed."""
        return len(self._paused)

    def is_paused(self, destination: D) -> bool:
        """Whether the destination is not closed, so that its messages wait until admitted."""
        return destination in self._paused

    def admits(self, destination: D) -> bool:
        """Whether one message may go to the destination now; if it is paused, uses up room."""
        circuit = self._paused.get(destination)
        if circuit is None:
            return True
        if not circuit.room:
            return False
        circuit.room -= 1
        return True

    def refused(self, destination: D, now: float, *, why: W, refusals_max: int) -> bool:
        """Record the refusal of a message; return whether it has paused the destination.

        If so, the caller must hold back the messages that it was about to send there.
        """
        circuit = self._circuits.pop(destination, None) or self._remember(why)
        if circuit is None:
            return False
        self._circuits[destination] = circuit  # last: ordered by time of the last refusal
        circuit.refusals += 1
        circuit.why = why
        is_first = circuit.state is not _State.PROBING and circuit.refusals < refusals_max
        if circuit.state is _State.OPEN or is_first:
            return False
        circuit.openings += 1
        circuit.again_at = now + self._pause_s(circuit.openings)
        self._pause(destination, circuit, min(circuit.again_at, now + FRESH_S))
        circuit.state, circuit.room, circuit.asked = _State.OPEN, 0, 0
        self._letting_go.pop(destination, None)
        return True

    def suspect(self, destination: D, now: float, *, why: W) -> bool:
        """Pause a destination, to probe it at once; return whether there was room to track it.

        Used after a restart: messages wait for the destination, and its state is unknown.
        """
        circuit = self._remember(why)
        if circuit is None:
            return False
        self._circuits[destination] = circuit
        self._pause(destination, circuit, now)
        circuit.state = _State.OPEN
        return True

    def confirmed(self, destination: D, now: float) -> None:
        """Record the confirm of a message."""
        circuit = self._paused.get(destination)
        if circuit is None:
            self._circuits.pop(destination, None)
            return
        circuit.state = _State.RECOVERING
        circuit.refusals = circuit.openings = 0
        circuit.again_at = now  # the pause is over, however long it was to be
        self._pause(destination, circuit, now + self._pause_s(1))
        more = min(2, AT_ONCE_MAX - circuit.room)
        if more:
            circuit.room += more
            circuit.asked += more
            self._letting_go[destination] = None

    def poll_room(self, now: float) -> list[Room[D]]:
        """Take the destinations to which more messages may go since the last call."""
        over = []
        while self._next_alarm() <= now:
            _, _, destination, circuit = heapq.heappop(self._alarms)
            circuit.alarm = float("inf")
            over.append((destination, circuit))
        for destination, circuit in over:
            if circuit.state is _State.OPEN:
                circuit.state = _State.PROBING
            count = min(2 ** max(0, circuit.openings - 1), AT_ONCE_MAX)
            if circuit.state is _State.RECOVERING:
                count = 1
            circuit.room, circuit.asked = max(count, circuit.room), max(count, circuit.asked)
            self._letting_go[destination] = None
            self._pause(destination, circuit, now + self._next_s(circuit, now))
        due = [self._room_of(destination, now) for destination in self._letting_go]
        self._letting_go.clear()
        return due

    def _room_of(self, destination: D, now: float) -> Room[D]:
        circuit = self._paused[destination]
        count, circuit.asked = circuit.asked, 0
        are_probes = circuit.state is _State.PROBING
        return Room(destination, count, are_probes, may_repeat=circuit.again_at <= now)

    def _next_s(self, circuit: _Circuit[W], now: float) -> float:
        """How long the next probes wait if these have no outcome."""
        rest_s = circuit.again_at - now
        return min(FRESH_S, rest_s if rest_s > 0 else self._pause_s(max(1, circuit.openings)))

    def poll_timeout(self) -> float | None:
        """When `poll_room` will return something; None if it will not."""
        if self._letting_go:
            return float("-inf")
        return self._next_alarm() if self._paused else None

    def no_more_wait(self, destination: D) -> bool:
        """Close a destination: fewer messages wait than may go. Return whether it has recovered."""
        circuit = self._paused.get(destination)
        if circuit is None or circuit.state is _State.OPEN:  # has refused one since: stays paused
            return False
        self.forget(destination)
        return circuit.state is _State.RECOVERING

    def forget(self, destination: D) -> None:
        """Stop tracking a destination; its next refusal counts as the first."""
        self._circuits.pop(destination, None)
        self._paused.pop(destination, None)
        self._letting_go.pop(destination, None)

    # ------------------------------------------------------------------ inside

    def _pause(self, destination: D, circuit: _Circuit[W], until: float) -> None:
        self._paused.setdefault(destination, circuit)
        circuit.until = until
        if until < circuit.alarm:
            self._set_alarm(destination, circuit)

    def _set_alarm(self, destination: D, circuit: _Circuit[W]) -> None:
        circuit.alarm = circuit.until
        heapq.heappush(self._alarms, (circuit.alarm, next(self._numbers), destination, circuit))

    def _next_alarm(self) -> float:
        """When the next pause is over; infinity if there is none."""
        while self._alarms:  # those of ended or extended pauses are dropped here
            at, _, destination, circuit = self._alarms[0]
            is_paused = self._paused.get(destination) is circuit
            if is_paused and at == circuit.alarm == circuit.until:
                return at
            heapq.heappop(self._alarms)
            if is_paused and at == circuit.alarm:  # the pause was extended after this alarm was set
                self._set_alarm(destination, circuit)
        return float("inf")

    def _remember(self, why: W) -> _Circuit[W] | None:
        """Make room for one more breaker; None if all tracked destinations are paused."""
        if len(self._circuits) >= self._destinations_max:
            if len(self._paused) >= len(self._circuits):
                return None
            oldest = next(name for name in self._circuits if name not in self._paused)
            del self._circuits[oldest]
        return _Circuit(why)
