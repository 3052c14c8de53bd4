"""One publisher process: the real relay, session and store, and a fuse that may end it at any step.

It does what `relay/thread.py` does, one turn after the other, but in virtual time. It knows how a
process dies: nothing of it remains but the file. It must never know what is right or wrong.
"""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from reliablepub._core.session import Session
from reliablepub.errors import (
    Damaged,
    OutboxError,
    OutboxFull,
    OutboxUnsure,
    PublisherClosed,
    Withdrawn,
)
from reliablepub.message import Message
from reliablepub.outbox.entry import Changes, Entry, RunEnded, Snapshot, Store
from reliablepub.outbox.memory import MemoryStore
from reliablepub.outbox.sqlite.location import WritingConnection
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import CONFIRMED, Outcome
from reliablepub.policy import RetryPolicy
from reliablepub.relay.clock import Clock
from reliablepub.relay.handover import Chunk, Inbox, Limits, Stream
from reliablepub.relay.relay import Relay
from tests.relay.scripted import WatchedStore
from tests.simulation.agenda import Agenda, Note
from tests.simulation.broker import SimBroker
from tests.simulation.checker import Checker, Violation
from tests.simulation.disk import MemoryOfOne
from tests.simulation.wire import LinkFaults, SimTransport
from tests.stores import Where

BUSY_TURNS_MAX = 500


class Killed(BaseException):
    """SIGKILL, as far as one thread can have it: nothing below may catch it."""


class Fuse:
    """Counts steps down; the process dies where it comes to zero.

    Args:
        note: told where.
    """

    def __init__(self, note: Note) -> None:
        self._note = note
        self.left: int | None = None
        self.is_burnt = False

    def step(self, where: str) -> None:
        if self.is_burnt:
            raise Killed
        if self.left is None:
            return
        self.left -= 1
        if self.left <= 0:
            self.is_burnt = True
            self._note(f"killed {where}")
            raise Killed


class Glitches:
    """Statements that fail, and later ones that do not: a disk or a network with a bad day.

    Args:
        rng: chance.
        note: told of each.

    Attributes:
        share: of all statements; 0 while all is well.
    """

    def __init__(self, rng: random.Random, note: Note) -> None:
        self._rng = rng
        self._note = note
        self.share = 0.0

    def strike(self, what: str) -> bool:
        """Whether this one fails."""
        is_struck = self._rng.random() < self.share
        if is_struck:
            self._note(f"{what} failed")
        return is_struck


_NEEDS_DISK = re.compile("SELECT|INSERT|UPDATE|DELETE|WITH|BEGIN IMMEDIATE|COMMIT")


class SteppingConnection(WritingConnection):
    """SQLite, with a step before every statement and after every commit, and with glitches."""

    fuse: Fuse
    glitches: Glitches
    opened: list[SteppingConnection]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.opened.append(self)

    def execute(self, sql: str, *rest: Any) -> sqlite3.Cursor:
        is_commit = sql == "COMMIT"
        self.fuse.step("before COMMIT" if is_commit else "between statements")
        self._glitch(sql)
        cursor = super().execute(sql, *rest)
        if is_commit:
            self.fuse.step("after COMMIT")
        return cursor

    def executemany(self, sql: str, *rest: Any) -> sqlite3.Cursor:
        self.fuse.step("between statements")
        self._glitch(sql)
        return super().executemany(sql, *rest)

    def _glitch(self, sql: str) -> None:
        """As SQLite says it when the file system refuses."""
        if _NEEDS_DISK.match(sql.lstrip()) and self.glitches.strike(
            "a COMMIT" if sql == "COMMIT" else "a statement"
        ):
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error


class SimStore(WatchedStore):
    """A store with a step before and after each commit, that the checker looks into."""

    def __init__(
        self, store: Store, fuse: Fuse, committed: Callable[[Changes, Snapshot], None]
    ) -> None:
        super().__init__(store, [])
        self._fuse = fuse
        self._committed = committed
        self.before_commit: Callable[[], None] | None = None

    def commit(self, turn: Changes) -> Snapshot:
        before, self.before_commit = self.before_commit, None
        if before is not None:
            before()
        self._fuse.step("before a turn's commit")
        snapshot = super().commit(turn)
        self.turns.clear()
        self._committed(turn, snapshot)
        self._fuse.step("after a turn's commit")
        return snapshot


class Caller:
    """Somebody who hands messages over, and believes what they are told.

    Attributes:
        is_answered: they know whether their messages are stored.
    """

    def __init__(
        self,
        process: Process,
        messages: Sequence[Message],
        source: str | None = None,
        stream: Stream | None = None,
    ) -> None:
        self._process = process
        self.messages = messages
        self.is_answered = False
        self.chunk = Chunk(messages, self, self, source=source, stream=stream)

    def set(self) -> None:
        """The flag of the chunk."""
        self._process.fuse.step("before a caller is answered")
        assert not self.is_answered, "answered twice"
        self.is_answered = True
        if self.chunk.error is None:
            self._process.checker.promised(self.messages)
        elif isinstance(self.chunk.error, OutboxUnsure):
            self._process.note("told that nobody knows")
        else:
            self._process.note("turned away")
            self._process.checker.turned_away(self.messages)
        self._process.fuse.step("after a caller was answered")

    def all_confirmed(self, entries: Sequence[Entry]) -> None:
        """The waiter of the chunk."""
        for entry in entries:
            self.given_up(entry, CONFIRMED)

    def given_up(self, entry: Entry, outcome: Outcome) -> None:
        """The waiter of the chunk."""
        self._process.fuse.step("before a caller learns the outcome")
        self._process.checker.told(entry.message, outcome)

    def withdrawn(self, error: Withdrawn | Damaged) -> None:
        """The waiter of the chunk, when a person has taken a message."""
        self._process.fuse.step("before a caller learns the outcome")
        self._process.note("told withdrawn")
        self._process.checker.told_withdrawn(error.message_id)

    def lose_patience(self) -> None:
        """Take the messages back, if that is still possible."""
        if self.is_answered or not self._process.is_alive:
            return
        try:
            self.chunk.withdraw_because(OutboxFull("the outbox is full"))
        except OutboxFull:
            self.is_answered = True
            self._process.note("withdrawn by the caller")
            self._process.checker.turned_away(self.messages)


class Process:
    """From opening the outbox to the end, by whatever means.

    Args:
        path: path or URL of the outbox; None for a publisher without a disk.
        session: makes a new one.
        policy: of the relay.
        limits: likewise.
        broker: what it connects to.
        agenda: the time.
        rng: chance.
        faults: of its connections.
        glitches: of its outbox.
        checker: told of everything.
        note: likewise, to be counted.
        when_gone: called once, when it has ended.
    """

    def __init__(
        self,
        *,
        path: Where | None,
        session: Callable[[], Session[Entry]],
        policy: RetryPolicy,
        limits: Limits,
        broker: SimBroker,
        agenda: Agenda,
        rng: random.Random,
        faults: LinkFaults,
        glitches: Glitches,
        checker: Checker,
        note: Note,
        when_gone: Callable[[], None],
    ) -> None:
        self._agenda = agenda
        self._rng = rng
        self._path = path
        self._glitches = glitches
        self.when_gone = when_gone
        self.checker = checker
        self.note = note
        self.fuse = Fuse(note)
        self.is_alive = True
        self.is_flushing = False
        self.oversleeps_s = 0.0
        self.callers: list[Caller] = []
        self._connections: list[Any] = []
        self._store: Store | None = None
        self._turn_at: float | None = None
        self._turn_number = 0
        self._last_turn_at, self._busy_turns = 0.0, 0
        self._session = session
        self._policy = policy
        self._limits = limits
        self.inbox = Inbox(self.wake)
        self.transport = SimTransport(
            broker=broker,
            agenda=agenda,
            rng=rng,
            faults=faults,
            checker=checker,
            step=self.fuse.step,
            wake=self.wake,
            note=note,
        )

    # ------------------------------------------------------------------ life

    def start(self) -> bool:
        """Open the outbox and make the relay; whether it lived to see that."""
        try:
            self._store = self._open_store()
            self.watched = SimStore(self._store, self.fuse, self._committed)
            self.relay = Relay(
                store=self.watched,
                transport=self.transport,
                session=self._session(),
                inbox=self.inbox,
                policy=self._policy,
                limits=self._limits,
                clock=Clock(lambda: self._agenda.now, lambda: self._agenda.wall),
                hooks={},
                bell=self._store.bell,
            )
        except OutboxError as error:
            self.note("cannot be opened", error)
            self.die()
        except Killed:
            self.die()
        return self.is_alive

    def _open_store(self) -> Store:
        if self._path is None:
            store = MemoryStore()
            self._memory = MemoryOfOne(store)
            return store
        if isinstance(self._path, str):
            from tests.simulation.database import open_store  # noqa: PLC0415 - it needs psycopg

            return open_store(
                self._path, self.fuse, self._glitches, self._connections, lambda: self._agenda.wall
            )
        names = {"fuse": self.fuse, "glitches": self._glitches, "opened": self._connections}
        kind = type("Connection", (SteppingConnection,), names)
        connect = sqlite3.connect
        with mock.patch("sqlite3.connect", lambda *a, **o: connect(*a, **o | {"factory": kind})):
            sqlite = SqliteStore(self._path, clock=lambda: self._agenda.wall)
            self._store = sqlite  # before the next step: the kernel releases its locks
            return sqlite

    @property
    def run(self) -> int:
        assert self._store is not None
        return self._store.run

    def _committed(self, turn: Changes, snapshot: Snapshot) -> None:
        if self._path is None:
            self._memory.committed(turn, snapshot)
        if turn.rebase is not None:
            self.checker.times_are_moved()
        self.checker.look(is_after_commit=True)

    def kill(self) -> None:
        """Between two turns."""
        if self.is_alive:
            self.fuse.is_burnt = True
            self.note("killed while listening")
            self.die()

    def die(self) -> None:
        """What the kernel does for a process that is gone: close files, release locks."""
        self.is_alive = False
        self.transport.die()
        for connection in self._connections:
            connection.close()
        if isinstance(self._store, SqliteStore):
            self._store._bell.close()
            self._store._relay_lock.release()
        self.when_gone()

    def close(self) -> None:
        """End in order, as the last lines of the relay's thread do."""
        if not self.is_alive:
            return
        try:
            self.relay.drain()
            self._take_turn(is_flushing=True)
            self.inbox.close(PublisherClosed("the publisher is closed"))
            self.transport.close()
            self.watched.close()
        except Killed:
            pass
        else:
            self.note("closed in order")
        self.fuse.is_burnt = True
        self.die()

    # ------------------------------------------------------------------ turns

    def wake(self) -> None:
        """Something happened: listening ends."""
        self._turn_by(self._agenda.now + self._rng.choice([0.0, 0.0, 0.001]))

    def ring(self) -> None:
        """Another process has written to the log: listening ends if the bell is armed."""
        bell = self._store.bell if self._store is not None else None
        if self.is_alive and bell is not None:
            self.note("rung" if not bell.is_armed else "written while nobody listens")
            self._turn_by(self._agenda.now)

    def _turn_by(self, time: float) -> None:
        if self._turn_at is None or time < self._turn_at:
            self._turn_at = time
            self._turn_number += 1
            number = self._turn_number
            self._agenda.at(time, lambda: self._turn(number))

    def _turn(self, number: int) -> None:
        if not self.is_alive or number != self._turn_number:
            return
        self._turn_at = None
        try:
            wait_s = self._take_turn(is_flushing=self.is_flushing)
        except (Killed, RunEnded):  # a relay that begins anew in its process: here, in another one
            self.die()
            return
        if wait_s is not None:
            late_s = self._rng.uniform(0, self.oversleeps_s) if wait_s else 0.0
            self._turn_by(self._agenda.now + wait_s + late_s)

    def _take_turn(self, *, is_flushing: bool) -> float | None:
        is_busy = self._agenda.now == self._last_turn_at
        self._busy_turns = self._busy_turns + 1 if is_busy else 0
        self._last_turn_at = self._agenda.now
        if self._busy_turns > BUSY_TURNS_MAX:
            raise Violation("the relay turns and turns, and no time passes")
        events = self.transport.listen(0.0)
        idle_s = None if events or is_flushing else self.relay.idle_s()
        if idle_s is not None:
            return idle_s
        self.relay.handle(events)
        self.fuse.step("between listening and the turn")
        return self.relay.turn(is_flushing=is_flushing)

    # ------------------------------------------------------------------ the callers' side

    def hand_over(
        self,
        messages: Sequence[Message],
        *,
        source: str | None = None,
        stream: Stream | None = None,
    ) -> Caller:
        """Put messages into the inbox, as both front doors do."""
        caller = Caller(self, messages, source, stream)
        self.checker.handed_over(messages)
        self.callers.append(caller)
        try:
            self.inbox.put(caller.chunk)
        except Killed:
            self.die()
        return caller
