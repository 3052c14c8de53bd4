"""From ended attempts to what the store is told: the part of a turn that judges.

Knows: settlements, the policy, and what changes in the store. Must never know: the wire.

A verdict takes effect in two steps: it joins the changes of the coming commit, and what only memory
knows (waiters, what is loaded) follows once the commit has succeeded. A confirm is told to its
waiter at once: should the process die before its row is deleted, the message is sent once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from reliablepub._core.decide import REFUSALS, Park, RetryAt, decide
from reliablepub._core.events import Settlement
from reliablepub.outbox.entry import Attempt, Entry, Sent, Turn
from reliablepub.outcome import OutcomeKind
from reliablepub.policy import RetryPolicy
from reliablepub.relay.in_flight import InFlightRanges


@dataclass(slots=True)
class Verdicts:
    """The changes that await the next commit.

    Attributes:
        policy: how often refusals are tried again.
        run: names the epochs, with their number.
        turn: what the store will be told.
        postponed: entries that leave memory until they are due.
        ranges: the tags on the wire.
    """

    policy: RetryPolicy
    run: int
    turn: Turn = field(default_factory=Turn)
    postponed: list[Entry] = field(default_factory=list)
    ranges: InFlightRanges = field(default_factory=InFlightRanges)

    def epoch_name(self, epoch: int) -> str:
        """How an epoch is called in the outbox."""
        return f"{self.run}-{epoch}"

    def written(self, epoch: int, sent: Sent) -> None:
        """A recorded batch is on its way to the wire."""
        self.ranges.add(epoch, sent)

    def unwritten(self, recorded: Sequence[Sent]) -> None:
        """Recorded batches that were not written after all: their rows may go."""
        self.turn.finished += recorded

    def committed(self) -> tuple[Turn, list[Entry]]:
        """The changes are in the store: hand out what followed from them, and begin anew.

        Returns:
            what was committed, and the entries that are postponed.
        """
        turn, postponed = self.turn, self.postponed
        self.turn, self.postponed = Turn(), []
        return turn, postponed

    def judge(self, settlement: Settlement[Entry], wall: float) -> None:
        """Take in an attempt that has ended on the wire."""
        finished = self.ranges.settle(settlement.epoch, settlement.tag)
        if finished is not None:
            self.turn.finished.append(finished)
        self.decide(settlement, wall)

    def decide(self, settlement: Settlement[Entry], wall: float) -> None:
        """Decide what follows from an attempt."""
        entry, outcome = settlement.key, settlement.outcome
        if outcome.kind is OutcomeKind.CONFIRMED:
            self._confirmed(settlement, wall)
            return
        attempt = self._keep(settlement, wall)
        setattr(entry, outcome.kind.value, getattr(entry, outcome.kind.value) + 1)
        retries = self.policy.retries(outcome.kind) if outcome.kind in REFUSALS else None
        refusals = getattr(entry, outcome.kind.value)
        decision = decide(
            outcome.kind,
            refusals=refusals,
            attempts_max=retries.attempts_max if retries else 0,
            wait_s=retries.wait_s(refusals) if retries else 0.0,
            now=wall,
        )
        match decision:
            case Park():
                self.turn.parked.append(attempt)
            case RetryAt(at):
                entry.due_at = at
                self.turn.rescheduled.append(entry)
                self.postponed.append(entry)
            case _:
                self.turn.rescheduled.append(entry)

    def _confirmed(self, settlement: Settlement[Entry], wall: float) -> None:
        entry = settlement.key
        self.turn.confirmed.append(entry)
        if entry.uncertain or entry.nacked or entry.returned or entry.refused:
            self._keep(settlement, wall)  # the end of a story that was worth keeping
        if entry.waiter is not None:
            entry.waiter.settled(entry, settlement.outcome)

    def _keep(self, settlement: Settlement[Entry], wall: float) -> Attempt:
        epoch = self.epoch_name(settlement.epoch)
        attempt = Attempt(settlement.key, epoch, settlement.tag, settlement.outcome, wall)
        self.turn.attempts.append(attempt)
        return attempt
