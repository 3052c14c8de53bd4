"""Metrics: counted as it happens, looked at when scraped, one name each."""

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest
from prometheus_client import CollectorRegistry

from reliablepub import (
    AsyncPublisher,
    ConfigurationError,
    Message,
    Outbox,
    OutboxFull,
    OutboxInUse,
    Publisher,
    PublisherClosed,
)
from reliablepub.hooks import MessagesRejected
from reliablepub.observe.catalogue import (
    CATALOGUE,
    LEDGER_METRICS,
    OUTBOX_METRICS,
    PROCESS_METRICS,
    Metric,
)
from reliablepub.observe.metrics import Metrics, _board_of, _Looking, exposition
from reliablepub.outbox.admin.inspection import OutboxStatus, read_status
from reliablepub.outbox.database import Database
from reliablepub.outbox.opening import outbox_at
from reliablepub.relay.handover import Limits
from reliablepub.relay.status import Link, Status
from reliablepub.testing import FakeBroker, faults
from tests.observe.conftest import Scrape
from tests.policies import AT_ONCE
from tests.sqlite import edit_lax
from tests.waiting import until

Becomes = Callable[..., None]


def names(metrics: tuple[Metric, ...]) -> set[str]:
    return {name for metric in metrics for name in metric.series}


def test_every_outcome_is_counted_and_everything_in_the_catalogue_exposed(
    broker: FakeBroker, outbox: Path, registry: CollectorRegistry, scrape: Scrape
) -> None:
    metrics = Metrics("o", outbox=outbox, registry=registry)
    broker.inject(faults.Nack(nth=5))
    good = [Message(b"x", routing_key="q") for _ in range(5)]
    lost = [Message(b"x", routing_key="order-4711") for _ in range(2)]
    late = Message(b"x", routing_key="q", expires_in_s=1e-6)
    with Publisher(broker.url, outbox=outbox, retry=AT_ONCE, hooks=[metrics]) as publisher:
        for messages in (good, lost, [Message(b"x", exchange="no-such")]):
            publisher.publish_many(messages).wait(30)
        with closing(Outbox(outbox)) as opened, closing(sqlite3.connect(outbox)) as db:
            opened.enqueue(late, connection=db)
            time.sleep(0.01)  # its deadline has passed before the relay can see it
            db.commit()
        assert publisher.flush(30).is_flushed
        exposed = {name for name, _ in scrape.all()}
        assert exposed == names(CATALOGUE) - {CERTIFICATE}
        assert scrape("connected") == 1
        assert scrape("window_messages") == 32
        assert scrape("outbox_relayed") == 1
    assert scrape("stored_messages_total") == 8
    assert scrape("sent_attempts_total") == 8
    ended = {"confirmed": 4, "nacked": 1, "returned": 2, "refused": 1, "uncertain": 0}
    for outcome, count in ended.items():
        assert scrape("ended_attempts_total", outcome=outcome) == count
    assert scrape("given_up_messages_total", ending="parked") == 4
    assert scrape("given_up_messages_total", ending="expired") == 1
    assert scrape("confirm_latency_seconds_count") == 4
    assert scrape("confirm_latency_seconds_bucket", le="+Inf") == 4
    seconds = scrape("confirm_latency_seconds_sum")
    assert seconds is not None
    assert seconds > 0
    assert (scrape("parked_messages"), scrape("expired_messages")) == (4, 1)
    assert scrape("ledger_confirmed_messages_total") == 4
    assert scrape("oldest_open_age_seconds") == 0
    assert "4711" not in scrape.text()  # a routing key is no label
    # It is closed: what it has counted stays, a state it has no more.
    assert scrape("connections_total") == 1
    assert scrape("connected") is None
    assert scrape("outbox_relayed") == 0


def test_what_is_in_flight_and_blocked_is_seen_as_it_is(
    broker: FakeBroker, outbox: Path, registry: CollectorRegistry, becomes: Becomes
) -> None:
    metrics = Metrics("o", outbox=outbox, registry=registry)
    broker.inject(faults.HoldConfirms())
    with Publisher(broker.url, outbox=outbox, hooks=[metrics], close_timeout_s=0) as publisher:
        messages = [Message(b"x", routing_key="q", persistent=False) for _ in range(3)]
        publisher.publish_many(messages)
        becomes(3, "in_flight_messages")
        becomes(3, "open_messages")
        broker.release_confirms()
        becomes(0, "in_flight_messages")
        becomes(0, "blocked_seconds_total")
        broker.block("low on memory")
        publisher.publish(b"x", routing_key="q")  # RabbitMQ tells only those who publish
        becomes(1, "blocked")
        becomes(1, "connected")
        broker.unblock()
        becomes(0, "blocked")
        until(lambda: metrics._blocked[1] is None)  # hooks are called after the status is told
        before = metrics._blocked_s()
        assert before > 0
        assert metrics._blocked_s() == before
        broker.drop_connections()
        becomes(2, "connections_total")


def test_two_publishers_of_one_process_do_not_collide(
    broker: FakeBroker, tmp_path: Path, registry: CollectorRegistry, scrape: Scrape
) -> None:
    for name, count in (("o", 1), ("p", 2)):
        metrics = Metrics(name, registry=registry)
        with Publisher(broker.url, outbox=tmp_path / name, hooks=[metrics]) as publisher:
            publisher.publish_many([Message(b"x", routing_key="q")] * count).wait(30)
    assert scrape("stored_messages_total") == 1
    assert scrape("stored_messages_total", outbox="p") == 2
    with pytest.raises(ConfigurationError, match="already metrics named 'p'"):
        Metrics("p", registry=registry)
    metrics.unregister()
    assert scrape("stored_messages_total", outbox="p") is None
    Metrics("p", registry=registry)


def test_one_publisher_after_the_other_goes_on_counting(
    broker: FakeBroker, outbox: Path, registry: CollectorRegistry, scrape: Scrape
) -> None:
    metrics = Metrics("o", registry=registry)
    for _ in range(2):
        with Publisher(broker.url, outbox=outbox, hooks=[metrics]) as publisher:
            publisher.publish(b"x", routing_key="q").result(30)
            with pytest.raises(ConfigurationError, match="in use by another publisher"):
                Publisher(broker.url, outbox=None, hooks=[metrics])
    assert scrape("connections_total") == 2
    assert scrape("stored_messages_total") == 2


async def test_without_a_disk_the_ledger_is_that_of_memory(
    broker: FakeBroker, registry: CollectorRegistry, scrape: Scrape
) -> None:
    hooks = [Metrics("o", registry=registry)]
    async with AsyncPublisher(broker.url, outbox=None, hooks=hooks) as publisher:
        await (await publisher.publish(b"x", routing_key="q"))
        await publisher.flush(30)
        exposed = {name for name, _ in scrape.all()}
        assert exposed == names(CATALOGUE) - names(OUTBOX_METRICS) - {CERTIFICATE}
    assert scrape("ledger_confirmed_messages_total") == 1
    assert scrape("open_messages") == 0


def test_what_is_not_accepted_is_counted_by_reason(
    broker: FakeBroker, outbox: Path, registry: CollectorRegistry, scrape: Scrape
) -> None:
    metrics = Metrics("o", outbox=outbox, registry=registry)
    away = "amqp://127.0.0.1:1/"
    options: dict[str, Any] = {"outbox": outbox, "hooks": [metrics], "close_timeout_s": 0}
    with Publisher(away, **options, open_messages_max=2, full_timeout_s=0) as publisher:
        publisher.publish_many([Message(b"x", routing_key="q")] * 2)
        with pytest.raises(OutboxFull):
            publisher.publish(b"x", routing_key="q")
        with pytest.raises(OutboxFull):
            publisher.publish_many([Message(b"x", routing_key="q")] * 2)
        assert scrape("rejected_messages_total", reason="full") == 3
        assert scrape("open_messages_limit") == 2
    with pytest.raises(PublisherClosed):
        publisher.publish(b"x", routing_key="q")
    assert scrape("rejected_messages_total", reason="closed") == 1
    hooks = [metrics]
    with closing(Outbox(outbox, hooks=hooks, open_messages_max=2)) as opened:
        for _ in range(25):
            with pytest.raises(OutboxFull):
                opened.enqueue(Message(b"x", routing_key="q"))
    assert scrape("rejected_messages_total", reason="full") == 28


async def test_what_asyncio_is_refused_is_counted_too(
    outbox: Path, registry: CollectorRegistry, scrape: Scrape
) -> None:
    metrics = Metrics("o", outbox=outbox, registry=registry)
    async with AsyncPublisher(
        "amqp://127.0.0.1:1/",
        outbox=outbox,
        hooks=[metrics],
        open_messages_max=1,
        full_timeout_s=0,
        close_timeout_s=0,
    ) as publisher:
        await publisher.publish(b"x", routing_key="q")
        with pytest.raises(OutboxFull):
            await publisher.publish(b"x", routing_key="q")
    assert scrape("rejected_messages_total", reason="full") == 1


CERTIFICATE = "reliablepub_certificate_expiry_timestamp_seconds"
"""Known only of `CertificateFiles`."""
REJECTED = MessagesRejected(1, OutboxFull("the outbox is full"))


class Halting(dict[str, int]):
    """Counts, which call back when one is read the first time: its lock is held then."""

    def __init__(self, counts: dict[str, int], then: Callable[[], object]) -> None:
        super().__init__(counts)
        self._then = [then]

    def __getitem__(self, name: str) -> int:
        while self._then:
            self._then.pop()()
        return super().__getitem__(name)


def test_a_signal_handler_whose_message_is_rejected_too_does_not_wait_for_itself(
    registry: CollectorRegistry, scrape: Scrape
) -> None:
    metrics = Metrics("o", registry=registry)
    metrics._rejected = Halting(metrics._rejected, lambda: metrics.rejected(REJECTED))
    caller = threading.Thread(target=metrics.rejected, args=(REJECTED,), daemon=True)
    caller.start()
    caller.join(10)
    assert not caller.is_alive()
    assert scrape("rejected_messages_total", reason="full") == 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_rejection_of_the_parent_does_not_hold_up_a_forked_child(
    registry: CollectorRegistry,
) -> None:
    metrics = Metrics("o", registry=registry)
    is_counting, goes_on = threading.Event(), threading.Event()

    def halt() -> None:
        is_counting.set()
        goes_on.wait(60)

    metrics._rejected = Halting(metrics._rejected, halt)
    caller = threading.Thread(target=metrics.rejected, args=(REJECTED,))
    caller.start()
    assert is_counting.wait(60)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        metrics.rejected(REJECTED)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    goes_on.set()
    caller.join()


def test_a_hook_that_raises_hides_no_refusal(outbox: Path) -> None:
    class Bad:
        def rejected(self, _event: object) -> None:
            raise ZeroDivisionError

    with closing(Outbox(outbox, hooks=[Bad()], open_messages_max=1)) as opened:
        opened.enqueue(Message(b"x", routing_key="q"))
        with pytest.raises(OutboxFull):
            opened.enqueue(Message(b"x", routing_key="q"))


def test_delivery_is_counted_from_the_commit_over_outages_and_retries(
    broker: FakeBroker, outbox: Path, registry: CollectorRegistry, scrape: Scrape
) -> None:
    with closing(Outbox(outbox)) as opened:
        opened.enqueue(Message(b"x", routing_key="q"))
    time.sleep(1.1)
    metrics = Metrics("o", outbox=outbox, registry=registry)
    with Publisher(broker.url, outbox=outbox, hooks=[metrics]) as publisher:
        assert publisher.flush(30).is_flushed
        seconds = scrape("delivery_seconds_sum")
        assert seconds is not None
        assert seconds >= 1.1
        assert scrape("delivery_seconds_bucket", le="1.0") == 0
        assert scrape("delivery_seconds_count") == 1
        assert (scrape("commits_total") or 0) >= 1
        assert (scrape("commit_seconds_total") or 0) > 0


def test_waits_for_the_lock_are_counted(
    broker: FakeBroker, outbox: Path, registry: CollectorRegistry, scrape: Scrape
) -> None:
    metrics = Metrics("o", outbox=outbox, registry=registry)
    with Publisher(broker.url, outbox=outbox, hooks=[metrics]) as publisher:
        publisher.publish(b"x", routing_key="q").result(30)
        with closing(sqlite3.connect(outbox, isolation_level=None)) as application:
            application.execute("BEGIN IMMEDIATE")
            begun = threading.Timer(0.0, publisher.publish, [b"x"], {"routing_key": "q"})
            begun.start()
            time.sleep(1.0)
            application.execute("ROLLBACK")
        begun.join()
        assert publisher.flush(30).is_flushed
        waited_s = scrape("lock_wait_seconds_total")
        assert waited_s is not None
        assert 0.5 < waited_s < 30


def test_who_only_enqueues_exposes_what_the_file_tells(
    outbox: Path, registry: CollectorRegistry, scrape: Scrape
) -> None:
    Metrics("o", outbox=outbox, registry=registry)
    assert scrape("outbox_readable") == 0  # there is none yet, and the scrape goes on
    with closing(Outbox(outbox)) as opened:
        opened.enqueue(Message(b"x", routing_key="q"))
        exposed = {name for name, _ in scrape.all()}
        assert exposed == names((*OUTBOX_METRICS, *LEDGER_METRICS, *PROCESS_METRICS))
        assert scrape("open_messages") == 1
        assert scrape("outbox_relayed") == 0
        age_s = scrape("oldest_open_age_seconds")
    assert age_s is not None
    assert 0 <= age_s < 3_600  # seconds, and no time since 1970
    for size in (scrape("outbox_size_bytes"), scrape("outbox_disk_free_bytes")):
        assert size is not None
        assert size > 0


@pytest.mark.parametrize("damage", ["NULL", "'x'", "x'31'"])
def test_a_damaged_row_hides_no_backlog(
    damage: str, outbox: Path, registry: CollectorRegistry, scrape: Scrape
) -> None:
    """The age counts on: 0 would resolve the alert."""
    Metrics("o", outbox=outbox, registry=registry)
    with closing(Outbox(outbox)) as opened:
        for _ in range(2):
            opened.enqueue(Message(b"x", routing_key="q"))
    edit_lax(outbox, f"stored_at = CASE id WHEN 1 THEN {damage} ELSE stored_at - 600 END")
    age_s = scrape("oldest_open_age_seconds")
    assert age_s is not None
    assert 600 <= age_s < 3_600


@pytest.mark.parametrize("version", ["abc", "1.x.0", "", "1"])
def test_no_header_of_a_scraper_makes_the_scrape_fail(version: str) -> None:
    _, body = exposition(f"application/openmetrics-text; version={version}")
    assert b"python_info" in body


def test_a_publisher_that_ends_while_it_is_blocked_is_blocked_no_longer(
    broker: FakeBroker, registry: CollectorRegistry, scrape: Scrape, becomes: Becomes
) -> None:
    metrics = Metrics("o", registry=registry)
    options: dict[str, Any] = {"outbox": None, "hooks": [metrics], "close_timeout_s": 0}
    with Publisher(broker.url, **options) as publisher:
        publisher.publish(b"x", routing_key="q").result(30)
        broker.block("low on memory")
        publisher.publish(b"x", routing_key="q")  # RabbitMQ tells only those who publish
        becomes(1, "blocked")
        until(lambda: metrics._blocked_s() > 0.2)
        since = time.monotonic()
        seen = [scrape("blocked_seconds_total") or 0]
    closed_s = time.monotonic() - since
    broker.unblock()
    for _ in range(2):
        seen.append(scrape("blocked_seconds_total") or 0)
        time.sleep(0.3)
    with Publisher(broker.url, **options) as publisher:
        publisher.publish(b"x", routing_key="q").result(30)
        for _ in range(2):
            seen.append(scrape("blocked_seconds_total") or 0)
            time.sleep(0.3)
    assert seen == sorted(seen), "a counter never falls"
    assert seen[1:] == pytest.approx([seen[1]] * 4, abs=0.01)
    assert seen[1] - seen[0] <= closed_s, "no longer than closing took"


def test_a_publisher_that_finds_no_free_outbox_has_no_state(
    broker: FakeBroker, outbox: Path, registry: CollectorRegistry, scrape: Scrape
) -> None:
    metrics = Metrics("o", outbox=outbox, registry=registry)
    with Publisher(broker.url, outbox=outbox):
        for _ in range(2):
            with pytest.raises(OutboxInUse):
                Publisher(broker.url, outbox=outbox, hooks=[metrics])
            assert scrape("connected") is None
            assert scrape("last_turn_age_seconds") is None
            assert scrape("outbox_relayed") == 1
    with Publisher(broker.url, outbox=outbox, hooks=[metrics]):
        until(lambda: scrape("connected") == 1)


def test_a_publisher_whose_outbox_another_has_taken_over_has_no_state(
    registry: CollectorRegistry, scrape: Scrape
) -> None:
    class Lost:
        status = Status(Link.FAILED, "the relay has failed", turns=9, turn_age_s=600.0)
        is_ended = True
        failure: BaseException | None = OutboxInUse("process 17 relays it")
        limits = Limits(1, 1, 1, 1)

    metrics = Metrics("o", registry=registry)
    metrics.watch(Lost())
    assert scrape("connected") is None
    assert scrape("relay_turns_total") == 9
    Lost.failure = ZeroDivisionError()
    assert (scrape("connected"), scrape("last_turn_age_seconds")) == (0, 600)


def test_a_scrape_does_not_wait_for_an_outbox_that_hangs(
    outbox: Path, registry: CollectorRegistry, scrape: Scrape, monkeypatch: pytest.MonkeyPatch
) -> None:
    Outbox(outbox).create()
    goes_on, begun = threading.Event(), []

    def hangs(database: Database) -> OutboxStatus:
        begun.append(database)
        assert goes_on.wait(60)
        return read_status(database)

    monkeypatch.setattr("reliablepub.observe.metrics.read_status", hangs)
    for name in "op":
        Metrics(name, outbox=outbox, registry=registry)
    _board_of(registry).within_s = 0.2
    since = time.monotonic()
    for _ in range(2):
        assert scrape("outbox_readable") == 0
        assert scrape("rejected_messages_total", reason="full") == 0
    assert time.monotonic() - since < 10
    assert len(begun) == 2, "one look at each, and no second one beside it"
    goes_on.set()
    until(lambda: scrape("outbox_readable") == 1)


def test_a_look_of_the_parent_does_not_hold_up_a_forked_child(
    outbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Outbox(outbox).create()
    looking = _Looking(outbox_at(outbox))
    goes_on = threading.Event()
    monkeypatch.setattr("reliablepub.observe.metrics.read_status", lambda _: goes_on.wait(60))
    first = looking.begun()
    assert looking.begun() is first
    monkeypatch.setattr("reliablepub.observe.metrics.os.getpid", lambda: -1)  # as in a child
    assert looking.begun() is not first
    goes_on.set()


class Scraped(Metrics):
    """Metrics that are scraped whenever one of their attributes has changed."""

    seen: ClassVar[list[float]] = []

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if "_board" in vars(self):
            samples = {name: number for name, _, number in self.samples()}
            self.seen.append(samples.get("reliablepub_connections_total", 0.0))


def test_no_scrape_counts_a_publisher_twice(fake_broker: FakeBroker) -> None:
    metrics = Scraped("twice", registry=CollectorRegistry())
    for _ in range(3):
        with Publisher(fake_broker.url, outbox=None, hooks=[metrics]) as publisher:
            until(lambda: publisher.status.connects == 1)
    assert metrics.seen == sorted(metrics.seen)
