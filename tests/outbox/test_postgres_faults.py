"""What PostgreSQL answers when something is wrong: each answer is survived, or told truly.

The faults are the server's own. A trigger raises them, as often as a test says: a sequence counts,
because no rollback takes its numbers back.
"""

import random
import string
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import psycopg
import pytest

from reliablepub import (
    InvalidMessage,
    Message,
    Outbox,
    OutboxDiskFailed,
    OutboxError,
    OutboxLocked,
    OutboxUnreachable,
    OutboxUnsure,
    Publisher,
)
from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.entry import Attempt, Changes
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.postgres.server import Server
from reliablepub.outbox.postgres.store import PostgresStore
from reliablepub.outcome import Outcome, OutcomeKind
from reliablepub.testing import FakeBroker
from tests.asking import fill, message_ids, stored
from tests.outbox.conftest import Make
from tests.outbox.cuts import Cut, end_connections
from tests.postgres import PostgresServer
from tests.relay.scripted import World
from tests.stores import begin_anew
from tests.waiting import until

Break = Callable[..., None]
ALL: dict[str, Any] = {"limit": 1000, "bytes_max": 10**9}
FAULTS = {
    "serialization failure": "RAISE EXCEPTION 'again' USING ERRCODE = '40001'",
    "deadlock": "RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'",
    "admin shutdown": "PERFORM pg_terminate_backend(pg_backend_pid(), 1000)",
    "statement timeout": "RAISE EXCEPTION 'timeout' USING ERRCODE = '57014'",
    "out of memory": "RAISE EXCEPTION 'memory' USING ERRCODE = '53200'",
}
FAILED_DISK = {"I/O error": "RAISE EXCEPTION 'cannot read block' USING ERRCODE = '58030'"}
AT_ONCE = ("serialization failure", "deadlock", "admin shutdown")
"""What is tried again within the call; the others are told."""
BREAK = """
    CREATE SEQUENCE IF NOT EXISTS public.faults;
    SELECT setval('public.faults', 1, false);
    CREATE OR REPLACE FUNCTION public.fault() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF nextval('public.faults') <= {times} THEN {fault}; END IF;
        RETURN NEW;
    END $$;
    DROP TRIGGER IF EXISTS fault ON reliablepub.{table};
    CREATE {kind} TRIGGER fault {when} INSERT ON reliablepub.{table} {deferred}
    FOR EACH ROW EXECUTE FUNCTION public.fault();
"""


@pytest.fixture
def break_(url: str) -> Break:
    """Have so many inserts into a table fail, at once or when they are committed."""

    def run(fault: str, table: str, *, times: int = 1, at_commit: bool = False) -> None:
        how = {"kind": "", "when": "BEFORE", "deferred": ""}
        if at_commit:
            deferred = "DEFERRABLE INITIALLY DEFERRED"
            how = {"kind": "CONSTRAINT", "when": "AFTER", "deferred": deferred}
        text = BREAK.format(times=times, table=table, fault=(FAULTS | FAILED_DISK)[fault], **how)
        with closing(psycopg.connect(url, autocommit=True)) as connection:
            connection.execute(text.encode())

    return run


def assert_counted(url: str) -> None:
    assert not Outbox(url).audit().differences


# ---------------------------------------------------------------------------- enqueue


@pytest.mark.parametrize("key", [None, "once"])
@pytest.mark.parametrize("at_commit", [False, True])
@pytest.mark.parametrize("fault", AT_ONCE)
def test_enqueue_tries_again(
    url: str, break_: Break, fault: str, key: str | None, *, at_commit: bool
) -> None:
    break_(fault, "messages", times=2, at_commit=at_commit)
    with Outbox(url) as outbox:
        outbox.enqueue(Message(b"", message_id="m"), key=key)
    assert message_ids(url) == ["m"]


@pytest.mark.parametrize("fault", FAULTS)
def test_enqueue_tells_what_goes_on_and_works_again_afterwards(
    url: str, break_: Break, fault: str
) -> None:
    break_(fault, "messages", times=3)
    is_cut = fault == "admin shutdown"
    with Outbox(url) as outbox:
        with pytest.raises(OutboxUnsure if is_cut else OutboxLocked):
            outbox.enqueue(Message(b"", message_id="told"))
        break_(fault, "messages", times=0)
        outbox.enqueue(Message(b"", message_id="m"))
    assert message_ids(url) == ["m"]


def test_a_message_that_may_be_stored_is_unsure_though_it_is_no_connection_that_fails(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message was stored, the answer is lost, and the next connection cannot be used."""
    with Outbox(url) as outbox:
        Cut(monkeypatch, "store", behind=True, then=OutboxLocked("a statement timeout"))
        with pytest.raises(OutboxUnsure):
            outbox.enqueue(Message(b"", message_id="unsure"))
    assert message_ids(url) == ["unsure"]


def test_a_message_with_a_key_is_unsure_though_another_may_have_the_key(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message was stored and the answer is lost; so is the answer to whose key it is."""
    with Outbox(url) as outbox:
        down = partial(OutboxUnreachable, "the server is down")
        Cut(monkeypatch, "rows", step="first_with_key", error=down, times=2)
        outbox.enqueue(Message(b"", message_id="first"), key="a")
        with pytest.raises(OutboxUnreachable):  # what is not stored for certain is told so
            outbox.enqueue(Message(b"", message_id="second"), key="a")
        Cut(monkeypatch, "store", behind=True)
        with pytest.raises(OutboxUnsure):
            outbox.enqueue(Message(b"", message_id="unsure"), key="b")
    assert message_ids(url) == ["first", "unsure"]


def test_an_application_sees_the_error_of_its_own_connection(url: str, break_: Break) -> None:
    break_("serialization failure", "messages")
    with closing(psycopg.connect(url)) as application:
        with pytest.raises(psycopg.errors.SerializationFailure):
            Outbox(url).enqueue(Message(b""), connection=application)
        application.rollback()


def test_no_error_shows_a_body(url: str, break_: Break) -> None:
    """With this setting, the server adds the values of a statement to its errors."""
    break_("statement timeout", "messages", times=100)
    telling = f"{url}?options=-c log_parameter_max_length_on_error=-1"
    with FakeBroker() as broker, Publisher(broker.url, outbox=telling) as publisher:
        for store in (Outbox(telling).enqueue, publisher.publish):
            with pytest.raises(OutboxLocked, match="timeout") as caught:
                store(Message(b"secret"))
            told = "".join(traceback.format_exception(caught.value))
            assert b"secret".hex() not in told


# ---------------------------------------------------------------------------- a relay's turn


@pytest.mark.parametrize("at_commit", [False, True])
@pytest.mark.parametrize("fault", AT_ONCE)
def test_a_turn_is_tried_again(
    url: str, own: PostgresStore, entry: Make, break_: Break, fault: str, *, at_commit: bool
) -> None:
    old, new = [entry(), entry()], [entry()]
    own.commit(Changes(new=old))
    break_(fault, "turns", times=3, at_commit=at_commit)
    lost = Attempt(old[1], "1-1", 1, Outcome(OutcomeKind.RETURNED, 312, "no route"), 1.0)
    counters = own.commit(Changes(new=new, confirmed=old[:1], parked=[lost])).counters
    assert (counters.stored, counters.confirmed, counters.parked) == (3, 1, 1)
    assert message_ids(url) == [new[0].message.message_id]
    assert_counted(url)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_turn_that_fails_for_longer_changes_nothing_and_is_told(
    url: str, own: PostgresStore, entry: Make, break_: Break, fault: str
) -> None:
    old = stored(own, entry())
    break_(fault, "turns", times=100)
    is_cut = fault == "admin shutdown"
    with pytest.raises(OutboxUnsure if is_cut else OutboxLocked):
        own.commit(Changes(new=[entry()], confirmed=old))
    with pytest.raises(OutboxUnreachable if is_cut else OutboxLocked):
        own.commit(Changes(confirmed=old))
    break_(fault, "turns", times=0)
    if is_cut:
        begin_anew(own)
    own.commit(Changes(confirmed=old))
    assert own.snapshot().counters.open == 0
    assert_counted(url)


def test_a_commit_is_unsure_though_it_is_no_connection_that_fails(
    url: str, own: PostgresStore, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was executed, its answer is lost, and the next connection cannot be used."""
    Cut(monkeypatch, behind=True, then=OutboxLocked("a statement timeout"))
    with pytest.raises(OutboxUnsure):
        own.commit(Changes(new=[entry()]))
    begin_anew(own)
    own.commit(Changes(new=[entry()]))
    assert own.snapshot().counters.stored == 2
    assert_counted(url)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_publisher_goes_on(url: str, break_: Break, fault: str) -> None:
    with FakeBroker() as broker, Publisher(broker.url, outbox=url) as publisher:
        broker.declare_queue("orders")
        publisher.publish(b"", routing_key="orders").result(20)
        break_(fault, "turns", times=12)
        accepted, deadline = 0, time.monotonic() + 30
        while accepted < 5 and time.monotonic() < deadline:
            try:
                publisher.publish(b"", routing_key="orders")
            except (OutboxLocked, OutboxUnreachable, OutboxUnsure):
                time.sleep(0.05)
            else:
                accepted += 1
        assert accepted == 5
        assert publisher.flush(20).is_flushed
        counters = publisher.status.counters
        assert counters.confirmed == counters.stored >= 6
        assert len(broker.messages("orders")) >= counters.stored
    assert_counted(url)


def test_a_disk_that_fails_is_told_and_tried_again(url: str, break_: Break) -> None:
    with FakeBroker() as broker, Publisher(broker.url, outbox=url) as publisher:
        broker.declare_queue("orders")
        publisher.publish(b"", routing_key="orders").result(20)
        break_("I/O error", "turns", times=100)
        with pytest.raises(OutboxDiskFailed, match="look at the logs of the server"):
            publisher.publish(b"", routing_key="orders")
        break_("I/O error", "turns", times=0)
        fill(url, Message(b"", routing_key="orders"))
        until(lambda: len(broker.messages("orders")) == 2)
    assert_counted(url)


# ---------------------------------------------------------------------------- operators


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("at_commit", [False, True])
def test_an_operator_s_action_is_done_once_or_told(
    url: str, break_: Break, fault: str, *, at_commit: bool
) -> None:
    outbox = Outbox(url)
    outbox.enqueue(Message(b"", message_id="m"))
    break_(fault, "turns", times=3, at_commit=at_commit)
    park = Intervention(Action.PARK)
    if fault == "admin shutdown":
        for _ in range(3):
            with pytest.raises(OutboxUnsure if at_commit else OutboxUnreachable):
                intervene(outbox_at(url), [1], park)
    assert intervene(outbox_at(url), [1], park).changed == 1
    assert (outbox.status().open, outbox.status().parked) == (0, 1)
    assert_counted(url)


def test_an_outbox_outlives_its_idle_connections(url: str) -> None:
    """The server was started again since the last call: the next one must not pay for it."""
    with Outbox(url) as outbox, Outbox(url, open_messages_max=10) as limited:
        for call in (
            outbox.status,
            lambda: outbox.enqueue(Message(b"")),
            lambda: outbox.enqueue(Message(b""), key="k"),
            lambda: limited.enqueue(Message(b"")),
            lambda: outbox.position("source"),
            lambda: outbox.retry([1]),
            lambda: outbox.forget("source"),
            lambda: list(outbox.rows("open")),
        ):
            outbox.status()
            limited.status()
            end_connections(url)
            call()
        assert outbox.status().open == 3


# ---------------------------------------------------------------------------- a replica


@pytest.fixture
def make_replica(postgres_server: PostgresServer) -> Iterator[Callable[[], None]]:
    """Start the server again as a replica, which refuses to write until it is promoted."""

    def make() -> None:
        postgres_server.stop("fast")
        (postgres_server.data / "standby.signal").touch()
        postgres_server.start()

    yield make
    postgres_server.recover()
    if postgres_server.execute("SELECT pg_is_in_recovery()") == [(True,)]:
        postgres_server.execute("SELECT pg_promote()")


def test_a_server_that_became_a_replica_stores_nothing_and_is_waited_for(
    url: str, postgres_server: PostgresServer, make_replica: Callable[[], None]
) -> None:
    with FakeBroker() as broker, Outbox(url) as outbox:
        broker.declare_queue("orders")
        with Publisher(broker.url, outbox=url) as publisher:
            publisher.publish(b"before", routing_key="orders").result(20)
            make_replica()
            with pytest.raises(OutboxUnreachable, match="replica"):
                outbox.enqueue(Message(b"refused", routing_key="orders"))
            with pytest.raises(OutboxUnreachable, match="replica"):
                outbox.retry([1])
            assert outbox.status().open <= 1, "it can be read"
            with pytest.raises(OutboxError) as told:
                publisher.publish(b"refused too", routing_key="orders")
            assert not isinstance(told.value, OutboxUnsure)
            postgres_server.execute("SELECT pg_promote()")
            outbox.enqueue(Message(b"after", routing_key="orders"))
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                try:
                    publisher.publish(b"again", routing_key="orders").result(20)
                    break
                except (OutboxUnreachable, OutboxLocked):
                    time.sleep(0.1)
            assert publisher.flush(20).is_flushed
        assert {m.body for m in broker.messages("orders")} == {b"before", b"after", b"again"}
    assert_counted(url)


def test_a_url_with_several_hosts_means_the_primary() -> None:
    assert "target_session_attrs=read-write" in Server.of("postgresql://one,two/db").url
    assert "target_session_attrs=read-write" in Server.of("postgresql:///db?host=one,two").url
    assert "target_session_attrs" not in Server.of("postgresql://one/db").url
    url = "postgresql://one,two/db?target_session_attrs=any"
    assert Server.of(url).url.count("target_session_attrs") == 1


# ---------------------------------------------------------------------------- U+0000


FIELDS = ("message_id", "exchange", "routing_key", "ordering_key")


@pytest.mark.parametrize("field", FIELDS)
def test_a_text_that_cannot_be_stored_is_refused_by_name_and_harms_no_other(
    url: str, field: str
) -> None:
    fields: dict[str, Any] = {"routing_key": "orders", field: "a\0b"}
    good = Message(b"good", routing_key="orders")
    with FakeBroker() as broker, Publisher(broker.url, outbox=url) as publisher:
        broker.declare_queue("orders")
        with pytest.raises(InvalidMessage, match=r"U\+0000") as refused:
            publisher.publish(b"", **fields)
        assert refused.value.field == field
        with pytest.raises(InvalidMessage):
            publisher.publish_many([good, Message(b"", **fields)])
        with Outbox(url) as outbox, pytest.raises(InvalidMessage) as refused:
            outbox.enqueue(Message(b"", **fields))
        assert refused.value.field == field
        assert publisher.status.counters.stored == 0
        publisher.publish_many([good]).wait(20)
        assert publisher.flush(20).counters.confirmed == 1


def test_other_values_with_u_0000_are_refused_by_name(url: str) -> None:
    outbox = Outbox(url)
    for name, call in (
        ("key", lambda: outbox.enqueue(Message(b""), key="a\0b")),
        ("name", lambda: outbox.position("a\0b")),
        ("name", lambda: outbox.forget("a\0b")),
        ("note", lambda: intervene(outbox_at(url), [1], Intervention(Action.PARK, note="a\0b"))),
    ):
        if name == "note":
            outbox.enqueue(Message(b""))
        with pytest.raises(InvalidMessage) as refused:
            call()
        assert refused.value.field == name
    with closing(psycopg.connect(url)) as application:
        with pytest.raises(InvalidMessage):
            outbox.enqueue(Message(b"", routing_key="a\0b"), connection=application)
        application.execute("SELECT 1")  # its transaction goes on
    assert outbox.status().open == 1


def test_names_that_no_index_has_room_for_are_refused_and_longest_ones_are_not(url: str) -> None:
    """PostgreSQL compresses names, so only those without a pattern are as long as they seem."""
    chance = random.Random(1)
    longest = "".join(chance.choices(string.ascii_letters + string.digits, k=2600))
    outbox = Outbox(url)
    with FakeBroker() as broker, Publisher(broker.url, outbox=url) as publisher:
        broker.declare_queue("orders")
        publisher.publish_many([Message(b"", routing_key="orders")], source=longest)
        outbox.enqueue(Message(b"", routing_key="orders"), key=longest)
        with pytest.raises(InvalidMessage, match="2601 bytes") as refused:
            publisher.publish_many([Message(b"")], source=f"{longest}z")
        assert refused.value.field == "source"
        with pytest.raises(InvalidMessage, match="2601 bytes") as refused:
            outbox.enqueue(Message(b""), key=f"{longest}z")
        assert refused.value.field == "key"
        assert publisher.flush(20).counters.stored == 2
    assert outbox.position(longest) == 1


def test_headers_and_bodies_may_have_u_0000(url: str, own: PostgresStore, entry: Make) -> None:
    own.commit(Changes(new=[entry(body=b"a\0b", headers={"x\0": "y\0"})]))
    [read], _ = own.read_ready(1, 9, **ALL)
    assert (read.message.body, read.message.headers) == (b"a\0b", {"x\0": "y\0"})


def test_the_broker_s_words_are_kept_without_u_0000(
    url: str, own: PostgresStore, entry: Make
) -> None:
    refused = entry()
    own.commit(Changes(new=[refused]))
    attempt = Attempt(refused, "1-1", 1, Outcome(OutcomeKind.REFUSED, 404, "no 'a\0b'"), 1.0)
    own.commit(Changes(parked=[attempt], attempts=[attempt]))
    [parked] = Outbox(url).parked()
    assert parked.reply_text == "no 'a\ufffdb'"


def test_tags_of_a_commit_that_was_cut_off_do_not_stay_in_flight(
    url: str, own: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try was executed and its answer is lost; the second is refused."""
    world = World(own)
    world.sends("a")
    memory = psycopg.errors.OutOfMemory("memory")
    Cut(monkeypatch, step="insert_in_flight", behind=True, then=memory)
    world.connect()
    world.turn()
    world.lose_connection()
    world.turns(3, after_s=1.0)
    assert world.sent == []
    effect = intervene(outbox_at(url), [1], Intervention(Action.PARK))
    assert (effect.changed, effect.in_flight) == (1, [])
