"""The transactional outbox: an order and its message are stored together, or not at all.

Needs only reliablepub; starts a fake broker::

    python examples/orders_in_a_transaction.py

or uses your own: ``python examples/orders_in_a_transaction.py amqp://guest:guest@localhost/``

It prints::

    order 2 was rolled back
    waiting in the outbox: 2
    published: [1, 3]
    orders: [1, 3]
"""

import json
import sqlite3
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pika
from pika.adapters.blocking_connection import BlockingChannel

from reliablepub import Message, Outbox, Publisher
from reliablepub.testing import FakeBroker

EXCHANGE = "example-orders"  # deleted from the broker, with its queue, at the end


class CardDeclinedError(Exception):
    """The payment failed, after order and message were written."""


def place_order(db: sqlite3.Connection, outbox: Outbox, number: int, *, is_paid: bool) -> None:
    """Write an order and announce it, in one transaction."""
    with db:  # commits, or rolls back both
        db.execute("INSERT INTO orders VALUES (?)", (number,))
        body = json.dumps({"order": number}).encode()
        message = Message(body, exchange=EXCHANGE, routing_key="created")
        outbox.enqueue(message, connection=db)
        if not is_paid:
            raise CardDeclinedError


def declare_invoices(channel: BlockingChannel) -> str:
    """Declare an exchange for events of orders, and a queue for invoices."""
    channel.exchange_declare(EXCHANGE, "topic", auto_delete=True)
    queue = channel.queue_declare("", exclusive=True).method.queue
    channel.queue_bind(queue, EXCHANGE, "created")
    return queue


def arrived(channel: BlockingChannel, queue: str) -> list[int]:
    """The orders in the queue."""
    numbers = []
    while (body := channel.basic_get(queue, auto_ack=True)[2]) is not None:
        numbers.append(json.loads(body)["order"])
    return numbers


def main() -> None:
    """Place three orders, one of which fails; then relay the outbox."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = sys.argv[1] if len(sys.argv) > 1 else stack.enter_context(FakeBroker()).url
        channel = stack.enter_context(pika.BlockingConnection(pika.URLParameters(url))).channel()
        invoices = declare_invoices(channel)

        path = folder / "app.db"
        db = sqlite3.connect(path)
        db.execute("CREATE TABLE orders (number INTEGER PRIMARY KEY)")
        outbox = Outbox(path)
        place_order(db, outbox, 1, is_paid=True)
        try:
            place_order(db, outbox, 2, is_paid=False)
        except CardDeclinedError:
            print("order 2 was rolled back")
        place_order(db, outbox, 3, is_paid=True)
        print("waiting in the outbox:", outbox.status().open)

        # In production, one `reliablepub relay` serves all processes of a host.
        with Publisher(url, outbox=path) as relay:
            relay.flush(timeout_s=30)
        print("published:", arrived(channel, invoices))
        print("orders:", [row[0] for row in db.execute("SELECT number FROM orders")])
        db.close()


if __name__ == "__main__":
    main()
