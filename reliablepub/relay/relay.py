"""One turn: take in, commit, send. Listening is the shell's, so that any loop can drive it.

Knows: the store, the transport and the session, and the order in which they are asked. Must never
know: threads, event loops, SQL, AMQP.

::

    take in    what callers handed over since the last turn, what fell due, what the backlog holds
    commit     ONE transaction: new messages in; settled ones out or rescheduled; tags of what will
               now be sent  -> wake callers whose message is now on disk
    send       one write of as many publishes as the window allows
    listen     (the shell) until the socket speaks, a caller wakes us, or a deadline falls due

Under load a turn carries hundreds of messages and one fsync; alone it carries one message.

What must hold between the lines:

- A message is sent only after the commit that holds it and its tag. When the commit fails, the tags
  are taken back: the sequence has not moved.
- An entry is in memory at most once, and leaves it only after the commit that settles or postpones
  it.
- When the store cannot commit, nothing more is sent, so that what awaits a commit stays bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

from reliablepub._core.events import Batch, Event, Settlement
from reliablepub._core.session import Session
from reliablepub.errors import (
    OutboxDiskFailed,
    OutboxDiskFull,
    OutboxError,
    OutboxLocked,
    OutboxUnsure,
)
from reliablepub.outbox.entry import Entry, Intervened, Sent, Snapshot, Step, Store, Turn
from reliablepub.outcome import Outcome, OutcomeKind
from reliablepub.policy import RetryPolicy
from reliablepub.relay.clock import Clock
from reliablepub.relay.guard import Guard
from reliablepub.relay.handover import Inbox
from reliablepub.relay.intake import Intake, TakenIn
from reliablepub.relay.latency import Percentiles
from reliablepub.relay.limits import Limits
from reliablepub.relay.loaded import Loaded
from reliablepub.relay.notices import Calls, Notices
from reliablepub.relay.pauses import Pauses
from reliablepub.relay.ruling import Ruling
from reliablepub.relay.status import Link, Status
from reliablepub.relay.verdicts import Verdicts
from reliablepub.relay.wire import Wire
from reliablepub.relay.withdrawal import let_go, tell_damaged
from reliablepub.transport.base import CannotEncode, Transport

LAZY_COMMIT_S: Final = 0.02
"""How long confirms may wait for a commit that carries something else too."""
POLL_S: Final = 0.05
"""How often the store is asked whether other processes have written to it."""
STEP_S: Final = 0.5
"""A wall clock that is off by so much, against the monotonic one, has been set."""
COMMIT_RETRY_S: Final = 0.25
"""How long a disk that is full or fails, or a file that somebody keeps locked, is left alone."""
_TROUBLE: Final = {
    OutboxDiskFull: "disk full: nothing can be recorded until space is freed",
    OutboxDiskFailed: "the disk of the outbox fails: look at the system's log",
    OutboxLocked: "the outbox is locked by another process",
    OutboxUnsure: "the disk of the outbox fails: look at the system's log",
}
"""Words for `Status.trouble`, which stay the same while it does."""


class Relay:
    """Moves entries from callers and the store to the broker, and verdicts back.

    Args:
        store: where entries are until their verdict.
        transport: the wire.
        session: decides what may be sent.
        inbox: what callers hand over.
        policy: how often refusals are tried again.
        limits: what may be held.
        clock: the time.
        hooks: what the application wants to be told of.
        guard: stands between us and what the application has us call.
    """

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
    ) -> None:
        self._store = store
        self._transport = transport
        self._session = session
        self._clock = clock
        self._snapshot: Snapshot = store.snapshot()
        self._loaded = Loaded(
            store,
            last_id=self._snapshot.last_id,
            messages_max=limits.loaded_max,
            bytes_max=limits.loaded_bytes_max,
            wall=clock.wall(),
        )
        self._guard = guard or Guard()
        self._notices = Notices(hooks, self._guard)
        self._pauses = Pauses(policy, self._guard, self._notices)
        held = store.held_exchanges(self._pauses.exchanges_max + 1)
        self._pauses.found(held, clock.monotonic(), clock.wall())
        self._intake = Intake(inbox, limits, self._loaded, session, self._pauses)
        self._verdicts = Verdicts(
            Ruling(policy, self._guard), self._pauses, self._notices, store.run
        )
        self._wire = Wire(transport, session, clock.monotonic())
        self._poll_at = clock.monotonic()
        self._looked_at = self._poll_at + clock.suspended()
        self._wall_ahead = clock.wall() - self._looked_at
        self._commit_by: float | None = None
        self._no_commit_until: float | None = None
        self._no_room = store.relieve()
        self._trouble = ""
        self._is_draining = False
        self._turns = 0
        self.status = Status(counters=self._snapshot.counters)

    # ------------------------------------------------------------------ for the shell

    def turn(self, *, is_flushing: bool = False) -> float | None:
        """Take in, commit, send.

        Args:
            is_flushing: somebody waits for the store to run empty: commit confirms at once.

        Returns:
            seconds to listen at most before the next turn, None for no limit.
        """
        now, wall = self._clock.monotonic(), self._clock.wall()
        self._wire.keep(now)
        self._look_at_clock(now, wall)
        self._judge(now, wall)
        if self._verdicts.turn.confirmed:
            self._wire.proved()
            self._intake.confirms_flow(now)
        self._look_elsewhere(now, wall)
        self._intake.turn_away(now)
        if self._no_commit_until is not None and now >= self._no_commit_until:
            self._no_commit_until = None
        if self._no_commit_until is None:
            self._give_up_late(wall)
            taken_in = self._take_in(now, wall)
            self._commit_and_send(taken_in, now, wall, is_flushing=is_flushing)
        self._turns += 1
        self.status = self._picture()
        if self._notices:
            self._notices.deliver(self.status)
        return self._wait_s()

    def handle(self, events: Iterable[Event]) -> None:
        """Take in what the transport heard."""
        self._wire.handle(events, self._clock.monotonic())

    def drain(self) -> None:
        """Take nothing in and send nothing more; what is in flight is still settled."""
        self._is_draining = True
        self._session.drain()

    @property
    def is_unhurried(self) -> bool:
        """Whether the broker has half a window to confirm, and more waits for room in that.

        Nor does anybody wait for the disk.
        """
        session = self._session
        if not session.buffered or session.in_flight <= session.window.size // 2:
            return False
        return not self._intake.is_ready(self._snapshot.counters, self._clock.monotonic())

    @property
    def last_id(self) -> int:
        """The highest id given so far."""
        return self._snapshot.last_id

    def latency(self) -> Percentiles | None:
        """How long confirms took of late."""
        return self._verdicts.latencies.told(self._clock.monotonic())

    def wall(self) -> float:
        """The time in the outbox, seconds since 1970."""
        return self._clock.wall()

    def lowest_awaited(self, first_id: int, at: float) -> int | None:
        """The lowest open id from ``first_id`` on that was to be sent by ``at``, or None."""
        return self._store.lowest_awaited(first_id, at)

    def _look_at_clock(self, now: float, wall: float) -> None:
        """However the wall clock is set, no retry waits for longer, and no deadline comes earlier.

        A host that has slept has not set its clock.
        """
        now += self._clock.suspended()
        by = wall - now - self._wall_ahead
        since, self._looked_at = wall - (now - self._looked_at), now
        if abs(by) < STEP_S:
            return
        self._wall_ahead += by
        turn = self._verdicts.turn
        moved = self._loaded.step(by, wall, turn.rescheduled)
        if turn.stepped is not None:  # of which the store was not told yet
            by, moved = by + turn.stepped.by, moved | turn.stepped.moved
        turn.stepped = Step(by, since, self._snapshot.last_id, moved)

    # ------------------------------------------------------------------ verdicts

    def _judge(self, now: float, wall: float) -> None:
        """Take in the attempts that have ended; the session sends no late one again."""
        late = self._verdicts.judge(self._session.poll_settlements(), now, wall)
        if late:
            self._session.withdraw(late)
        for entry in self._pauses.withdrawn_from(self._session):
            self._verdicts.hold(entry, wall)

    def _give_up_late(self, wall: float) -> None:
        """What is too late expires, unless it is on the wire: then its attempt decides."""
        late = self._loaded.late(wall)
        if late:
            for entry in self._session.withdraw(set(late)):
                self._verdicts.expire(entry, wall)
        if self._verdicts.turn.stepped is None:  # what the store has is by the clock as it was
            for entry in self._reading(self._loaded.read_late, wall):
                self._verdicts.expire(entry, wall)

    # ------------------------------------------------------------------ take in

    def _look_elsewhere(self, now: float, wall: float) -> None:
        """Notice what other processes have enqueued, retried or discarded."""
        if now < self._poll_at:
            return
        self._poll_at = now + POLL_S
        if self._store.changed_elsewhere():
            self._snapshot = self._store.snapshot()
            self._loaded.others(self._snapshot.last_id, wall)
            let_go(self._store, self._session, self._loaded, self._verdicts)
        with suppress(OutboxDiskFailed, OutboxLocked):  # the next commit tells its callers
            self._no_room = self._store.relieve()

    def _take_in(self, now: float, wall: float) -> list[TakenIn]:
        """New chunks become entries; those, and what is read, go on if memory allows."""
        if self._is_draining:
            return []
        # What the store has is by the clock as it was, until it is told that the clock was set.
        read = [] if self._verdicts.turn.stepped else self._reading(self._loaded.read, wall)
        for entry in read:
            if entry.is_late(wall):
                self._verdicts.expire(entry, wall)
            elif not self._pauses.admits(entry):
                self._verdicts.hold(entry, wall)
            elif self._pauses.is_probe(entry):
                self._session.submit_alone(entry, entry.message.size, now)
            else:
                self._session.submit(entry, entry.message.size)
        return self._intake.take(self._verdicts.turn, self._snapshot.counters, now, wall)

    def _reading(self, read: Callable[[float], Sequence[Entry]], wall: float) -> Sequence[Entry]:
        while True:
            try:
                entries = read(wall)
            except Intervened:
                let_go(self._store, self._session, self._loaded, self._verdicts)
            else:
                tell_damaged(self._store, self._loaded, self._notices)
                return entries

    # ------------------------------------------------------------------ commit, send

    def _commit_and_send(
        self, taken_in: Sequence[TakenIn], now: float, wall: float, *, is_flushing: bool
    ) -> None:
        batches = self._session.poll_transmit(now)
        turn = self._verdicts.turn
        if self._session.is_ready and not self._is_draining:
            self._pauses.release(turn, now, wall)
        turn.sent = [
            Sent(self._verdicts.epoch_name(batch.epoch), batch.first_tag, batch.keys)
            for batch in batches
        ]
        if not self._must_commit(turn, now, is_flushing=is_flushing):
            return
        try:
            self._snapshot = self._store.commit(turn)
        except Intervened:
            self._session.take_back(batches)
            let_go(self._store, self._session, self._loaded, self._verdicts)
            self._commit_and_send(taken_in, now, wall, is_flushing=is_flushing)
            return
        except (OutboxDiskFailed, OutboxDiskFull, OutboxLocked, OutboxUnsure) as error:
            self._session.take_back(batches)
            turn.sent = []
            self._intake.undo(taken_in, turn, error)
            self._hold_back(now, error, is_full_of_new=bool(taken_in))
            return
        self._committed(taken_in, wall)
        self._send(batches, turn.sent, wall)
        if batches and self._session.in_flight == sum(len(batch.keys) for batch in batches):
            self._intake.confirms_flow(now)

    def _hold_back(self, now: float, error: OutboxError, *, is_full_of_new: bool) -> None:
        """First accept nothing, so that what is there can drain; if that fails too, do nothing."""
        self._trouble = _TROUBLE[type(error)]
        if is_full_of_new:
            self._intake.refuse(error, now + COMMIT_RETRY_S)
            self._commit_by = now
        else:
            self._no_commit_until = now + COMMIT_RETRY_S

    def _must_commit(self, turn: Turn, now: float, *, is_flushing: bool) -> bool:
        """Confirms alone may wait a moment: to lose one costs a duplicate, to wait nothing."""
        if turn.new or turn.sent or turn.parked or turn.discarded or turn.rescheduled:
            return True
        if turn.released or turn.stepped or self._verdicts.lets_others_go:
            return True
        if not (turn.confirmed or turn.finished):
            self._commit_by = None
            return False
        if self._commit_by is None:
            self._commit_by = now + LAZY_COMMIT_S
        return is_flushing or now >= self._commit_by

    def _committed(self, taken_in: Sequence[TakenIn], wall: float) -> None:
        """What only memory knows follows the store; then whoever waits is told."""
        turn, postponed = self._verdicts.committed()
        self._commit_by = None
        self._trouble = ""
        self._loaded.drop(*turn.confirmed)
        for entry in postponed:
            self._loaded.postpone(entry)
        if self._pauses.released(turn):
            self._loaded.due_now(wall)
        if turn.stepped is not None:
            self._loaded.stepped(wall)
        self._intake.committed(taken_in)
        if self._notices:
            self._notices.stored(turn.new)
            self._notices.given_up(turn.parked, turn.discarded)
        for attempt in (*turn.parked, *turn.discarded):
            self._loaded.drop(attempt.entry)
            if attempt.entry.waiter is not None:
                attempt.entry.waiter.given_up(attempt.entry, attempt.outcome)

    def _send(self, batches: Sequence[Batch[Entry]], recorded: Sequence[Sent], wall: float) -> None:
        for index, (batch, sent) in enumerate(zip(batches, recorded, strict=True)):
            messages = [entry.message for entry in batch.keys]
            try:
                self._transport.send(batch.epoch, batch.first_tag, messages)
            except CannotEncode as error:
                self._session.take_back(batches[index:])
                self._verdicts.unwritten(recorded[index:])
                self._refuse(batch.keys[error.index], batch.epoch, error.problem, wall)
                return
            self._verdicts.written(batch.epoch, sent, self._clock.monotonic())

    def _refuse(self, entry: Entry, epoch: int, problem: str, wall: float) -> None:
        """A message that cannot be written to this broker has no tag and awaits no confirm."""
        self._session.withdraw({entry})
        outcome = Outcome(OutcomeKind.REFUSED, 0, problem)
        now = self._clock.monotonic()
        self._verdicts.unwritable(Settlement(entry, epoch, 0, outcome), now, wall)
        self._commit_by = now  # and send what came after it

    # ------------------------------------------------------------------ outlook

    def _picture(self) -> Status:
        session = self._session
        link, reason = self._wire.link
        trouble = self._trouble or self._no_room
        return Status(
            link=link,
            reason=reason or (trouble if link is Link.CONNECTED else ""),
            trouble=trouble,
            is_refused=self._wire.is_refused,
            counters=self._snapshot.counters,
            in_flight=session.in_flight,
            window=session.window.size,
            buffered=session.buffered,
            connects=self._wire.connects,
            violations=session.violations.total(),
            stale=session.stale,
            aside=session.aside,
            hooks_off=self._transport.hooks_off,
            callback_errors=self._guard.errors,
            turns=self._turns,
            paused=self._pauses.shown(self._clock.monotonic()),
            paused_destinations=self._pauses.count,
        )

    def _wait_s(self) -> float | None:
        """How long the shell may listen."""
        now, wall = self._clock.monotonic(), self._clock.wall()
        is_held_up = self._no_commit_until is not None
        takes_in = not is_held_up and not self._is_draining
        if takes_in and (
            self._loaded.wants_more or self._intake.is_ready(self._snapshot.counters, now)
        ):
            return 0.0
        deadlines = [self._poll_at, self._session.poll_timeout(), self._wire.due_at]
        deadlines += [self._no_commit_until if is_held_up else self._commit_by]
        deadlines.append(self._intake.next_look(now))
        if self._session.is_ready and takes_in:
            deadlines.append(self._pauses.poll_timeout())
        if self._loaded.next_due is not None and takes_in:
            deadlines.append(now + self._loaded.next_due - wall)
        if self._loaded.next_late is not None and not is_held_up:
            deadlines.append(now + self._loaded.next_late - wall)
        return max(0.0, min(at for at in deadlines if at is not None) - now)
