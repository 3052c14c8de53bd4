"""The value of each metric: every source has a number of its own, which is found where it belongs.

A metric that is always 0, or that shows the number of another, passes every test of names.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from reliablepub.hooks import MessagesRejected
from reliablepub.observe import metrics as module
from reliablepub.observe.catalogue import CATALOGUE, LATENCY_BUCKETS_S
from reliablepub.observe.metrics import Metrics
from reliablepub.outbox.admin.inspection import OutboxStatus
from reliablepub.outbox.entry import Counters
from reliablepub.relay.status import Link, Paused, Status

NOW = 2_000_000_000.0
STATUS = Status(
    link=Link.BLOCKED,
    counters=Counters(
        stored=900, confirmed=300, parked=80, expired=70, discarded=60, open_bytes=11
    ),
    in_flight=12,
    window=13,
    buffered=14,
    connects=15,
    violations=16,
    stale=17,
    aside=18,
    paused=(
        Paused("x", None, 1, probe_in_s=1, since=NOW, reason="", waiting=19, gives_up_at=20.5),
        Paused("y", None, 1, probe_in_s=1, since=NOW, reason="", waiting=1, gives_up_at=20.25),
        Paused("z", None, 1, probe_in_s=1, since=NOW, reason="", waiting=0),
    ),
    paused_destinations=21,
    certificate_ends_at=22.0,
    callback_errors=23,
    commits=24,
    commit_s=25.5,
    lock_wait_s=26.5,
    turns=27,
    turn_age_s=28.5,
)
OUTBOX = OutboxStatus(
    stored=901,
    open=41,
    in_flight=42,
    confirmed=43,
    parked=44,
    expired=45,
    discarded=46,
    waiting=47,
    held_keys=48,
    oldest_open_at=NOW - 49,
    relay=1,
    bytes_on_disk=50,
    log_bytes=51,
    is_disk_full=True,
    relays=(1,),
)
VALUES = {
    "build_info": 1,
    "stored_messages_total": 61,
    "sent_attempts_total": 62,
    "ended_attempts_total confirmed": 3,
    "ended_attempts_total returned": 63,
    "ended_attempts_total nacked": 64,
    "ended_attempts_total refused": 65,
    "ended_attempts_total uncertain": 66,
    "given_up_messages_total parked": 67,
    "given_up_messages_total expired": 68,
    "given_up_messages_total discarded": 69,
    "rejected_messages_total other": 70,
    "blocked_seconds_total": 71.5,
    "confirm_latency_seconds_count": 3,
    "confirm_latency_seconds_sum": 6.75,
    "delivery_seconds_count": 3,
    "delivery_seconds_sum": 99,
    "connected": 1,
    "blocked": 1,
    "in_flight_messages": 12,
    "window_messages": 13,
    "buffered_messages": 14,
    "connections_total": 15,
    "contradictions_total": 16,
    "stale_events_total": 17,
    "aside_messages": 18,
    "paused_messages": 20,
    "paused_destinations": 21,
    "give_up_timestamp_seconds": 20.25,
    "certificate_expiry_timestamp_seconds": 22,
    "callback_errors_total": 23,
    "commits_total": 24,
    "commit_seconds_total": 25.5,
    "lock_wait_seconds_total": 26.5,
    "relay_turns_total": 27,
    "last_turn_age_seconds": 28.5,
    "open_messages_limit": 31,
    "open_bytes_limit": 32,
    "open_bytes": 11,
    "open_messages": 41,
    "ledger_stored_messages_total": 901,
    "ledger_confirmed_messages_total": 43,
    "parked_messages": 44,
    "expired_messages": 45,
    "ledger_discarded_messages_total": 46,
    "waiting_messages": 47,
    "held_ordering_keys": 48,
    "oldest_open_age_seconds": 49,
    "outbox_size_bytes": 50,
    "outbox_log_size_bytes": 51,
    "outbox_disk_free_bytes": 52,
    "outbox_disk_size_bytes": 53,
    "outbox_disk_full": 1,
    "outbox_readable": 1,
    "outbox_relayed": 1,
}
"""By the name without its prefix, and the value of its second label."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=500.0)
    clocks = {"time": lambda: NOW, "monotonic": lambda: clock.now}
    monkeypatch.setattr(module, "time", SimpleNamespace(**vars(time) | clocks))
    return clock


@pytest.fixture
def metrics(
    tmp_path: Path,
    registry: CollectorRegistry,
    clock: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> Metrics:
    """Metrics of a publisher and an outbox that say `STATUS` and `OUTBOX`."""
    monkeypatch.setattr(module, "read_status", lambda _: OUTBOX)
    disk = SimpleNamespace(free=52, total=53)
    monkeypatch.setattr("shutil.disk_usage", lambda _: disk)
    metrics = Metrics("o", outbox=tmp_path / "o.db", registry=registry)
    limits = SimpleNamespace(messages_max=31, bytes_max=32)
    publisher = SimpleNamespace(status=STATUS, limits=limits, failure=None, is_ended=False)
    metrics.watch(publisher)
    hear(metrics, clock)
    return metrics


def hear(metrics: Any, clock: SimpleNamespace) -> None:
    """Tell of different numbers of each event."""
    numbers = {"stored": 61, "sent": 62, "returned": 63, "nacked": 64, "refused": 65}
    numbers |= {"uncertain": 66, "parked": 67, "expired": 68, "discarded": 69}
    for event, count in numbers.items():
        getattr(metrics, f"on_{event}")([None] * count)
    metrics.on_confirmed([SimpleNamespace(latency_s=2.25, stored_at=NOW - 33)] * 3)
    metrics.rejected(MessagesRejected(count=70, error=ValueError()))
    metrics.on_blocked([None])
    clock.now += 71.5
    metrics.on_unblocked([None])


def exposed(registry: CollectorRegistry) -> Iterator[tuple[str, float]]:
    for family in registry.collect():
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "outbox"]
            name = sample.name.removeprefix("reliablepub_")
            yield " ".join([name, *labels] if name != "build_info" else [name]), sample.value


@pytest.mark.usefixtures("metrics")
def test_each_metric_shows_its_own_number(registry: CollectorRegistry) -> None:
    found = {name: value for name, value in exposed(registry) if value and "_bucket" not in name}
    assert found == VALUES


def test_no_metric_is_left_out() -> None:
    series = {name for metric in CATALOGUE for name in metric.series if "_bucket" not in name}
    assert {f"reliablepub_{name.split()[0]}" for name in VALUES} == series


def test_numbers_that_could_be_mixed_up_differ() -> None:
    """But for flags, and the two histograms, which count the same messages."""
    counts = Counter(VALUES.values())
    assert {value: count for value, count in counts.items() if count > 1} == {1: 6, 3: 3}


@pytest.mark.usefixtures("metrics")
def test_latencies_are_in_their_buckets(registry: CollectorRegistry) -> None:
    buckets = dict(exposed(registry))
    around = [
        max(s for s in LATENCY_BUCKETS_S if s < 2.25),
        min(s for s in LATENCY_BUCKETS_S if s > 2.25),
    ]
    assert [buckets[f"confirm_latency_seconds_bucket {s}"] for s in around] == [0, 3]


def test_counters_go_on_with_the_next_publisher(
    metrics: Metrics, registry: CollectorRegistry
) -> None:
    first = metrics._watched[1]
    assert first is not None
    first.is_ended = True  # type: ignore[misc]
    limits = SimpleNamespace(messages_max=31, bytes_max=32)
    status = replace(STATUS, connects=1, commits=2)
    metrics.watch(SimpleNamespace(status=status, limits=limits, failure=None, is_ended=False))
    found = dict(exposed(registry))
    assert (found["connections_total"], found["commits_total"]) == (16, 26)
