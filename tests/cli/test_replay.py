"""Confirmed messages are sent again, by `outbox replay`, from what the relay has kept."""

import json
import re
from typing import Any

from reliablepub import Message, Outbox, OutboxKeys, Publisher, RetryPolicy
from reliablepub.testing import FakeBroker
from tests.cli.test_edit import run
from tests.stores import Where
from tests.waiting import until

KEYS = OutboxKeys({"k": b"k" * 32})


def listed(where: Where, *arguments: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(where, "list", "--json", *arguments))
    return found


def publish(where: Where, broker: FakeBroker, *messages: Message, **options: Any) -> None:
    with Publisher(broker.url, outbox=where, keep_confirmed_s=3600.0, **options) as publisher:
        publisher.publish_many(messages)


def ids_in(broker: FakeBroker, queue: str) -> list[str | None]:
    return [message.properties.message_id for message in broker.messages(queue)]


def messages(*keys: str) -> list[Message]:
    return [Message(b"x", routing_key=key, message_id=f"m-{n}") for n, key in enumerate(keys)]


def test_the_messages_of_a_deleted_queue_come_again(where: Where) -> None:
    with FakeBroker() as broker:
        for queue in ("invoices", "orders"):
            broker.declare_queue(queue)
        publish(where, broker, *messages("invoices", "orders", "invoices"))
        broker.delete_queue("invoices")
        broker.declare_queue("invoices")
        assert listed(where) == []
        kept = listed(where, "--state", "confirmed", "--routing-key", "invoices")
        assert [row["message_id"] for row in kept] == ["m-0", "m-2"]
        assert all(row["confirmed_at"] and row["may_have_arrived"] for row in kept)

        chosen = ("replay", "--routing-key", "invoices", "--note", "queue was deleted")
        assert "2 messages would be put back" in run(where, *chosen, "--dry-run")
        assert ids_in(broker, "invoices") == []
        with Publisher(broker.url, outbox=where, keep_confirmed_s=3600.0):  # a relay runs
            assert "2 messages put back" in run(where, *chosen, "--yes")
            until(lambda: Outbox(where).status().open == 0)
        assert ids_in(broker, "invoices") == ["m-0", "m-2"]
        assert ids_in(broker, "orders") == ["m-1"]
    status = json.loads(run(where, "status", "--json", "--over", 0))
    assert (status["stored"], status["confirmed"]) == (5, 5), "each replay is stored once more"
    run(where, "audit")
    told = run(where, "explain", "m-0")
    assert "confirmed (persisted)" in told
    assert re.search("put back after its confirm by .*: queue was deleted\n", told)
    assert "It was confirmed" in told
    assert len(listed(where, "--state", "confirmed")) == 3, "kept for a while once more"


def test_a_replayed_message_is_one_that_a_queue_may_hold(where: Where) -> None:
    with FakeBroker() as broker:
        broker.declare_queue("q")
        publish(where, broker, *messages("q"))
    assert "1 message put back" in run(where, "replay", "m-0")
    assert "0 messages put back" in run(where, "replay", "m-0", code=2)
    assert "a queue may have it" in run(where, "cancel", "m-0", "--yes", code=3)
    (open_,) = listed(where)
    assert (open_["may_have_arrived"], open_["attempts"]) == (True, 1)
    assert "persisted: the broker has taken" in run(where, "explain", "m-0")
    run(where, "discard", "m-0", "--yes")
    assert "It was discarded" in run(where, "explain", "m-0")
    run(where, "audit")


def test_an_encrypted_message_with_a_key_keeps_both(where: Where) -> None:
    sent = Message(b"x", routing_key="q", message_id="m", ordering_key="a", headers={"n": 1})
    with FakeBroker() as broker:
        broker.declare_queue("q")
        publish(where, broker, sent, outbox_keys=KEYS)
        run(where, "replay", "m")
        with Publisher(broker.url, outbox=where, outbox_keys=KEYS):
            until(lambda: Outbox(where).status().open == 0)
        first, again = broker.messages("q")
        assert (first.body, again.body) == (b"x", b"x")
        for one in (first, again):
            assert one.properties.headers is not None
            assert one.properties.headers["n"] == 1


def test_only_confirmed_messages_are_replayed(where: Where) -> None:
    Outbox(where).create()
    told = run(where, "replay", "--state", "parked", code=2)
    assert "replay takes messages that are confirmed, not parked" in told
    told = run(where, "retry", "--state", "confirmed", code=2)
    assert "retry takes messages that are waiting, parked or expired, not confirmed" in told


def test_an_outbox_that_is_cleared_has_no_message_and_no_key(where: Where) -> None:
    """For the next test of an application."""
    with FakeBroker() as broker, Outbox(where) as outbox:
        broker.declare_queue("q")
        publish(where, broker, *messages("q"), retry=RetryPolicy.prompt())
        for n, key in enumerate(("q", "gone", "later")):
            outbox.enqueue(Message(b"", routing_key=key, message_id=f"n-{n}"), key=f"key {n}")
        with Publisher(broker.url, outbox=where, retry=RetryPolicy.prompt()):
            until(lambda: outbox.status().open == 0)
        outbox.enqueue(Message(b"", routing_key="q"))
        outbox.clear()
        status = outbox.status()
        assert (status.open, status.parked) == (0, 0)
        assert (listed(where), listed(where, "--state", "confirmed")) == ([], [])
        assert outbox.audit().is_right
        assert outbox.enqueue(Message(b"", message_id="again"), key="key 1") == "again"
