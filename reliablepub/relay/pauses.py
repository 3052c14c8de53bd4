"""Paused destinations: messages to a destination that keeps refusing wait on disk; others flow.

Knows: entries by their destination, and when one may be sent. Must never know: SQL, the transport.

A destination is an exchange and a routing key; or a whole exchange with every routing key, if the
exchange does not exist (404) or the user may not write to it (403). An entry that waits for its
destination has the due time `HELD`, so that it takes no memory and delays no other entry.

When a pause is over, the store releases one entry as a probe. When a probe is confirmed, the others
follow: to a routing key two for each confirm; to an exchange a page at a time, because only its
queues, not the exchange itself, limit the rate.

Entries that an earlier run has left waiting are found by exchange; each such exchange is probed at
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import inf
from typing import Final, TypeAlias

from reliablepub._core.breaker import Breakers, Pause
from reliablepub._core.session import Session
from reliablepub.outbox.entry import Changes, Entry, HeldExchange, Release
from reliablepub.outcome import Concern, Outcome, OutcomeKind
from reliablepub.policy import Breaker, GiveUp, RetryIn, RetryPolicy, wait_s
from reliablepub.relay.callbacks import Guard, Notices
from reliablepub.relay.status import Paused

Destination: TypeAlias = tuple[str, str | None]
"""Exchange and routing key; None as routing key stands for every one."""
PAGE: Final = 2_000
SHOWN_MAX: Final = 100
UNHEARD_MAX: Final = 3
"""After so many unanswered probes of an exchange its pause ends."""
UNHEARD_S: Final = 2.0
"""Probes within so many seconds count as one: after a refusal, the next probe first has to wait for
another channel to open, which takes time if the broker is far away."""
MISSING: Final = Outcome(OutcomeKind.REFUSED, 404, "")
UNKNOWN: Final = Outcome(OutcomeKind.REFUSED, 0, "refused in an earlier run; not probed yet")


def address_of(entry: Entry) -> Destination:
    """The exchange and routing key of an entry."""
    return entry.message.exchange, entry.message.routing_key


def exchange_of(entry: Entry) -> Destination:
    """The exchange of an entry, as a destination with every routing key."""
    return entry.message.exchange, None


class Pauses:
    """The breakers of all destinations, and the releases that they call for in a turn.

    Args:
        policy: decides when to pause destinations.
        guard: contains exceptions of the application's strategies.
        notices: collects events for hooks.

    Attributes:
        tracked: the destinations that have refused messages lately; most turns only ask whether
            there are any.
        new: the destinations paused since the last `withdrawn_from`.
    """

    def __init__(self, policy: RetryPolicy, guard: Guard, notices: Notices) -> None:
        self._policy = policy
        self._breaker = policy.breaker or Breaker()
        self._guard = guard
        self._notices = notices
        self._breakers: Breakers[Destination, Outcome] = Breakers(
            destinations_max=self._breaker.destinations_max, pause_s=self._pause_s
        )
        self.tracked = self._breakers.tracked
        self.new: dict[Destination, None] = {}
        self._sweeping: dict[Destination, None] = {}
        self._releasing: dict[Destination | None, int] = {}
        self._unheard: dict[str, tuple[int, float]] = {}
        self._rooms: list[Release] = []
        self._sweeps: Sequence[Release] = ()
        self._pages: Mapping[Destination | None, Release] = {}
        self._waiting: dict[Destination, int] = {}
        self._since: dict[Destination, float] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no destination has refused messages lately, and no entry is to be released."""
        return not (self._releasing or self._sweeping or self.tracked)

    @property
    def exchanges_max(self) -> int:
        """Most exchanges for which to look for entries that an earlier run has left waiting."""
        return self._breaker.destinations_max

    def found(self, held: Iterable[HeldExchange], now: float, wall: float) -> None:
        """Pause the exchanges for which an earlier run has left entries waiting.

        The reason for the wait is not on disk; it is shown as `UNKNOWN`. If an exchange cannot be
        paused, because the policy pauses none or there are more than `exchanges_max`, all waiting
        entries are released instead.
        """
        for one in held:
            destination = (one.exchange or "", None)
            is_known = self._pauses(MISSING) and one.exchange is not None
            if is_known and self._breakers.suspect(destination, now, why=UNKNOWN):
                self._waiting[destination] = one.count
                self._since[destination] = wall if one.since is None else one.since
            else:
                self._releasing[None] = 0

    def _pauses(self, outcome: Outcome) -> bool:
        with self._guard.calling("a strategy of RetryPolicy"):
            return self._policy.pauses(outcome)
        return True  # the strategy has raised

    # ------------------------------------------------------------------ may an entry be sent?

    def holds(self, entry: Entry) -> Pause[Destination, Outcome] | None:
        """The pause of the entry's destination; None if neither exchange nor key is paused."""
        if not self.tracked:
            return None
        exchange = self._breakers.pause(exchange_of(entry))
        return exchange or self._breakers.pause(address_of(entry))

    def admits(self, entry: Entry) -> bool:
        """Whether the entry may be sent; while its destination is paused, as a probe."""
        if not self.tracked:
            return True
        destination = exchange_of(entry)
        if not self._breakers.is_paused(destination):
            destination = address_of(entry)
        return self._breakers.admits(destination)

    def is_probe(self, entry: Entry) -> bool:
        """Whether an entry that may be sent probes an exchange.

        If the broker refuses the probe, it closes the channel on which the probe was sent.
        """
        return bool(self.tracked) and self._breakers.is_paused(exchange_of(entry))

    def waits(self, entry: Entry) -> None:
        """Count an entry that waits from now on, because it is not admitted."""
        destination = exchange_of(entry)
        if not self._breakers.is_paused(destination):
            destination = address_of(entry)
        self._waiting[destination] = self._waiting.get(destination, 0) + 1

    # ------------------------------------------------------------------ outcomes

    def refused(
        self, entry: Entry, outcome: Outcome, now: float, wall: float, *, is_given_up: bool
    ) -> None:
        """Count a refusal; pause the destination if there were too many in a row.

        Args:
            entry: the refused entry.
            outcome: the refusal.
            now: monotonic seconds.
            wall: seconds since 1970.
            is_given_up: whether the retry policy gives the entry up.
        """
        if not self._pauses(outcome):
            return
        is_of_exchange = outcome.concern is Concern.EXCHANGE
        if self.tracked and not is_of_exchange:
            self._is_well(exchange_of(entry))
        if outcome.concern is Concern.MESSAGE:
            return
        destination = exchange_of(entry) if is_of_exchange else address_of(entry)
        was_paused = self._breakers.is_paused(destination)
        if is_given_up and not (
            was_paused or (is_of_exchange and self._is_time_over(entry, outcome, wall))
        ):
            # Given up at once, as others will be, which a pause would only delay. But where a
            # budget of time is spent, each of the others would cost a channel.
            return
        refusals_max = 1 if is_of_exchange else self._breaker.refusals_max
        self._unheard.pop(entry.message.exchange, None)
        if self._breakers.refused(destination, now, why=outcome, refusals_max=refusals_max):
            self.new[destination] = None
            self._releasing.pop(destination, None)
            if not was_paused:
                self._since[destination] = wall
                self._tell("paused", destination)
        if is_given_up and self._breakers.is_paused(destination):
            self._sweeping[destination] = None

    def _is_time_over(self, entry: Entry, outcome: Outcome, wall: float) -> bool:
        """Whether an entry that had only waited for as long would be given up, and a new one not.

        Not so where the policy gives up at once, for example a 404 by its ``decide``: a pause would
        only delay the others, which keep waiting.
        """
        age_s = entry.refused_for_s(wall)
        with self._guard.calling("a strategy of RetryPolicy"):
            retries = self._policy.retries(outcome)
            is_new_kept = isinstance(retries.verdict(1, 0.0), RetryIn)
            return is_new_kept and isinstance(retries.verdict(0, age_s), GiveUp)
        return False  # the strategy has raised

    def confirmed(self, entries: Iterable[Entry], now: float) -> None:
        """Note confirmed entries: their destinations accept messages."""
        for entry in entries:
            self._is_well(exchange_of(entry))
            self._breakers.confirmed(address_of(entry), now)

    def given_up(self, entry: Entry) -> None:
        """Note that a waiting entry was given up.

        Others that wait for its destination may have spent their budgets, too. So a page of them is
        made due, to be checked.
        """
        pause = self.holds(entry)
        if pause is not None:
            self._sweeping[pause.destination] = None

    def withdrawn_from(self, session: Session[Entry]) -> list[Entry]:
        """Withdraw from the session the entries for destinations paused since the last call."""
        new, self.new = self.new, {}
        paused = {
            entry
            for entry in session.buffered_keys()
            if exchange_of(entry) in new or address_of(entry) in new
        }
        return session.withdraw(paused)

    # ------------------------------------------------------------------ releasing

    def release(self, changes: Changes, now: float) -> None:
        """Add the entries that need wait no longer to the changes, as releases by destination.

        Args:
            changes: changes of the next commit.
            now: monotonic seconds.
        """
        if changes.released:  # by an earlier turn, and not committed yet
            return
        self._rooms = []
        for destination, count in self._breakers.poll_room(now):
            if self._is_unheard(destination, now):
                self._is_well(destination)
                continue
            is_counted = count == 1  # probes are few
            self._rooms.append(Release(*destination, count, is_counted=is_counted))
        self._sweeps = [Release(*destination, PAGE) for destination in self._sweeping]
        self._sweeping.clear()
        self._pages = {
            going: Release(exchange, routing_key, PAGE, after=after)
            for going, after in self._releasing.items()
            for exchange, routing_key in [going or (None, None)]
        }
        changes.released += [*self._rooms, *self._sweeps, *self._pages.values()]

    def released(self, changes: Changes) -> bool:
        """Note that the releases were committed.

        Returns:
            whether any entry is due now.
        """
        for release in (*self._rooms, *self._sweeps):
            destination = (release.exchange or "", release.routing_key)
            if self._breakers.is_paused(destination):
                waiting = self._waiting.get(destination, 0) - release.count
                self._waiting[destination] = release.left if release.is_counted else max(0, waiting)
        for release in self._rooms:
            if release.count < release.limit:
                self._no_more_wait((release.exchange or "", release.routing_key))
        for going, release in self._pages.items():
            # Otherwise it was ended, or begun anew, while this page waited for its commit.
            if going in self._releasing and self._releasing[going] == release.after:
                self._releasing[going] = release.last
                if release.count < release.limit:
                    del self._releasing[going]
        return any(release.count for release in changes.released)

    def poll_timeout(self) -> float | None:
        """When to call `release` next (monotonic), or None."""
        if self._releasing or self._sweeping:
            return float("-inf")
        return self._breakers.poll_timeout()

    # ------------------------------------------------------------------ for the status

    @property
    def count(self) -> int:
        """How many destinations are paused."""
        return len(self._breakers) if self.tracked else 0

    def shown(self, now: float) -> tuple[Paused, ...]:
        """The paused destinations for the status, the oldest pause first, at most `SHOWN_MAX`."""
        return tuple(islice(self._shown(now), SHOWN_MAX)) if self.tracked else ()

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
        """End the pause of an exchange: the broker has answered other than by refusing it."""
        if self._breakers.is_paused(exchange):
            self._releasing[exchange] = 0
            self._end(exchange)

    def _is_unheard(self, destination: Destination, now: float) -> bool:
        """Whether probes of an exchange stay unanswered.

        An exchange refuses at once. So a probe without an answer has passed the exchange, and waits
        for its queue, which is no reason to pause the exchange.
        """
        exchange, routing_key = destination
        if routing_key is not None:
            return False
        probes, since = self._unheard.get(exchange, (0, -inf))
        if now - since >= UNHEARD_S:
            probes += 1
            self._unheard[exchange] = probes, now
        return probes > UNHEARD_MAX

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
        self.new.pop(destination, None)
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
        return wait_s(Breaker().pause, opening)  # the strategy has raised


def reason_of(outcome: Outcome) -> str:
    """The reason of a pause, in one line: kind, reply code and text of the last refusal."""
    code = f"{outcome.reply_code} " if outcome.reply_code else ""
    return f"{outcome.kind}: {code}{outcome.reply_text}"
