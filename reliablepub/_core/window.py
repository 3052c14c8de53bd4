"""The adaptive window: how many messages may be in flight.

Knows: how many publishes were settled by when, and whether the window limited them. Must never
know: keys, channels, or why anything was sent.

With a small window the broker waits for the publisher. A large window builds a queue in front of
the broker, in which messages only wait, and all of which may arrive twice if the connection is
lost. The best size depends on network distance, disks, queues and other publishers. So it is
measured: it grows and is halved as TCP's window is.

**What is measured.** A *round* (as in BBR) begins when the window is full, and ends when as many
messages are settled as were in flight at its beginning, whichever they are: a queue may confirm
nothing for days. A *look* sums up the rounds at one size. It yields a rate: messages settled by
time. A round in which the window did not limit the messages proves nothing and is discarded: there
were too few messages, the byte limit was reached, suspects were being tried, or the broker blocked.

**How the size is chosen.**

    ==========================================  ==========================  ======
    event                                       size                        then
    ==========================================  ==========================  ======
    a new connection                            the lower bound             grow
    a look, while it grows                      doubled                     grow
    `MISSES_MAX` looks in a row without a gain  that of the last gain       rest
    the rest is over                            halved                      grow
    a confirm is overdue                        halved                      rest
    ==========================================  ==========================  ======

A *gain* is a rate of `GAIN` times that of the last gain. After a rest, the window grows to its
former size if half of it was too small, and beyond if that pays.

Latency is no measure, unlike in TCP Vegas. A broker syncs its disk once for all messages that wait
for the sync, so latency is highest where the rate of confirms is highest.

A new connection may lead to another broker, or to one that has restarted with cold caches. A new
channel on the same connection keeps the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LOOK_S: Final = 0.2
"""Minimum length of a *look* in seconds. A look sums up rounds, to average out stalls of a host."""
GLANCE_S: Final = 0.005
"""Minimum length of a look with a gain on a new connection, where the rate doubles, or nearly."""
GAIN: Final = 1.07
MISSES_MAX: Final = 2
REST_S: Final = 30.0
"""Minimum length of the rounds of a rest in seconds."""


@dataclass(slots=True)
class Progress:
    """Progress of the channel that carries fresh messages."""

    epoch: int
    last_tag: int  # the highest assigned
    settled: int  # publishes of this epoch

    @property
    def in_flight(self) -> int:
        """Number of publishes in this epoch that are not settled."""
        return self.last_tag - self.settled


class Window:
    """The limit of messages in flight, between two bounds. Equal bounds give a fixed window.

    The caller calls `heard` before each transmission and `sent` after it.
    """

    size: int
    round: tuple[Progress, float] | None  # progress and time at its start
    _settled: int  # messages, in the rounds at this size
    _took_s: float  # length of these rounds
    _is_growing: bool  # otherwise it rests
    _gain_s: float  # minimum length of a look with a gain
    _best: float  # rate of the last gain
    _best_size: int  # its size
    _misses: int  # looks without a gain since then

    def __init__(self, least: int, most: int) -> None:
        self._least = min(least, most)
        self._most = most
        self.reset()

    def reset(self) -> None:
        """Start at the lower bound, and discard all measurements."""
        self._grow(self._least, GLANCE_S)

    def halve(self) -> None:
        """Halve the window, because a confirm is overdue: the broker is too slow for it."""
        self._rest(self._half)

    # ------------------------------------------------------------------ rounds

    def forget_round(self) -> None:
        """Discard the current round: something else than the window limits the messages."""
        self.round = None

    def heard(self, progress: Progress, now: float) -> None:
        """End the round if as many are settled as were written at its start."""
        if self.round is None:
            return
        begin, since = self.round
        if progress.epoch != begin.epoch:
            self.forget_round()
        elif progress.settled >= begin.last_tag and now > since:
            self.round = None
            self._settled += progress.settled - begin.settled
            self._took_s += now - since
            self._learn()

    def sent(self, progress: Progress, now: float, *, is_held_up: bool) -> None:
        """Begin a round if the window is full after a transmission; discard it if it is not."""
        # Held up: fresh messages wait for room, and no suspects are in flight.
        if not is_held_up or progress.in_flight < self.size:
            self.forget_round()
        elif self.round is None and progress.in_flight == self.size and self._least < self._most:
            self.round = (progress, now)

    # ------------------------------------------------------------------ size

    @property
    def _half(self) -> int:
        return max(self.size // 2, self._least)

    def _learn(self) -> None:
        """Choose the next size, if the rounds at this one have lasted long enough."""
        if not self._is_growing:
            if self._took_s >= REST_S:
                self._grow(self._half, LOOK_S)
            return
        rate = self._settled / self._took_s
        is_gain = rate > GAIN * self._best
        if self._took_s < (self._gain_s if is_gain else LOOK_S):
            return
        self._misses = 0 if is_gain else self._misses + 1
        if is_gain:
            self._best, self._best_size = rate, self.size
        if self._misses < MISSES_MAX and self.size < self._most:
            self._measure(min(2 * self.size, self._most))
        else:
            self._rest(self._best_size)

    def _grow(self, size: int, gain_s: float) -> None:
        """Double the window, from this size on, while that brings a gain."""
        self._is_growing, self._gain_s = True, gain_s
        self._best = 0.0  # so that the first look is a gain
        self._measure(size)

    def _rest(self, size: int) -> None:
        self._is_growing = False
        self._measure(size)

    def _measure(self, size: int) -> None:
        self.size: int = size
        self.round, self._settled, self._took_s = None, 0, 0.0
