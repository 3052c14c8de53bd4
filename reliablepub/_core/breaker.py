"""A circuit breaker for each destination: one that keeps refusing is paused, and then probed.

Knows: destinations by name, and the time it is told. Must never know: what a destination is, who
waits for it, or where.

    =========  ==========================  =========  ============================================
    state      refused                     confirmed  the pause is over
    =========  ==========================  =========  ============================================
    closed     counted; one too many in    forgotten
               a row opens it
    open       no change: sent before      closed     half-open: one message may go, as a probe
    half-open  open, for a longer pause    closed     another probe: nothing was heard of the last
    =========  ==========================  =========  ============================================

Only destinations that refuse are remembered, and of these a limited number: a closed one gives way
to a newer one. When all of them are open, more are left to the retry policy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

D = TypeVar("D")
"""The name of a destination."""


@dataclass(slots=True)
class _Circuit:
    """One destination.

    Attributes:
        is_open: as in the table; once paused and not open, it is half-open.
        refusals: in a row.
        openings: how often it has been opened, without a confirm in between.
        until: when its pause is over, unless it is closed.
        has_probe: a probe may go.
    """

    is_open: bool = False
    refusals: int = 0
    openings: int = 0
    until: float = 0.0
    has_probe: bool = False


@dataclass(frozen=True, slots=True)
class Pause(Generic[D]):
    """A destination that is not closed.

    Attributes:
        destination: its name.
        refusals: in a row.
        until: when it is probed, or was.
    """

    destination: D
    refusals: int
    until: float


class Breakers(Generic[D]):
    """The breakers of all destinations that have refused something lately.

    Args:
        refusals_max: so many refusals in a row pause a destination.
        destinations_max: so many destinations are remembered.
        pause_s: how long the n-th pause in a row lasts, from 1.
    """

    def __init__(
        self, *, refusals_max: int, destinations_max: int, pause_s: Callable[[int], float]
    ) -> None:
        self._refusals_max = refusals_max
        self._destinations_max = destinations_max
        self._pause_s = pause_s
        self._circuits: dict[D, _Circuit] = {}  # the one that refused last is last
        self._paused: dict[D, _Circuit] = {}

    def __bool__(self) -> bool:
        """Whether any destination is remembered."""
        return bool(self._circuits)

    @property
    def pauses(self) -> Iterator[Pause[D]]:
        """Destinations that are not closed."""
        for destination, circuit in self._paused.items():
            yield Pause(destination, circuit.refusals, circuit.until)

    def refusals(self, destination: D) -> int:
        """How many it has refused in a row."""
        circuit = self._circuits.get(destination)
        return circuit.refusals if circuit is not None else 0

    def is_paused(self, destination: D) -> bool:
        """Whether messages for it have to wait."""
        return destination in self._paused

    def admits(self, destination: D) -> bool:
        """Whether a message for it may go now; one that goes while it is paused is the probe."""
        circuit = self._paused.get(destination)
        if circuit is None:
            return True
        had_probe, circuit.has_probe = circuit.has_probe, False
        return had_probe

    def refused(self, destination: D, now: float) -> bool:
        """A message was nacked, returned or refused there.

        Returns:
            whether that has paused it: then nothing that is waiting to be sent there may go.
        """
        circuit = self._circuits.pop(destination, None) or self._remember()
        if circuit is None:
            return False
        self._circuits[destination] = circuit
        circuit.refusals += 1
        if circuit.is_open or circuit.refusals < self._refusals_max:
            return False
        circuit.is_open = True
        circuit.openings += 1
        circuit.until = now + self._pause_s(circuit.openings)
        circuit.has_probe = False
        self._paused[destination] = circuit
        return True

    def confirmed(self, destination: D) -> bool:
        """A message was confirmed there.

        Returns:
            whether it was paused: then whatever waits for it may go.
        """
        self._circuits.pop(destination, None)
        return self._paused.pop(destination, None) is not None

    def poll_probes(self, now: float) -> list[D]:
        """Destinations whose pause is over: each of them `admits` one message from here on."""
        due = [name for name, circuit in self._paused.items() if circuit.until <= now]
        for destination in due:
            circuit = self._paused[destination]
            circuit.is_open = False
            circuit.until = now + self._pause_s(circuit.openings)
            circuit.has_probe = True
        return due

    def poll_timeout(self) -> float | None:
        """When `poll_probes` has something to tell, or None."""
        return min((circuit.until for circuit in self._paused.values()), default=None)

    def forget(self, destination: D) -> None:
        """Nobody waits for it: whoever comes next finds out how it is."""
        self._circuits.pop(destination, None)
        self._paused.pop(destination, None)

    def _remember(self) -> _Circuit | None:
        """Room for one more; None where all are paused."""
        if len(self._circuits) >= self._destinations_max:
            closed = (name for name in self._circuits if name not in self._paused)
            oldest = next(closed, None)
            if oldest is None:
                return None
            del self._circuits[oldest]
        return _Circuit()
