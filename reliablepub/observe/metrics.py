"""Metrics for Prometheus: a hook that counts, and a collector that looks when it is scraped.

Knows: events, `Status`, an outbox's status, prometheus-client. Must never know: what is done about
a value, who asks for it.

What happens is counted on the relay's thread, in plain numbers that nobody else writes. What *is*
(open, in flight, the oldest) is read when a scrape asks for it, so nothing runs in between, and no
value is older than its scrape.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final, TypeAlias

from reliablepub.errors import ConfigurationError, ReliablePubError
from reliablepub.hooks import (
    AttemptBegun,
    AttemptEnded,
    LinkChanged,
    MessageGivenUp,
    MessageStored,
    Watched,
)
from reliablepub.observe.catalogue import (
    CATALOGUE,
    ENDINGS,
    LATENCY_BUCKETS_S,
    OUTBOX_LABEL,
    OUTCOMES,
    Metric,
    Type,
)
from reliablepub.outbox.admin.inspection import OutboxStatus, read_status
from reliablepub.outbox.entry import Counters
from reliablepub.outbox.sqlite.database import absolute
from reliablepub.relay.status import Link, Status

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector
except ImportError as error:
    msg = "metrics need prometheus-client: pip install 'reliablepub[observe]'"
    raise ImportError(msg) from error

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Sample: TypeAlias = tuple[str, str, float]
"""Name, value of the label besides the outbox's, and the value."""

_STATUS_COUNTERS: Final = {
    "reliablepub_connections_total": "connects",
    "reliablepub_contradictions_total": "violations",
    "reliablepub_stale_events_total": "stale",
    "reliablepub_callback_errors_total": "callback_errors",
    "reliablepub_relay_turns_total": "turns",
}
"""Fields of `Status` that only grow while one publisher is open."""


class Metrics:
    """Metrics of one outbox, or of one publisher without a disk.

    Give it to the publisher, which tells it what happens and shows it how it is doing::

        metrics = Metrics("orders", outbox="outbox.db")
        Publisher(url, outbox="outbox.db", hooks=[metrics])

    A process that only enqueues may have one without a publisher: it exposes what the file tells.

    Args:
        name: value of the label ``outbox``; each `Metrics` of a registry has its own.
        outbox: path of the file, to expose the ledger, the age of the backlog and the disk too.
        registry: where to register; prometheus-client's default one unless given.

    Raises:
        ConfigurationError: the registry has metrics of this name already.
    """

    def __init__(
        self,
        name: str,
        *,
        outbox: str | os.PathLike[str] | None = None,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self.name: Final = name
        self._outbox = None if outbox is None else absolute(outbox)
        self._publisher: Watched | None = None
        self._before: Counter[str] = Counter()  # of publishers that have ended
        self._stored = 0
        self._sent = 0
        self._ended: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self._given_up: dict[str, int] = dict.fromkeys(ENDINGS, 0)
        self._latencies = [0] * (len(LATENCY_BUCKETS_S) + 1)
        self._latency_sum_s = 0.0
        # One tuple, so that a scrape sees both or neither change.
        self._blocked: tuple[float, float | None] = (0.0, None)
        self._board = _board_of(registry)
        self._board.add(self)

    def unregister(self) -> None:
        """Expose nothing more; the name is free again."""
        self._board.remove(self)

    # ------------------------------------------------------------------ told on the relay's thread

    def watch(self, publisher: Watched) -> None:
        """Look at this publisher from now on; at one at a time.

        Raises:
            ConfigurationError: they are another publisher's, which is open.
        """
        last = self._publisher
        if last is not None:
            if not last.is_ended:
                msg = f"the metrics {self.name!r} are another publisher's; give this one its own"
                raise ConfigurationError(msg)
            self._before += Counter(
                {name: getattr(last.status, field) for name, field in _STATUS_COUNTERS.items()}
            )
        self._publisher = publisher

    def on_stored(self, events: Sequence[MessageStored]) -> None:
        """Count them."""
        self._stored += len(events)

    def on_sent(self, events: Sequence[AttemptBegun]) -> None:
        """Count them."""
        self._sent += len(events)

    def on_confirmed(self, events: Sequence[AttemptEnded]) -> None:
        """Count them, and how long they took."""
        self._ended["confirmed"] += len(events)
        for event in events:
            self._latencies[bisect_left(LATENCY_BUCKETS_S, event.latency_s)] += 1
            self._latency_sum_s += event.latency_s

    def on_returned(self, events: Sequence[AttemptEnded]) -> None:
        """Count them."""
        self._ended["returned"] += len(events)

    def on_nacked(self, events: Sequence[AttemptEnded]) -> None:
        """Count them."""
        self._ended["nacked"] += len(events)

    def on_refused(self, events: Sequence[AttemptEnded]) -> None:
        """Count them."""
        self._ended["refused"] += len(events)

    def on_uncertain(self, events: Sequence[AttemptEnded]) -> None:
        """Count them."""
        self._ended["uncertain"] += len(events)

    def on_parked(self, events: Sequence[MessageGivenUp]) -> None:
        """Count them."""
        self._given_up["parked"] += len(events)

    def on_expired(self, events: Sequence[MessageGivenUp]) -> None:
        """Count them."""
        self._given_up["expired"] += len(events)

    def on_discarded(self, events: Sequence[MessageGivenUp]) -> None:
        """Count them."""
        self._given_up["discarded"] += len(events)

    def on_blocked(self, events: Sequence[LinkChanged]) -> None:
        """The time begins to count; another reason is no other beginning."""
        del events
        blocked_s, since = self._blocked
        self._blocked = (blocked_s, time.monotonic() if since is None else since)

    def on_unblocked(self, events: Sequence[LinkChanged]) -> None:
        """The time is over."""
        del events
        self._blocked = (self._blocked_s(), None)

    def on_disconnected(self, events: Sequence[LinkChanged]) -> None:
        """A connection that is gone is not blocked."""
        self.on_unblocked(events)

    # ------------------------------------------------------------------ asked by a scrape

    def samples(self) -> Iterator[Sample]:
        """What is exposed now, but for the histogram."""
        publisher = self._publisher
        status: Status | None = None if publisher is None else publisher.status
        if publisher is not None and status is not None:
            yield from self._events()
            for name, field in _STATUS_COUNTERS.items():
                yield name, "", self._before[name] + getattr(status, field)
            if not publisher.is_ended or status.link is Link.FAILED:  # which has to be seen
                yield from _states(status)
        if self._outbox is not None:
            yield from _of_file(self._outbox)
        elif status is not None:
            yield from _ledger(status.counters)

    def latencies(self) -> tuple[list[tuple[str, float]], float] | None:
        """The buckets of the histogram, cumulative, and the sum; None without a publisher."""
        if self._publisher is None:
            return None
        limits = [*map(str, LATENCY_BUCKETS_S), "+Inf"]
        return list(zip(limits, accumulate(self._latencies), strict=True)), self._latency_sum_s

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
        return blocked_s if since is None else blocked_s + time.monotonic() - since


def _states(status: Status) -> Iterator[Sample]:
    yield "reliablepub_connected", "", status.link in (Link.CONNECTED, Link.BLOCKED)
    yield "reliablepub_blocked", "", status.link is Link.BLOCKED
    yield "reliablepub_in_flight_messages", "", status.in_flight
    yield "reliablepub_window_messages", "", status.window
    yield "reliablepub_buffered_messages", "", status.buffered
    yield "reliablepub_aside_messages", "", status.aside
    yield "reliablepub_paused_destinations", "", status.paused_destinations
    yield "reliablepub_paused_messages", "", sum(one.waiting for one in status.paused)


def _of_file(path: Path) -> Iterator[Sample]:
    """What the file tells; a scrape does not fail because it cannot be read."""
    try:
        found = read_status(path)
        free = shutil.disk_usage(path.parent).free
    except (ReliablePubError, OSError):
        yield "reliablepub_outbox_readable", "", 0
        return
    yield "reliablepub_outbox_readable", "", 1
    yield "reliablepub_outbox_relayed", "", found.relay is not None
    yield from _ledger(found)
    oldest = found.oldest_open_at
    age_s = 0.0 if oldest is None else max(0.0, time.time() - oldest)
    yield "reliablepub_oldest_open_age_seconds", "", age_s
    yield "reliablepub_waiting_messages", "", found.waiting
    yield "reliablepub_held_ordering_keys", "", found.held_keys
    yield "reliablepub_outbox_size_bytes", "", found.bytes_on_disk
    yield "reliablepub_outbox_log_size_bytes", "", found.log_bytes
    yield "reliablepub_outbox_disk_full", "", found.is_disk_full
    yield "reliablepub_outbox_disk_free_bytes", "", free


def _ledger(counts: Counters | OutboxStatus) -> Iterator[Sample]:
    yield "reliablepub_open_messages", "", counts.open
    yield "reliablepub_parked_messages", "", counts.parked
    yield "reliablepub_expired_messages", "", counts.expired
    yield "reliablepub_ledger_stored_messages_total", "", counts.stored
    yield "reliablepub_ledger_confirmed_messages_total", "", counts.confirmed
    yield "reliablepub_ledger_discarded_messages_total", "", counts.discarded


def exposition(accept: str) -> tuple[str, bytes]:
    """The default registry in the format that a scraper asks for, as content type and text."""
    encode, content_type = choose_encoder(accept)
    return content_type, encode(REGISTRY)


# ---------------------------------------------------------------------- all of one registry


class _Board(Collector):
    """All `Metrics` of one registry, exposed together: a metric may be described only once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[str, Metrics] = {}

    def add(self, metrics: Metrics) -> None:
        """Expose it too."""
        with self._lock:
            if self._all.setdefault(metrics.name, metrics) is not metrics:
                msg = (
                    f"there are metrics of the name {metrics.name!r} already; give these another "
                    "name, or call unregister() on the first"
                )
                raise ConfigurationError(msg)

    def remove(self, metrics: Metrics) -> None:
        """Expose it no more."""
        with self._lock:
            if self._all.get(metrics.name) is metrics:
                del self._all[metrics.name]

    def describe(self) -> Iterable[Family]:
        """Only names; so registering reads no outbox."""
        return [_family(metric) for metric in CATALOGUE]

    def collect(self) -> Iterable[Family]:
        """Look at all of them."""
        with self._lock:
            everybody = list(self._all.values())
        families = {metric.name: _family(metric) for metric in CATALOGUE}
        for metrics in everybody:
            for name, value, number in metrics.samples():
                labels = [metrics.name, value] if value else [metrics.name]
                families[name].add_metric(labels, float(number))  # type: ignore[arg-type, call-arg]
            latencies = metrics.latencies()
            if latencies is not None:
                histogram = families["reliablepub_confirm_latency_seconds"]
                assert isinstance(histogram, HistogramMetricFamily)
                histogram.add_metric([metrics.name], *latencies)
        return [family for family in families.values() if family.samples]


_boards: Final[weakref.WeakKeyDictionary[CollectorRegistry, _Board]] = weakref.WeakKeyDictionary()
_boards_lock: Final = threading.Lock()


def _board_of(registry: CollectorRegistry) -> _Board:
    """The one of this registry, which is registered when it is first asked for."""
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
