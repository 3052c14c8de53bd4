"""What a relay learns in PostgreSQL is not lost by the failure of a later statement."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
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
)
from reliablepub._core.events import Batch
from reliablepub.outbox.entry import HELD, Changes, Entry, Intervened, Release, Step
from reliablepub.outbox.postgres import store as store_module
from reliablepub.outbox.postgres.database import create_outbox
from reliablepub.outbox.postgres.server import Link, Server
from reliablepub.outbox.postgres.sql import queries
from reliablepub.outbox.postgres.store import PostgresStore
from reliablepub.testing import FakeBroker
from tests.outbox.conftest import Make
from tests.postgres import PostgresServer, can_connect
from tests.waiting import until

pytestmark = pytest.mark.postgres

ALL: dict[str, Any] = {"limit": 1000, "bytes_max": 10**9}
BREAK = """
    CREATE OR REPLACE FUNCTION public.fault() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_terminate_backend(pg_backend_pid(), 1000);
        RETURN NEW;
    END $$;
    CREATE TRIGGER fault BEFORE INSERT ON reliablepub.turns
    FOR EACH ROW EXECUTE FUNCTION public.fault();
"""
MEND = "DROP TRIGGER fault ON reliablepub.turns"


@pytest.fixture
def url(postgres_outbox: str) -> str:
    return postgres_outbox


@pytest.fixture
def own(url: str) -> Iterator[PostgresStore]:
    with closing(PostgresStore(Server.of(url))) as store:
        yield store


@pytest.fixture
def admin(url: str) -> Iterator[psycopg.Connection]:
    with closing(psycopg.connect(url, autocommit=True)) as connection:
        yield connection


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


def fail_once(monkeypatch: pytest.MonkeyPatch, method: str, when: Callable[..., bool]) -> None:
    """Have a method of `Link` lose the connection once."""
    call = getattr(Link, method)
    is_over = False

    def failing(link: Link, *arguments: Any) -> Any:
        nonlocal is_over
        if not is_over and when(*arguments):
            is_over = True
            link.close()
            raise OutboxUnreachable("the connection is lost")
        return call(link, *arguments)

    monkeypatch.setattr(Link, method, failing)


# ---------------------------------------------------------------------------- looks


def test_a_message_found_by_a_look_whose_beat_fails_is_told_later(
    url: str, own: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator's transaction holds the next turn, and is rolled back."""
    monkeypatch.setattr("reliablepub.outbox.postgres.store.BEAT_S", 0.0)
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
    url: str, own: PostgresStore, admin: psycopg.Connection, entry: Make
) -> None:
    parked = entry(message_id="parked")
    own.commit(Changes(new=[parked]))
    outbox = Outbox(url)
    admin.execute("UPDATE reliablepub.messages SET due_at = 1e10")
    assert own.read_due(time.time(), loaded=(), **ALL) == ([], 1e10)
    assert outbox.retry([parked.id]) == 1
    assert own.changed_elsewhere()
    admin.execute(BREAK.encode())
    with pytest.raises(OutboxUnreachable):
        own.snapshot()
    admin.execute(MEND)
    time.sleep(0.3)
    own.touched()
    assert told(own) == ["parked"]


def test_a_late_message_is_told_though_the_next_statement_of_its_look_fails(
    url: str, own: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(url)
    with closing(psycopg.connect(url)) as slow:
        outbox.enqueue(Message(b"", message_id="slow"), connection=slow)
        outbox.enqueue(Message(b"", message_id="fast"), key="fast")
        assert told(own) == ["fast"]
        assert outbox.cancel("fast")
        slow.commit()
    fail_once(monkeypatch, "rows", lambda name, *_: name == "last_id")
    with pytest.raises(OutboxUnreachable):
        own.changed_elsewhere()
    assert own.changed_elsewhere()
    assert own.snapshot().late == ((1, 1),)


# ---------------------------------------------------------------------------- unsure commits


class Limbo:
    """Leaves the next commits of a store unanswered, at work on the server."""

    def __init__(self, url: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self._url = url
        self._monkeypatch = monkeypatch
        self._link = store._link
        self._server = psycopg.connect(url, autocommit=True)
        self._server.adapters.register_loader("text", psycopg.types.string.TextBinaryLoader)

    def commit(self, store: PostgresStore, changes: Changes, *, runs: bool) -> None:
        """Commit changes, on a connection that is lost before the answer.

        Args:
            store: the store.
            changes: what it commits.
            runs: whether the server has got the statements, and waits before the commit.
        """
        transact, connect = Link.transact, Server.connect

        def lose(link: Link, steps: Any) -> Any:
            if runs:
                self._server.execute("BEGIN")
                for name, values in steps:
                    text = link.queries.get(name, name)
                    self._server.execute(text.encode(), values or None)
                # A server that waits for a replica is not idle.
                self._server.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
            link.close()
            self._monkeypatch.setattr(Server, "connect", refuse)
            raise psycopg.OperationalError("the connection is lost")

        def refuse(_: Server) -> Any:
            raise OutboxUnreachable("the server is down")

        self._monkeypatch.setattr(Link, "transact", lose)
        with pytest.raises(OutboxUnsure):
            store.commit(changes)
        self._monkeypatch.setattr(Link, "transact", transact)
        self._monkeypatch.setattr(Server, "connect", connect)
        time.sleep(0.25)

    def end(self, *, commits: bool) -> None:
        """Let the server go on."""
        self._server.execute("COMMIT" if commits else "ROLLBACK")
        self._server.close()


@pytest.fixture
def limbo(url: str, own: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Limbo]:
    return lambda: Limbo(url, own, monkeypatch)


def newly_told(store: PostgresStore, after: int = 0) -> list[str | None]:
    """What a relay would read that has read all ids up to one. It takes no turn."""
    assert store.may_have_changed()
    snapshot = store.snapshot()
    spans = [*snapshot.late, (after + 1, snapshot.last_id)]
    found = [store.read_ready(first, last, **ALL)[0] for first, last in spans]
    return [name for entries in found for name in message_ids(entries)]


def test_a_commit_that_ends_after_a_look_at_later_messages_is_told(
    url: str, own: PostgresStore, entry: Make, limbo: Callable[[], Limbo]
) -> None:
    """It waits for a replica, for instance, while its connection is lost."""
    server = limbo()
    server.commit(own, Changes(new=[entry(message_id="unsure")]), runs=True)
    Outbox(url).enqueue(Message(b"", message_id="later"))
    assert newly_told(own) == ["later"]
    server.end(commits=True)
    assert newly_told(own, own._seen.last_id) == ["unsure"]
    own.commit(Changes(new=[entry(message_id="next")]))
    assert own.snapshot().counters.stored == 3


def test_a_commit_that_ends_after_another_one_was_cut_off_is_told(
    url: str, own: PostgresStore, entry: Make, limbo: Callable[[], Limbo]
) -> None:
    first, second = limbo(), limbo()
    first.commit(own, Changes(new=[entry(message_id="unsure")]), runs=True)
    Outbox(url).enqueue(Message(b"", message_id="later"))
    assert newly_told(own) == ["later"]
    after = own._seen.last_id
    second.commit(own, Changes(new=[entry(message_id="lost")]), runs=False)
    second.end(commits=False)
    first.end(commits=True)
    own.commit(Changes(new=[next_one := entry(message_id="next")]))
    assert next_one.id > after
    late = [id_ for one, last in own.snapshot().late for id_ in range(one, last + 1)]
    assert 1 in late
    assert message_ids(own.read_ready(1, 1, **ALL)[0]) == ["unsure"]


def test_a_commit_that_was_cut_off_before_the_highest_id_is_found_as_new(
    own: PostgresStore, entry: Make, limbo: Callable[[], Limbo]
) -> None:
    """It is told once: a relay that was told of it as late, too, would read it twice."""
    server = limbo()
    server.commit(own, Changes(new=[entry(message_id="unsure")]), runs=True)
    server.end(commits=True)
    own.commit(Changes(new=[next_one := entry(message_id="next")]))
    assert next_one.id == 2
    snapshot = own.snapshot()
    assert (snapshot.late, snapshot.last_id, snapshot.counters.stored) == ((), 2, 2)


@pytest.mark.parametrize("is_committed", [False, True])
@pytest.mark.parametrize("further", [0.0, 60.0])
def test_a_change_of_the_clock_moves_times_once_though_its_commit_was_cut_off(
    own: PostgresStore,
    admin: psycopg.Connection,
    entry: Make,
    limbo: Callable[[], Limbo],
    *,
    is_committed: bool,
    further: float,
) -> None:
    """The clock may be set again before the database is back."""
    timed = entry()
    timed.due_at, timed.refused_at, timed.expires_at = 5_000.0, 4_000.0, 6_000.0
    timed.is_plain = False
    own.commit(Changes(new=[timed]))
    changes = Changes(new=[entry()], stepped=Step(3_600.0, 1.0, timed.id))
    server = limbo()
    server.commit(own, changes, runs=True)
    server.end(commits=is_committed)
    changes.new, changes.stepped = [], Step(3_600.0 + further, 1.0, timed.id)
    own.commit(changes)
    times = "SELECT due_at, refused_at, expires_at FROM reliablepub.messages WHERE id = %s"
    moved = [at + 3_600.0 + further for at in (5_000.0, 4_000.0, 6_000.0)]
    assert admin.execute(times, [timed.id]).fetchone() == (*moved,)
    own.commit(Changes(stepped=Step(-further, 1.0, timed.id)))
    [(due_at, *_)] = admin.execute(times, [timed.id])
    assert due_at == 8_600.0, "the next change is made in full"


def test_lost_commits_are_noticed_after_a_turn_that_was_cut_off(
    own: PostgresStore, admin: psycopg.Connection, entry: Make, limbo: Callable[[], Limbo]
) -> None:
    server = limbo()
    server.commit(own, Changes(new=[entry()]), runs=False)
    server.end(commits=False)
    own.commit(Changes(new=[entry()]))
    admin.execute(  # as after a fail-over to a replica that lagged
        "DELETE FROM reliablepub.turns WHERE turn = (SELECT max(turn) FROM reliablepub.turns)"
    )
    with pytest.raises(OutboxError, match="has lost commits"):
        own.changed_elsewhere()


@pytest.mark.parametrize("others", [1, 2])
@pytest.mark.parametrize("is_committing", [False, True])
def test_lost_commits_are_noticed_though_others_have_taken_as_many_turns(
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
    with pytest.raises(OutboxError, match="has lost commits"):
        own.commit(Changes(confirmed=[sent])) if is_committing else own.changed_elsewhere()
    assert len(list(outbox.rows("open"))) == 2


STARTED_AT = "extract(epoch FROM pg_postmaster_start_time())"


@pytest.fixture
def restart(admin: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Stands for a restart of the server, which the test shares with others."""
    admin.execute(f"CREATE TABLE public.server AS SELECT {STARTED_AT} AS started_at")
    statements = queries("reliablepub")
    for name in ("take_turn", "look", "started_at"):
        assert STARTED_AT in statements[name], name
        patched = statements[name].replace(STARTED_AT, "(SELECT started_at FROM public.server)")
        monkeypatch.setitem(statements, name, patched)
    return lambda: admin.execute("UPDATE public.server SET started_at = started_at + 1")


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
def test_a_message_that_a_fail_over_has_lost_takes_no_other_with_it(
    url: str, fail_over: Callable[[str], None], own: PostgresStore, *, is_committing: bool
) -> None:
    outbox = Outbox(url)
    outbox.enqueue(Message(b"", message_id="before"))
    own.changed_elsewhere()
    [before], _ = own.read_ready(1, own.snapshot().last_id, **ALL)
    own.commit(Changes(sent=[Batch(1, 1, [before])]))
    outbox.enqueue(Message(b"", message_id="lost"))
    assert own.changed_elsewhere()
    [lost], _ = own.read_ready(before.id + 1, own.snapshot().last_id, **ALL)
    fail_over("other")
    if is_committing:
        with pytest.raises(Intervened):
            own.commit(Changes(sent=[Batch(1, 2, [lost])]))
    assert own.changed_elsewhere()
    assert [(one.id, one.is_open) for one in own.touched()] == [(lost.id, True)]
    assert {*own.snapshot().late} == {(lost.id, lost.id)}
    assert message_ids(own.read_ready(lost.id, lost.id, **ALL)[0]) == ["other"]
    counters = own.commit(Changes(confirmed=[before])).counters
    assert (counters.stored, counters.confirmed) == (2, 1)
    assert own.touched() == []
    assert not outbox.audit().differences


def test_a_relay_uses_no_ids_that_a_fail_over_will_give_out_again(
    url: str,
    restart: Callable[[], object],
    own: PostgresStore,
    entry: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sequence of a replica that lagged is behind the ids that the relay has drawn."""
    steps = own._steps

    def fail_over_before(changes: Changes, now: float) -> Any:
        monkeypatch.setattr(own, "_steps", steps)
        with closing(psycopg.connect(url)) as connection, connection:
            ids = "SELECT setval('reliablepub.message_ids', %s, false)"
            connection.execute(ids, [changes.new[0].id])
        restart()
        Outbox(url).enqueue(Message(b"", message_id="first"))
        return steps(changes, now)

    monkeypatch.setattr(own, "_steps", fail_over_before)
    own.commit(Changes(new=[entry(), entry()]))
    Outbox(url).enqueue(Message(b"", message_id="last"))
    assert len(list(Outbox(url).rows("open"))) == 4
    assert not Outbox(url).audit().differences


def test_a_relay_draws_new_ids_if_another_message_has_one_of_them(
    url: str, own: PostgresStore, admin: psycopg.Connection, entry: Make
) -> None:
    """After a fail-over, an enqueuer has stored its message under the id that it had drawn."""
    for _ in range(2):
        Outbox(url).enqueue(Message(b""))
    admin.execute("SELECT setval('reliablepub.message_ids', 1)")
    own.commit(Changes(new=[one := entry(), other := entry()]))
    assert [one.id, other.id] == [4, 5]
    assert len(list(Outbox(url).rows("open"))) == 4
    assert not Outbox(url).audit().differences


def test_a_relay_says_that_other_messages_have_all_ids_that_it_draws(
    url: str, own: PostgresStore, admin: psycopg.Connection, entry: Make
) -> None:
    for _ in range(9):
        Outbox(url).enqueue(Message(b""))
    admin.execute("SELECT setval('reliablepub.message_ids', 1)")
    with pytest.raises(OutboxUnreachable, match="other messages have these ids"):
        own.commit(Changes(new=[entry()]))
    own.commit(Changes(new=[entry()]))
    assert not Outbox(url).audit().differences


def test_a_relay_publishes_the_message_that_has_got_the_id_of_a_lost_one(
    url: str, fail_over: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "BEAT_S", 3_600.0)  # it has read the message since its turn
    with FakeBroker() as broker, Publisher(broker.url, outbox=url) as publisher:
        broker.declare_queue("q")
        broker.block()
        publisher.publish(b"", routing_key="q", message_id="before")
        until(lambda: publisher.status.link == "blocked")
        Outbox(url).enqueue(Message(b"", routing_key="q", message_id="lost"))
        until(lambda: publisher.status.buffered == 1)
        fail_over("other")
        broker.unblock()
        assert publisher.flush(30).is_flushed
        told = [message.properties.message_id for message in broker.messages("q")]
    assert told == ["before", "other"]
    assert not Outbox(url).audit().differences


@pytest.mark.parametrize("is_committing", [False, True])
def test_a_backlog_that_was_read_before_a_restart_of_the_server_is_read_again(
    url: str, *, is_committing: bool
) -> None:
    for _ in range(3):
        Outbox(url).enqueue(Message(b""))
    with closing(PostgresStore(Server.of(url))) as own:
        entries, _ = own.read_ready(1, own.snapshot().last_id, **ALL)
        own._started_at = b"0"
        if is_committing:
            with pytest.raises(Intervened):
                own.commit(Changes(sent=[Batch(1, 1, entries)]))
        assert own.changed_elsewhere()
        assert own.snapshot().late == ((1, 3),)
        assert {one.id for one in own.touched()} == {1, 2, 3}
        own.commit(Changes(sent=[Batch(1, 1, entries)]))


def test_a_publisher_sends_a_backlog_though_the_server_restarts_before_its_first_commit(
    url: str, restart: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = PostgresStore.commit
    restarts = iter([restart])

    def restarting(store: PostgresStore, changes: Changes) -> Any:
        if changes.sent:
            next(restarts, lambda: None)()
        return commit(store, changes)

    monkeypatch.setattr(PostgresStore, "commit", restarting)
    for _ in range(10):
        Outbox(url).enqueue(Message(b"", routing_key="q"))
    with FakeBroker() as broker:
        broker.declare_queue("q")
        with Publisher(broker.url, outbox=url) as publisher:
            assert publisher.flush(30).is_flushed
        assert next(restarts, None) is None
        assert len(broker.messages("q")) == 10


def test_what_a_turn_has_counted_is_not_read_again_after_a_restart_of_the_server(
    url: str, own: PostgresStore, entry: Make
) -> None:
    Outbox(url).enqueue(Message(b""))
    own.changed_elsewhere()
    [one], _ = own.read_ready(1, own.snapshot().last_id, **ALL)
    own.commit(Changes(sent=[Batch(1, 1, [one])]))
    own._started_at = b"0"
    assert own.commit(Changes(new=[entry()])).counters.stored == 2
    assert not own.changed_elsewhere()
    assert (own.touched(), own.snapshot().late) == ([], ())


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


class CutBehind:
    """Loses the connection behind the commit of a transaction that has a statement."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        transact = Link.transact
        self.is_over = False

        def cut(link: Link, steps: Any) -> Any:
            result = transact(link, steps)
            if not self.is_over and name in {step for step, _ in steps}:
                self.is_over = True
                link.close()
                raise psycopg.OperationalError("the connection is lost")
            return result

        monkeypatch.setattr(Link, "transact", cut)


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
    cut = CutBehind(monkeypatch, "release")
    first = Release("orders", "created", 2)
    own.commit(Changes(released=[first]))
    assert cut.is_over
    assert first.count == first.limit
    own.commit(Changes(released=[second := Release("orders", "created", 5, after=first.last)]))
    assert second.count == 3


def test_a_commit_is_done_though_the_messages_that_stay_held_cannot_be_counted(
    own: PostgresStore, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.commit(Changes(new=held(entry, 5)))
    fail_once(monkeypatch, "read", lambda name, *_: name == "count_held")
    release = Release("orders", "created", 1, is_counted=True)
    snapshot = own.commit(Changes(new=[entry()], released=[release]))
    assert snapshot.counters.stored == 6
    assert release.count == 1


def test_a_damaged_message_is_told_though_the_answer_is_lost(
    own: PostgresStore, admin: psycopg.Connection, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.commit(Changes(new=[damaged := entry()]))
    admin.execute("UPDATE reliablepub.messages SET body = 'x'")
    CutBehind(monkeypatch, "park_damaged")
    assert own.read_ready(1, 9, **ALL)[0] == []
    assert [row.id for row in own.damaged()] == [damaged.id]


def test_a_damaged_message_that_cannot_be_parked_now_is_parked_later(
    url: str, own: PostgresStore, admin: psycopg.Connection, entry: Make
) -> None:
    own.commit(Changes(new=[damaged := entry()]))
    admin.execute("UPDATE reliablepub.messages SET body = 'x'")
    admin.execute(BREAK.encode())
    assert own.read_ready(1, 9, **ALL)[0] == []
    assert own.damaged() == []
    admin.execute(MEND)
    time.sleep(0.3)
    with suppress(OutboxUnreachable):
        own.changed_elsewhere()
    assert [row.id for row in own.damaged()] == [damaged.id]
    [parked] = Outbox(url).parked()
    assert parked.id == damaged.id
    assert not Outbox(url).audit().differences
