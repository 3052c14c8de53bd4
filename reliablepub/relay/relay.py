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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from reliablepub._core.events import (
    Batch,
    CloseChannel,
    Connected,
    ConnectionLost,
    Disconnect,
    Event,
    OpenChannel,
    Settlement,
)
from reliablepub._core.session import Session
from reliablepub.errors import OutboxDiskFull, OutboxError, OutboxLocked
from reliablepub.outbox.entry import Entry, Sent, Snapshot, Store, Turn
from reliablepub.outcome import Outcome, OutcomeKind
from reliablepub.policy import RetryPolicy
from reliablepub.relay.clock import Clock
from reliablepub.relay.handover import Chunk, Inbox
from reliablepub.relay.limits import Limits, Room
from reliablepub.relay.loaded import Loaded
from reliablepub.relay.reconnect import Reconnect
from reliablepub.relay.status import Link, Status
from reliablepub.relay.verdicts import Verdicts
from reliablepub.transport.base import CannotEncode, Transport

TURN_MESSAGES_MAX: Final = 2_000
LAZY_COMMIT_S: Final = 0.02
"""How long confirms may wait for a commit that carries something else too."""
FLOW_S: Final = 0.1
"""How long after a confirm the next ones are counted on to make room in memory."""
POLL_S: Final = 0.05
"""How often the store is asked whether other processes have written to it."""
COMMIT_RETRY_S: Final = 0.25
"""How long a disk that is full, or a file that somebody else keeps locked, is left alone."""


@dataclass(frozen=True, slots=True)
class _TakenIn:
    """A chunk of this turn, as entries."""

    chunk: Chunk
    entries: Sequence[Entry]
    is_loaded: bool


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
    ) -> None:
        self._store = store
        self._transport = transport
        self._session = session
        self._inbox = inbox
        self._limits = limits
        self._clock = clock
        self._snapshot: Snapshot = store.snapshot()
        self._loaded = Loaded(
            store,
            last_id=self._snapshot.last_id,
            messages_max=limits.loaded_max,
            bytes_max=limits.loaded_bytes_max,
            wall=clock.wall(),
        )
        self._verdicts = Verdicts(policy, store.run)
        self._reconnect = Reconnect(clock.monotonic())
        self._poll_at = clock.monotonic()
        self._commit_by: float | None = None
        self._no_commit_until: float | None = None
        self._refusal: OutboxError | None = None
        self._refuse_until = 0.0
        self._is_draining = False
        self._flowing_until = 0.0
        self._connects = 0
        self._lost_reason = ""
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
        self._keep_connected(now)
        self._session.handle_timeout(now)
        self._obey()
        for settlement in self._session.poll_settlements():
            self._verdicts.judge(settlement, wall)
        if self._verdicts.turn.confirmed:
            self._reconnect.proved()
            self._flowing_until = now + FLOW_S
        self._look_elsewhere(now, wall)
        self._turn_away(now)
        if self._no_commit_until is not None and now >= self._no_commit_until:
            self._no_commit_until = None
        if self._no_commit_until is None:
            taken_in = self._take_in(now, wall)
            self._commit_and_send(taken_in, now, wall, is_flushing=is_flushing)
        self.status = self._picture()
        return self._wait_s()

    def handle(self, events: Iterable[Event]) -> None:
        """Take in what the transport heard."""
        now = self._clock.monotonic()
        for event in events:
            match event:
                case Connected():
                    self._connects += 1
                    self._lost_reason = ""
                    self._reconnect.connected(now)
                case ConnectionLost(reason):
                    self._lost_reason = reason
                    self._reconnect.lost(now)
            self._session.handle(event, now)

    def drain(self) -> None:
        """Take nothing in and send nothing more; what is in flight is still settled."""
        self._is_draining = True
        self._session.drain()

    @property
    def last_id(self) -> int:
        """The highest id given so far."""
        return self._snapshot.last_id

    def lowest_open(self) -> int | None:
        """The lowest id that is still open, or None."""
        return self._store.lowest_open()

    # ------------------------------------------------------------------ the connection

    def _keep_connected(self, now: float) -> None:
        if self._reconnect.due_at is not None and now >= self._reconnect.due_at:
            self._reconnect.started()
            self._transport.connect()

    def _obey(self) -> None:
        for command in self._session.poll_commands():
            match command:
                case OpenChannel(epoch):
                    self._transport.open_channel(epoch)
                case CloseChannel(epoch):
                    self._transport.close_channel(epoch)
                case Disconnect(reason):
                    self._transport.disconnect(reason)

    # ------------------------------------------------------------------ take in

    def _look_elsewhere(self, now: float, wall: float) -> None:
        """Notice what other processes have enqueued, retried or discarded."""
        if now < self._poll_at:
            return
        self._poll_at = now + POLL_S
        if self._store.changed_elsewhere():
            self._snapshot = self._store.snapshot()
            self._loaded.others(self._snapshot.last_id, wall)

    def _turn_away(self, now: float) -> None:
        """While the store has no room for new messages, their callers learn it at once."""
        if self._refusal is None:
            return
        if now < self._refuse_until:
            for chunk in self._inbox.take(lambda _: True):
                chunk.on_stored.failed(self._refusal)
        else:
            self._refusal = None

    def _take_in(self, now: float, wall: float) -> list[_TakenIn]:
        """New chunks become entries; those, and what is read, go on if memory allows."""
        if self._is_draining:
            return []
        for entry in self._loaded.read(wall):
            self._session.submit(entry, entry.message.size)
        taken_in: list[_TakenIn] = []
        turn = self._verdicts.turn
        is_in_turn = not self._loaded.has_backlog
        for chunk in self._inbox.take(self._room(now)):
            entries = [Entry(message, wall) for message in chunk.messages]
            turn.new += entries
            if chunk.source is not None:
                turn.sources[chunk.source] = turn.sources.get(chunk.source, 0) + len(entries)
            is_in_turn = is_in_turn and self._loaded.fits(len(entries), chunk.size)
            taken_in.append(_TakenIn(chunk, entries, is_in_turn))
            if is_in_turn:
                for entry in entries:
                    entry.waiter = chunk.waiter
                    self._loaded.add(entry)
                    self._session.submit(entry, entry.message.size)
        return taken_in

    def _room(self, now: float) -> Room:
        """For what there is room in the store; and in memory too, while confirms make some.

        What is stored beyond that is only read back a moment later. But nobody waits for a broker
        that does not confirm: then only the store counts.
        """
        counters = self._snapshot.counters
        messages = min(self._limits.messages_max - counters.open, TURN_MESSAGES_MAX)
        bytes_ = self._limits.bytes_max - counters.open_bytes
        if now < self._flowing_until and not self._loaded.has_backlog:
            messages = min(messages, self._loaded.room)
            bytes_ = min(bytes_, self._loaded.room_bytes)
        return Room(messages, bytes_)

    # ------------------------------------------------------------------ commit, send

    def _commit_and_send(
        self, taken_in: Sequence[_TakenIn], now: float, wall: float, *, is_flushing: bool
    ) -> None:
        batches = self._session.poll_transmit(now)
        turn = self._verdicts.turn
        turn.sent = [
            Sent(self._verdicts.epoch_name(batch.epoch), batch.first_tag, batch.keys)
            for batch in batches
        ]
        if not self._must_commit(turn, now, is_flushing=is_flushing):
            return
        try:
            self._snapshot = self._store.commit(turn)
        except (OutboxDiskFull, OutboxLocked) as error:
            self._undo(batches, taken_in, error)
            self._hold_back(now, error, is_full_of_new=bool(taken_in))
            return
        self._committed(taken_in)
        self._send(batches, turn.sent, wall)

    def _hold_back(self, now: float, error: OutboxError, *, is_full_of_new: bool) -> None:
        """First accept nothing, so that what is there can drain; if that fails too, do nothing."""
        if is_full_of_new:
            self._refusal, self._refuse_until = error, now + COMMIT_RETRY_S
            self._commit_by = now
        else:
            self._no_commit_until = now + COMMIT_RETRY_S

    def _must_commit(self, turn: Turn, now: float, *, is_flushing: bool) -> bool:
        """Confirms alone may wait a moment: to lose one costs a duplicate, to wait nothing."""
        if turn.new or turn.sent or turn.parked or turn.rescheduled:
            return True
        if not (turn.confirmed or turn.finished):
            self._commit_by = None
            return False
        if self._commit_by is None:
            self._commit_by = now + LAZY_COMMIT_S
        return is_flushing or now >= self._commit_by

    def _undo(
        self, batches: Sequence[Batch[Entry]], taken_in: Sequence[_TakenIn], error: OutboxError
    ) -> None:
        """Nothing was stored: forget the new messages; the verdicts wait for the next commit."""
        self._session.take_back(batches)
        new = [entry for taken in taken_in if taken.is_loaded for entry in taken.entries]
        self._session.withdraw(set(new))
        for entry in new:
            self._loaded.drop(entry)
        turn = self._verdicts.turn
        turn.new, turn.sources, turn.sent = [], {}, []
        for taken in taken_in:
            taken.chunk.on_stored.failed(error)

    def _committed(self, taken_in: Sequence[_TakenIn]) -> None:
        """What only memory knows follows the store; then whoever waits is told."""
        turn, postponed = self._verdicts.committed()
        self._commit_by = None
        for entry in turn.confirmed:
            self._loaded.drop(entry)
        for entry in postponed:
            self._loaded.postpone(entry)
        for taken in taken_in:
            first, last = taken.entries[0].id, taken.entries[-1].id
            self._loaded.stored(first, last, taken.chunk.waiter, is_loaded=taken.is_loaded)
            taken.chunk.on_stored.stored()
        for attempt in turn.parked:
            self._loaded.drop(attempt.entry)
            if attempt.entry.waiter is not None:
                attempt.entry.waiter.settled(attempt.entry, attempt.outcome)

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
            self._verdicts.written(batch.epoch, sent)

    def _refuse(self, entry: Entry, epoch: int, problem: str, wall: float) -> None:
        """A message that cannot be written to this broker has no tag and awaits no confirm."""
        self._session.withdraw({entry})
        outcome = Outcome(OutcomeKind.REFUSED, 0, problem)
        self._verdicts.decide(Settlement(entry, epoch, 0, outcome), wall)
        self._commit_by = self._clock.monotonic()  # and send what came after it

    # ------------------------------------------------------------------ outlook

    def _picture(self) -> Status:
        session = self._session
        if session.blocked_reason is not None:
            link, reason = Link.BLOCKED, session.blocked_reason
        elif session.is_connected:
            link, reason = Link.CONNECTED, ""
        elif self._reconnect.due_at is None:
            link, reason = Link.CONNECTING, self._lost_reason
        else:
            link, reason = Link.DISCONNECTED, self._lost_reason
        return Status(
            link=link,
            reason=reason,
            counters=self._snapshot.counters,
            in_flight=session.in_flight,
            buffered=session.buffered,
            connects=self._connects,
            violations=session.violations.total(),
            stale=session.stale,
        )

    def _wait_s(self) -> float | None:
        """How long the shell may listen."""
        now, wall = self._clock.monotonic(), self._clock.wall()
        is_held_up = self._no_commit_until is not None
        takes_in = not is_held_up and not self._is_draining
        if takes_in and (self._loaded.wants_more or self._inbox.is_ready(self._room(now))):
            return 0.0
        deadlines = [self._poll_at, self._session.poll_timeout(), self._reconnect.due_at]
        deadlines += [self._no_commit_until if is_held_up else self._commit_by]
        if self._refusal is not None:
            deadlines.append(self._refuse_until)
        if self._inbox and now < self._flowing_until:
            deadlines.append(self._flowing_until)
        if self._loaded.next_due is not None and takes_in:
            deadlines.append(now + self._loaded.next_due - wall)
        return max(0.0, min(at for at in deadlines if at is not None) - now)
