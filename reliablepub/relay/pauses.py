"""Destinations that keep refusing are paused: what goes there waits on disk, and the others flow.

Knows: entries by their destination, and when one may go. Must never know: SQL, the wire.

A destination is an exchange and a routing key; or a whole exchange, whatever the routing key, where
it does not exist or may not be written to. What waits has no due time but *when its destination is
well* (`HELD`), so that it takes no memory, and is in nobody's way. When a pause is over, the store
lets one of them go, as a probe; when a probe is confirmed, the others follow: for a routing key two
for each confirm, for an exchange a page at a time, since there the queues set the pace.

What an earlier run has left waiting is found by exchange, and each exchange is probed at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, TypeAlias

from reliablepub._core.breaker import Breakers, Pause
from reliablepub._core.session import Session
from reliablepub.outbox.entry import Changes, Entry, HeldExchange, Release
from reliablepub.outcome import Concern, Outcome, OutcomeKind
from reliablepub.policy import Breaker, RetryPolicy, wait_s
from reliablepub.relay.callbacks import Guard, Notices
from reliablepub.relay.status import Paused

Destination: TypeAlias = tuple[str, str | None]
"""Exchange and routing key; no routing key stands for all of them."""
PAGE: Final = 2_000
SHOWN_MAX: Final = 100
UNHEARD_MAX: Final = 3
"""So many probes of an exchange without an answer are no reason to hold back the others."""
MISSING: Final = Outcome(OutcomeKind.REFUSED, 404, "")
UNKNOWN: Final = Outcome(OutcomeKind.REFUSED, 0, "refused in an earlier run; not probed yet")


def address_of(entry: Entry) -> Destination:
    """Where an entry goes."""
    return entry.message.exchange, entry.message.routing_key


def exchange_of(entry: Entry) -> Destination:
    """The exchange it goes to, for every routing key."""
    return entry.message.exchange, None


class Pauses:
    """The breakers, and what follows from them in one turn.

    Args:
        policy: when destinations are paused.
        guard: keeps a failing strategy off us.
        notices: what hooks are told.
    """

    def __init__(self, policy: RetryPolicy, guard: Guard, notices: Notices) -> None:
        self._policy = policy
        self._breaker = policy.breaker or Breaker()
        self._guard = guard
        self._notices = notices
        self._breakers: Breakers[Destination, Outcome] = Breakers(
            destinations_max=self._breaker.destinations_max, pause_s=self._pause_s
        )
        self._new: dict[Destination, None] = {}
        self._sweeping: dict[Destination, None] = {}
        self._letting_go: dict[Destination | None, tuple[bytes, bytes, int] | None] = {}
        self._unheard: dict[str, int] = {}
        self._rooms: list[Release] = []
        self._sweeps: Sequence[Release] = ()
        self._pages: Mapping[Destination | None, Release] = {}
        self._waiting: dict[Destination, int] = {}
        self._since: dict[Destination, float] = {}

    def __bool__(self) -> bool:
        """Whether any destination is watched."""
        return bool(self._breakers)

    @property
    def exchanges_max(self) -> int:
        """Of how many exchanges an earlier run's waiting messages are looked for."""
        return self._breaker.destinations_max

    def found(self, held: Iterable[HeldExchange], now: float, wall: float) -> None:
        """An earlier run has left some waiting; why they do is not known any more."""
        for one in held:
            destination = (one.exchange or "", None)
            is_known = self._pauses(MISSING) and one.exchange is not None
            if is_known and self._breakers.suspect(destination, now, why=UNKNOWN):
                self._waiting[destination] = one.count
                self._since[destination] = wall if one.since is None else one.since
            else:
                self._letting_go[None] = None

    def _pauses(self, outcome: Outcome) -> bool:
        with self._guard.calling("a strategy of RetryPolicy"):
            return self._policy.pauses(outcome)
        return True

    # ------------------------------------------------------------------ who may go

    def holds(self, entry: Entry) -> Pause[Destination, Outcome] | None:
        """Why the entry has to wait, should it not be let go; None where it need not."""
        if not self._breakers:
            return None
        exchange = self._breakers.pause(exchange_of(entry))
        return exchange or self._breakers.pause(address_of(entry))

    def admits(self, entry: Entry) -> bool:
        """Whether the entry may be sent, perhaps as a probe."""
        if not self._breakers:
            return True
        destination = exchange_of(entry)
        if not self._breakers.is_paused(destination):
            destination = address_of(entry)
        return self._breakers.admits(destination)

    def is_probe(self, entry: Entry) -> bool:
        """Whether an entry that may be sent is likely to cost the channel that it is sent on."""
        return bool(self._breakers) and self._breakers.is_paused(exchange_of(entry))

    def waits(self, entry: Entry) -> None:
        """An entry waits from now on, because it is not admitted."""
        destination = exchange_of(entry)
        if not self._breakers.is_paused(destination):
            destination = address_of(entry)
        self._waiting[destination] = self._waiting.get(destination, 0) + 1

    # ------------------------------------------------------------------ what has happened

    def refused(
        self, entry: Entry, outcome: Outcome, now: float, wall: float, *, is_given_up: bool
    ) -> None:
        """An attempt has ended in a refusal."""
        if not self._pauses(outcome):
            return
        is_of_exchange = outcome.concern is Concern.EXCHANGE
        if self._breakers and not is_of_exchange:
            self._is_well(exchange_of(entry))
        if outcome.concern is Concern.MESSAGE:
            return
        destination = exchange_of(entry) if is_of_exchange else address_of(entry)
        was_paused = self._breakers.is_paused(destination)
        if is_given_up:
            if not was_paused:
                return  # it would make others wait that have no patience either
            self._sweeping[destination] = None
        refusals_max = 1 if is_of_exchange else self._breaker.refusals_max
        self._unheard.pop(entry.message.exchange, None)
        if self._breakers.refused(destination, now, why=outcome, refusals_max=refusals_max):
            self._new[destination] = None
            self._letting_go.pop(destination, None)
            if not was_paused:
                self._since[destination] = wall
                self._tell("paused", destination)

    def confirmed(self, entries: Iterable[Entry], now: float) -> None:
        """Attempts have ended in confirms."""
        if not self._breakers:
            return
        for entry in entries:
            self._is_well(exchange_of(entry))
            self._breakers.confirmed(address_of(entry), now)

    def given_up(self, entry: Entry) -> None:
        """An entry that waited is given up: others that wait there may have waited for as long."""
        pause = self.holds(entry)
        if pause is not None:
            self._sweeping[pause.destination] = None

    def withdrawn_from(self, session: Session[Entry]) -> list[Entry]:
        """Take out of the session what goes where nothing may go since the last call."""
        if not self._new:
            return []
        new = self._new
        paused = {
            entry
            for entry in session.waiting()
            if exchange_of(entry) in new or address_of(entry) in new
        }
        self._new = {}
        return session.withdraw(paused)

    # ------------------------------------------------------------------ letting go

    def release(self, changes: Changes, now: float, wall: float) -> None:
        """Have the store let go of whatever may go: once until it has done so."""
        if changes.released:
            return
        self._rooms = []
        for destination, count in self._breakers.poll_room(now):
            if self._is_unheard(destination):
                self._is_well(destination)
                continue
            is_counted = count == 1  # probes are few
            self._rooms.append(Release(*destination, count, wall, is_counted=is_counted))
        self._sweeps = [Release(*destination, PAGE, wall) for destination in self._sweeping]
        self._sweeping.clear()
        self._pages = {
            going: Release(exchange, routing_key, PAGE, wall, after=after)
            for going, after in self._letting_go.items()
            for exchange, routing_key in [going or (None, None)]
        }
        changes.released += [*self._rooms, *self._sweeps, *self._pages.values()]

    def released(self, changes: Changes) -> bool:
        """The store has done so.

        Returns:
            whether anything is due now.
        """
        if not changes.released:
            return False
        for release in (*self._rooms, *self._sweeps):
            destination = (release.exchange or "", release.routing_key)
            if self._breakers.is_paused(destination):
                waiting = self._waiting.get(destination, 0) - release.count
                self._waiting[destination] = release.left if release.is_counted else max(0, waiting)
        for release in self._rooms:
            if release.count < release.limit:
                self._no_more_wait((release.exchange or "", release.routing_key))
        for going, release in self._pages.items():
            if going in self._letting_go:
                self._letting_go[going] = release.last
                if release.count < release.limit:
                    del self._letting_go[going]
        return any(release.count for release in changes.released)

    def poll_timeout(self) -> float | None:
        """When `release` has something to do (monotonic), or None."""
        if self._letting_go or self._sweeping:
            return float("-inf")
        return self._breakers.poll_timeout()

    # ------------------------------------------------------------------ for people

    @property
    def count(self) -> int:
        """How many destinations are paused."""
        return len(self._breakers)

    def shown(self, now: float) -> tuple[Paused, ...]:
        """For people, the oldest ones first."""
        return tuple(islice(self._shown(now), SHOWN_MAX)) if self._breakers else ()

    def _shown(self, now: float) -> Iterator[Paused]:
        for pause in self._breakers.pauses:
            yield Paused(
                *pause.destination,
                refusals=pause.refusals,
                probe_in_s=max(0.0, pause.until - now),
                since=self._since[pause.destination],
                reason=reason_of(pause.why),
                waiting=self._waiting.get(pause.destination, 0),
            )

    # ------------------------------------------------------------------ inside

    def _is_well(self, exchange: Destination) -> None:
        """Something was heard of it that is no refusal of the exchange."""
        if self._breakers.is_paused(exchange):
            self._letting_go[exchange] = None
            self._end(exchange)

    def _is_unheard(self, destination: Destination) -> bool:
        """Whether probes of an exchange had no answer, though it would come at once.

        Then it is their queue that does not answer, and no reason for others to wait.
        """
        exchange, routing_key = destination
        if routing_key is None:
            self._unheard[exchange] = self._unheard.get(exchange, 0) + 1
            return self._unheard[exchange] > UNHEARD_MAX
        return False

    def _no_more_wait(self, destination: Destination) -> None:
        pause = self._breakers.pause(destination)
        if pause is not None and self._breakers.no_more_wait(destination):
            self._tell("resumed", destination, pause)
        if not self._breakers.is_paused(destination):
            self._forget(destination)

    def _end(self, destination: Destination) -> None:
        self._tell("resumed", destination)
        self._breakers.forget(destination)
        self._forget(destination)

    def _forget(self, destination: Destination) -> None:
        self._waiting.pop(destination, None)
        self._since.pop(destination, None)
        self._sweeping.pop(destination, None)
        self._new.pop(destination, None)
        self._unheard.pop(destination[0], None)

    def _tell(
        self, name: str, destination: Destination, pause: Pause[Destination, Outcome] | None = None
    ) -> None:
        pause = pause or self._breakers.pause(destination)
        assert pause is not None
        self._notices.destination(name, destination, pause.refusals, pause.why)

    def _pause_s(self, opening: int) -> float:
        with self._guard.calling("Breaker.pause"):
            return wait_s(self._breaker.pause, opening)
        return wait_s(Breaker().pause, opening)


def reason_of(outcome: Outcome) -> str:
    """What was refused last there, in one line."""
    code = f"{outcome.reply_code} " if outcome.reply_code else ""
    return f"{outcome.kind}: {code}{outcome.reply_text}"
