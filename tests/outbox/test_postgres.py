"""What is PostgreSQL's own: ids that become visible late, fences, commits that are cut off."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Any

import psycopg
import pytest

from reliablepub import (
    Message,
    Outbox,
    OutboxInUse,
    OutboxLocked,
    OutboxUnreachable,
    OutboxUnsure,
    Publisher,
    ScheduleChange,
)
from reliablepub._core.events import Batch
from reliablepub.errors import OutboxDiskFailed, OutboxError
from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.database import NO_CHANGE, Relaying, Session
from reliablepub.outbox.entry import Changes, Entry
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.patience import Patience
from reliablepub.outbox.postgres import database, ownership, server
from reliablepub.outbox.postgres.server import Link, Server
from reliablepub.outbox.postgres.store import PostgresStore
from reliablepub.testing import FakeBroker
from tests.asking import fill, ready_ids, sql, stored
from tests.between import after
from tests.outbox.conftest import Make
from tests.outbox.cuts import Cut, end_connections, server_down
from tests.postgres import PostgresServer, can_connect
from tests.stores import begin_anew
from tests.waiting import until

ALL: dict[str, Any] = {"limit": 1000, "bytes_max": 10**9}


@pytest.fixture
def url(postgres_url: str) -> str:
    """An outbox in the database that a test may also reach by a PgBouncer."""
    Outbox(postgres_url).create()
    return postgres_url


def message_ids(entries: list[Entry]) -> list[str | None]:
    return [entry.message.message_id for entry in entries]


def sent_ids(broker: FakeBroker) -> list[str]:
    return [str(message.properties.message_id) for message in broker.messages("orders")]


def counted(url: str) -> tuple[int, ...]:
    with closing(outbox_at(url)) as database, database.reading() as session:
        found: tuple[int, ...] = session.run("audit").fetchone()
        return found


# ---------------------------------------------------------------------------- ids come late


def test_a_row_of_a_slow_transaction_is_told_when_it_commits(url: str, own: PostgresStore) -> None:
    outbox = Outbox(url)
    with psycopg.connect(url) as slow:
        outbox.enqueue(Message(b"", message_id="slow"), connection=slow)
        outbox.enqueue(Message(b"", message_id="fast"))
        assert own.changed_elsewhere()
        first = own.snapshot()
        entries, upto = own.read_ready(1, first.last_id, **ALL)
        assert (message_ids(entries), upto, first.late) == (["fast"], first.last_id, ())
        assert not own.changed_elsewhere()
    assert own.changed_elsewhere()
    second = own.snapshot()
    assert (second.last_id, second.late) == (first.last_id, ((1, 1),))
    assert second.counters.open == 2
    assert ready_ids(own, 1, 1) == ["slow"]


def test_a_row_whose_transaction_has_a_number_of_before_a_crash_is_told() -> None:
    """A backend that is killed has the server recover, in the same run of the relay.

    What was rolled back just before is forgotten; later transactions get those numbers.
    """
    with PostgresServer(settings={"wal_writer_delay": "10s"}) as server:
        url = server.url_of()
        with closing(Outbox(url)) as outbox:
            outbox.create()
            outbox.enqueue(Message(b"", message_id="before"))
        sql(url, "CREATE TABLE orders (n integer)")
        with closing(PostgresStore(Server.of(url))) as own:
            before = own.snapshot()
            own.commit(Changes(confirmed=own.read_ready(1, before.last_id, **ALL)[0]))
            with closing(psycopg.connect(url)) as application:
                for _ in range(5):
                    application.execute("INSERT INTO orders VALUES (1)")
                    application.rollback()
                assert not own.changed_elsewhere()
                with closing(psycopg.connect(url)) as other:
                    os.kill(other.info.backend_pid, signal.SIGKILL)
                with pytest.raises(psycopg.OperationalError):
                    application.execute("SELECT pg_sleep(60)")
            until(lambda: can_connect(url))
            Outbox(url).enqueue(Message(b"", message_id="after"))
            assert own.changed_elsewhere()
            after_crash = own.snapshot()
            assert ready_ids(own, before.last_id + 1, after_crash.last_id) == ["after"]
            assert after_crash.counters.stored == 2


def test_a_turn_may_take_longer_than_the_statements_of_its_user(url: str) -> None:
    """The first turn counts all messages that came while no relay ran, for instance."""
    with psycopg.connect(url) as administrator:
        administrator.execute(
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET statement_timeout = 500',"
            " current_database()); END $$"
        )

    def is_started() -> bool:
        with psycopg.connect(url) as slow, ThreadPoolExecutor(1) as pool:
            slow.execute("LOCK TABLE reliablepub.attempts")  # which the first turn reads
            started = pool.submit(PostgresStore, Server.of(url))
            until(lambda: is_waited_for(url))
            time.sleep(0.7)
            slow.rollback()
            try:
                started.result().close()
            except OutboxLocked as error:
                if "lock timeout" not in str(error):
                    raise
                return False  # the machine stood still
            return True

    until(is_started)


UNTIL_WAITED_FOR = (  # 50 s at most
    "DO $$ BEGIN FOR i IN 1..1000 LOOP"
    " EXIT WHEN EXISTS (SELECT 1 FROM pg_locks WHERE NOT granted);"
    " PERFORM pg_sleep(0.05); END LOOP; END $$"
)


def is_waited_for(url: str) -> bool:
    with psycopg.connect(url) as looking:
        return looking.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone() is not None


def test_a_message_that_is_imported_slowly_is_found(url: str, own: PostgresStore) -> None:
    """The relay has read higher ids by the time of the import's commit."""
    row: dict[str, Any] = dict.fromkeys(("due_at", "expires_at", "ordering_key", "refused_at"))
    row |= dict.fromkeys(("nacked", "returned", "refused", "uncertain"), 0)
    row |= {"message_id": "imported", "exchange": "", "routing_key": "", "properties": "{}"}
    row |= {"stored_at": 1.0, "size": 10, "checksum": -1, "body": b""}

    def work(session: Session) -> None:
        (row["id"],) = session.run("next_id").fetchone()
        session.run("import_open", row).fetchone()
        fill(url, Message(b"", message_id="later"))
        assert own.changed_elsewhere()
        assert own.snapshot().last_id > row["id"]
        session.run("change_ledger", NO_CHANGE | {"stored": 1, "shard": 0, "open_bytes": 10})

    with closing(outbox_at(url)) as database:
        database.write(work)
    assert own.changed_elsewhere()
    found = own.snapshot()
    ids = [id_ for first, last in found.late for id_ in range(first, last + 1)]
    due, _ = own.read_due(time.time(), loaded=(), **ALL)
    assert row["id"] in ids or message_ids(due) == ["imported"]


def test_rows_with_transactions_of_another_cluster_are_sent_and_counted_once(url: str) -> None:
    """A dump that was restored on another server; the numbers below have not begun there."""
    outbox = Outbox(url)
    for number in range(3):
        outbox.enqueue(Message(b"", message_id=str(number)))
    with closing(PostgresStore(Server.of(url))) as before:
        counted_before = before.snapshot().counters
    sql(url, "UPDATE reliablepub.messages SET xid = '4000000000'")
    sql(url, "UPDATE reliablepub.turns SET cluster = '7/7'")
    outbox.enqueue(Message(b"", message_id="new"))
    with closing(PostgresStore(Server.of(url))) as restored:
        seen = restored.snapshot()
        entries, _ = restored.read_ready(1, seen.last_id, **ALL)
        assert message_ids(entries) == ["0", "1", "2", "new"]
        assert (counted_before.stored, seen.counters.stored, seen.counters.open) == (3, 4, 4)
        restored.commit(Changes(confirmed=entries))
        assert restored.snapshot().counters.open == 0
    assert not outbox.audit().differences


@pytest.mark.parametrize("is_own", [True, False])
def test_a_trigger_that_keeps_a_message_there_is_an_error(url: str, *, is_own: bool) -> None:
    outbox = Outbox(url)
    with psycopg.connect(url) as application:
        application.execute(
            "CREATE FUNCTION nosy() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
            "CREATE TRIGGER nosy BEFORE DELETE ON reliablepub.messages"
            " FOR EACH ROW EXECUTE FUNCTION nosy()"
        )
        outbox.enqueue(Message(b""), key="k", connection=application)
        if not is_own:
            application.commit()
        with pytest.raises(OutboxError, match="drop that trigger"):
            outbox.cancel("k", connection=application)


def test_an_operator_before_the_first_message_draws_no_id(url: str, own: PostgresStore) -> None:
    assert Outbox(url).retry([999]) == 0
    own.changed_elsewhere()
    assert own.snapshot().last_id == 0


def test_what_is_not_told_yet_is_not_read(url: str, own: PostgresStore) -> None:
    outbox = Outbox(url)
    with psycopg.connect(url) as slow:
        outbox.enqueue(Message(b"", message_id="slow"), connection=slow)
        outbox.enqueue(Message(b"", message_id="fast"))
        last_id = own.snapshot().last_id
    assert ready_ids(own, 1, last_id) == ["fast"], "or it would be read again when it is told"
    own.read_due(time.time(), loaded=(), **ALL)  # which looks, and tells nothing
    assert own.read_ready(1, last_id, **ALL) == ([], 0), "the same"
    assert own.snapshot().late == ((1, 1),)
    assert ready_ids(own, 1, last_id) == ["slow", "fast"]


def test_what_a_read_has_found_is_not_passed_over(
    url: str, own: PostgresStore, entry: Make
) -> None:
    """The relay reads up to its own new message, whatever it was told of."""
    Outbox(url).enqueue(Message(b"", message_id="other"))
    own.read_due(time.time(), loaded=(), **ALL)  # which looks, and tells nothing
    own.commit(Changes(new=[new := entry()]))
    assert (ready_ids(own, 1, new.id - 1), own.snapshot().late) == (["other"], ())


@pytest.mark.parametrize("kind", ["ordering key", "due", "expired"])
def test_what_is_not_told_yet_is_found_by_no_other_way(
    url: str, own: PostgresStore, kind: str
) -> None:
    """Or it would be confirmed before it is counted."""
    fields: dict[str, dict[str, Any]] = {
        "ordering key": {"ordering_key": "k"},
        "due": {"not_before": datetime.now(UTC) + timedelta(seconds=30)},
        "expired": {"expires_in_s": 30.0},
    }
    Outbox(url).enqueue(Message(b"", message_id="new", **fields[kind]))

    def read() -> list[Entry]:
        limits: dict[str, Any] = {"limit": 10, "bytes_max": 10**9, "loaded": ()}
        now = time.time() + 60
        if kind == "ordering key":
            return own.read_first(["k"], now, bytes_max=10**9)[0]
        return (own.read_due if kind == "due" else own.read_expired)(now, **limits)[0]

    assert read() == []
    assert own.changed_elsewhere()
    found = read()
    assert message_ids(found) == ["new"]
    own.commit(Changes(confirmed=found))
    assert own.snapshot().counters.confirmed == 1
    assert counted(url) == (0, 0, 0, 0)


@pytest.mark.parametrize(("room", "sent", "fit"), [(0, 1, 1), (2, 3, 2), (9, 9, 9)])
def test_bodies_of_first_messages_are_read_up_to_the_limit_only(
    own: PostgresStore,
    entry: Make,
    monkeypatch: pytest.MonkeyPatch,
    *,
    room: int,
    sent: int,
    fit: int,
) -> None:
    """A page of 500 keys may have gigabytes of them."""
    keys = [f"k{n}" for n in range(9)]
    own.commit(Changes(new=(new := [entry(ordering_key=key) for key in keys])))
    read = Link.read
    found: list[Any] = []

    def note(link: Link, name: str, values: Any) -> Any:
        rows = read(link, name, values)
        if name == "firsts_of_keys":
            found.extend(rows)
        return rows

    monkeypatch.setattr(Link, "read", note)
    bytes_max = room * new[0].message.size
    entries, looked_at = own.read_first(keys, 1.0, bytes_max=bytes_max)
    assert (len(found), len(entries), looked_at) == (sent, fit, fit)


def test_what_is_stored_while_a_relay_starts_is_counted(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = PostgresStore._take_turn
    after(
        monkeypatch,
        PostgresStore,
        "_take_turn",
        lambda *_: Outbox(url).enqueue(Message(b"", message_id="new")),
    )
    with closing(PostgresStore(Server.of(url))) as own:
        monkeypatch.setattr(PostgresStore, "_take_turn", take)
        last_id = own.snapshot().last_id
        entries, _ = own.read_ready(1, last_id, **ALL)
        assert message_ids(entries) == ["new"]
        own.commit(Changes(confirmed=entries))
        assert own.snapshot().counters.stored == 1
    assert counted(url) == (0, 0, 0, 0)


def test_what_is_rolled_back_is_never_told(url: str, own: PostgresStore) -> None:
    with psycopg.connect(url) as application:
        Outbox(url).enqueue(Message(b""), connection=application)
        application.rollback()
    assert not own.changed_elsewhere()
    assert own.snapshot().counters.stored == 0


def test_a_long_transaction_elsewhere_holds_up_nothing(url: str, own: PostgresStore) -> None:
    with psycopg.connect(url) as long:
        long.execute("SELECT pg_current_xact_id()")
        for n in range(3):
            Outbox(url).enqueue(Message(b"", message_id=f"m-{n}"))
            assert own.changed_elsewhere()
            snapshot = own.snapshot()
            entries, _ = own.read_ready(n + 1, snapshot.last_id, **ALL)
            assert message_ids(entries) == [f"m-{n}"]
            own.commit(Changes(confirmed=entries))
    assert own.snapshot().counters.confirmed == 3
    assert counted(url) == (0, 0, 0, 0)


def test_a_publisher_sends_slow_and_rolled_back_rows_once_and_never(url: str) -> None:
    outbox = Outbox(url)
    with FakeBroker() as broker:
        broker.declare_queue("orders")
        with Publisher(broker.url, outbox=url) as publisher, psycopg.connect(url) as slow:
            with psycopg.connect(url) as other:
                for n in range(20):
                    connection = (None, slow, other)[n % 3]
                    name = f"{['own', 'slow', 'gone'][n % 3]}-{n}"
                    message = Message(b"", routing_key="orders", message_id=name)
                    outbox.enqueue(message, connection=connection)
                other.rollback()
            assert publisher.flush(20).is_flushed
            assert {name.split("-")[0] for name in sent_ids(broker)} == {"own"}
            slow.commit()
            until(lambda: len(sent_ids(broker)) >= 14)
            sent = sent_ids(broker)
    assert sorted(sent) == sorted({*sent})
    assert len(sent) == 14
    assert counted(url) == (0, 0, 0, 0)


# ---------------------------------------------------------------------------- one owner


def test_a_silent_owner_is_replaced_and_settles_nothing(
    url: str, own: PostgresStore, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = stored(own, entry(), entry())
    monkeypatch.setattr(ownership, "EXPIRY_S", 0.1)
    time.sleep(0.2)
    with closing(PostgresStore(Server.of(url))) as second:
        assert second.run > own.run
        for changes in (Changes(confirmed=new[:1]), Changes(new=[entry()])):
            with pytest.raises(OutboxInUse, match="was taken over by process"):
                own.commit(changes)
        with pytest.raises(OutboxInUse):
            own.changed_elsewhere()
        assert len(second.read_ready(1, 9, **ALL)[0]) == 2
        assert second.snapshot().counters.confirmed == 0
    assert counted(url) == (0, 0, 0, 0)


@pytest.mark.parametrize("statements", [2, 4], ids=["before its lock", "with its lock"])
def test_an_owner_that_is_stopped_within_a_turn_is_replaced(
    url: str, own: PostgresStore, entry: Make, statements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server waits for the rest of its statements, and calls its connection active."""
    flush, sent = server._flush, 0
    is_stopped, goes_on = threading.Event(), threading.Event()

    def stop(connection: psycopg.Connection[Any], patience: Patience) -> None:
        nonlocal sent
        flush(connection, patience)
        sent += threading.current_thread() is not threading.main_thread()
        if sent == statements and not is_stopped.is_set():
            is_stopped.set()
            goes_on.wait()

    monkeypatch.setattr(server, "_flush", stop)
    with ThreadPoolExecutor() as threads:
        turn = threads.submit(own.commit, Changes(new=[entry()]))
        try:
            assert is_stopped.wait(20)
            time.sleep(ownership.EXPIRY_S)
            taken = PostgresStore(Server.of(url))
        finally:
            goes_on.set()
        with closing(taken) as second:
            with pytest.raises(OutboxError):
                turn.result(20)
            assert second.run > own.run
            assert second.snapshot().counters.open == 0


def newest_turn(own: PostgresStore) -> int:
    [(turn, *_)] = own._link.rows("newest_turn", {"shard": 0})
    return int(turn)


def is_cut_off(link: Link) -> bool:
    """Whether the owner's connection is known to have ended."""
    [(*_, is_cut_off, _)] = link.rows("newest_turns", {"active_s": 1.0})
    return bool(is_cut_off)


def killed(own: PostgresStore) -> None:
    """Lose the connection, as a process that is killed does."""
    assert own._link._connection is not None
    own._link._connection.close()


@pytest.mark.parametrize("operators", [0, 3])
def test_an_owner_that_was_killed_is_replaced_though_its_last_turn_is_new(
    url: str, own: PostgresStore, operators: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "EXPIRY_S", inf)
    with Outbox(url) as outbox:
        for _ in range(operators):
            outbox.enqueue(Message(b"", not_before=datetime(2100, 1, 1, tzinfo=UTC)))
        before = newest_turn(own)
        for number in range(operators):  # their turns are not the owner's
            assert outbox.retry([number + 1]) == 1
        assert newest_turn(own) >= before + operators
    killed(own)
    with closing(PostgresStore(Server.of(url))) as second:
        assert second.run > own.run


def test_an_owner_that_reconnects_is_not_replaced(
    url: str, own: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "CUT_OFF_S", 10.0)
    for _ in range(3):
        killed(own)
        assert not own.changed_elsewhere()
        assert not is_cut_off(own._link)


def test_an_owner_at_rest_that_reconnects_takes_a_turn_at_once(own: PostgresStore) -> None:
    assert not own.may_have_changed()
    killed(own)
    before = newest_turn(own)
    assert own.may_have_changed()
    assert not own.changed_elsewhere()
    assert newest_turn(own) == before + 1
    assert not own.may_have_changed()


def test_a_server_that_was_restarted_says_nothing_of_the_owner(
    postgres_server: PostgresServer, url: str, own: PostgresStore
) -> None:
    postgres_server.stop("immediate")
    postgres_server.start()
    with closing(Link(Server.of(url))) as link:
        assert not is_cut_off(link)


def test_a_restart_of_the_server_makes_no_owner_old(
    postgres_server: PostgresServer,
    url: str,
    own: PostgresStore,
    entry: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A busy machine may take longer to start it than a turn may be old.
    monkeypatch.setattr("reliablepub.outbox.postgres.database.EXPIRY_S", 30.0)
    own.commit(Changes(new=(new := [entry(), entry()])))
    own.commit(Changes(sent=[Batch(1, 1, new)]))
    sql(url, "UPDATE reliablepub.turns SET at = at - interval '1 minute'")
    postgres_server.stop("fast")
    postgres_server.start()
    with closing(Link(Server.of(url))) as link:
        [(*_, age_s, _, _)] = link.rows("newest_turns", {"active_s": 1.0})
    assert age_s < 30.0
    with outbox_at(url).reading() as session:
        assert Relaying.first(session.relays()).pid == os.getpid()


@pytest.mark.parametrize("is_in_flight", [False, True])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_an_owner_that_seems_silent_is_dismissed_only_if_what_is_changed_is_in_flight(
    url: str,
    own: PostgresStore,
    entry: Make,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_in_flight: bool,
    is_cancelled: bool,
) -> None:
    """It may live: the server, for instance, stood still."""
    outbox = Outbox(url)
    for key in ("a", "b"):
        outbox.enqueue(Message(b"", not_before=datetime(2100, 1, 1, tzinfo=UTC)), key=key)
    own.changed_elsewhere()
    own.commit(Changes(sent=[Batch(1, 1, own.read_due(inf, loaded=(), **ALL)[0][:1])]))
    monkeypatch.setattr("reliablepub.outbox.postgres.database.EXPIRY_S", 0.0)
    if is_cancelled:
        assert bool(outbox.cancel("a" if is_in_flight else "b")) is not is_in_flight
    else:
        ids = [1 if is_in_flight else 2]
        assert intervene(outbox_at(url), ids, Intervention(Action.DISCARD)).changed == 1
    with pytest.raises(OutboxInUse, match="silent") if is_in_flight else nullcontext():
        own.changed_elsewhere()
        own.touched()
        own.commit(Changes(new=[entry()]))
    assert counted(url) == (0, 0, 0, 0)


def test_an_operator_s_transaction_makes_the_owner_that_it_blocks_no_older(
    url: str, own: PostgresStore, entry: Make
) -> None:
    own.commit(Changes(new=(new := [entry()])))
    own.commit(Changes(sent=[Batch(1, 1, new)]))
    found: list[int | None] = []

    def linger(session: Session) -> None:
        found[:] = [Relaying.first(session.relays()).pid]
        time.sleep(ownership.EXPIRY_S + 0.1 if found[0] else 0)
        found.append(Relaying.first(session.relays()).pid)

    def begins_in_time() -> bool:  # not if the machine stood still since the owner's last turn
        own.commit(Changes(new=[entry()]))
        outbox_at(url).write(linger)
        return found[0] is not None

    until(begins_in_time)
    assert found == [os.getpid()] * 2


@pytest.fixture
def holder(url: str) -> Iterator[psycopg.Connection]:
    """An application whose transaction has cancelled a message, and holds the next turn."""
    cancel = Message(b"", message_id="first", not_before=datetime.now(UTC) + timedelta(hours=1))
    with closing(psycopg.connect(url)) as connection:
        Outbox(url).enqueue(cancel, key="first")
        assert Outbox(url).cancel("first", connection=connection)
        yield connection


def cancel_second(url: str) -> Future[ScheduleChange]:
    """Cancel another message, in a thread that waits for the turn of `holder`."""

    def cancel() -> ScheduleChange:
        with closing(psycopg.connect(url, application_name="second")) as connection:
            change = Outbox(url).cancel("second", connection=connection)
            connection.commit()
            return change

    message = Message(b"", message_id="second", not_before=datetime.now(UTC) + timedelta(hours=1))
    Outbox(url).enqueue(message, key="second")
    change = ThreadPoolExecutor().submit(cancel)
    until(lambda: second_waits_for(url, "transactionid"))
    return change


def second_waits_for(url: str, event: str) -> bool:
    """Whether a session of it does; one that is ending may still be seen beside the next."""
    query = "SELECT wait_event FROM pg_stat_activity WHERE application_name = 'second'"
    with closing(psycopg.connect(url)) as connection:
        return (event,) in connection.execute(query).fetchall()


def test_applications_that_wait_for_each_other_let_the_relay_take_a_turn(
    url: str, own: PostgresStore, holder: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs more round trips than they do, and would be the last each time: for ever."""
    monkeypatch.setattr(database, "_RELAY_S", 60.0)
    second = cancel_second(url)
    holder.commit()
    until(lambda: second.done() or second_waits_for(url, "PgSleep"))
    assert not second.done()
    assert own.changed_elsewhere()
    assert own.snapshot().counters.discarded == 1  # it takes a turn for that
    assert second.result(60) is ScheduleChange.MADE


def cancel_each(url: str, *keys: str) -> None:
    """Cancel messages, each in a transaction of its own; first, enqueue them."""
    not_before = datetime.now(UTC) + timedelta(hours=1)
    with closing(psycopg.connect(url, application_name="second")) as connection:
        for key in keys:
            Outbox(url).enqueue(Message(b"", message_id=key, not_before=not_before), key=key)
            assert Outbox(url).cancel(key, connection=connection)
            connection.commit()


@pytest.mark.parametrize("is_old", [False, True], ids=["young", "old"])
def test_an_application_lets_the_relay_take_a_turn_after_its_own_last_transaction(
    url: str, own: PostgresStore, monkeypatch: pytest.MonkeyPatch, *, is_old: bool
) -> None:
    """One that cancels in a loop would keep the relay from its turns, also by long transactions."""
    monkeypatch.setattr(database, "_RELAY_S", 60.0)
    cancel_each(url, "first")
    if is_old:
        monkeypatch.setattr(database, "EXPIRY_S", 0.0)
    second = ThreadPoolExecutor().submit(cancel_each, url, "second")
    until(lambda: second.done() or second_waits_for(url, "PgSleep"))
    assert not second.done()
    assert own.changed_elsewhere()
    assert own.snapshot().counters.discarded == 1  # it takes a turn for that
    second.result(60)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements of operators that wait for a relay."""
    run, found = database.PostgresSession.run, list[str]()

    def noted(session: database.PostgresSession, name: str, *args: Any) -> Any:
        found.extend([name] if name == "pause" else [])
        return run(session, name, *args)

    monkeypatch.setattr(database.PostgresSession, "run", noted)
    return found


@pytest.mark.parametrize("relay", ["none", "closed", "dead"])
def test_applications_do_not_wait_for_a_relay_that_does_not_run(
    url: str, pauses: list[str], relay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if relay != "none":
        PostgresStore(Server.of(url)).close()
    if relay == "dead":
        monkeypatch.setattr(database, "EXPIRY_S", 0.0)
        sql(url, "UPDATE reliablepub.turns SET is_free = false, backend = 0")
    cancel_each(url, "first", "second", "third")
    assert not pauses


def test_an_application_does_not_wait_for_a_relay_that_its_own_transaction_blocks(
    url: str, own: PostgresStore, pauses: list[str]
) -> None:
    not_before = datetime.now(UTC) + timedelta(hours=1)
    with closing(psycopg.connect(url)) as connection, connection.transaction():
        for key in ("first", "second"):
            Outbox(url).enqueue(Message(b"", message_id=key, not_before=not_before), key=key)
            with connection.transaction():  # a savepoint
                assert Outbox(url).cancel(key, connection=connection)
    assert not pauses
    cancel_each(url, "third")
    assert pauses


def test_applications_wait_for_each_other_without_a_relay(
    url: str, holder: psycopg.Connection
) -> None:
    """Also for longer than a transaction may block a relay: it blocks none while it waits."""
    second = cancel_second(url)
    time.sleep(database._TAKING_S + 0.1)
    holder.commit()
    assert second.result(60) is ScheduleChange.MADE


def test_a_relay_whose_first_turn_takes_long_is_not_replaced(
    url: str, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "EXPIRY_S", 0.3)
    take, slowly = PostgresStore._take_turn, threading.Event()

    def take_slowly(store: PostgresStore, steps: Any, *ids: Any) -> Any:
        slowly.set()
        return take(store, [*steps, (UNTIL_WAITED_FOR, {})], *ids)

    monkeypatch.setattr(PostgresStore, "_take_turn", take_slowly)
    opened: list[PostgresStore] = []
    first = threading.Thread(target=lambda: opened.append(PostgresStore(Server.of(url))))
    first.start()
    slowly.wait()
    monkeypatch.setattr(PostgresStore, "_take_turn", take)
    time.sleep(0.5)
    with pytest.raises(OutboxInUse, match="only one relay may own a shard"):
        PostgresStore(Server.of(url)).close()
    first.join()
    with closing(opened[0]) as own:
        assert own.commit(Changes(new=[entry()])).counters.stored == 1


def test_the_first_turn_of_a_run_is_as_old_as_its_commit(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, begun = PostgresStore._take_turn, 0.0

    def take_slowly(store: PostgresStore, steps: Any, *ids: Any) -> Any:
        nonlocal begun
        begun = time.monotonic()
        return take(store, [("SELECT pg_sleep(2)", {}), *steps], *ids)

    monkeypatch.setattr(PostgresStore, "_take_turn", take_slowly)
    with closing(PostgresStore(Server.of(url))) as own:
        [(*_, age_s, _, _)] = own._link.rows("newest_turns", {"active_s": 1.0})
        lasted_s = time.monotonic() - begun
        monkeypatch.setattr(PostgresStore, "_take_turn", take)
    assert age_s < lasted_s - 1.9


def test_no_statement_of_a_turn_is_compiled(own: PostgresStore) -> None:
    jit = "SELECT current_setting('jit')"
    assert own._link.transact([(jit, {})])[0] == [(b"off",)]


def test_an_owner_whose_last_turn_was_forgotten_settles_nothing_and_psycopg_logs_nothing(
    url: str, own: PostgresStore, entry: Make, caplog: pytest.LogCaptureFixture
) -> None:
    own.commit(Changes(new=[entry()]))
    sql(url, "UPDATE reliablepub.turns SET turn = turn + 5000, run = 99")
    with pytest.raises(OutboxInUse):
        own.commit(Changes(new=[entry()]))
    end_connections(url)
    with pytest.raises(psycopg.OperationalError):
        own._link.batch([("outbox", {})])
    assert caplog.records == []


# ---------------------------------------------------------------------------- cut off


@pytest.mark.parametrize("behind", [True, False])
def test_a_commit_that_was_cut_off_is_looked_up(
    url: str, own: PostgresStore, entry: Make, monkeypatch: pytest.MonkeyPatch, *, behind: bool
) -> None:
    old, new = [entry(), entry()], [entry(), entry(ordering_key="k")]
    own.commit(Changes(new=old))
    Cut(monkeypatch, behind=behind)
    snapshot = own.commit(Changes(new=new, confirmed=old[:1]))
    assert (snapshot.counters.stored, snapshot.counters.confirmed) == (4, 1)
    assert own.snapshot().counters == snapshot.counters
    found = own.read_ready(1, 99, **ALL)[0]
    assert message_ids(found) == message_ids([old[1], *new])
    assert [e.id for e in found] == [e.id for e in (old[1], *new)]
    own.commit(Changes(confirmed=found))
    assert counted(url) == (0, 0, 0, 0)


@pytest.mark.parametrize("behind", [True, False])
def test_an_unsure_commit_is_told_and_its_messages_are_found(
    url: str, own: PostgresStore, entry: Make, monkeypatch: pytest.MonkeyPatch, *, behind: bool
) -> None:
    new = [entry(), entry()]
    Cut(monkeypatch, behind=behind)
    with server_down(monkeypatch):
        with pytest.raises(OutboxUnsure, match="unknown whether the message is stored"):
            own.commit(Changes(new=new))
        assert [entry.id for entry in new] == [0, 0]
    assert not begin_anew(own).has_lost
    snapshot = own.commit(Changes(new=[entry()]))
    assert snapshot.counters.stored == (3 if behind else 1)
    assert ready_ids(own, 1, snapshot.last_id - 1) == (message_ids(new) if behind else [])
    assert counted(url) == (0, 0, 0, 0)


def test_a_commit_that_was_cut_off_is_told_although_it_cannot_be_looked_up(
    url: str, own: PostgresStore, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator has taken the turn after it, and a read of turns fails on the disk."""
    own.commit(Changes(new=[entry()]))
    read = Link.read

    def fail(link: Link, name: str, values: Any) -> Any:
        if link is own._link:
            monkeypatch.setattr(Link, "read", read)
            intervene(outbox_at(url), [1], Intervention(Action.PARK))
            raise OutboxDiskFailed("the disk has failed")
        return read(link, name, values)

    Cut(monkeypatch, behind=True)
    monkeypatch.setattr(Link, "read", fail)
    with pytest.raises(OutboxUnsure, match="unknown whether the message is stored"):
        own.commit(Changes(new=[entry()]))
    begin_anew(own)
    assert own.snapshot().counters.stored == 2
    assert [one.id for one in own.read_ready(1, 9, **ALL)[0]] == [2]
    assert counted(url) == (0, 0, 0, 0)


@pytest.mark.parametrize("how", ["kill", "fast", "immediate"])
def test_a_publisher_outlives_its_database(
    url: str, postgres_server: PostgresServer, how: Any
) -> None:
    stored: list[str] = []

    def publish(publisher: Publisher, count: int) -> None:
        for _ in range(count):
            with suppress(OutboxUnreachable, OutboxUnsure):
                publisher.publish(b"", routing_key="orders", message_id=f"m-{len(stored)}")
                stored.append(f"m-{len(stored)}")

    with FakeBroker() as broker:
        broker.declare_queue("orders")
        with Publisher(broker.url, outbox=url) as publisher:
            publish(publisher, 20)
            if how == "kill":
                postgres_server.kill()
            else:
                postgres_server.stop(how)
            with pytest.raises((OutboxUnreachable, OutboxUnsure)):
                publisher.publish(b"", routing_key="orders", message_id="refused")
            until(lambda: "cannot be reached" in publisher.status.trouble)
            postgres_server.start()
            until(lambda: not publisher.status.trouble)
            publish(publisher, 20)
            assert publisher.flush(20).is_flushed
        sent = {*sent_ids(broker)}
    assert sent >= {*stored}
    assert len(stored) == 40
    assert counted(url) == (0, 0, 0, 0)


def test_the_constants_leave_time_for_a_beat() -> None:
    assert ownership.EXPIRY_S > 3 * ownership.BEAT_S
    assert ownership.KEPT_TURNS > 100


# ---------------------------------------------------------------------------- PgBouncer


def test_a_pgbouncer_may_lend_its_connections_by_transaction(
    url: str, pgbouncer_url: str, entry: Make
) -> None:
    with (
        FakeBroker() as broker,
        Outbox(pgbouncer_url) as outbox,
        Publisher(broker.url, outbox=pgbouncer_url) as publisher,
    ):
        broker.declare_queue("orders")
        for n in range(10):
            publisher.publish(b"", routing_key="orders", message_id=f"p-{n}", ordering_key="k")
            outbox.enqueue(Message(b"", routing_key="orders", message_id=f"e-{n}"), key=f"{n}")
            with psycopg.connect(pgbouncer_url, prepare_threshold=None) as application:
                message = Message(b"", routing_key="orders", message_id=f"a-{n}")
                outbox.enqueue(message, connection=application)
        assert publisher.flush(20).is_flushed
        later = Message(b"", routing_key="orders", not_before=datetime(2100, 1, 1, tzinfo=UTC))
        outbox.enqueue(later)
        assert outbox.retry([row["id"] for row in outbox.rows("open")]) == 1  # type: ignore[misc]
        broker.wait_for(lambda: len(sent_ids(broker)) == 31, timeout_s=20)
        assert publisher.flush(20).is_flushed
        assert [n for n in sent_ids(broker) if n[0] == "p"] == [f"p-{n}" for n in range(10)]
    assert counted(url) == (0, 0, 0, 0)


@pytest.mark.parametrize("pgbouncer_url", ["session", "statement"], indirect=True)
def test_a_pgbouncer_may_lend_its_connections_otherwise(url: str, pgbouncer_url: str) -> None:
    """In statement mode, it refuses transactions of several round trips; a turn has one."""
    with FakeBroker() as broker, Publisher(broker.url, outbox=pgbouncer_url) as publisher:
        broker.declare_queue("orders")
        with Outbox(pgbouncer_url) as outbox:
            publisher.publish(b"", routing_key="orders", message_id="p").result(20)
            outbox.enqueue(Message(b"", routing_key="orders", message_id="e"), key="k")
            assert publisher.flush(20).is_flushed
        assert sent_ids(broker) == ["p", "e"]
    assert counted(url) == (0, 0, 0, 0)


def test_a_pgbouncer_that_replaces_a_connection_says_nothing_of_the_owner(
    url: str, pgbouncer_url: str, postgres_server: PostgresServer
) -> None:
    """It does at the end of `server_lifetime`, for instance, and its clients do not notice."""
    with closing(PostgresStore(Server.of(pgbouncer_url))) as own:
        own.commit(Changes(sources={"a": 1}))
        postgres_server.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE datname IS NOT NULL AND pid <> pg_backend_pid()"
        )
        with closing(Link(Server.of(url))) as link:
            assert not is_cut_off(link)
        own.commit(Changes(sources={"a": 1}))
        assert own.position("a") == 2


def test_a_connection_that_fails_at_its_first_statement_is_opened_once(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A PgBouncer accepts its clients while the server is down, and ends them at a statement."""
    opened: list[int] = []
    connect = Server.connect

    def connect_and_lose(server: Server) -> psycopg.Connection[Any]:
        connection = connect(server)
        opened.append(connection.info.backend_pid)
        with psycopg.connect(url) as operator:
            operator.execute("SELECT pg_terminate_backend(%s, 5000)", (opened[-1],))
        return connection

    with closing(Link(Server.of(url))) as link:
        monkeypatch.setattr(Server, "connect", connect_and_lose)
        with pytest.raises(OutboxUnreachable):
            link.rows("alive")
        assert len(opened) == 1
        monkeypatch.undo()
        until(lambda: is_alive(link))


def is_alive(link: Link) -> bool:
    with suppress(OutboxUnreachable):
        return link.rows("alive") == [(1,)]
    return False
