"""What taskiq sends through an outbox is what its own broker sends, and its workers run it."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from taskiq import Context, SimpleRetryMiddleware, TaskiqDepends
from taskiq.acks import AcknowledgeType
from taskiq.api import run_receiver_task
from taskiq_aio_pika import AioPikaBroker, Exchange, Queue, QueueType

from reliablepub import ConfigurationError, Message, Outbox, OutboxFull, Publisher
from reliablepub.integrations.sqlalchemy import SessionOutbox
from reliablepub.integrations.taskiq import OutboxBroker
from reliablepub.testing import FakeBroker
from tests.amqp_probe import AmqpProbe
from tests.integrations.engines import async_engine_of
from tests.waiting import until_async

NOWHERE = "amqp://127.0.0.1:9"


async def send(broker: AioPikaBroker) -> None:
    async def add(x: int, y: int = 0) -> int:
        return x + y

    task = broker.register_task(add, task_name="add")
    await broker.startup()
    await task.kiq(1, y=2)
    await task.kicker().with_labels(priority=5, tenant="north").kiq(1)
    await task.kicker().with_labels(delay=60).kiq(1)
    await broker.shutdown()


def test_it_is_what_taskiq_sends(fake_broker: FakeBroker, path: Path) -> None:
    def same_ids(broker: AioPikaBroker) -> AioPikaBroker:
        numbers = iter(range(100))
        return broker.with_id_generator(lambda: f"id-{next(numbers)}")

    queues = {
        "task_queues": [Queue(name="tasks", type=QueueType.CLASSIC)],
        "delay_queue": Queue(name="later", type=QueueType.CLASSIC),
        "dead_letter_queue": Queue(name="dead", type=QueueType.CLASSIC),
    }
    asyncio.run(send(same_ids(AioPikaBroker(fake_broker.url, **queues))))  # type: ignore[arg-type]
    expected = seen(fake_broker)
    asyncio.run(send(same_ids(OutboxBroker(Outbox(path), url=NOWHERE, **queues))))
    with Publisher(fake_broker.url, outbox=path) as publisher:
        assert publisher.flush(timeout_s=60).open == 0
    assert len(expected) == 3
    assert seen(fake_broker)[3:] == expected
    assert Outbox(path).parked() == []


def seen(broker: FakeBroker) -> list[tuple[object, ...]]:
    """What came, without what the relay adds: ``message_id`` and one header."""
    return [
        (
            p.exchange,
            p.routing_key,
            p.body,
            {k: v for k, v in (p.properties.headers or {}).items() if k != "rp-attempt"},
            *(p.properties.delivery_mode, p.properties.priority, p.properties.expiration),
            *(p.properties.content_type, p.properties.correlation_id, p.properties.reply_to),
        )
        for p in broker.published
    ]


def test_a_worker_runs_it(broker: AmqpProbe, path: Path, unique: Callable[[str], str]) -> None:
    name, ran, are_done = unique("tasks"), [], asyncio.Event()

    def make() -> OutboxBroker:
        return OutboxBroker(
            Outbox(path),
            url=broker.url,
            exchange=Exchange(name=name),
            task_queues=[Queue(name=name, type=QueueType.CLASSIC)],
            dead_letter_queue=Queue(name=f"{name}.dead", type=QueueType.CLASSIC),
        )

    async def main() -> None:
        client, worker = make(), make()

        async def note(number: int) -> None:
            ran.append(number)
            if number < 10:
                await worker.find_task("note").kicker().kiq(number + 10)  # type: ignore[union-attr]
            elif len(ran) == 10:
                are_done.set()

        task = client.register_task(note, task_name="note")
        worker.register_task(note, task_name="note")
        worker.is_worker_process = True
        await client.startup()
        receiver = asyncio.create_task(run_receiver_task(worker, run_startup=True))
        for number in range(5):
            await task.kiq(number)
        try:
            with Publisher(broker.url, outbox=path):
                await asyncio.wait_for(are_done.wait(), 60)
        finally:
            receiver.cancel()
            with suppress(asyncio.CancelledError):
                await receiver
            await worker.shutdown()
            await client.shutdown()

    asyncio.run(main())
    assert sorted(ran) == [*range(5), *range(10, 15)]
    assert Outbox(path).status().stored == 10
    for queue in (name, f"{name}.dead"):
        broker.delete_queue(queue)
    broker.delete_exchange(name)


async def test_it_belongs_to_the_transaction_while_the_broker_is_down(database: str) -> None:
    outbox = SessionOutbox(Outbox(database))
    engine = async_engine_of(database)
    client = OutboxBroker(outbox, url=NOWHERE)

    async def add(x: int) -> int:
        return x

    task = client.register_task(add, task_name="add")
    await client.startup()
    async with AsyncSession(engine) as session:
        with outbox.joined(session):
            await task.kiq(1)
            await session.commit()
            await task.kiq(2)
            await session.rollback()
    await client.shutdown()
    await engine.dispose()
    assert outbox.outbox.status().stored == 1


@pytest.mark.parametrize("how", ["rolled back", "cannot be stored", "its retry cannot be stored"])
async def test_a_task_that_is_sent_again_is_not_lost(
    how: str, database: str, fake_broker: FakeBroker
) -> None:
    """The worker acknowledges the task in any case."""
    outbox = SessionOutbox(Outbox(database, open_messages_max=1))
    outbox.outbox.create()
    is_joined = how == "rolled back"
    ran: list[str] = []
    may_end, has_ended = asyncio.Event(), asyncio.Event()

    def is_filled() -> bool:
        try:
            outbox.enqueue(Message(b""))
        except OutboxFull:  # PostgreSQL's counts are up to 0.2 s old
            return False
        return True

    engine = async_engine_of(database)
    worker = OutboxBroker(
        outbox,
        url=fake_broker.url,
        task_queues=[Queue(name="tasks", type=QueueType.CLASSIC)],
        dead_letter_queue=Queue(name="dead", type=QueueType.CLASSIC),
    )

    async def job(context: Context = TaskiqDepends()) -> None:  # noqa: B008 - taskiq's way
        ran.append(context.message.task_id)
        await may_end.wait()
        if len(ran) == 3:
            has_ended.set()
            return
        if "retry" in how:
            raise ValueError(how)
        async with AsyncSession(engine) as session, session.begin():
            with outbox.joined(session) if is_joined else nullcontext():
                await context.requeue()

    worker.add_middlewares(SimpleRetryMiddleware(default_retry_count=9))
    task = worker.register_task(job, task_name="job", retry_on_error="retry" in how)
    worker.is_worker_process = True
    receiver = asyncio.create_task(
        run_receiver_task(worker, run_startup=True, ack_time=AcknowledgeType.WHEN_RECEIVED)
    )
    await until_async(fake_broker.consumers)
    await task.kiq()
    with Publisher(fake_broker.url, outbox=database) as relay:
        await until_async(lambda: ran)
        relay.flush(timeout_s=60)
    await until_async(lambda: is_joined or is_filled())
    may_end.set()
    await asyncio.wait_for(has_ended.wait(), 60)
    receiver.cancel()
    with suppress(asyncio.CancelledError):
        await receiver
    await worker.shutdown()
    await engine.dispose()
    assert len(set(ran)) == 1
    assert outbox.outbox.status().stored == (1 if is_joined else 2)


def test_the_delayed_message_plugin_is_refused(path: Path) -> None:
    """It returns mandatory messages, though it routes them later."""
    with pytest.raises(ConfigurationError, match="delay_queue"):
        OutboxBroker(Outbox(path), url=NOWHERE, delayed_message_exchange_plugin=True)


def test_a_client_starts_without_a_broker(path: Path) -> None:
    asyncio.run(send(OutboxBroker(Outbox(path), url=NOWHERE, delay_queue=Queue(name="later"))))
    assert Outbox(path).status().stored == 3
    with pytest.raises(OSError, match="9"):
        asyncio.run(asyncio.wait_for(AioPikaBroker(NOWHERE).startup(), 20))
