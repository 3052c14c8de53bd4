"""One turn of the relay: take in, commit, send. The thread that runs the turns does the listening.

Knows: the store, the transport and the session, and the order in which to call them. Must never
know: threads, event loops, SQL, AMQP.

::

    take in    messages handed over since the last turn, retries that fell due, the backlog
    commit     ONE transaction: new messages in; settled ones out or rescheduled; tags of the
               messages to be sent now  -> wake callers whose message is now on disk
    send       one write of as many publishes as the window allows
    listen     (the thread) until the socket is readable, a caller wakes it, or a deadline is due

Under load a turn carries hundreds of messages and one fsync.

Invariants:

- A message is sent only after the commit that holds it and its tag. When the commit fails,
  the session takes the tags back, so the sequence has not moved.
- An entry is in memory at most once. It leaves memory only after the commit that settles or
  postpones it.
- While the store cannot commit, the relay sends nothing. This bounds the changes that await
  a commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any, Final

from reliablepub._core.events import Batch, ConfirmedEach, ConnectionLost, Event, Settlement
from reliablepub._core.session import Session
from reliablepub.errors import (
    OutboxError,
    OutboxUnreachable,
    OutboxUnsure,
)
from reliablepub.outbox.entry import (
    TRANSIENT,
    Bell,
    Changes,
    Entry,
    Intervened,
    Rebase,
    Snapshot,
    Store,
)
from reliablepub.outcome import Outcome, OutcomeKind
from reliablepub.policy import RetryPolicy
from reliablepub.relay.callbacks import Calls, Guard, GuardedPolicy, Notices
from reliablepub.relay.clock import Clock, ClockWatch
from reliablepub.relay.connection import Connection
from reliablepub.relay.elsewhere import Elsewhere
from reliablepub.relay.handover import Chunk, Inbox, Limits
from reliablepub.relay.intake import Intake
from reliablepub.relay.loaded import Loaded, Waiters
from reliablepub.relay.pauses import Pauses
from reliablepub.relay.setback import Setback
from reliablepub.relay.settling import WAIT_S, Settling
from reliablepub.relay.status import Link, Percentiles, Status
from reliablepub.relay.withdrawals import Withdrawals, tell_withdrawn
from reliablepub.transport.base import CannotEncode, Transport

LAZY_COMMIT_S: Final = 0.02
"""How long confirms and expired messages may wait for a commit that something else needs."""
GATHERED_MAX: Final = 50
"""With this many expired messages, the relay commits at once, however soon after the last."""
LOOK_S: Final = 1.0
"""Interval at which an idle relay takes a turn, to look at its files, the disk and the clocks."""
STRANDED_S: Final = 60.0
"""Interval at which a relay without work looks for messages that no read has found."""
STRANDED: Final = (
    "message {} is open and due, and no read finds it: the outbox is damaged, or was changed; see "
    "`reliablepub outbox check`, or in PostgreSQL `reliablepub doctor`"
)
"""Text of `Status.reason`."""


class Relay:
    """Moves entries from callers and the store to the broker, and outcomes back."""

    def __init__(
        self,
        *,
        store: Store,
        transport: Transport,
        session: Session[Entry],
        inbox: Inbox,
        policy: RetryPolicy,
        limits: Limits,
        clock: Clock,
        hooks: Calls,
        guard: Guard | None = None,
        bell: Bell | None = None,  # the store's, if the thread listens for it
        waiters: Waiters | None = None,  # of the store's run before this one
    ) -> None:
        self._store = store
        self._transport = transport
        self._session = session
        self._clock = clock
        self._inbox = inbox
        self._snapshot: Snapshot = store.snapshot()
        self._loaded = Loaded(
            store,
            last_id=self._snapshot.last_id,
            messages_max=limits.loaded_max,
            bytes_max=limits.loaded_bytes_max,
            wall=clock.wall(),
            waiters=waiters,
        )
        self._guard = guard or Guard()
        self._notices = Notices(hooks, self._guard)
        guarded = GuardedPolicy(policy, self._guard)
        self._pauses = Pauses(guarded, self._notices)
        # One more than can be paused, so that `found` notices if there are too many.
        held = store.held_exchanges(guarded.breaker.destinations_max + 1)
        now = clock.monotonic()
        self._pauses.found(held, now, clock.wall())
        self._intake = Intake(inbox, limits, self._loaded, session, self._pauses)
        self._settling = Settling(guarded, self._pauses, self._notices, store.run)
        self._withdrawals = Withdrawals(store, session, self._loaded, self._settling, self._notices)
        self._connection = Connection(transport, session, now)
        self._full_look_at = now
        self._is_unread = False  # what has changed in the store was not read yet
        self._has_bell = bell is not None
        self._elsewhere = Elsewhere(bell, now, store.rest_s)
        self._clock_watch = ClockWatch(clock)
        self._commit_by: float | None = None
        self._gather_until = -inf
        self._setback = Setback()
        self._no_room = store.relieve()
        self._stranded, self._stranded_from = "", 0
        self._look_for_stranded_at = now + STRANDED_S
        self._is_draining = False
        self._idle_until = -inf
        self.turns: int = 0
        self.turned_at: float = now  # when the last turn began; other threads read it
        self._commits, self._commit_s = 0, 0.0
        self.status: Status = Status(counters=self._snapshot.counters)

    # ------------------------------------------------------------------ called by the thread

    def turn(self, *, is_flushing: bool = False) -> float:
        """Take in, commit, send; return the most seconds to listen before the next turn."""
        now, wall = self._clock.monotonic(), self._clock.wall()
        self.turns += 1
        self.turned_at = now
        self._look_at_clock(now, wall)
        self._connection.keep(now)
        self._settle_ended(now, wall)
        self._look_elsewhere(now, wall)
        self._setback.look(now, is_readable=not self._is_unread)
        if self._setback.refusal is not None:
            self._inbox.reject(self._setback.refusal)
        if not self._setback.backs_off:
            try:
                taken_in = self._take_in(now, wall)
            except TRANSIENT as error:
                self._cannot_read(now, error)
            else:
                try:
                    self._commit_and_send(taken_in, now, wall, is_flushing=is_flushing)
                except BaseException as error:
                    self._intake.failed(taken_in, error)
                    raise
        if now >= self._look_for_stranded_at:
            self._look_for_stranded_at = now + STRANDED_S
            self._look_for_stranded(wall)
        if self._withdrawals.has_parked:
            self._withdrawals.has_parked = False
            self._is_unread = True  # by this process, which the store does not tell
            self.look()
        self.status = self._new_status()
        self._notices.deliver(self.status)
        return self._wait_s()

    def idle_s(self) -> float | None:
        """The most seconds to listen before the next look; None if a turn is due.

        A relay at rest does this twice a second (`elsewhere.REST_S`), one without a bell 20 times,
        in place of a turn, so it is kept cheap: turns alone took 1.4 times as much of a core.
        """
        now = self._clock.monotonic()
        if now >= self._idle_until or self._inbox.chunks:
            return None
        if self._has_news(now):
            return None
        self.turns += 1
        self.turned_at = now
        return min(self._elsewhere.look_at, self._idle_until) - now

    def handle(self, events: Iterable[Event]) -> None:
        """Pass events from the transport to the session."""
        if self._connection.handle(events, self._clock.monotonic()):
            self._idle_until = -inf

    def drain(self) -> None:
        """Stop taking in and sending. Messages in flight are still settled."""
        self._is_draining = True
        self._idle_until = -inf
        self._session.drain()

    def end(self) -> Waiters:
        """Forget all messages, for another run of the store; return who waits for which entry."""
        session, settling = self._session, self._settling
        session.handle(ConnectionLost("the relay begins anew"), self._clock.monotonic())
        held = {*session.buffered_keys(), *settling.postponed}
        for ended in session.poll_settlements():
            held.update(ended.keys if isinstance(ended, ConfirmedEach) else (ended.key,))
        changes = settling.changes
        held.update(attempt.entry for attempt in (*changes.parked, *changes.discarded))
        for entry in held:
            if entry.waiter is not None:
                self._loaded.waiters.put(entry.id, entry.waiter)
        return self._loaded.waiters

    @property
    def is_unhurried(self) -> bool:
        """Whether the next turn can wait while more confirms arrive.

        True while more than half a window is in flight, further messages wait for room in the
        window, and no caller waits for a commit.
        """
        session = self._session
        if session.in_flight <= session.window.size // 2 or not session.buffered:
            return False
        return not self._intake.is_ready(self._snapshot.counters, self._clock.monotonic())

    def look(self) -> int | None:
        """Count in `status` what others have stored; return the highest id, None if unreadable."""
        now = self._full_look_at = self._clock.monotonic()
        is_read = self._look_elsewhere(now, self._clock.wall())
        self.status = replace(self.status, counters=self._snapshot.counters)
        return self._snapshot.last_id if is_read else None

    def latency(self) -> Percentiles | None:
        """Percentiles of recent confirm latencies; None if there were no confirms."""
        return self._settling.latencies.told(self._clock.monotonic())

    def wall(self) -> float:
        """The wall clock time, seconds since 1970, as recorded in the outbox."""
        return self._clock.wall()

    def lowest_awaited(self, first_id: int, at: float) -> int | None:
        """The lowest open id, from ``first_id`` on, that was to be sent by ``at``; or None.

        While the store cannot be read, it is ``first_id``: there may be one.
        """
        try:
            return self._store.lowest_awaited(first_id, at)
        except TRANSIENT:
            return first_id

    def _look_at_clock(self, now: float, wall: float) -> None:
        """If the wall clock was set, have retries wait as long as before."""
        by = self._clock_watch.look(now, wall)
        if by:
            changes = self._settling.changes
            moved = self._loaded.rebase(by, changes.rescheduled)
            if changes.rebase is not None:  # an earlier one that is not committed yet
                by, moved = by + changes.rebase.by, moved | changes.rebase.moved
            changes.rebase = Rebase(by, moved)

    # ------------------------------------------------------------------ outcomes

    def _settle_ended(self, now: float, wall: float) -> None:
        """Settle the attempts that have ended. The session sends no expired entry again."""
        ended = self._session.poll_settlements()
        late = self._settling.attempts_ended(ended, now, wall) if ended else None
        if late:
            self._session.withdraw(late)
        if any(isinstance(one, ConfirmedEach) for one in ended):
            self._connection.proved()
            self._intake.confirms_flow(now)
        if self._pauses.new:
            for entry in self._pauses.withdrawn_from(self._session):
                self._settling.hold(entry, wall)

    def _give_up_late(self, wall: float) -> None:
        """Expire entries whose deadline has passed; for one in flight its attempt decides."""
        late = self._loaded.late(wall)
        if late:
            for entry in self._session.withdraw(set(late)):
                self._settling.expire(entry, wall)
        for entry in self._withdrawals.reading(self._loaded.read_late, wall):
            self._settling.expire(entry, wall)

    # ------------------------------------------------------------------ take in

    def _look_elsewhere(self, now: float, wall: float) -> bool:
        """Find what others have enqueued, retried or discarded; False if it is unreadable."""
        if now < self._full_look_at:
            # With a bell, there are up to 200 looks per second beside commits: a full one takes
            # 50 µs, to ask first 0.4. Without one, or to free a full disk, there are 20, all full.
            is_cheap = self._has_bell and not self._no_room
            if not (self._has_news(now) if is_cheap else self._elsewhere.is_due(now)):
                return True
        self._full_look_at = now + LOOK_S
        self._elsewhere.found_nothing(now)  # replaced by `found` below if there is a change
        try:
            if self._store.changed_elsewhere() or self._is_unread:
                before, self._snapshot = self._snapshot, self._store.snapshot()
                is_urgent = self._snapshot != before and self._session.is_ready
                self._elsewhere.found(now, is_urgent=is_urgent)
                self._loaded.others(self._snapshot, wall)
                tell_withdrawn(self._withdrawals.unload())
                self._is_unread = False
        except TRANSIENT as error:
            self._is_unread = True  # the store tells it only once
            self._cannot_read(now, error)
            return False
        with suppress(*TRANSIENT):  # the next commit reports it to its callers
            self._no_room = self._store.relieve()
        self._withdrawals.tell_damaged()  # also those that a commit has met
        return True

    def _has_news(self, now: float) -> bool:
        """Whether it is time to look, and another process may have written."""
        if not self._elsewhere.is_due(now):
            return False
        if self._is_unread or self._store.may_have_changed():
            return True
        self._elsewhere.found_nothing(now)
        return False

    def _cannot_read(self, now: float, error: OutboxError) -> None:
        """Pause, and tell callers: what cannot be read now cannot be written either."""
        self._setback.read_failed(error, now)
        self._inbox.reject(error)

    def _take_in(self, now: float, wall: float) -> list[Chunk[Any]]:
        """Give up late entries; submit entries of the store and of new chunks."""
        is_due = self._loaded.is_due(wall)
        if is_due:
            self._give_up_late(wall)
        if self._is_draining:
            return []
        if is_due:
            self._submit_due(now, wall)
        return self._intake.take(self._settling.changes, self._snapshot.counters, now, wall)

    def _submit_due(self, now: float, wall: float) -> None:
        """Submit entries read from the store."""
        self._loaded.is_connecting = self._connection.is_connecting
        if self._settling.changes.rebase is not None:
            return  # what waits in the store has times of the clock before
        for entry in self._withdrawals.reading(self._loaded.read, wall):
            if entry.is_late(wall):
                self._settling.expire(entry, wall)
            elif not self._pauses.admits(entry):
                self._settling.hold(entry, wall)
            elif self._pauses.is_probe(entry):
                self._session.submit_alone(entry, now)
            else:
                self._session.submit(entry)

    def _look_for_stranded(self, wall: float) -> None:
        """Look for a message that was due before the last look, and that no read has found.

        A damaged index or tree of a file can hide a message from one read and not from another; and
        a program that changes rows by hand may count them nowhere.
        """
        lowest = None
        if self._loaded.is_empty and self._pauses.is_idle:
            with suppress(*TRANSIENT):
                lowest = self._store.lowest_awaited(self._stranded_from, wall - STRANDED_S)
        # It may be only the id to go on from. A message is found again at the next look.
        is_found = lowest == self._stranded_from
        self._stranded = STRANDED.format(lowest) if is_found else ""
        if is_found:
            self._store.missed(self._stranded_from)
        self._stranded_from = lowest or 0

    # ------------------------------------------------------------------ commit, send

    def _commit_and_send(
        self, taken_in: Sequence[Chunk[Any]], now: float, wall: float, *, is_flushing: bool
    ) -> None:
        batches = self._session.poll_transmit(now)
        changes = self._settling.changes
        releases = not (self._pauses.is_idle or self._is_draining)
        if releases and self._session.is_ready:
            self._pauses.release(changes, now)
        changes.sent = batches
        is_urgent = is_flushing or self._intake.lacks_room(self._snapshot.counters)
        leave_before = inf if is_urgent else now - WAIT_S
        if not self._must_commit(changes, now, leave_before, is_flushing=is_flushing):
            return
        self._remove_confirmed(changes, now, leave_before)
        try:
            begun = self._clock.monotonic()
            self._snapshot = self._store.commit(changes)
            self._commits += 1
            self._commit_s += self._clock.monotonic() - begun
        except Intervened:
            self._session.take_back(batches)
            changes.sent = ()
            withdrawn = []
            try:
                withdrawn = self._withdrawals.unload()
            except TRANSIENT as error:
                self._undo(taken_in, now, error)
            else:  # once more, without the messages that the operator has changed
                self._commit_and_send(taken_in, now, wall, is_flushing=is_flushing)
            finally:
                tell_withdrawn(withdrawn)  # after the callers whose messages the commit holds
            return
        except TRANSIENT as error:
            self._session.take_back(batches)
            changes.sent = ()
            if isinstance(error, OutboxUnreachable | OutboxUnsure):
                self._settling.unwritten(batches)  # their tags may be stored
            self._undo(taken_in, now, error)
            return
        self._committed(taken_in, wall)
        self._elsewhere.committed(now)
        self._send(batches, wall)
        if batches and self._session.in_flight == sum([len(batch.keys) for batch in batches]):
            self._intake.confirms_flow(now)

    def _undo(self, taken_in: Sequence[Chunk[Any]], now: float, error: OutboxError) -> None:
        """After a commit that failed: tell callers, and slow down."""
        self._intake.undo(taken_in, self._settling.changes, error)
        self._setback.commit_failed(error, now, has_new=bool(taken_in))
        if taken_in:
            self._commit_by = now  # so that the next turn commits the outcomes of this one

    def _remove_confirmed(self, changes: Changes, now: float, leave_before: float) -> None:
        """Have confirmed entries leave with this commit; all of them, if it is made for them."""
        removals = self._settling.removals
        is_for_them = self._commit_by is not None and now >= self._commit_by
        # While callers have more, each new entry takes the place of one that leaves.
        is_fed = bool(changes.new or self._inbox.chunks)
        removals.take(
            changes,
            least=len(changes.new) if is_fed else removals.count,
            stay_max=self._session.window.size,
            before=inf if is_for_them else leave_before,
        )

    def _must_commit(
        self, changes: Changes, now: float, leave_before: float, *, is_flushing: bool
    ) -> bool:
        """Whether to commit in this turn what was collected."""
        if changes.new or changes.sent or changes.discarded or changes.rescheduled:
            return True
        if changes.released or changes.rebase:
            return True
        # After the commit, the next message of the key can be sent.
        if any(entry.message.ordering_key is not None for entry in changes.confirmed):
            return True
        if changes.parked and not self._gathers(changes, now):
            return True
        has_confirms = changes.confirmed or self._settling.removals.are_due(leave_before)
        if not (has_confirms or changes.finished or changes.parked):
            self._commit_by = None
            return False
        if self._commit_by is None:
            # Nothing here is urgent: a lost confirm costs a duplicate, and waiting costs nothing.
            self._commit_by = now + LAZY_COMMIT_S
        # When flushing, a caller waits for the store to run empty.
        return is_flushing or now >= self._commit_by

    def _gathers(self, changes: Changes, now: float) -> bool:
        """Whether given up messages may wait for others: a few expired, soon after the last."""
        if any(attempt.outcome.kind is not OutcomeKind.EXPIRED for attempt in changes.parked):
            return False
        if now < self._gather_until and len(changes.parked) < GATHERED_MAX:
            return True
        self._gather_until = now + LAZY_COMMIT_S
        return False

    def _committed(self, taken_in: Sequence[Chunk[Any]], wall: float) -> None:
        """After a commit: update what is kept in memory, then wake callers and settle receipts."""
        changes, postponed = self._settling.committed()
        self._commit_by = None
        self._setback.committed()
        if changes.confirmed:
            self._loaded.drop(*changes.confirmed)
        for entry in postponed:
            self._loaded.postpone(entry)
        if changes.rebase or (changes.released and self._pauses.released(changes)):
            self._loaded.due_now(wall)
        self._intake.committed(taken_in)
        self._notices.stored(changes.new)
        if changes.parked or changes.discarded:
            self._notices.given_up(changes.parked, changes.discarded)
        for attempt in (*changes.parked, *changes.discarded):
            self._loaded.drop(attempt.entry)
            if attempt.entry.waiter is not None:
                attempt.entry.waiter.given_up(attempt.entry, attempt.outcome)

    def _send(self, batches: Sequence[Batch[Entry]], wall: float) -> None:
        for index, batch in enumerate(batches):
            messages = [entry.message for entry in batch.keys]
            try:
                self._transport.send(batch.epoch, batch.first_tag, messages)
            except CannotEncode as error:
                self._session.take_back(batches[index:])
                self._settling.unwritten(batches[index:])
                self._refuse(batch.keys[error.index], batch.epoch, error.problem, wall)
                return
            self._settling.written(batch, self._clock.monotonic())

    def _refuse(self, entry: Entry, epoch: int, problem: str, wall: float) -> None:
        """Refuse a message that cannot be encoded for this broker."""
        self._session.withdraw({entry})  # it has no tag, so no confirm will come
        outcome = Outcome(OutcomeKind.REFUSED, 0, problem)
        now = self._clock.monotonic()
        self._settling.decide(Settlement(entry, epoch, 0, outcome, None), now, wall)
        self._commit_by = now  # so that the next turn sends the messages after it

    # ------------------------------------------------------------------ status, next turn

    def _new_status(self) -> Status:
        session = self._session
        link, reason = self._connection.link
        trouble = self._setback.trouble or self._no_room
        paused = self._pauses.count
        return Status(
            link=link,
            reason=reason or (trouble or self._stranded if link is Link.CONNECTED else ""),
            trouble=trouble,
            refusals=self._connection.refusals,
            counters=self._snapshot.counters,
            in_flight=session.in_flight,
            window=session.window.size,
            rate_max=session.rate_max,
            buffered=session.buffered,
            connects=self._connection.connects,
            server=self._connection.server,
            trying=self._connection.trying,
            violations=session.violations.total(),
            stale=session.stale,
            aside=session.aside,
            aside_reason=session.why_aside,
            hooks_off=self._transport.hooks_off,
            certificate_ends_at=self._transport.certificate_ends_at,
            callback_errors=self._guard.errors,
            turns=self.turns,
            commits=self._commits,
            commit_s=self._commit_s,
            paused=self._pauses.shown(self._clock.monotonic()) if paused else (),
            paused_destinations=paused,
        )

    def _wait_s(self) -> float:
        """The most seconds that the thread may listen before the next turn."""
        now, wall = self._clock.monotonic(), self._clock.wall()
        backs_off = self._setback.backs_off
        takes_in = not backs_off and not self._is_draining
        self._idle_until = -inf
        deadlines = [
            self._connection.poll_timeout(),
            self._intake.next_look(now),
            self._setback.next_at,
        ]
        if self._session.has_output:
            return 0.0
        if takes_in and (
            self._loaded.wants_more or self._intake.is_ready(self._snapshot.counters, now)
        ):
            return 0.0
        removals = self._settling.removals
        if self._commit_by is None and removals.has_finished and not backs_off:
            deadlines.append(now + LAZY_COMMIT_S)  # a commit for something else has left them
        elif not backs_off:
            deadlines.append(self._commit_by or removals.next_at)
        if takes_in and not self._pauses.is_idle and self._session.is_ready:
            deadlines.append(self._pauses.poll_timeout())
        next_due, next_late = self._loaded.next_due, self._loaded.next_late
        if next_due is not None and takes_in:
            deadlines.append(now + next_due - wall)
        if next_late is not None and not backs_off:
            deadlines.append(max(now + next_late - wall, self._gather_until))
        due_at = min([at for at in deadlines if at is not None], default=inf)
        is_settled = not (self.status.paused_destinations or self._no_room)
        if is_settled and not self._is_draining:
            self._idle_until = min(due_at, self._full_look_at)
        return max(0.0, min(self._elsewhere.look_at, due_at) - now)
