"""The changes that ended attempts make in the store: confirm, retry, park, discard or expire.

Knows: settlements, the retry policy, batches in flight, and the changes of the store. Must never
know: the transport.

An outcome takes effect in two steps. It joins the changes of the next commit (a confirm: of a later
one, see `Removals`); once that commit has succeeded, waiters and the bookkeeping of loaded entries
follow. Only a confirm reaches its waiter at once: if the process dies before the row is deleted,
the message is merely sent once more.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf
from operator import attrgetter
from typing import Final

from reliablepub._core.decide import REFUSALS, Decision, Discard, Expire, Park, RetryAt, decide
from reliablepub._core.events import Batch, ConfirmedEach, Ended, Settlement
from reliablepub.outbox.entry import (
    HELD,
    Attempt,
    Changes,
    Entry,
    epoch_name,
    id_of,
    is_plain,
)
from reliablepub.outcome import Outcome, OutcomeKind
from reliablepub.policy import GiveUp, RetryIn, Verdict
from reliablepub.relay.callbacks import GuardedPolicy, Notices
from reliablepub.relay.pauses import UNKNOWN, Pauses
from reliablepub.relay.status import Latencies

WAIT_S: Final = 0.2
"""How long confirmed entries wait for others, in seconds: several syncs of a broker's disk."""


class Removals:
    """Confirmed entries that are still in the store, and which of them leave with which commit.

    A broker with several queues confirms in the order in which they sync their disks. If each entry
    left with the next commit, most of those next to it in the file would stay: a page with seven
    rows would be written three times, and a statement would remove three rows. So entries leave
    with the others of their batch, whose ids are consecutive, and as many leave as enter with the
    same commit, which then use the pages of those that leave. With an outbox on disk, this saves a
    sixth of the CPU time of a message.

    Until then a crash duplicates them, as it does those in flight. So at most a window of them
    stays, and at most for `WAIT_S`. The row with the tags of a batch leaves last: after a crash,
    all messages that a queue may have are known.
    """

    __slots__ = ("_finished", "_numbers", "_unfinished", "count")

    def __init__(self) -> None:
        self.count: int = 0
        # Each with the time of its first confirm, which is their order: a dict and a heap.
        self._unfinished: dict[Batch[Entry], float] = {}
        self._finished: list[tuple[float, int, Batch[Entry]]] = []
        self._numbers = itertools.count()  # so that the heap compares no batches

    def confirmed(self, run: ConfirmedEach[Entry], now: float) -> None:
        """Note that entries were confirmed (at ``now``, monotonic seconds)."""
        first = 0
        for batch, count in run.batches:
            batch.confirmed += run.keys[first : first + count]
            self._unfinished.setdefault(batch, now)
            self.ended(batch, count)
            first += count
        self.count += first

    def ended(self, batch: Batch[Entry], count: int) -> None:
        """Note that so many further attempts of a batch have ended."""
        batch.outstanding -= count
        if not batch.outstanding:
            batch.confirmed.sort(key=id_of)
            since = self._unfinished.pop(batch, -inf)
            heappush(self._finished, (since, next(self._numbers), batch))

    @property
    def has_finished(self) -> bool:
        """Whether a batch is finished."""
        return bool(self._finished)

    @property
    def next_at(self) -> float:
        """When an unfinished batch will have waited for `WAIT_S` (monotonic); infinity if none."""
        return next(iter(self._unfinished.values()), inf) + WAIT_S

    def are_due(self, before: float) -> bool:
        """Whether a batch is finished, or has had its first confirm before that."""
        return bool(self._finished or (self._unfinished and self.next_at <= before + WAIT_S))

    def take(self, changes: Changes, *, least: int, stay_max: int, before: float) -> None:
        """Add entries, oldest first, to the next commit, so that at most ``stay_max`` stay."""
        least = max(least, self.count - stay_max)  # of finished batches, as far as there are any
        while self._finished:
            since, _, batch = self._finished[0]
            left = len(batch.confirmed)
            # all of a batch whose first confirm came before that time
            count = left if since <= before else min(least, left)
            self._leave(batch, count, changes)
            if count < left:
                break
            least = max(0, least - count)
            changes.finished.append(batch)
            heappop(self._finished)
        while self._unfinished:
            batch, since = next(iter(self._unfinished.items()))
            if since > before and self.count <= stay_max:
                break
            del self._unfinished[batch]  # it is here again after its next confirm
            self._leave(batch, len(batch.confirmed), changes)

    def _leave(self, batch: Batch[Entry], count: int, changes: Changes) -> None:
        changes.confirmed += batch.confirmed[:count]
        del batch.confirmed[:count]
        self.count -= count


@dataclass(slots=True)
class Settling:
    """Collects the outcomes of attempts as changes for the next commit."""

    policy: GuardedPolicy
    pauses: Pauses
    notices: Notices
    run: int  # of the store; a part of the epochs' names
    changes: Changes = field(default_factory=Changes)
    postponed: list[Entry] = field(default_factory=list)  # leave memory with the next commit
    latencies: Latencies = field(default_factory=Latencies)
    removals: Removals = field(default_factory=Removals)

    def written(self, batch: Batch[Entry], now: float) -> None:
        """Note that a batch was passed to the transport."""
        batch.written_at = now
        if self.notices.hears_sent:
            self.notices.sent(batch, epoch_name(self.run, batch.epoch))

    def unwritten(self, batches: Sequence[Batch[Entry]]) -> None:
        """Note that batches were not written after all: their rows, if any, can be deleted."""
        known = {(batch.epoch, batch.first_tag) for batch in self.changes.finished}
        self.changes.finished += [b for b in batches if (b.epoch, b.first_tag) not in known]

    def committed(self) -> tuple[Changes, list[Entry]]:
        """Start anew after a commit; return its changes, and the entries that they postpone."""
        changes, postponed = self.changes, self.postponed
        self.changes, self.postponed = Changes(), []
        return changes, postponed

    def attempts_ended(self, ended: Sequence[Ended[Entry]], now: float, wall: float) -> set[Entry]:
        """Settle attempts ended by the broker or by a channel's end; return the expired entries."""
        late: set[Entry] = set()  # these must not be sent again
        for one in ended:
            if isinstance(one, ConfirmedEach):
                self._confirmed(one, now, wall)
                continue
            assert one.batch is not None
            self.removals.ended(one.batch, 1)
            if isinstance(self.decide(one, now, wall), Expire):
                late.add(one.key)
        return late

    def decide(self, settlement: Settlement[Entry], now: float, wall: float) -> Decision | None:
        """Decide on an entry whose attempt ended without a confirm; None if it has arrived."""
        entry, outcome = settlement.key, settlement.outcome
        setattr(entry, outcome.kind.value, getattr(entry, outcome.kind.value) + 1)
        entry.is_plain = False
        verdict: Verdict = RetryIn(0.0)
        if outcome.kind in REFUSALS:
            entry.note_refusal(wall)
            verdict = self.policy.verdict(entry, outcome, wall)
            if verdict is GiveUp.ARRIVED:
                self._arrived(settlement, now, wall)
                return None
            is_given_up = isinstance(verdict, GiveUp)
            if settlement.batch is not None:  # otherwise it is no answer of the broker's
                self.pauses.refused(entry, outcome, now, wall, is_given_up=is_given_up)
        attempt = self._keep(settlement, wall)
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
                self.changes.parked.append(attempt)
            case Expire():
                self.expire(entry, wall)
            case Discard():
                entry.is_discarded = True
                self.changes.discarded.append(attempt)
            case RetryAt(at):
                self._postpone(entry, at)
            case _:  # the session sends it again; the store gets its new counts
                self.changes.rescheduled.append(entry)
        self._tell_ended(settlement, now)
        return decision

    def _arrived(self, settlement: Settlement[Entry], now: float, wall: float) -> None:
        """Settle an entry as confirmed: an earlier attempt delivered it, says the policy."""
        entry, said = settlement.key, settlement.outcome
        # Its counts are of attempts without a confirm, and this one counts as the confirm.
        setattr(entry, said.kind.value, getattr(entry, said.kind.value) - 1)
        text = f"{said.reply_text} ({said.kind} as a duplicate, says RetryPolicy.decide)"
        outcome = Outcome(OutcomeKind.CONFIRMED, said.reply_code, text)
        confirmed = settlement._replace(outcome=outcome)
        if self.pauses.tracked:
            self.pauses.confirmed((entry,), now)
        self.changes.confirmed.append(entry)
        self._keep(confirmed, wall)
        _tell_confirmed((entry,))
        self._tell_ended(confirmed, now)

    def take_back(self, ids: Container[int]) -> list[Entry]:
        """Take back entries postponed, or given up unsent, since the last commit; return these."""
        # Nothing outside has learned of it yet: waiters and hooks are told after the commit.
        changes = self.changes
        given_up = {a for a in (*changes.parked, *changes.discarded) if a.entry.id in ids}
        taken = [entry for entry in self.postponed if entry.id in ids]
        self.postponed = [entry for entry in self.postponed if entry.id not in ids]
        # Others too: what an operator has written counts, perhaps the time at which it is due.
        changes.rescheduled = [entry for entry in changes.rescheduled if entry.id not in ids]
        if given_up:
            changes.parked = [a for a in changes.parked if a not in given_up]
            changes.discarded = [a for a in changes.discarded if a not in given_up]
            changes.attempts = [a for a in changes.attempts if a not in given_up]
        return [*taken, *(attempt.entry for attempt in given_up)]

    def hold(self, entry: Entry, wall: float) -> None:
        """Postpone a loaded entry until its destination accepts messages again, or give it up."""
        pause = self.pauses.holds(entry)
        assert pause is not None
        said = pause.why
        entry.note_refusal(wall)
        # The outcome of an earlier run is not known, so no budget can be named for it.
        end = None if said is UNKNOWN else self.policy.end_of_wait(entry, said, wall)
        if end is None:
            self._postpone(entry, wall)
            return
        self.pauses.given_up(entry)  # its budget is spent
        text = f"{said.reply_text} (last refusal by its destination, for which it has waited)"
        outcome = replace(said, reply_text=text, known=entry.persistence)
        attempt = Attempt(entry, "", 0, outcome, wall)
        entry.is_discarded = end is GiveUp.DISCARD
        (self.changes.discarded if entry.is_discarded else self.changes.parked).append(attempt)

    def _postpone(self, entry: Entry, at: float) -> None:
        """Have an entry leave memory until a time; or, if paused, until its destination resumes."""
        entry.due_at, entry.is_plain = at, False
        if self.pauses.holds(entry) is not None:
            entry.due_at = HELD
            self.pauses.waits(entry)
        self.changes.rescheduled.append(entry)
        self.postponed.append(entry)

    def expire(self, entry: Entry, wall: float) -> None:
        """Give up an entry whose deadline has passed and that is not in flight."""
        text = "not sent"
        if entry.attempts:
            text = "may have arrived" if entry.may_have_arrived else "did not arrive"
        outcome = Outcome(OutcomeKind.EXPIRED, 0, text, entry.persistence)
        self.changes.parked.append(self._keep(Settlement(entry, 0, 0, outcome, None), wall))

    def _tell_ended(self, one: Settlement[Entry], now: float) -> None:
        """Tell hooks of an attempt that has ended."""
        latency_s = now - one.batch.written_at if one.batch is not None else 0.0
        self.notices.ended(one, epoch_name(self.run, one.epoch), latency_s)

    def _confirmed(self, run: ConfirmedEach[Entry], now: float, wall: float) -> None:
        """Settle confirmed entries, many at once: this is the path that most messages take."""
        entries = run.keys
        for batch, count in run.batches:
            self.latencies.took(now - batch.written_at, count)
        if self.pauses.tracked:
            self.pauses.confirmed(entries, now)
        if all(map(is_plain, entries)):
            self.removals.confirmed(run, now)
        else:
            self._confirmed_not_plain(run, wall)
        _tell_confirmed(entries)
        if self.notices.hears_confirms:
            for settlement in run.each():
                self._tell_ended(settlement, now)

    def _confirmed_not_plain(self, run: ConfirmedEach[Entry], wall: float) -> None:
        """Record the confirm of entries with earlier attempts."""
        # They leave the store at once: the next one of an ordering key waits for that.
        self.changes.confirmed += run.keys
        for batch, count in run.batches:
            self.removals.ended(batch, count)
        for settlement in run.each():
            if settlement.key.attempts:
                self._keep(settlement, wall)

    def _keep(self, settlement: Settlement[Entry], wall: float) -> Attempt:
        epoch = epoch_name(self.run, settlement.epoch)
        attempt = Attempt(settlement.key, epoch, settlement.tag, settlement.outcome, wall)
        self.changes.attempts.append(attempt)
        return attempt


_waiter: Final = attrgetter("waiter")


def _tell_confirmed(entries: Sequence[Entry]) -> None:
    """Tell waiters of confirms, with one call for consecutive entries of a waiter."""
    for waiter, theirs in itertools.groupby(entries, _waiter):
        if waiter is not None:
            waiter.all_confirmed(list(theirs))
