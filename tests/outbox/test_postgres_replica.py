"""What is told as stored is on the synchronous replica too, though a commit did not wait for it.

The replica is one that never comes: each commit waits for it until the test ends the wait, as an
administrator does, or until the server needs none any more.
"""

import select
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from typing import Any

import psycopg
import pytest

from reliablepub import Message, Outbox, OutboxKeys, OutboxUnsure, ReliablePubError
from reliablepub.outbox.entry import Changes
from reliablepub.outbox.postgres.server import Link, Server
from reliablepub.outbox.postgres.store import PostgresStore
from tests.asking import message_ids
from tests.outbox.conftest import Make
from tests.postgres import PostgresServer
from tests.stores import begin_anew
from tests.waiting import until

WAITING = """
    SELECT pid, xact_start FROM pg_stat_activity
    WHERE wait_event = 'SyncRep' AND datname = %s AND xact_start IS NOT NULL
"""
Wait = tuple[int, datetime]
"""The process of a commit that waits, and when its transaction began."""


class Replica:
    """A synchronous replica that never comes."""

    def __init__(self, server: PostgresServer, database: str) -> None:
        self._server = server
        self._database = database

    def wait(self, *, after: Wait | None = None) -> Wait | None:
        """A commit that waits for it, other than an earlier one."""
        with closing(psycopg.connect(self._server.url_of(), autocommit=True)) as connection:
            waits: list[Wait] = connection.execute(WAITING, [self._database]).fetchall()
        return next((wait for wait in waits if wait != after), None)

    def require(self) -> None:
        """Have each commit wait for it from now on."""
        self._server.execute("ALTER SYSTEM SET synchronous_standby_names = 'replica'")
        self._reload("replica")
        until(self._is_required, what="a commit that waits for the replica")

    def _is_required(self) -> bool:
        """Whether a commit waits: the checkpointer decides, and reads the setting when it likes."""
        with closing(psycopg.connect(self._server.url_of(), autocommit=True)) as connection:
            connection.pgconn.send_query(b"SELECT pg_logical_emit_message(true, '', '')")
            ended, _, _ = select.select([connection.fileno()], [], [], 0.2)
            connection.cancel()
            return not ended

    @contextmanager
    def forgotten(self) -> Iterator[None]:
        """Let all commits end at the end of the block, whatever fails in it."""
        try:
            yield
        finally:
            self.forget()

    def forget(self) -> None:
        """Let all commits end that wait."""
        self._server.execute("ALTER SYSTEM RESET synchronous_standby_names")
        self._reload("")

    def _reload(self, names: str) -> None:
        self._server.execute("SELECT pg_reload_conf()")
        until(lambda: self._server.execute("SHOW synchronous_standby_names") == [(names,)])

    def end_wait(self, function: str, *, after: Wait | None = None) -> Wait:
        """Cancel the statement that waits, or end its connection."""
        until(lambda: self.wait(after=after), what="a commit that waits")
        wait = self.wait(after=after)
        assert wait is not None
        with closing(psycopg.connect(self._server.url_of(), autocommit=True)) as connection:
            connection.execute(f"SELECT {function}({wait[0]})".encode())
        return wait


@pytest.fixture
def replica(url: str, postgres_server: PostgresServer) -> Iterator[Replica]:
    replica = Replica(postgres_server, url.rpartition("/")[2])
    yield replica
    postgres_server.recover()
    postgres_server.execute("ALTER SYSTEM RESET client_min_messages")
    replica.forget()


class Call:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._result: list[object] = []
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result.append(self._call())
        except ReliablePubError as error:
            self._result.append(error)

    @property
    def is_over(self) -> bool:
        return bool(self._result)

    def result(self) -> object:
        until(lambda: self.is_over, what="the end of the call")
        [result] = self._result
        if isinstance(result, Exception):
            raise result
        return result


@pytest.fixture(params=["notice", "error"])
def min_messages(url: str, request: pytest.FixtureRequest) -> None:
    """The setting of the database: with the second one, the server leaves warnings out."""
    name = url.rpartition("/")[2]
    with closing(psycopg.connect(url, autocommit=True)) as connection:
        setting = f"client_min_messages = {request.param}"
        connection.execute(f"ALTER DATABASE {name} SET {setting}".encode())


@pytest.mark.parametrize("end", ["pg_terminate_backend", "pg_cancel_backend"])
def test_a_relay_waits_for_the_replica_though_the_wait_of_its_commit_was_ended(
    url: str, replica: Replica, entry: Make, end: str
) -> None:
    """Or a fail-over would lose a message that `publish()` has told as stored."""
    with closing(PostgresStore(Server.of(url))) as store, replica.forgotten():
        store.commit(Changes(new=[entry(message_id="before")]))  # draws its id, and 31 more
        replica.require()
        call = Call(lambda: store.commit(Changes(new=[entry(message_id="m")])))
        ended = replica.end_wait(end)
        until(lambda: call.is_over or replica.wait(after=ended))
        assert not call.is_over
        replica.forget()
        call.result()
        assert store.snapshot().counters.stored == 2
        assert message_ids(url) == ["before", "m"]


@pytest.mark.usefixtures("min_messages")
def test_a_commit_is_unsure_if_both_waits_for_the_replica_are_cancelled(
    url: str, replica: Replica, entry: Make
) -> None:
    with closing(PostgresStore(Server.of(url))) as store, replica.forgotten():
        store.commit(Changes(new=[entry(message_id="before")]))  # draws its id, and 31 more
        replica.require()
        call = Call(lambda: store.commit(Changes(new=[entry(message_id="m")])))
        ended = replica.end_wait("pg_cancel_backend")
        replica.end_wait("pg_cancel_backend", after=ended)
        with pytest.raises(OutboxUnsure, match="replica"):
            call.result()
        replica.forget()
        begin_anew(store)
        store.commit(Changes(new=[entry(message_id="next")]))
        assert store.snapshot().counters.stored == 3
        assert message_ids(url) == ["before", "m", "next"]


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.usefixtures("min_messages")
def test_enqueue_is_unsure_if_its_wait_for_the_replica_is_cancelled(
    url: str, replica: Replica, key: str | None
) -> None:
    with Outbox(url) as outbox, replica.forgotten():
        replica.require()
        call = Call(lambda: outbox.enqueue(Message(b"", message_id="m"), key=key))
        replica.end_wait("pg_cancel_backend")
        with pytest.raises(OutboxUnsure, match="replica"):
            call.result()
        replica.forget()
        outbox.enqueue(Message(b"", message_id="next"))
    assert message_ids(url) == ["m", "next"]


@pytest.mark.parametrize("key", [None, "k"])
def test_the_first_message_after_warnings_were_turned_off_is_unsure(
    url: str, replica: Replica, postgres_server: PostgresServer, key: str | None
) -> None:
    """Each statement that stores a message turns them on again, until its commit."""
    with Outbox(url) as outbox, replica.forgotten():
        outbox.enqueue(Message(b"", message_id="before"))
        postgres_server.execute("ALTER SYSTEM SET client_min_messages = error")
        replica.require()
        call = Call(lambda: outbox.enqueue(Message(b"", message_id="m"), key=key))
        replica.end_wait("pg_cancel_backend")
        with pytest.raises(OutboxUnsure, match="replica"):
            call.result()
    assert message_ids(url) == ["before", "m"]


@pytest.mark.parametrize(
    ("level", "within"), [("error", "warning"), ("notice", "notice"), ("debug1", "debug1")]
)
def test_only_the_setting_that_leaves_warnings_out_is_changed(
    url: str, level: str, within: str
) -> None:
    with closing(Link(Server.of(url))) as link:
        link.open().execute(f"SET client_min_messages = {level}".encode())
        show = "SELECT current_setting('client_min_messages')"
        assert link.transact([(show, {})])[0] == [(within.encode(),)]
        assert link.batch([(show, {})]) == [[(level.encode(),)]]


def test_an_encrypted_message_that_is_found_waits_for_the_replica(
    url: str, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number is taken, by itself: it is not stored again."""
    store = Link.store

    def run(link: Link, step: Any) -> Any:
        monkeypatch.setattr(Link, "store", store)
        replica.require()
        return store(link, step)

    with Outbox(url, keys=OutboxKeys({"old": b"k" * 32})) as outbox, replica.forgotten():
        monkeypatch.setattr(Link, "store", run)
        call = Call(lambda: outbox.enqueue(Message(b"", message_id="m")))
        ended = replica.end_wait("pg_terminate_backend")
        until(lambda: call.is_over or replica.wait(after=ended))
        assert not call.is_over
        replica.forget()
        assert call.result() == "m"
    assert message_ids(url) == ["m"]


@pytest.mark.usefixtures("min_messages")
def test_an_operator_is_told_that_a_wait_for_the_replica_was_cancelled(
    url: str, replica: Replica
) -> None:
    with Outbox(url) as outbox, replica.forgotten():
        outbox.enqueue(Message(b"", message_id="m"), key="k")
        replica.require()
        call = Call(lambda: outbox.cancel("k"))
        replica.end_wait("pg_cancel_backend")
        with pytest.raises(OutboxUnsure, match="replica"):
            call.result()
        replica.forget()
        assert outbox.status().open == 0
