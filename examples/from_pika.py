"""Migrating from plain pika: the same ten orders before and after, through the same bad minute.

One order goes to a key that nothing is bound to, and the broker drops the connection with the
seventh. Run it with nothing installed but reliablepub; it brings the broker along::

    python examples/from_pika.py

It prints::

    before: StreamLostError; 5 of 10 in the queue, and nothing says which
    after: 9 of 10 in the queue, and 1 parked: 312 NO_ROUTE
"""

import tempfile
from pathlib import Path

import pika
import pika.exceptions

from reliablepub import Outbox, Publisher
from reliablepub.testing import FakeBroker, faults

ORDERS = [(f"order {n}".encode(), "invoices") for n in range(10)]
ORDERS[2] = (b"order 2", "nobody")


def before(url: str) -> str:
    """The way of most tutorials: no confirm, no mandatory, and an exception on the way."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    try:
        for body, routing_key in ORDERS:
            channel.basic_publish("", routing_key, body, pika.BasicProperties(delivery_mode=2))
            connection.process_data_events()
        connection.close()
    except pika.exceptions.AMQPError as error:
        return type(error).__name__  # and now?
    return "no error"


def after(url: str, outbox: Path) -> None:
    """The same arguments; stored when `publish` returns, and published whatever happens."""
    with Publisher(url, outbox=outbox) as publisher:
        for body, routing_key in ORDERS:
            publisher.publish(body, routing_key=routing_key)


def orders_in(broker: FakeBroker) -> int:
    """How many different ones have arrived."""
    return len({message.body for message in broker.messages("invoices")})


def main() -> None:
    """Run both against brokers that misbehave in the same way."""
    with FakeBroker() as broker:
        broker.declare_queue("invoices")
        broker.inject(faults.DropConnection(nth=7))
        error = before(broker.url)
        print(f"before: {error}; {orders_in(broker)} of 10 in the queue, and nothing says which")
    with tempfile.TemporaryDirectory() as folder, FakeBroker() as broker:
        broker.declare_queue("invoices")
        broker.inject(faults.DropConnection(nth=7))
        outbox = Path(folder) / "outbox.db"
        after(broker.url, outbox)
        [parked] = Outbox(outbox).parked()
        print(f"after: {orders_in(broker)} of 10 in the queue, and 1 parked:", end=" ")
        print(f"{parked.reply_code} {parked.reply_text}")


if __name__ == "__main__":
    main()
