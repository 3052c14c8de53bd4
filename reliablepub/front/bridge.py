"""From the relay's thread to an event loop: whoever waits there is woken, once a turn.

Knows: one event loop, and that others call from another thread. Must never know: messages,
outcomes, what a turn does.

Waking a loop from another thread costs a system call, and hands the interpreter over in the middle
of whatever the thread was doing. So bells that ring during a turn are only noted down, and the loop
is woken when the turn is over; there it serves them in slices, so that its other tasks get their
turn too.

A task that is cancelled while it waits is forgotten, and nothing else happens: a bell does not know
what it was rung for.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from copy import copy
from typing import Final

from reliablepub.errors import RelayHeldUp, WrongEventLoop
from reliablepub.relay.status import Status
from reliablepub.relay.thread import Observer

SLICE: Final = 25
"""Bells served before the loop's other tasks get their turn: few, since the tasks that are woken
have work of their own to do. With 100 the loop lags more, and nothing is faster."""


_LOOK_S: Final = 1.0
"""How often is looked whether the relay is held up."""
BURST: Final = 50
"""Tasks that may hand over in one turn of the loop; what they do there takes 10 to 20 us each."""


class Bridge(Observer):
    """Observes a relay for the tasks of one event loop.

    Args:
        loop: the running one.
        check_held_up: raises `RelayHeldUp` while a callback does not let the relay go on.
        status: how the relay is doing.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        check_held_up: Callable[[], None],
        status: Callable[[], Status],
    ) -> None:
        self.loop = loop
        self.held_up: RelayHeldUp | None = None
        self._check_held_up = check_held_up
        self.status = status
        self.lock: threading.Lock = threading.Lock()
        self.rung: deque[Bell] = deque()
        self.waiting: set[asyncio.Future[None]] = set()
        self.is_ended: bool = False
        self.failure: BaseException | None = None
        self._is_started = Signal(self)
        self._is_scheduled = False
        self._is_wake_due = False
        self._admitted = 0
        self._queued: deque[asyncio.Future[None]] = deque()

    def check(self) -> None:
        """Futures belong to one loop.

        Raises:
            WrongEventLoop: another one is running.
        """
        if asyncio.get_running_loop() is not self.loop:
            msg = "this publisher belongs to the event loop that opened it; open one in this loop"
            raise WrongEventLoop(msg)

    # ------------------------------------------------------------------ on the relay's thread

    def started(self) -> None:
        """The relay takes turns from now on."""
        self._is_started.set()
        self._schedule()

    def turned(self) -> None:
        """The relay has taken a turn: wake whom it may concern."""
        if self.rung:
            self._schedule()

    def ended(self, failure: BaseException | None) -> None:
        """Nothing more will happen: wake everybody."""
        self.failure = failure
        with self.lock:
            self.is_ended = True
        self._schedule()

    def _schedule(self) -> None:
        with self.lock:
            if self._is_scheduled:
                return
            self._is_scheduled = True
        try:
            self.loop.call_soon_threadsafe(self._serve)
        except RuntimeError:  # the loop is closed, and with it everybody who waited is gone
            self.rung.clear()

    # ------------------------------------------------------------------ on the loop

    def handed_over(self, wake: Callable[[], None]) -> None:
        """Wake the relay when the tasks that are under way have had their turn.

        To wake it is a system call too, in which the interpreter may be lost to the relay's thread.
        """
        if not self._is_wake_due:
            self._is_wake_due = True
            self.loop.call_soon(self._wake, wake)

    async def admission(self) -> None:
        """Wait for this task's turn to hand over, in the order of asking.

        A thousand tasks that begin together would otherwise hold the loop until all are through.
        """
        if self._admitted == 0:
            self.loop.call_soon(self._admit)
        self._admitted += 1
        if self._admitted > BURST or self._queued:
            future = self.loop.create_future()
            self._queued.append(future)
            await future

    def _admit(self) -> None:
        """The next turn of the loop has begun."""
        self._admitted = min(BURST, len(self._queued))
        for _ in range(self._admitted):
            wake(self._queued.popleft())
        if self._admitted:
            self.loop.call_soon(self._admit)

    def _wake(self, wake: Callable[[], None]) -> None:
        self._is_wake_due = False
        wake()

    def _look(self) -> None:
        """Nobody waits for ever where a callback never returns."""
        try:
            self._check_held_up()
        except RelayHeldUp as error:
            self.held_up = error
            self._schedule()
        else:
            self.held_up = None
        if not self.is_ended:
            self.loop.call_later(_LOOK_S, self._look)

    async def until_started(self) -> None:
        """Wait until the relay takes turns, or has failed to come up."""
        self._look()
        await self._is_started.wait()

    async def until_ended(self) -> None:
        """Wait until the relay has let go of everything."""
        await Bell(self).until(lambda: self.is_ended)

    def _serve(self) -> None:
        with self.lock:
            bells = [self.rung.popleft() for _ in range(min(SLICE, len(self.rung)))]
            self._is_scheduled = bool(self.rung)
            futures = [future for bell in bells for future in bell.futures]
            if self.is_ended or self.held_up is not None:
                futures += self.waiting
        for future in futures:
            wake(future)
        if self._is_scheduled:
            self.loop.call_soon(self._serve)


class Bell:
    """Rung on the relay's thread when something may have come true that tasks wait for."""

    __slots__ = ("_bridge", "futures")

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self.futures: tuple[asyncio.Future[None], ...] = ()

    def ring(self) -> None:
        """Wake those who wait, when the turn is over. What they wait for is true already."""
        with self._bridge.lock:
            if self.futures:
                self._bridge.rung.append(self)

    async def until(self, is_true: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until something is true of which the bell tells.

        Args:
            is_true: asked again whenever the bell has rung.
            timeout_s: seconds, or None to wait as long as it takes.

        Returns:
            whether it is true; if not, the time is up, or the relay has ended.

        Raises:
            RelayHeldUp: a callback of the application's does not return.
            WrongEventLoop: it is another loop's.
        """
        bridge = self._bridge
        bridge.check()
        deadline = None if timeout_s is None else bridge.loop.time() + timeout_s
        while not is_true():
            future = bridge.loop.create_future()
            with bridge.lock:  # from here on a ring is heard
                self.futures += (future,)
                bridge.waiting.add(future)
            try:
                if is_true():
                    break
                if bridge.is_ended or not await _within(future, deadline):
                    return is_true()
                if bridge.held_up is not None and not is_true():
                    raise copy(bridge.held_up)
            finally:
                with bridge.lock:
                    self.futures = tuple(other for other in self.futures if other is not future)
                    bridge.waiting.discard(future)
        return True


class Signal(Bell):
    """A bell with a memory: a `Flag` that tasks wait for."""

    __slots__ = ("_is_set",)

    def __init__(self, bridge: Bridge) -> None:
        super().__init__(bridge)
        self._is_set = False

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def set(self) -> None:
        """Set it, on the relay's thread."""
        self._is_set = True
        self.ring()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set.

        Returns:
            whether it is; if not, the time is up, or the relay has ended.

        Raises:
            WrongEventLoop: it is another loop's.
        """
        return await self.until(self.is_set, timeout_s)


def wake(future: asyncio.Future[None]) -> None:
    """Resolve a future that nobody may wait for any more."""
    if not future.done():
        future.set_result(None)


async def _within(future: asyncio.Future[None], deadline: float | None) -> bool:
    """Wait for a future; whether it was in time."""
    if deadline is None:
        await future
        return True
    loop = future.get_loop()
    if loop.time() >= deadline:
        return False
    timer = loop.call_at(deadline, wake, future)
    try:
        await future
    finally:
        timer.cancel()
    return True
