"""A database that does not answer: it is told, and closing keeps its time."""

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest

from reliablepub import Message, Outbox, OutboxUnsure, Publisher
from reliablepub.errors import OutboxError, PublisherClosed
from reliablepub.outbox import patience
from reliablepub.outbox.postgres.database import create_outbox
from reliablepub.outbox.postgres.server import Server
from reliablepub.relay.thread import LAST_COMMIT_S, LAST_CONFIRMS_S
from reliablepub.testing import FakeBroker
from tests.outbox.test_postgres_replica import Call, Replica
from tests.postgres import PostgresServer
from tests.waiting import until

pytestmark = pytest.mark.postgres
SLACK_S = 3.0
"""For the steps of a closing relay that need no answer, on a busy machine."""


END_OTHERS = """
    SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def url(server: PostgresServer) -> Iterator[str]:
    url = server.url_of()
    create_outbox(Server.of(url))
    yield url
    server.execute(END_OTHERS)  # what was frozen may still run
    server.execute("DROP SCHEMA reliablepub CASCADE")


@pytest.fixture(autouse=True)
def told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "TOLD_S", 0.3)


def close(publisher: Publisher, timeout_s: float) -> None:
    """Close it, and see that it keeps the time."""
    began = time.monotonic()
    publisher.close(timeout_s)
    most_s = timeout_s + LAST_CONFIRMS_S + LAST_COMMIT_S + SLACK_S
    assert time.monotonic() - began < most_s


@pytest.mark.parametrize("fault", ["no replica", "frozen"])
def test_a_commit_without_an_answer_is_told_and_closing_keeps_its_time(
    url: str, server: PostgresServer, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    replica = Replica(server, "postgres")
    with FakeBroker() as broker, replica.forgotten():
        broker.declare_queue("q")
        publisher = Publisher(broker.url, outbox=url)
        publisher.publish(b"", routing_key="q").result(20)
        until(lambda: publisher.status.open == 0)
        if fault == "frozen":
            server.pause()
        else:
            replica.require()
        try:
            call = Call(lambda: publisher.publish(b"", routing_key="q", message_id="unsure"))
            until(lambda: "does not answer" in publisher.status.trouble)
            assert "does not answer" in publisher.status.reason
            assert not call.is_over
            close(publisher, 0.5)
            expected = OutboxUnsure if fault == "no replica" else (OutboxError, PublisherClosed)
            with pytest.raises(expected):
                call.result()
        finally:
            server.recover()
    assert "does not answer" in caplog.text


def test_a_relay_that_waits_while_it_starts_heeds_a_signal(
    url: str, server: PostgresServer
) -> None:
    replica = Replica(server, "postgres")
    is_waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    with FakeBroker() as broker, replica.forgotten():
        replica.require()
        command = [sys.executable, "-m", "reliablepub", "relay", "--outbox", url]
        with subprocess.Popen([*command, "--url", broker.url], stderr=subprocess.PIPE) as relay:
            until(lambda: server.execute(is_waiting) != [])
            relay.send_signal(signal.SIGTERM)
            _, said = relay.communicate(timeout=LAST_CONFIRMS_S + LAST_COMMIT_S + SLACK_S)
        assert relay.returncode == 0
        assert b"cannot be opened" in said


def test_an_enqueuer_that_waits_says_so(
    url: str, server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    replica = Replica(server, "postgres")
    with Outbox(url) as outbox, caplog.at_level(logging.WARNING):
        outbox.enqueue(Message(b""))
        with replica.forgotten():
            replica.require()
            call = Call(lambda: outbox.enqueue(Message(b"", message_id="m")))
            until(lambda: "does not answer" in caplog.text)
        assert call.result() == "m"
    assert "no wait any more" in caplog.text


def test_closing_keeps_its_time_though_a_transaction_holds_the_turn(url: str) -> None:
    with FakeBroker() as broker, closing(psycopg.connect(url)) as application:
        broker.declare_queue("q")
        publisher = Publisher(broker.url, outbox=url)
        publisher.publish(b"", routing_key="q").result(20)
        Outbox(url).enqueue(Message(b"", routing_key="q"), key="k")
        assert publisher.flush(20).is_flushed
        Outbox(url).retry([])
        application.execute(
            "INSERT INTO reliablepub.turns SELECT shard, turn + 1, run, 'operator x', at, is_free,"
            " stored, confirmed, parked, expired, discarded, open_bytes, intervention, seen,"
            " cluster, backend FROM reliablepub.turns ORDER BY turn DESC LIMIT 1"
        )
        call = Call(lambda: publisher.publish(b"", routing_key="q"))
        until(lambda: publisher.status.trouble)
        close(publisher, 0.5)
        with pytest.raises((OutboxError, PublisherClosed)):
            call.result()
