"""Paused destinations: messages to a destination that keeps refusing wait on disk; others flow.

Knows: entries by their destination, and when one may be sent. Must never know: SQL, the transport.

What pauses which messages, by the evidence:

    ==================================================  =======================================
    refusals                                            paused
    ==================================================  =======================================
    nacks or returns of one routing key in a row        the exchange with this routing key
    (``refusals_max``), without a confirm
    nacks of `SEVERAL` routing keys of an exchange,     the exchange, with every routing key
    without a confirm in between
    a 404 or 403; or what the core found to be about    the exchange, with every routing key
    the exchange (`reliablepub._core.evidence`)
    a 406 for a ``user_id`` that is not the login's     every message with this ``user_id``
    ==================================================  =======================================

The default exchange is never paused for its routing keys, each of which is a queue by itself.

An entry that waits for its destination has the due time `HELD`, so that it takes no memory and
delays no other entry. When a pause is over, the store releases entries as probes
(`reliablepub._core.breaker`), in the order of their ids: those above the highest id that was sent
are fresh; the others go by turns. When a probe is confirmed, the others follow: two for each
confirm; or, where the exchange or the user had been refused, a page at a time, because only its
queues limit the rate.

Entries that an earlier run has left waiting are found by exchange; each such exchange is probed at
once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import inf
from typing import Final, NamedTuple

from reliablepub._core.breaker import Breakers, Pause, Room
from reliablepub._core.evidence import SEVERAL
from reliablepub._core.session import Session
from reliablepub.outbox.entry import Changes, Entry, HeldExchange, Release
from reliablepub.outcome import Concern, Outcome, OutcomeKind
from reliablepub.relay.callbacks import GuardedPolicy, Notices
from reliablepub.relay.status import Paused


class Destination(NamedTuple):
    """What can be paused: an exchange with one routing key or every one, or a ``user_id``."""

    exchange: str
    routing_key: str | None = None
    user_id: str | None = None


PAGE: Final = 2_000
SHOWN_MAX: Final = 100
UNHEARD_MAX: Final = 3
"""After so many unanswered probes of an exchange its pause ends."""
UNHEARD_S: Final = 2.0
"""Probes within so many seconds count as one: after a refusal, the next probe first has to wait for
another channel to open, which takes time if the broker is far away."""
NAMED_MAX: Final = 100
"""Entries of a destination that are remembered by name as its next probes."""
IMPERSONATOR: Final = "; log in as this user, or give the relay's user the tag impersonator"
MISSING: Final = Outcome(OutcomeKind.REFUSED, 404, "")
UNKNOWN: Final = Outcome(OutcomeKind.REFUSED, 0, "refused in an earlier run; not probed yet")


def address_of(entry: Entry) -> Destination:
    """The exchange and routing key of an entry."""
    return Destination(entry.message.exchange, entry.message.routing_key)


def exchange_of(entry: Entry) -> Destination:
    """The exchange of an entry, as a destination with every routing key."""
    return Destination(entry.message.exchange)


def user_of(entry: Entry) -> Destination | None:
    """The ``user_id`` of an entry, as a destination; None if it has none."""
    user_id = entry.message.user_id
    return None if user_id is None else Destination("", None, user_id)


@dataclass(slots=True)
class _Waiting:
    """What waits for a paused destination, and which of it was probed."""

    since: float  # wall clock
    gives_up_at: float | None = None  # wall clock
    count: int = 0
    sent: int = 0  # highest id that was refused; entries above it are fresh
    turn: int = 0  # id of the last probe that was sent before
    unheard: int = 0  # probes without an answer
    unheard_at: float = -inf  # when the last of them was released
    # Exchange, routing key and id of entries that go before others: all with a paused user_id, by
    # which the store finds no rows; and those below `sent` that were never nacked, or not since an
    # operator put them back.
    named: deque[tuple[str, str, int]] = field(default_factory=lambda: deque(maxlen=NAMED_MAX))

    def probed(self, now: float) -> None:
        """Count a probe that has no answer yet; several within `UNHEARD_S` count as one."""
        if now - self.unheard_at >= UNHEARD_S:
            self.unheard, self.unheard_at = self.unheard + 1, now


class Pauses:
    """The breakers of all destinations, and the releases that they call for in a turn."""

    def __init__(self, policy: GuardedPolicy, notices: Notices) -> None:
        self._policy = policy
        self._breaker = policy.breaker
        self._notices = notices
        self._breakers: Breakers[Destination, Outcome] = Breakers(
            destinations_max=self._breaker.destinations_max, pause_s=policy.pause_s
        )
        self.tracked: Final = self._breakers.tracked  # most turns only ask whether there are any
        self.new: dict[Destination, None] = {}  # paused since the last `withdrawn_from`
        self._waiting: dict[Destination, _Waiting] = {}
        self._nacked: dict[str, set[str]] = {}  # routing keys of an exchange, since a confirm
        self._checking: dict[Destination, int] = {}
        self._repeating: dict[Destination, int] = {}  # how many go by turns
        self._releasing: dict[Destination | None, int] = {}
        # The releases of this turn, and what to do once each is committed
        self._orders: list[tuple[Release, Callable[[Release], None]]] = []

    @property
    def is_idle(self) -> bool:
        """Whether no destination has refused messages lately, and no entry is to be released."""
        return not (self._releasing or self._checking or self._repeating or self.tracked)

    def found(self, held: Iterable[HeldExchange], now: float, wall: float) -> None:
        """Pause the exchanges for which an earlier run has left entries waiting.

        The reason for the wait is not on disk; it is shown as `UNKNOWN`. If an exchange cannot be
        paused, because the policy pauses none or there are more than ``Breaker.destinations_max``,
        all waiting entries are released instead.
        """
        for one in held:
            destination = Destination(one.exchange or "")
            is_known = self._policy.pauses(MISSING) and one.exchange is not None
            if is_known and self._breakers.suspect(destination, now, why=UNKNOWN):
                since = wall if one.since is None else one.since
                gives_up_at = self._policy.gives_up_at(MISSING, since)
                self._waiting[destination] = _Waiting(since, gives_up_at, one.count)
            else:
                self._releasing[None] = 0

    # ------------------------------------------------------------------ may an entry be sent?

    def _paused(self, entry: Entry) -> Destination | None:
        """What is paused, and holds this entry; None if nothing is."""
        if not self.tracked:
            return None
        is_paused = self._breakers.is_paused
        for destination in (user_of(entry), exchange_of(entry), address_of(entry)):
            if destination is not None and is_paused(destination):
                return destination
        return None

    def holds(self, entry: Entry) -> Pause[Destination, Outcome] | None:
        """The pause of the entry's destination; None if it is not paused."""
        destination = self._paused(entry)
        return None if destination is None else self._breakers.pause(destination)

    def admits(self, entry: Entry) -> bool:
        """Whether the entry may be sent; while its destination is paused, as a probe."""
        destination = self._paused(entry)
        return destination is None or self._breakers.admits(destination)

    def is_probe(self, entry: Entry) -> bool:
        """Whether an entry that may be sent is a probe which may cost its channel."""
        pause = self.holds(entry)
        return pause is not None and pause.why.kind is OutcomeKind.REFUSED

    def waits(self, entry: Entry) -> None:
        """Count an entry that waits from now on, because it is not admitted."""
        destination = self._paused(entry)
        assert destination is not None
        waiting = self._waiting[destination]
        waiting.count += 1
        is_nacked = self._kind_of(destination) is OutcomeKind.NACKED
        is_early = is_nacked and entry.id <= waiting.sent and not entry.nacked
        if entry.id and (destination.user_id is not None or is_early):
            named = entry.message.exchange, entry.message.routing_key, entry.id
            if named not in waiting.named:
                waiting.named.append(named)

    # ------------------------------------------------------------------ outcomes

    def refused(
        self, entry: Entry, outcome: Outcome, now: float, wall: float, *, is_given_up: bool
    ) -> None:
        """Count a refusal; pause the destination if there were too many in a row."""
        if not self._policy.pauses(outcome):
            return
        concern, exchange = outcome.concern, exchange_of(entry)
        if concern is not Concern.EXCHANGE and self._kind_of(exchange) is OutcomeKind.REFUSED:
            self._is_well(exchange)
        destination, is_at_once = self._refusing(entry, outcome)
        if destination is None:
            return
        was_paused, waited_s = self._breakers.is_paused(destination), entry.refused_for_s(wall)
        is_over = is_at_once and is_given_up and self._policy.is_time_over(outcome, waited_s)
        if is_given_up and not (was_paused or is_over):
            # Given up at once, as others will be, which a pause would only delay. But where a
            # budget of time is spent, each of the others would cost a channel.
            return
        refusals_max = 1 if is_at_once else self._breaker.refusals_max
        is_new = self._breakers.refused(destination, now, why=outcome, refusals_max=refusals_max)
        if is_new and not was_paused:  # probes that follow a refused one go on
            self.new[destination] = None
            self._releasing.pop(destination, None)
            gives_up_at = self._policy.gives_up_at(outcome, wall - waited_s)
            self._waiting[destination] = _Waiting(wall, gives_up_at)
            self._tell("paused", destination)
        waiting = self._waiting.get(destination)
        if waiting is not None:
            waiting.unheard, waiting.unheard_at = 0, -inf
            waiting.sent = max(waiting.sent, entry.id)
        if self._breakers.is_paused(destination):
            if is_given_up:
                self._check_all(destination)
            elif is_new and was_paused:  # its time may be over, while others are the probes
                self._check(destination, 1)

    def _refusing(self, entry: Entry, outcome: Outcome) -> tuple[Destination | None, bool]:
        """What has refused an entry, and whether one such refusal pauses it; see the table."""
        exchange = exchange_of(entry)
        match outcome.concern:
            case Concern.USER:
                return user_of(entry), True
            case Concern.EXCHANGE:
                return exchange, True
            case Concern.MESSAGE:
                return None, False
        is_shared = outcome.kind is OutcomeKind.NACKED and exchange.exchange != ""
        if is_shared and (self._breakers.is_paused(exchange) or self._are_several(entry)):
            return exchange, True
        return address_of(entry), False

    def _are_several(self, entry: Entry) -> bool:
        """Whether several routing keys of the exchange were nacked since a confirm there."""
        if len(self._nacked) > self._breaker.destinations_max:
            self._nacked.clear()
        nacked = self._nacked.setdefault(entry.message.exchange, set())
        if len(nacked) < SEVERAL:
            nacked.add(entry.message.routing_key)
        return len(nacked) >= SEVERAL

    def _kind_of(self, destination: Destination) -> OutcomeKind | None:
        """Why a destination is paused: *refused* by the broker, else by its queues; or None."""
        pause = self._breakers.pause(destination) if self.tracked else None
        return None if pause is None else pause.why.kind

    def confirmed(self, entries: Iterable[Entry], now: float) -> None:
        """Note confirmed entries: their destinations accept messages."""
        for entry in entries:
            exchange, user = exchange_of(entry), user_of(entry)
            self._nacked.pop(exchange.exchange, None)
            if user is not None:
                self._is_well(user)
            if self._kind_of(exchange) is OutcomeKind.REFUSED:
                self._is_well(exchange)
            elif self._breakers.is_paused(exchange):
                self._breakers.confirmed(exchange, now)
            self._breakers.confirmed(address_of(entry), now)

    def given_up(self, entry: Entry) -> None:
        """Note that a waiting entry was given up."""
        # Others that wait for its destination may have spent their budgets, too.
        pause = self.holds(entry)
        if pause is not None:
            self._check_all(pause.destination)

    def recount(self) -> None:
        """Have the entries that wait counted anew: an operator has changed some."""
        for pause in self._breakers.pauses if self.tracked else ():
            self._check(pause.destination, 0)

    def _check(self, destination: Destination, count: int) -> None:
        """Have so many of the first entries made due, to be checked and to wait again."""
        if destination.user_id is None:  # the store finds none by user
            self._checking[destination] = max(count, self._checking.get(destination, 0))

    def _check_all(self, destination: Destination) -> None:
        """Have the entries that wait checked, a page at a time; for a user, with all others."""
        self._check(destination, PAGE)
        if destination.user_id is not None:
            self._releasing[None] = 0

    def withdrawn_from(self, session: Session[Entry]) -> list[Entry]:
        """Withdraw from the session the entries for destinations paused since the last call."""
        new, self.new = self.new, {}
        paused = {entry for entry in session.buffered_keys() if self._paused(entry) in new}
        return session.withdraw(paused)

    # ------------------------------------------------------------------ releasing
    #
    # A turn's commit releases entries of paused destinations, for four reasons:
    #
    # because              | releases                               | its commit notes
    # a pause is over      | probes: named, fresh, or all by turns  | probes without an answer
    # there was none fresh | the next ones by turns (`_repeating`)  | where the turns go on
    # some may be given up | the first ones (`_checking`)           | how many are left
    # a pause has ended    | all, page by page (`_releasing`)       | where the next page begins

    def release(self, changes: Changes, now: float) -> None:
        """Add the entries that need wait no longer to the changes, as releases by destination."""
        if changes.released:  # by an earlier turn, and not committed yet
            return
        self._orders = []
        for room in self._breakers.poll_room(now):
            destination = room.destination
            waiting = self._waiting[destination]
            # An exchange refuses at once. So a probe without an answer has passed it, and waits for
            # its queue, which is no reason to pause the exchange.
            if waiting.unheard > UNHEARD_MAX and self._kind_of(destination) is OutcomeKind.REFUSED:
                self._is_well(destination)
                continue
            for release in self._releases_of(room, waiting):
                self._order(destination, release, partial(self._note_probe, room, now))
        for destination, count in self._repeating.items():
            after = self._waiting[destination].turn
            then = partial(self._note_next, destination, now)
            self._order(destination, Release(*destination[:2], count, after=after), then)
        for destination, count in self._checking.items():
            first = Release(*destination[:2], count, is_counted=True)
            self._order(destination, first, lambda *_: None)
        self._checking.clear()
        self._repeating.clear()
        for going, after in self._releasing.items():
            if going is None or going.user_id is not None:  # the store finds none by user
                page = Release(None, None, PAGE, after=after)
            else:
                page = Release(going.exchange, going.routing_key, PAGE, after=after)
            self._orders.append((page, partial(self._note_page, going)))
        changes.released += [release for release, _ in self._orders]

    def _order(
        self,
        destination: Destination,
        release: Release,
        then: Callable[[_Waiting, Release], None],
    ) -> None:
        """Release entries of a paused destination; what is noted then is of this pause alone."""
        waiting = self._waiting[destination]

        def committed(release: Release) -> None:
            if self._waiting.get(destination) is waiting:  # the pause has not ended meanwhile
                reckoned = max(0, waiting.count - release.count)
                waiting.count = reckoned if release.left is None else release.left
                then(waiting, release)

        self._orders.append((release, committed))

    def _releases_of(self, room: Room[Destination], waiting: _Waiting) -> Iterator[Release]:
        destination = room.destination
        if destination.user_id is not None and not waiting.named:
            self._is_well(destination)
        elif not room.are_probes and destination.user_id is None:
            after = waiting.turn if self._kind_of(destination) is OutcomeKind.NACKED else 0
            yield Release(*destination[:2], room.count, after=after)
        else:
            # Only a nack can leave copies behind, so that fresh messages are worth many probes.
            count = room.count if self._kind_of(destination) is OutcomeKind.NACKED else 1
            names = [waiting.named.popleft() for _ in range(min(count, len(waiting.named)))]
            for exchange, routing_key, id_ in names:
                yield Release(exchange, routing_key, 1, after=id_ - 1)
            if not names:
                yield Release(*destination[:2], count, after=waiting.sent, is_counted=True)

    def released(self, changes: Changes) -> bool:
        """Note that the releases were committed; return whether any entry is due now."""
        for release, committed in self._orders:
            committed(release)
        return any(release.count for release in changes.released)

    def _note_probe(
        self, room: Room[Destination], now: float, waiting: _Waiting, release: Release
    ) -> None:
        if not room.are_probes:
            self._note_turns(room.destination, release, waiting)
        elif release.count:
            waiting.probed(now)
        elif room.destination.user_id is None and (
            room.may_repeat or self._kind_of(room.destination) is not OutcomeKind.NACKED
        ):
            self._repeating[room.destination] = 1

    def _note_next(
        self, destination: Destination, now: float, waiting: _Waiting, release: Release
    ) -> None:
        if release.count:
            waiting.probed(now)
        self._note_turns(destination, release, waiting)

    def _note_page(self, going: Destination | None, release: Release) -> None:
        # Otherwise it was ended, or begun anew, while this page waited for its commit.
        if going in self._releasing and self._releasing[going] == release.after:
            self._releasing[going] = release.last
            if release.count < release.limit:
                del self._releasing[going]

    def _note_turns(self, destination: Destination, release: Release, waiting: _Waiting) -> None:
        """Go on with the turns after a release; after the last entry comes the first one again."""
        left = release.limit - release.count
        waiting.turn = 0 if left else release.last
        if left and release.after:
            self._repeating[destination] = left
        elif left:
            self._no_more_wait(destination)

    def poll_timeout(self) -> float | None:
        """When to call `release` next (monotonic), or None."""
        if self._releasing or self._checking or self._repeating:
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
                pause.destination.exchange,
                pause.destination.routing_key,
                refusals=pause.refusals,
                probe_in_s=max(0.0, pause.until - now),
                since=self._waiting[pause.destination].since,
                reason=reason_of(pause.why),
                waiting=self._waiting[pause.destination].count,
                user_id=pause.destination.user_id,
                gives_up_at=self._waiting[pause.destination].gives_up_at,
            )

    # ------------------------------------------------------------------ inside

    def _is_well(self, destination: Destination) -> None:
        """End a pause: the broker has answered other than by refusing the exchange or user."""
        if self._breakers.is_paused(destination):
            self._releasing[destination] = 0
            self._end(destination)

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
        self._checking.pop(destination, None)
        self._repeating.pop(destination, None)
        self.new.pop(destination, None)

    def _tell(
        self, name: str, destination: Destination, pause: Pause[Destination, Outcome] | None = None
    ) -> None:
        pause = pause or self._breakers.pause(destination)
        assert pause is not None
        self._notices.destination(name, destination, pause.refusals, pause.why)


def reason_of(outcome: Outcome) -> str:
    """The reason of a pause, in one line: kind, reply code and text of the last refusal."""
    code = f"{outcome.reply_code} " if outcome.reply_code else ""
    remedy = IMPERSONATOR if outcome.concern is Concern.USER else ""
    return f"{outcome.kind}: {code}{outcome.reply_text}{remedy}"
