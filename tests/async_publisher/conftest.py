"""Event loops to run tests in: asyncio's own, and uvloop's where it is installed."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

import aio_pika
import pytest

from reliablepub import AsyncPublisher
from reliablepub.testing import FakeBroker
from tests.amqp_probe import AmqpProbe
from tests.missing import needed

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    if name == "asyncio":
        return asyncio.new_event_loop
    uvloop = needed("uvloop")
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run[Any]]:
    """Runs a coroutine; whatever goes wrong unseen in its loop fails the test."""
    complaints: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=loop_factory(request.param)) as runner:
        loop = runner.get_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        yield runner.run
    assert complaints == []


in_each_loop = pytest.mark.usefixtures("run")
"""For a test that is a coroutine: `run` runs it."""


@pytest.fixture
def broker(fake_broker: FakeBroker) -> FakeBroker:
    fake_broker.declare_queue("q")
    return fake_broker


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.rabbit)])
def probe(request: pytest.FixtureRequest, fake_broker: FakeBroker) -> AmqpProbe:
    """A look into the fake broker, then into the real one."""
    if request.param == "real":
        real: AmqpProbe = request.getfixturevalue("rabbitmq")
        return real
    return AmqpProbe(fake_broker.url)


OpenPublisher = Callable[..., AbstractAsyncContextManager[AsyncPublisher]]


@pytest.fixture(params=["its own connection", "the application's connection"])
def open_publisher(request: pytest.FixtureRequest) -> OpenPublisher:
    """Both ways in: `open_publisher(url, outbox=...)`."""

    @asynccontextmanager
    async def on_a_connection(url: str, **options: Any) -> AsyncIterator[AsyncPublisher]:
        connection = await aio_pika.connect_robust(url, reconnect_interval=0.1)
        async with AsyncPublisher(connection=connection, **options) as publisher:
            yield publisher
        await connection.close()

    return AsyncPublisher if request.param == "its own connection" else on_a_connection
