"""How a publisher is doing: one frozen `Status` a turn, and when other processes are shown it.

Knows: counts, words, durations, and times it is told. Must never know: how they are used, where
they are shown.

Confirm latencies are counted in classes, eight to a doubling, so a percentile is at most 9 % too
high, and any number of confirms takes the same little memory. Confirms come in runs: what is
settled in one turn and was written in one batch took the same time, and costs one comparison.

Other processes are shown a status at once when the connection changes, otherwise once a second at
most, and never while nothing changes: an idle relay writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from math import log2
from typing import Final

from reliablepub.outbox.entry import Counters
from reliablepub.printable import one_line

SPAN_S: Final = 30.0
"""How long a generation is counted; the last two are told."""
_PER_DOUBLING: Final = 8
_SHORTEST_S: Final = 1e-5
_CLASSES: Final = 240
"""Up to three hours."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """What half, 95 % and 99 % of the confirms have kept to.

    Attributes:
        confirms: how many are counted.
        p50_s: seconds.
        p95_s: seconds.
        p99_s: seconds.
        max_s: seconds; no confirm took longer.
    """

    confirms: int
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float


class Latencies:
    """Counts durations."""

    def __init__(self) -> None:
        self._run_s = -1.0
        self._run = 0
        self._now = [0] * _CLASSES
        self._before = [0] * _CLASSES
        self._begun_at: float | None = None

    def took(self, seconds: float, messages: int) -> None:
        """So many messages were confirmed so long after they were written."""
        if seconds != self._run_s:
            self._count_run()
            self._run_s = seconds
        self._run += messages

    def told(self, now: float) -> Percentiles | None:
        """The percentiles; None if nothing was confirmed of late.

        Args:
            now: monotonic seconds.
        """
        self._count_run()
        if self._begun_at is None:
            self._begun_at = now
        spans = (now - self._begun_at) // SPAN_S
        if spans >= 1:
            self._before = self._now if spans < 2 else [0] * _CLASSES  # noqa: PLR2004 - both are over
            self._now = [0] * _CLASSES
            self._begun_at += spans * SPAN_S
        counts = [new + old for new, old in zip(self._now, self._before, strict=True)]
        total = sum(counts)
        if not total:
            return None
        p50, p95, p99, most = (
            _limit_s(_class_of(counts, share * total)) for share in (0.5, 0.95, 0.99, 1.0)
        )
        return Percentiles(total, p50, p95, p99, most)

    def _count_run(self) -> None:
        if self._run:
            doublings = log2(max(self._run_s, _SHORTEST_S) / _SHORTEST_S)
            self._now[min(int(doublings * _PER_DOUBLING), _CLASSES - 1)] += self._run
            self._run, self._run_s = 0, -1.0


def _class_of(counts: list[int], rank: float) -> int:
    """The class in which the message of this rank is."""
    below = 0
    for number, count in enumerate(counts):
        below += count
        if count and below >= rank:
            return number
    raise AssertionError("no rank is higher than the count")


def _limit_s(number: int) -> float:
    """No duration of a class is longer."""
    return float(_SHORTEST_S * 2.0 ** ((number + 1) / _PER_DOUBLING))


_PAUSES_TOLD: Final = 3


class Link(StrEnum):
    """Where the connection to the broker stands."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    BLOCKED = "blocked"
    DISCONNECTED = "disconnected"
    FAILED = "failed"
    """The relay has failed, and there is no connection any more."""


@dataclass(frozen=True, slots=True)
class Paused:
    """A destination that is paused (`Breaker`).

    Attributes:
        exchange: to which nothing is sent for now.
        routing_key: with which nothing is sent there; None where it is the whole exchange.
        refusals: so many in a row; 0 once one was confirmed, or when an earlier run has paused it.
        probe_in_s: seconds until the next message is tried there.
        since: wall clock, seconds since 1970.
        reason: the last refusal, with the broker's words.
        waiting: messages that wait for it; those that expire or that a person takes are counted
            until the next probe.
    """

    exchange: str
    routing_key: str | None
    refusals: int
    probe_in_s: float
    since: float
    reason: str
    waiting: int


@dataclass(frozen=True, slots=True)
class Status:
    """A publisher at one moment.

    Attributes:
        link: where the connection stands.
        reason: why it is blocked, was last lost, or has failed; while there is a connection,
            `trouble`; empty when there is nothing to say.
        counters: the ledger, of everybody who uses the outbox.
        in_flight: messages written and not settled.
        window: most messages in flight for now.
        buffered: messages in memory, waiting for the window.
        connects: connections made so far.
        violations: confirms and returns that made no sense.
        stale: events of channels that were over.
        aside: messages set aside: every connection was lost while one of them was alone in flight,
            and the broker blames none. They are tried again, alone, after waits up to a minute.
        is_flushed: of a status that ``flush`` gives: whether all that it waits for is settled.
        paused: destinations to which nothing is sent for now (`Breaker`), those first that were
            paused first; at most 100 of them.
        paused_destinations: how many there are.
        hooks_off: why pika is used by its public interface alone, which is slower and just as safe:
            another version than those tested, or a hook that has failed. Empty while all is well.
        callback_errors: how often a callback of the application's has raised.
        trouble: why the outbox takes or records nothing for now, such as "disk full: ..."; empty
            when it does.
        is_refused: whether the broker refuses the credentials or the vhost, or TLS the other side;
            `reason` says which. It is tried again, but helps only when one of the sides is changed.
        turns: how many turns the relay has taken. An idle one takes some every second; when the
            number stands still, the relay does. Statuses that differ in nothing else are equal.
    """

    link: Link = Link.DISCONNECTED
    reason: str = ""
    counters: Counters = field(default_factory=Counters)
    in_flight: int = 0
    window: int = 0
    buffered: int = 0
    connects: int = 0
    violations: int = 0
    stale: int = 0
    aside: int = 0
    is_flushed: bool = False
    paused: tuple[Paused, ...] = ()
    paused_destinations: int = 0
    hooks_off: str = ""
    callback_errors: int = 0
    trouble: str = ""
    is_refused: bool = False
    turns: int = field(default=0, compare=False)

    @property
    def open(self) -> int:
        """Messages accepted and not yet settled."""
        return self.counters.open


def waits_for(status: Status) -> list[str]:
    """Why messages stay open, as far as the relay knows: each in one line, few of them."""
    told = []
    if status.link is not Link.CONNECTED:
        told.append(f"the publisher is {status.link}" + (status.reason and f": {status.reason}"))
    elif status.trouble:
        told.append(status.trouble)
    for one in status.paused[:_PAUSES_TOLD]:
        where = f"exchange {one.exchange!r}"
        if one.routing_key is not None:
            where += f", routing key {one.routing_key!r}"
        told.append(f"{where} is paused, {one.waiting} messages wait: {one.reason}")
    if status.paused_destinations > _PAUSES_TOLD:
        told.append(f"{status.paused_destinations - _PAUSES_TOLD} more destinations are paused")
    return [one_line(line) for line in told]


def described(failure: BaseException) -> str:
    """Why a relay has failed, in one line."""
    said = one_line(str(failure))
    return f"the relay has failed: {type(failure).__name__}{': ' if said else ''}{said}"


EVERY_S: Final = 1.0
PAUSED_SHOWN: Final = 10


class Beacon:
    """Shows what is new.

    Args:
        show: takes the picture.
        latency: how long confirms took of late; asked for each picture, and not for each turn.
        wall: wall clock, seconds since 1970.
        monotonic: monotonic clock, seconds.
    """

    def __init__(
        self,
        show: Callable[[Mapping[str, object]], None],
        latency: Callable[[], Percentiles | None],
        *,
        wall: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._show = show
        self._latency = latency
        self._wall = wall
        self._monotonic = monotonic
        self._last: Status | None = None
        self._next_at = 0.0
        self._where: tuple[str, str] | None = None
        self._since = 0.0

    def turned(self, status: Status) -> None:
        """The relay has taken a turn."""
        last, now = self._last, self._monotonic()
        if status is last or status == last:
            return
        # To be trying again is no news, and a relay without a broker does little else.
        link = Link.DISCONNECTED if status.link is Link.CONNECTING else status.link
        where = (link.value, status.reason)
        is_new_link = where != self._where
        if not is_new_link and now < self._next_at:
            return
        wall = self._wall()
        if is_new_link:
            self._where, self._since = where, wall
        self._last, self._next_at = status, now + EVERY_S
        latency = self._latency()
        self._show(_picture(replace(status, link=link), wall, self._since, latency))


def failed_status(status: Status, wall: float) -> Mapping[str, object]:
    """What is shown of a relay that has failed, until there is another one."""
    return _picture(status, wall, wall, None)


def _picture(
    status: Status, wall: float, since: float, latency: Percentiles | None
) -> Mapping[str, object]:
    return {
        "at": wall,
        "link": status.link.value,
        "reason": status.reason,
        "since": since,
        "in_flight": status.in_flight,
        "window": status.window,
        "buffered": status.buffered,
        "aside": status.aside,
        "hooks_off": status.hooks_off,
        "connects": status.connects,
        "violations": status.violations,
        "stale": status.stale,
        "latency": None if latency is None else asdict(latency),
        "paused": [asdict(paused) for paused in status.paused[:PAUSED_SHOWN]],
        "paused_destinations": status.paused_destinations,
    }
