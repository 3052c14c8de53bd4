"""How many messages may be in flight: as many as make the broker faster, and no more.

Knows: how many publishes were settled by when, and whether the window was what held them up. Must
never know: tags' keys, channels, why anything was sent.

A small window leaves the broker waiting for us; a large one makes a queue in front of it, in which
messages only wait, and all of which may arrive twice when the connection is lost. Where the one
becomes the other nobody can know beforehand: it depends on the distance, the disks, the queues, and
who else is publishing. So it is measured, as congestion control does it.

**What is measured.** A *round* (BBR's word) begins when the window is full, and ends when all that
was in flight then is settled. It lasts as long as a confirm takes: so many messages in so much
time. By Little's law ``window = rate x latency``: if twice the window has the same latency, the
rate has doubled; if it has twice the latency, nothing is won but a queue. So the question "does
latency stay flat, or climb?" is put as "by how much does the rate grow?".

TCP Vegas and Netflix' limits compare with the lowest latency ever seen. That does not serve here: a
broker syncs its disk once for all messages that wait for it, so a confirm takes longest where most
of them are made a second, and what they take for congestion is the best there is.

**How it is decided.** First as TCP's slow start does: a new connection doubles its window until
three doublings in a row bring nothing more. In doubt it grows: what is too large costs latency,
what is too small costs messages. From then on by trials: rounds at half the window, or twice of it,
take turns with rounds at the window itself, so that whatever else happens on the machine happens to
both, until the mean of the differences is clear beyond its own error.

    ==================  ==========================  ====================================
    trial               it is adopted if the rate   then
    ==================  ==========================  ====================================
    half the window     clearly loses less than     the next trial in the same direction
                        `MATTERS`
    twice the window    gains `MATTERS`             likewise
    either              (it is not)                 rest, longer each time; then the other
    a rest              --                          cut short when latency is suddenly
                                                    another: what was learned is void
    ==================  ==========================  ====================================

Rounds in which the window was not what held messages up prove nothing: too few were there, the
bytes were at their limit, suspects were tried, the broker blocked us. They are forgotten.

**A new connection** begins at the least again: it may be another broker, or the same one with cold
caches and all its clients at the door; and if connections do not last, little is in flight when
they are lost. It takes a round for each doubling. A new channel on the same connection goes on as
it was, but for one whose confirms were overdue: that is what congestion looks like.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Final

LOOK_S: Final = 0.1
"""Rounds are taken together until they have lasted so long: a machine's hiccups are no shorter."""
MATTERS: Final = log(1.05)
"""A difference that matters (rates are compared by their logarithms)."""
LEAP: Final = log(1.1)
"""What a doubling in the slow start brings, for it to go on."""
STRIKES_MAX: Final = 3
"""So many doublings in a row without a leap end it."""
NOISE: Final = 0.2
"""What two looks differ by for no reason, before there is experience."""
PAIRS_MAX: Final = 8
"""Most pairs of looks in a trial."""
REST_MIN: Final = 4
"""Looks between trials, when something has changed."""
REST_MAX: Final = 128
"""The same, when nothing has changed for long."""
JUMP: Final = log(2)
"""A latency that is so much another, in a rest, ends it."""
SMOOTHING: Final = 0.25
"""Weight of the newest look, in a rest, in what is expected of the next."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the channel of fresh messages is.

    Attributes:
        epoch: its number.
        last_tag: the highest one given.
        lowest_tag: everything below is settled.
        settled: how many of the epoch are.
    """

    epoch: int
    last_tag: int
    lowest_tag: int
    settled: int

    @property
    def in_flight(self) -> int:
        """How many are not."""
        return self.last_tag - self.settled


class Trial:
    """Two windows side by side, until it is clear which one is better.

    Args:
        base: the window there is.
        probe: the one that may replace it.
    """

    __slots__ = ("_base_rate", "_differences", "base", "probe")

    def __init__(self, base: int, probe: int) -> None:
        self.base = base
        self.probe = probe
        self._base_rate: float | None = None
        self._differences: list[float] = []

    @property
    def next_size(self) -> int:
        """The window to look at next."""
        return self.base if self._base_rate is None else self.probe

    def enter(self, rate: float) -> bool | None:
        """Enter the rate at `next_size`.

        Returns:
            whether the probe is adopted; None if it is not clear yet.
        """
        if self._base_rate is None:
            self._base_rate = rate
            return None
        self._differences.append(log(rate / self._base_rate))
        self._base_rate = None
        count = len(self._differences)
        mean = sum(self._differences) / count
        scatter = NOISE**2 + sum((one - mean) ** 2 for one in self._differences)
        error = sqrt(scatter) / count
        grows = self.probe > self.base
        worth = mean - MATTERS if grows else mean + MATTERS
        if abs(worth) > error:
            return worth > 0
        return None if count < PAIRS_MAX else grows and worth > 0


class SlowStart:
    """Doubles, until that brings nothing more."""

    __slots__ = ("_best", "_strikes")

    def __init__(self) -> None:
        self._best = 0.0
        self._strikes = 0

    def goes_on(self, rate: float) -> bool:
        """Enter the rate at a size; whether to try the next."""
        if rate > self._best * exp(LEAP):
            self._best = rate
            self._strikes = 0
        else:
            self._strikes += 1
        return self._strikes < STRIKES_MAX


class Window:
    """The limit on messages in flight; it stays between two bounds, which may be one.

    Tell it `heard` before each transmission, and `sent` after it.

    Args:
        least: its lower bound, at which each connection begins; or ``most``, if that is less.
        most: its upper bound.

    Attributes:
        size: the limit.
    """

    __slots__ = (
        "_expected",
        "_grows",
        "_least",
        "_look",
        "_most",
        "_rest",
        "_rest_left",
        "_round",
        "_start",
        "_trial",
        "size",
    )

    def __init__(self, least: int, most: int) -> None:
        self._least = min(least, most)
        self._most = most
        self.reset()

    def reset(self) -> None:
        """Begin anew: what was learned was about another connection, or is over."""
        self.size = self._least
        self._round: tuple[Progress, float] | None = None  # how far all was at its start, and when
        self._look = (0, 0.0)  # settled in rounds, and how long they lasted
        self._start: SlowStart | None = SlowStart()
        self._trial: Trial | None = None
        self._grows = True
        self._rest = self._rest_left = REST_MIN
        self._expected: float | None = None

    # ------------------------------------------------------------------ rounds

    def forget_round(self) -> None:
        """What is under way proves nothing: an epoch or an alarm, bytes or suspects, or no need."""
        self._round = None

    def heard(self, progress: Progress, now: float) -> None:
        """Something may have been settled since the last transmission."""
        if self._round is None:
            return
        begin, since = self._round
        if progress.epoch != begin.epoch:
            self.forget_round()
        elif progress.lowest_tag > begin.last_tag and now > since:
            self._round = None
            settled, took_s = self._look
            self._look = settled + progress.settled - begin.settled, took_s + now - since
            if self._look[1] >= LOOK_S:
                self._learn(self._look[0] / self._look[1])
                self._look = (0, 0.0)

    def sent(self, progress: Progress, now: float, *, is_held_up: bool) -> None:
        """A transmission is over.

        Args:
            progress: after it.
            now: on the session's active clock.
            is_held_up: whether messages wait for room, with nothing else in flight than these.
        """
        if not is_held_up or progress.in_flight < self.size:
            self.forget_round()
        elif self._round is None and progress.in_flight == self.size and self._least < self._most:
            self._round = (progress, now)

    # ------------------------------------------------------------------ trials

    def _learn(self, rate: float) -> None:
        """So many a second are settled at the size there is."""
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
        """A look of a trial is over."""
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
        """Begin a trial in the direction that is taken."""
        probe = min(2 * self.size, self._most) if self._grows else max(self.size // 2, self._least)
        self._trial = Trial(self.size, probe)
        if probe == self.size:
            self._turn_round()

    def _turn_round(self) -> None:
        """There is nothing better in this direction: rest, then look into the other."""
        self._trial = self._expected = None
        self._grows = not self._grows
        self._rest_left, self._rest = self._rest, min(2 * self._rest, REST_MAX)

    def _rested(self, rate: float) -> None:
        """A look of a rest is over."""
        expected = self._expected or rate
        change = log(rate / expected)
        self._expected = expected * exp(SMOOTHING * change)
        self._rest_left -= 1
        if abs(change) > JUMP:
            self._grows, self._rest, self._rest_left = change > 0, REST_MIN, 0
        if self._rest_left <= 0:
            self._try_next()
