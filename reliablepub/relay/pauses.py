"""Destinations that keep refusing are paused: what goes there waits on disk, and nobody else does.

Knows: entries by their destination, and when one may go. Must never know: SQL, the wire.

What waits has no due time but *when its destination is well* (`HELD`), so that it takes no memory,
spends no budget, and is in nobody's way. When a pause is over, the store lets one of them go, as a
probe; when a probe is confirmed, the others, a page at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, TypeAlias

from reliablepub._core.breaker import Breakers
from reliablepub._core.session import Session
from reliablepub.outbox.entry import Entry, Release, Turn
from reliablepub.policy import Breaker, wait_s
from reliablepub.relay.guard import Guard
from reliablepub.relay.notices import Notices
from reliablepub.relay.status import Paused

Destination: TypeAlias = tuple[str, str]
"""Exchange and routing key."""
PAGE: Final = 2_000
SHOWN_MAX: Final = 100


def destination_of(entry: Entry) -> Destination:
    """Where an entry goes."""
    return entry.message.exchange, entry.message.routing_key


class Pauses:
    """The breakers, and what follows from them in one turn.

    Args:
        breaker: when destinations are paused; None never.
        guard: keeps a failing strategy off us.
        notices: what hooks are told.
        has_held: an earlier run has left some waiting; of the reasons nothing is known.
    """

    def __init__(
        self, breaker: Breaker | None, guard: Guard, notices: Notices, *, has_held: bool
    ) -> None:
        self._breaker = breaker or Breaker()
        self._is_on = breaker is not None
        self._guard = guard
        self._notices = notices
        self._breakers: Breakers[Destination] = Breakers(
            refusals_max=self._breaker.refusals_max,
            destinations_max=self._breaker.destinations_max,
            pause_s=self._pause_s,
        )
        self._new: set[Destination] = set()
        self._letting_go: set[Destination | None] = {None} if has_held else set()

    def __bool__(self) -> bool:
        """Whether any destination is watched."""
        return bool(self._breakers)

    def is_paused(self, entry: Entry) -> bool:
        """Whether the entry has to wait, should it not be a probe."""
        return bool(self._breakers) and self._breakers.is_paused(destination_of(entry))

    def admits(self, entry: Entry) -> bool:
        """Whether the entry may be sent, perhaps as a probe."""
        return not self._breakers or self._breakers.admits(destination_of(entry))

    def refused(self, entry: Entry, now: float) -> None:
        """An attempt has ended in a refusal."""
        destination = destination_of(entry)
        if self._is_on and self._breakers.refused(destination, now):
            refusals = self._breakers.refusals(destination)
            self._notices.destination("paused", destination, refusals)
            self._new.add(destination)
            self._letting_go.discard(destination)

    def confirmed(self, entries: Iterable[Entry]) -> None:
        """Attempts have ended in confirms."""
        if not self._breakers:
            return
        for destination in map(destination_of, entries):
            refusals = self._breakers.refusals(destination)
            if self._breakers.confirmed(destination):
                self._notices.destination("resumed", destination, refusals)
                self._letting_go.add(destination)

    def withdrawn_from(self, session: Session[Entry]) -> list[Entry]:
        """Take out of the session what goes where nothing may go since the last call."""
        if not self._new:
            return []
        paused = {entry for entry in session.waiting() if destination_of(entry) in self._new}
        self._new.clear()
        return session.withdraw(paused)

    def release(self, turn: Turn, now: float, wall: float) -> None:
        """Have the store let go of whatever may go: once until it has done so."""
        if turn.released:
            return
        turn.released += [
            Release(destination, 1, wall) for destination in self._breakers.poll_probes(now)
        ]
        turn.released += [Release(destination, PAGE, wall) for destination in self._letting_go]

    def released(self, turn: Turn) -> bool:
        """The store has done so.

        Returns:
            whether anything is due now.
        """
        for release in turn.released:
            if release.destination is not None and release.count == 0:
                self._breakers.forget(release.destination)  # nobody waits there
            if release.limit == PAGE and release.count < PAGE:
                self._letting_go.discard(release.destination)
        return any(release.count for release in turn.released)

    def poll_timeout(self) -> float | None:
        """When `release` has something to do (monotonic), or None."""
        return float("-inf") if self._letting_go else self._breakers.poll_timeout()

    def shown(self, now: float) -> tuple[Paused, ...]:
        """For people."""
        return tuple(islice(self._shown(now), SHOWN_MAX)) if self._breakers else ()

    def _shown(self, now: float) -> Iterator[Paused]:
        for pause in self._breakers.pauses:
            yield Paused(*pause.destination, pause.refusals, max(0.0, pause.until - now))

    def _pause_s(self, opening: int) -> float:
        with self._guard.calling("Breaker.pause"):
            return wait_s(self._breaker.pause, opening)
        return wait_s(Breaker().pause, opening)
