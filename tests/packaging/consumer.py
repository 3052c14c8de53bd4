"""An application that uses every public verb, and says of each what type it expects.

Knows: public names, the standard library. Must never know: private modules, or extras.

It is read twice: by type checkers, beside the sources and outside of them against the installed
wheel; and by Python, where nothing but the core dependencies is installed::

    python consumer.py     # prints "well"; exits with 1 otherwise
"""

import asyncio
import contextlib
import os
import pickle
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import assert_type

from tenacity import stop_after_attempt, wait_none

from reliablepub import (
    AsyncBatchReceipt,
    AsyncPublisher,
    AsyncReceipt,
    Audit,
    BatchReceipt,
    Binding,
    Breaker,
    ConfigurationError,
    Confirmed,
    Exchange,
    GiveUp,
    HeldKey,
    InvalidMessage,
    Link,
    Message,
    Nacked,
    Outbox,
    OutboxStatus,
    Outcome,
    OutcomeKind,
    Paused,
    Persistence,
    Publisher,
    PublishError,
    Queue,
    Receipt,
    Refusal,
    Rekeyed,
    ReliablePubError,
    Retries,
    RetryIn,
    RetryPolicy,
    Salvaged,
    ScheduleChange,
    Status,
    Topology,
    TopologyError,
    Unroutable,
    hooks,
    provision,
)
from reliablepub.testing import FakeBroker, Published, StoredMessage, faults

TIMEOUT_S = 60.0
TOPOLOGY = Topology(
    exchanges=[Exchange("orders", type="topic")],
    queues=[Queue("invoices")],
    bindings=[Binding("orders", queue="invoices", routing_key="created")],
)


class Watch:
    """A hook: what happens, told to the application."""

    def __init__(self) -> None:
        self.confirmed: list[str] = []

    def on_confirmed(self, events: Sequence[hooks.AttemptEnded]) -> None:
        for event in events:
            assert_type(event.latency_s, float)
            assert_type(event.outcome, Outcome)
            self.confirmed.append(event.message_id)


def decide(refusal: Refusal) -> RetryIn | GiveUp | None:
    assert_type(refusal.outcome.kind, OutcomeKind)
    assert_type(refusal.outcome.persistence, Persistence)
    return RetryIn(0.0) if refusal.exchange == "again" else None


POLICY = RetryPolicy(
    returned=Retries(stop=stop_after_attempt(1), wait=wait_none()),
    nacked=Retries(stop=stop_after_attempt(1), wait=wait_none(), then=GiveUp.PARK),
    decide=decide,
    breaker=Breaker(refusals_max=100),
)


def order(number: int, routing_key: str = "created") -> Message:
    return Message(b'{"order": %d}' % number, exchange="orders", routing_key=routing_key)


def publish(url: str, outbox: Path) -> None:
    watch = Watch()
    with Publisher(url, outbox=outbox, retry=POLICY, hooks=[watch], topology=TOPOLOGY) as publisher:
        receipt = publisher.publish(
            b'{"order": 1}',
            exchange="orders",
            routing_key="created",
            headers={"source": "shop", "tries": 1, "tags": ["a", "b"], "none": None},
            content_type="application/json",
            timestamp=datetime.now(UTC),
            expires_in_s=3600,
            ordering_key="customer 1",
        )
        assert_type(receipt, Receipt)
        assert_type(receipt.message_id, str)
        confirmed = receipt.result(timeout_s=TIMEOUT_S)
        assert_type(confirmed, Confirmed)
        assert confirmed.message_id == receipt.message_id
        later = datetime.now(UTC) - timedelta(seconds=1)
        publisher.publish(b"", exchange="orders", routing_key="created", not_before=later)

        batch = publisher.publish_many(order(number) for number in range(2, 12))
        assert_type(batch, BatchReceipt)
        batch = batch.wait(timeout_s=TIMEOUT_S)
        assert (batch.stored, batch.confirmed, batch.failed) == (10, 10, 0)
        assert_type(batch.failures, list[PublishError])

        status = publisher.flush(timeout_s=TIMEOUT_S)
        assert_type(status, Status)
        assert_type(publisher.status.link, Link)
        assert_type(status.paused, tuple[Paused, ...])
        assert status.open == 0
        assert status.counters.confirmed == len(watch.confirmed) == 12
        assert_type(publisher.close(), Status)


def be_refused(broker: FakeBroker, outbox: Path) -> None:
    broker.inject(faults.Nack(routing_key="created"))
    os.environ |= {"RELIABLEPUB_URL": broker.url, "RELIABLEPUB_OUTBOX": str(outbox)}
    with Publisher.from_env(retry=POLICY) as publisher:
        receipts = [
            publisher.publish(b"", exchange="orders", routing_key=key)
            for key in ("created", "nobody wants it")
        ]
        errors: list[PublishError] = []
        for receipt in receipts:
            try:
                receipt.result(timeout_s=TIMEOUT_S)
            except (Nacked, Unroutable) as error:
                assert_type(error.reply_code, int)
                errors.append(pickle.loads(pickle.dumps(error)))
        assert [type(error) for error in errors] == [Nacked, Unroutable]
        assert [error.retryable for error in errors] == [False, False]
    try:
        Message(b"", routing_key="x" * 256)
    except InvalidMessage as error:
        assert_type(error.field, str)
    try:
        provision(broker.url, Topology(queues=[Queue("missing")], declare=False))
    except TopologyError as error:
        assert_type(error.problems, tuple[str, ...])
    assert issubclass(TopologyError, ReliablePubError)


def look_and_step_in(path: Path, rescued: Path) -> None:
    with Outbox(path) as outbox:
        assert outbox.path.name == path.name
        (first, second) = outbox.parked(limit=10)
        assert_type(first.id, int)
        assert {first.outcome, second.outcome} == {"nacked", "returned"}
        assert outbox.retry([first.id]) == 1
        assert_type(outbox.status(), OutboxStatus)
        assert_type(outbox.held_keys(), list[HeldKey])
        assert (outbox.resume_key("none"), outbox.skip_key("none")) == (0, 0)
        assert [row["message_id"] for row in outbox.rows("open")] == [first.message_id]
        assert outbox.span("open") is not None
        audit = outbox.audit()
        assert_type(audit, Audit)
        assert audit.is_right
        with contextlib.suppress(ConfigurationError):  # this one has no keys
            assert_type(outbox.rekey(), Rekeyed)
    with Outbox(rescued) as outbox:
        salvaged = outbox.salvage(path)
        assert_type(salvaged, Salvaged)
        assert (salvaged.open, salvaged.parked) == (1, 1)


def enqueue(path: Path) -> None:
    db = sqlite3.connect(path)
    with db:
        message_id = Outbox(path).enqueue(order(12), key="order 12", connection=db)
        assert_type(message_id, str)
    db.close()
    outbox = Outbox(path, open_messages_max=10)
    assert outbox.path == path
    outbox.create()
    assert outbox.enqueue(order(12), key="order 12") == message_id
    assert_type(outbox.enqueue_many(order(number) for number in range(2)), list[str])
    assert_type(outbox.reschedule("order 12", datetime.now(UTC)), ScheduleChange)
    assert_type(outbox.upgrade(), list[str])
    assert_type(outbox.cancel("nothing", note="no order"), ScheduleChange)
    assert_type(outbox.position("nothing"), int)
    outbox.forget("nothing")
    outbox.clear()
    outbox.close()


async def orders() -> AsyncIterator[Message]:
    for number in range(10):
        yield order(number)


async def publish_async(url: str, outbox: Path) -> None:
    async with AsyncPublisher(url, outbox=outbox) as publisher:
        receipt = await publisher.publish(b"", exchange="orders", routing_key="created")
        assert_type(receipt, AsyncReceipt)
        assert_type(await receipt, Confirmed)
        assert_type(await receipt.result(timeout_s=TIMEOUT_S), Confirmed)
        batch = await publisher.publish_many(orders(), source="orders")
        assert_type(batch, AsyncBatchReceipt)
        assert (await batch.wait(timeout_s=TIMEOUT_S)).confirmed == 10
        assert_type(publisher.status, Status)
        assert_type(await publisher.flush(timeout_s=TIMEOUT_S), Status)
        assert_type(await publisher.aclose(), Status)


def use(folder: Path) -> None:
    """Use everything once."""
    with FakeBroker() as broker:
        provision(broker.url, TOPOLOGY)
        publish(broker.url, folder / "outbox.db")
        be_refused(broker, folder / "outbox.db")
        look_and_step_in(folder / "outbox.db", folder / "rescued.db")
        enqueue(folder / "enqueued.db")
        asyncio.run(publish_async(broker.url, folder / "async.db"))
        assert_type(broker.messages("invoices"), tuple[StoredMessage, ...])
        assert_type(broker.published, tuple[Published, ...])
        assert len(broker.messages("invoices")) == 12 + 11


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        use(Path(temporary))
    print("well")
