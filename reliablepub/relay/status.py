"""The publisher's status: a frozen `Status` per turn, and when to write it to the status file.

Knows: counts, texts, durations, and the times passed to it. Must never know: how a status is used,
where it is stored.
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
"""How long a generation of latencies is counted. Percentiles cover the last two generations."""
_PER_DOUBLING: Final = 8
_SHORTEST_S: Final = 1e-5
_CLASSES: Final = 240
"""240 classes reach up to three hours."""


@dataclass(slots=True)
class Percentiles:
    """Percentiles of confirm latencies, at most 9 % too high."""

    confirms: int
    p50_s: float  # half of the confirms took at most so long
    p95_s: float
    p99_s: float
    max_s: float


class Latencies:
    """A histogram of confirm latencies.

    It has eight classes per doubling, so a percentile is at most 9 % too high, and memory does not
    grow with the number of confirms. Confirms that are settled in one turn, and were written in one
    batch, have the same latency, so a run of them costs one comparison.
    """

    def __init__(self) -> None:
        self._run_s = -1.0
        self._run = 0
        self._new = [0] * _CLASSES  # since the last `told`
        self._now = [0] * _CLASSES
        self._before = [0] * _CLASSES
        self._begun_at: float | None = None

    def took(self, seconds: float, messages: int) -> None:
        """Count confirms, all with the same time from the write to the confirm."""
        if seconds != self._run_s:
            self._count_run()
            self._run_s = seconds
        self._run += messages

    def told(self, now: float) -> Percentiles | None:
        """The percentiles of the last 30 to 60 seconds; None if there were no confirms."""
        self._count_run()
        if self._begun_at is None:
            self._begun_at = now
        spans = (now - self._begun_at) // SPAN_S
        if spans >= 1:
            self._before = self._now if spans < 2 else [0] * _CLASSES  # noqa: PLR2004 - both are over
            self._now = [0] * _CLASSES
            self._begun_at += spans * SPAN_S
        # Only now: after a minute without confirms, the first one would be dropped with the old.
        self._now = [new + old for new, old in zip(self._new, self._now, strict=True)]
        self._new = [0] * _CLASSES
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
            self._new[min(int(doublings * _PER_DOUBLING), _CLASSES - 1)] += self._run
            self._run, self._run_s = 0, -1.0


def _class_of(counts: list[int], rank: float) -> int:
    """The class that holds the message of this rank."""
    below = 0
    for number, count in enumerate(counts):
        below += count
        if count and below >= rank:
            return number
    raise AssertionError("no rank is higher than the count")


def _limit_s(number: int) -> float:
    """The upper limit of a class, in seconds."""
    return float(_SHORTEST_S * 2.0 ** ((number + 1) / _PER_DOUBLING))


_PAUSES_TOLD: Final = 3


class Link(StrEnum):
    """The state of the connection to the broker."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    BLOCKED = "blocked"
    DISCONNECTED = "disconnected"
    FAILED = "failed"
    """The relay has failed and closed the connection."""


@dataclass(frozen=True, slots=True)
class Paused:
    """A paused destination (`Breaker`).

    Attributes:
        exchange: the exchange to which nothing is sent for now.
        routing_key: the routing key with which nothing is sent there; None for all of them.
        refusals: consecutive refusals; 0 once a message has been confirmed, or if an earlier run of
            the relay paused the destination.
        probe_in_s: seconds until the next message is sent as a probe.
        since: when the destination was paused; wall clock, seconds since 1970.
        reason: the last refusal, with the broker's reply text.
        waiting: messages that wait for the destination. Messages that expire, could not be stored,
            or are parked or discarded by an operator are counted until the next probe.
        user_id: the ``user_id`` whose messages wait, whatever their exchange; None if an exchange
            is paused.
        gives_up_at: when the budget of the first of these messages ends: it is given up if the next
            probe is refused, too. Wall clock, seconds since 1970; None if the budget is not a time.
    """

    exchange: str
    routing_key: str | None
    refusals: int
    probe_in_s: float
    since: float
    reason: str
    waiting: int
    user_id: str | None = None
    gives_up_at: float | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a publisher at one moment.

    Attributes:
        link: state of the connection.
        reason: why the connection is blocked, was last lost, or has failed. While connected: the
            same text as ``trouble``, or which message the damaged outbox file hides from the relay.
            Empty if there is nothing to report.
        counters: the ledger of the outbox, across all processes that use it.
        in_flight: messages written and not yet settled.
        window: current limit of messages in flight.
        buffered: messages in memory that wait for room in the window.
        connects: connections made so far.
        server: host and port of the broker that the last connection was made to; empty before the
            first one. Ignored when statuses are compared.
        violations: confirms and returns from the broker that match no message in flight.
        stale: events from channels that had already ended.
        aside: messages set aside: whenever one of them was the only message in flight, its channel
            or the connection ended, and nothing has shown that the message alone is at fault. Each
            is retried alone, after waits of up to a minute, or once another message to its exchange
            is accepted.
        aside_reason: why the last of them was set aside, in the broker's words if it gave a reason.
        is_flushed: in the status that ``flush`` returns, whether all messages that ``flush`` waits
            for are settled.
        paused: destinations to which nothing is sent for now (`Breaker`), the oldest pause first;
            at most 100.
        paused_destinations: number of all paused destinations.
        hooks_off: why pika is used through its public interface only, which is slower but equally
            safe: an untested version of pika, or a hook into pika that failed. Empty if the hooks
            are on.
        certificate_ends_at: when the client certificate in use expires, in seconds since 1970; None
            if that is not known. It is known only for `CertificateFiles`.
        rate_max: maximum number of messages sent per second; None for no limit but the window.
        callback_errors: number of exceptions raised by the application's callbacks.
        trouble: why the outbox accepts or records nothing for now, such as "disk full: ...";
            otherwise empty.
        refusals: consecutive attempts to connect in which the broker refused the credentials or the
            vhost, or TLS verification failed; ``reason`` says which. 0 if the last attempt was not
            refused. The publisher keeps trying, but only a change to its configuration or the
            broker's helps. Ignored when statuses are compared.
        commits: number of commits so far. Ignored when statuses are compared.
        commit_s: seconds spent in commits so far, waits for the lock included. Ignored when
            statuses are compared.
        lock_wait_s: of ``commit_s``, seconds spent waiting for SQLite's lock, held by another
            process or the application. Ignored when statuses are compared.
        turns: number of turns taken by the relay. An idle relay takes at least two per second; if
            the number does not grow, the relay is stuck. Ignored when statuses are compared.
        turn_age_s: seconds since the last turn began; 0 before the first one. If it exceeds a few
            seconds, the relay is stuck. Ignored when statuses are compared.
        trying: host and port of the broker to which a connection is being made; otherwise empty.
            Ignored when statuses are compared.
        counters_at_start: the ledger when this publisher took over the outbox, before it sent
            anything. Ignored when statuses are compared.
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
    aside_reason: str = ""
    is_flushed: bool = False
    paused: tuple[Paused, ...] = ()
    paused_destinations: int = 0
    hooks_off: str = ""
    certificate_ends_at: float | None = None
    rate_max: float | None = None
    callback_errors: int = 0
    trouble: str = ""
    refusals: int = field(default=0, compare=False)
    commits: int = field(default=0, compare=False)
    commit_s: float = field(default=0.0, compare=False)
    lock_wait_s: float = field(default=0.0, compare=False)
    server: str = field(default="", compare=False)
    turns: int = field(default=0, compare=False)
    turn_age_s: float = field(default=0.0, compare=False)
    trying: str = field(default="", compare=False)
    counters_at_start: Counters = field(default_factory=Counters, compare=False)

    @property
    def open(self) -> int:
        """Number of messages accepted and not yet settled."""
        return self.counters.open


class Outage:
    """The reasons seen during one outage: with several hosts, the reasons of failures alternate."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()

    def is_new(self, reason: str) -> bool:
        """Whether this reason is new since the last `end`; from now on it is not."""
        if reason in self._reasons:
            return False
        if len(self._reasons) < REASONS_MAX:
            self._reasons.add(reason)
        return True

    def end(self) -> None:
        """Forget the reasons, because the relay is connected again."""
        self._reasons.clear()


def waits_for(status: Status) -> list[str]:
    """The reasons, as far as the relay knows, why messages stay open: a few lines of text."""
    told = []
    if status.link is not Link.CONNECTED:
        to = f" to {status.trying}" if status.trying and not status.reason else ""
        why = f": {status.reason}" if status.reason else ""
        told.append(f"the publisher is {status.link}{to}{why}")
    elif said := status.trouble or status.reason:
        told.append(said)
    if status.aside:
        count = "1 message is" if status.aside == 1 else f"{status.aside} messages are"
        told.append(f"{count} set aside, to be tried alone: {status.aside_reason}")
    for one in status.paused[:_PAUSES_TOLD]:
        where = f"exchange {one.exchange!r}"
        if one.routing_key is not None:
            where += f", routing key {one.routing_key!r}"
        if one.user_id is not None:
            where = f"user_id {one.user_id!r}"
        wait = "1 message waits" if one.waiting == 1 else f"{one.waiting} messages wait"
        told.append(f"{where} is paused, {wait}: {one.reason}")
    if status.paused_destinations > _PAUSES_TOLD:
        told.append(f"{status.paused_destinations - _PAUSES_TOLD} more destinations are paused")
    return [one_line(line) for line in told]


def described(failure: BaseException) -> str:
    """A failure of the relay, described in one line."""
    said = one_line(str(failure))
    return f"the relay has failed: {type(failure).__name__}{': ' if said else ''}{said}"


EVERY_S: Final = 1.0
BEAT_S: Final = 10.0
"""Interval at which an unchanged status is written while messages are open."""
SILENT_S: Final = 30.0
"""Age of a status, while messages are open, from which the relay counts as hanging."""
PAUSED_SHOWN: Final = 10
REASONS_MAX: Final = 100
"""Most reasons that an `Outage` remembers; a further one is new each time."""
_REASON_MAX: Final = 2_000
"""Characters of a reason that are written: the text of an exception can be of any length."""


class Beacon:
    """Decides when to write the status file, through which other processes see the relay's status.

    It is written at once when the connection changes; otherwise at most once a second, and only if
    the status has changed, so that an idle relay writes nothing. While messages are open, it is
    written every `BEAT_S` seconds: an old status then means that the relay takes no turns.
    """

    def __init__(
        self,
        show: Callable[[Mapping[str, object]], None],
        latency: Callable[[], Percentiles | None],  # called once a write
        lasts: Mapping[str, float],  # seconds for which a message is retried, by outcome
        *,
        wall: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._show = show
        self._latency = latency
        self._lasts = lasts
        self._wall = wall
        self._monotonic = monotonic
        self._last: Status | None = None
        self._next_at = self._beat_at = 0.0
        self._where: tuple[Link, str] | None = None
        self._since = 0.0

    def turned(self, status: Status) -> None:
        """Write the status file if it is time to. Called after each turn of the relay."""
        now = self._monotonic()
        # Another attempt to connect is no change: without a broker, the relay makes many.
        link = Link.DISCONNECTED if status.link is Link.CONNECTING else status.link
        where = (link, status.reason)
        is_new_link = where != self._where
        if not is_new_link and (now < self._next_at or not self._has_news(status, now)):
            return
        wall = self._wall()
        if self._begins(link, status.reason):
            self._since = wall
        self._where = where
        self._last, self._next_at, self._beat_at = status, now + EVERY_S, now + BEAT_S
        latency = self._latency()
        shown = replace(status, link=link)
        self._show(_contents(shown, wall, self._since, latency, self._lasts))

    def _has_news(self, status: Status, now: float) -> bool:
        return status != self._last or (status.open > 0 and now >= self._beat_at)

    def _begins(self, link: Link, reason: str) -> bool:
        """Whether a state begins now that its reader wants the age of."""
        if self._where is None or link is not self._where[0]:
            return True
        # Otherwise another reason begins no outage: of several hosts, each fails for its own.
        return link is Link.CONNECTED and reason != self._where[1]


def silent_s(shown: Mapping[str, object], oldest_open_at: float | None, now: float) -> float | None:
    """For how long a relay has shown no sign of life; None if it has, or has nothing to do.

    Only for a relay on this host, whose clock wrote the times.
    """
    at = shown.get("at")
    if not isinstance(at, int | float) or oldest_open_at is None:
        return None
    # An idle relay writes nothing, so its status is old at the moment of the next message.
    is_silent = now - at > SILENT_S and now - oldest_open_at > SILENT_S
    return now - at if is_silent else None


def failed_status(status: Status, wall: float) -> Mapping[str, object]:
    """The contents of the status file of a relay that has failed, until another one starts."""
    return _contents(status, wall, wall, None, {})


def _contents(
    status: Status,
    wall: float,
    since: float,
    latency: Percentiles | None,
    lasts: Mapping[str, float],
) -> Mapping[str, object]:
    """What is shown; `outbox/shown.py` has the types of these fields, and refuses others."""
    return {
        "at": wall,
        "link": status.link.value,
        "reason": status.reason[:_REASON_MAX],
        "server": status.server,
        "since": since,
        "in_flight": status.in_flight,
        "window": status.window,
        "rate_max": status.rate_max,
        "buffered": status.buffered,
        "aside": status.aside,
        "hooks_off": status.hooks_off,
        "trying": status.trying,
        "connects": status.connects,
        "violations": status.violations,
        "stale": status.stale,
        "latency": None if latency is None else asdict(latency),
        "lasts": lasts,
        "paused": [asdict(paused) for paused in status.paused[:PAUSED_SHOWN]],
        "paused_destinations": status.paused_destinations,
    }
