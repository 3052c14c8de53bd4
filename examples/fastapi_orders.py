"""A FastAPI service: an order and its event are stored in one transaction; the event is published.

The endpoint writes to SQLite only, so it answers while the broker is away too. The publisher,
opened and closed with the service, relays what the endpoint has put into the outbox. It belongs to
one process: with several workers, run one `reliablepub relay` beside them in its place.

Run it; it needs fastapi and httpx, and brings a broker along::

    python examples/fastapi_orders.py

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
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

from fastapi import FastAPI, HTTPException
from httpx import ASGITransport, AsyncClient
from pydantic import BaseModel

from reliablepub import AsyncPublisher, Message, Outbox
from reliablepub.testing import FakeBroker


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
            message = Message(body, exchange="orders", routing_key="order.created")
            outbox.enqueue(message, connection=db)
            if not new.is_covered:
                raise HTTPException(402, "the card was declined")  # rolls back order and event
        return {"order": order}

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        status = await publisher.flush(timeout=5)
        return {"link": status.link, "open": status.open}

    return app


async def main() -> None:
    """Start the service, and be its customer."""
    with tempfile.TemporaryDirectory() as folder, FakeBroker() as broker:
        broker.declare_exchange("orders", "topic")
        broker.declare_queue("invoices")
        broker.bind("invoices", "orders", "order.#")
        app = create_app(broker.url, Path(folder) / "app.db")
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
        print("published:", [json.loads(message.body) for message in broker.messages("invoices")])


if __name__ == "__main__":
    asyncio.run(main())
