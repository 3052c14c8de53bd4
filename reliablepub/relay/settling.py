"""From ended attempts to what the store is told: confirmed, retried, parked, discarded or expired.

Knows: settlements, the retry policy, recorded tag ranges, and what changes in the store. Must never
know: the wire.

An outcome takes effect in two steps: it joins the changes of the coming commit, and what only
memory knows (waiters, what is loaded) follows once the commit has succeeded. A confirm is told to
its waiter at once: should the process die before its row is deleted, the message is sent once more.

The store records tags in flight by range, one row for each batch, for people to read; a row may go
when no tag of its range is outstanding any more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final, NamedTuple

from reliablepub._core.decide import REFUSALS, Decision, Discard, Expire, Park, RetryAt, decide
from reliablepub._core.events import ConfirmedEach, Ended, Settlement
from reliablepub.outbox.entry import HELD, Attempt, Changes, Entry, Sent
from reliablepub.outcome import Outcome, OutcomeKind, Persistence
from reliablepub.policy import GiveUp, Refusal, RetryIn, RetryPolicy, Verdict
from reliablepub.relay.callbacks import Guard, Notices
from reliablepub.relay.pauses import UNKNOWN, Pauses
from reliablepub.relay.status import Latencies


@dataclass(slots=True, eq=False)
class _Range:
    """Tags that were written together, and how many of them are outstanding."""

    epoch: int
    tags: range
    sent: Sent
    at: float
    left: int


@dataclass(slots=True)
class _Epoch:
    """The ranges of one epoch, by their first tags."""

    firsts: list[int] = field(default_factory=list)
    ranges: list[_Range] = field(default_factory=list)


class Settled(NamedTuple):
    """Some tags of one range are settled.

    Attributes:
        tags: how many.
        at: when they were written.
        finished: the range, if none of its tags is outstanding any more.
    """

    tags: int
    at: float
    finished: Sent | None


_NONE: Final = _Range(0, range(0), Sent("", 0, ()), 0.0, 0)


class InFlightRanges:
    """Counts down the outstanding tags of each range."""

    def __init__(self) -> None:
        self._by_epoch: dict[int, _Epoch] = {}

    def add(self, epoch: int, sent: Sent, at: float) -> None:
        """A batch has been recorded and is about to be written."""
        tags = range(sent.first_tag, sent.first_tag + len(sent.entries))
        known = self._by_epoch.setdefault(epoch, _Epoch())
        known.firsts.append(sent.first_tag)
        known.ranges.append(_Range(epoch, tags, sent, at, len(tags)))

    def settle(self, epoch: int, tags: Iterable[int]) -> list[Settled]:
        """Tags are settled, which mostly lie in few ranges."""
        known = self._by_epoch[epoch]
        settled: list[Settled] = []
        found, inside, count = _NONE, _NONE.tags, 0
        for tag in tags:
            if tag not in inside:
                self._count_down(found, count, settled)
                found, count = known.ranges[bisect_right(known.firsts, tag) - 1], 0
                inside = found.tags
            count += 1
        self._count_down(found, count, settled)
        return settled

    def _count_down(self, found: _Range, count: int, settled: list[Settled]) -> None:
        if not count:
            return
        found.left -= count
        settled.append(Settled(count, found.at, None if found.left else found.sent))
        if not found.left:
            self._remove(found)

    def _remove(self, done: _Range) -> None:
        known = self._by_epoch[done.epoch]
        index = bisect_right(known.firsts, done.tags.start) - 1
        del known.firsts[index], known.ranges[index]
        if not known.ranges:
            del self._by_epoch[done.epoch]


_DEFAULT: Final = RetryPolicy()


class Ruling:
    """Asks the policy; one that fails is passed over, and the default one counts.

    Args:
        policy: with strategies and a callback of the application's own.
        guard: keeps their failures off us.
    """

    def __init__(self, policy: RetryPolicy, guard: Guard) -> None:
        self._policy = policy
        self._guard = guard

    def verdict(self, entry: Entry, outcome: Outcome, wall: float) -> Verdict:
        """What is to be done after a refusal, which the entry has counted already."""
        return self._decided(entry, outcome, wall, self._by_budget(entry, outcome, wall))

    def end_of_wait(self, entry: Entry, outcome: Outcome, wall: float) -> GiveUp | None:
        """What becomes of an entry that waits, where its budget is spent; None: it may go on.

        Args:
            entry: it waits for its destination.
            outcome: what that destination refused last.
            wall: seconds since 1970.
        """
        verdict = self._by_budget(entry, outcome, wall)
        if isinstance(verdict, GiveUp):
            verdict = self._decided(entry, outcome, wall, verdict)
        return verdict if isinstance(verdict, GiveUp) else None

    def _by_budget(self, entry: Entry, outcome: Outcome, wall: float) -> Verdict:
        refusals, age_s = _spent(entry, outcome, wall)
        with self._guard.calling("a strategy of RetryPolicy"):
            return self._policy.retries(outcome).verdict(refusals, age_s)
        return _DEFAULT.retries(outcome).verdict(refusals, age_s)

    def _decided(self, entry: Entry, outcome: Outcome, wall: float, verdict: Verdict) -> Verdict:
        """What the application's callback says, or the verdict."""
        if self._policy.decide is None:
            return verdict
        refusals, age_s = _spent(entry, outcome, wall)
        with self._guard.calling("RetryPolicy.decide"):
            message = entry.message
            said = self._policy.decide(
                Refusal(
                    message_id=message.message_id or "",
                    exchange=message.exchange,
                    routing_key=message.routing_key,
                    outcome=outcome,
                    refusals=refusals,
                    age_s=age_s,
                    verdict=verdict,
                )
            )
            if isinstance(said, RetryIn | GiveUp):
                return said
            if said is not None:
                msg = f"it returned {said!r}: not RetryIn, GiveUp or None"
                raise TypeError(msg)
        return verdict


def _spent(entry: Entry, outcome: Outcome, wall: float) -> tuple[int, float]:
    """Refusals of this kind, and seconds since the first one of any."""
    age_s = 0.0 if entry.refused_at is None else max(0.0, wall - entry.refused_at)
    return getattr(entry, outcome.kind.value), age_s


_is_plain: Final = attrgetter("is_plain")


@dataclass(slots=True)
class Settling:
    """The changes that await the next commit.

    Attributes:
        ruling: what the policy says of refusals.
        pauses: destinations to which nothing may go.
        notices: what hooks are told.
        run: names the epochs, with their number.
        changes: what the store will be told.
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
    changes: Changes = field(default_factory=Changes)
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
        self.changes.finished += recorded

    def committed(self) -> tuple[Changes, list[Entry]]:
        """The changes are in the store: hand out what followed from them, and begin anew.

        Returns:
            what was committed, and the entries that are postponed.
        """
        changes, postponed = self.changes, self.postponed
        self.changes, self.postponed, self.lets_others_go = Changes(), [], False
        return changes, postponed

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
        entry.is_plain = False
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
                self.changes.parked.append(attempt)
            case Expire():
                self.expire(entry, wall)
            case Discard():
                entry.is_discarded = True
                self.changes.discarded.append(attempt)
            case RetryAt(at):
                self._postpone(entry, at)
            case _:
                self.changes.rescheduled.append(entry)
        return decision

    def take_back(self, ids: Container[int]) -> list[Entry]:
        """Forget that these were postponed, or given up unsent, since the last commit.

        Nobody was told of it yet.
        """
        changes = self.changes
        given_up = {a for a in (*changes.parked, *changes.discarded) if a.entry.id in ids}
        taken = [entry for entry in self.postponed if entry.id in ids]
        if taken:
            gone = set(taken)
            self.postponed = [entry for entry in self.postponed if entry not in gone]
            changes.rescheduled = [e for e in changes.rescheduled if e not in gone]
        if given_up:
            changes.parked = [a for a in changes.parked if a not in given_up]
            changes.discarded = [a for a in changes.discarded if a not in given_up]
            changes.attempts = [a for a in changes.attempts if a not in given_up]
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
        (self.changes.discarded if entry.is_discarded else self.changes.parked).append(attempt)

    def _postpone(self, entry: Entry, at: float) -> None:
        """An entry leaves memory until then, or until its destination is well."""
        entry.due_at, entry.is_plain = at, False
        if self.pauses.holds(entry) is not None:
            entry.due_at = HELD
            self.pauses.waits(entry)
        self.changes.rescheduled.append(entry)
        self.postponed.append(entry)

    def expire(self, entry: Entry, wall: float) -> None:
        """Give up an entry that is too late, and not on the wire."""
        text = "not sent"
        if entry.attempts:
            is_possible = entry.persistence is Persistence.POSSIBLY_PERSISTED
            text = "may have arrived" if is_possible else "did not arrive"
        outcome = Outcome(OutcomeKind.EXPIRED, 0, text, entry.persistence)
        self.changes.parked.append(self._keep(Settlement(entry, 0, 0, outcome), wall))

    def _settle(self, epoch: int, tags: Sequence[int]) -> list[Settled]:
        """Tags are not on the wire any more, and the rows of their ranges may go."""
        settled = self.ranges.settle(epoch, tags)
        self.changes.finished += [part.finished for part in settled if part.finished is not None]
        return settled

    def _confirmed(self, run: ConfirmedEach[Entry], now: float, wall: float) -> None:
        """What most messages come to: so it is done for many at once."""
        entries, settled = run.keys, self._settle(run.epoch, run.tags)
        for part in settled:
            self.latencies.took(now - part.at, part.tags)
        self.pauses.confirmed(entries, now)
        self.changes.confirmed += entries
        if not all(map(_is_plain, entries)):
            self._look_closer(run, wall)
        _tell_confirmed(entries)
        if self.notices.hears_confirms:
            taken_s = (now - part.at for part in settled for _ in range(part.tags))
            for settlement, latency_s in zip(run.each(), taken_s, strict=True):
                self.notices.ended(settlement, self.epoch_name(run.epoch), latency_s)

    def _look_closer(self, run: ConfirmedEach[Entry], wall: float) -> None:
        """Let other messages of an ordering key go; keep how messages with a history ended."""
        for settlement in run.each():
            entry = settlement.key
            if entry.message.ordering_key is not None:
                self.lets_others_go = True
            if entry.attempts:
                self._keep(settlement, wall)

    def _keep(self, settlement: Settlement[Entry], wall: float) -> Attempt:
        epoch = self.epoch_name(settlement.epoch)
        attempt = Attempt(settlement.key, epoch, settlement.tag, settlement.outcome, wall)
        self.changes.attempts.append(attempt)
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
