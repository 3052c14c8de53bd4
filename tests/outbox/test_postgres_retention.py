"""What is kept in PostgreSQL of messages that are gone, and of relays that have ended."""

import os
import time
from contextlib import closing
from typing import Any

import psycopg
import pytest

from reliablepub.message import Message
from reliablepub.outbox import history
from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.entry import Attempt, Changes
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.postgres import retention
from reliablepub.outbox.postgres import store as store_module
from reliablepub.outbox.postgres.database import create_outbox
from reliablepub.outbox.postgres.server import Server
from tests.asking import confirm, count, opened, sql
from tests.outbox.conftest import DAY_S, Clock, Make
from tests.outcomes import REFUSED
from tests.postgres import PostgresServer
from tests.stores import begin_anew
from tests.waiting import until

RUNS = """
INSERT INTO reliablepub.runs (shard, pid, host, started_at)
SELECT %s, 1, 'host', 1.0 FROM generate_series(1, %s)
"""
ATTEMPTS = """
INSERT INTO reliablepub.attempts
    (id, message_id, at, epoch, tag, outcome, reply_code, reply_text, persistence)
SELECT n, '', 1.0, '1-1', n, 'refused', 0, '', 'not written' FROM generate_series(1, %s) AS n
"""
INTERVENTIONS = """
INSERT INTO reliablepub.interventions
    (id, message_id, exchange, routing_key, at, action, person, note)
SELECT 100 + n, '', '', '', 1.0, 'discard', '', '' FROM generate_series(1, %s) AS n
"""


@pytest.fixture
def sharded(postgres_url: str) -> str:
    create_outbox(Server.of(postgres_url), shards=2)
    return postgres_url


# ---------------------------------------------------------------------------- confirmed messages


def test_what_an_earlier_relay_has_kept_goes_without_a_commit(
    url: str, clock: Clock, entry: Make
) -> None:
    with opened(url, clock=clock, keep_confirmed_s=60) as store:
        confirm(store, entry(), entry())
    clock.now -= 3_600  # by whatever clock
    with opened(url, clock=clock) as store:
        store.relieve()
        assert count(url, "confirmed") == 0
        own: Any = store
        own._retention._look_at = 0.0
        store.relieve()
        assert not own._retention.is_pruning, "or each commit would look for them"


@pytest.mark.usefixtures("busy")
def test_what_was_kept_by_a_clock_that_was_set_back_goes_too(
    url: str, clock: Clock, entry: Make
) -> None:
    with opened(url, clock=clock, keep_confirmed_s=60) as store:
        store.relieve()
        clock.now -= 3_600
        confirm(store, entry())
        clock.now += 61
        store.relieve()
        assert count(url, "confirmed") == 0


def test_each_shard_keeps_what_its_relay_keeps(sharded: str, clock: Clock, entry: Make) -> None:
    with opened(sharded, clock=clock, keep_confirmed_s=60) as earlier:
        confirm(earlier, entry())
    with opened(sharded, clock=clock, keep_confirmed_s=60) as keeps:
        clock.now += 10
        with opened(sharded, clock=clock) as keeps_none:
            clock.now += 10
            confirm(keeps, entry())
            confirm(keeps_none, entry())
            keeps_none.relieve()
            kept = sql(sharded, "SELECT message_id FROM reliablepub.confirmed")
            assert kept == [("m-2",)], "the first was kept before"


# ---------------------------------------------------------------------------- history


def test_there_is_one_pass_an_hour(
    url: str, clock: Clock, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "LOOK_S", 0.0)
    with opened(url, clock=clock) as store:
        store.relieve()
        confirm(store, one := entry())
        store.commit(Changes(attempts=[Attempt(one, "1-1", 1, REFUSED, clock.now)]))
        clock.now += 8 * DAY_S
        store.relieve()
        assert count(url, "attempts") == 1
        later = time.monotonic() + history.PASS_S
        monkeypatch.setattr(time, "monotonic", lambda: later)
        store.relieve()
        assert count(url, "attempts") == 0


def test_a_relay_that_starts_leaves_old_history_to_the_passes(
    url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To delete ten million old rows in its first turn would take minutes."""
    monkeypatch.setattr(retention, "LOOK_S", 0.0)
    monkeypatch.setattr(history, "PAGE", 2)
    sql(url, ATTEMPTS, 5)
    sql(url, INTERVENTIONS, 5)
    with opened(url, clock=clock) as store:
        assert (count(url, "attempts"), count(url, "interventions")) == (5, 5)
        left = []
        for _ in range(4):
            store.relieve()
            left.append((count(url, "attempts"), count(url, "interventions")))
        assert left == [(3, 3), (1, 1), (0, 1), (0, 1)], "the newest intervention stays"


# ---------------------------------------------------------------------------- keys


def test_a_relay_forgets_the_overdue_keys_of_messages_that_are_gone(
    url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "LOOK_S", 0.0)
    monkeypatch.setattr(retention, "KEYS_LOOK_S", 0.0)
    monkeypatch.setattr(history, "PAGE", 2)
    outbox = Outbox(url)
    for key in "abcdefg":
        outbox.enqueue(b"", key=key)
    clock.now = time.time()
    intervene(outbox_at(url), [2], Intervention(Action.PARK))
    with opened(url, clock=clock) as store:
        entries, _ = store.read_ready(1, store.snapshot().last_id, limit=9, bytes_max=10**9)
        store.commit(Changes(confirmed=entries[:-1]))
        clock.now += 6 * DAY_S
        store.relieve()
        assert count(url, "keys") == 7
        clock.now += 2 * DAY_S
        with closing(psycopg.connect(url)) as enqueuer:
            enqueuer.execute("SELECT 1 FROM reliablepub.keys WHERE key = 'c' FOR UPDATE")
            for _ in range(6):
                store.relieve()
            assert sql(url, "SELECT key FROM reliablepub.keys ORDER BY key") == [
                ("b",),
                ("c",),
                ("g",),
            ]

        def is_forgotten() -> bool:  # once the server has noticed that the enqueuer is gone
            store.relieve()
            left = sql(url, "SELECT key FROM reliablepub.keys ORDER BY key")
            return bool(left == [("b",), ("g",)])

        until(is_forgotten)
        turn = sql(url, "SELECT max(turn) FROM reliablepub.turns")
        clock.now += 6 * DAY_S
        store.relieve()
        assert sql(url, "SELECT max(turn) FROM reliablepub.turns") == turn, "nothing is overdue"
    assert count(url, "keys") == 2, "of an open and a parked message"
    assert outbox.enqueue(Message(b"", message_id="new"), key="a") == "new"
    assert outbox.enqueue(Message(b"", message_id="second"), key="b") != "second"


def test_it_forgets_as_many_keys_as_it_can_in_a_moment(
    url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "PAGE", 2)
    monkeypatch.setattr(store_module, "DELETING_S", 30.0)
    outbox = Outbox(url)
    for key in "abcde":
        outbox.enqueue(b"", key=key)
    clock.now = time.time()
    with opened(url, clock=clock) as store:
        entries, _ = store.read_ready(1, store.snapshot().last_id, limit=9, bytes_max=10**9)
        store.commit(Changes(confirmed=entries))
        clock.now += 8 * DAY_S
        store.relieve()
        assert count(url, "keys") == 0


# ---------------------------------------------------------------------------- what is no trouble


@pytest.mark.usefixtures("busy")
def test_pruning_forgets_no_key_that_is_used_again_meanwhile(url: str) -> None:
    outbox, now = Outbox(url), time.time() + 8 * DAY_S
    outbox.enqueue(b"", message_id="first", key="k")
    with closing(psycopg.connect(url, autocommit=True)) as admin:
        admin.execute("DELETE FROM reliablepub.messages")
        admin.execute("UPDATE reliablepub.keys SET kept_until = 0")
    with outbox_at(url).reading() as session:
        overdue = session.run("overdue_keys", {"now": now, "limit": 9}).fetchall()
    assert overdue == [("k", False)]
    outbox.enqueue(b"", message_id="second", key="k")
    values = {"key": "k", "now": time.time()}
    outbox_at(url).write(lambda own: own.run("forget_overdue_key", values))
    assert outbox.enqueue(b"", message_id="third", key="k") == "second"


def test_a_relay_writes_nothing_while_nothing_is_old(url: str, clock: Clock, entry: Make) -> None:
    with opened(url, clock=clock, keep_confirmed_s=60) as store:
        confirm(store, one := entry())
        store.commit(Changes(attempts=[Attempt(one, "1-1", 1, REFUSED, clock.now)]))
        turn = sql(url, "SELECT max(turn) FROM reliablepub.turns")
        for _ in range(20):
            assert store.relieve() == ""
        assert sql(url, "SELECT max(turn) FROM reliablepub.turns") == turn


@pytest.mark.usefixtures("busy")
def test_a_database_that_is_away_is_no_error(
    postgres_server: PostgresServer, url: str, clock: Clock, entry: Make
) -> None:
    with opened(url, clock=clock, keep_confirmed_s=60) as store:
        confirm(store, entry())
        clock.now += 61
        postgres_server.kill()
        assert store.relieve() == ""
        postgres_server.start()
        begin_anew(store)

        def is_deleted() -> bool:
            assert store.relieve() == ""
            return count(url, "confirmed") == 0

        until(is_deleted)


# ---------------------------------------------------------------------------- runs


def test_the_row_of_a_relay_that_runs_stays_however_often_others_start(
    sharded: str, clock: Clock
) -> None:
    with opened(sharded, clock=clock) as first:
        with closing(psycopg.connect(sharded, autocommit=True)) as app:
            app.execute(RUNS, [1, 1_500])
        with opened(sharded, clock=clock) as second:
            runs = sql(sharded, "SELECT count(*), min(id), max(id) FROM reliablepub.runs")
            assert runs == [(1_001, first.run, second.run)]
            with closing(outbox_at(sharded)) as database, database.reading() as session:
                assert [relay.pid for relay in session.relays()] == [os.getpid()] * 2
