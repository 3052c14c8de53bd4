"""A FastAPI service that stores an order and its event in one transaction, and publishes the event.

The endpoint writes only to the database, through SQLAlchemy, so it works while the broker is down.
The publisher runs as long as the service, and relays the events in the outbox. An outbox has one
relay: with several workers, run one `reliablepub relay` instead.

Needs reliablepub with the extras fastapi and sqlalchemy, for PostgreSQL with postgres too; and
fastapi, httpx, aiosqlite and greenlet. It starts a fake broker::

    python examples/fastapi_orders.py

or uses your own broker, and your PostgreSQL::

    python examples/fastapi_orders.py amqp://guest:guest@localhost/ postgresql://app@db/shop

It prints::

    POST /orders 201 {'order': 1}
    POST /orders 402 {'detail': 'the card was declined'}
    POST /orders 201 {'order': 2}
    GET /health {'link': 'connected', 'open': 0}
    published: [{'order': 1, 'amount': 250}, {'order': 2, 'amount': 120}]
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated

import pika
from fastapi import Depends, FastAPI, HTTPException
from httpx import ASGITransport, AsyncClient
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from reliablepub import AsyncPublisher, Message, Outbox
from reliablepub.integrations.sqlalchemy import SessionOutbox, immediate_transactions
from reliablepub.integrations.starlette import lifespan, publisher_of
from reliablepub.testing import FakeBroker

EXCHANGE = "example-orders"  # deleted from the broker, with its queue, at the end


class Base(DeclarativeBase):
    """The tables."""


class Order(Base):
    """An order."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int]


class NewOrder(BaseModel):
    """The body of a request."""

    amount: int
    is_covered: bool = True


def engine_of(where: Path | str) -> AsyncEngine:
    """The engine for a SQLite file, or for the URL of a PostgreSQL database."""
    if isinstance(where, str):
        return create_async_engine(where.replace("postgresql://", "postgresql+psycopg://", 1))
    engine = create_async_engine(f"sqlite+aiosqlite:///{where}")
    immediate_transactions(engine)
    return engine


def create_app(url: str, where: Path | str) -> FastAPI:
    """The service, with a broker and a database."""
    engine = engine_of(where)
    Outbox(where).create()  # a migration does this in production, as `reliablepub outbox create`
    outbox = SessionOutbox(Outbox(where))

    @asynccontextmanager
    async def database(_app: FastAPI) -> AsyncIterator[None]:
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        yield
        await engine.dispose()

    async def session() -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine) as session:
            yield session

    # The publisher also relays events that an earlier run of the service left in the outbox.
    app = FastAPI(lifespan=lifespan(lambda: AsyncPublisher(url, outbox=where), database))

    @app.post("/orders", status_code=201)
    async def place_order(
        new: NewOrder, session: Annotated[AsyncSession, Depends(session)]
    ) -> dict[str, int]:
        async with session.begin():  # commits before the answer is sent
            order = Order(amount=new.amount)
            session.add(order)
            await session.flush()  # assigns its number
            event = {"order": order.id, "amount": order.amount}
            body = json.dumps(event).encode()
            message = Message(body, exchange=EXCHANGE, routing_key="order.created")
            await outbox.enqueue_async(message, within=session)
            if not new.is_covered:
                raise HTTPException(402, "the card was declined")  # rolls back order and event
        return {"order": event["order"]}

    @app.get("/health")
    async def health(
        publisher: Annotated[AsyncPublisher, Depends(publisher_of)],
    ) -> dict[str, str | int]:
        status = await publisher.flush(timeout_s=5)
        return {"link": status.link, "open": status.open}

    return app


async def be_a_customer(app: FastAPI) -> None:
    """Start the service, and place three orders."""
    client = AsyncClient(transport=ASGITransport(app), base_url="http://shop")
    async with app.router.lifespan_context(app), client:
        for order in ({"amount": 250}, {"amount": 9_999, "is_covered": False}, {"amount": 120}):
            answer = await client.post("/orders", json=order)
            print("POST /orders", answer.status_code, answer.json())
        print("GET /health", (await client.get("/health")).json())


def main() -> None:
    """Declare a queue for invoices, run the service, and read the queue."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        given = dict(zip(("url", "database"), sys.argv[1:], strict=False))
        url = given.get("url") or stack.enter_context(FakeBroker()).url
        channel = stack.enter_context(pika.BlockingConnection(pika.URLParameters(url))).channel()
        channel.exchange_declare(EXCHANGE, "topic", auto_delete=True)
        invoices = channel.queue_declare("", exclusive=True).method.queue
        channel.queue_bind(invoices, EXCHANGE, "order.#")
        where = given.get("database", folder / "app.db")
        asyncio.run(be_a_customer(create_app(url, where)))
        published = []
        while (body := channel.basic_get(invoices, auto_ack=True)[2]) is not None:
            published.append(json.loads(body))
        print("published:", published)


if __name__ == "__main__":
    main()
