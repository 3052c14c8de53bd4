"""The relay's thread: it takes one turn of the relay after the other, and listens in between.

Knows: threads, and how a relay is put together and taken down. Must never know: what a turn does.

Everything that belongs to the relay lives and dies on this thread: the store's connection, the
transport's loop, the session. Callers touch the inbox, the last `Status`, and the events in here.

A flush waits until nothing is open of what was in the store when it began. What its sender put off
until later than that is not waited for: otherwise one message for tomorrow would keep every flush,
and `close`, until tomorrow.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from reliablepub._core.session import Session
from reliablepub.errors import (
    OutboxInUse,
    PublisherClosed,
    PublisherFailed,
    RelayHeldUp,
    WrongThread,
)
from reliablepub.hooks import Watched
from reliablepub.message import Message
from reliablepub.outbox.entry import Entry, Store
from reliablepub.policy import RetryPolicy
from reliablepub.relay.callbacks import Calls, Guard, with_calls
from reliablepub.relay.clock import Clock
from reliablepub.relay.handover import Flag, Inbox, Latch, Limits
from reliablepub.relay.journal import Journal, LogWriter
from reliablepub.relay.relay import Relay
from reliablepub.relay.status import Beacon, Link, Status, described, failed_status
from reliablepub.transport.base import Transport


@dataclass(slots=True, eq=False)
class Flush:
    """Somebody who waits until nothing is open of what is in the store now.

    Attributes:
        done: set when that is so.
        upto: the highest id that counts; where it is left out, that of the first look.
    """

    done: Flag
    upto: int | None = None
    _since: int = field(default=0, init=False)
    _at: float | None = field(default=None, init=False)

    def look(self, relay: Relay) -> bool:
        """Whether it is over; ids that are not awaited are passed over for good."""
        now = relay.wall()
        self._at = now if self._at is None else min(self._at, now)  # it may have been set back
        if self.upto is None:
            self.upto = relay.last_id
        lowest = relay.lowest_awaited(self._since, self._at)
        if lowest is not None and lowest <= self.upto:
            self._since = lowest
            return False
        self.done.set()
        return True


LOGGER: Final = logging.getLogger("reliablepub.relay")
LAST_CONFIRMS_S: Final = 1.0
"""How long `RelayThread.close` waits for what is in flight after it has stopped sending."""
HELD_UP_S: Final = 30.0
"""How long those who wait for the relay wait for one callback of the application's."""
GATHERINGS: Final = 8
GATHER_S: Final = 0.001
"""A turn has its price, however few confirms it takes in: while the broker has plenty to do, what
it confirms within eight milliseconds is taken in at once."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a relay is made of; the store first, since its run names what the transport sends.

    Attributes:
        open_store: called on the thread.
        open_transport: called on the thread, with the number of the store's run.
        open_session: likewise.
        policy: how often refusals are tried again.
        limits: what may be held.
        hooks: what the application wants to be told of.
        watchers: who wants to look at the relay.
        stamps: what is added to messages where they are accepted.
    """

    open_store: Callable[[], Store]
    open_transport: Callable[[int], Transport]
    open_session: Callable[[], Session[Entry]]
    policy: RetryPolicy
    limits: Limits
    hooks: Calls = field(default_factory=dict)
    watchers: Sequence[Callable[[Watched], None]] = ()
    stamps: Sequence[Callable[[Message], Message]] = ()


class Observer:
    """Somebody who is told how far the relay is, on its thread. This one does not mind."""

    def handed_over(self, wake: Callable[[], None]) -> None:
        """A caller has put something into an empty inbox: wake it. On that caller's thread."""
        wake()

    def started(self) -> None:
        """It takes turns from now on."""

    def turned(self) -> None:
        """It has taken a turn."""

    def ended(self, failure: BaseException | None) -> None:
        """It takes no more turns, and has let go of everything; or it never came to start.

        Args:
            failure: why, if nobody has closed it.
        """


class RelayThread:
    """Runs a relay until it is closed, or fails. Nothing happens before `start`.

    Args:
        parts: what to run.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._started = Latch()
        self._gone = Latch()
        self._is_ended = False
        self._pid = os.getpid()
        self._failure: BaseException | None = None
        self._observer = Observer()
        self._flushes: dict[Flush, None] = {}  # in their order; each change is one step
        self._close_at: float | None = None
        self._last_flush = Flush(Latch(), sys.maxsize)  # for closing
        self._log_writer = LogWriter()
        self._guard = Guard(self._log_writer.write)
        self._relay: Relay | None = None
        self._wake: Callable[[], None] = lambda: None
        self.inbox = Inbox(lambda: self._observer.handed_over(self.wake))
        # A daemon, so that a publisher nobody closed cannot keep the interpreter; what it has not
        # published by then is in the outbox.
        self._thread = threading.Thread(target=self._main, name="reliablepub-relay", daemon=True)

    def start(self, observer: Observer | None = None) -> None:
        """Begin; whether that succeeds, `wait_started` tells, or the observer."""
        self._observer = observer or self._observer
        self._thread.start()

    def wait_started(self) -> None:
        """Wait until the relay takes turns.

        Raises:
            ReliablePubError: the outbox cannot be opened; nothing is left behind.
        """
        self._started.wait()
        if self._relay is None:
            self._gone.wait()
            self._thread.join()
            assert self._failure is not None
            raise self._failure

    @property
    def status(self) -> Status:
        """The status after the last turn; after a failure, with its reason."""
        relay = self._relay
        status = Status() if relay is None else replace(relay.status, turns=relay.turns)
        if self._failure is None:
            return status
        return replace(status, link=Link.FAILED, reason=described(self._failure))

    @property
    def failure(self) -> BaseException | None:
        """Why the relay ended on its own, if it did."""
        return self._failure

    @property
    def is_ended(self) -> bool:
        """Whether the relay takes no more turns; a forked child has no relay at all."""
        return self._is_ended or os.getpid() != self._pid

    def check_thread(self) -> None:
        """Whoever waits for the relay must not be what the relay waits for.

        Raises:
            WrongThread: this is the relay's own thread: a callback of the application's.
        """
        if threading.get_ident() == self._thread.ident:
            running = self._guard.running
            where = running.name if running is not None else "code"
            raise WrongThread(
                f"{where} on the relay's own thread waits for the relay, which waits for it; hand "
                "it to another thread or to `Outbox.enqueue`, which does not wait for the relay"
            )

    def check_held_up(self) -> None:
        """Nobody waits for ever, where a callback never returns.

        Raises:
            RelayHeldUp: one has been running for `HELD_UP_S`.
        """
        running = self._guard.running
        if running is not None and time.monotonic() - running.since > HELD_UP_S:
            raise RelayHeldUp(
                f"{running.name} has not returned for {time.monotonic() - running.since:.0f} s, "
                "and the relay waits for it: does it wait for a lock that this thread holds?"
            )

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until nothing is open of what is in the store now.

        Returns:
            whether that came true in time.
        """
        self.check_thread()
        done = Latch()
        flush = self.begin_flush(done)
        try:
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            while not done.is_set() and not self.is_ended:
                left = 0.5 if deadline is None else min(0.5, deadline - time.monotonic())
                if left <= 0:
                    break
                done.wait(left)
                self.check_held_up()
            return done.is_set()
        finally:
            self.end_flush(flush)

    def begin_flush(self, done: Flag) -> Flush:
        """Have a flag set when nothing is open of what is in the store now, until `end_flush`."""
        flush = Flush(done)
        self._flushes[flush] = None
        self.wake()
        return flush

    def end_flush(self, flush: Flush) -> None:
        """Nobody waits for it any more."""
        self._flushes.pop(flush, None)

    def close(self, timeout_s: float) -> None:
        """Go on until nothing is open or the time is up, then end; waits for it."""
        self.begin_close(timeout_s)
        self.join()

    def begin_close(self, timeout_s: float) -> None:
        """Go on until nothing is open or the time is up, then end; the earliest time counts."""
        close_at = time.monotonic() + timeout_s
        self._close_at = close_at if self._close_at is None else min(self._close_at, close_at)
        self._wake()

    def wake(self) -> None:
        """Have the relay look for what is new; from any thread, and at any time."""
        self._wake()

    def join(self) -> None:
        """Wait until the relay has let go of everything, if it ever began.

        Raises:
            RelayHeldUp: a callback does not return; the relay ends when it does.
        """
        if self._thread.ident is None:
            return
        while not self._gone.wait(0.5):
            self.check_held_up()
        # `Thread.join` takes a lock: a handler that interrupts it there, and joins too, would wait
        # for itself. There are microseconds left to wait for.
        self._thread.join(0.2)

    # ------------------------------------------------------------------ on the thread

    def _main(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                self._log_writer.attend()
                stack.callback(self._log_writer.close)
                store = self._parts.open_store()
                stack.callback(self._close_store, store)
                transport = self._parts.open_transport(store.run)
                stack.callback(transport.close)
                clock = Clock()
                journal = Journal(clock.monotonic, self._log_writer.write)
                stack.callback(journal.close)
                relay = Relay(
                    store=store,
                    transport=transport,
                    session=self._parts.open_session(),
                    inbox=self.inbox,
                    policy=self._parts.policy,
                    limits=self._parts.limits,
                    hooks=with_calls(self._parts.hooks, journal.calls()),
                    clock=clock,
                    guard=self._guard,
                )
                stack.callback(self._detach)
                self._wake = transport.wake
                self._relay = relay
                self._started.set()
                self._observer.started()
                try:
                    beacon = Beacon(
                        store.show,
                        relay.latency,
                        wall=clock.wall,
                        monotonic=clock.monotonic,
                    )
                    self._run(relay, transport, beacon, journal)
                except BaseException as error:
                    self._fail(error)  # before those who wait are told that it is over
                    raise
        except BaseException as error:  # noqa: BLE001 - whoever waits must learn of it, whatever it is
            if self._relay is not None and self._failure is None:  # while it let go of everything
                self._log_writer = LogWriter()
                self._fail(error)
                self._log_writer.close()
            self._failure = self._failure or error
        finally:
            self._is_ended = True
            self._started.set()
            self._gone.set()
            self._observer.ended(self._failure)

    def _fail(self, error: BaseException) -> None:
        """Nothing more is published: say so, loudly."""
        self._failure = error
        said = f"{described(error)}; nothing more is published, and what is open stays"
        self._log_writer.write(LOGGER, logging.CRITICAL, said, {"event": "failed"}, error)

    def _close_store(self, store: Store) -> None:
        """Give the store back; of a relay that failed, those who look from outside see why."""
        if self._failure is None or isinstance(self._failure, OutboxInUse):
            store.close()  # in the second case another relay has it, and shows how it is doing
        else:
            store.close(failed_status(self.status, time.time()))

    def _run(self, relay: Relay, transport: Transport, beacon: Beacon, journal: Journal) -> None:
        while True:
            is_closing = self._close_at is not None
            wait_s = relay.turn(is_flushing=bool(self._flushes) or is_closing)
            journal.turned()
            beacon.turned(relay.status)
            self._answer_flushes(relay)
            self._observer.turned()
            if is_closing and self._is_done(relay):
                break
            self._listen(relay, transport, self._wait_s(wait_s))
        relay.drain()
        relay.turn(is_flushing=True)

    def _listen(self, relay: Relay, transport: Transport, wait_s: float | None) -> None:
        """Hear what there is; of confirms that trickle in, some more, while there is no hurry."""
        events = transport.listen(wait_s)
        relay.handle(events)
        for _ in range(GATHERINGS):
            if not events or not relay.is_unhurried:
                return
            time.sleep(GATHER_S)
            events = transport.listen(0.0)
            relay.handle(events)

    def _is_done(self, relay: Relay) -> bool:
        """Whether a closing relay may end: nothing is open, or the time is up."""
        assert self._close_at is not None
        if self._last_flush.look(relay):
            return True
        late_s = time.monotonic() - self._close_at
        if late_s < 0:
            return False
        relay.drain()
        return relay.status.in_flight == 0 or late_s >= LAST_CONFIRMS_S

    def _wait_s(self, wait_s: float | None) -> float | None:
        if self._close_at is None:
            return wait_s
        left = max(0.05, self._close_at - time.monotonic())
        return left if wait_s is None else min(wait_s, left)

    def _answer_flushes(self, relay: Relay) -> None:
        for flush in list(self._flushes):
            if flush.look(relay):
                self.end_flush(flush)

    def _detach(self) -> None:
        """Nobody may reach the transport or the inbox from here on."""
        self._wake = lambda: None
        closed = PublisherClosed("the publisher is closed")
        if self._failure is not None:
            closed = PublisherFailed(f"nothing more is taken: {described(self._failure)}")
            closed.__cause__ = self._failure
        self.inbox.close(closed)
        self._is_ended = True
