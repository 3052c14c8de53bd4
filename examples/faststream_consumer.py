"""A FastStream consumer that deduplicates, and `AsyncPublisher` on FastStream's own connection.

reliablepub only publishes; any client can consume. A message may arrive more than once, always
under the same ``message_id``, so the consumer stores the ids it has handled, in the transaction of
its work.

Needs faststream[rabbit]; starts a fake broker::

    python examples/faststream_consumer.py

With your own broker, which drops no connection, the example publishes one message twice under one
id: ``python examples/faststream_consumer.py amqp://guest:guest@localhost/``

It prints::

    more deliveries than invoices: True
    invoices written: 20
"""

import asyncio
import sqlite3
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pika
from faststream.rabbit import RabbitBroker, RabbitMessage, RabbitQueue

from reliablepub import AsyncPublisher, Message
from reliablepub.testing import FakeBroker
from reliablepub.testing.faults import DropConnection

QUEUE = "example-invoices"


class Invoices:
    """The consumer's database."""

    def __init__(self, path: Path) -> None:
        self.deliveries = 0
        self._written = asyncio.Event()
        self._db = sqlite3.connect(path)
        self._db.execute("CREATE TABLE handled (message_id TEXT PRIMARY KEY)")
        self._db.execute("CREATE TABLE invoices (body BLOB)")

    def write(self, message_id: str, body: bytes) -> None:
        """Write an invoice, unless its message was handled before."""
        self.deliveries += 1
        with self._db:  # one transaction: both rows or none
            cursor = self._db.execute("INSERT OR IGNORE INTO handled VALUES (?)", (message_id,))
            if cursor.rowcount:
                self._db.execute("INSERT INTO invoices VALUES (?)", (body,))
        self._written.set()

    def count(self) -> int:
        """The number of invoices."""
        (count,) = self._db.execute("SELECT count(*) FROM invoices").fetchone()
        return int(count)

    async def until(self, count: int) -> None:
        """Wait until there are this many invoices."""
        while self.count() < count:
            self._written.clear()
            await self._written.wait()

    def close(self) -> None:
        """Close the database."""
        self._db.close()


async def main() -> None:
    """Publish over a connection that breaks, and consume."""
    orders = [Message(b"%d" % n, routing_key=QUEUE, message_id=f"order {n}") for n in range(20)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if len(sys.argv) > 1:
            url = sys.argv[1]
            orders.append(orders[9])
        else:
            fake = stack.enter_context(FakeBroker())
            fake.declare_queue("amq.rabbitmq.reply-to")  # RabbitMQ has it; FastStream checks
            # The connection breaks after the broker accepts the tenth message, before its confirm.
            fake.inject(DropConnection(nth=10, accepted=True))
            url = fake.url
        channel = stack.enter_context(pika.BlockingConnection(pika.URLParameters(url))).channel()
        channel.queue_declare(QUEUE, durable=True)
        stack.callback(channel.queue_delete, QUEUE)
        invoices = Invoices(folder / "invoices.db")
        broker = RabbitBroker(url, logger=None, reconnect_interval=0.1)

        @broker.subscriber(RabbitQueue(QUEUE, declare=False))
        async def handle(message: RabbitMessage) -> None:
            invoices.write(message.message_id, message.body)

        async with broker:
            await broker.start()
            connection = await broker.connect()  # aio-pika's robust one: it reconnects itself
            async with AsyncPublisher(
                connection=connection, outbox=folder / "outbox.db"
            ) as publisher:
                receipt = await publisher.publish_many(orders)
                await receipt.wait(timeout_s=30)
                async with asyncio.timeout(30):
                    await invoices.until(20)
        print("more deliveries than invoices:", invoices.deliveries > invoices.count())
        print("invoices written:", invoices.count())
        invoices.close()


if __name__ == "__main__":
    asyncio.run(main())
