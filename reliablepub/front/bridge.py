"""The bridge from the relay's thread to an event loop: wakes waiting tasks once per relay turn.

Knows: one event loop, and that the relay runs on another thread. Must never know: messages,
outcomes, what a turn of the relay does.

Waking a loop from another thread costs a system call, which also releases the interpreter lock in
the middle of the relay's work. So a bell that rings during a turn is only queued, and the loop is
woken once, at the end of the turn. The loop serves the queue in slices, between which other tasks
run.

No step takes a lock, which the relay's thread and the loop would often want at once. Futures belong
to the loop: only it adds, wakes and removes them. A bell is rung after the change, and a task looks
once more for the change after it has added its future. So either the ring finds the future, or the
task finds the change.

Cancelling a waiting task only removes its future from the bell.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from copy import copy
from typing import Final

from reliablepub.errors import RelayHeldUp, WrongEventLoop
from reliablepub.front.waits import seconds_of
from reliablepub.relay.status import Status
from reliablepub.relay.thread import Observer

SLICE: Final = 25
"""Bells served before other tasks of the loop run. Few, because the woken tasks have work of their
own; with 100 the loop lags more, and nothing is faster."""


_LOOK_S: Final = 1.0
"""Interval at which the loop checks whether a callback holds the relay up, or a Ctrl-C has left
tasks waiting."""
BURST: Final = 50
"""Tasks that may hand messages over in one iteration of the loop; each takes 10 to 20 µs there."""


class Bridge(Observer):
    """Observes a relay on behalf of the tasks of one event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        check_held_up: Callable[[], None],  # raises `RelayHeldUp`
        status: Callable[[], Status],
    ) -> None:
        self.loop = loop
        self.held_up: RelayHeldUp | None = None
        self._check_held_up = check_held_up
        self.status = status
        self.rung: deque[Bell] = deque()
        self.waiting: set[asyncio.Future[None]] = set()
        self.is_ended: bool = False
        self.failure: BaseException | None = None
        self._is_started = Signal(self)
        self._is_scheduled = False
        self._is_wake_due = False
        self._is_looking = False
        self._looks: list[asyncio.TimerHandle] = []
        self._serving: asyncio.Handle | None = None
        self._admitting: asyncio.Handle | None = None
        self._admitted = 0
        self._woken = 0
        self._queued: deque[asyncio.Future[None]] = deque()

    def check(self) -> None:
        """Refuse to work in another event loop: futures belong to one loop."""
        if asyncio.get_running_loop() is not self.loop:
            msg = "this publisher belongs to the event loop that opened it; open one in this loop"
            if self.loop.is_closed():
                msg = "the event loop that opened this publisher has ended; await its aclose() here"
            raise WrongEventLoop(msg)

    # ------------------------------------------------------------------ on the relay's thread

    def started(self) -> None:
        """The relay has started."""
        self._is_started.set()
        self._schedule()

    def turned(self) -> None:
        """The relay has finished a turn: wake the loop if a bell was rung."""
        if self.rung:
            self._schedule()

    def ended(self, failure: BaseException | None) -> None:
        """The relay has ended: wake all waiting tasks."""
        self.failure = failure  # before `is_ended`, by which tasks know that it is set
        self.is_ended = True
        self._schedule()

    def _schedule(self) -> None:
        if self._is_scheduled:
            return
        self._is_scheduled = True
        try:
            self._serving = self.loop.call_soon_threadsafe(self._serve)
        except RuntimeError:  # the loop is closed: no task waits any more
            self.rung.clear()

    # ------------------------------------------------------------------ on the loop

    def handed_over(self, wake: Callable[[], None]) -> None:
        """Wake the relay once the tasks that are ready in this iteration of the loop have run."""
        # Waking it costs a system call, which may hand the interpreter lock to the relay's thread.
        if not self._is_wake_due:
            self._is_wake_due = True
            self.loop.call_soon(self._wake, wake)

    async def admission(self) -> None:
        """Wait until this task may hand its message over; tasks are admitted as they arrive."""
        self._admitted += 1  # first: a Ctrl-C below must not have two callbacks admit
        if self._admitted == 1:
            self._admitting = self.loop.call_soon(self._admit)
        # A thousand tasks that start together would otherwise block the loop until all are done.
        if self._admitted > BURST or self._queued:
            future = self.loop.create_future()
            self._queued.append(future)
            await future

    def _admit(self) -> None:
        """Admit further tasks, in the next iteration of the loop, until none is queued."""
        admitted = min(BURST, len(self._queued))
        if admitted or self._woken:  # first: a Ctrl-C below must not be the end of admissions
            self._admitting = self.loop.call_soon(self._admit)
        # The woken tasks run in the next iteration; until then, others queue behind them. Those
        # that the last call has woken run in this one, and count in it.
        self._admitted = BURST if admitted else self._woken
        self._woken = admitted
        for _ in range(admitted):
            wake(self._queued[0])
            self._queued.popleft()

    def _wake(self, wake: Callable[[], None]) -> None:
        self._is_wake_due = False
        wake()

    def _look(self) -> None:
        """End the waits of tasks if the relay waits for a callback that does not return."""
        if self.waiting or self._queued or not self.is_ended:
            # Two, and before the old one is cancelled: a Ctrl-C may end one before its first line.
            before, later = self._looks, self.loop.call_later
            self._looks = [later(_LOOK_S, self._look), later(2 * _LOOK_S, self._look)]
            for timer in before:
                timer.cancel()
        # Schedule the other callbacks anew: a Ctrl-C may have ended one of them in the same way.
        self._is_wake_due = False
        self._is_scheduled = True
        self._serving = self._again(self._serving, self._serve)
        if self._queued:
            self._admitting = self._again(self._admitting, self._admit)
        try:
            self._check_held_up()
        except RelayHeldUp as error:
            self.held_up = error
            self._schedule()
        else:
            self.held_up = None

    def _again(self, handle: asyncio.Handle | None, callback: Callable[[], None]) -> asyncio.Handle:
        """Schedule a callback that was scheduled before, in place of that call."""
        new = self.loop.call_soon(callback)  # first: after a Ctrl-C below, both are called
        if handle is not None:
            handle.cancel()
        return new

    async def until_started(self) -> None:
        """Wait until the relay has started, or could not start."""
        if not self._is_looking:  # `open` may be called again
            self._is_looking = True
            self._look()
        await self._is_started.wait()

    async def until_ended(self) -> None:
        """Wait until the relay has released all its resources."""
        await Bell(self).until(lambda: self.is_ended)

    def _serve(self) -> None:
        self._is_scheduled = False  # first: what is rung from here on schedules again
        for _ in range(min(SLICE, len(self.rung))):
            for future in self.rung[0].futures:
                wake(future)
            self.rung.popleft()  # last: after a Ctrl-C, the bell is served by the next call
        if self.is_ended or self.held_up is not None:
            for future in self.waiting:
                wake(future)
        if self.rung:
            self._serving = self.loop.call_soon(self._serve)
            self._is_scheduled = True


class Bell:
    """A condition variable for tasks: the relay's thread rings it after a change."""

    __slots__ = ("_bridge", "futures")

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self.futures: tuple[asyncio.Future[None], ...] = ()

    def ring(self) -> None:
        """Wake the waiting tasks at the end of the relay's turn. Called after the change."""
        if self.futures:
            self._bridge.rung.append(self)

    async def until(self, is_true: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until a condition is true; False if the time is up, or the relay has ended."""
        bridge = self._bridge
        bridge.check()
        loop, wait_s = bridge.loop, seconds_of(timeout_s)
        deadline = None if wait_s is None else loop.time() + wait_s
        while not is_true():
            timer: asyncio.TimerHandle | None = None
            future = loop.create_future()
            self.futures = (*self.futures, future)
            bridge.waiting.add(future)
            try:
                if is_true():
                    break
                if bridge.is_ended or (deadline is not None and loop.time() >= deadline):
                    return is_true()
                if deadline is not None:
                    timer = loop.call_at(deadline, wake, future)
                await future
                if bridge.held_up is not None and not is_true():
                    raise copy(bridge.held_up)
            finally:
                self.futures = tuple([other for other in self.futures if other is not future])
                bridge.waiting.discard(future)
                if timer is not None:
                    timer.cancel()
        return True


class Signal(Bell):
    """A one-shot event for tasks: the `Flag` that an asyncio caller waits for."""

    __slots__ = ("_is_set",)

    def __init__(self, bridge: Bridge) -> None:
        super().__init__(bridge)
        self._is_set = False

    def is_set(self) -> bool:
        """Whether the signal is set."""
        return self._is_set

    def set(self) -> None:
        """Set the signal. Called on the relay's thread."""
        self._is_set = True
        self.ring()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the signal is set; False if the time is up, or the relay has ended."""
        return await self.until(self.is_set, timeout_s)


def wake(future: asyncio.Future[None]) -> None:
    """Resolve a future, unless it is done: its task may have been cancelled or timed out."""
    if not future.done():
        future.set_result(None)
