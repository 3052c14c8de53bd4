"""Deadlines in PostgreSQL are measured by the server's clock, whatever the hosts' clocks say."""

import time
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest

from reliablepub import Message, Outbox, Publisher
from reliablepub.outbox.postgres.clock import ServerClock
from reliablepub.outbox.postgres.server import Server
from reliablepub.outbox.postgres.store import PostgresStore
from reliablepub.testing import FakeBroker


@pytest.fixture(params=[-3_600.0, 3_600.0])
def wrong(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """The clock of this host is wrong by an hour."""
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + request.param)
    yield request.param
    monkeypatch.undo()


def test_a_host_whose_clock_is_wrong_gives_each_message_its_time(url: str, wrong: float) -> None:
    Outbox(url).enqueue(Message(b"", expires_in_s=60))
    with FakeBroker() as broker:
        broker.block()
        with Publisher(broker.url, outbox=url, close_timeout_s=0) as publisher:
            publisher.publish(b"", routing_key="q", expires_in_s=60)
    with closing(psycopg.connect(url)) as connection:
        left = connection.execute(
            "SELECT expires_at - extract(epoch FROM clock_timestamp())::float8,"
            " stored_at - extract(epoch FROM clock_timestamp())::float8 FROM reliablepub.messages"
        ).fetchall()
    assert len(left) == 2
    for expires_in_s, stored_s in left:
        assert 0 < expires_in_s <= 61
        assert -60 < stored_s <= 1


def test_a_relay_whose_clock_is_wrong_expires_nothing_early_and_nothing_late(
    url: str, wrong: float
) -> None:
    outbox = Outbox(url)
    outbox.enqueue(Message(b"", routing_key="q", message_id="sent", expires_in_s=600))
    outbox.enqueue(Message(b"", routing_key="q", message_id="late", expires_in_s=0.001))
    time.sleep(0.1)
    with FakeBroker() as broker:
        broker.declare_queue("q")
        with Publisher(broker.url, outbox=url) as publisher:
            assert publisher.flush(20).is_flushed
        assert [m.properties.message_id for m in broker.messages("q")] == ["sent"]
    assert [parked.message_id for parked in outbox.parked()] == ["late"]


def test_a_store_tells_the_server_s_time(url: str) -> None:
    with closing(PostgresStore(Server.of(url))) as store:
        assert abs(store.wall() - time.time()) < 1  # the server is on this host


def test_a_slow_answer_moves_the_clock_no_further_than_it_must() -> None:
    now = 100.0
    clock = ServerClock(lambda: now)
    clock.read(1_000.0, 100.0)
    assert clock() == 1_000.0
    now = 110.0
    clock.read(1_005.0, 100.0)  # somewhere in these 10 s the clock showed that
    assert clock() == 1_010.0
    clock.read(1_020.0, 109.0)  # it was set by 10 s, or a little more
    assert clock() == 1_020.0
    clock.read(900.0, 110.0)
    assert clock() == 900.0
