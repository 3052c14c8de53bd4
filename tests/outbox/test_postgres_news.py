"""What a relay learns in PostgreSQL is not lost by the failure of a later statement."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from reliablepub import (
    Message,
    Outbox,
    OutboxError,
    OutboxInUse,
    OutboxLocked,
    OutboxUnreachable,
    OutboxUnsure,
    Publisher,
    PublisherFailed,
)
from reliablepub._core.events import Batch
from reliablepub.outbox.entry import HELD, Attempt, Changes, Entry, Release
from reliablepub.outbox.postgres import store as store_module
from reliablepub.outbox.postgres.database import create_outbox
from reliablepub.outbox.postgres.server import Link, Server
from reliablepub.outbox.postgres.store import _TRIES, PostgresStore
from reliablepub.outcome import Outcome, OutcomeKind
from reliablepub.relay import relay as relay_module
from reliablepub.testing import FakeBroker
from tests.asking import ready_ids, stored
from tests.outbox.conftest import Make
from tests.outbox.cuts import Cut, lost, server_down
from tests.postgres import PostgresServer, can_connect
from tests.stores import begin_anew
from tests.waiting import until

ALL: dict[str, Any] = {"limit": 1000, "bytes_max": 10**9}


def message_ids(entries: list[Entry]) -> list[str | None]:
    return [entry.message.message_id for entry in entries]


def told(store: PostgresStore) -> list[str | None]:
    """The messages that a relay would read now, if it is told that there are any."""
    if not store.changed_elsewhere():
        return []
    snapshot = store.snapshot()
    ids = {id_ for first, last in snapshot.late for id_ in range(first, last + 1)}
    found = store.read_ready(1, snapshot.last_id, **ALL)[0]
    due = store.read_due(time.time(), loaded=(), **ALL)[0]
    assert ids <= {entry.id for entry in (*found, *due)}
    return message_ids([*found, *due])


# ---------------------------------------------------------------------------- looks


def test_a_message_found_by_a_look_whose_beat_fails_is_told_later(
    url: str, own: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator's transaction holds the next turn, and is rolled back."""
    monkeypatch.setattr("reliablepub.outbox.postgres.store.BEAT_S", 0.0)
    own._link.is_visible = False  # so that it beats, as behind a pooler
    outbox = Outbox(url)
    outbox.enqueue(Message(b"", message_id="other"), key="other")
    assert told(own) == ["other"]
    with closing(psycopg.connect(url)) as application:
        outbox.cancel("other", connection=application)
        outbox.enqueue(Message(b"", message_id="new"))
        with pytest.raises(OutboxLocked):
            own.changed_elsewhere()
        application.rollback()
    assert told(own) == ["other", "new"]


def test_a_publisher_sends_what_came_while_an_operator_s_transaction_was_open(url: str) -> None:
    outbox = Outbox(url)
    with FakeBroker() as broker, Publisher(broker.url, outbox=url) as publisher:
        broker.declare_queue("orders")
        with closing(psycopg.connect(url)) as application:
            message = Message(b"", exchange="none", message_id="cancelled")
            outbox.enqueue(message, key="k", connection=application)
            application.commit()
            application.execute("SELECT 1")
            outbox.cancel("k", connection=application)
            time.sleep(1.1)  # longer than the beat: the relay waits for the turn
            outbox.enqueue(Message(b"new", routing_key="orders"))
            until(lambda: publisher.status.trouble != "")  # after 15 s
            application.rollback()
        until(lambda: len(broker.messages("orders")) == 1)


def test_an_operator_s_change_is_told_though_the_turn_that_reads_it_fails(
    url: str,
    own: PostgresStore,
    admin: psycopg.Connection,
    entry: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parked = entry(message_id="parked")
    own.commit(Changes(new=[parked]))
    outbox = Outbox(url)
    admin.execute("UPDATE reliablepub.messages SET due_at = 1e10")
    assert own.read_due(time.time(), loaded=(), **ALL) == ([], 1e10)
    assert outbox.retry([parked.id]) == 1
    assert own.changed_elsewhere()
    Cut(monkeypatch, times=_TRIES)
    with pytest.raises(OutboxUnreachable):
        own.snapshot()
    own.touched()
    assert told(own) == ["parked"]


# ---------------------------------------------------------------------------- unsure commits


def test_a_commit_that_was_cut_off_ends_the_run_and_is_awaited(
    url: str, own: PostgresStore, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a replica, for instance, while its connection is lost."""
    server = psycopg.connect(url)

    def lose(link: Link, steps: Any) -> Any:
        for name, values in steps:
            server.execute(link.queries.get(name, name).encode(), values)
        link.close()
        raise lost()

    with server_down(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(Link, "transact", lose)
        with pytest.raises(OutboxUnsure):
            own.commit(Changes(new=[entry(message_id="unsure")]))
    Outbox(url).enqueue(Message(b"", message_id="later"))
    run = own.run
    with pytest.raises(OutboxUnreachable, match="cut off"):
        own.commit(Changes(new=[entry(message_id="too early")]))
    with pytest.raises(OutboxLocked):
        own.changed_elsewhere()
    server.commit()
    server.close()
    assert not begin_anew(own).has_lost
    assert own.run > run
    own.commit(Changes(new=[entry(message_id="next")]))
    snapshot = own.snapshot()
    assert ready_ids(own, 1, snapshot.last_id) == ["unsure", "later", "next"]
    assert snapshot.counters.stored == 3
    assert not Outbox(url).audit().differences


@pytest.mark.parametrize("is_committing", [False, True])
def test_a_turn_without_new_messages_that_was_cut_off_ends_no_run(
    url: str,
    own: PostgresStore,
    entry: Make,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_committing: bool,
) -> None:
    own.commit(Changes(new=[one := entry()]))
    run = own.run
    with server_down(monkeypatch):
        Cut(monkeypatch, behind=is_committing)
        with pytest.raises(OutboxUnreachable):
            own.commit(Changes(confirmed=[one]))
    own.changed_elsewhere()
    assert own.commit(Changes(confirmed=[one])).counters.confirmed == 1
    assert own.run == run
    assert not Outbox(url).audit().differences


@pytest.mark.parametrize("others", [0, 1, 2])
@pytest.mark.parametrize("is_committing", [False, True])
def test_lost_commits_are_told_though_others_have_taken_as_many_turns(
    url: str,
    own: PostgresStore,
    admin: psycopg.Connection,
    entry: Make,
    *,
    others: int,
    is_committing: bool,
) -> None:
    own.commit(Changes(new=[sent := entry()]))
    admin.execute(  # as after a fail-over to a replica that lagged
        "DELETE FROM reliablepub.turns WHERE turn = (SELECT max(turn) FROM reliablepub.turns)"
    )
    outbox = Outbox(url)
    for _ in range(others):
        outbox.retry([])
    outbox.enqueue(Message(b""))
    if is_committing:
        with pytest.raises(OutboxUnreachable, match="has lost commits"):
            own.commit(Changes(confirmed=[sent]))
    ended = begin_anew(own)
    assert ended.has_lost
    assert "has lost commits: turn 3" in str(ended)
    found, _ = own.read_ready(1, own.snapshot().last_id, **ALL)
    assert len(found) == 2
    [why] = admin.execute("SELECT began_anew FROM reliablepub.runs ORDER BY id DESC LIMIT 1")
    assert "has lost commits" in why[0]


@pytest.fixture
def restart(admin: psycopg.Connection) -> Callable[[], object]:
    """Stands for a restart of the server, which the test shares with others."""
    admin.execute("CREATE TABLE public.server AS SELECT cluster, 1 AS n FROM reliablepub.server()")
    admin.execute(
        "CREATE OR REPLACE FUNCTION reliablepub.server(OUT cluster text, OUT started text)"
        " LANGUAGE plpgsql AS $$ BEGIN"
        " SELECT s.cluster, s.n INTO cluster, started FROM public.server AS s; END $$"
    )
    return lambda: admin.execute("UPDATE public.server SET n = n + 1")


@pytest.fixture
def fail_over(url: str, restart: Callable[[], object]) -> Callable[[str], None]:
    """Stands for a fail-over to a replica that lacks the last message, whose id a new one gets."""

    def fail_over(message_id: str) -> None:
        with closing(psycopg.connect(url)) as connection, connection:
            [(last,)] = connection.execute(
                "DELETE FROM reliablepub.messages"
                " WHERE id = (SELECT max(id) FROM reliablepub.messages) RETURNING id"
            )
            connection.execute("SELECT setval('reliablepub.message_ids', %s, false)", [last])
            restart()
            message = Message(b"", routing_key="q", message_id=message_id)
            Outbox(url).enqueue(message, connection=connection)

    return fail_over


@pytest.mark.parametrize("is_committing", [False, True])
def test_a_server_that_was_started_again_ends_the_run(
    url: str, restart: Callable[[], object], own: PostgresStore, entry: Make, *, is_committing: bool
) -> None:
    Outbox(url).enqueue(Message(b"", message_id="before"))
    own.changed_elsewhere()
    [before], _ = own.read_ready(1, own.snapshot().last_id, **ALL)
    own.commit(Changes(sent=[Batch(1, 1, [before])]))
    Outbox(url).enqueue(Message(b"", message_id="uncounted"))
    assert own.changed_elsewhere()
    restart()
    if is_committing:
        with pytest.raises(OutboxUnreachable, match="was restarted"):
            own.commit(Changes(new=[entry()], confirmed=[before]))
    assert not begin_anew(own).has_lost
    found, _ = own.read_ready(1, own.snapshot().last_id, **ALL)
    assert message_ids(found) == ["before", "uncounted"]
    assert [one.uncertain for one in found] == [1, 0]
    counters = own.commit(Changes(confirmed=found)).counters
    assert (counters.stored, counters.confirmed) == (2, 2)
    assert not Outbox(url).audit().differences


def test_the_confirm_of_a_lost_message_takes_no_other_with_it(
    url: str, own: PostgresStore, admin: psycopg.Connection, entry: Make
) -> None:
    """A crash of one server process has lost it, which a relay behind a pooler does not notice."""
    lost = stored(own, *(entry() for _ in range(3)))
    admin.execute("UPDATE reliablepub.messages SET stored_at = stored_at + 1, message_id = 'other'")
    outcome = Outcome(OutcomeKind.RETURNED, 312, "NO_ROUTE")
    confirmed, parked, discarded = lost
    given_up = [Attempt(one, "1-1", 1, outcome, 1.0) for one in (parked, discarded)]
    own.commit(Changes(confirmed=[confirmed], parked=given_up[:1], discarded=given_up[1:]))
    assert [row["message_id"] for row in Outbox(url).rows("open")] == ["other"] * 3


def test_a_relay_goes_on_and_raises_a_sequence_that_is_behind(
    url: str, own: PostgresStore, admin: psycopg.Connection, entry: Make
) -> None:
    """As after a move by logical replication, which copies rows and no sequences."""
    for _ in range(3):
        Outbox(url).enqueue(Message(b""))
    own.changed_elsewhere()
    admin.execute("SELECT setval('reliablepub.message_ids', 1)")
    with pytest.raises(OutboxLocked, match="message_ids is behind its rows"):
        Outbox(url).enqueue(Message(b""))
    with pytest.raises(OutboxLocked, match="message_ids is behind its rows"):
        own.commit(Changes(new=[entry()]))
    own.changed_elsewhere()
    own.commit(Changes(new=[one := entry()]))
    assert one.id == 4
    assert Outbox(url).enqueue(Message(b""))
    assert not Outbox(url).audit().differences


def test_a_relay_that_starts_raises_all_sequences_that_are_behind(
    url: str, admin: psycopg.Connection, entry: Make
) -> None:
    with closing(PostgresStore(Server.of(url))) as own:
        own.commit(Changes(new=[entry(), entry()]))
    for name in ("message_ids", "runs_id_seq"):
        admin.execute(f"SELECT setval('reliablepub.{name}', 1, false)".encode())
    with closing(PostgresStore(Server.of(url))) as own:
        assert own.run == 2
        found, _ = own.read_ready(1, own.snapshot().last_id, **ALL)
        assert [one.id for one in found] == [1, 2]
        own.commit(Changes(new=[one := entry()]))
        assert one.id == 3


def test_a_relay_publishes_the_message_that_has_got_the_id_of_a_lost_one(
    url: str, fail_over: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "BEAT_S", 3_600.0)  # it has read the message since its turn
    with FakeBroker() as broker, Publisher(broker.url, outbox=url) as publisher:
        broker.declare_queue("q")
        broker.block()
        before = publisher.publish(b"", routing_key="q", message_id="before")
        until(lambda: publisher.status.link == "blocked")
        Outbox(url).enqueue(Message(b"", routing_key="q", message_id="lost"))
        until(lambda: publisher.status.buffered == 1)
        fail_over("other")
        broker.unblock()
        assert publisher.flush(30).is_flushed
        told = {message.properties.message_id for message in broker.messages("q")}
        before.result(10)
    assert told >= {"before", "other"}
    assert not Outbox(url).audit().differences


def test_a_message_that_another_program_has_stored_its_own_way_is_sent(
    url: str, admin: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No look finds it, and no ledger counts it. It is told, and a run of its own reads it."""
    monkeypatch.setattr(relay_module, "STRANDED_S", 0.5)
    with FakeBroker() as broker, Publisher(broker.url, outbox=url) as publisher:
        broker.declare_queue("q")
        publisher.publish(b"", routing_key="q").result(20)
        admin.execute(
            "INSERT INTO reliablepub.messages (stored_at, run, size, message_id, exchange,"
            " routing_key, body) VALUES (1, 5, 200, 'm', '', 'q', '')"
        )
        until(lambda: len(broker.messages("q")) == 2)
    why = admin.execute("SELECT began_anew FROM reliablepub.runs ORDER BY id DESC LIMIT 1")
    assert why.fetchone() == ("message 2 is open and due, and no read has found it",)


def test_receipts_outlive_a_restart_of_the_server(
    url: str, admin: psycopg.Connection, restart: Callable[[], object]
) -> None:
    with FakeBroker() as broker, Publisher(broker.url, outbox=url) as publisher:
        broker.declare_queue("q")
        broker.block()
        receipts = [publisher.publish(b"", routing_key="q") for _ in range(3)]
        soon = datetime.now(UTC) + timedelta(seconds=1)
        waiting = publisher.publish(b"", routing_key="q", not_before=soon)
        restart()
        until(lambda: admin.execute("SELECT 1 FROM reliablepub.runs WHERE id = 2").fetchone())
        broker.unblock()
        for receipt in (*receipts, waiting):
            receipt.result(30)
    assert not Outbox(url).audit().differences


def test_callers_are_told_while_the_next_run_cannot_begin(
    url: str, restart: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeBroker() as broker, Publisher(broker.url, outbox=url) as publisher:
        broker.declare_queue("q")
        publisher.publish(b"", routing_key="q").result(20)
        with monkeypatch.context() as patch:
            failed: list[object] = []

            def fail(_: PostgresStore, limit: int) -> Any:
                failed.append(limit)
                raise OutboxUnreachable("the server is down again")

            patch.setattr(PostgresStore, "held_exchanges", fail)
            restart()
            until(lambda: failed)
            with pytest.raises(OutboxUnreachable, match="down again"):
                publisher.publish(b"", routing_key="q")
        until(lambda: can_publish(publisher))
        assert publisher.flush(20).is_flushed
        told = {message.properties.message_id for message in broker.messages("q")}
        assert len(told) == 2  # the first perhaps twice: its confirm was not recorded yet


def can_publish(publisher: Publisher) -> bool:
    try:
        publisher.publish(b"", routing_key="q")
    except OutboxUnreachable:
        return False
    return True


def test_a_publisher_whose_receipts_may_be_of_lost_messages_fails(
    url: str, admin: psycopg.Connection
) -> None:
    with FakeBroker() as broker, suppress(PublisherFailed):
        broker.declare_queue("q")
        with Publisher(broker.url, outbox=url) as publisher:
            broker.block()
            receipt = publisher.publish(b"", routing_key="q")
            admin.execute("DELETE FROM reliablepub.turns WHERE turn > 1")
            with pytest.raises(PublisherFailed, match="has lost commits"):
                receipt.result(30)


def test_a_publisher_without_receipts_goes_on_after_lost_commits(
    url: str, admin: psycopg.Connection
) -> None:
    with FakeBroker() as broker, Publisher(broker.url, outbox=url) as publisher:
        broker.declare_queue("q")
        Outbox(url).enqueue(Message(b"", routing_key="q"))
        assert publisher.flush(30).is_flushed
        admin.execute("DELETE FROM reliablepub.turns WHERE turn > 1")
        until(lambda: admin.execute("SELECT 1 FROM reliablepub.runs WHERE id = 2").fetchone())
        Outbox(url).enqueue(Message(b"", routing_key="q"))
        assert publisher.flush(30).is_flushed
        assert len(broker.messages("q")) == 2


@pytest.mark.postgres
def test_a_crash_of_a_server_process_takes_no_message_that_a_relay_has_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server recovers without a new start; new messages would get the ids of lost ones."""
    monkeypatch.setattr(store_module, "BEAT_S", 3_600.0)  # the crash must not take a turn either
    settings = {"synchronous_commit": "off", "wal_writer_delay": "10s"}
    with PostgresServer(settings=settings) as server:
        url = server.url_of()
        create_outbox(Server.of(url), allows_loss=True)
        with closing(PostgresStore(Server.of(url))) as own, Outbox(url) as outbox:
            server.execute("CHECKPOINT")
            outbox.enqueue(Message(b"", message_id="read"))
            assert own.changed_elsewhere()
            [read], _ = own.read_ready(1, own.snapshot().last_id, **ALL)
            with closing(psycopg.connect(url)) as killed, closing(psycopg.connect(url)) as other:
                os.kill(killed.info.backend_pid, signal.SIGKILL)
                with pytest.raises(psycopg.OperationalError):
                    other.execute("SELECT pg_sleep(60)")
            until(lambda: can_connect(url))
            outbox.enqueue(Message(b"", message_id="new"))
            own.commit(Changes(confirmed=[read]))
            assert [row["message_id"] for row in outbox.rows("open")] == ["new"]


def test_turns_of_operators_are_no_lost_commits(
    url: str, own: PostgresStore, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are those that the relay has forgotten."""
    monkeypatch.setattr(store_module, "KEPT_TURNS", 2)
    outbox = Outbox(url)
    for count in range(1, 20):
        for _ in range(count % 4):
            outbox.retry([])
        if count % 2:
            own.changed_elsewhere()
        assert own.commit(Changes(new=[entry()])).counters.stored == count


# ---------------------------------------------------------------------------- large commits


def test_a_commit_of_many_large_messages_is_several_statements(
    own: PostgresStore, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL ends a connection that sends 1 GiB in one statement."""
    monkeypatch.setattr(store_module, "PART_BYTES", 3_000)
    transact = Link.transact
    counts: list[int] = []

    def measure(link: Link, steps: Any) -> Any:
        inserted = [values["bodies"] for name, values in steps if name.startswith("insert_")]
        counts.extend(map(len, inserted))
        return transact(link, steps)

    monkeypatch.setattr(Link, "transact", measure)
    lengths = (1_000, 1_000, 5_000, 10, 1_000, 1_000, 1_000)
    new = [entry(body=bytes(length)) for length in lengths]
    new += [entry(body=bytes(length), ordering_key=f"k-{length}") for length in (2_000, 2_500)]
    assert own.commit(Changes(new=new)).counters.stored == 9
    assert counts == [2, 1, 3, 1, 1, 1]
    found, _ = own.read_ready(1, 99, **ALL)
    assert [(one.id, len(one.message.body)) for one in found] == [
        (one.id, len(one.message.body)) for one in new
    ]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_commit_that_is_larger_than_the_socket_s_buffers_ends(
    own: PostgresStore, admin: psycopg.Connection, entry: Make, *, is_lost: bool
) -> None:
    """Also one whose first statement fails while the others are being sent."""
    own.commit(Changes(new=[entry()]))
    if is_lost:
        admin.execute("UPDATE reliablepub.turns SET turn = turn + 5000, run = 99")
    new = [entry(body=bytes(40_000)) for _ in range(2_000)]
    if is_lost:
        with pytest.raises(OutboxInUse):
            own.commit(Changes(new=new))
    else:
        assert own.commit(Changes(new=new)).counters.stored == 2_001


# ---------------------------------------------------------------------------- lost answers


def held(entry: Make, count: int) -> list[Entry]:
    entries = [entry() for _ in range(count)]
    for waiting in entries:
        waiting.due_at, waiting.is_plain = HELD, False
    return entries


def test_a_release_whose_answer_is_lost_is_continued(
    own: PostgresStore, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it seemed to have released nothing, the pause would end, and the others wait for ever."""
    own.commit(Changes(new=held(entry, 5)))
    cut = Cut(monkeypatch, step="release", behind=True)
    first = Release("orders", "created", 2)
    own.commit(Changes(released=[first]))
    assert not cut.left
    assert first.count == first.limit
    own.commit(Changes(released=[second := Release("orders", "created", 5, after=first.last)]))
    assert second.count == 3


def test_a_commit_is_done_though_the_messages_that_stay_held_cannot_be_counted(
    own: PostgresStore, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.commit(Changes(new=held(entry, 5)))
    failure = OutboxUnreachable("the connection is lost")
    Cut(monkeypatch, "read", step="count_held", error=lambda: failure)
    release = Release("orders", "created", 1, is_counted=True)
    assert own.commit(Changes(new=[entry()], released=[release])).counters.stored == 6
    assert release.count == 1


def test_a_damaged_message_is_told_though_the_answer_is_lost(
    own: PostgresStore, admin: psycopg.Connection, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.commit(Changes(new=[damaged := entry()]))
    admin.execute("UPDATE reliablepub.messages SET body = 'x'")
    Cut(monkeypatch, step="park_damaged", behind=True)
    assert own.read_ready(1, 9, **ALL)[0] == []
    assert [row.id for row in own.damaged()] == [damaged.id]


def test_a_damaged_message_that_cannot_be_parked_now_is_parked_later(
    url: str,
    own: PostgresStore,
    admin: psycopg.Connection,
    entry: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own.commit(Changes(new=[damaged := entry()]))
    admin.execute("UPDATE reliablepub.messages SET body = 'x'")
    Cut(monkeypatch, step="park_damaged", times=_TRIES)
    assert own.read_ready(1, 9, **ALL)[0] == []
    assert own.damaged() == []
    assert own.changed_elsewhere()
    assert [row.id for row in own.damaged()] == [damaged.id]
    [parked] = Outbox(url).parked()
    assert parked.id == damaged.id
    assert not Outbox(url).audit().differences


def test_a_sequence_is_restarted_while_a_relay_looks(url: str, own: PostgresStore) -> None:
    """`ALTER SEQUENCE` puts it into another file, and a reader may find no row in the old one."""
    looks = 0
    is_over = threading.Event()

    def restart() -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            while not is_over.is_set():
                connection.execute("ALTER SEQUENCE reliablepub.message_ids RESTART")

    with ThreadPoolExecutor(1) as executor:
        restarts = executor.submit(restart)
        try:
            while looks < 1_000:
                with suppress(OutboxError):  # "could not read block 0", from the server
                    own.changed_elsewhere()
                looks += 1
        finally:
            is_over.set()
        restarts.result()
