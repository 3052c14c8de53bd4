"""What dramatiq sends through an outbox is what its own broker sends, and its workers run it."""

import gc
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.broker import MessageProxy
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from reliablepub import Outbox, Publisher
from reliablepub.integrations.dramatiq import OutboxBroker
from reliablepub.integrations.sqlalchemy import SessionOutbox
from reliablepub.testing import FakeBroker
from tests.amqp_probe import AmqpProbe
from tests.waiting import until

CHANCE = re.compile(rb"[0-9a-f]{8}-[0-9a-f-]{27}|\d{13}")
"""Ids, and times in milliseconds."""
GROUP: Any = dramatiq.group
PIPELINE: Any = dramatiq.pipeline
NOWHERE = "amqp://127.0.0.1:9"
SENT: dict[str, Callable[[Any], object]] = {
    "send": lambda actor: actor.send(1, y=2),
    "delay": lambda actor: actor.send_with_options(args=(1,), delay=60_000),
    "priority": lambda actor: actor.send_with_options(args=(1,), broker_priority=7),
    "pipeline": lambda actor: PIPELINE(
        [actor.message(1), actor.message(2)], broker=actor.broker
    ).run(),
    "group": lambda actor: GROUP([actor.message(n) for n in range(3)], broker=actor.broker).run(),
}


@pytest.fixture(autouse=True)
def _nothing_is_left_to_the_collector() -> Iterator[None]:
    """A consumer of dramatiq 1.17 whose queue is not there yet leaves its connection open."""
    yield
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "unclosed <socket", ResourceWarning)
        gc.collect()


def actor_of(broker: RabbitmqBroker) -> Any:
    def add(x: int, y: int = 0) -> int:
        return x + y

    return dramatiq.actor(broker=broker, queue_name="sums")(add)


@pytest.mark.parametrize("case", SENT)
def test_it_is_what_dramatiq_sends(case: str, fake_broker: FakeBroker, path: Path) -> None:
    theirs = RabbitmqBroker(url=fake_broker.url, confirm_delivery=True, max_priority=9)
    SENT[case](actor_of(theirs))
    theirs.close()
    expected = seen(fake_broker)

    ours = OutboxBroker(Outbox(path), url=NOWHERE, max_priority=9)
    SENT[case](actor_of(ours))
    with Publisher(fake_broker.url, outbox=path, topology=ours.topology()) as publisher:
        assert publisher.flush(timeout_s=60).open == 0
    ours.close()
    assert seen(fake_broker)[len(expected) :] == expected
    assert Outbox(path).parked() == []


def seen(broker: FakeBroker) -> list[tuple[object, ...]]:
    """What came, without what the relay adds: ``message_id`` and its one header."""
    return [
        (
            p.exchange,
            p.routing_key,
            CHANCE.sub(b"", p.body),
            p.properties.delivery_mode,
            p.properties.priority,
        )
        for p in broker.published
        if set(p.properties.headers or {}) <= {"rp-attempt"} and p.properties.content_type is None
    ]


def test_a_worker_runs_it_and_its_retries(
    broker: AmqpProbe, path: Path, unique: Callable[[str], str]
) -> None:
    queue = unique("jobs")
    ours = OutboxBroker(Outbox(path), url=broker.url)
    ran: list[int] = []

    def job(number: int) -> None:
        ran.append(number)
        if ran.count(number) < 2:
            raise ValueError(number)

    decorate = dramatiq.actor(broker=ours, queue_name=queue, min_backoff=1, max_backoff=2)
    actor: Any = decorate(job)
    for number in range(5):
        actor.send(number)
    worker = dramatiq.Worker(ours, worker_threads=2, worker_timeout=50)
    with Publisher(broker.url, outbox=path, topology=ours.topology()):
        worker.start()
        try:
            until(lambda: sorted(ran) == sorted([*range(5)] * 2))
        finally:
            worker.stop()
    ours.close()
    # The worker stores each again for the queue of delayed messages, and again when it is due.
    assert Outbox(path).status().stored == 15
    for name in (queue, f"{queue}.DQ", f"{queue}.XQ"):
        broker.delete_queue(name)


def test_a_retry_that_cannot_be_stored_is_published_directly(
    fake_broker: FakeBroker, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The database may be down, which may be why; and dramatiq would only log that, and lose it."""
    ours = OutboxBroker(Outbox(path, open_messages_max=1), url=fake_broker.url)
    ran: list[int] = []

    def job() -> None:
        ran.append(1)
        if len(ran) == 1:
            other.send()  # the outbox is full

    other = actor_of(ours)
    other.send(1)
    decorate = dramatiq.actor(broker=ours, queue_name="jobs", min_backoff=2_000, max_backoff=4_000)
    actor: Any = decorate(job)
    worker = dramatiq.Worker(ours, queues={"jobs"}, worker_threads=1, worker_timeout=50)
    worker.start()
    try:
        fake_broker.wait_for(lambda: any(q.name == "jobs" for q in fake_broker.queues()), 60)
        fake_broker.publish(actor.message().encode(), "jobs")
        until(lambda: fake_broker.published_count)
        assert [each.routing_key for each in fake_broker.published] == ["jobs.DQ"]
        assert "is published directly, as storing it raised OutboxFull" in caplog.text
        with Publisher(fake_broker.url, outbox=path, topology=ours.topology()):
            until(lambda: len(ran) == 2)
    finally:
        worker.stop()
    ours.close()


def test_it_belongs_to_the_transaction_while_the_broker_is_down(
    database: str, engine: Engine
) -> None:
    outbox = SessionOutbox(Outbox(database))
    actor = actor_of(OutboxBroker(outbox, url=NOWHERE))
    with Session(engine) as session, session.begin(), outbox.joined(session):
        actor.send(1)
    with suppress(KeyError), Session(engine) as session, session.begin(), outbox.joined(session):
        actor.send(2)
        raise KeyError
    assert outbox.outbox.status().stored == 1


@pytest.mark.parametrize("has_failed", [True, False])
def test_what_follows_an_actor_shares_the_fate_of_its_transaction_unless_it_has_failed(
    database: str, engine: Engine, fake_broker: FakeBroker, *, has_failed: bool
) -> None:
    """Of a middleware, which ends the transaction after those of retries and pipelines have run."""
    outbox = SessionOutbox(Outbox(database))
    outbox.outbox.create()
    ours = OutboxBroker(outbox, url=fake_broker.url)
    actor = actor_of(ours)
    first = PIPELINE([actor.message(1), actor.message(2)], broker=ours).messages[0]
    with Session(engine) as session, outbox.joined(session):
        actor.send(3)
        if has_failed:
            ours.emit_after("process_message", MessageProxy(first), exception=ValueError())
            session.rollback()
        else:
            ours.emit_after("process_message", MessageProxy(first), result=1)
            session.commit()
    if has_failed:
        until(lambda: fake_broker.published_count)
    assert [each.routing_key for each in fake_broker.published] == ["sums.DQ"] * has_failed
    assert outbox.outbox.status().stored == (0 if has_failed else 2)
    ours.close()


def test_a_middleware_has_a_transaction_of_its_own_after_a_failed_actor(
    database: str, engine: Engine, fake_broker: FakeBroker
) -> None:
    """Which records the failure, for instance, and sends an alert with it."""
    outbox = SessionOutbox(Outbox(database))
    outbox.outbox.create()
    ours = OutboxBroker(outbox, url=fake_broker.url)
    alert = actor_of(ours)

    class Records(dramatiq.Middleware):
        def after_process_message(self, *_: Any, **_fields: Any) -> None:
            with Session(engine) as session, session.begin(), outbox.joined(session):
                alert.send(1)

    ours.middleware = [Records()]
    message = MessageProxy(alert.message(2))
    ours.emit_after("process_message", message, exception=ValueError())
    assert outbox.outbox.status().stored == 1
    assert fake_broker.published_count == 0
    ours.close()
