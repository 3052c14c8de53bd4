"""From ended attempts to what the store is told: the part of a turn that judges.

Knows: settlements, the policy, and what changes in the store. Must never know: the wire.

A verdict takes effect in two steps: it joins the changes of the coming commit, and what only memory
knows (waiters, what is loaded) follows once the commit has succeeded. A confirm is told to its
waiter at once: should the process die before its row is deleted, the message is sent once more.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final

from reliablepub._core.decide import (
    REFUSALS,
    Decision,
    Discard,
    Expire,
    Park,
    RetryAt,
    decide,
)
from reliablepub._core.events import ConfirmedEach, Ended, Settlement
from reliablepub.outbox.entry import HELD, Attempt, Entry, Sent, Turn
from reliablepub.outcome import Outcome, OutcomeKind, Persistence
from reliablepub.policy import GiveUp, RetryIn, Verdict
from reliablepub.relay.in_flight import InFlightRanges, Settled
from reliablepub.relay.latency import Latencies
from reliablepub.relay.notices import Notices
from reliablepub.relay.pauses import UNKNOWN, Pauses
from reliablepub.relay.ruling import Ruling

_key_of: Final = attrgetter("message.ordering_key")
_attempts_of: Final = attrgetter("attempts")


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

    def judge(self, ended: Sequence[Ended[Entry]], now: float, wall: float) -> set[Entry]:
        """Take in attempts that have ended on the wire.

        Returns:
            those who are too late to be sent again.
        """
        late: set[Entry] = set()
        for one in ended:
            if isinstance(one, ConfirmedEach):
                self._confirmed(one, now, wall)
                continue
            [settled] = self._settle(one.epoch, (one.tag,))
            if isinstance(self.decide(one, now, wall), Expire):
                late.add(one.key)
            self.notices.ended(one, self.epoch_name(one.epoch), now - settled.at)
        return late

    def unwritable(self, settlement: Settlement[Entry], now: float, wall: float) -> None:
        """Take in an attempt that never came to the wire."""
        self.decide(settlement, now, wall)
        self.notices.ended(settlement, self.epoch_name(settlement.epoch), 0.0)

    def decide(self, settlement: Settlement[Entry], now: float, wall: float) -> Decision:
        """Decide what follows from an attempt without a confirm."""
        entry, outcome = settlement.key, settlement.outcome
        attempt = self._keep(settlement, wall)
        setattr(entry, outcome.kind.value, getattr(entry, outcome.kind.value) + 1)
        verdict: Verdict = RetryIn(0.0)
        if outcome.kind in REFUSALS:
            entry.refused_at = wall if entry.refused_at is None else entry.refused_at
            verdict = self.ruling.verdict(entry, outcome, wall)
            is_given_up = isinstance(verdict, GiveUp)
            self.pauses.refused(entry, outcome, now, wall, is_given_up=is_given_up)
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
                self._postpone(entry, at)
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

    def hold(self, entry: Entry, wall: float) -> None:
        """Have an entry that is in memory wait until its destination is well.

        If it has waited for so long that its budget is spent, it is given up with what was last
        said of its destination.
        """
        pause = self.pauses.holds(entry)
        assert pause is not None
        said = pause.why
        if entry.refused_at is None:
            entry.refused_at = wall
        end = None if said is UNKNOWN else self.ruling.end_of_wait(entry, said, wall)
        if end is None:
            self._postpone(entry, wall)
            return
        self.pauses.given_up(entry)
        text = f"{said.reply_text} (said of its destination, for which it has waited since)"
        outcome = replace(said, reply_text=text, known=entry.persistence)
        attempt = Attempt(entry, "", 0, outcome, wall)
        entry.is_discarded = end is GiveUp.DISCARD
        (self.turn.discarded if entry.is_discarded else self.turn.parked).append(attempt)

    def _postpone(self, entry: Entry, at: float) -> None:
        """An entry leaves memory until then, or until its destination is well."""
        entry.due_at = at
        if self.pauses.holds(entry) is not None:
            entry.due_at = HELD
            self.pauses.waits(entry)
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

    def _settle(self, epoch: int, tags: Sequence[int]) -> list[Settled]:
        """Tags are not on the wire any more, and the rows of their ranges may go."""
        settled = self.ranges.settle(epoch, tags)
        self.turn.finished += [part.finished for part in settled if part.finished is not None]
        return settled

    def _confirmed(self, run: ConfirmedEach[Entry], now: float, wall: float) -> None:
        """What most messages come to: so it is done for many at once."""
        entries, settled = run.keys, self._settle(run.epoch, run.tags)
        for part in settled:
            self.latencies.took(now - part.at, part.tags)
        self.pauses.confirmed(entries, now)
        self.turn.confirmed += entries
        if any(map(_key_of, entries)):
            self.lets_others_go = True
        if any(map(_attempts_of, entries)):
            self._keep_stories(run, wall)
        _tell_confirmed(entries)
        if self.notices.hears_confirms:
            taken_s = (now - part.at for part in settled for _ in range(part.tags))
            for settlement, latency_s in zip(run.each(), taken_s, strict=True):
                self.notices.ended(settlement, self.epoch_name(run.epoch), latency_s)

    def _keep_stories(self, run: ConfirmedEach[Entry], wall: float) -> None:
        """The ends of those that were worth keeping."""
        for settlement in run.each():
            if settlement.key.attempts:
                self._keep(settlement, wall)

    def _keep(self, settlement: Settlement[Entry], wall: float) -> Attempt:
        epoch = self.epoch_name(settlement.epoch)
        attempt = Attempt(settlement.key, epoch, settlement.tag, settlement.outcome, wall)
        self.turn.attempts.append(attempt)
        return attempt


def _tell_confirmed(entries: Sequence[Entry]) -> None:
    """Tell those who wait, each once for all of theirs that follow one another."""
    waiter, theirs = entries[0].waiter, list[Entry]()
    for entry in entries:
        if entry.waiter is not waiter:
            if waiter is not None:
                waiter.all_confirmed(theirs)
            waiter, theirs = entry.waiter, []
        theirs.append(entry)
    if waiter is not None:
        waiter.all_confirmed(theirs)
