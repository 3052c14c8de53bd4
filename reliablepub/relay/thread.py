"""The relay's thread: runs one turn of the relay after the other, and listens in between.

Knows: threads, and how a relay is assembled and torn down. Must never know: what a turn does.

The thread owns all parts of the relay: the store's connection, the transport's loop, the session.
Callers use only the inbox, the last `Status`, latches and flags, and the methods of `RelayThread`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

from reliablepub._core.session import Session
from reliablepub.errors import (
    ConfigurationError,
    OutboxError,
    OutboxInUse,
    PublisherClosed,
    PublisherFailed,
    RelayHeldUp,
    WrongThread,
)
from reliablepub.message import Message
from reliablepub.outbox.entry import TRANSIENT, Counters, Entry, RunEnded, Store
from reliablepub.outbox.patience import Patience
from reliablepub.policy import RetryPolicy
from reliablepub.printable import named
from reliablepub.relay.callbacks import Calls, Guard, GuardedPolicy, with_calls
from reliablepub.relay.clock import Clock
from reliablepub.relay.handover import Flag, Inbox, Latch, Limits
from reliablepub.relay.journal import Journal, LogWriter
from reliablepub.relay.loaded import Waiters
from reliablepub.relay.relay import Relay
from reliablepub.relay.setback import RETRY_S
from reliablepub.relay.status import Beacon, Link, Status, described, failed_status
from reliablepub.transport.base import Transport


@dataclass(slots=True, eq=False)
class Flush:
    """A wait until every message that the store holds at its beginning is settled.

    Messages whose sender chose a later time (``not_before``) are not waited for, nor those behind
    such a message, or a parked one, of their ordering key. Otherwise one message for tomorrow would
    delay every flush, and `close`, until tomorrow.
    """

    done: Flag
    upto: int | None = None  # highest id to wait for; None: the highest one at the first `look`
    is_searching: bool = field(default=False, init=False)  # the next `look` is due at once
    _since: int = field(default=0, init=False)
    _at: float | None = field(default=None, init=False)

    def look_again(self) -> None:
        """Look from the lowest id on: the relay has begun anew."""
        self._since = 0

    def look(self, relay: Relay) -> bool:
        """Whether the flush is complete. Later calls skip the ids found settled here."""
        now = relay.wall()
        self._at = now if self._at is None else min(self._at, now)  # the clock may be set back
        if self.upto is None:
            self.upto = relay.look()
            if self.upto is None:
                return False
        lowest = relay.lowest_awaited(self._since, self._at)
        if lowest is not None and lowest <= self.upto:
            self.is_searching = lowest > self._since
            self._since = lowest
            return False
        return True


LOGGER: Final = logging.getLogger("reliablepub.relay")
LAST_CONFIRMS_S: Final = 1.0
"""How long a relay that closes waits for confirms of messages in flight, once it sends no more."""
LAST_COMMIT_S: Final = 1.0
"""How long it waits then for its last commits."""
HELD_UP_S: Final = 30.0
"""How long callers wait for the relay while one callback of the application does not return."""
GATHERINGS: Final = 8
GATHER_S: Final = 0.001
"""A turn has a fixed cost, however few confirms it handles. So while the broker has enough to do,
one turn handles the confirms of up to 8 ms: `GATHERINGS` looks, `GATHER_S` apart."""


@dataclass(slots=True)
class Parts:
    """The parts of a relay."""

    patience: Patience  # of the store, from its first wait
    # These three are called on the relay's thread.
    open_store: Callable[[], Store]
    open_transport: Callable[[int], Transport]  # gets the store's run, for the header of attempts
    open_session: Callable[[], Session[Entry]]
    policy: RetryPolicy
    limits: Limits
    hooks: Calls = field(default_factory=dict)


class Observer:
    """Lifecycle callbacks, invoked on the relay's thread, except `handed_over`."""

    def handed_over(self, wake: Callable[[], None]) -> None:
        """A caller has put a chunk into an empty inbox. Invoked on the caller's thread."""
        wake()

    def started(self) -> None:
        """The relay has started."""

    def turned(self) -> None:
        """The relay has finished a turn."""

    def ended(self, failure: BaseException | None) -> None:
        """All resources are released, after a close (None), a failure or a failed start."""


_ELSEWHERE: Final = (
    "Without one, store messages with `Outbox`, and run `reliablepub relay` as a separate process"
)


def _check_host() -> None:
    """Refuse what eventlet has replaced, on which the relay would wait for ever.

    Warn of uWSGI without threads: the relay then runs only while a request is handled.
    """
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and any(map(patcher.is_monkey_patched, ("thread", "socket", "select"))):
        raise ConfigurationError(
            "the relay needs a thread and sockets, and eventlet has replaced those of this "
            f"process. {_ELSEWHERE}"
        )
    given = getattr(sys.modules.get("uwsgi"), "opt", None)
    if given is not None and not {"enable-threads", "threads"} & given.keys():
        said = "uWSGI runs no threads: messages are sent only during requests; set enable-threads"
        LOGGER.warning(said, extra={"event": "no_threads"})


class RelayThread:
    """Runs a relay on a thread of its own, from `start` until it is closed or fails."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.check: Callable[[Message], None] | None = None  # None: any message can be stored
        self._started = Latch()
        self._gone = Latch()
        self._is_ended = True  # until `start`
        self._pid = os.getpid()
        self.failure: BaseException | None = None  # None also after a regular close
        self._observer = Observer()
        self._flushes: dict[Flush, None] = {}  # an ordered set; adding and removing are atomic
        self._kept: dict[object, None] = {}
        self._close_at: float | None = None
        self._last_flush = Flush(Latch(), sys.maxsize)  # for closing
        self._log_writer = LogWriter()
        self._guard = Guard(self._log_writer.write)
        self._relay: Relay | None = None
        self._counters_at_start = Counters()
        parts.patience.end_at = self._end_at
        self._wake: Callable[[], None] = lambda: None
        self.inbox: Final = Inbox(lambda: self._observer.handed_over(self.wake))
        self._thread = threading.Thread(target=self._main, name="reliablepub-relay")

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled, as a part of a publisher or a receipt."""
        raise TypeError(
            "a publisher and its receipts cannot be pickled, and so not passed to another process: "
            "open a publisher there, or pass an Outbox"
        )

    def start(self, observer: Observer | None = None) -> None:
        """Start the thread. `wait_started` and the observer report whether the relay comes up."""
        _check_host()
        self._observer = observer or self._observer
        self._is_ended = False
        try:
            # A publisher that was not closed must not keep the interpreter from exiting. Messages
            # not published by then stay in the outbox. Some sub-interpreters refuse daemons.
            self._thread.daemon = True
            self._thread.start()
        except RuntimeError as error:
            self._is_ended = True
            raise ConfigurationError(
                f"the relay has no thread ({error}): the program is ending, a limit of threads is "
                "reached (ulimit -u, a container's pids), or this is a sub-interpreter (mod_wsgi: "
                f"WSGIApplicationGroup %{{GLOBAL}}). {_ELSEWHERE}"
            ) from error

    def wait_started(self) -> None:
        """Wait until the relay has started. If this raises, all resources are released."""
        self._started.wait()
        if self._relay is None:
            self._gone.wait()
            self._thread.join()
            assert self.failure is not None
            raise self.failure

    @property
    def status(self) -> Status:
        """The status after the last turn; once the relay has failed, with the reason."""
        relay = self._relay
        status = Status()
        if relay is not None:
            status = replace(
                relay.status,
                turns=relay.turns,
                turn_age_s=max(0.0, time.monotonic() - relay.turned_at),
                counters_at_start=self._counters_at_start,
                lock_wait_s=self._parts.patience.lock_wait_s,
            )
            if held_up := self._parts.patience.held_up:
                status = replace(status, trouble=held_up, reason=held_up)
        if self.failure is None:
            return status
        return replace(status, link=Link.FAILED, reason=described(self.failure))

    @property
    def limits(self) -> Limits:
        """Most messages and bytes in the store and in memory."""
        return self._parts.limits

    @property
    def is_ended(self) -> bool:
        """Whether no relay runs: not yet, no more, or not in this process, which was forked."""
        return self._is_ended or os.getpid() != self._pid

    @property
    def is_gone(self) -> bool:
        """Whether the relay has ended and released all its resources."""
        return self._gone.is_set()

    @property
    def _is_running(self) -> bool:
        """Whether this process runs the thread. Afterwards another thread may get its id."""
        return not self._gone.is_set() and os.getpid() == self._pid

    def check_thread(self) -> None:
        """Refuse to wait for the relay on the relay's own thread, which would be a deadlock."""
        if threading.get_ident() == self._thread.ident and self._is_running:
            running = self._guard.running
            where = running.name if running is not None else "code"
            raise WrongThread(
                f"{where} on the relay's own thread would wait for the relay, which waits for it; "
                "make this call on another thread, or use `Outbox.enqueue`, which does not wait"
            )

    def check_held_up(self) -> None:
        """End a caller's wait for a relay whose callback does not return."""
        running = self._guard.running
        if running is not None and time.monotonic() - running.since > HELD_UP_S:
            raise RelayHeldUp(
                f"{running.name} has not returned for {time.monotonic() - running.since:.0f} s, "
                "and the relay waits for it: does it wait for a lock that this thread holds?"
            )

    def keep(self, receipt: object) -> None:
        """Keep a receipt in memory until `call`, even if the application drops it."""
        self._kept[receipt] = None

    def call(self, callback: Callable[[Any], object], receipt: object) -> None:
        """Call back with a settled receipt; contain its exceptions."""
        self._kept.pop(receipt, None)
        name = f"the callback {named(callback)} of a receipt"
        if threading.get_ident() == self._thread.ident and self._is_running:
            with self._guard.calling(name):  # counts all exceptions, and logs the first
                callback(receipt)
            return
        # `Guard.calling` would suppress a Ctrl-C that comes after the callback has returned.
        try:
            callback(receipt)
        except KeyboardInterrupt:
            raise  # it is the caller's Ctrl-C, and not of the callback
        except BaseException as error:  # noqa: BLE001 - as on the relay's thread
            Guard().failed(name, error)  # a new guard, so that each is logged

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until all that the store holds now is settled; False if time or relay ends first."""
        self.check_thread()
        done = Latch()
        flush = self.begin_flush(done)
        try:
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            while not self.is_ended:
                left = 0.5 if deadline is None else min(0.5, deadline - time.monotonic())
                if left <= 0 or done.wait(left):
                    break
                self.check_held_up()
            return done.is_set()
        finally:
            self.end_flush(flush)

    def begin_flush(self, done: Flag) -> Flush:
        """Set the flag as soon as every message that the store holds now is settled.

        Call `end_flush` when the wait is over, however it ended.
        """
        flush = Flush(done)
        self._flushes[flush] = None
        self._wake()
        return flush

    def end_flush(self, flush: Flush) -> None:
        """Forget a flush."""
        self._flushes.pop(flush, None)

    def begin_close(self, timeout_s: float) -> None:
        """Publish until no message is open or the time is up; then end. Does not wait."""
        close_at = time.monotonic() + timeout_s  # of several calls, the earliest counts
        self._close_at = close_at if self._close_at is None else min(self._close_at, close_at)
        self._wake()

    def wake(self) -> None:
        """End the relay's current wait. May be called from any thread, at any time."""
        self._wake()

    def join(self) -> None:
        """Wait until the relay has released all its resources."""
        if self._thread.ident is None:
            return  # it never started
        while self._is_running and not self._gone.wait(0.5):
            self.check_held_up()  # if this raises, the relay still ends when the callback does
        # `Thread.join` takes a lock: a signal handler that interrupts it there, and joins too,
        # would wait for itself. Hence the timeout; the thread is microseconds from its end.
        self._thread.join(0.2)

    # ------------------------------------------------------------------ on the thread

    def _main(self) -> None:
        """Run a relay from its parts to their end. Callers that wait learn of any failure."""
        try:
            with contextlib.ExitStack() as stack:
                self._live(stack)
        except BaseException as error:  # noqa: BLE001 - waiting callers must learn of any failure
            if self._relay is not None and self.failure is None:  # it failed during the clean-up
                self._log_writer = LogWriter()  # the first one is closed by now
                self._fail(error)
                self._log_writer.close()
            self.failure = self.failure or error
        finally:
            self._is_ended = True
            self._started.set()
            self._gone.set()
            self._observer.ended(self.failure)

    def _live(self, stack: contextlib.ExitStack) -> None:
        """Open the store, with its clean-up on the stack; then run until closed or failed."""
        self._log_writer.attend()
        stack.callback(self._log_writer.close)
        store = self._parts.open_store()
        self.check = store.check
        stack.callback(self._close_store, store)
        stack.callback(self._detach)
        waiters: Waiters | None = None
        while True:
            try:
                with contextlib.ExitStack() as parts:
                    self._live_once(parts, store, waiters)
                    return
            except RunEnded as ended:
                waiters = self._begin_anew(ended)
            except TRANSIENT as error:
                if self.failure is not None or not self._started.is_set():
                    raise
                if self._close_at is not None and time.monotonic() >= self._close_at:
                    return
                self.inbox.reject(error)
                time.sleep(RETRY_S)  # the next run cannot begin yet

    def _end_at(self) -> float | None:
        """When the store must wait no longer for its database (monotonic), or None."""
        return None if self._close_at is None else self._close_at + LAST_CONFIRMS_S + LAST_COMMIT_S

    def _begin_anew(self, ended: RunEnded) -> Waiters:
        """After a run of the store has ended: log it, and return the waiters for the next one."""
        waiters = Waiters() if self._relay is None else self._relay.end()
        if ended.has_lost and waiters.are_wanted:
            lost = PublisherFailed(
                f"{ended}; receipts cannot tell which messages are lost: compare the messages in "
                "the outbox with those that this application has stored"
            )
            self._fail(lost)
            raise lost
        said = f"{ended}; the relay starts a new run, and publishes the messages in the outbox"
        self._log_writer.write(LOGGER, logging.WARNING, said, {"event": "began_anew"}, None)
        for flush in (self._last_flush, *self._flushes):
            flush.look_again()
        return waiters

    def _live_once(
        self, stack: contextlib.ExitStack, store: Store, waiters: Waiters | None
    ) -> None:
        """Open the parts for a run of the store, each with its clean-up on the stack; then run."""
        transport = self._parts.open_transport(store.run)
        stack.callback(transport.close)
        clock = Clock(wall=store.wall)
        journal = Journal(clock.monotonic, self._log_writer.write)
        stack.callback(journal.close)
        bell = store.bell
        hears = bell is not None and transport.watch(bell.fileno())
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
            bell=bell if hears else None,
            waiters=waiters,
        )
        stack.callback(self._part)
        self._wake = transport.wake
        self._relay = relay
        if not self._started.is_set():
            self._counters_at_start = relay.status.counters
            self._started.set()
            self._observer.started()
        try:
            lasts = GuardedPolicy(self._parts.policy, self._guard).lasts_s()
            beacon = Beacon(
                store.show, relay.latency, lasts, wall=time.time, monotonic=clock.monotonic
            )
            self._run(relay, transport, beacon, journal)
        except RunEnded:
            raise
        except BaseException as error:
            self._fail(error)  # before the clean-up ends the waits of callers
            raise

    def _part(self) -> None:
        """Cut callers off from the transport, before it is torn down."""
        self._wake = lambda: None

    def _fail(self, error: BaseException) -> None:
        """Record why the relay failed, and log it as critical: nothing is published any more."""
        self.failure = error
        if isinstance(error, OutboxInUse):  # another one publishes: that should wake nobody
            self._log_writer.write(LOGGER, logging.WARNING, str(error), {"event": "replaced"}, None)
            return
        said = f"{described(error)}; nothing more is published; the outbox keeps open messages"
        self._log_writer.write(LOGGER, logging.CRITICAL, said, {"event": "failed"}, error)

    def _close_store(self, store: Store) -> None:
        """Close the store. A relay that failed leaves the reason in the status file."""
        if self.failure is None or isinstance(self.failure, OutboxInUse):
            store.close()  # after `OutboxInUse`, the status file is another relay's
        else:
            store.close(failed_status(self.status, time.time()))

    def _run(self, relay: Relay, transport: Transport, beacon: Beacon, journal: Journal) -> None:
        while True:
            is_closing = self._close_at is not None
            wait_s = relay.turn(is_flushing=bool(self._flushes) or is_closing)
            journal.turned(relay.status)
            beacon.turned(relay.status)
            if self._flushes:
                self._answer_flushes(relay)
            self._observer.turned()
            if is_closing and self._is_done(relay):
                break
            self._listen(relay, transport, self._wait_s(wait_s))
        relay.drain()
        relay.turn(is_flushing=True)  # commits the last outcomes
        if not relay.status.trouble:
            with contextlib.suppress(OutboxError):  # the file may be deleted by now
                relay.look()  # as for a flush

    def _listen(self, relay: Relay, transport: Transport, wait_s: float) -> None:
        """Listen until a turn is due; and while no work waits for it, gather more confirms."""
        events = transport.listen(wait_s)
        while not (events or self._flushes or self._close_at):
            idle_s = relay.idle_s()
            if idle_s is None:
                return
            events = transport.listen(idle_s)
        for _ in range(GATHERINGS):
            if not events:
                return
            relay.handle(events)
            if not relay.is_unhurried:
                return
            time.sleep(GATHER_S)
            events = transport.listen(0.0)
        relay.handle(events)

    def _is_done(self, relay: Relay) -> bool:
        """Whether a closing relay may end: no message is open, or the time is up."""
        assert self._close_at is not None
        if self._last_flush.look(relay):
            return True
        late_s = time.monotonic() - self._close_at
        if late_s < 0:
            return False
        relay.drain()
        return relay.status.in_flight == 0 or late_s >= LAST_CONFIRMS_S

    def _wait_s(self, wait_s: float) -> float:
        if self._last_flush.is_searching or any(f.is_searching for f in list(self._flushes)):
            return 0.0
        if self._close_at is None:
            return wait_s
        # When the time is up, the last confirms are awaited, in steps of 50 ms.
        return min(wait_s, max(0.05, self._close_at - time.monotonic()))

    def _answer_flushes(self, relay: Relay) -> None:
        has_looked = False
        for flush in list(self._flushes):  # a copy: callers add and remove flushes at any time
            has_looked |= flush.upto is None  # it looks for the highest id
            if flush.look(relay):
                if not has_looked:
                    relay.look()  # the status is to count what others have discarded
                    has_looked = True
                flush.done.set()
                self.end_flush(flush)

    def _detach(self) -> None:
        """Close the inbox."""
        closed = PublisherClosed("the publisher is closed")
        if self.failure is not None:
            closed = PublisherFailed(f"nothing more is accepted: {described(self.failure)}")
            closed.__cause__ = self.failure
        self.inbox.close(closed)
        self._is_ended = True
