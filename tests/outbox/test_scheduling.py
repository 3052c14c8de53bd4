"""Messages are cancelled and rescheduled by their key, beside a relay or in a transaction."""

import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import create_engine

from reliablepub import (
    ConfigurationError,
    InvalidMessage,
    Message,
    NotAnOutbox,
    Outbox,
    Publisher,
    ScheduleChange,
)
from reliablepub.outbox.admin.scheduling import due
from reliablepub.outbox.admin.selection import Selection
from reliablepub.outbox.opening import outbox_at
from reliablepub.testing import FakeBroker, faults
from tests.outbox.conftest import bodies
from tests.policies import AT_ONCE
from tests.stores import Where
from tests.waiting import until

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A busy machine can keep a relay from its turn for so long that an operator dismisses it.

    Those that a soak test has killed are to be dismissed.
    """
    if request.node.get_closest_marker("soak") is None:
        monkeypatch.setattr("reliablepub.outbox.postgres.database.EXPIRY_S", 600.0)


@pytest.fixture
def outbox(where: Where) -> Iterator[Outbox]:
    with Outbox(where) as outbox:
        outbox.create()
        yield outbox


def in_s(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def message(name: str, delay_s: float | None = 3600.0, **fields: object) -> Message:
    when = None if delay_s is None else in_s(delay_s)
    return Message(name.encode(), "", "orders", not_before=when, **fields)  # type: ignore[arg-type]


def connect(where: Where) -> "sqlite3.Connection | psycopg.Connection[tuple[object, ...]]":
    """A connection of the application."""
    return sqlite3.connect(where) if isinstance(where, Path) else psycopg.connect(where)


def counts(outbox: Outbox) -> tuple[int, int, int]:
    assert outbox.audit().is_right
    counters = outbox.status()
    return counters.stored, counters.open, counters.discarded


def wait_for_bodies(broker: FakeBroker, count: int) -> list[str]:
    until(lambda: len(bodies(broker)) >= count)
    return sorted(bodies(broker))


def test_a_cancelled_message_is_gone_and_its_key_is_free(outbox: Outbox) -> None:
    outbox.enqueue(message("a"), key="trial 17")
    outbox.enqueue(message("b"), key="trial 18")
    assert outbox.cancel("trial 17") is ScheduleChange.MADE
    assert outbox.cancel("trial 17") is ScheduleChange.UNKNOWN
    assert counts(outbox) == (2, 1, 1)
    again = outbox.enqueue(message("a again"), key="trial 17")
    assert [row["message_id"] for row in outbox.rows("open")][1] == again


def test_only_a_change_that_was_made_is_true(outbox: Outbox) -> None:
    outbox.enqueue(message("a"), key="a")
    assert not outbox.cancel("b")
    assert outbox.reschedule("a", in_s(10))
    assert not ScheduleChange.TOO_LATE


def test_a_rescheduled_message_has_its_new_time(outbox: Outbox) -> None:
    outbox.enqueue(message("a"), key="a")
    outbox.enqueue(message("b", None), key="b")
    when = datetime(2038, 1, 19, 3, 14, 7, tzinfo=UTC)
    assert outbox.reschedule("a", when, note="as asked") is ScheduleChange.MADE
    assert outbox.reschedule("b", when) is ScheduleChange.MADE
    assert [row["due_at"] for row in outbox.rows("open")] == ["2038-01-19 03:14:07"] * 2
    notes = [row["note"] for row in outbox.rows("interventions")]
    assert notes[0] == "rescheduled to 2038-01-19 03:14:07 UTC: as asked"
    assert counts(outbox) == (2, 2, 0)


def test_a_time_needs_a_time_zone(outbox: Outbox) -> None:
    outbox.enqueue(message("a"), key="a")
    with pytest.raises(InvalidMessage, match="not_before"):
        outbox.reschedule("a", datetime(2038, 1, 19))  # noqa: DTZ001


def test_there_must_be_an_outbox(tmp_path: Path) -> None:
    with Outbox(tmp_path / "none.db") as outbox, pytest.raises(NotAnOutbox):
        outbox.cancel("a")
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("isolation_level", ["", None])
def test_none_is_added_to_the_database_of_the_application(
    tmp_path: Path, isolation_level: Any
) -> None:
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path, isolation_level=isolation_level)) as app:
        app.execute("CREATE TABLE orders (id INTEGER)")
        for _ in range(2):
            with pytest.raises(NotAnOutbox, match="holds no outbox"):
                Outbox(path).cancel("a", connection=app)
            with pytest.raises(NotAnOutbox):
                Outbox(path).reschedule("a", in_s(1), connection=app)
            assert not app.in_transaction
            assert app.execute("SELECT name FROM sqlite_schema").fetchall() == [("orders",)]
            app.execute("INSERT INTO orders VALUES (1)")  # in a transaction, it stays open
            app.commit()


def test_beside_a_relay(outbox: Outbox, where: Where, broker: FakeBroker) -> None:
    with Publisher(broker.url, outbox=where) as publisher:
        for name in "abc":
            outbox.enqueue(message(name), key=name)
        assert outbox.cancel("a")
        assert outbox.reschedule("b", in_s(-5))
        assert wait_for_bodies(broker, 1) == ["b"]
        assert publisher.flush(PATIENCE_S).is_flushed
        assert outbox.cancel("b") is ScheduleChange.TOO_LATE
        assert outbox.reschedule("b", in_s(10)) is ScheduleChange.TOO_LATE
    assert counts(outbox) == (3, 1, 1)
    assert bodies(broker) == ["b"]


def test_it_is_too_late_for_what_is_in_flight(
    outbox: Outbox, where: Where, broker: FakeBroker
) -> None:
    broker.inject(faults.HoldConfirms())
    with Publisher(broker.url, outbox=where) as publisher:
        outbox.enqueue(message("a", None), key="a")
        wait_for_bodies(broker, 1)
        assert outbox.cancel("a") is ScheduleChange.TOO_LATE
        with closing(connect(where)) as app:
            assert outbox.reschedule("a", in_s(10), connection=app) is ScheduleChange.TOO_LATE
            app.commit()
        broker.release_confirms()
        assert publisher.flush(PATIENCE_S).open == 0
    assert counts(outbox) == (1, 0, 0)


def test_it_is_too_late_for_what_a_queue_may_have(
    outbox: Outbox, where: Where, broker: FakeBroker
) -> None:
    broker.inject(faults.HoldConfirms())
    with Publisher(broker.url, outbox=where, close_timeout_s=0) as publisher:
        outbox.enqueue(message("a", None), key="a")
        wait_for_bodies(broker, 1)
        until(lambda: publisher.status.counters.open == 1)  # the turn that sent it has ended
    assert outbox.cancel("a") is ScheduleChange.TOO_LATE
    assert counts(outbox) == (1, 1, 0)


def test_a_parked_message_is_cancelled_and_not_rescheduled(
    outbox: Outbox, where: Where, broker: FakeBroker
) -> None:
    with Publisher(broker.url, outbox=where, retry=AT_ONCE) as publisher:
        outbox.enqueue(Message(b"", "", "nowhere"), key="a")
        until(lambda: publisher.status.counters.parked)
        assert publisher.status.counters.open == 0
    assert outbox.reschedule("a", in_s(10)) is ScheduleChange.TOO_LATE
    assert outbox.cancel("a")
    assert counts(outbox) == (1, 0, 1)


def test_in_the_transaction_of_the_application(outbox: Outbox, where: Where) -> None:
    for name in "abc":
        outbox.enqueue(message(name), key=name)
    with closing(connect(where)) as app:
        assert outbox.cancel("a", connection=app)
        assert outbox.reschedule("b", in_s(-5), connection=app)
        app.rollback()
        assert counts(outbox) == (3, 3, 0)
        assert outbox.cancel("a", connection=app)
        assert outbox.cancel("b", connection=app)
        assert outbox.cancel("x", connection=app) is ScheduleChange.UNKNOWN
        app.commit()
    assert counts(outbox) == (3, 1, 2)


def test_what_the_transaction_itself_has_stored(outbox: Outbox, where: Where) -> None:
    outbox.enqueue(message("before"))
    with closing(connect(where)) as app:
        for name in "abc":
            outbox.enqueue(message(name), key=name, connection=app)
        assert outbox.cancel("a", connection=app)
        assert outbox.reschedule("b", in_s(-5), connection=app)
        outbox.enqueue(message("d"), key="d", connection=app)
        assert outbox.cancel("c", connection=app)
        assert outbox.cancel("d", connection=app)
        outbox.enqueue(message("d again"), key="d", connection=app)
        app.commit()
    stored, open_, discarded = counts(outbox)
    assert (stored - discarded, open_) == (3, 3)
    assert outbox.reschedule("d", in_s(7))
    assert counts(outbox) == (stored, 3, discarded)


def test_the_earliest_is_listed_first(outbox: Outbox, where: Where) -> None:
    for n, delay_s in enumerate((300.0, 100.0, None, 200.0, 400.0)):
        outbox.enqueue(message(f"m{n}", delay_s, message_id=f"m{n}"))

    def ids(**chosen: object) -> list[str]:
        options: dict[str, object] = {"due_before": None, "limit": 9} | chosen
        found = due(outbox_at(where), Selection(), **options)  # type: ignore[arg-type]
        return [row["message_id"] for row in found]

    assert ids() == ["m1", "m3", "m0", "m4"]
    assert ids(limit=2) == ["m1", "m3"]
    assert ids(due_before=time.time() + 250) == ["m1", "m3"]
    assert due(outbox_at(where), Selection(exchange="x*"), due_before=None, limit=9) == []


# ---------------------------------------------------------------------- PostgreSQL's transactions


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_transaction_with_a_snapshot_is_refused(postgres_outbox: str, level: str) -> None:
    with Outbox(postgres_outbox) as outbox, psycopg.connect(postgres_outbox) as app:
        outbox.enqueue(message("a"), key="a")
        app.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        with pytest.raises(ConfigurationError, match="read committed"):
            outbox.cancel("a", connection=app)
        app.commit()
        assert counts(outbox) == (1, 1, 0)


def test_autocommit_is_refused(postgres_outbox: str) -> None:
    with (
        Outbox(postgres_outbox) as outbox,
        psycopg.connect(postgres_outbox, autocommit=True) as app,
    ):
        outbox.enqueue(message("a"), key="a")
        with pytest.raises(ConfigurationError, match="autocommit"):
            outbox.cancel("a", connection=app)
        with app.transaction():
            assert outbox.cancel("a", connection=app)
        assert counts(outbox) == (1, 0, 1)


def test_values_are_written_as_each_library_reads_them(postgres_outbox: str) -> None:
    keys = [f"100% {name}:b'\\ %s" for name in "abc"]
    with Outbox(postgres_outbox) as outbox:
        for key in keys:
            outbox.enqueue(message(key), key=key)
        with psycopg.connect(postgres_outbox, row_factory=dict_row) as own:
            assert outbox.cancel(keys[0], note="50 %", connection=own)
        engine = create_engine(postgres_outbox.replace("postgresql:", "postgresql+psycopg:"))
        with engine.begin() as connection:
            assert outbox.cancel(keys[1], note=":x %(y)s", connection=connection)
            assert outbox.reschedule(keys[2], in_s(9), connection=connection)
        engine.dispose()
        assert counts(outbox) == (3, 1, 2)
        notes = [row["note"] for row in outbox.rows("interventions")]
        assert notes[0] == f"cancelled by key {keys[0]}: 50 %"
        assert notes[1] == f"cancelled by key {keys[1]}: :x %(y)s"


def test_a_relay_waits_for_the_transaction(postgres_outbox: str, broker: FakeBroker) -> None:
    with (
        Outbox(postgres_outbox) as outbox,
        psycopg.connect(postgres_outbox) as app,
        Publisher(broker.url, outbox=postgres_outbox) as publisher,
    ):
        for name in "ab":
            outbox.enqueue(message(name), key=name)
        assert outbox.cancel("a", connection=app)
        assert outbox.reschedule("b", in_s(-5), connection=app)
        outbox.enqueue(message("c", None))
        time.sleep(0.3)
        assert bodies(broker) == []
        app.rollback()
        assert wait_for_bodies(broker, 1) == ["c"]
        for name in "ab":
            assert outbox.reschedule(name, in_s(-5))
        assert wait_for_bodies(broker, 3) == ["a", "b", "c"]
        assert publisher.flush(PATIENCE_S).open == 0
        assert counts(outbox) == (3, 0, 0)


# ---------------------------------------------------------------------- cancelled xor sent


def test_messages_that_wait_hold_up_no_flush_and_no_other_message(
    outbox: Outbox, where: Where, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for store in ("sqlite", "postgres"):
        monkeypatch.setattr(f"reliablepub.outbox.{store}.store.SCANNED_MAX", 3)
    for n in range(20):
        outbox.enqueue(message(f"far-{n}", 9_999))
    outbox.enqueue(message("now", 0))
    with Publisher(broker.url, outbox=where) as publisher:
        assert publisher.flush(PATIENCE_S).counters.open == 20, "it waits for none that waits"
        assert bodies(broker) == ["now"]
        publisher.publish(b"next", routing_key="orders").result(PATIENCE_S)
        assert publisher.flush(PATIENCE_S).counters.open == 20


class Race:
    """Threads that enqueue, cancel and reschedule messages that are just due."""

    def __init__(self, where: Where, seed: int, count: int, pause_s: float = 0.0) -> None:
        self._where = where
        self._seed = seed
        self._count = count
        self._pause_s = pause_s
        self.cancelled: set[str] = set()
        self.made = 0
        self.too_late = 0
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(3)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join()
        assert self.errors == []

    def _run(self, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        try:
            with Outbox(self._where) as outbox:
                for n in range(self._count):
                    if n == self._count // 2:
                        until(lambda: outbox.status().confirmed)  # the relay has begun to look
                    name = f"{number}-{n}"
                    outbox.enqueue(message(name, rng.uniform(-0.01, 0.15)), key=name)
                    old = f"{number}-{rng.randrange(max(0, n - 30), n + 1)}"
                    self._change(outbox, rng, old)
                    time.sleep(self._pause_s)
        except BaseException as error:  # noqa: BLE001 - the test's thread shows it
            self.errors.append(error)

    def _change(self, outbox: Outbox, rng: random.Random, key: str) -> None:
        kind = rng.random()
        if kind < 0.3:
            result = outbox.reschedule(key, in_s(rng.uniform(-0.1, 0.2)))
        elif kind < 0.7:
            result = outbox.cancel(key)
            self._note(key, result)
        else:
            with closing(connect(self._where)) as app:
                result = outbox.cancel(key, connection=app)
                if rng.random() < 0.5:
                    app.commit()
                    self._note(key, result)
                else:
                    app.rollback()
        self.made += result is ScheduleChange.MADE
        self.too_late += result is ScheduleChange.TOO_LATE

    def _note(self, key: str, result: ScheduleChange) -> None:
        if result is ScheduleChange.MADE:
            self.cancelled.add(key)

    @property
    def names(self) -> set[str]:
        return {f"{number}-{n}" for number in range(3) for n in range(self._count)}


def check(race: Race, outbox: Outbox, arrived: list[str]) -> None:
    assert not race.cancelled & set(arrived), "cancelled and sent"
    assert race.cancelled | set(arrived) == race.names, "lost"
    assert race.made
    assert race.too_late
    assert counts(outbox) == (len(race.names), 0, len(race.cancelled))


def test_a_message_is_cancelled_or_sent(outbox: Outbox, where: Where, broker: FakeBroker) -> None:
    with Publisher(broker.url, outbox=where, window_max=10):
        with Race(where, 1, 40) as race:
            pass
        until(lambda: not outbox.status().open)
    arrived = bodies(broker)
    assert len(arrived) == len(set(arrived)), "sent twice"
    check(race, outbox, arrived)


def race_through_kills(where: Where, broker: FakeBroker, race: Race, kills: int) -> None:
    """Kill the relay again and again while the race runs; the last relay sends the rest."""
    command = [sys.executable, "-m", "reliablepub", "relay", "--url", broker.url, "--outbox"]
    rng = random.Random(kills)
    with Outbox(where) as outbox, ExitStack() as last:
        with race:
            for _ in range(kills):
                before = len(bodies(broker))
                with subprocess.Popen([*command, str(where)]) as relay:
                    wait_for_bodies(broker, before + 1)
                    time.sleep(rng.uniform(0, 0.05))
                    relay.kill()
            last.enter_context(Publisher(broker.url, outbox=where))  # the race may wait for one
        until(lambda: not outbox.status().open)


def test_a_message_is_cancelled_or_sent_though_the_relay_is_killed(
    tmp_path: Path, broker: FakeBroker
) -> None:
    race = Race(tmp_path / "outbox.db", 2, 100, pause_s=0.01)
    race_through_kills(tmp_path / "outbox.db", broker, race, 2)
    with Outbox(tmp_path / "outbox.db") as outbox:
        check(race, outbox, bodies(broker))


@pytest.mark.soak
@pytest.mark.timeout(1_800)
def test_a_message_is_cancelled_or_sent_through_a_hundred_kills(
    outbox: Outbox, where: Where, broker: FakeBroker
) -> None:
    race = Race(where, 3, 10_000, pause_s=0.01)
    race_through_kills(where, broker, race, 100)
    check(race, outbox, bodies(broker))
