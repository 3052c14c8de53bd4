"""A FastAPI service: an order and its event are stored in one transaction; the event is published.

The endpoint writes to SQLite only, so it answers while the broker is away too. The publisher,
opened and closed with the service, relays what the endpoint has put into the outbox. It belongs to
one process: with several workers, run one `reliablepub relay` beside them in its place.

Run it; it needs fastapi and httpx, and brings a broker along::

    python examples/fastapi_orders.py

or uses your own: ``python examples/fastapi_orders.py amqp://guest:guest@localhost/``

It prints::

    POST /orders 201 {'order': 1}
    POST /orders 402 {'detail': 'the card was declined'}
    POST /orders 201 {'order': 2}
    GET /health {'link': 'connected', 'open': 0}
    published: [{'order': 1, 'amount': 250}, {'order': 2, 'amount': 120}]
"""

import asyncio
import json
import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path

import pika
from fastapi import FastAPI, HTTPException
from httpx import ASGITransport, AsyncClient
from pydantic import BaseModel

from reliablepub import AsyncPublisher, Message, Outbox
from reliablepub.testing import FakeBroker

EXCHANGE = "example-orders"  # gone from your broker when the example ends, as is the queue


class NewOrder(BaseModel):
    """What a customer sends."""

    amount: int
    is_covered: bool = True


def create_app(url: str, database: Path) -> FastAPI:
    """The service, on its database and its broker."""
    publisher = AsyncPublisher(url, outbox=database)
    outbox = Outbox(database)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        with closing(sqlite3.connect(database)) as db:
            db.execute("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, amount INTEGER)")
        async with publisher:  # relays until the service stops, and what it left behind last time
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/orders", status_code=201)
    def place_order(new: NewOrder) -> dict[str, int]:  # not async: FastAPI gives SQLite a thread
        with closing(sqlite3.connect(database, timeout=10)) as db, db:  # one transaction
            order = db.execute("INSERT INTO orders (amount) VALUES (?)", (new.amount,)).lastrowid
            assert order is not None
            body = json.dumps({"order": order, "amount": new.amount}).encode()
            message = Message(body, exchange=EXCHANGE, routing_key="order.created")
            outbox.enqueue(message, connection=db)
            if not new.is_covered:
                raise HTTPException(402, "the card was declined")  # rolls back order and event
        return {"order": order}

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        status = await publisher.flush(timeout=5)
        return {"link": status.link, "open": status.open}

    return app


async def be_a_customer(app: FastAPI) -> None:
    """Start the service, and order three times."""
    client = AsyncClient(transport=ASGITransport(app), base_url="http://shop")
    async with app.router.lifespan_context(app), client:
        for order in (
            {"amount": 250},
            {"amount": 9_999, "is_covered": False},
            {"amount": 120},
        ):
            answer = await client.post("/orders", json=order)
            print("POST /orders", answer.status_code, answer.json())
        print("GET /health", (await client.get("/health")).json())


def main() -> None:
    """Have a queue for invoices, let the service work, and look into the queue."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = sys.argv[1] if len(sys.argv) > 1 else stack.enter_context(FakeBroker()).url
        channel = stack.enter_context(pika.BlockingConnection(pika.URLParameters(url))).channel()
        channel.exchange_declare(EXCHANGE, "topic", auto_delete=True)
        invoices = channel.queue_declare("", exclusive=True).method.queue
        channel.queue_bind(invoices, EXCHANGE, "order.#")
        asyncio.run(be_a_customer(create_app(url, folder / "app.db")))
        published = []
        while (body := channel.basic_get(invoices, auto_ack=True)[2]) is not None:
            published.append(json.loads(body))
        print("published:", published)


if __name__ == "__main__":
    main()
