"""Each metric has the value that it is said to have: none is a constant, none is another one's."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry

from reliablepub.errors import OutboxFull
from reliablepub.hooks import MessagesRejected
from reliablepub.observe.catalogue import CATALOGUE, ENDINGS, OUTCOMES
from reliablepub.observe.metrics import Metrics
from reliablepub.outbox.admin.inspection import OutboxStatus
from reliablepub.outbox.entry import Counters
from reliablepub.relay.handover import Limits
from reliablepub.relay.status import Link, Paused, Status
from tests.observe.conftest import Scrape

PAUSED = Paused("x", None, 3, 1.0, 0.0, "full", waiting=41, gives_up_at=1_042.0)
STATUS = Status(
    link=Link.BLOCKED,
    in_flight=11,
    window=12,
    buffered=13,
    connects=14,
    violations=15,
    stale=16,
    aside=17,
    paused=(replace(PAUSED, waiting=2, gives_up_at=1_043.0), PAUSED),
    paused_destinations=18,
    certificate_ends_at=1_019.0,
    callback_errors=20,
    commits=21,
    commit_s=22.5,
    lock_wait_s=23.5,
    turns=24,
    turn_age_s=25.5,
    counters=Counters(open_bytes=26),
)
OUTBOX = OutboxStatus(
    stored=1_000,
    open=31,
    in_flight=0,
    confirmed=32,
    parked=33,
    expired=34,
    discarded=35,
    waiting=36,
    held_keys=37,
    oldest_open_at=0.0,
    relay=1,
    bytes_on_disk=38,
    log_bytes=39,
    is_disk_full=True,
    relays=(1,),
)
DISK = SimpleNamespace(total=51, free=50)

VALUES: dict[str, float | tuple[float, float]] = {
    "build_info": 1,
    "rejected_messages_total": 60,
    "stored_messages_total": 61,
    "sent_attempts_total": 62,
    "ended_attempts_total": 63,
    "given_up_messages_total": 64,
    "confirm_latency_seconds_count": 63,
    "confirm_latency_seconds_sum": 63 * 0.5,
    "confirm_latency_seconds_bucket": 63,
    "delivery_seconds_count": 63,
    "delivery_seconds_sum": (63 * 600, 63 * 660),
    "delivery_seconds_bucket": 63,
    "blocked_seconds_total": (0.01, 60),
    "connected": 1,
    "blocked": 1,
    "connections_total": 14,
    "in_flight_messages": 11,
    "window_messages": 12,
    "buffered_messages": 13,
    "aside_messages": 17,
    "paused_destinations": 18,
    "give_up_timestamp_seconds": 1_042,
    "certificate_expiry_timestamp_seconds": 1_019,
    "paused_messages": 43,
    "contradictions_total": 15,
    "stale_events_total": 16,
    "callback_errors_total": 20,
    "relay_turns_total": 24,
    "last_turn_age_seconds": 25.5,
    "commits_total": 21,
    "commit_seconds_total": 22.5,
    "lock_wait_seconds_total": 23.5,
    "open_bytes": 26,
    "open_messages_limit": 71,
    "open_bytes_limit": 72,
    "open_messages": 31,
    "parked_messages": 33,
    "expired_messages": 34,
    "ledger_stored_messages_total": 1_000,
    "ledger_confirmed_messages_total": 32,
    "ledger_discarded_messages_total": 35,
    "outbox_readable": 1,
    "outbox_relayed": 1,
    "oldest_open_age_seconds": (1.7e9, 4e9),
    "waiting_messages": 36,
    "held_ordering_keys": 37,
    "outbox_size_bytes": 38,
    "outbox_log_size_bytes": 39,
    "outbox_disk_full": 1,
    "outbox_disk_free_bytes": 50,
    "outbox_disk_size_bytes": 51,
}
"""By series: what it is for the states above, or a range where a clock takes part."""
LABELS: dict[str, dict[str, str]] = {
    "confirm_latency_seconds_bucket": {"le": "0.5"},
    "delivery_seconds_bucket": {"le": "900.0"},
    "rejected_messages_total": {"reason": "full"},
    "ended_attempts_total": {"outcome": "confirmed"},
    "given_up_messages_total": {"ending": "parked"},
}
OFF: dict[str, float | None] = {
    "connected": 0,
    "blocked": 0,
    "outbox_relayed": 0,
    "outbox_disk_full": 0,
    "give_up_timestamp_seconds": 0,
    "oldest_open_age_seconds": 0,
    "certificate_expiry_timestamp_seconds": None,
}
"""Those with a second state: without a connection, a relay, a pause, a certificate, a message."""


@dataclass
class Publishing:
    """A publisher whose status the test sets."""

    status: Status = STATUS
    is_ended: bool = False
    failure: BaseException | None = None
    limits: Limits = field(default_factory=lambda: Limits(71, 72, 0, 0))


@pytest.fixture
def of_outbox(monkeypatch: pytest.MonkeyPatch) -> Callable[[OutboxStatus], None]:
    """Set what a look at the outbox finds."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: DISK)

    def finds(status: OutboxStatus) -> None:
        monkeypatch.setattr("reliablepub.observe.metrics.read_status", lambda _: status)

    return finds


@pytest.fixture
def publishing(
    registry: CollectorRegistry, tmp_path: Path, of_outbox: Callable[[OutboxStatus], None]
) -> Iterator[Publishing]:
    of_outbox(OUTBOX)
    metrics = Metrics("o", outbox=tmp_path / "o.db", registry=registry)
    publisher = Publishing()
    metrics.watch(publisher)
    confirmed: Any = SimpleNamespace(latency_s=0.5, stored_at=time.time() - 600)
    event: Any = SimpleNamespace()
    metrics.on_stored([event] * 61)
    metrics.on_sent([event] * 62)
    metrics.on_confirmed([confirmed] * 63)
    metrics.on_parked([event] * 64)
    metrics.rejected(MessagesRejected(60, OutboxFull("full")))
    metrics.on_blocked([event])
    time.sleep(0.02)
    yield publisher
    metrics.unregister()


def version_of(scrape: Scrape) -> str:
    (version,) = [
        dict(labels)["version"] for name, labels in scrape.all() if name == "reliablepub_build_info"
    ]
    return version


def test_the_table_has_every_series() -> None:
    assert {f"reliablepub_{name}" for name in VALUES} == {
        series for metric in CATALOGUE for series in metric.series
    }


@pytest.mark.parametrize("name", VALUES)
def test_a_series_has_its_value(name: str, publishing: Publishing, scrape: Scrape) -> None:
    del publishing
    labels = {"version": version_of(scrape)} if name == "build_info" else LABELS.get(name, {})
    value = scrape(name, **labels)
    assert value is not None
    match VALUES[name]:
        case (low, high):
            assert low <= value <= high
        case expected:
            assert value == expected


@pytest.mark.parametrize("name", OFF)
def test_a_state_that_has_ended_is_seen(
    name: str, publishing: Publishing, of_outbox: Callable[[OutboxStatus], None], scrape: Scrape
) -> None:
    publishing.status = Status(turns=1, link=Link.DISCONNECTED)
    of_outbox(replace(OUTBOX, oldest_open_at=None, relays=(1, None), is_disk_full=False))
    assert scrape(name) == OFF[name]


def test_an_outbox_that_cannot_be_read_has_no_values(
    publishing: Publishing, monkeypatch: pytest.MonkeyPatch, scrape: Scrape
) -> None:
    del publishing
    monkeypatch.setattr("reliablepub.observe.metrics.read_status", Mock(side_effect=OSError))
    assert scrape("outbox_readable") == 0
    assert scrape("open_messages") is None


COUNTED = {
    **{("ended_attempts_total", "outcome", one): f"on_{one}" for one in OUTCOMES},
    **{("given_up_messages_total", "ending", one): f"on_{one}" for one in ENDINGS},
}


@pytest.mark.parametrize(("series", "callback"), COUNTED.items())
def test_a_label_counts_its_own_events(
    series: tuple[str, str, str], callback: str, registry: CollectorRegistry, scrape: Scrape
) -> None:
    metrics = Metrics("o", registry=registry)
    metrics.watch(Publishing())
    event: Any = SimpleNamespace(latency_s=0.0, stored_at=0.0)
    getattr(metrics, callback)([event] * 3)
    name, label, value = series
    assert scrape(name, **{label: value}) == 3
    counts = [
        count
        for (found, labels), count in scrape.all().items()
        if found == f"reliablepub_{name}" and dict(labels)[label] != value
    ]
    assert sum(counts) == 0
