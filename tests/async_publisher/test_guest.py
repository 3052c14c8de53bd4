"""On a connection that the application has: neither does the other any harm, whatever it does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import aio_pika
import aiormq
import pytest
from aio_pika.exceptions import ChannelNotFoundEntity
from aiormq.abc import ChannelFrame

from reliablepub import (
    AsyncPublisher,
    ConfigurationError,
    Link,
    Message,
    Refused,
    Topology,
    Unroutable,
    WrongEventLoop,
)
from reliablepub.headers import FieldValue
from reliablepub.hooks import LinkChanged
from reliablepub.testing import FakeBroker, NodeOptions, faults
from reliablepub.transport import aiormq_hooks
from reliablepub.transport.aio_pika import Guest
from reliablepub.transport.aiormq_hooks import GuestChannels
from tests.amqp_probe import AmqpProbe
from tests.async_publisher.conftest import Run, in_each_loop
from tests.between import before
from tests.policies import AT_ONCE
from tests.waiting import until_async

pytestmark = pytest.mark.parametrize("run", ["asyncio"], indirect=True)
"""Of the loops one is enough here: on both of them, guests are cancelled in test_cancellation."""


@asynccontextmanager
async def host(url: str) -> AsyncIterator[aio_pika.abc.AbstractRobustConnection]:
    """The application's connection."""
    connection = await aio_pika.connect_robust(url, reconnect_interval=0.1)
    try:
        yield connection
    finally:
        await connection.close()


def numbers(connection: aio_pika.abc.AbstractConnection) -> set[int]:
    """Channel numbers that are taken."""
    assert connection.transport is not None
    return set(connection.transport.connection.channels)


# -------------------------------------------------------------------- opening


@in_each_loop
async def test_a_publisher_has_either_a_url_or_a_connection(broker: FakeBroker) -> None:
    async with host(broker.url) as connection:
        with pytest.raises(ConfigurationError, match="either a URL or a connection"):
            AsyncPublisher(broker.url, connection=connection, outbox=None)
        with pytest.raises(ConfigurationError, match="declare the topology on your connection"):
            AsyncPublisher(connection=connection, outbox=None, topology=Topology())
    with pytest.raises(ConfigurationError, match="either a URL or a connection"):
        AsyncPublisher(outbox=None)
    strange: Any = object()
    with pytest.raises(ConfigurationError, match="connection is of type object"):
        AsyncPublisher(connection=strange, outbox=None)


@in_each_loop
async def test_a_connection_of_another_loop_is_refused(broker: FakeBroker) -> None:
    async def elsewhere(connection: aio_pika.abc.AbstractConnection) -> None:
        with pytest.raises(WrongEventLoop, match="belongs to another event loop"):
            await AsyncPublisher(connection=connection, outbox=None).open()

    async with host(broker.url) as connection:
        await asyncio.to_thread(asyncio.run, elsewhere(connection))


@in_each_loop
async def test_an_aiormq_that_was_never_tested_is_refused_by_name(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reliablepub.transport.aiormq_hooks.TESTED_VERSION", "1.0.0")
    async with host(broker.url) as connection:
        with pytest.raises(ConfigurationError, match=r"the tested version is 1\.0\.0: pip"):
            AsyncPublisher(connection=connection, outbox=None)


@pytest.mark.parametrize(
    "name", ["channels", "write_queue", "ready", "connection_tune", "should_drain", "drain"]
)
@in_each_loop
async def test_an_aiormq_that_lacks_something_is_refused(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async with host(broker.url) as connection:
        assert connection.transport is not None
        with monkeypatch.context() as patch:
            if name in {"should_drain", "drain"}:
                patch.delattr(ChannelFrame, name)
            elif name == "ready":
                patch.setattr(aiormq.Connection, name, None)
            else:
                patch.delattr(connection.transport.connection, name)
            with pytest.raises(ConfigurationError, match="differs from the tested one"):
                AsyncPublisher(connection=connection, outbox=None)


@pytest.mark.parametrize(
    "name", ["tag_of", "written", "drained", "look_what_left", "is_blocked", "write"]
)
@in_each_loop
async def test_a_hook_that_fails_is_the_last_and_the_connection_goes_on(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The application's connection goes on, and the reason is told; here and to the next one."""
    monkeypatch.setattr(aiormq_hooks, "_failures", [])

    def fail(*_: object) -> None:
        raise ZeroDivisionError(name)

    async with host(broker.url) as connection:
        theirs = await connection.channel()
        async with AsyncPublisher(
            connection=connection, outbox=None, close_timeout_s=0
        ) as publisher:
            await (await publisher.publish(b"ours", routing_key="q"))
            if name == "written":
                monkeypatch.setattr(GuestChannels, name, property(fset=fail), raising=False)
            elif name == "is_blocked":
                monkeypatch.setattr(GuestChannels, name, property(fail))
            else:
                monkeypatch.setattr(GuestChannels, name, fail)
            receipt = await publisher.publish(b"ours too", routing_key="nowhere")
            await until_async(lambda: "a hook failed" in publisher.status.reason)
            assert not receipt.is_settled, "what was returned is not confirmed"
        message = aio_pika.Message(b"theirs")
        await theirs.default_exchange.publish(message, "q")
        with pytest.raises(ConfigurationError, match="a hook failed"):
            AsyncPublisher(connection=connection, outbox=None)


def test_a_connection_without_a_free_channel_number_says_so(run: Run[None]) -> None:
    async def main(url: str) -> None:
        async with host(url) as connection:
            channels = [await connection.channel() for _ in range(2)]
            async with AsyncPublisher(connection=connection, outbox=None) as publisher:
                receipt = await publisher.publish(b"ours", routing_key="q")
                await until_async(lambda: "no free channel number" in publisher.status.reason)
                await channels[0].close()
                await receipt

    with FakeBroker(options=NodeOptions(channel_max=2)) as small:
        small.declare_queue("q")
        run(main(small.url))


@pytest.mark.parametrize("connect", [aio_pika.connect, aio_pika.connect_robust])
@in_each_loop
async def test_it_comes_and_goes_and_the_connection_stays(
    probe: AmqpProbe, connect: Callable[[str], Awaitable[Any]]
) -> None:
    queue = probe.declare_queue()
    connection = await connect(probe.url)
    theirs = await connection.channel()
    taken = numbers(connection)
    for n in range(3):
        async with AsyncPublisher(connection=connection, outbox=None) as publisher:
            await (await publisher.publish(b"ours %d" % n, routing_key=queue))
            assert numbers(connection) > taken
        assert numbers(connection) == taken
        message = aio_pika.Message(b"theirs %d" % n)
        await theirs.default_exchange.publish(message, queue)
    await connection.close()
    assert len(probe.drain(queue, 6)) == 6


# -------------------------------------------------------------------- what the application does


def test_its_channels_and_ours_close_without_a_thought_for_each_other(
    run: Run[int], probe: AmqpProbe, path: Path
) -> None:
    """Ours are closed by poison and theirs by missing queues, and numbers go round all the time.

    A frame after `close-ok`, or a number in two hands, would end the connection.
    """
    queue = probe.declare_queue()
    lost: list[Any] = []

    async def meddle(connection: aio_pika.abc.AbstractConnection, done: asyncio.Event) -> int:
        count = 0
        while not done.is_set():
            channel = await connection.channel()
            if count % 2:
                with pytest.raises(ChannelNotFoundEntity):
                    await channel.declare_queue("missing", passive=True)
            else:
                await channel.default_exchange.publish(aio_pika.Message(b"theirs"), queue)
                await channel.close()
            count += 1
        return count

    async def main() -> int:
        connection = await aio_pika.connect(probe.url)
        connection.close_callbacks.add(lambda *_: lost.append(1))
        done = asyncio.Event()
        meddler = asyncio.create_task(meddle(connection, done))  # two would harm each other
        async with AsyncPublisher(connection=connection, outbox=path, retry=AT_ONCE) as publisher:
            for turn in range(3):
                ours = [
                    Message(b"%d" % n, routing_key=queue, exchange="" if n % 100 else "missing")
                    for n in range(200 * turn, 200 * turn + 200)
                ]
                batch = await publisher.publish_many(ours)
                await batch.wait(30)
                assert (batch.confirmed, batch.failed) == (198, 2)
                assert {type(error) for error in batch.failures} == {Refused}
            assert publisher.status.connects == 1
        done.set()
        count = await meddler
        assert lost == []
        await connection.close()
        return (count + 1) // 2

    theirs = run(main())
    bodies = [body for body, _ in probe.drain(queue, 594 + theirs)]
    assert bodies.count(b"theirs") == theirs
    assert set(bodies) == {b"theirs", *(b"%d" % n for n in range(600) if n % 100)}


@in_each_loop
async def test_a_channel_that_the_broker_closed_is_forgotten(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    guests: list[Guest] = []
    before(monkeypatch, Guest, "connect", guests.append)
    async with (
        host(broker.url) as connection,
        AsyncPublisher(connection=connection, outbox=None, retry=AT_ONCE) as publisher,
    ):
        for _ in range(10):
            with pytest.raises(Refused):
                await (await publisher.publish(b"x", exchange="missing"))
        assert len(guests[0].channels) <= 2


@in_each_loop
async def test_after_a_reconnect_the_application_gets_its_channel_numbers_first(
    broker: FakeBroker,
) -> None:
    broker.inject(faults.Latency(delay_s=0.02, keep=True))
    async with host(broker.url) as connection:
        theirs = [connection.channel(number) for number in (1, 2, 3)]
        for channel in theirs:
            await channel.initialize()
        reconnects: list[Any] = []
        connection.reconnect_callbacks.add(reconnects.append)
        async with AsyncPublisher(connection=connection, outbox=None) as publisher:
            for n in range(1, 4):
                await (await publisher.publish(b"x", routing_key="q"))
                broker.drop_connections()
                await until_async(lambda: publisher.status.link is not Link.CONNECTED)
                await (await publisher.publish(b"x", routing_key="q")).result(60)
                assert publisher.status.connects == n + 1
            assert len(reconnects) == 3
        for channel in theirs:
            message = aio_pika.Message(b"theirs")
            await channel.default_exchange.publish(message, "q")


@in_each_loop
async def test_a_callback_of_a_reconnect_may_wait_for_a_confirm(broker: FakeBroker) -> None:
    async with (
        host(broker.url) as connection,
        AsyncPublisher(connection=connection, outbox=None) as publisher,
    ):
        await (await publisher.publish(b"x", routing_key="q"))
        confirmed = asyncio.Event()

        async def told(_connection: object) -> None:
            await (await publisher.publish(b"back again", routing_key="q")).result(30)
            confirmed.set()

        connection.reconnect_callbacks.add(told)
        broker.drop_connections()
        await asyncio.wait_for(confirmed.wait(), 30)


@in_each_loop
async def test_closed_by_the_application_everything_stays_in_the_outbox(
    probe: AmqpProbe, path: Path
) -> None:
    queue = probe.declare_queue()
    async with host(probe.url) as connection:
        publisher = AsyncPublisher(connection=connection, outbox=path)
        await publisher.open()
        await (await publisher.publish(b"before", routing_key=queue))
    await until_async(lambda: "has closed its connection" in publisher.status.reason)
    await publisher.publish(b"after", routing_key=queue)
    status = await publisher.aclose(0.1)
    assert (status.open, status.in_flight) == (1, 0)
    async with (
        host(probe.url) as connection,
        AsyncPublisher(connection=connection, outbox=path) as publisher,
    ):
        assert (await publisher.flush(60)).open == 0
    assert [body for body, _ in probe.drain(queue, 2)] == [b"before", b"after"]


@in_each_loop
async def test_a_plain_connection_is_back_when_the_application_connects_it_again(
    broker: FakeBroker, path: Path
) -> None:
    connection = await aio_pika.connect(broker.url)
    async with AsyncPublisher(connection=connection, outbox=path) as publisher:
        await (await publisher.publish(b"0", routing_key="q"))
        broker.drop_connections()
        await until_async(lambda: "connection is lost" in publisher.status.reason)
        receipt = await publisher.publish(b"1", routing_key="q")
        await until_async(lambda: publisher.status.link is Link.CONNECTING)
        await connection.connect()
        await receipt.result(60)
        assert publisher.status.connects == 2
    await connection.close()


@in_each_loop
async def test_the_broker_s_reason_is_told_although_aiormq_knows_it_later(
    broker: FakeBroker, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = aiormq.Connection._on_close

    async def closes_late(*arguments: Any) -> None:
        await asyncio.sleep(0.2)
        await close(*arguments)

    monkeypatch.setattr(aiormq.Connection, "_on_close", closes_late)
    heard: list[str] = []

    class Ends:
        def on_disconnected(self, events: Sequence[LinkChanged]) -> None:
            heard.extend(event.reason for event in events)

    async with (
        host(broker.url) as connection,
        AsyncPublisher(connection=connection, outbox=path, hooks=[Ends()]) as publisher,
    ):
        await (await publisher.publish(b"0", routing_key="q"))
        broker.restart()
        await (await publisher.publish(b"1", routing_key="q"))
    assert len(heard) == 1
    assert "CONNECTION_FORCED" in heard[0]


@in_each_loop
async def test_the_broker_s_reason_stays_while_it_is_away(broker: FakeBroker, path: Path) -> None:
    async with (
        host(broker.url) as connection,
        AsyncPublisher(connection=connection, outbox=path) as publisher,
    ):
        await (await publisher.publish(b"0", routing_key="q"))
        broker.stop()
        await until_async(lambda: "CONNECTION_FORCED" in publisher.status.reason)
        await asyncio.sleep(1)  # the relay tries to connect again
        assert "CONNECTION_FORCED" in publisher.status.reason
        broker.start()
        await (await publisher.publish(b"1", routing_key="q"))


@in_each_loop
async def test_opened_while_the_connection_is_down_it_says_so_and_goes_on(
    broker: FakeBroker, path: Path
) -> None:
    async with host(broker.url) as connection:
        broker.stop()
        await until_async(lambda: connection.transport is None)
        async with AsyncPublisher(connection=connection, outbox=path) as publisher:
            receipt = await publisher.publish(b"0", routing_key="q")
            await until_async(lambda: "connection is not open" in publisher.status.reason)
            broker.start()
            await receipt.result(60)
            assert publisher.status.connects == 1


@in_each_loop
async def test_a_broker_that_is_silent_is_told_as_that(broker: FakeBroker, path: Path) -> None:
    async with (
        host(f"{broker.url}?heartbeat=1") as connection,
        AsyncPublisher(connection=connection, outbox=path, close_timeout_s=0) as publisher,
    ):
        await (await publisher.publish(b"0", routing_key="q"))
        broker.freeze()
        await until_async(lambda: "no heartbeats arrived" in publisher.status.reason)


@in_each_loop
async def test_a_connection_that_nobody_closes_is_lost_too(broker: FakeBroker, path: Path) -> None:
    async with host(broker.url) as connection:
        publisher = await AsyncPublisher(connection=connection, outbox=path).open()
        await (await publisher.publish(b"0", routing_key="q"))
        for _ in range(5):  # aiormq's tasks, and those by which it closes
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)
        await until_async(lambda: "connection is lost" in publisher.status.reason)
        await publisher.aclose(0)


@in_each_loop
async def test_every_other_task_can_be_cancelled_the_library_s_own_too(
    probe: AmqpProbe, path: Path
) -> None:
    """This ends the connection, and aio-pika does not come back from it; nor does it harm us."""
    queue = probe.declare_queue()
    async with host(probe.url) as connection:
        publisher = await AsyncPublisher(connection=connection, outbox=path).open()
        ours = (Message(b"%d" % n, routing_key=queue) for n in range(2_000))
        await publisher.publish_many(ours)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await publisher.publish(b"2000", routing_key=queue)
        await until_async(lambda: "connection is lost" in publisher.status.reason)
        assert (await publisher.aclose(0)).open > 0
    async with (
        host(probe.url) as connection,
        AsyncPublisher(connection=connection, outbox=path) as publisher,
    ):
        assert (await publisher.flush(60)).open == 0
    arrived = {int(body) for body, _ in probe.drain(queue, 2_001)}
    assert arrived == set(range(2_001))


def test_a_loop_that_ends_first_leaves_everything_where_it_is(
    run: Run[AsyncPublisher], broker: FakeBroker
) -> None:
    async def main() -> AsyncPublisher:
        connection = await aio_pika.connect(broker.url)
        publisher = await AsyncPublisher(connection=connection, outbox=None).open()
        await (await publisher.publish(b"x", routing_key="q"))
        await connection.close()
        await publisher.publish(b"y", routing_key="q")
        return publisher

    for runs in (run, asyncio.run):  # the loop of the first is only stopped, the other's is closed
        publisher = runs(main())
        publisher._client.begin_close(0)  # as at the interpreter's end
        publisher._client.end_close()
        assert publisher.status.open == 1


# -------------------------------------------------------------------- corners of the protocol


@in_each_loop
async def test_returns_of_every_kind_of_header_can_be_read(probe: AmqpProbe, path: Path) -> None:
    """A returned message is decoded by aiormq; what it cannot read would end the connection."""
    headers: dict[str, FieldValue] = {
        "text": "é",
        "small": -5,
        "large": -(2**40),
        "double": 0.1,
        "yes": True,
        "none": None,
        "raw": b"\x00\xff",
        "price": Decimal("-9.99"),
        "list": [1, "two", {"three": 3.5, "empty": {}}, []],
        "at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    }
    async with (
        host(probe.url) as connection,
        AsyncPublisher(connection=connection, outbox=path, retry=AT_ONCE) as publisher,
    ):
        for body in (b"", b"x" * 300_000):
            receipt = await publisher.publish(
                body, routing_key="nobody-is-bound-here", headers=headers, priority=1
            )
            with pytest.raises(Unroutable):
                await receipt.result(60)
        assert publisher.status.connects == 1


def test_without_a_free_number_it_waits_for_one(run: Run[None]) -> None:
    async def main(url: str) -> None:
        async with host(url) as connection:
            theirs = [await connection.channel() for _ in range(3)]
            async with AsyncPublisher(
                connection=connection, outbox=None, confirm_timeout_s=0.5
            ) as publisher:
                receipt = await publisher.publish(b"x", routing_key="q")
                await until_async(lambda: publisher.status.connects > 1)
                assert not receipt.is_settled
                await theirs[1].close()
                await receipt.result(60)

    with FakeBroker(options=NodeOptions(channel_max=3)) as broker:
        broker.declare_queue("q")
        run(main(broker.url))


@in_each_loop
async def test_while_the_broker_blocks_the_application_goes_on(
    broker: FakeBroker, path: Path
) -> None:
    async with (
        host(broker.url) as connection,
        AsyncPublisher(connection=connection, outbox=path, confirm_timeout_s=3.0) as publisher,
    ):
        await (await publisher.publish(b"0", routing_key="q"))
        broker.block("low on memory")
        held = await publisher.publish(b"1", routing_key="q")
        await until_async(lambda: publisher.status.link is Link.BLOCKED)
        batch = await publisher.publish_many(Message(b"x", routing_key="q") for _ in range(500))
        await asyncio.sleep(4.0)  # longer than a confirm may take
        status = publisher.status
        assert (status.connects, status.in_flight, status.open) == (1, 1, 501)
        broker.unblock()
        await held.result(60)
        await batch.wait(60)
        assert publisher.status.connects == 1
