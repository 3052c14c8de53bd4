"""Metrics for Prometheus: a hook that counts events, and a collector that reads state at a scrape.

Knows: events, `Status`, an outbox's status, prometheus-client. Must never know: what a value is
used for.

Events are counted on the relay's thread, in plain numbers that no other thread writes. State (open
messages, messages in flight, oldest message) is read at the scrape, so nothing runs between
scrapes. The outbox is read on another thread: while its disk or its server hangs, the scrape waits
for a while, and then exposes the other values. A scrape that comes while another one reads the
outbox shares its values.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import threading
import time
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, Final, TypeAlias

from reliablepub.errors import (
    ConfigurationError,
    OutboxDiskFailed,
    OutboxDiskFull,
    OutboxFull,
    OutboxInUse,
    OutboxLocked,
    OutboxUnreachable,
    OutboxUnsure,
    PublisherClosed,
    RelayHeldUp,
)
from reliablepub.hooks import (
    AttemptBegun,
    AttemptEnded,
    LinkChanged,
    MessageGivenUp,
    MessagesRejected,
    MessageStored,
    Watched,
)
from reliablepub.observe.catalogue import (
    CATALOGUE,
    DELIVERY_BUCKETS_S,
    ENDINGS,
    LATENCY_BUCKETS_S,
    OUTBOX_LABEL,
    OUTCOMES,
    REASONS,
    Metric,
    Type,
)
from reliablepub.outbox.admin.inspection import OutboxStatus, read_status
from reliablepub.outbox.database import Database
from reliablepub.outbox.entry import Counters
from reliablepub.outbox.opening import Where, outbox_at
from reliablepub.relay.status import Link, Status
from reliablepub.version import installed_version

try:
    from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector
except ImportError as _missing:
    raise ImportError(
        "metrics need prometheus-client: install reliablepub with the extra observe"
    ) from _missing

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Sample: TypeAlias = tuple[str, str, float]
"""Name of the metric, value of its second label (or empty), and number."""

_VERSION: Final = installed_version() or "unknown"
_STATUS_COUNTERS: Final = {
    "reliablepub_connections_total": "connects",
    "reliablepub_contradictions_total": "violations",
    "reliablepub_stale_events_total": "stale",
    "reliablepub_callback_errors_total": "callback_errors",
    "reliablepub_relay_turns_total": "turns",
    "reliablepub_commits_total": "commits",
    "reliablepub_commit_seconds_total": "commit_s",
    "reliablepub_lock_wait_seconds_total": "lock_wait_s",
}
"""Fields of `Status` that only grow while a publisher is open."""


OUTBOX_WITHIN_S: Final = 8.0
"""How long a scrape waits for the outbox. Prometheus gives up after 10 s unless told otherwise."""
_UNREADABLE: Final = re.compile(rb"^reliablepub_outbox_readable\{.*\} 0\.0$", re.MULTILINE)
_REASONS: Final = (
    ("full", OutboxFull),
    ("disk_full", OutboxDiskFull),
    ("unsure", OutboxUnsure),
    ("disk_failed", OutboxDiskFailed),
    ("locked", OutboxLocked),
    ("unreachable", OutboxUnreachable),
    ("closed", PublisherClosed),
    ("held_up", RelayHeldUp),
)
"""Reason of a rejection by the class of its error; the first that fits."""


_rejecting = threading.RLock()
"""Held while a rejection is counted, which any thread may do. It is reentrant, so a signal handler
that interrupts its holder, and whose message is rejected too, does not wait for itself."""


def _forked() -> None:
    """Replace the lock in a forked child: the thread that held it may not exist there."""
    global _rejecting  # noqa: PLW0603
    _rejecting = threading.RLock()


os.register_at_fork(after_in_child=_forked)


class _Histogram:
    """Counts of durations by bucket. One thread observes; others read."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s  # upper bounds
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: Iterable[float]) -> None:
        """Count durations. Those of one batch are equal, and cost one search in the bounds."""
        last, at = -1.0, 0
        for one in seconds:
            if one != last:
                last, at = one, bisect_left(self._bounds_s, one)
            self._counts[at] += 1
            self._sum_s += one

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative buckets, and the sum in seconds."""
        limits = [*map(str, self._bounds_s), "+Inf"]
        return list(zip(limits, accumulate(self._counts), strict=True)), self._sum_s


class Metrics:
    """Prometheus metrics of one outbox, or of one publisher without an outbox.

    A `Metrics` is a hook of the publisher::

        metrics = Metrics("orders", outbox="outbox.db")
        Publisher(url, outbox="outbox.db", hooks=[metrics])

    A process that only enqueues may use it without a publisher (``Outbox(path, hooks=[metrics])``).
    It then exposes only the metrics of the file and the number of messages not accepted.

    Args:
        name: value of the label ``outbox``; unique in the registry.
        outbox: path of the outbox, to expose the metrics of the file (ledger, age of the oldest
            open message, disk).
        registry: registry in which the metrics are registered; prometheus-client's default
            registry unless given.

    Raises:
        ConfigurationError: the registry already has metrics with this name.
    """

    def __init__(
        self, name: str, *, outbox: Where | None = None, registry: CollectorRegistry = REGISTRY
    ) -> None:
        self.name: Final = name
        self._looking = None if outbox is None else _Looking(outbox_at(outbox))
        # Status counters of publishers that have ended, and the present publisher: one tuple, so
        # that a scrape never counts a publisher twice.
        self._watched: tuple[Counter[str], Watched | None] = (Counter(), None)
        self._stored = 0
        self._sent = 0
        self._ended: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self._given_up: dict[str, int] = dict.fromkeys(ENDINGS, 0)
        self._latencies = _Histogram(LATENCY_BUCKETS_S)
        self._deliveries = _Histogram(DELIVERY_BUCKETS_S)
        self._rejected: dict[str, int] = dict.fromkeys(REASONS, 0)
        # One tuple, so that a scrape sees both values change at once.
        self._blocked: tuple[float, float | None] = (0.0, None)
        self._blocked_told_s = 0.0
        self._board = _board_of(registry)
        self._board.add(self)

    def unregister(self) -> None:
        """Remove the metrics from the registry; the name can be used again."""
        self._board.remove(self)

    def watch(self, publisher: Watched) -> None:
        """Use the status of this publisher from now on.

        Raises:
            ConfigurationError: another publisher that is still open uses these metrics.
        """
        before, last = self._watched
        if last is not None:
            if not last.is_ended:
                raise ConfigurationError(
                    f"the metrics {self.name!r} are in use by another publisher; give this one "
                    "its own metrics"
                )
            before = before + Counter(
                {name: getattr(last.status, field) for name, field in _STATUS_COUNTERS.items()}
            )
            self._blocked = (self._blocked_s(), None)  # the last one may have ended while blocked
        self._watched = (before, publisher)

    # ------------------------------------------------------------ called on the relay's thread

    def on_stored(self, events: Sequence[MessageStored]) -> None:
        """Count accepted messages."""
        self._stored += len(events)

    def on_sent(self, events: Sequence[AttemptBegun]) -> None:
        """Count written messages."""
        self._sent += len(events)

    def on_confirmed(self, events: Sequence[AttemptEnded]) -> None:
        """Count confirmed attempts, with the latency of each and the time since it was stored."""
        self._ended["confirmed"] += len(events)
        self._latencies.observe([event.latency_s for event in events])
        now = time.time()
        self._deliveries.observe([max(0.0, now - event.stored_at) for event in events])

    def on_returned(self, events: Sequence[AttemptEnded]) -> None:
        """Count returned attempts."""
        self._ended["returned"] += len(events)

    def on_nacked(self, events: Sequence[AttemptEnded]) -> None:
        """Count nacked attempts."""
        self._ended["nacked"] += len(events)

    def on_refused(self, events: Sequence[AttemptEnded]) -> None:
        """Count refused attempts."""
        self._ended["refused"] += len(events)

    def on_uncertain(self, events: Sequence[AttemptEnded]) -> None:
        """Count uncertain attempts."""
        self._ended["uncertain"] += len(events)

    def on_parked(self, events: Sequence[MessageGivenUp]) -> None:
        """Count parked messages."""
        self._given_up["parked"] += len(events)

    def on_expired(self, events: Sequence[MessageGivenUp]) -> None:
        """Count expired messages."""
        self._given_up["expired"] += len(events)

    def on_discarded(self, events: Sequence[MessageGivenUp]) -> None:
        """Count discarded messages."""
        self._given_up["discarded"] += len(events)

    def on_blocked(self, events: Sequence[LinkChanged]) -> None:
        """Start the blocked time, unless it runs: a new reason of the block is an event too."""
        del events
        blocked_s, since = self._blocked
        self._blocked = (blocked_s, time.monotonic() if since is None else since)

    def on_unblocked(self, events: Sequence[LinkChanged]) -> None:
        """Stop the blocked time."""
        del events
        self._blocked = (self._blocked_s(), None)

    def on_disconnected(self, events: Sequence[LinkChanged]) -> None:
        """Stop the blocked time: a lost connection is not blocked."""
        self.on_unblocked(events)

    # ------------------------------------------------------------ called by any thread

    def rejected(self, event: MessagesRejected) -> None:
        """Count messages that were not accepted."""
        reason = next((name for name, kind in _REASONS if isinstance(event.error, kind)), "other")
        with _rejecting:
            self._rejected[reason] += event.count

    # ------------------------------------------------------------ called by a scrape

    def look(self) -> _Look | None:
        """Begin to read the outbox, for `samples`; None without an outbox."""
        return None if self._looking is None else self._looking.begun()

    def samples(self, look: _Look | None = None, until: float = math.inf) -> Iterator[Sample]:
        """All current values except the histograms; waits for a look, but not after ``until``."""
        yield "reliablepub_build_info", _VERSION, 1
        for reason, count in self._rejected.items():
            yield "reliablepub_rejected_messages_total", reason, count
        before, publisher = self._watched
        status: Status | None = None if publisher is None else publisher.status
        if publisher is not None and status is not None:
            yield from self._events()
            for name, field in _STATUS_COUNTERS.items():
                yield name, "", before[name] + getattr(status, field)
            if _is_at_work(publisher, status):
                yield from _states(status)
                yield "reliablepub_open_messages_limit", "", publisher.limits.messages_max
                yield "reliablepub_open_bytes_limit", "", publisher.limits.bytes_max
        if self._looking is not None:
            found = (look or self._looking.begun()).found(until)
            yield from _of_outbox(found)
        elif status is not None:
            yield from _ledger(status.counters)

    def histograms(self) -> Iterator[tuple[str, list[tuple[str, float]], float]]:
        """Name, cumulative buckets and sum of each histogram; none without a publisher."""
        if self._watched[1] is not None:
            yield "reliablepub_confirm_latency_seconds", *self._latencies.read()
            yield "reliablepub_delivery_seconds", *self._deliveries.read()

    def _events(self) -> Iterator[Sample]:
        yield "reliablepub_stored_messages_total", "", self._stored
        yield "reliablepub_sent_attempts_total", "", self._sent
        for outcome, count in self._ended.items():
            yield "reliablepub_ended_attempts_total", outcome, count
        for ending, count in self._given_up.items():
            yield "reliablepub_given_up_messages_total", ending, count
        yield "reliablepub_blocked_seconds_total", "", self._blocked_s()

    def _blocked_s(self) -> float:
        blocked_s, since = self._blocked
        if since is not None:
            until, publisher = time.monotonic(), self._watched[1]
            if publisher is not None and publisher.is_ended:  # nothing ends its block any more
                until -= publisher.status.turn_age_s
            blocked_s += max(0.0, until - since)
        # A counter never falls: the publisher's last turn may have begun before the last scrape.
        told_s = max(self._blocked_told_s, blocked_s)
        if told_s != self._blocked_told_s:
            self._blocked_told_s = told_s
        return told_s


def _is_at_work(publisher: Watched, status: Status) -> bool:
    """Whether a publisher has a state that is worth an alert.

    A publisher that has not begun, or that another relay has replaced, stands by. The gauges of a
    closed publisher vanish; those of a failed one stay, to be alerted on.
    """
    if not status.turns or isinstance(publisher.failure, OutboxInUse):
        return False
    return not publisher.is_ended or status.link is Link.FAILED


def _states(status: Status) -> Iterator[Sample]:
    yield "reliablepub_connected", "", status.link in (Link.CONNECTED, Link.BLOCKED)
    yield "reliablepub_blocked", "", status.link is Link.BLOCKED
    yield "reliablepub_in_flight_messages", "", status.in_flight
    yield "reliablepub_window_messages", "", status.window
    yield "reliablepub_buffered_messages", "", status.buffered
    yield "reliablepub_aside_messages", "", status.aside
    yield "reliablepub_paused_destinations", "", status.paused_destinations
    ends = [one.gives_up_at for one in status.paused if one.gives_up_at is not None]
    yield "reliablepub_give_up_timestamp_seconds", "", min(ends, default=0.0)
    yield "reliablepub_open_bytes", "", status.counters.open_bytes
    yield "reliablepub_last_turn_age_seconds", "", status.turn_age_s
    if status.certificate_ends_at is not None:
        yield "reliablepub_certificate_expiry_timestamp_seconds", "", status.certificate_ends_at
    yield "reliablepub_paused_messages", "", sum(one.waiting for one in status.paused)


class _Look:
    """One look at an outbox, on a thread of its own. Any number of scrapes may wait for it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._found: tuple[OutboxStatus, _Disk | None] | None = None
        self._done = threading.Event()
        self._pid = os.getpid()
        thread = threading.Thread(target=self._look, name="reliablepub-scrape", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process has no room for a thread, or ends
            self._look()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or was left in the parent of this forked process."""
        return self._done.is_set() or os.getpid() != self._pid

    def found(self, until: float) -> tuple[OutboxStatus, _Disk | None] | None:
        """What was found; None if the outbox cannot be read, or not by ``until`` (monotonic)."""
        left_s = until - time.monotonic()
        self._done.wait(None if left_s == math.inf else max(0.0, left_s))
        return self._found

    def _look(self) -> None:
        folder = None if self._database.file is None else self._database.file.parent
        with suppress(Exception):  # nothing in an outbox makes the scrape of a process fail
            disk = None if folder is None else shutil.disk_usage(folder)
            self._found = read_status(self._database), disk
        self._done.set()


_Disk: TypeAlias = Any
"""What `shutil.disk_usage` returns."""


class _Looking:
    """Begins looks at an outbox; while one is not over, no other."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._last: _Look | None = None

    def begun(self) -> _Look:
        """A look that has begun, perhaps by another scrape."""
        last = self._last
        if last is None or last.is_over:
            last = self._last = _Look(self._database)
        return last


def _of_outbox(look: tuple[OutboxStatus, _Disk | None] | None) -> Iterator[Sample]:
    """Values of the outbox."""
    if look is None:
        yield "reliablepub_outbox_readable", "", 0
        return
    found, disk = look
    yield "reliablepub_outbox_readable", "", 1
    yield "reliablepub_outbox_relayed", "", None not in found.relays
    yield from _ledger(found)
    oldest = found.oldest_open_at
    age_s = 0.0 if oldest is None else max(0.0, time.time() - oldest)
    yield "reliablepub_oldest_open_age_seconds", "", age_s
    yield "reliablepub_waiting_messages", "", found.waiting
    yield "reliablepub_held_ordering_keys", "", found.held_keys
    yield "reliablepub_outbox_size_bytes", "", found.bytes_on_disk
    yield "reliablepub_outbox_log_size_bytes", "", found.log_bytes
    yield "reliablepub_outbox_disk_full", "", found.is_disk_full
    if disk is not None:
        yield "reliablepub_outbox_disk_free_bytes", "", disk.free
        yield "reliablepub_outbox_disk_size_bytes", "", disk.total


def _ledger(counts: Counters | OutboxStatus) -> Iterator[Sample]:
    yield "reliablepub_open_messages", "", counts.open
    yield "reliablepub_parked_messages", "", counts.parked
    yield "reliablepub_expired_messages", "", counts.expired
    yield "reliablepub_ledger_stored_messages_total", "", counts.stored
    yield "reliablepub_ledger_confirmed_messages_total", "", counts.confirmed
    yield "reliablepub_ledger_discarded_messages_total", "", counts.discarded


def exposition(accept: str) -> tuple[str, bytes]:
    """Content type and body of the default registry, for a request's ``Accept`` header."""
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # raised for a header with a version that is no number
        encode, content_type = choose_encoder("")
    return content_type, encode(REGISTRY)


def exposition_of(name: str, outbox: Where) -> tuple[bytes, bool]:
    """An outbox's own metrics, for node_exporter's textfile collector; whether it is readable."""
    registry = CollectorRegistry(auto_describe=True)
    Metrics(name, outbox=outbox, registry=registry)
    _board_of(registry).within_s = math.inf
    text = generate_latest(registry)
    return text, _UNREADABLE.search(text) is None


# ---------------------------------------------------------------------- all of one registry


class _Board(Collector):
    """Collector of all `Metrics` of one registry: a metric family may be registered only once."""

    def __init__(self) -> None:
        self.within_s = OUTBOX_WITHIN_S  # a scrape waits so long for outboxes
        self._lock = threading.Lock()
        self._all: dict[str, Metrics] = {}

    def add(self, metrics: Metrics) -> None:
        """Add metrics to the registry's output; there may be none of this name."""
        with self._lock:
            if self._all.setdefault(metrics.name, metrics) is not metrics:
                raise ConfigurationError(
                    f"there are already metrics named {metrics.name!r}; give these another name, "
                    "or call unregister() on the first"
                )

    def remove(self, metrics: Metrics) -> None:
        """Remove metrics from the registry's output."""
        with self._lock:
            if self._all.get(metrics.name) is metrics:
                del self._all[metrics.name]

    def describe(self) -> Iterable[Family]:
        """Families without values, so that registering reads no outbox."""
        return [_family(metric) for metric in CATALOGUE]

    def collect(self) -> Iterable[Family]:
        """Families with the current values of all `Metrics`."""
        with self._lock:
            registered = list(self._all.values())
        families = {metric.name: _family(metric) for metric in CATALOGUE}
        until = time.monotonic() + self.within_s
        looks = [metrics.look() for metrics in registered]  # all begin before one is waited for
        for metrics, look in zip(registered, looks, strict=True):
            for name, value, number in metrics.samples(look, until):
                labels = [metrics.name, value] if value else [metrics.name]
                families[name].add_metric(labels, float(number))  # type: ignore[arg-type, call-arg]
            for name, buckets, sum_s in metrics.histograms():
                histogram = families[name]
                assert isinstance(histogram, HistogramMetricFamily)
                histogram.add_metric([metrics.name], buckets, sum_s)
        return [family for family in families.values() if family.samples]


_boards: Final[weakref.WeakKeyDictionary[CollectorRegistry, _Board]] = weakref.WeakKeyDictionary()
_boards_lock: Final = threading.Lock()


def _board_of(registry: CollectorRegistry) -> _Board:
    """The board of a registry; created and registered on first use."""
    with _boards_lock:
        board = _boards.get(registry)
        if board is None:
            board = _boards[registry] = _Board()
            registry.register(board)
        return board


def _family(metric: Metric) -> Family:
    labels = [OUTBOX_LABEL, metric.label] if metric.label else [OUTBOX_LABEL]
    match metric.type:
        case Type.COUNTER:
            return CounterMetricFamily(metric.name, metric.means, labels=labels)
        case Type.GAUGE:
            return GaugeMetricFamily(metric.name, metric.means, labels=labels)
        case Type.HISTOGRAM:
            return HistogramMetricFamily(metric.name, metric.means, labels=labels)
