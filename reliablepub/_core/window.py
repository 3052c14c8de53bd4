"""The adaptive window: how many messages may be in flight.

Knows: how many publishes were settled by when, and whether the window limited them. Must never
know: keys, channels, or why anything was sent.

With a small window the broker waits for the publisher. A large window builds a queue in front of
the broker, in which messages only wait, and all of which may arrive twice if the connection is
lost. The best size depends on network distance, disks, queues and other publishers. So it is
measured, as in congestion control.

**What is measured.** A *round* (as in BBR) begins when the window is full, and ends when as many
messages are settled as were in flight at its beginning, whichever they are: a queue may confirm
nothing for days. It yields a rate: messages settled by time. By Little's law ``window = rate x
latency``: if latency does not change when the window is doubled, the rate has doubled; if latency
doubles, only the queue has grown. So the question "does latency stay flat or climb?" becomes "by
how much does the rate grow?".

TCP Vegas and Netflix's concurrency limits compare with the lowest latency ever seen. That does not
work here. A broker syncs its disk once for all messages that wait for the sync, so latency is
highest where the rate of confirms is highest: what they would take for congestion is the optimum.

**How the size is chosen.** A new connection doubles its window, as TCP slow start does, until three
doublings in a row bring no gain. In doubt the window grows: a window that is too large costs
latency, one that is too small costs throughput. So a gain counts at once, after a *glance*, and a
doubling without one only after a whole look. After that the window is adjusted by trials. Looks at
half or twice the window alternate with looks at the current window, so that other load on the host
affects both, until the mean difference exceeds its own error.

    ==================  ==========================  ====================================
    trial               adopted if the rate         next
    ==================  ==========================  ====================================
    half the window     clearly loses less than     a trial in the same direction
                        `MATTERS`
    twice the window    gains `MATTERS`             a trial in the same direction
    either              (not adopted)               a rest, longer each time; then a trial
                                                    in the other direction
    a rest              --                          ends early if the rate changes by more
                                                    than `JUMP`: earlier results are void
    ==================  ==========================  ====================================

A round in which the window did not limit the messages proves nothing and is discarded: there were
too few messages, the byte limit was reached, suspects were being tried, or the broker blocked.

**A new connection** starts at the lower bound again: it may lead to another broker, or to one that
has restarted with cold caches and all clients reconnecting; and if connections are short-lived,
little is in flight when they are lost. Growing takes one round for each doubling. A new channel on
the same connection keeps the window, unless the old channel was retired for overdue confirms, which
indicates congestion.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Final

LOOK_S: Final = 0.1
"""Minimum length of a *look* in seconds. A look sums up rounds, to average out stalls of a host."""
GLANCE_S: Final = 0.005
"""Minimum length of a glance in seconds: enough to see that the rate has doubled, or nearly."""
MATTERS: Final = log(1.05)
"""Smallest difference of rates that counts: 5 %, as a difference of logarithms."""
LEAP: Final = log(1.1)
"""Gain over the best rate so far (10 %) that makes a doubling in slow start a success."""
STRIKES_MAX: Final = 3
"""Doublings in a row without success that end slow start."""
NOISE: Final = 0.2
"""Prior standard deviation of the difference between two looks."""
PAIRS_MAX: Final = 8
"""Maximum number of pairs of looks in a trial."""
REST_MIN: Final = 4
"""Looks in a rest after a change."""
REST_MAX: Final = 128
"""Looks in a rest after many trials without a change."""
JUMP: Final = log(2)
"""Change of the rate in a rest (factor 2) that ends the rest."""
SMOOTHING: Final = 0.25
"""Weight of the newest look in the expected rate during a rest (exponential smoothing)."""


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


class Trial:
    """A comparison of two window sizes by alternating looks, until one is clearly better."""

    __slots__ = ("_base_rate", "_differences", "base", "probe")

    def __init__(self, base: int, probe: int) -> None:
        self.base = base  # the current window
        self.probe = probe  # may replace it
        self._base_rate: float | None = None
        self._differences: list[float] = []

    @property
    def next_size(self) -> int:
        """The window of the next look."""
        return self.base if self._base_rate is None else self.probe

    def enter(self, rate: float) -> bool | None:
        """Add a rate at `next_size`; return whether to adopt the probe, or None to go on."""
        if self._base_rate is None:
            self._base_rate = rate
            return None
        self._differences.append(log(rate / self._base_rate))
        self._base_rate = None
        count = len(self._differences)
        mean = sum(self._differences) / count
        # The standard error of the mean; NOISE keeps one pair of looks from seeming certain.
        scatter = NOISE**2 + sum((one - mean) ** 2 for one in self._differences)
        error = sqrt(scatter) / count
        grows = self.probe > self.base
        worth = mean - MATTERS if grows else mean + MATTERS
        if abs(worth) > error:
            return worth > 0
        return None if count < PAIRS_MAX else grows and worth > 0


class SlowStart:
    """Decides how long doubling the window goes on."""

    __slots__ = ("_best", "_strikes")

    def __init__(self) -> None:
        self._best = 0.0
        self._strikes = 0

    def is_gain(self, rate: float) -> bool:
        """Whether a rate is clearly better than those of all smaller sizes."""
        return rate > self._best * exp(LEAP)

    def goes_on(self, rate: float) -> bool:
        """Add the rate that was measured at a size; return whether to double again."""
        if self.is_gain(rate):
            self._best = rate
            self._strikes = 0
        else:
            self._strikes += 1
        return self._strikes < STRIKES_MAX


class Window:
    """The limit of messages in flight, between two bounds. Equal bounds give a fixed window.

    The caller calls `heard` before each transmission and `sent` after it.
    """

    __slots__ = (
        "_expected",
        "_grows",
        "_least",
        "_look",
        "_most",
        "_rest",
        "_rest_left",
        "_start",
        "_trial",
        "round",
        "size",
    )

    def __init__(self, least: int, most: int) -> None:
        self._least = min(least, most)
        self._most = most
        self.reset()

    def reset(self) -> None:
        """Start at the lower bound, and discard all measurements."""
        self.size = self._least
        self.round: tuple[Progress, float] | None = None  # progress and time at its start
        self._look = (0, 0.0)  # messages settled in its rounds, and seconds they lasted
        self._start: SlowStart | None = SlowStart()
        self._trial: Trial | None = None
        self._grows = True
        self._rest = self._rest_left = REST_MIN
        self._expected: float | None = None

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
            settled, took_s = self._look
            settled, took_s = settled + progress.settled - begin.settled, took_s + now - since
            self._look = settled, took_s
            rate = settled / took_s
            if took_s >= LOOK_S or (took_s >= GLANCE_S and self._is_early_gain(rate)):
                self._look = (0, 0.0)
                self._learn(rate)

    def _is_early_gain(self, rate: float) -> bool:
        """Whether slow start need not look any longer, because the size clearly brings a gain."""
        return self._start is not None and self._start.is_gain(rate)

    def sent(self, progress: Progress, now: float, *, is_held_up: bool) -> None:
        """Begin a round if the window is full after a transmission; discard it if it is not."""
        # Held up: fresh messages wait for room, and no suspects are in flight.
        if not is_held_up or progress.in_flight < self.size:
            self.forget_round()
        elif self.round is None and progress.in_flight == self.size and self._least < self._most:
            self.round = (progress, now)

    # ------------------------------------------------------------------ trials

    def _learn(self, rate: float) -> None:
        """Process the rate of a look at the current size, in messages per second."""
        if self._start is not None:
            if self.size < self._most and self._start.goes_on(rate):
                self.size = min(2 * self.size, self._most)
                return
            self._start = None
            self._turn_round()
        elif self._trial is None:
            self._rested(rate)
        else:
            self._tried(self._trial, rate)

    def _tried(self, trial: Trial, rate: float) -> None:
        """Process the rate of a look that belongs to a trial."""
        is_adopted = trial.enter(rate)
        if is_adopted is None:
            self.size = trial.next_size
        elif is_adopted:
            self.size, self._rest = trial.probe, REST_MIN
            self._try_next()
        else:
            self.size = trial.base
            self._turn_round()

    def _try_next(self) -> None:
        """Begin a trial in the current direction."""
        probe = min(2 * self.size, self._most) if self._grows else max(self.size // 2, self._least)
        self._trial = Trial(self.size, probe)
        if probe == self.size:  # at the bound: nothing to compare
            self._turn_round()

    def _turn_round(self) -> None:
        """Rest, then try the other direction: this one brings no gain."""
        self._trial = self._expected = None
        self._grows = not self._grows
        self._rest_left, self._rest = self._rest, min(2 * self._rest, REST_MAX)

    def _rested(self, rate: float) -> None:
        """Process the rate of a look that belongs to a rest."""
        expected = self._expected or rate
        change = log(rate / expected)
        self._expected = expected * exp(SMOOTHING * change)
        self._rest_left -= 1
        if abs(change) > JUMP:
            self._grows, self._rest, self._rest_left = change > 0, REST_MIN, 0
        if self._rest_left <= 0:
            self._try_next()
