"""A real Prometheus reads what is shipped: each expression, and alerts as trouble comes and goes.

The rules are those that are shipped, with seconds for minutes: `quickened`.
"""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, start_http_server
from tenacity import stop_after_attempt, stop_after_delay, wait_fixed, wait_none

from reliablepub import (
    Breaker,
    CertificateFiles,
    Message,
    Outbox,
    OutboxFull,
    Publisher,
    Retries,
    RetryPolicy,
)
from reliablepub.cli import main
from reliablepub.observe.metrics import Metrics
from reliablepub.testing import FakeBroker, faults
from tests import prometheus
from tests.asking import fill
from tests.certificates import broker_with, signed
from tests.cli.conftest import Cli
from tests.disks import fill as fill_disk
from tests.disks import small_disk
from tests.observe.test_shipped import FOLDER, alerts, panels
from tests.policies import ONCE
from tests.prometheus import Prometheus
from tests.rabbitmq import free_ports
from tests.waiting import until

pytestmark = pytest.mark.timeout(400)
QUICK_PAUSES = RetryPolicy(
    returned=Retries(stop_after_attempt(1000), wait_none()),
    breaker=Breaker(refusals_max=1, pause=wait_fixed(1)),
)


def quickened(rules: str) -> str:
    """The rules with each minute of waiting as a second, and each hour as five.

    A day of memory stays. Ages and hangs of some minutes become seconds.
    """
    rules = re.sub(r"for: (\d+)m", r"for: \1s", rules)
    rules = re.sub(r"\[(\d+)m\]", r"[\1s]", rules).replace("[1h]", "[5s]")
    for old, new in (
        (") > 300\n        for: 2s", ") > 5\n        for: 2s"),
        ("last_turn_age_seconds) > 60", "last_turn_age_seconds) > 2"),
        ("blocked_seconds_total[15s])) > 300", "blocked_seconds_total[15s])) > 3"),
        ("log_size_bytes) > 64e6", "log_size_bytes) > 300e3"),
    ):
        assert old in rules
        rules = rules.replace(old, new)
    return rules


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    prometheus.required()
    rules = quickened((FOLDER / "alerts.yml").read_text())
    with Prometheus(tmp_path_factory.mktemp("prometheus"), rules) as server:
        yield server


class Watched:
    """A registry of this process that Prometheus scrapes, as one instance."""

    def __init__(self, server: Prometheus) -> None:
        self.server = server
        self.registry = CollectorRegistry(auto_describe=True)

    @contextmanager
    def fires_and_is_resolved(self, alert: str, outbox: str) -> Iterator[None]:
        """The alert fires while the block's trouble lasts; when the block ends, it is resolved.

        The block ends by mending what it is about.
        """
        name = f"Reliablepub{alert}"
        assert (name, outbox) not in self.server.firing()
        self.server.until_fires(name, outbox)
        yield
        self.server.until_resolved(name, outbox)

    def until_scraped(self, counter: str, outbox: str) -> None:
        """Wait until Prometheus has seen a counter at zero: what it counts later is an increase."""
        query = f'reliablepub_{counter}_total{{outbox="{outbox}"}} == 0'
        self.server.until(lambda: bool(self.server.query(query)), query)

    @contextmanager
    def publishing(
        self, broker: FakeBroker, name: str, outbox: Path, **options: Any
    ) -> Iterator[Publisher]:
        """A publisher that is scraped, and connected."""
        metrics = Metrics(name, outbox=outbox, registry=self.registry)
        options["hooks"] = [metrics, *options.get("hooks", ())]
        with Publisher(broker.url, outbox=outbox, close_timeout_s=0, **options) as publisher:
            publisher.publish(b"first", routing_key="q").result(60)
            yield publisher


@pytest.fixture
def watched(server: Prometheus, request: pytest.FixtureRequest) -> Iterator[Watched]:
    watched = Watched(server)
    http, thread = start_http_server(0, "127.0.0.1", watched.registry)
    name = request.node.name
    server.scrape(name, f"127.0.0.1:{http.server_port}")
    yield watched
    server.forget(name)
    http.shutdown()
    http.server_close()
    thread.join()


def enqueue(path: Path, count: int) -> None:
    fill(path, *[Message(b"x", routing_key="all")] * count)


# ---------------------------------------------------------------------- every expression


def test_prometheus_reads_every_expression(watched: Watched, outbox: Path, tmp_path: Path) -> None:
    """Those of the dashboard that are no rates of rare events find samples, too."""
    metrics = Metrics("all", outbox=outbox, registry=watched.registry)
    both = signed(tmp_path, "IP:127.0.0.1")
    files = CertificateFiles(authorities=tmp_path / "ca.crt", certificate=both)
    with (
        broker_with(both, asks=True) as broker,
        Publisher(broker.url, outbox=outbox, hooks=[metrics], ssl_context=files) as publisher,
    ):
        publisher.publish(b"x", routing_key="q").result(60)
        watched.server.until(
            lambda: bool(
                watched.server.query('reliablepub_ledger_confirmed_messages_total{outbox="all"}')
            ),
            "it is scraped",
        )
        for alert in alerts():
            watched.server.query(alert["expr"])
        expressions = [target["expr"] for panel in panels() for target in panel.get("targets", [])]
        assert expressions
        for expression in expressions:
            asked = expression.replace("$outbox", "all").replace("$__rate_interval", "10s")
            assert "$" not in asked
            watched.server.until(lambda asked=asked: bool(watched.server.query(asked)), asked)  # type: ignore[misc]


# ---------------------------------------------------------------------- processes that are killed


def test_a_relay_that_is_killed_pages_and_resolves_nothing(
    server: Prometheus, cli: Cli, fake: FakeBroker, tmp_path: Path
) -> None:
    """Its backlog stays an alert without it, until it is back and has delivered."""
    (port,) = free_ports(1)
    options = ("--outbox", "o.db", "--name", "killed", "--health-port", str(port))
    url = fake.url
    fake.stop()
    enqueue(cli.folder / "o.db", 40)
    relay = cli.begin("relay", *options, "--url", url)
    server.scrape("killed", f"127.0.0.1:{port}")
    trouble = ("BacklogIsOld", "BacklogStandsStill", "IsDisconnected")
    for alert in trouble:
        server.until_fires(f"Reliablepub{alert}", "killed")
    relay.kill()
    relay.wait()
    server.until_fires("ReliablepubIsDown", "killed")
    backlog = {("ReliablepubBacklogIsOld", "killed"), ("ReliablepubBacklogStandsStill", "killed")}
    end = time.monotonic() + 5
    while time.monotonic() < end:
        assert backlog <= server.firing()
        time.sleep(0.3)
    assert ("ReliablepubIsNotScraped", "killed") not in server.firing()
    fake.start()
    cli.begin("relay", *options, "--url", fake.url)
    for alert in ("IsDown", *trouble):
        server.until_resolved(f"Reliablepub{alert}", "killed")
    assert Outbox(cli.folder / "o.db").status().open == 0
    server.forget("killed")
    server.until_fires("ReliablepubIsNotScraped", "killed")
    server.scrape("killed again", f"127.0.0.1:{port}")
    server.until_resolved("ReliablepubIsNotScraped", "killed")
    server.forget("killed again")


def test_a_second_process_tells_that_no_relay_runs(
    watched: Watched, broker: FakeBroker, outbox: Path
) -> None:
    Metrics("orphan", outbox=outbox, registry=watched.registry)
    broker.declare_queue("all")
    enqueue(outbox, 3)
    with (
        watched.fires_and_is_resolved("HasNoRelay", "orphan"),
        Publisher(broker.url, outbox=outbox) as publisher,
    ):
        assert publisher.flush(60).is_flushed


# ---------------------------------------------------------------------- one publisher in trouble


def test_a_relay_that_hangs(watched: Watched, broker: FakeBroker, outbox: Path) -> None:
    released, hangs = threading.Event(), threading.Event()

    class Hang:
        def on_stored(self, events: Any) -> None:
            if events[0].message_id == "hang":
                hangs.set()
                released.wait(120)

    with watched.publishing(broker, "hang", outbox, hooks=[Hang()]) as publisher:
        fill(outbox, Message(b"x", routing_key="q"))
        caller = threading.Thread(
            target=publisher.publish,
            args=(b"x",),
            kwargs={"routing_key": "q", "message_id": "hang"},
        )
        caller.start()
        assert hangs.wait(60)
        with watched.fires_and_is_resolved("RelayHangs", "hang"):
            released.set()
            caller.join(60)


def test_a_relay_that_restarts_again_and_again(
    watched: Watched, broker: FakeBroker, outbox: Path
) -> None:
    turns = 'reliablepub_relay_turns_total{outbox="restarts"}'

    def live() -> bool:
        metrics = Metrics("restarts", outbox=outbox, registry=watched.registry)
        with Publisher(broker.url, outbox=outbox, hooks=[metrics], close_timeout_s=0) as publisher:
            watched.server.until(
                lambda: bool(watched.server.query(f"{turns} < 40")), "it has begun anew"
            )
            while publisher.status.turns < 60:
                publisher.publish(b"x", routing_key="q").result(60)
            watched.server.until(
                lambda: bool(watched.server.query(f"{turns} >= 60")), "it has come that far"
            )
        metrics.unregister()
        return ("ReliablepubRelayRestarts", "restarts") in watched.server.firing()

    watched.server.until(live, "the restarts are seen")
    watched.server.until_resolved("ReliablepubRelayRestarts", "restarts")


def test_a_broker_that_is_away(watched: Watched, broker: FakeBroker, outbox: Path) -> None:
    with watched.publishing(broker, "away", outbox):
        broker.stop()
        with watched.fires_and_is_resolved("IsDisconnected", "away"):
            broker.start()


def test_a_broker_that_is_blocked(watched: Watched, broker: FakeBroker, outbox: Path) -> None:
    with watched.publishing(broker, "blocked", outbox) as publisher:
        broker.block("low on memory")
        publisher.publish(b"x", routing_key="q")
        with watched.fires_and_is_resolved("IsBlocked", "blocked"):
            broker.unblock()


def test_connections_that_come_and_go(watched: Watched, broker: FakeBroker, outbox: Path) -> None:
    with watched.publishing(broker, "storm", outbox) as publisher:

        def drop() -> bool:
            connects = publisher.status.connects
            broker.drop_connections()
            until(lambda: publisher.status.connects > connects)
            publisher.publish(b"x", routing_key="q").result(60)
            return ("ReliablepubReconnectStorm", "storm") in watched.server.firing()

        watched.server.until(drop, "the storm is seen")
        watched.server.until_resolved("ReliablepubReconnectStorm", "storm")


def test_a_client_certificate_that_expires_soon(
    watched: Watched, outbox: Path, tmp_path: Path
) -> None:
    """In two days, until it is renewed."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    both = signed(theirs, "IP:127.0.0.1")
    files = CertificateFiles(authorities=theirs / "ca.crt", certificate=signed(ours, "DNS:us"))
    with (
        broker_with(both) as broker,
        watched.publishing(broker, "certificate", outbox, ssl_context=files) as publisher,
        watched.fires_and_is_resolved("CertificateExpires", "certificate"),
    ):
        signed(ours, "DNS:us", days=30)
        broker.drop_connections()
        publisher.publish(b"x", routing_key="q").result(60)


def test_a_broker_that_contradicts_itself(
    watched: Watched, broker: FakeBroker, outbox: Path
) -> None:
    with watched.publishing(broker, "stray", outbox) as publisher:
        watched.until_scraped("contradictions", "stray")
        broker.inject(faults.StrayAck(tag=1))
        publisher.publish(b"x", routing_key="q").result(60)
        with watched.fires_and_is_resolved("BrokerContradictsItself", "stray"):
            pass  # it is an alert on the last hour


def test_a_message_that_loses_each_connection(
    watched: Watched, broker: FakeBroker, outbox: Path
) -> None:
    with watched.publishing(broker, "aside", outbox) as publisher:
        broker.inject(faults.DropConnection(routing_key="poison", keep=True))
        broker.declare_queue("poison")
        publisher.publish(b"x", routing_key="poison", message_id="poison")
        command = ["outbox", "park", "poison", "--outbox", str(outbox)]

        def parked() -> bool:
            """It cannot be parked at the moments at which it is in flight."""
            CliRunner().invoke(main, command)
            return publisher.status.counters.parked == 1

        with watched.fires_and_is_resolved("MessageIsSetAside", "aside"):
            watched.server.until(parked, "an operator has parked it")


def test_messages_that_are_parked_and_that_expire(
    watched: Watched, broker: FakeBroker, outbox: Path
) -> None:
    retry = RetryPolicy(returned=ONCE)
    with watched.publishing(broker, "parked", outbox, retry=retry) as publisher:
        publisher.publish(b"x", routing_key="nowhere")
        # Its deadline has passed when the relay reads it.
        fill(outbox, Message(b"x", routing_key="q", expires_in_s=1e-6))
        alerts_of_both = ("ReliablepubMessagesAreParked", "ReliablepubMessagesExpired")
        for name in alerts_of_both:
            watched.server.until_fires(name, "parked")
        broker.declare_queue("nowhere")
        assert Outbox(outbox).retry() == 2
        for name in alerts_of_both:
            watched.server.until_resolved(name, "parked")


def test_a_destination_that_is_paused(watched: Watched, broker: FakeBroker, outbox: Path) -> None:
    with watched.publishing(broker, "paused", outbox, retry=QUICK_PAUSES) as publisher:
        publisher.publish(b"x", routing_key="missing")
        with watched.fires_and_is_resolved("DestinationIsPaused", "paused"):
            broker.declare_queue("missing")


def test_messages_that_are_given_up_soon(
    watched: Watched, broker: FakeBroker, outbox: Path
) -> None:
    budget = Retries(stop_after_delay(599), wait_none())
    soon = replace(QUICK_PAUSES, returned=budget)
    with watched.publishing(broker, "soon", outbox, retry=soon) as publisher:
        publisher.publish(b"x", routing_key="missing")
        with watched.fires_and_is_resolved("MessagesAreAboutToBeGivenUp", "soon"):
            broker.declare_queue("missing")


def test_messages_that_are_not_accepted(watched: Watched, broker: FakeBroker, outbox: Path) -> None:
    limits = {"open_messages_max": 5, "full_timeout_s": 0.0}
    with watched.publishing(broker, "full", outbox, **limits) as publisher:
        watched.until_scraped("rejected_messages", "full")
        broker.inject(faults.HoldConfirms())
        publisher.publish_many([Message(b"x", routing_key="q")] * 5)
        for _ in range(25):
            with pytest.raises(OutboxFull):
                publisher.publish(b"x", routing_key="q")
        watched.server.until_fires("ReliablepubOutboxFillsUp", "full")
        broker.release_confirms()
        watched.server.until_resolved("ReliablepubOutboxFillsUp", "full")
        watched.server.until_resolved("ReliablepubRejectsMessages", "full")


def test_refusals_fire_at_once(watched: Watched, outbox: Path) -> None:
    """Of a process that only enqueues, which has counted none before."""
    metrics = Metrics("refused", outbox=outbox, registry=watched.registry)
    with closing(Outbox(outbox, hooks=[metrics], open_messages_max=1)) as opened:
        opened.enqueue(Message(b"x", routing_key="q"))
        watched.until_scraped("rejected_messages", "refused")
        with pytest.raises(OutboxFull):
            opened.enqueue(Message(b"x", routing_key="q"))
        with watched.fires_and_is_resolved("RejectsMessages", "refused"):
            pass  # it is an alert on the last minutes


def test_a_callback_that_fails(watched: Watched, broker: FakeBroker, outbox: Path) -> None:
    class Bad:
        def on_stored(self, events: Any) -> None:
            if events[0].message_id == "bad":
                raise ZeroDivisionError

    with watched.publishing(broker, "callback", outbox, hooks=[Bad()]) as publisher:
        watched.until_scraped("callback_errors", "callback")
        publisher.publish(b"x", routing_key="q", message_id="bad").result(60)
        with watched.fires_and_is_resolved("CallbackFails", "callback"):
            pass  # it is an alert on the last hour


# ---------------------------------------------------------------------- the file and its disk


def test_a_file_that_cannot_be_read(watched: Watched, outbox: Path) -> None:
    outbox.write_bytes(b"no database at all, but long enough to be taken for the header of one")
    Metrics("unreadable", outbox=outbox, registry=watched.registry)
    with watched.fires_and_is_resolved("OutboxIsUnreadable", "unreadable"):
        outbox.unlink()
        Outbox(outbox).create()


def test_a_log_that_is_long(watched: Watched, broker: FakeBroker, outbox: Path) -> None:
    """The threshold is 300 kB here."""
    Metrics("log", outbox=outbox, registry=watched.registry)
    with ExitStack() as stack:
        opened = stack.enter_context(Outbox(outbox))
        for _ in range(50):
            opened.enqueue(Message(b"x" * 10_000, routing_key="q"))
        with watched.fires_and_is_resolved("LogIsLong", "log"):
            stack.close()  # the last connection empties the log


@dataclass
class Disk:
    """What the system tells of a disk."""

    free: float
    total: float


def test_disks_that_fill_up(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alert_of = {"large": "DiskIsNearlyFull", "small": "DiskIsNearlyFull", "filling": "DiskFillsUp"}
    disks = {"large": Disk(4e9, 100e9), "small": Disk(90e6, 1e9), "filling": Disk(14e9, 100e9)}
    monkeypatch.setattr(
        "reliablepub.observe.metrics.shutil.disk_usage", lambda folder: disks[folder.name]
    )
    for name in disks:
        (tmp_path / name).mkdir()
        Outbox(tmp_path / name / "o.db").create()
        Metrics(name, outbox=tmp_path / name / "o.db", registry=watched.registry)
    for name, alert in alert_of.items():
        watched.server.until_fires(f"Reliablepub{alert}", name)
    for disk in disks.values():
        disk.free = 0.5 * disk.total
    for name, alert in alert_of.items():
        watched.server.until_resolved(f"Reliablepub{alert}", name)


def test_a_disk_that_is_full(watched: Watched, broker: FakeBroker, tmp_path: Path) -> None:
    with (
        small_disk(tmp_path, "tmpfs", 24) as disk,
        watched.publishing(broker, "disk", disk / "o.db"),
    ):
        fill_disk(disk)
        with watched.fires_and_is_resolved("DiskIsFull", "disk"):
            (disk / "filler").unlink()


def test_every_alert_is_tried_here() -> None:
    source = Path(__file__).read_text()
    for alert in alerts():
        short = alert["alert"].removeprefix("Reliablepub")
        assert re.search(rf'"(Reliablepub)?{short}"', source), short
