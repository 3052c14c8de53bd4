"""The synchronous shell: a thread that takes one turn of the relay after the other.

Knows: threads, and how a relay is put together and taken down. Must never know: what a turn does.

Everything that belongs to the relay lives and dies on this thread: the store's connection, the
transport's loop, the session. Callers touch the inbox, the last `Status`, and the events in here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from reliablepub._core.session import Session
from reliablepub.errors import PublisherClosed
from reliablepub.hooks import Watched
from reliablepub.message import Message
from reliablepub.outbox.entry import Entry, Store
from reliablepub.policy import RetryPolicy
from reliablepub.relay.beacon import Beacon
from reliablepub.relay.caller import Flag
from reliablepub.relay.clock import Clock
from reliablepub.relay.flush import Flush
from reliablepub.relay.handover import Inbox
from reliablepub.relay.journal import Journal
from reliablepub.relay.limits import Limits
from reliablepub.relay.notices import Calls, with_calls
from reliablepub.relay.relay import Relay
from reliablepub.relay.status import Status
from reliablepub.transport.base import Transport

LAST_CONFIRMS_S: Final = 1.0
"""How long `RelayThread.close` waits for what is in flight after it has stopped sending."""
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

    def ended(self) -> None:
        """It takes no more turns, and has let go of everything; or it never came to start."""


class RelayThread:
    """Runs a relay until it is closed, or fails. Nothing happens before `start`.

    Args:
        parts: what to run.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._started = threading.Event()
        self._ended = threading.Event()
        self._pid = os.getpid()
        self._failure: BaseException | None = None
        self._observer = Observer()
        self._flushes: list[Flush] = []
        self._flushes_lock = threading.Lock()
        self._close_at: float | None = None
        self._last_flush = Flush(threading.Event(), sys.maxsize)  # for closing
        self._relay: Relay | None = None
        self._wake: Callable[[], None] = lambda: None
        self.inbox = Inbox(lambda: self._observer.handed_over(self.wake))
        self.final_status: Status = Status()
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
            self._thread.join()
            assert self._failure is not None
            raise self._failure

    @property
    def status(self) -> Status:
        """The picture the relay made in its last turn."""
        return self._relay.status if self._relay is not None else self.final_status

    @property
    def failure(self) -> BaseException | None:
        """Why the relay ended on its own, if it did."""
        return self._failure

    @property
    def is_ended(self) -> bool:
        """Whether the relay takes no more turns; a forked child has no relay at all."""
        return self._ended.is_set() or os.getpid() != self._pid

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until nothing is open of what is in the store now.

        Returns:
            whether that came true in time.
        """
        done = threading.Event()
        flush = self.begin_flush(done)
        try:
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            while not done.is_set() and not self.is_ended:
                left = 0.5 if deadline is None else min(0.5, deadline - time.monotonic())
                if left <= 0:
                    break
                done.wait(left)
            return done.is_set()
        finally:
            self.end_flush(flush)

    def begin_flush(self, done: Flag) -> Flush:
        """Have a flag set when nothing is open of what is in the store now, until `end_flush`."""
        flush = Flush(done)
        with self._flushes_lock:
            self._flushes.append(flush)
        self.wake()
        return flush

    def end_flush(self, flush: Flush) -> None:
        """Nobody waits for it any more."""
        with self._flushes_lock, contextlib.suppress(ValueError):
            self._flushes.remove(flush)

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
        """Wait until the thread is gone, if it ever was there."""
        if self._thread.ident is not None:
            self._thread.join()

    # ------------------------------------------------------------------ on the thread

    def _main(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                store = self._parts.open_store()
                stack.callback(store.close)
                transport = self._parts.open_transport(store.run)
                stack.callback(transport.close)
                clock = Clock()
                journal = Journal(clock.monotonic)
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
                    self._failure = error  # before those who wait are told that it is over
                    raise
        except BaseException as error:  # noqa: BLE001 - whoever waits must learn of it, whatever it is
            self._failure = error
        finally:
            self._ended.set()
            self._started.set()
            self._observer.ended()

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
        if not self._flushes:
            return
        with self._flushes_lock:
            for flush in list(self._flushes):
                if flush.look(relay):
                    self._flushes.remove(flush)

    def _detach(self) -> None:
        """Nobody may reach the transport or the inbox from here on."""
        self._wake = lambda: None
        if self._relay is not None:
            self.final_status = self._relay.status
        closed = PublisherClosed("the publisher is closed")
        if self._failure is not None:
            closed = PublisherClosed(f"the publisher has failed: {self._failure}")
            closed.__cause__ = self._failure
        self.inbox.close(closed)
        self._ended.set()
