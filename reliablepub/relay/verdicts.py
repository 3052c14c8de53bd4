"""From ended attempts to what the store is told: the part of a turn that judges.

Knows: settlements, the policy, and what changes in the store. Must never know: the wire.

A verdict takes effect in two steps: it joins the changes of the coming commit, and what only memory
knows (waiters, what is loaded) follows once the commit has succeeded. A confirm is told to its
waiter at once: should the process die before its row is deleted, the message is sent once more.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from reliablepub._core.decide import (
    REFUSALS,
    Decision,
    Discard,
    Expire,
    Park,
    RetryAt,
    decide,
)
from reliablepub._core.events import Settlement
from reliablepub.outbox.entry import HELD, Attempt, Entry, Sent, Turn
from reliablepub.outcome import Outcome, OutcomeKind, Persistence
from reliablepub.policy import GiveUp, RetryIn, Verdict
from reliablepub.relay.in_flight import InFlightRanges
from reliablepub.relay.latency import Latencies
from reliablepub.relay.notices import Notices
from reliablepub.relay.pauses import Pauses
from reliablepub.relay.ruling import Ruling


@dataclass(slots=True)
class Verdicts:
    """The changes that await the next commit.

    Attributes:
        ruling: what the policy says of refusals.
        pauses: destinations to which nothing may go.
        notices: what hooks are told.
        run: names the epochs, with their number.
        turn: what the store will be told.
        postponed: entries that leave memory until they are due.
        lets_others_go: a message of an ordering key is confirmed, and the next one waits for that
            to be on disk.
        ranges: the tags on the wire.
        latencies: how long confirms take.
    """

    ruling: Ruling
    pauses: Pauses
    notices: Notices
    run: int
    turn: Turn = field(default_factory=Turn)
    postponed: list[Entry] = field(default_factory=list)
    lets_others_go: bool = False
    ranges: InFlightRanges = field(default_factory=InFlightRanges)
    latencies: Latencies = field(default_factory=Latencies)

    def epoch_name(self, epoch: int) -> str:
        """How an epoch is called in the outbox."""
        return f"{self.run}-{epoch}"

    def written(self, epoch: int, sent: Sent, now: float) -> None:
        """A recorded batch is on its way to the wire."""
        self.ranges.add(epoch, sent, now)
        self.notices.sent(sent)

    def unwritten(self, recorded: Sequence[Sent]) -> None:
        """Recorded batches that were not written after all: their rows may go."""
        self.turn.finished += recorded

    def committed(self) -> tuple[Turn, list[Entry]]:
        """The changes are in the store: hand out what followed from them, and begin anew.

        Returns:
            what was committed, and the entries that are postponed.
        """
        turn, postponed = self.turn, self.postponed
        self.turn, self.postponed, self.lets_others_go = Turn(), [], False
        return turn, postponed

    def judge(
        self, settlements: Sequence[Settlement[Entry]], now: float, wall: float
    ) -> set[Entry]:
        """Take in attempts that have ended on the wire.

        Returns:
            those who are too late to be sent again.
        """
        late: set[Entry] = set()
        hears_confirms = self.notices.hears_confirms
        for settlement in settlements:
            entry, epoch, tag, outcome = settlement
            finished, sent_at = self.ranges.settle(epoch, tag)
            if finished is not None:
                self.turn.finished.append(finished)
            if outcome.kind is OutcomeKind.CONFIRMED:
                self.latencies.took(now - sent_at)
                self._confirmed(settlement, now, wall)
                if not hears_confirms:
                    continue
            elif isinstance(self.decide(settlement, now, wall), Expire):
                late.add(entry)
            self.notices.ended(settlement, self.epoch_name(epoch), now - sent_at)
        return late

    def unwritable(self, settlement: Settlement[Entry], now: float, wall: float) -> None:
        """Take in an attempt that never came to the wire."""
        self.decide(settlement, now, wall)
        self.notices.ended(settlement, self.epoch_name(settlement.epoch), 0.0)

    def decide(self, settlement: Settlement[Entry], now: float, wall: float) -> Decision:
        """Decide what follows from an attempt without a confirm."""
        entry, outcome = settlement.key, settlement.outcome
        self.pauses.heard(entry, outcome.kind, now)
        attempt = self._keep(settlement, wall)
        setattr(entry, outcome.kind.value, getattr(entry, outcome.kind.value) + 1)
        verdict: Verdict = RetryIn(0.0)
        if outcome.kind in REFUSALS:
            entry.refused_at = wall if entry.refused_at is None else entry.refused_at
            verdict = self.ruling.verdict(entry, outcome, wall)
        decision = decide(
            outcome.kind,
            is_spent=isinstance(verdict, GiveUp),
            is_kept=verdict is not GiveUp.DISCARD,
            wait_s=verdict.seconds if isinstance(verdict, RetryIn) else 0.0,
            now=wall,
            expires_at=entry.expires_at,
        )
        match decision:
            case Park():
                self.turn.parked.append(attempt)
            case Expire():
                self.expire(entry, wall)
            case Discard():
                entry.is_discarded = True
                self.turn.discarded.append(attempt)
            case RetryAt(at):
                entry.due_at = HELD if self.pauses.is_paused(entry) else at
                self.turn.rescheduled.append(entry)
                self.postponed.append(entry)
            case _:
                self.turn.rescheduled.append(entry)
        return decision

    def take_back(self, ids: Container[int]) -> list[Entry]:
        """Forget that these were postponed, or given up unsent, since the last commit.

        Nobody was told of it yet.
        """
        turn = self.turn
        given_up = {a for a in (*turn.parked, *turn.discarded) if a.entry.id in ids}
        taken = [entry for entry in self.postponed if entry.id in ids]
        if taken:
            gone = set(taken)
            self.postponed = [entry for entry in self.postponed if entry not in gone]
            turn.rescheduled = [e for e in turn.rescheduled if e not in gone]
        if given_up:
            turn.parked = [a for a in turn.parked if a not in given_up]
            turn.discarded = [a for a in turn.discarded if a not in given_up]
            turn.attempts = [a for a in turn.attempts if a not in given_up]
        return [*taken, *(attempt.entry for attempt in given_up)]

    def hold(self, entry: Entry) -> None:
        """Have an entry that is in memory wait until its destination is well."""
        entry.due_at = HELD
        self.turn.rescheduled.append(entry)
        self.postponed.append(entry)

    def expire(self, entry: Entry, wall: float) -> None:
        """Give up an entry that is too late, and not on the wire."""
        text = "not sent"
        if entry.attempts:
            is_possible = entry.persistence is Persistence.POSSIBLY_PERSISTED
            text = "may have arrived" if is_possible else "did not arrive"
        outcome = Outcome(OutcomeKind.EXPIRED, 0, text, entry.persistence)
        self.turn.parked.append(self._keep(Settlement(entry, 0, 0, outcome), wall))

    def _confirmed(self, settlement: Settlement[Entry], now: float, wall: float) -> None:
        entry = settlement.key
        self.pauses.heard(entry, OutcomeKind.CONFIRMED, now)
        self.turn.confirmed.append(entry)
        if entry.message.ordering_key is not None:
            self.lets_others_go = True
        if entry.attempts:
            self._keep(settlement, wall)  # the end of a story that was worth keeping
        if entry.waiter is not None:
            entry.waiter.settled(entry, settlement.outcome)

    def _keep(self, settlement: Settlement[Entry], wall: float) -> Attempt:
        epoch = self.epoch_name(settlement.epoch)
        attempt = Attempt(settlement.key, epoch, settlement.tag, settlement.outcome, wall)
        self.turn.attempts.append(attempt)
        return attempt
