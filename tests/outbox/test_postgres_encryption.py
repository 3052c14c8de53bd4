"""The number of an encrypted message in PostgreSQL, to which it is bound.

What else encryption means, in both databases, is in `test_encryption`.
"""

from collections.abc import Callable

import psycopg
import pytest

from reliablepub import Message, Outbox, OutboxKeys, OutboxUnsure, Publisher
from reliablepub.outbox.postgres.server import Link, Step
from reliablepub.testing import FakeBroker
from tests.asking import fill, message_ids
from tests.outbox.cuts import Cut


@pytest.fixture
def old() -> OutboxKeys:
    return OutboxKeys({"old": bytes(range(32))})


def message(number: int) -> Message:
    return Message(b"x", routing_key="orders", message_id=f"m-{number}")


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
    fill(url, message(1), message(2), keys=old)
    assert message_ids(url) == ["m-1", "m-2"]


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
