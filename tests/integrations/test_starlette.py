"""A relay in the lifespan of FastAPI and Starlette, a dependency, and routes for probes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI
from httpx import ASGITransport, AsyncClient
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from reliablepub import AsyncPublisher, ConfigurationError, Message, Outbox, OutboxInUse
from reliablepub.integrations.sqlalchemy import SessionOutbox
from reliablepub.integrations.starlette import health_routes, lifespan, publisher_of
from reliablepub.testing import FakeBroker
from tests.amqp_probe import AmqpProbe
from tests.integrations.engines import async_engine_of
from tests.stores import DURABLE, outbox_of


def run(app: Any, customer: Callable[[AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        client = AsyncClient(transport=ASGITransport(app), base_url="http://shop")
        async with app.router.lifespan_context(app), client:
            await customer(client)

    asyncio.run(main())


def test_orders_are_placed_in_transactions_and_announced(broker: AmqpProbe, database: str) -> None:
    queue = broker.declare_queue()
    outbox = SessionOutbox(Outbox(database))
    engines: list[AsyncEngine] = []

    @asynccontextmanager
    async def opened(_app: object) -> AsyncIterator[dict[str, object]]:
        engine = async_engine_of(database)
        engines.append(engine)
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE orders (id integer)"))
        yield {"mine": "too"}
        await engine.dispose()

    app = FastAPI(lifespan=lifespan(lambda: AsyncPublisher(broker.url, outbox=database), opened))
    app.router.routes.extend(health_routes())

    async def session() -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engines[0]) as session, session.begin():
            yield session

    @app.post("/orders/{number}")
    async def order(number: int, db: Annotated[AsyncSession, Depends(session)]) -> int:
        await db.execute(text("INSERT INTO orders VALUES (:n)"), {"n": number})
        await outbox.enqueue_async(Message(b"%d" % number, routing_key=queue), within=db)
        if number % 2:
            raise ValueError(number)
        return number

    @app.post("/publish")
    async def publish(publisher: Annotated[AsyncPublisher, Depends(publisher_of)]) -> str:
        receipt = await publisher.publish(b"at once", routing_key=queue)
        return type(await receipt).__name__

    async def customer(client: AsyncClient) -> None:
        for number in range(6):
            if number % 2:
                with pytest.raises(ValueError, match=str(number)):
                    await client.post(f"/orders/{number}")
            else:
                assert (await client.post(f"/orders/{number}")).json() == number
        assert (await client.post("/publish")).json() == "Confirmed"
        live = await client.get("/outbox/live")
        assert (live.status_code, live.json()) == (200, {"live": True, "reasons": []})
        ready = await client.get("/outbox/ready")
        assert (ready.status_code, ready.json()["link"]) == (200, "connected")

    run(app, customer)
    bodies = [body for body, _ in broker.drain(queue, 4)]
    assert sorted(bodies) == [b"0", b"2", b"4", b"at once"]


def test_it_is_ready_to_store_while_the_broker_is_down(path: Path) -> None:
    def publisher() -> AsyncPublisher:
        return AsyncPublisher("amqp://127.0.0.1:9", outbox=path, close_timeout_s=0)

    app = Starlette(routes=health_routes("/relay"), lifespan=lifespan(publisher))

    async def customer(client: AsyncClient) -> None:
        assert (await client.get("/relay/live")).status_code == 200
        ready = await client.get("/relay/ready")
        assert (ready.status_code, ready.json()["reasons"]) == (200, [])
        assert ready.json()["link"] != "connected"

    run(app, customer)


def test_the_application_may_start_again(path: Path, fake_broker: FakeBroker) -> None:
    async def show(request: Request) -> PlainTextResponse:
        return PlainTextResponse(repr(publisher_of(request)))

    app = Starlette(
        routes=[Route("/", show)],
        lifespan=lifespan(lambda: AsyncPublisher(fake_broker.url, outbox=path)),
    )

    async def customer(client: AsyncClient) -> None:
        assert "AsyncPublisher" in (await client.get("/")).text

    run(app, customer)
    run(app, customer)


def test_a_publisher_that_is_missing_is_explained(path: Path) -> None:
    app = Starlette(routes=health_routes())

    async def customer(client: AsyncClient) -> None:
        with pytest.raises(ConfigurationError, match="lifespan"):
            await client.get("/outbox/ready")

    run(app, customer)


async def test_what_the_application_yields_stays_its_state(
    path: Path, fake_broker: FakeBroker
) -> None:
    @asynccontextmanager
    async def own(app: Any) -> AsyncIterator[dict[str, int]]:
        yield {"answer": 42}

    opened = lifespan(lambda: AsyncPublisher(fake_broker.url, outbox=path), own)
    async with opened(Starlette()) as state:
        assert state == {"answer": 42}


async def is_relaying(client: AsyncClient) -> bool:
    try:
        return (await client.get("/")).text == "connected"
    except OutboxInUse:
        return False


async def relays(client: AsyncClient) -> None:
    for _ in range(400):
        if await is_relaying(client):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it does not take over")


@pytest.mark.parametrize("kind", DURABLE)
async def test_a_second_process_stands_by_and_takes_over(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, fake_broker: FakeBroker
) -> None:
    """As in a rolling deployment: the new process starts before the old one ends."""
    where = str(outbox_of(kind, request, tmp_path))
    Outbox(where).create()
    fake_broker.declare_queue("q")

    async def show(request: Request) -> PlainTextResponse:
        return PlainTextResponse(publisher_of(request).status.link)

    def app() -> Starlette:
        def publisher() -> AsyncPublisher:
            return AsyncPublisher(fake_broker.url, outbox=where)

        routes = [Route("/", show), *health_routes()]
        return Starlette(routes=routes, lifespan=lifespan(publisher, standby=True))

    def client(of: Starlette) -> AsyncClient:
        return AsyncClient(transport=ASGITransport(of), base_url="http://shop")

    old, new, of_old = app(), app(), AsyncExitStack()
    async with client(old) as one, client(new) as other:
        await of_old.enter_async_context(old.router.lifespan_context(old))
        await relays(one)
        async with new.router.lifespan_context(new):
            with pytest.raises(OutboxInUse, match="stands by, and only enqueues"):
                await other.get("/")
            for probe in ("live", "ready"):
                assert (await other.get(f"/outbox/{probe}")).status_code == 200
            Outbox(where).enqueue(Message(b"1", routing_key="q"))
            await of_old.aclose()
            Outbox(where).enqueue(Message(b"2", routing_key="q"))
            await relays(other)
            is_there = partial(fake_broker.wait_for, lambda: len(fake_broker.messages("q")) == 2)
            await asyncio.to_thread(is_there)
        with pytest.raises(ConfigurationError, match="no publisher"):
            await other.get("/")


def test_a_standby_does_not_start_for_other_reasons(path: Path) -> None:
    opened = lifespan(lambda: AsyncPublisher("http://h", outbox=path), standby=True)

    async def main() -> None:
        async with opened(Starlette()):
            raise AssertionError("it has started")

    with pytest.raises(ConfigurationError):
        asyncio.run(main())


async def test_a_relay_that_has_failed_is_opened_again(path: Path, fake_broker: FakeBroker) -> None:
    opened = lifespan(lambda: AsyncPublisher(fake_broker.url, outbox=path), standby=True)
    move = partial(path.rename, path.with_name("elsewhere.db"))
    app = Starlette()
    async with opened(app):
        before = app.state.reliablepub
        move()  # which ends the relay
        async with asyncio.timeout(20):
            while (now := app.state.reliablepub) is before or not hasattr(now, "status"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
