"""Encryption at rest in PostgreSQL: what is stored is read, rerouted and rekeyed with its keys.

What encryption covers, and what becomes of a changed row, is in `test_encryption`.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import psycopg
import pytest

from reliablepub import (
    Message,
    Outbox,
    OutboxError,
    OutboxKeys,
    OutboxSealed,
    OutboxUnsure,
    Publisher,
)
from reliablepub.outbox.admin.inspection import read_contents
from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.admin.rekeying import missing_key
from reliablepub.outbox.entry import Attempt, Changes, Entry
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.postgres.server import Link, Server, Step
from reliablepub.outbox.postgres.store import PostgresStore
from reliablepub.testing import FakeBroker
from tests.outbox.cuts import Cut
from tests.outcomes import REFUSED

pytestmark = pytest.mark.postgres
OLD = bytes(range(32))
NEW = bytes(range(32, 64))
BOTH = OutboxKeys({"new": NEW, "old": OLD})
SECRET: dict[str, Any] = {"body": b"card 4111", "headers": {"who": "Ms Secret"}, "app_id": "hush"}
ALL: dict[str, Any] = {"limit": 99, "bytes_max": 10**9}


@pytest.fixture
def url(postgres_url: str) -> str:
    """An outbox of this test's own."""
    Outbox(postgres_url).create()
    return postgres_url


@pytest.fixture
def old() -> OutboxKeys:
    return OutboxKeys({"old": OLD})


def message(number: int) -> Message:
    return Message(**SECRET, routing_key="orders", message_id=f"m-{number}")


def everything(url: str) -> str:
    """All rows with messages, as text."""
    with psycopg.connect(url) as connection:
        return str(
            [
                connection.execute(f"SELECT * FROM {Server.of(url).schema}.{table}").fetchall()
                for table in ("messages", "parked", "confirmed")
            ]
        )


def read(store: PostgresStore, ids: Sequence[int] = (1, 99)) -> list[Message]:
    return [entry.message for entry in store.read_ready(*ids, **ALL)[0]]


def test_what_is_stored_is_read_and_not_shown(url: str, old: OutboxKeys) -> None:
    with Outbox(url, keys=old) as outbox:
        outbox.enqueue(message(1))
        outbox.enqueue(message(2), key="k")
        with psycopg.connect(url) as app:
            outbox.enqueue(message(3), connection=app)
    with closing(PostgresStore(Server.of(url), keys=old)) as store:
        new = [Entry(message(4), 1.0), Entry(message(5), 1.0, due_at=5.0, expires_at=9.0)]
        store.commit(Changes(new=new))
        assert read(store) == [message(number) for number in (1, 2, 3, 4)]
        assert [e.message for e in store.read_due(6.0, loaded=(), **ALL)[0]] == [message(5)]
        assert store.damaged() == []
    stored = everything(url)
    for secret in ("card", "Secret", "hush"):
        assert secret not in stored
    assert stored.count("'orders'") == 5


def test_the_id_is_one_of_the_database_that_stores_it(
    new_postgres_outbox: Callable[[], str], old: OutboxKeys, fake_broker: FakeBroker
) -> None:
    """The application's connection may be to another database than the outbox's URL."""
    mine, other = new_postgres_outbox(), new_postgres_outbox()
    fake_broker.declare_queue("orders")
    with Outbox(mine, keys=old) as outbox, psycopg.connect(other) as connection:
        for number in range(3):
            outbox.enqueue(message(number))
        outbox.enqueue(message(3), connection=connection)
    with psycopg.connect(other) as connection:
        assert connection.execute("SELECT id FROM reliablepub.messages").fetchall() == [(1,)]
    with Publisher(fake_broker.url, outbox=other, outbox_keys=old) as publisher:
        for number in range(5):  # none gets the id of another
            publisher.publish(message(number)).result(20)
        assert publisher.flush(20).is_flushed


def test_a_message_whose_commit_was_not_answered_is_stored_once(
    url: str, old: OutboxKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cut(monkeypatch, "store", behind=True)
    with Outbox(url, keys=old) as outbox:
        outbox.enqueue(message(1))
        outbox.enqueue(message(2))
        assert outbox.status().open == 2


def test_a_number_that_another_message_has_got_is_not_taken_for_its_own(
    url: str, old: OutboxKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a fail-over to a replica that lagged, which had neither the row nor the number."""
    store, lost = Link.store, iter([True])

    def fails_over(link: Link, step: Step) -> object:
        if not next(lost, False):
            return store(link, step)
        number = step[1]["id"]
        with psycopg.connect(url) as other:
            other.execute("SELECT setval('reliablepub.message_ids', %s, false)", [number])
        Outbox(url, keys=old).enqueue(message(2))
        link.close()
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(Link, "store", fails_over)
    with Outbox(url, keys=old) as outbox, pytest.raises(OutboxUnsure):
        outbox.enqueue(message(1))


def test_a_relay_publishes_it(url: str, old: OutboxKeys) -> None:
    with FakeBroker() as broker:
        broker.declare_queue("orders")
        with Outbox(url, keys=old) as outbox:
            outbox.enqueue(message(1))
        with Publisher(broker.url, outbox=url, outbox_keys=old) as publisher:
            publisher.publish(message(2)).result(60)
            publisher.flush(60)
        assert [bytes(one.body) for one in broker.messages("orders")] == [b"card 4111"] * 2


def test_without_the_key_nothing_is_lost(url: str, old: OutboxKeys) -> None:
    with Outbox(url, keys=old) as outbox:
        outbox.enqueue(message(1))
    for wrong in (None, OutboxKeys({"new": NEW}), OutboxKeys({"old": NEW})):
        with (
            closing(PostgresStore(Server.of(url), keys=wrong)) as store,
            pytest.raises(OutboxSealed, match="nothing is lost"),
        ):
            read(store)
    contents = read_contents(outbox_at(url), 1)
    assert contents is not None
    assert contents.is_sealed
    contents = read_contents(outbox_at(url), 1, old)
    assert contents is not None
    assert (contents.body, contents.headers) == (b"card 4111", {"who": "Ms Secret"})


def test_everything_is_encrypted_anew(url: str, old: OutboxKeys) -> None:
    with Outbox(url, keys=old) as outbox:
        for number in range(1, 5):
            outbox.enqueue(message(number))
    with Outbox(url) as outbox:
        outbox.enqueue(message(5))  # not encrypted
    with closing(PostgresStore(Server.of(url), keys=BOTH, keep_confirmed_s=9e9)) as store:
        store.show({})
        first, second, third, _ = store.read_ready(1, 4, **ALL)[0]
        attempt = Attempt(second, "1-1", 1, REFUSED, 2.0)
        store.commit(Changes(parked=[attempt], attempts=[attempt], confirmed=[third]))
        with Outbox(url, keys=BOTH) as outbox:
            result = outbox.rekey()
            assert (result.changed, list(result.left)) == (4, [5])
            assert outbox.rekey().changed == 0
            assert outbox.audit().is_right
        assert first.message == message(1)
    assert missing_key(outbox_at(url), BOTH, OutboxKeys({"old": OLD})) == "new"
    assert missing_key(outbox_at(url), BOTH, OutboxKeys({"new": NEW})) is None
    elsewhere = Intervention(Action.REROUTE, routing_key="elsewhere")
    assert intervene(outbox_at(url), [4], elsewhere, keys=BOTH).changed == 1
    assert Outbox(url).retry([2]) == 1
    with closing(PostgresStore(Server.of(url), keys=OutboxKeys({"new": NEW}))) as store:
        due, _ = store.read_due(1e12, loaded=(), **ALL)
        found = {e.message.message_id: e.message for e in due}
        assert found["m-2"] == message(2)
        assert (found["m-4"].routing_key, found["m-4"].body) == ("elsewhere", b"card 4111")
        assert read(store) == [message(1)]
        assert [row.id for row in store.damaged()] == [5], "it is not encrypted"
    assert "'old'" not in everything(url)
    assert '"old"' not in everything(url)


@pytest.mark.parametrize("keys", [None, {"old": OLD}, {"old": OLD, "new": bytes(32)}])
def test_nothing_is_encrypted_under_a_key_that_a_relay_lacks(
    url: str, old: OutboxKeys, keys: dict[str, bytes] | None
) -> None:
    with Outbox(url, keys=old) as outbox:
        outbox.enqueue(message(1))
    theirs = None if keys is None else OutboxKeys(keys)
    with (
        closing(PostgresStore(Server.of(url), keys=theirs)) as store,
        Outbox(url, keys=BOTH) as outbox,
    ):
        store.show({})
        with pytest.raises(OutboxError, match=r"key .*'new', and would end at the first message"):
            outbox.rekey()
    assert '"old"' in everything(url)


@pytest.mark.parametrize(
    "change",
    [
        "routing_key = 'mine'",
        "message_id = 'm-2'",
        "ordering_key = 'k'",
        "body = body || 'x'::bytea",
    ],
)
def test_a_changed_row_is_parked(url: str, old: OutboxKeys, change: str) -> None:
    with Outbox(url, keys=old) as outbox:
        outbox.enqueue(message(1))
    with psycopg.connect(url) as connection:
        connection.execute(f"UPDATE {Server.of(url).schema}.messages SET {change}, checksum = -1")
    with closing(PostgresStore(Server.of(url), keys=old)) as store:
        assert read(store) == []
        (row,) = store.damaged()
        assert row.reason.startswith("it was changed since it was encrypted with key 'old'")
