"""Tests of the service in fastapi_orders.py, to copy: ``pytest examples/test_fastapi_orders.py``.

The fixture `fake_broker` comes with reliablepub. It is a broker in this process, so these tests
need no RabbitMQ, and read its queues.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fastapi_orders import EXCHANGE, create_app
from httpx import ASGITransport, AsyncClient

from reliablepub.testing import FakeBroker


@pytest.fixture
def broker(fake_broker: FakeBroker) -> FakeBroker:
    """A broker with a queue for the events of the service."""
    fake_broker.declare_exchange(EXCHANGE, "topic")
    fake_broker.declare_queue("invoices")
    fake_broker.bind("invoices", EXCHANGE, "order.#")
    return fake_broker


@asynccontextmanager
async def service(broker: FakeBroker, folder: Path) -> AsyncIterator[AsyncClient]:
    """The service with its relay, and a client."""
    app = create_app(broker.url, folder / "app.db")
    client = AsyncClient(transport=ASGITransport(app), base_url="http://shop")
    async with app.router.lifespan_context(app), client:
        yield client


def announced(broker: FakeBroker) -> list[int]:
    """The orders in the queue."""
    return [json.loads(message.body)["order"] for message in broker.messages("invoices")]


def test_an_order_is_announced(broker: FakeBroker, tmp_path: Path) -> None:
    async def main() -> None:
        async with service(broker, tmp_path) as client:
            answer = await client.post("/orders", json={"amount": 250})
            assert (answer.status_code, answer.json()) == (201, {"order": 1})
            assert (await client.get("/health")).json() == {"link": "connected", "open": 0}

    asyncio.run(main())
    assert announced(broker) == [1]


def test_an_order_that_is_declined_is_not(broker: FakeBroker, tmp_path: Path) -> None:
    async def main() -> None:
        async with service(broker, tmp_path) as client:
            declined = {"amount": 9_999, "is_covered": False}
            assert (await client.post("/orders", json=declined)).status_code == 402
            answer = await client.post("/orders", json={"amount": 120})
            assert answer.json() == {"order": 1}  # the rollback freed the number
            assert (await client.get("/health")).json()["open"] == 0

    asyncio.run(main())
    assert announced(broker) == [1]


def test_an_order_is_placed_while_the_broker_is_down(broker: FakeBroker, tmp_path: Path) -> None:
    async def main() -> None:
        async with service(broker, tmp_path) as client:
            broker.stop()
            assert (await client.post("/orders", json={"amount": 250})).status_code == 201
            broker.start()
            await asyncio.to_thread(broker.wait_for, lambda: announced(broker) == [1], 30)

    asyncio.run(main())
