"""A circuit breaker for each destination: one that keeps refusing is paused, then probed.

Knows: destinations by name, why one refuses, and the time it is told. Must never know: what a
destination is, which messages wait for it, or where.

    ==========  ===========================  ========================  ===========================
    state       refused                      confirmed                 the pause is over
    ==========  ===========================  ========================  ===========================
    closed      counted; one too many in a   forgotten
                row opens it
    open        no change: sent before       recovering                probing
    probing     open, for a longer pause     recovering                one more may go: nothing was
                                                                       heard of the last probe
    recovering  open, for the first pause    two more may go           one more may go
    ==========  ===========================  ========================  ===========================

*Probing* lets one message go. *Recovering* lets two more go for each that is confirmed, as TCP's
slow start does: behind a full queue with one free place, the probe that takes it must not bring
thousands of refusals after it. It is closed when fewer messages wait than may go.

Only destinations that refuse are remembered, and of these a limited number: a closed one gives way
to a newer one. When all of them are paused, more are left to the retry policy alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count
from typing import Final, Generic, TypeVar

D = TypeVar("D")
"""The name of a destination."""
W = TypeVar("W")
"""Why it refuses."""

AT_ONCE_MAX: Final = 2_000
"""Most messages that may go between two confirms."""


class _State(Enum):
    CLOSED = auto()
    OPEN = auto()
    PROBING = auto()
    RECOVERING = auto()


@dataclass(slots=True)
class _Circuit(Generic[W]):
    """One destination.

    Attributes:
        state: as in the table.
        refusals: in a row.
        openings: how often it has been opened, without a confirm in between.
        since: when it was paused, while it is not closed.
        until: when its pause is over, while it is not closed.
        why: what was said at the last refusal.
        room: so many messages may go, while it is not closed.
        asked: so many of these were not told by `Breakers.poll_room` yet.
        alarm: when `Breakers.poll_room` looks at it, while it is not closed; not after ``until``.
    """

    why: W
    state: _State = _State.CLOSED
    refusals: int = 0
    openings: int = 0
    since: float = 0.0
    until: float = 0.0
    room: int = 0
    asked: int = 0
    alarm: float = float("inf")


@dataclass(frozen=True, slots=True)
class Pause(Generic[D, W]):
    """A destination that is not closed.

    Attributes:
        destination: its name.
        refusals: in a row.
        since: when it was paused.
        until: when it is probed, or was.
        why: what was said at the last refusal.
    """

    destination: D
    refusals: int
    since: float
    until: float
    why: W


class Breakers(Generic[D, W]):
    """The breakers of all destinations that have refused something lately.

    Args:
        destinations_max: so many destinations are remembered.
        pause_s: how long the n-th pause in a row lasts, from 1.
    """

    def __init__(self, *, destinations_max: int, pause_s: Callable[[int], float]) -> None:
        self._destinations_max = destinations_max
        self._pause_s = pause_s
        self._circuits: dict[D, _Circuit[W]] = {}  # the one that refused last is last
        self._paused: dict[D, _Circuit[W]] = {}
        self._letting_go: dict[D, None] = {}
        self._alarms: list[tuple[float, int, D, _Circuit[W]]] = []
        self._numbers = count()

    def __bool__(self) -> bool:
        """Whether any destination is remembered."""
        return bool(self._circuits)

    @property
    def pauses(self) -> Iterator[Pause[D, W]]:
        """Destinations that are not closed, those that were paused first in front."""
        for name, one in self._paused.items():
            yield Pause(name, one.refusals, one.since, one.until, one.why)

    def pause(self, destination: D) -> Pause[D, W] | None:
        """One of them."""
        one = self._paused.get(destination)
        if one is None:
            return None
        return Pause(destination, one.refusals, one.since, one.until, one.why)

    def __len__(self) -> int:
        """How many are not closed."""
        return len(self._paused)

    def is_paused(self, destination: D) -> bool:
        """Whether messages for it have to wait, unless they are let go."""
        return destination in self._paused

    def admits(self, destination: D) -> bool:
        """Whether a message for it may go now; while it is paused, that is one of few."""
        circuit = self._paused.get(destination)
        if circuit is None:
            return True
        if not circuit.room:
            return False
        circuit.room -= 1
        return True

    def refused(self, destination: D, now: float, *, why: W, refusals_max: int) -> bool:
        """A message was refused there.

        Args:
            destination: its name.
            now: seconds.
            why: what was said.
            refusals_max: so many in a row pause it.

        Returns:
            whether it is paused from now on: then nothing that is waiting to be sent there may go.
        """
        circuit = self._circuits.pop(destination, None) or self._remember(why)
        if circuit is None:
            return False
        self._circuits[destination] = circuit
        circuit.refusals += 1
        circuit.why = why
        if circuit.state is _State.OPEN or circuit.refusals < refusals_max:
            return False
        circuit.openings += 1
        self._pause(destination, circuit, now, now + self._pause_s(circuit.openings))
        circuit.state, circuit.room, circuit.asked = _State.OPEN, 0, 0
        self._letting_go.pop(destination, None)
        return True

    def suspect(self, destination: D, now: float, *, why: W) -> bool:
        """Messages wait there from an earlier time, and nobody knows how it is: it is to be probed.

        Returns:
            whether there was room to remember it.
        """
        circuit = self._remember(why)
        if circuit is None:
            return False
        self._circuits[destination] = circuit
        self._pause(destination, circuit, now, now)
        circuit.state = _State.OPEN
        return True

    def confirmed(self, destination: D, now: float) -> None:
        """A message was confirmed there."""
        circuit = self._paused.get(destination)
        if circuit is None:
            self._circuits.pop(destination, None)
            return
        circuit.state = _State.RECOVERING
        circuit.refusals = circuit.openings = 0
        self._pause(destination, circuit, now, now + self._pause_s(1))
        more = min(2, AT_ONCE_MAX - circuit.room)
        if more:
            circuit.room += more
            circuit.asked += more
            self._letting_go[destination] = None

    def poll_room(self, now: float) -> list[tuple[D, int]]:
        """Destinations to which messages may go since the last call, and how many more."""
        over = []
        while self._next_alarm() <= now:
            _, _, destination, circuit = heapq.heappop(self._alarms)
            circuit.alarm = float("inf")
            over.append((destination, circuit))
        for destination, circuit in over:
            if circuit.state is _State.OPEN:
                circuit.state = _State.PROBING
            self._pause(destination, circuit, now, now + self._pause_s(max(1, circuit.openings)))
            circuit.room, circuit.asked = max(1, circuit.room), max(1, circuit.asked)
            self._letting_go[destination] = None
        due = [(destination, self._paused[destination].asked) for destination in self._letting_go]
        for destination in self._letting_go:
            self._paused[destination].asked = 0
        self._letting_go.clear()
        return due

    def poll_timeout(self) -> float | None:
        """When `poll_room` has something to tell, or None."""
        if self._letting_go:
            return float("-inf")
        return self._next_alarm() if self._paused else None

    def no_more_wait(self, destination: D) -> bool:
        """Fewer were waiting there than might go.

        Returns:
            whether it was recovering, and so is well now; one that nobody waits for is forgotten,
            and one that has refused something since stays as it is.
        """
        circuit = self._paused.get(destination)
        if circuit is None or circuit.state is _State.OPEN:
            return False
        self.forget(destination)
        return circuit.state is _State.RECOVERING

    def forget(self, destination: D) -> None:
        """It is well, or nobody waits for it: the next refusal is its first."""
        self._circuits.pop(destination, None)
        self._paused.pop(destination, None)
        self._letting_go.pop(destination, None)

    # ------------------------------------------------------------------ inside

    def _pause(self, destination: D, circuit: _Circuit[W], now: float, until: float) -> None:
        if destination not in self._paused:
            self._paused[destination] = circuit
            circuit.since = now
        circuit.until = until
        if until < circuit.alarm:
            self._set_alarm(destination, circuit)

    def _set_alarm(self, destination: D, circuit: _Circuit[W]) -> None:
        circuit.alarm = circuit.until
        heapq.heappush(self._alarms, (circuit.alarm, next(self._numbers), destination, circuit))

    def _next_alarm(self) -> float:
        """When the next pause is over; infinity without one."""
        while self._alarms:
            at, _, destination, circuit = self._alarms[0]
            is_paused = self._paused.get(destination) is circuit
            if is_paused and at == circuit.alarm == circuit.until:
                return at
            heapq.heappop(self._alarms)
            if is_paused and at == circuit.alarm:  # its pause was made longer since
                self._set_alarm(destination, circuit)
        return float("inf")

    def _remember(self, why: W) -> _Circuit[W] | None:
        """Room for one more; None where all are paused."""
        if len(self._circuits) >= self._destinations_max:
            if len(self._paused) >= len(self._circuits):
                return None
            oldest = next(name for name in self._circuits if name not in self._paused)
            del self._circuits[oldest]
        return _Circuit(why)
